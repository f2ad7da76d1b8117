"""The owner's side of the disk (W2, W7, D1-D6, D8, S3; cases 34-36, 38, 40, 44-48)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parkade_cache.errors import FormatError, SettingsError, SpillError
from parkade_cache.ids import ConversationId, PackId
from parkade_cache.spill import layout
from parkade_cache.spill.eviction import plan_eviction
from parkade_cache.spill.files import FileSystem, Space
from parkade_cache.spill.generation import GenerationLife
from parkade_cache.spill.outcome import Refusal, Reservation, WriteOutcome
from parkade_cache.spill.pack import PackInfo
from parkade_cache.spill.pack_writer import PackBlock, PackWriter
from parkade_cache.spill.recovery import RecoveredPack
from parkade_cache.spill.store import SpillStore
from parkade_cache.spill.testing import (
    Chain,
    FakeClock,
    FaultyFileSystem,
    chain_blocks,
    chain_bytes,
    publish_chain,
    read_back,
    reserve_chain,
    some_identity,
    some_key,
    some_payload,
    write_ranks,
)


def files_under(path: Path) -> set[str]:
    return {found.name for found in path.rglob("*") if found.is_file() and found.suffix in {".pack", ".tmp"}}


def refusal(answer: Reservation | Refusal) -> Refusal:
    assert isinstance(answer, Refusal)
    return answer


def names_of(packs: list[RecoveredPack]) -> list[list[str]]:
    """Names of the live blocks, pack by pack."""
    return [
        [entry.key.rstrip(b"\0.").decode() for n, entry in enumerate(pack.info.entries) if n not in pack.dead]
        for pack in packs
    ]


def assert_bytes(fs: FileSystem, store: SpillStore, pack: RecoveredPack) -> None:
    """Every live block of every rank is what was written."""
    for rank, found in enumerate(read_back(fs, store, pack.infos)):
        for n, entry in enumerate(pack.info.entries):
            if n not in pack.dead:
                assert found[entry.key] == some_payload(entry.key.rstrip(b"\0.").decode(), rank=rank)


# -- finding again ---------------------------------------------------------------------------------------------------


def test_what_was_published_is_found_after_a_restart_newest_first(fs: FileSystem, spill: Any, clock: FakeClock) -> None:
    """S2, W2."""
    with spill.open() as store:
        for names in (["a", "b"], ["c"], ["d"]):
            publish_chain(fs, store, names)
            clock.advance(1)
    store = spill.open()
    packs = list(store.recover())
    assert names_of(packs) == [["d"], ["c"], ["a", "b"]]
    for pack in packs:
        assert_bytes(fs, store, pack)
    assert packs[2].info.tips == ((some_key("b"), 32),)


def test_what_this_process_published_is_not_handed_out_again(fs: FileSystem, spill: Any) -> None:
    store = spill.open()
    publish_chain(fs, store, ["a"])
    assert list(store.recover()) == []
    assert list(store.recover()) == []


def test_opening_and_recovering_a_healthy_directory_opens_no_pack(fs: FileSystem, spill: Any) -> None:
    """S3: looking at names and sizes is enough."""
    with spill.open() as store:
        for n in range(5):
            publish_chain(fs, store, [f"b{n}"])
    opened: list[str] = []

    class Watching(FileSystem):
        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            opened.append(path.name)
            return super().open(path, flags, mode)

    store = spill.open(fs=Watching())
    assert len(list(store.recover())) == 5
    assert not [name for name in opened if name.endswith(".pack")]


def test_the_first_pack_is_handed_out_before_the_others_are_looked_at(fs: FileSystem, spill: Any) -> None:
    """S3: the first request is not delayed by the scan."""
    with spill.open() as store:
        for n in range(20):
            publish_chain(fs, store, [f"b{n}"])
    watching = FaultyFileSystem()
    store = spill.open(fs=watching)
    watching.operations.clear()
    packs = store.recover()
    next(packs)
    assert watching.operations.count("lstat") <= 2
    assert "names" not in watching.operations
    packs.close()


def test_a_pack_that_was_renamed_but_not_indexed_is_found_with_its_bytes(fs: FileSystem, spill: Any) -> None:
    """Case 44: crash between rename and index."""
    with spill.open(ranks=2) as store:
        chain = Chain(["a", "b"])
        write_ranks(fs, store, reserve_chain(store, chain), chain)
    store = spill.open(ranks=2)
    packs = list(store.recover())
    assert names_of(packs) == [["a", "b"]]
    assert_bytes(fs, store, packs[0])
    assert store.recovery_report.adopted == 1
    assert store.usage().used_bytes == chain_bytes(2, ranks=2)


def test_a_pack_that_one_rank_did_not_finish_was_never_published_and_goes(fs: FileSystem, spill: Any) -> None:
    """W2: all ranks or none."""
    with spill.open(ranks=2) as store:
        reservation = reserve_chain(store, Chain(["a"]))
        header = Chain(["a"]).header(store, reservation.pack_id, 0)
        with PackWriter(fs, store.rank_folder(0), header, direct=store.direct) as writer:
            writer.append_many(chain_blocks(["a"]))
            writer.finish([])
    store = spill.open(ranks=2)
    assert list(store.recover()) == []
    assert files_under(spill.root) == set()
    assert store.recovery_report.incomplete == 1


def test_temporary_files_of_a_dead_process_go_and_those_of_this_one_stay(fs: FileSystem, spill: Any) -> None:
    """D3: what a crash leaves is cleaned, in the background; a write that has begun meanwhile is left alone."""
    with spill.open() as store:
        stale = layout.temporary_path(store.rank_folder(0), PackId("ab" * 16))
        stale.write_bytes(b"x" * 10_000)
    store = spill.open()
    assert stale.exists()
    chain = Chain(["a"])
    reservation = reserve_chain(store, chain)
    header = chain.header(store, reservation.pack_id, 0)
    with PackWriter(fs, store.rank_folder(0), header, direct=store.direct) as writer:
        list(store.recover())
        assert not stale.exists()
        writer.append_many(chain_blocks(["a"]))
        info = writer.finish([])
    store.publish([info], reservation)
    assert store.usage().packs == 1


def test_a_pack_published_while_recovery_runs_keeps_its_dead_marks(fs: FileSystem, spill: Any) -> None:
    """Recovery asks the index anew for each file, so it does not adopt what the owner has just published."""
    with spill.open() as store:
        chain = Chain(["old"])
        write_ranks(fs, store, reserve_chain(store, chain), chain)
    store = spill.open()
    packs = store.recover()
    infos = publish_chain(fs, store, ["a", "b"])
    store.drop(infos[0].header.pack_id, [0])
    assert names_of(list(packs)) == [["old"]]
    assert names_of([store.load(infos[0].header.pack_id)]) == [["b"]]
    assert store.usage().entries == 2


def test_a_row_whose_files_are_gone_is_dropped(fs: FileSystem, spill: Any) -> None:
    with spill.open() as store:
        infos = publish_chain(fs, store, ["a"])
        store.path_of(infos[0].header.pack_id, 0).unlink()
    store = spill.open()
    assert list(store.recover()) == []
    assert store.recovery_report.lost == 1
    assert store.usage().packs == 0


def truncated_pack(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def oversized_pack(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("damage", [truncated_pack, oversized_pack])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_damaged_pack_goes_to_quarantine_and_the_others_are_served(
    fs: FileSystem, spill: Any, damage: Callable[[Path], None], with_index: bool
) -> None:
    """D4; bad input: damaged, truncated or oversized pack, with and without its index row."""
    with spill.open() as store:
        bad = publish_chain(fs, store, ["bad"])[0].header.pack_id
        publish_chain(fs, store, ["good"])
        damage(store.path_of(bad, 0))
        index = spill.root / "identities" / store.fingerprint / "index.sqlite"
    if not with_index:
        index.unlink()
    store = spill.open()
    assert names_of(list(store.recover())) == [["good"]]
    assert store.usage().quarantined == 1
    assert [path.name for path in (spill.root / "quarantine").iterdir()] == [f"{bad}-rank-0-{store.fingerprint}.pack"]


def test_a_pack_of_something_else_goes_to_quarantine(fs: FileSystem, spill: Any) -> None:
    """Bad input: foreign pack. Random bytes under a pack's name."""
    store = spill.open()
    path = store.path_of(PackId("ab" * 16), 0)
    path.parent.mkdir(mode=0o700)
    path.write_bytes(os.urandom(100_000))
    assert list(store.recover()) == []
    assert store.recovery_report.quarantined == 1


