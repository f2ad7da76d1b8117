"""Looking at, checking, deleting from and cleaning a spill directory (D1-D6, S2, S3), on real files.

Living directories are a pod in this process or one in another; dead ones were left by a stop or by SIGKILL.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.pod import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    EIGHT_EXTENTS,
    Pod,
    block_keys,
    hybrid_begin,
    hybrid_store,
    prompt,
)

from parkade_cache.errors import DirectoryInUseError, SpillError
from parkade_cache.ids import BlockKey, ConversationId, PackId
from parkade_cache.spill import FileSystem, GenerationLife, Identity, SpillConfig, SpillStore, inspection
from parkade_cache.spill.check import CheckReport, check_directory
from parkade_cache.spill.inspection import (
    IdentitySurvey,
    IdentityView,
    IndexState,
    PackFate,
    ReadOnlyFileSystem,
    Standing,
    Survey,
    survey_directory,
)
from parkade_cache.spill.testing import (
    Chain,
    FaultyFileSystem,
    SimulatedCrash,
    publish_chain,
    read_back,
    reserve_chain,
    some_identity,
    some_payload,
    write_ranks,
)
from parkade_cache.spill.upkeep import (
    Outcome,
    Plan,
    carry_out,
    locked,
    plan_all,
    plan_cleaning,
    plan_conversations,
    plan_identity,
)

MORE = list(range(9 * BLOCK_TOKENS))
PADDED_BYTES = 8192
"""What a block of the store's own helpers takes: 5000 bytes on two pages."""

Life = Callable[..., Pod]
Open = Callable[..., SpillStore]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spill"


@pytest.fixture
def life(root: Path) -> Iterator[Life]:
    """Starts one life of the pod after the other over the same folder."""
    lives: list[Pod] = []

    def begin(**settings: Any) -> Pod:
        lives.append(Pod(folder=root, **{"parked_max": EIGHT_EXTENTS} | settings))
        return lives[-1]

    yield begin
    for pod in lives:
        pod.__exit__()


@pytest.fixture
def opened(root: Path) -> Iterator[Open]:
    """Opens stores on the directory, and closes what a test left open."""
    stores: list[SpillStore] = []

    def begin(
        *, identity: Identity | None = None, fs: FileSystem | None = None, ranks: int = 1, root: Path = root
    ) -> SpillStore:
        config = SpillConfig(
            root=root,
            capacity_bytes=1 << 30,
            min_free_bytes=0,
            write_budget_bytes_per_hour=None,
            block_bytes=5000,
            ranks=ranks,
        )
        stores.append(SpillStore.open(config, identity or some_identity(), fs=fs))
        return stores[-1]

    yield begin
    for store in stores:
        store.close()


@pytest.fixture
def fs() -> FileSystem:
    return FileSystem()


def state_of(root: Path) -> dict[str, object]:
    """Everything about every file that a look could change, but for the time of last access."""
    return {str(path.relative_to(root)): _state(path) for path in (root, *root.rglob("*"))}


def _state(path: Path) -> object:
    found = path.lstat()
    content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
    return found.st_ino, found.st_mode, found.st_size, found.st_blocks, found.st_mtime_ns, found.st_ctime_ns, content


def own(survey: Survey) -> IdentitySurvey:
    (found,) = [one for one in survey.identities if one.standing is Standing.OWN]
    return found


def listed(survey: Survey) -> dict[str, tuple[int, int]]:
    """Tokens and blocks of every conversation under the own identity."""
    conversations = own(survey).holdings.conversations
    return {name: (holding.tokens, len(holding.keys)) for name, holding in conversations.items()}


def known_to(pod: Pod) -> dict[str, tuple[int, int]]:
    """The same as a pod tells it."""
    described = [pod.described(str(conversation.id)) for conversation in pod.state.conversations]
    return {found["id"]: (found["tokens"], found["disk_blocks"]) for found in described if found["disk_blocks"]}


def write_out(pod: Pod, name: str, tokens: Sequence[int]) -> None:
    pod.turn(name, tokens)
    pod.settle()
    pod.evict(name)


def do(root: Path, make_plan: Callable[[Survey], Plan], *, fs: FileSystem | None = None) -> Outcome:
    with locked(root):
        survey = survey_directory(root, locked=True)
        return carry_out(make_plan(survey), survey, fs=fs)


def remove(root: Path, *conversations: str, fs: FileSystem | None = None) -> Outcome:
    return do(root, lambda survey: plan_conversations(survey, conversations), fs=fs)


def damage(report: CheckReport) -> list[str]:
    return [finding.what for finding in report.damage]


def only_pack(root: Path) -> Path:
    (path,) = root.rglob("*.pack")
    return path


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def copy_to_quarantine(root: Path, pack: Path, fingerprint: str) -> Path:
    folder = root / "quarantine"
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(pack, folder / f"{pack.stem}-rank-0-{fingerprint}.pack"))


# -- looking -----------------------------------------------------------------------------------------------------------


def test_a_survey_tells_conversations_and_what_they_share(life: Life, root: Path) -> None:
    pod = life()
    write_out(pod, "a", prompt("a", 15, shared=4))
    write_out(pod, "b", prompt("b", 10, shared=4))
    pod.stop()
    one = own(survey_directory(root))
    assert listed(survey_directory(root)) == {"a": (60, 15), "b": (40, 10)}
    assert one.identity is not None
    assert one.identity.model == "test"
    assert (len(one.packs), one.ranks, one.index, one.lost, one.temporaries) == (2, 1, IndexState.READ, (), ())
    b = one.holdings.conversations["b"]
    assert one.holdings.bytes_of(b.keys) == 10 * BLOCK_BYTES
    assert len(one.holdings.packs_of(b.keys)) == 2
    assert sorted(one.holdings.sharers().values()) == [1] * 17 + [2] * 4


