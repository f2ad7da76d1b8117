"""A crash or a failure between any two operations (D3, D8, S2; cases 34, 36, 44).

Every scenario is run once for each operation it does, dying or failing there; then a clean start must serve everything
that was published, with the right bytes, and nothing that was not.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from parkade_cache.errors import ParkadeError, SpillError
from parkade_cache.ids import ConversationId, PackId
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.outcome import Reservation
from parkade_cache.spill.recovery import RecoveredPack
from parkade_cache.spill.store import SpillStore
from parkade_cache.spill.testing import (
    Chain,
    FakeClock,
    FaultyFileSystem,
    SimulatedCrash,
    chain_bytes,
    publish_chain,
    read_back,
    some_identity,
    some_payload,
    write_ranks,
)

pytestmark = pytest.mark.slow

RANKS = 2
FEWEST_OPERATIONS = 30
"""A scenario with fewer has not been run through."""


@dataclass
class Progress:
    """What a scenario had done when it ended: blocks that must be found, and blocks that may be."""

    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)


Begin = Callable[[FaultyFileSystem], tuple[Callable[[], SpillStore], Progress]]
Scenario = Callable[[FileSystem, SpillStore, Progress], None]


def name_of(key: bytes) -> str:
    return key.rstrip(b"\0.").decode()


def publish(fs: FileSystem, store: SpillStore, names: list[str], progress: Progress) -> PackId | None:
    """What the owner does for one write, whatever fails."""
    chain = Chain(names)
    reservation = store.reserve(chain_bytes(len(names), ranks=RANKS))
    if not isinstance(reservation, Reservation):
        return None
    finished: list[int] = []

    def on_rank(rank: int) -> None:
        finished.append(rank)

    # The last rank's rename makes the files complete: from there on the pack may be adopted (case 44).
    progress.may.update(names)
    try:
        infos = write_ranks(fs, store, reservation, chain, on_rank=on_rank)
        store.publish(infos, reservation)
    except ParkadeError:
        store.cancel(reservation)
        return None
    except SimulatedCrash:
        if finished == []:
            progress.may.difference_update(names)
        raise
    progress.must.update(names)
    return reservation.pack_id


def publishing(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    for names in (["a", "b"], ["c"]):
        publish(fs, store, names, progress)


def first(store: SpillStore) -> PackId:
    return next(pack_id for pack_id in store._index.pack_ids() if len(store.load(pack_id).info.entries) == 3)


def dropping_some(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    list(store.recover())
    progress.must.difference_update({"old1", "old2"})
    store.drop(first(store), [0, 1])
    progress.may.difference_update({"old1", "old2"})


def dropping_all(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    list(store.recover())
    progress.must.difference_update({"old1", "old2", "old3"})
    store.drop(first(store), [0, 1, 2])
    progress.may.difference_update({"old1", "old2", "old3"})


def dropping_what_was_held(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    pack_id = first(store)
    store.hold(pack_id)
    progress.must.difference_update({"old1"})
    store.drop(pack_id, [0])
    progress.may.difference_update({"old1"})
    store.unhold(pack_id)


def quarantining(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    progress.must.difference_update({"old1", "old2", "old3"})
    store.quarantine(first(store), "a test")
    progress.may.difference_update({"old1", "old2", "old3"})


def rebuilding(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    store._index._open_db().executescript("DROP TABLE pages")
    list(store.recover())


def new_weights(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    old = progress.must | progress.may
    progress.must.clear()
    store.new_generation()
    progress.may.difference_update(old)
    publish(fs, store, ["new weights"], progress)
    progress.must.clear()
    progress.may.clear()


def a_day(fs: FileSystem, store: SpillStore, progress: Progress) -> None:
    list(store.recover())
    publish(fs, store, ["a", "b"], progress)
    progress.must.difference_update({"old3"})
    store.drop(first(store), [2])
    progress.may.difference_update({"old3"})
    store.touch([ConversationId("conversation")], 5.0)
    store.usage()
    store.probe()
    publish(fs, store, ["c"], progress)


SCENARIOS = [
    publishing,
    dropping_some,
    dropping_all,
    dropping_what_was_held,
    quarantining,
    rebuilding,
    new_weights,
    a_day,
]


OLD = ("old1", "old2", "old3", "older")


@pytest.fixture
def begin(memory_spill: Any) -> Begin:
    """The same directory with two published packs, as often as a test wants it."""
    with memory_spill.open(ranks=RANKS) as store:
        publish_chain(FileSystem(), store, OLD[:3])
        publish_chain(FileSystem(), store, OLD[3:])
    saved = memory_spill.root.with_name("saved")
    memory_spill.root.rename(saved)

    def fresh(fs: FaultyFileSystem) -> tuple[Callable[[], SpillStore], Progress]:
        shutil.rmtree(memory_spill.root, ignore_errors=True)
        shutil.copytree(saved, memory_spill.root)
        config = memory_spill.config(ranks=RANKS)
        opened = partial(SpillStore.open, config, some_identity(), fs=fs, clock=FakeClock())
        return opened, Progress(set(OLD), set(OLD))

    return fresh


def check(spill: Any, progress: Progress, where: str) -> None:
    """A clean start: everything published, nothing else, right bytes, no litter, true numbers."""
    fs = FileSystem()
    with spill.open(ranks=RANKS) as store:
        packs = list(store.recover())
        found = [name for pack in packs for name in live_names(fs, store, pack)]
        assert progress.must <= set(found), where
        assert set(found) <= progress.must | progress.may, where
        assert len(found) == len(set(found)), where
        own = spill.root / "identities" / store.fingerprint
        assert list(own.glob("rank-*/tmp/*")) == [], where
        assert {path.stem for path in own.rglob("*.pack")} == {pack.info.header.pack_id for pack in packs}, where
        assert store.usage().used_bytes == live_bytes(packs), where
        assert list(store.recover()) == [], where


def live_names(fs: FileSystem, store: SpillStore, pack: RecoveredPack) -> list[str]:
    live = [entry for n, entry in enumerate(pack.info.entries) if n not in pack.dead]
    for rank, payloads in enumerate(read_back(fs, store, pack.infos)):
        for entry in live:
            assert payloads[entry.key] == some_payload(name_of(entry.key), rank=rank)
    return [name_of(entry.key) for entry in live]


def live_bytes(packs: list[RecoveredPack]) -> int:
    return sum(
        info.file_bytes - sum(info.entries[n].padded_bytes for n in pack.dead) for pack in packs for info in pack.infos
    )


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_crash_between_any_two_operations_loses_nothing_published_and_shows_nothing_else(
    memory_spill: Any, begin: Begin, scenario: Scenario
) -> None:
    """S2, D3, case 44."""
    die_at = 0
    crashed = True
    while crashed:
        die_at += 1
        fs = FaultyFileSystem(die_at=die_at)
        opened, progress = begin(fs)
        try:
            store = opened()
            scenario(fs, store, progress)
            store.close()
            crashed = False
        except SimulatedCrash:
            crashed = True
        fs.bury()
        check(memory_spill, progress, f"died at operation {die_at}: {fs.operations[-3:]}")
    assert die_at > FEWEST_OPERATIONS


@pytest.mark.parametrize(
    ("scenario", "code"),
    [*((scenario, errno.EIO) for scenario in SCENARIOS), (a_day, errno.ENOSPC), (a_day, errno.EROFS)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_failure_of_any_operation_is_a_spill_error_and_loses_nothing(
    memory_spill: Any, begin: Begin, scenario: Scenario, code: int
) -> None:
    """D8: nothing but SpillError or an outcome comes out, and the next start is whole."""
    fails_at = 0
    failed = True
    while failed:
        fails_at += 1
        fs = FaultyFileSystem(rule=lambda _name, n, at=fails_at: OSError(code, "injected") if n == at else None)
        opened, progress = begin(fs)
        try:
            store = opened()
            scenario(fs, store, progress)
            store.close()
        except SpillError:
            pass
        failed = fails_at <= len(fs.operations)
        fs.bury()
        check(memory_spill, progress, f"operation {fails_at} failed: {fs.operations[fails_at - 3 : fails_at]}")
    assert fails_at > FEWEST_OPERATIONS