def test_quarantine_is_bounded(fs: FileSystem, spill: Any) -> None:
    """D4: at most 8 files, the oldest go."""
    store = spill.open()
    packs = [publish_chain(fs, store, [f"b{n}"])[0].header.pack_id for n in range(10)]
    for pack_id in packs:
        store.quarantine(pack_id, "test")
    assert store.usage().quarantined == 8
    kept = sorted(path.name[:32] for path in (spill.root / "quarantine").iterdir())
    assert kept == sorted(packs[2:])


def test_a_block_of_nothing_but_zeros_is_not_taken_for_a_dead_one(fs: FileSystem, spill: Any) -> None:
    """Some file systems keep zeros as holes; after the loss of the index such a block still counts as written."""
    with spill.open() as store:
        reservation = reserve_chain(store, Chain(["zeros", "a"]))
        header = Chain(["zeros", "a"]).header(store, reservation.pack_id, 0)
        zeros, other = chain_blocks(["zeros", "a"])
        with PackWriter(fs, store.rank_folder(0), header, direct=store.direct) as writer:
            writer.append_many([PackBlock(zeros.key, zeros.parent, 16, 0, bytes(5000)), other])
            info = writer.finish([])
        with store.path_of(reservation.pack_id, 0).open("r+b") as file:
            fs.punch_hole(file.fileno(), info.entries[0].offset, 8192)
    store = spill.open()
    packs = list(store.recover())
    assert [pack.dead for pack in packs] == [frozenset()]
    assert next(read_back(fs, store, packs[0].infos))[some_key("zeros")] == bytes(5000)