@pytest.mark.parametrize("seed", range(8))
def test_a_survey_finds_exactly_what_the_next_start_finds(life: Life, root: Path, seed: int) -> None:
    """S2: whose blocks are whose is told offline, without the ledger that a running pod has."""
    chosen = random.Random(seed)
    pod = life()
    grown = {name: prompt(name, chosen.randint(3, 20), shared=chosen.choice((0, 2, 5))) for name in "abcde"}
    for turn in range(20):
        name = chosen.choice("abcde")
        if chosen.random() < 0.2:
            grown[name] = [*grown[chosen.choice("abcde")], *prompt(f"{name}{turn}", 4)]
        grown[name] = [*grown[name], *prompt(f"{name}/{turn}", chosen.randint(1, 4))]
        write_out(pod, name, grown[name])
        if chosen.random() < 0.3:
            write_out(pod, name, prompt(f"title{turn}", 6, shared=2))
        if chosen.random() < 0.2:
            pod.owner.forget(ConversationId(chosen.choice("abcde")))
    pod.stop()
    before = listed(survey_directory(root))
    pod = life()
    assert before == known_to(pod)


@pytest.mark.parametrize("look", [survey_directory, lambda root: check_directory(root, read_data=True)])
@pytest.mark.parametrize("state", ["living", "stopped", "killed", "index missing", "index damaged", "odd files"])
def test_looking_changes_nothing(life: Life, root: Path, state: str, look: Callable[[Path], object]) -> None:
    """Not one byte, name or time: also no log or shared-memory file beside the index."""
    pod = life()
    for name in "ab":
        write_out(pod, name, prompt(name, 15, shared=4))
    if state != "living":
        (pod.kill if state == "killed" else pod.stop)()
    index = next(root.glob("identities/*/index.sqlite"))
    if state == "index missing":
        index.unlink()
    if state == "index damaged":
        index.write_bytes(b"not SQLite" * 1000)
    if state == "odd files":
        (root / "strange").mkdir()
        (root / "identities" / "strange").write_bytes(b"?")
        (root / "strange" / "link").symlink_to(index)
    before = state_of(root)
    look(root)
    assert state_of(root) == before


CHILD = """
import sys
from pathlib import Path
from parkade_cache.spill import FileSystem, SpillConfig, SpillStore
from parkade_cache.spill.testing import publish_chain, some_identity
config = SpillConfig(root=Path(sys.argv[1]), capacity_bytes=1 << 30, min_free_bytes=0,
                     write_budget_bytes_per_hour=None, block_bytes=5000, ranks=1)
store = SpillStore.open(config, some_identity())
fs = FileSystem()
for number in range(5):
    publish_chain(fs, store, [f"{number}a", f"{number}b", f"{number}c"], conversation=f"conversation-{number}")
pack = publish_chain(fs, store, ["x", "y"], conversation="x")[0].header.pack_id
store.drop(pack, [1])
print(store.fingerprint, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Has the directory, with everything it published still in the index's log; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            assert len(child.stdout.readline().strip()) == 16
            yield child
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()


def test_the_log_of_a_living_index_is_read_too(root: Path) -> None:
    """What the living process committed and has not yet moved into the database is seen, and its dead marks as well."""
    # The tip of x is dead: the block before it belongs to the conversation that wrote it.
    expected = {f"conversation-{number}": (48, 3) for number in range(5)} | {"x": (16, 1)}
    with another_process(root) as child:
        before = state_of(root)
        survey = survey_directory(root)
        assert state_of(root) == before
        assert survey.holder is not None
        assert survey.holder.pid == child.pid
        assert str(survey.holder).startswith(f"process {child.pid} on host ")
        assert listed(survey) == expected
        assert own(survey).index is IndexState.READ
        assert check_directory(root, read_data=True).findings == ()
    # SIGKILL leaves the log behind; the directory is dead now, and told the same.
    assert (next(root.glob("identities/*")) / "index.sqlite-wal").stat().st_size > 0
    before = state_of(root)
    survey = survey_directory(root)
    assert survey.holder is None
    assert listed(survey) == expected
    assert state_of(root) == before


class Racing(ReadOnlyFileSystem):
    """Lets the owner write between two reads of a file."""

    def __init__(self, file: Path, race: Callable[[], None]) -> None:
        self._file = file
        self._race: Callable[[], None] | None = race
        self._fds: set[int] = set()

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if path == self._file:
            self._fds.add(fd)
        return fd

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        nbytes = super().preadv(fd, views, offset)
        race, self._race = (None, self._race) if fd not in self._fds or offset else (self._race, None)
        if race is not None:
            race()
        return nbytes


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
@pytest.mark.parametrize("emptied", [True, False])
def test_an_index_that_changes_while_it_is_copied_is_copied_in_one_state(
    opened: Open, fs: FileSystem, root: Path, name: str, emptied: bool
) -> None:
    """The log is moved into the database and begun anew in the middle of the copy, or only grows."""
    store = opened()
    for number in range(3):
        publish_chain(fs, store, [f"{number}"], conversation=f"{number}")

    def race() -> None:
        if emptied:
            with contextlib.closing(sqlite3.connect(store.identity_folder / "index.sqlite")) as db:
                assert db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0] == 0
        for number in range(3, 6):
            publish_chain(fs, store, [f"{number}"], conversation=f"{number}")

    survey = survey_directory(root, fs=Racing(store.identity_folder / name, race))
    assert own(survey).index is IndexState.READ
    assert len(listed(survey)) == 6, "those that came meanwhile are found too, in the index or by their files"
    assert {pack.conversation for pack in own(survey).packs if pack.indexed} >= {"0", "1", "2"}


def test_an_index_that_never_holds_still_is_done_without(opened: Open, fs: FileSystem, root: Path) -> None:
    store = opened()
    publish_chain(fs, store, ["a"])

    class Restless(ReadOnlyFileSystem):
        heads = 0

        def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            nbytes = super().preadv(fd, views, offset)
            if len(views[0]) == inspection._LOG_HEAD_BYTES:
                self.heads += 1
                views[0][0] = self.heads
            return nbytes

    one = own(survey_directory(root, fs=Restless()))
    assert (one.index, listed(survey_directory(root))) == (IndexState.NOT_COPIED, {"conversation": (16, 1)})
    assert [pack.indexed for pack in one.packs] == [False]
    with pytest.raises(SpillError, match="cannot be checked"):
        check_directory(root, read_data=False, fs=Restless())


def break_a_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 : len(data) : 7] = b"\xaa" * len(data[4096 : len(data) : 7])
    path.write_bytes(data)


BAD_INDEXES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "another kind of file": lambda path: path.write_bytes(b"x" * 8192),
    "cut short": lambda path: os.truncate(path, 5000),
    "pages overwritten": break_a_page,
}


@pytest.mark.parametrize("bad", list(BAD_INDEXES))
def test_without_a_usable_index_the_packs_are_read(life: Life, root: Path, bad: str) -> None:
    pod = life()
    for name in "ab":
        write_out(pod, name, prompt(name, 15, shared=4))
    pod.stop()
    before = listed(survey_directory(root))
    BAD_INDEXES[bad](next(root.glob("identities/*/index.sqlite")))
    survey = survey_directory(root)
    assert own(survey).index in {IndexState.MISSING, IndexState.DAMAGED}
    assert own(survey).index_reason
    assert listed(survey) == before
    report = check_directory(root, read_data=True)
    assert len(report.damage) == 1
    assert report.damage[0].next_start.startswith("rebuilt from the packs")


def test_the_own_identity_is_the_one_that_is_in_use_or_was_last(life: Life, root: Path) -> None:
    """D1: without the pod nobody says whose a directory is."""
    pod = life(model="old")
    write_out(pod, "a", prompt("a", 5))
    pod.stop()
    assert [one.standing for one in survey_directory(root).identities] == [Standing.OWN]
    pod = life(model="new")
    survey = survey_directory(root)
    assert {one.identity.model: one.standing for one in survey.identities if one.identity} == {
        "old": Standing.FOREIGN,
        "new": Standing.OWN,
    }
    pod.stop()
    pod = life(model="old")
    assert own(survey_directory(root)).fingerprint == pod.store.fingerprint if pod.store else False


def test_weights_that_went_with_their_process_leave_an_outdated_identity(
    opened: Open, fs: FileSystem, root: Path
) -> None:
    """Trap 14: no start will find it, though a living pod still does."""
    store = opened()
    store.new_generation(life=GenerationLife.UNTIL_RESTART)
    publish_chain(fs, store, ["a"])
    assert [one.standing for one in survey_directory(root).identities] == [Standing.OWN]
    store.close()
    assert [one.standing for one in survey_directory(root).identities] == [Standing.OUTDATED]


def test_recurrent_state_is_held_by_its_deepest_and_its_root_alone(life: Life, root: Path) -> None:
    """D7: superseded states are no gap in a chain."""
    hybrid = {"groups": 2, "recurrent_groups": frozenset({1})}
    pod = life(**hybrid)
    for name, blocks, states in (("a", 10, (1, 3, 5, 8)), ("a", 20, (15, 18)), ("b", 10, (1, 4))):
        tokens = prompt(name, blocks, shared=1)
        keys = [BlockKey(key[:-4] + (1).to_bytes(4, "big")) for key in block_keys(tokens)]
        running = hybrid_begin(pod, name, tokens, keys)
        running.await_gate()
        with pod.state.lock:
            pod.cache.matched(running.turn, engine_tokens=0, cached_tokens=0)
        hybrid_store(pod, running, keys, states)
        running.finish()
        pod.settle()
        pod.evict(name)
    pod.stop()
    before = survey_directory(root)
    assert all(holding.complete for holding in own(before).holdings.conversations.values())
    pod = life(**hybrid)
    assert known_to(pod) == listed(before)
    pod.stop()
    remove(root, "a")
    assert listed(survey_directory(root)) == {"b": listed(before)["b"]}
    assert known_to(life(**hybrid)) == {"b": listed(before)["b"]}


def test_what_is_set_aside_left_over_or_strange_is_counted_and_told(opened: Open, fs: FileSystem, root: Path) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a"])
        loose = reserve_chain(store, Chain(["b"], conversation="loose"))
        write_ranks(fs, store, loose, Chain(["b"], conversation="loose"))
        (store.rank_folder(0) / "tmp" / f"{'0' * 32}.tmp").write_bytes(b"half")
        copy_to_quarantine(root, store.path_of(loose.pack_id, 0), store.fingerprint)
    (root / "receipts").mkdir()
    (root / "receipts" / "receipts.jsonl").write_bytes(b"{}" * 3000)
    (root / "id.key").write_bytes(b"k" * 64)
    (root / "mine").write_bytes(b"m" * 5000)
    survey = survey_directory(root)
    one = own(survey)
    assert [(pack.conversation, pack.indexed) for pack in one.packs] == [("loose", False), ("conversation", True)]
    assert [file.path.name for file in one.temporaries] == [f"{'0' * 32}.tmp"]
    assert [file.conversation for file in survey.quarantine] == ["loose"]
    assert survey.receipts_bytes >= 6000
    assert survey.other_bytes == 8192
    assert check_directory(root, read_data=True).damage == ()
    assert len(check_directory(root, read_data=True).leftovers) == 3


def test_every_operation_of_the_file_system_either_reads_or_is_refused() -> None:
    looking = ReadOnlyFileSystem()
    operations = {name for name in vars(FileSystem) if not name.startswith("_")}
    assert operations > inspection.READING
    for name in operations - inspection.READING:
        with pytest.raises(SpillError, match="never changes"):
            getattr(looking, name)()
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, os.O_RDONLY | os.O_TRUNC):
        with pytest.raises(SpillError, match="never changes"):
            looking.open(Path("/nowhere"), flags)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: None, "there is no directory"),
        (lambda root: root.write_bytes(b""), "reading spill directory"),
        (lambda root: root.mkdir(), "is not a spill directory"),
        (lambda root: (root / "identities").mkdir(parents=True) or (root / "lock").symlink_to("/etc/passwd"), "lock"),
        (lambda root: root.mkdir() or (root / "identities").symlink_to("/etc"), "not a folder of this user"),
    ],
)
def test_what_is_no_spill_directory_is_refused_in_one_line(root: Path, make: Callable[[Path], Any], said: str) -> None:
    make(root)
    for look in (survey_directory, lambda root: check_directory(root, read_data=False)):
        with pytest.raises(SpillError, match=said) as error:
            look(root)
        assert "\n" not in str(error.value)


def test_another_users_directory_is_refused(opened: Open, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D5."""
    opened().close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SpillError, match=r"belongs to user .* run this as that user"):
        survey_directory(root)