# -- the index -------------------------------------------------------------------------------------------------------


def no_index(path: Path) -> None:
    path.unlink()


def random_index(path: Path) -> None:
    path.write_bytes(os.urandom(50_000))


def empty_index(path: Path) -> None:
    path.write_bytes(b"")


def truncated_index(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def oversized_index(path: Path) -> None:
    os.truncate(path, 5 << 30)


def older_index(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(60)
        file.write((77).to_bytes(4, "big"))


def holed_index(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(4096, size, 4096):
            file.seek(offset)
            file.write(os.urandom(512))


@pytest.mark.parametrize(
    "damage", [no_index, random_index, empty_index, truncated_index, oversized_index, older_index, holed_index]
)
def test_a_bad_index_is_rebuilt_from_the_packs(fs: FileSystem, spill: Any, damage: Callable[[Path], None]) -> None:
    """Bad input: damaged, foreign, truncated or oversized index. Dead blocks stay dead, conversations are found."""
    with spill.open(ranks=2) as store:
        first = publish_chain(fs, store, ["a", "b", "c"])
        store.drop(first[0].header.pack_id, [1])
        publish_chain(fs, store, ["d"], conversation="other")
        used_bytes = store.usage().used_bytes
        path = spill.root / "identities" / store.fingerprint / "index.sqlite"
    damage(path)
    store = spill.open(ranks=2)
    packs = list(store.recover())
    assert names_of(packs) == [["d"], ["a", "c"]]
    for pack in packs:
        assert_bytes(fs, store, pack)
    assert store.recovery_report.index_rebuilt_because
    assert store.usage().used_bytes == used_bytes
    assert store.usage().entries == 3


def test_a_damaged_row_costs_one_look_into_its_pack(fs: FileSystem, spill: Any) -> None:
    """The index keeps the packs' own pages, checked by the packs' own checksums."""
    with spill.open() as store:
        publish_chain(fs, store, ["a"])
        publish_chain(fs, store, ["b"])
        store._index._execute("UPDATE pages SET footer = zeroblob(length(footer)) WHERE rowid = 1")
    store = spill.open()
    assert sorted(names_of(list(store.recover()))) == [["a"], ["b"]]
    assert (store.recovery_report.indexed, store.recovery_report.adopted) == (1, 1)


def test_damage_found_while_running_is_an_error_then_and_healed_by_the_next_recovery(
    fs: FileSystem, spill: Any
) -> None:
    """D8: automatic recovery; nothing published is lost, nothing known is handed out twice."""
    store = spill.open()
    publish_chain(fs, store, ["a"])
    chain = Chain(["b"])
    reservation = reserve_chain(store, chain)
    infos = write_ranks(fs, store, reservation, chain)
    store._index._execute("DROP TABLE packs")
    with pytest.raises(SpillError, match="recover again"):
        store.publish(infos, reservation)
    store.cancel(reservation)
    assert store.needs_recovery
    assert names_of(list(store.recover())) == [["b"]]
    assert not store.needs_recovery
    assert store.usage().packs == 2


def test_a_link_in_the_indexs_place_is_refused(spill: Any, tmp_path: Path) -> None:
    """D5, case 48: SQLite would follow it."""
    with spill.open() as store:
        path = spill.root / "identities" / store.fingerprint / "index.sqlite"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpillError, match="not a regular file"):
        spill.open()


def test_publishing_costs_no_flush_in_the_index_and_a_dead_mark_costs_one(fs: FileSystem, spill: Any) -> None:
    """No needless flushes: a lost row is adopted from its pack, a lost dead mark would make a hole a block."""
    store = spill.open()
    infos = publish_chain(fs, store, ["a", "b"])
    assert store._index._execute("PRAGMA synchronous").fetchone() == (1,)
    store._index.mark_dead({infos[0].header.pack_id: [0]})
    assert store._index._execute("PRAGMA synchronous").fetchone() == (2,)


def test_thirty_publishes_cost_two_flushes_each_once_the_folders_are_there(spill: Any) -> None:
    """One for the payload, one for its name."""
    fs = FaultyFileSystem()
    store = spill.open(fs=fs)
    for n in range(256):
        folder = store.rank_folder(0) / "packs" / f"{n:02x}"
        folder.mkdir(mode=0o700)
        (folder / "another pack").touch()
    fs.operations.clear()
    for n in range(30):
        publish_chain(fs, store, [f"b{n}"])
    assert (fs.operations.count("flush"), fs.operations.count("flush_folder")) == (30, 30)


# -- writing ---------------------------------------------------------------------------------------------------------


def test_a_capacity_below_one_block_is_refused_at_the_start(spill: Any) -> None:
    """Bad input: capacity below one block; the message says what to do."""
    least = chain_bytes(1, ranks=2)
    with pytest.raises(SettingsError, match=r"raise spill\.size"):
        spill.open(capacity_bytes=least - 1, ranks=2)
    spill.open(capacity_bytes=least, ranks=2)


def test_a_write_above_the_whole_capacity_is_refused_for_its_size(spill: Any) -> None:
    """W3."""
    store = spill.open(capacity_bytes=100_000)
    assert refusal(store.reserve(100_001)).outcome is WriteOutcome.REFUSED_SIZE


def test_a_full_capacity_says_how_much_must_go_and_a_drop_makes_the_room(fs: FileSystem, spill: Any) -> None:
    """D2: the owner evicts and tries again."""
    one = chain_bytes(1)
    store = spill.open(capacity_bytes=2 * one)
    first = publish_chain(fs, store, ["a"])
    publish_chain(fs, store, ["b"])
    answer = refusal(store.reserve(one))
    assert (answer.outcome, answer.missing_bytes) == (WriteOutcome.REFUSED_CAPACITY, one)
    assert store.drop(first[0].header.pack_id, [0]) == one
    assert isinstance(store.reserve(one), Reservation)


def test_admitted_bytes_are_not_admitted_twice(spill: Any) -> None:
    """D2: reserved at admission."""
    one = chain_bytes(1)
    store = spill.open(capacity_bytes=2 * one - 1)
    first = store.reserve(one)
    assert refusal(store.reserve(one)).missing_bytes == 1
    store.cancel(first)
    assert isinstance(store.reserve(one), Reservation)


class SmallDisk(FileSystem):
    """A disk with so much free, whatever is written."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def space(self, path: Path) -> Space:
        return Space(1 << 40, self.free_bytes)


def test_a_write_below_the_free_space_floor_is_refused_without_a_trace(fs: FileSystem, spill: Any) -> None:
    """Case 38: outcome refused_free_space; no file; index unchanged."""
    disk = SmallDisk(1 << 30)
    store = spill.open(fs=disk, min_free_bytes=50_000)
    publish_chain(fs, store, ["a"])
    before = files_under(spill.root), store.usage()
    disk.free_bytes = 60_000
    answer = refusal(store.reserve(10_001))
    assert (answer.outcome, answer.missing_bytes) == (WriteOutcome.REFUSED_FREE_SPACE, 1)
    disk.free_bytes = 1 << 30
    assert (files_under(spill.root), store.usage()) == before
    assert isinstance(store.reserve(10_001), Reservation)


def test_admitted_bytes_count_against_the_floor_until_they_are_on_the_device(fs: FileSystem, spill: Any) -> None:
    """D2: no two writes are admitted to the same free bytes, and none is counted twice."""
    one = chain_bytes(1)
    disk = SmallDisk(2 * one)
    store = spill.open(fs=disk)
    chain = Chain(["a"])
    first = reserve_chain(store, chain)
    assert refusal(store.reserve(one + 1)).outcome is WriteOutcome.REFUSED_FREE_SPACE
    write_ranks(fs, store, first, chain)
    disk.free_bytes = one
    assert isinstance(store.reserve(one), Reservation)


def test_the_default_floor_is_ten_gib_or_five_percent(spill: Any) -> None:
    """D2."""
    store = spill.open(fs=SmallDisk(60 << 30), min_free_bytes=None)
    assert store.usage().floor_bytes == (1 << 40) * 5 // 100
    assert isinstance(store.reserve(10 << 20), Reservation)


def test_the_hourly_budget_is_taken_at_admission_given_back_on_failure_and_outlives_a_restart(
    fs: FileSystem, spill: Any, clock: FakeClock
) -> None:
    """D2: rolling write budget, physical bytes only."""
    one = chain_bytes(1)
    limits = {"write_budget_bytes_per_hour": 2 * one}
    with spill.open(**limits) as store:
        publish_chain(fs, store, ["a"], created_at=clock.now())
        failed = store.reserve(one)
        answer = refusal(store.reserve(1))
        assert answer.outcome is WriteOutcome.REFUSED_BUDGET
        store.cancel(failed, written_bytes=one // 2)
        assert store.usage().budget_remaining_bytes == one - one // 2
    clock.advance(1800)
    with spill.open(**limits) as store:
        assert store.usage().budget_remaining_bytes == one
        clock.advance(1801)
        assert store.usage().budget_remaining_bytes == 2 * one


def test_a_streamed_pack_grows_within_room_and_budget_and_settles_all_it_took(
    fs: FileSystem, spill: Any, clock: FakeClock
) -> None:
    """D2, W9: a stream has a name before its size is known; also when its owner ends it by the first reservation."""
    one = chain_bytes(1)
    store = spill.open(capacity_bytes=3 * one, write_budget_bytes_per_hour=3 * one)
    pack_id = store.new_pack_id()
    first = store.reserve(one, pack_id=pack_id)
    assert isinstance(first, Reservation)
    assert first.pack_id == pack_id
    grown = store.grow(first, one)
    assert isinstance(grown, Reservation)
    assert (grown.pack_id, grown.nbytes) == (pack_id, 2 * one)
    assert refusal(store.grow(grown, one + 1)).outcome is WriteOutcome.REFUSED_BUDGET
    assert store.usage().reserved_bytes == 2 * one
    store.cancel(first, written_bytes=one + 7)
    assert store.usage().reserved_bytes == 0
    assert store.usage().budget_remaining_bytes == 3 * one - one - 7


def test_a_pack_larger_than_its_reservation_is_charged_whole(fs: FileSystem, spill: Any) -> None:
    """D2: physical bytes."""
    store = spill.open(write_budget_bytes_per_hour=10 * chain_bytes(3))
    reservation = store.reserve(1)
    assert isinstance(reservation, Reservation)
    store.publish(write_ranks(fs, store, reservation, Chain(["a", "b", "c"])), reservation)
    assert store.usage().budget_remaining_bytes == 9 * chain_bytes(3)


def test_a_failed_write_leaves_no_file_and_no_row_and_the_older_state_restorable(spill: Any, fs: FileSystem) -> None:
    """Case 34."""
    store = spill.open()
    older = publish_chain(fs, store, ["a"])
    chain = Chain(["b", "c"], parent="a")
    reservation = reserve_chain(store, chain)
    faulty = FaultyFileSystem(rule=lambda name, _n: OSError(errno.EIO, "x") if name == "pwritev" else None)
    with pytest.raises(SpillError):
        write_ranks(faulty, store, reservation, chain)
    store.cancel(reservation)
    assert files_under(spill.root) == {f"{older[0].header.pack_id}.pack"}
    assert (store.usage().packs, store.usage().reserved_bytes) == (1, 0)
    store.close()
    again = spill.open()
    packs = list(again.recover())
    assert names_of(packs) == [["a"]]
    assert_bytes(fs, again, packs[0])


def test_an_unpublished_pack_is_in_no_index(fs: FileSystem, spill: Any) -> None:
    """Case 36: never from the unfinished file; from disk after publication."""
    store = spill.open()
    chain = Chain(["a"])
    reservation = reserve_chain(store, chain)
    assert store.load(reservation.pack_id) is None
    infos = write_ranks(fs, store, reservation, chain)
    assert store.load(reservation.pack_id) is None
    assert list(store.recover()) == []
    store.publish(infos, reservation)
    assert names_of([store.load(reservation.pack_id)]) == [["a"]]


def test_ranks_that_wrote_different_blocks_are_never_published(fs: FileSystem, spill: Any) -> None:
    """W2, D5."""
    store = spill.open(ranks=2)
    reservation = reserve_chain(store, Chain(["a"]))
    infos: list[PackInfo] = []
    for rank, names in enumerate((["a"], ["b"])):
        header = Chain(names).header(store, reservation.pack_id, rank)
        with PackWriter(fs, store.rank_folder(rank), header, direct=store.direct) as writer:
            writer.append_many(chain_blocks(names, rank=rank))
            infos.append(writer.finish([]))
    for wrong in (infos, infos[:1], list(reversed(infos))):
        with pytest.raises(FormatError):
            store.publish(wrong, reservation)


def test_a_store_closed_while_a_write_runs_finds_the_pack_at_the_next_start(fs: FileSystem, spill: Any) -> None:
    """Case 40: the pack is complete and indexed."""
    store = spill.open()
    chain = Chain(["a"])
    reservation = reserve_chain(store, chain)
    header = chain.header(store, reservation.pack_id, 0)
    with PackWriter(fs, store.rank_folder(0), header, direct=store.direct) as writer:
        writer.append_many(chain_blocks(["a"]))
        store.close()
        info = writer.finish([])
    with pytest.raises(SpillError):
        store.publish([info], reservation)
    again = spill.open()
    packs = list(again.recover())
    assert names_of(packs) == [["a"]]
    assert_bytes(fs, again, packs[0])
    assert again.usage().packs == 1


def test_a_failed_flush_of_the_folder_is_reported_and_the_pack_is_found_again(fs: FileSystem, spill: Any) -> None:
    """Case 47: reported as failed, readable after a restart, and before that by the next recovery."""
    store = spill.open()
    chain = Chain(["a"])
    reservation = reserve_chain(store, chain)
    renamed = False

    def rule(name: str, _n: int) -> OSError | None:
        nonlocal renamed
        renamed |= name == "rename"
        return OSError(errno.EIO, "x") if renamed and name == "flush_folder" else None

    with pytest.raises(SpillError):
        write_ranks(FaultyFileSystem(rule=rule), store, reservation, chain)
    store.cancel(reservation)
    assert store.needs_recovery
    assert store.usage().used_bytes > 0
    assert names_of(list(store.recover())) == [["a"]]


def test_a_discarded_write_leaves_nothing_even_when_it_was_complete(fs: FileSystem, spill: Any) -> None:
    """Case 69: never published, its files gone."""
    store = spill.open()
    chain = Chain(["a"])
    reservation = reserve_chain(store, chain)
    write_ranks(fs, store, reservation, chain)
    store.discard(reservation)
    assert files_under(spill.root) == set()
    assert list(store.recover()) == []


def test_pack_names_rise_also_when_the_clock_goes_back(fs: FileSystem, spill: Any, clock: FakeClock) -> None:
    with spill.open() as store:
        names = [store.new_pack_id()]
        clock.now_s -= 1000
        names += [store.new_pack_id() for _ in range(3)]
        names.append(publish_chain(fs, store, ["a"])[0].header.pack_id)
    with spill.open() as store:
        names.append(store.new_pack_id())
    assert names == sorted(names)
    assert len(set(names)) == len(names)


# -- letting go ------------------------------------------------------------------------------------------------------


def test_dead_blocks_give_their_space_back_on_every_rank_and_the_rest_stays(fs: FileSystem, spill: Any) -> None:
    """D6: hole punching."""
    store = spill.open(ranks=2)
    infos = publish_chain(fs, store, ["a", "b", "c", "d"])
    pack_id = infos[0].header.pack_id
    before = [store.path_of(pack_id, rank).stat().st_blocks for rank in range(2)]
    assert store.drop(pack_id, [1, 2]) == 2 * 2 * 8192
    after = [store.path_of(pack_id, rank).stat().st_blocks for rank in range(2)]
    assert [b - a for b, a in zip(before, after, strict=True)] == [2 * 8192 // 512] * 2
    pack = store.load(pack_id)
    assert names_of([pack]) == [["a", "d"]]
    assert_bytes(fs, store, pack)
    assert store.usage().used_bytes == chain_bytes(4, ranks=2) - 2 * 2 * 8192
    assert store.drop(pack_id, [1]) == 0


def test_blocks_of_many_packs_are_dropped_with_one_flush_of_the_index(spill: Any) -> None:
    """A conversation is dropped whole; its packs are many."""
    fs = FaultyFileSystem()
    store = spill.open(fs=fs)
    packs = [publish_chain(fs, store, [f"a{n}", f"b{n}"])[0].header.pack_id for n in range(5)]
    fs.operations.clear()
    assert store.drop_many({pack_id: [0] for pack_id in packs}) == 5 * 8192
    assert fs.operations.count("punch_hole") == 5
    assert fs.operations.index("sql COMMIT") < fs.operations.index("punch_hole")
    assert store.usage().entries == 5


def test_a_pack_goes_with_its_last_block(fs: FileSystem, spill: Any) -> None:
    """D6."""
    store = spill.open(ranks=2)
    pack_id = publish_chain(fs, store, ["a", "b"])[0].header.pack_id
    first = store.drop(pack_id, [0])
    assert first + store.drop(pack_id, [1]) == chain_bytes(2, ranks=2)
    assert files_under(spill.root) == set()
    assert store.usage().used_bytes == 0
    assert store.drop(pack_id, [0]) == 0


def test_a_longer_state_keeps_what_it_shares_when_the_old_one_goes(
    fs: FileSystem, spill: Any, clock: FakeClock
) -> None:
    """Case 35: the new one is kept, the old one goes, blocks they share stay."""
    store = spill.open()
    publish_chain(fs, store, ["p", "q", "x"])
    publish_chain(fs, store, ["r", "s"], parent="q")
    store.close()
    again = spill.open()
    packs = list(again.recover())
    for drop in plan_eviction(packs, missing_bytes=1):
        again.drop(drop.pack_id, drop.entries)
    left = [again.load(pack.info.header.pack_id) for pack in packs]
    assert names_of(left) == [["r", "s"], ["p", "q"]]


def test_a_budget_for_one_keeps_the_newest_at_open(fs: FileSystem, spill: Any, clock: FakeClock) -> None:
    """Case 45."""
    with spill.open() as store:
        publish_chain(fs, store, ["a"], conversation="old", created_at=clock.now())
        clock.advance(10)
        publish_chain(fs, store, ["b"], conversation="new", created_at=clock.now())
    store = spill.open(capacity_bytes=chain_bytes(1))
    packs = list(store.recover())
    for drop in plan_eviction(packs, missing_bytes=store.usage().over_bytes):
        store.drop(drop.pack_id, drop.entries)
    assert store.usage().over_bytes == 0
    store.close()
    assert names_of(list(spill.open().recover())) == [["b"]]


def test_a_budget_for_two_of_three_keeps_the_shared_prefix(fs: FileSystem, spill: Any, clock: FakeClock) -> None:
    """Case 46: a conversation goes, the prefix stays; it is a dead entry of the pack that holds both."""
    with spill.open() as store:
        publish_chain(fs, store, ["s", "p", "a"], conversation="old", created_at=clock.now())
        clock.advance(10)
        publish_chain(fs, store, ["b"], conversation="new", parent="p", created_at=clock.now())
        total = store.usage().used_bytes
    store = spill.open(capacity_bytes=total - 1)
    packs = list(store.recover())
    for drop in plan_eviction(packs, missing_bytes=store.usage().over_bytes):
        store.drop(drop.pack_id, drop.entries)
    assert store.usage().over_bytes == 0
    store.close()
    assert names_of(list(spill.open().recover())) == [["b"], ["s", "p"]]


def test_a_touched_conversation_is_younger_after_a_restart(fs: FileSystem, spill: Any, clock: FakeClock) -> None:
    with spill.open() as store:
        publish_chain(fs, store, ["a"], conversation="a", created_at=100.0)
        publish_chain(fs, store, ["b"], conversation="b", created_at=200.0)
        store.touch([ConversationId("a"), ConversationId("unknown")], 300.0)
        store.touch([ConversationId("b")], 150.0)
    assert [pack.last_used for pack in spill.open().recover()] == [200.0, 300.0]


def test_a_pack_being_restored_keeps_its_bytes_until_it_is_let_go(fs: FileSystem, spill: Any) -> None:
    """D6: a file being restored is not evicted; a hole under a reader would look like damage."""
    store = spill.open()
    infos = publish_chain(fs, store, ["a", "b"])
    pack_id = infos[0].header.pack_id
    store.hold(pack_id)
    store.hold(pack_id)
    assert store.drop(pack_id, [0]) == 0
    assert names_of([store.load(pack_id)]) == [["b"]]
    assert all(value is not None for value in next(read_back(fs, store, infos)).values())
    assert store.drop(pack_id, [1]) == 0
    assert store.unhold(pack_id) == 0
    assert store.unhold(pack_id) == chain_bytes(2)
    assert files_under(spill.root) == set()


def test_space_owed_to_a_crash_comes_back_at_the_next_start(fs: FileSystem, spill: Any) -> None:
    """D3, D6: marked dead, not yet returned."""
    with spill.open() as store:
        half = publish_chain(fs, store, ["a", "b"])[0].header.pack_id
        whole = publish_chain(fs, store, ["c"])[0].header.pack_id
        store.hold(half)
        store.hold(whole)
        store.drop(half, [0])
        store.drop(whole, [0])
    store = spill.open()
    assert names_of(list(store.recover())) == [["b"]]
    assert store.usage().used_bytes == chain_bytes(2) - 8192
    assert files_under(spill.root) == {f"{half}.pack"}


class NoHoles(FileSystem):
    """A file system that cannot punch holes."""

    def punch_hole(self, fd: int, offset: int, nbytes: int) -> bool:
        return False


def test_without_hole_punching_space_comes_back_with_the_last_block(fs: FileSystem, spill: Any) -> None:
    """D6 degrades; the numbers stay true."""
    store = spill.open(fs=NoHoles())
    pack_id = publish_chain(fs, store, ["a", "b"])[0].header.pack_id
    assert store.drop(pack_id, [0]) == 0
    assert store.usage().used_bytes == chain_bytes(2)
    assert names_of([store.load(pack_id)]) == [["b"]]
    assert store.drop(pack_id, [1]) == chain_bytes(2)
    assert store.usage().used_bytes == 0


def test_links_in_a_packs_place_are_refused_and_left_alone(fs: FileSystem, spill: Any, tmp_path: Path) -> None:
    """Case 48: neither read nor removed, and nothing of the directory is lost by it."""
    with spill.open() as store:
        linked = publish_chain(fs, store, ["a"])[0].header.pack_id
        publish_chain(fs, store, ["b"])
        path = store.path_of(linked, 0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    store = spill.open()
    assert names_of(list(store.recover())) == [["b"]]
    assert path.is_symlink()
    assert (tmp_path / "elsewhere").exists()


# -- other identities ------------------------------------------------------------------------------------------------


def test_another_identitys_packs_are_never_matched_are_counted_and_go_first(
    fs: FileSystem, spill: Any, clock: FakeClock
) -> None:
    """D1."""
    with spill.open(identity=some_identity(model="other")) as store:
        publish_chain(fs, store, ["a"])
        other = spill.root / "identities" / store.fingerprint
    store = spill.open(capacity_bytes=200_000)
    assert list(store.recover()) == []
    foreign_bytes = store.usage().foreign_bytes
    assert foreign_bytes >= chain_bytes(1)
    publish_chain(fs, store, ["b"])
    room = 200_000 - foreign_bytes - chain_bytes(1)
    assert isinstance(store.reserve(room), Reservation)
    assert other.exists()
    assert isinstance(store.reserve(4096), Reservation)
    assert not other.exists()
    assert store.usage().foreign_bytes == 0
    assert store.usage().packs == 1


def test_other_identities_stay_when_their_going_would_not_help(fs: FileSystem, spill: Any) -> None:
    """D1 with case 38: a refusal by the floor changes nothing."""
    with spill.open(identity=some_identity(model="other")) as store:
        publish_chain(fs, store, ["a"])
        other = spill.root / "identities" / store.fingerprint
    store = spill.open(fs=SmallDisk(0), min_free_bytes=1 << 30)
    assert refusal(store.reserve(1000)).outcome is WriteOutcome.REFUSED_FREE_SPACE
    assert other.exists()


def test_files_that_parkade_did_not_make_count_and_are_never_touched(fs: FileSystem, spill: Any) -> None:
    """D1: foreign files are counted."""
    spill.open().close()
    stranger = spill.root / "notes"
    stranger.write_bytes(b"x" * 100_000)
    inside = spill.root / "identities" / "not-a-fingerprint"
    inside.write_bytes(b"x" * 50_000)
    store = spill.open(capacity_bytes=160_000)
    assert store.usage().foreign_bytes >= 150_000
    assert refusal(store.reserve(50_000)).outcome is WriteOutcome.REFUSED_CAPACITY
    assert stranger.exists()
    assert inside.exists()


def test_new_weights_find_nothing_of_the_old_ones_and_writes_under_way_are_not_published(
    fs: FileSystem, spill: Any
) -> None:
    """Trap 14: reset_cache."""
    store = spill.open()
    publish_chain(fs, store, ["old"])
    chain = Chain(["under way"])
    reservation = reserve_chain(store, chain)
    infos = write_ranks(fs, store, reservation, chain)
    store.new_generation(life=GenerationLife.DURABLE)
    with pytest.raises(FormatError):
        store.publish(infos, reservation)
    store.cancel(reservation)
    assert list(store.recover()) == []
    publish_chain(fs, store, ["new"])
    store.close()
    assert names_of(list(spill.open().recover())) == [["new"]]


def test_weights_of_the_running_process_alone_are_forgotten_by_the_next(fs: FileSystem, spill: Any) -> None:
    """Trap 14: the next start loads other weights than the ones these blocks were made with."""
    with spill.open() as store:
        publish_chain(fs, store, ["first weights"])
        store.new_generation()
        publish_chain(fs, store, ["second weights"])
        assert store.usage().packs == 1
    store = spill.open()
    assert list(store.recover()) == []
    publish_chain(fs, store, ["third"])
    store.close()
    assert names_of(list(spill.open().recover())) == [["third"]]


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"generation": -1, "life": "durable"}', b"x" * 9999])
def test_a_damaged_generation_matches_nothing_rather_than_the_wrong_weights(
    fs: FileSystem, spill: Any, text: bytes
) -> None:
    with spill.open() as store:
        publish_chain(fs, store, ["a"])
    (spill.root / f"{some_identity().fingerprint}.generation").write_bytes(text)
    with spill.open() as store:
        assert list(store.recover()) == []
        publish_chain(fs, store, ["b"])
    assert names_of(list(spill.open().recover())) == [["b"]]


# -- the device ------------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_says_so(spill: Any, tmp_path: Path) -> None:
    """Bad input: vanished directory."""
    spill.root = tmp_path / "gone" / "deeper"
    with pytest.raises(SpillError, match="must exist or be creatable"):
        spill.open()


def test_a_file_in_the_directorys_place_is_refused(spill: Any) -> None:
    spill.root.write_text("a file")
    with pytest.raises(SpillError, match="not a folder"):
        spill.open()


def test_a_directory_that_vanishes_is_an_outcome_not_an_exception(fs: FileSystem, spill: Any, tmp_path: Path) -> None:
    """D8; bad input: vanished directory. Nothing but SpillError comes out, and a new start heals it."""
    store = spill.open()
    infos = publish_chain(fs, store, ["a"])
    spill.root.rename(tmp_path / "moved away")
    assert refusal(store.reserve(1000)).outcome is WriteOutcome.FAILED
    with pytest.raises(SpillError):
        store.probe()
    header = Chain(["b"]).header(store, store.new_pack_id(), 0)
    with pytest.raises(SpillError):
        PackWriter(fs, store.rank_folder(0), header, direct=False)
    spill.root.mkdir()
    with pytest.raises(SpillError, match="replaced"):
        store.probe()
    store.close()
    spill.root.rmdir()
    (tmp_path / "moved away").rename(spill.root)
    again = spill.open()
    assert names_of(list(again.recover())) == [["a"]]
    assert next(read_back(fs, again, infos))[some_key("a")] is not None
    again.probe()