# -- checking ----------------------------------------------------------------------------------------------------------


def test_a_healthy_directory_has_nothing_to_report(life: Life, root: Path) -> None:
    pod = life(ranks=2)
    for name in "ab":
        write_out(pod, name, prompt(name, 15, shared=4))
    pod.stop()
    told: list[tuple[int, int]] = []
    report = check_directory(root, read_data=True, progress=lambda done, total: told.append((done, total)))
    assert report.findings == ()
    assert (report.packs, report.blocks, report.read_bytes) == (2, 26, 2 * 26 * BLOCK_BYTES)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] > report.read_bytes
    assert check_directory(root, read_data=False).read_bytes == 0


def test_a_streamed_pack_is_as_good_as_one_that_was_written(life: Life, root: Path) -> None:
    """W9: with no room in RAM."""
    pod = life(parked_max=0)
    pod.turn("a", prompt("a", 15))
    pod.settle()
    pod.stop()
    assert listed(survey_directory(root)) == {"a": (60, 15)}
    assert check_directory(root, read_data=True).findings == ()


def test_the_row_of_a_streamed_pack_has_the_pages_of_its_file(life: Life, root: Path) -> None:
    """``docs/formats/index.md``: the pages are kept verbatim."""
    pod = life(parked_max=0)
    pod.turn("a", prompt("a", 15))
    pod.settle()
    pod.stop()
    with IdentityView(ReadOnlyFileSystem(), root, own(survey_directory(root)).fingerprint) as view:
        (pack_id,) = view.all_pack_ids()
        row = view.row(pack_id)
        assert row is not None
        assert row.infos == view.shelf.read_infos(pack_id)


def test_a_flipped_byte_of_a_block_is_found_when_the_data_is_read(opened: Open, fs: FileSystem, root: Path) -> None:
    """D4."""
    with opened() as store:
        publish_chain(fs, store, ["a", "b", "c"])
    flip(only_pack(root), 4096 + PADDED_BYTES + 17)
    assert check_directory(root, read_data=False).findings == ()
    (found,) = check_directory(root, read_data=True).damage
    assert (found.blocks, found.path, found.pack) == (1, only_pack(root), only_pack(root).stem)
    assert "quarantine" in found.next_start


def test_a_flipped_byte_of_a_page_is_found_without_reading_data(opened: Open, fs: FileSystem, root: Path) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a", "b"])
    pack = only_pack(root)
    for offset in (100, pack.stat().st_size - 4096 - 10, pack.stat().st_size - 100):
        flip(pack, offset)
        (found,) = check_directory(root, read_data=False).damage
        assert found.next_start == "served by the index's copy; if that is lost, quarantined"
        flip(pack, offset)
    assert check_directory(root, read_data=False).findings == ()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def link(path: Path) -> None:
    aside = path.with_suffix(".aside")
    path.rename(aside)
    path.symlink_to(aside)


LOSSES: dict[str, tuple[Callable[[Path], object], PackFate, str]] = {
    "truncated": (cut, PackFate.DAMAGED, "goes to quarantine"),
    "gone": (Path.unlink, PackFate.MISSING, "forgotten"),
    "a link": (link, PackFate.UNSAFE, "left alone"),
}


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_pack_that_the_next_start_will_not_serve_is_reported_with_what_becomes_of_it(
    opened: Open, fs: FileSystem, root: Path, loss: str, indexed: bool
) -> None:
    """D3-D5: and that does become of it."""
    spoil, fate, said = LOSSES[loss]
    with opened(ranks=2) as store:
        publish_chain(fs, store, ["a", "b"], conversation="good")
        pack_id = publish_chain(fs, store, ["c", "d"], conversation="bad")[0].header.pack_id
        spoil(store.path_of(pack_id, 1))
    if not indexed:
        next(root.glob("identities/*/index.sqlite")).unlink()
        if fate is PackFate.MISSING:
            fate, said = PackFate.INCOMPLETE, "removed"
    survey = survey_directory(root)
    assert [(pack.pack_id, pack.fate, pack.conversation) for pack in own(survey).lost] == [(pack_id, fate, "bad")]
    assert listed(survey) == {"good": (32, 2)}
    report = check_directory(root, read_data=True)
    (found,) = [finding for finding in report.findings if finding.pack]
    assert said in found.next_start
    assert found.damage == (fate is not PackFate.INCOMPLETE)
    store = opened(ranks=2)
    assert [pack.info.header.conversation for pack in store.recover()] == ["good"]
    assert len(list((root / "quarantine").glob("*"))) == (2 if fate is PackFate.DAMAGED else 0)
    rest = store.path_of(pack_id, 0).exists()
    assert rest == (fate is PackFate.UNSAFE and not indexed)


def test_a_damaged_row_costs_one_look_into_its_pack_and_is_reported(opened: Open, fs: FileSystem, root: Path) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a", "b"], conversation="a")
    with contextlib.closing(sqlite3.connect(next(root.glob("identities/*/index.sqlite")))) as db, db:
        db.execute("UPDATE pages SET footer = zeroblob(length(footer))")
    assert listed(survey_directory(root)) == {"a": (32, 2)}
    report = check_directory(root, read_data=True)
    assert [finding.next_start for finding in report.damage] == ["the row is made again from the pack"]


def test_a_hole_that_no_dead_mark_explains_is_reported(opened: Open, fs: FileSystem, root: Path) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a", "b", "c"])
    fd = os.open(only_pack(root), os.O_WRONLY)
    assert fs.punch_hole(fd, 4096, PADDED_BYTES)
    os.close(fd)
    (found,) = check_directory(root, read_data=False).damage
    assert (found.blocks, "holes" in found.what) == (1, True)
    assert len(check_directory(root, read_data=True).damage) == 1


def test_a_damaged_count_of_generations_is_reported(opened: Open, fs: FileSystem, root: Path) -> None:
    """Trap 14: nothing of the identity would be found again."""
    with opened() as store:
        publish_chain(fs, store, ["a"])
        (root / f"{store.fingerprint}.generation").write_bytes(b"{")
    (found,) = check_directory(root, read_data=False).damage
    assert "new generation" in found.next_start
    assert [one.standing for one in survey_directory(root).identities] == [Standing.OUTDATED]
    assert list(opened().recover()) == []


@pytest.mark.parametrize("name", ["index.sqlite", "identity.json"])
def test_a_link_that_keeps_every_pod_from_starting_is_reported(
    opened: Open, fs: FileSystem, root: Path, name: str, tmp_path: Path
) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a"])
        path = store.identity_folder / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    assert listed(survey_directory(root)) == {"conversation": (16, 1)}
    (found,) = check_directory(root, read_data=False).damage
    assert found.next_start == "no pod starts while it is there: remove it"
    with pytest.raises(SpillError):
        opened()


def test_a_damaged_description_is_reported_and_written_anew(opened: Open, fs: FileSystem, root: Path) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a"])
        (store.identity_folder / "identity.json").write_bytes(b"{}")
    assert own(survey_directory(root)).identity is None
    assert [finding.next_start for finding in check_directory(root, read_data=False).damage] == ["written anew"]
    opened().close()
    assert check_directory(root, read_data=False).findings == ()


def test_what_a_living_pod_drops_while_it_is_checked_is_no_damage(opened: Open, fs: FileSystem, root: Path) -> None:
    """A block that became a hole, and a pack that went, after the index was copied."""
    store = opened()
    half = publish_chain(fs, store, ["a", "b"], conversation="half")[0].header.pack_id
    whole = publish_chain(fs, store, ["c"], conversation="whole")[0].header.pack_id
    bad = publish_chain(fs, store, ["d"], conversation="bad")[0].header.pack_id
    flip(store.path_of(bad, 0), 5000)
    dropped: list[int] = []

    def progress(_done: int, _total: int) -> None:
        if not dropped:
            dropped.append(store.drop_many({half: [0], whole: [0]}))

    report = check_directory(root, read_data=True, progress=progress)
    assert dropped == [PADDED_BYTES + 4 * 4096 + PADDED_BYTES - 4096]
    assert [finding.pack for finding in report.damage] == [bad]


# -- deleting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("index", ["whole", "lost"])
def test_a_removed_conversation_misses_and_one_that_shares_its_prefix_is_restored_in_full(
    life: Life, root: Path, index: str, ranks: int
) -> None:
    """D6, case 33: the shared prefix lies in the pack of the conversation that goes."""
    pod = life(ranks=ranks)
    write_out(pod, "a", prompt("a", 15, shared=4))
    write_out(pod, "b", prompt("b", 15, shared=4))
    pod.stop()
    if index == "lost":
        next(root.glob("identities/*/index.sqlite")).unlink()
    plan = plan_conversations(survey_directory(root), ["a"])
    (step,) = plan.steps
    assert (step.blocks, step.kept_blocks, step.nbytes) == (11, 4, 11 * BLOCK_BYTES * ranks)
    outcome = remove(root, "a")
    assert outcome.left_alone == ()
    assert listed(survey_directory(root)) == {"b": (60, 15)}
    assert check_directory(root, read_data=True).damage == ()
    pod = life(ranks=ranks)
    assert known_to(pod) == {"b": (60, 15)}
    assert pod.turn("b", [*prompt("b", 15, shared=4), *MORE]).receipt.reused_disk_tokens == 15 * BLOCK_TOKENS
    assert pod.turn("a", [*prompt("a", 15, shared=4), *MORE]).reused == 4 * BLOCK_TOKENS
    pod.settle()
    pod.check()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_goes_the_others_keep_every_block(life: Life, root: Path, seed: int) -> None:
    chosen = random.Random(seed)
    pod = life()
    grown = {name: prompt(name, chosen.randint(3, 15), shared=chosen.choice((0, 2, 5))) for name in "abcdef"}
    for turn in range(15):
        name, other = chosen.choice("abcdef"), chosen.choice("abcdef")
        if chosen.random() < 0.4:
            grown[name] = list(grown[other])
        grown[name] = [*grown[name], *prompt(f"{name}/{turn}", chosen.randint(1, 4))]
        write_out(pod, name, grown[name])
    pod.stop()
    before = listed(survey_directory(root))
    going = chosen.sample(sorted(before), k=chosen.randint(1, len(before)))
    plan = plan_conversations(survey_directory(root), going)
    kept = {name: found for name, found in before.items() if name not in going}
    with locked(root):
        survey = survey_directory(root, locked=True)
        assert plan_conversations(survey, going) == plan
        carry_out(plan, survey)
    after = listed(survey_directory(root))
    assert {name: after[name] for name in kept} == kept
    pod = life()
    assert {name: known_to(pod)[name] for name in kept} == kept
    for name in kept:
        assert pod.turn(name, [*grown[name], *MORE]).reused == len(grown[name])
    pod.settle()
    pod.check()


def test_a_conversation_that_shares_all_it_has_keeps_its_blocks_and_the_plan_says_so(life: Life, root: Path) -> None:
    pod = life()
    write_out(pod, "a", prompt("a", 10))
    write_out(pod, "b", [*prompt("a", 10), *prompt("b", 5)])
    pod.stop()
    (step,) = plan_conversations(survey_directory(root), ["a"]).steps
    assert (step.blocks, step.kept_blocks, step.nbytes) == (0, 10, 0)
    remove(root, "a")
    assert listed(survey_directory(root))["b"] == (60, 15)
    remove(root, "b", "a")
    assert listed(survey_directory(root)) == {}
    assert list(root.rglob("*.pack")) == []


def test_a_conversation_goes_from_everywhere(opened: Open, fs: FileSystem, root: Path) -> None:
    """Under another identity, damaged, set aside, unfinished: whoever deletes a conversation wants it gone."""
    with opened(identity=some_identity(model="other")) as store:
        publish_chain(fs, store, ["a"], conversation="gone")
    with opened() as store:
        publish_chain(fs, store, ["a", "b"], conversation="gone")
        cut(store.path_of(publish_chain(fs, store, ["c"], conversation="gone")[0].header.pack_id, 0))
        kept = publish_chain(fs, store, ["k"], conversation="kept")[0].header.pack_id
        half = reserve_chain(store, Chain(["d"], conversation="gone"))
        write_ranks(fs, store, half, Chain(["d"], conversation="gone"))
        path = store.path_of(half.pack_id, 0)
        copy_to_quarantine(root, path, store.fingerprint)
        path.rename(store.rank_folder(0) / "tmp" / f"{half.pack_id}.tmp")
        copy_to_quarantine(root, store.path_of(kept, 0), store.fingerprint)
    kinds = [step.kind.value for step in plan_conversations(survey_directory(root), ["gone"]).steps]
    assert sorted(kinds) == ["conversation", "conversation", "pack", "quarantined", "temporary"]
    assert remove(root, "gone").left_alone == ()
    survey = survey_directory(root)
    assert [list(one.holdings.conversations) for one in survey.identities] in ([["kept"], []], [[], ["kept"]])
    assert [file.conversation for file in survey.quarantine] == ["kept"]
    assert b"gone" not in b"".join(path.read_bytes() for path in root.rglob("*.pack"))
    assert list(root.rglob("*.tmp")) == []


def test_unknown_names_are_told_and_nothing_is_planned_for_them(opened: Open, fs: FileSystem, root: Path) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a"], conversation="a")
    survey = survey_directory(root)
    assert plan_conversations(survey, ["b", "a", "b"]).unknown == ("b",)
    assert plan_identity(survey, "f" * 16) == Plan(root, (), ("f" * 16,))
    assert plan_cleaning(survey, keep=["f" * 16]).unknown == ("f" * 16,)


def test_an_identity_or_all_of_them_go_and_what_is_no_block_stays(opened: Open, fs: FileSystem, root: Path) -> None:
    for model in ("one", "two", "three"):
        with opened(identity=some_identity(model=model)) as store:
            publish_chain(fs, store, ["a"])
            copy_to_quarantine(root, store.path_of(PackId(only_pack(store.identity_folder).stem), 0), store.fingerprint)
    (root / "receipts").mkdir()
    (root / "receipts" / "receipts.jsonl").write_bytes(b"{}")
    (root / "id.key").write_bytes(b"k" * 64)
    fingerprint = survey_directory(root).identities[1].fingerprint
    do(root, lambda survey: plan_identity(survey, fingerprint))
    survey = survey_directory(root)
    assert fingerprint not in {one.fingerprint for one in survey.identities}
    assert (len(survey.identities), len(survey.quarantine)) == (2, 2)
    do(root, plan_all)
    left = sorted(path.name for path in root.iterdir())
    assert left == ["id.key", "identities", "lock", "quarantine", "receipts"]
    assert list((root / "identities").iterdir()) == list((root / "quarantine").iterdir()) == []
    assert (root / "receipts" / "receipts.jsonl").read_bytes() == b"{}"


def test_links_are_left_alone_and_said(opened: Open, fs: FileSystem, root: Path, tmp_path: Path) -> None:
    """D5."""
    with opened() as store:
        publish_chain(fs, store, ["a"], conversation="a")
        folder = store.identity_folder
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (folder / "link").symlink_to(precious)
    (said,) = do(root, plan_all).left_alone
    assert str(folder) in said
    assert precious.read_bytes() == b"mine"
    assert list(root.rglob("*.pack")) == []


def test_where_the_index_is_a_link_nothing_can_be_marked_dead_and_nothing_goes(
    opened: Open, fs: FileSystem, root: Path, tmp_path: Path
) -> None:
    with opened() as store:
        publish_chain(fs, store, ["a"], conversation="a")
        index = store.identity_folder / "index.sqlite"
    index.rename(tmp_path / "index")
    index.symlink_to(tmp_path / "index")
    content = (tmp_path / "index").read_bytes()
    (said,) = remove(root, "a").left_alone
    assert str(index) in said
    assert only_pack(root).exists()
    assert (tmp_path / "index").read_bytes() == content


def test_a_living_pod_keeps_its_directory_to_itself(life: Life, root: Path) -> None:
    pod = life()
    write_out(pod, "a", prompt("a", 5))
    before = state_of(root)
    with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} on host"), locked(root):
        pass
    assert state_of(root) == before


def test_a_pod_cannot_start_in_the_middle(opened: Open, root: Path) -> None:
    opened().close()
    with locked(root), pytest.raises(DirectoryInUseError):
        opened()
    opened()


def shared_and_own(opened: Open, fs: FileSystem) -> dict[str, list[str]]:
    """Two conversations, the first of which wrote what both begin with; returns their blocks."""
    with opened(ranks=2) as store:
        publish_chain(fs, store, ["s", "t", "a", "b"], conversation="going")
        publish_chain(fs, store, ["c", "d"], conversation="staying", parent="t")
        publish_chain(fs, store, ["e"], conversation="going", parent="b")
    return {"staying": ["s", "t", "c", "d"], "going": ["a", "b", "e"]}


def names_after(opened: Open, fs: FileSystem) -> set[str]:
    """The blocks that the next start serves, all of them with the bytes that were written."""
    found: set[str] = set()
    with opened(ranks=2) as store:
        for pack in store.recover():
            for rank, blocks in enumerate(read_back(fs, store, pack.infos)):
                for n, entry in enumerate(pack.info.entries):
                    if n not in pack.dead:
                        name = entry.key.rstrip(b"\0.").decode()
                        assert blocks[entry.key] == some_payload(name, rank=rank)
                        found.add(name)
    return found


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """In memory where the machine has such a place: for a test that starts a store hundreds of times."""
    shared = Path("/dev/shm")
    parent = Path(tempfile.mkdtemp(dir=shared)) if os.access(shared, os.W_OK) else tmp_path
    yield parent
    shutil.rmtree(parent, ignore_errors=True)


def test_a_crash_at_any_step_of_a_removal_costs_nobody_else_anything(
    memory: Path, opened: Open, fs: FileSystem
) -> None:
    """S2, D3: and the removal can be done again."""
    root, whole = memory / "spill", memory / "whole"
    opened = partial(opened, root=root)
    blocks = shared_and_own(opened, fs)
    shutil.copytree(root, whole)
    counting = FaultyFileSystem()
    remove(root, "going", fs=counting)
    assert names_after(opened, fs) == set(blocks["staying"])
    harmless = inspection.READING | {"sql SELECT"}
    # Between two changes the disk is the same, so it is enough to die at each of them.
    steps = [n for n, name in enumerate(counting.operations, start=1) if name not in harmless]
    assert len(steps) > 15
    for step in steps:
        shutil.rmtree(root)
        shutil.copytree(whole, root)
        dying = FaultyFileSystem(die_at=step)
        with pytest.raises(SimulatedCrash):
            remove(root, "going", fs=dying)
        dying.bury()
        left = names_after(opened, fs)
        assert left >= set(blocks["staying"]), f"step {step}, {counting.operations[step - 1]}"
        if "going" in listed(survey_directory(root)):
            remove(root, "going")
        assert names_after(opened, fs) == set(blocks["staying"]), f"step {step}, {counting.operations[step - 1]}"


def test_a_device_that_fails_half_way_is_one_error_and_costs_nobody_else_anything(
    opened: Open, fs: FileSystem, root: Path
) -> None:
    """D8."""
    blocks = shared_and_own(opened, fs)
    failing = FaultyFileSystem(rule=lambda name, _n: OSError(5, "Input/output error") if name == "punch_hole" else None)
    with pytest.raises(SpillError, match="a part of which may be done"):
        remove(root, "going", fs=failing)
    failing.bury()
    assert names_after(opened, fs) == set(blocks["staying"])


def test_a_row_that_is_damaged_is_made_again_before_its_blocks_are_let_go(
    opened: Open, fs: FileSystem, root: Path
) -> None:
    """Else its dead marks would go with it, and the conversation would be back."""
    blocks = shared_and_own(opened, fs)
    with contextlib.closing(sqlite3.connect(next(root.glob("identities/*/index.sqlite")))) as db, db:
        db.execute("UPDATE pages SET trailer = zeroblob(length(trailer))")
    remove(root, "going")
    assert names_after(opened, fs) == set(blocks["staying"])


# -- cleaning ----------------------------------------------------------------------------------------------------------


class NoHoles(FileSystem):
    """A file system that refuses to give a range back."""

    def punch_hole(self, fd: int, offset: int, nbytes: int) -> bool:
        raise OSError(5, "Input/output error")


def test_cleaning_removes_what_no_start_will_serve_and_nothing_else(opened: Open, fs: FileSystem, root: Path) -> None:
    """D1, D3, D6."""
    with opened(identity=some_identity(model="other"), ranks=2) as store:
        publish_chain(fs, store, ["x"])
        foreign = store.fingerprint
    with opened(ranks=2, fs=NoHoles()) as store:
        kept = publish_chain(fs, store, ["a", "b", "c"], conversation="kept")[0].header.pack_id
        with contextlib.suppress(SpillError):
            store.drop(kept, [1])
        loose = reserve_chain(store, Chain(["l"], conversation="loose"))
        write_ranks(fs, store, loose, Chain(["l"], conversation="loose"))
        half = reserve_chain(store, Chain(["h"], conversation="half"))
        write_ranks(fs, store, half, Chain(["h"], conversation="half"))
        store.path_of(half.pack_id, 1).unlink()
        spoiled = reserve_chain(store, Chain(["p"], conversation="spoiled"))
        write_ranks(fs, store, spoiled, Chain(["p"], conversation="spoiled"))
        flip(store.path_of(spoiled.pack_id, 0), 100)
        shorter = publish_chain(fs, store, ["q"], conversation="shorter")[0].header.pack_id
        cut(store.path_of(shorter, 1))
        (store.rank_folder(1) / "tmp" / f"{'0' * 32}.tmp").write_bytes(b"half")
        (store.rank_folder(1) / "tmp" / "not ours").write_bytes(b"?")
        copy_to_quarantine(root, store.path_of(kept, 0), store.fingerprint)
        rank_folder = store.rank_folder(1)
    plan = plan_cleaning(survey_directory(root))
    kinds = sorted(step.kind.value for step in plan.steps)
    assert kinds == ["dead_space", "identity", "pack", "pack", "pack", "quarantined", "temporary"]
    before = survey_directory(root).disk_bytes
    outcome = do(root, plan_cleaning)
    assert outcome.left_alone == ()
    survey = survey_directory(root)
    assert before - survey.disk_bytes == outcome.nbytes
    assert abs(plan.nbytes - outcome.nbytes) <= 64 << 10, "but for what SQLite keeps"
    assert [one.fingerprint for one in survey.identities] != [foreign]
    assert {pack.conversation for pack in own(survey).packs} == {"kept", "loose"}
    assert (own(survey).owed_bytes, own(survey).lost, own(survey).temporaries, survey.quarantine) == (0, (), (), ())
    assert (rank_folder / "tmp" / "not ours").exists()
    assert plan_cleaning(survey).steps == ()
    assert names_after(opened, fs) == {"a", "c", "l"}


def test_an_identity_can_be_kept_and_an_outdated_one_goes(opened: Open, fs: FileSystem, root: Path) -> None:
    models = ("old", "kept", "used last")
    identities = {model: some_identity(model=model) for model in models}
    for at, identity in enumerate(identities.values(), start=1):
        with opened(identity=identity) as store:
            publish_chain(fs, store, ["a"], created_at=float(at))
    with opened() as store:
        store.new_generation(life=GenerationLife.UNTIL_RESTART)
        publish_chain(fs, store, ["b"], created_at=9.0)
    do(root, lambda survey: plan_cleaning(survey, keep=[identities["kept"].fingerprint]))
    left = {one.identity.model: one.standing for one in survey_directory(root).identities if one.identity is not None}
    assert left == {"kept": Standing.FOREIGN, "used last": Standing.OWN}


def test_a_pod_starts_in_a_cleaned_directory_as_before(life: Life, root: Path) -> None:
    pod = life()
    for name in "ab":
        write_out(pod, name, prompt(name, 15, shared=4))
    pod.kill()
    before = listed(survey_directory(root))
    do(root, plan_cleaning)
    pod = life()
    assert known_to(pod) == before
    for name in "ab":
        assert pod.turn(name, [*prompt(name, 15, shared=4), *MORE]).reused == 15 * BLOCK_TOKENS
    pod.settle()
    pod.check()
