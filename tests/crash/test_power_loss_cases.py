"""Power cuts at chosen moments, most of them after a kill at a chosen moment: what the simulation once found (D3, S2).

What a killed process has done is seen by the next one and need not be on the device: whoever builds on it flushes it
first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from crash.power_loss_life import scratch
from support.power_loss import Journal, RecordingFileSystem

from parkade_cache.ids import PackId
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.store import SpillConfig, SpillStore
from parkade_cache.spill.testing import (
    FakeClock,
    SimulatedCrash,
    publish_chain,
    read_back,
    some_identity,
    some_payload,
)

STATES = 80


def config(root: Path) -> SpillConfig:
    return SpillConfig(
        root=root,
        capacity_bytes=1 << 30,
        min_free_bytes=0,
        write_budget_bytes_per_hour=None,
        block_bytes=5000,
        ranks=1,
    )


class Machine:
    """A folder on a device, and one process after the other that uses it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        (base / "mount").mkdir()
        self.journal = Journal(base)
        self.fs = RecordingFileSystem(self.journal)
        self.store = self._open()

    def publish(self, *names: str) -> PackId:
        return publish_chain(self.fs, self.store, names)[0].header.pack_id

    def killed(self, work: Callable[[], object], *, at: str = "", in_commit: bool = False) -> None:
        """The process is killed when it comes to this operation, or between a commit and its flush."""
        if in_commit:
            self.fs.die_in = 1
        else:
            self._kill_at(at)
        with pytest.raises(SimulatedCrash):
            work()
        keepers = self.fs.bury()
        self.fs = RecordingFileSystem(self.journal)
        self.fs.keep_until_close(keepers)
        self.store = self._open()
        list(self.store.recover())

    def found_after_power_cuts(self) -> Iterator[dict[str, bytes | None]]:
        """What is found in many of the states that a power cut may leave now; None for a damaged block."""
        for number in range(STATES):
            state = self.journal.state_at(self.journal.position, random.Random(number))
            if state.index_lost:
                continue
            with scratch() as folder:
                state.save(folder)
                yield found_in(folder / "mount" / "spill")

    def _open(self) -> SpillStore:
        # The last two digits of a pack's name are its folder: one for all.
        numbers = iter(range(self.journal.position << 8, 1 << 62, 1 << 8))
        return SpillStore.open(
            config(self.base / "mount" / "spill"),
            some_identity(),
            fs=self.fs,
            clock=FakeClock(),
            entropy=lambda _: next(numbers),
        )

    def _kill_at(self, name: str) -> None:
        def killed(*_: object) -> None:
            self.fs.dead = True
            raise SimulatedCrash(name)

        setattr(self.fs, name, killed)


def found_in(root: Path) -> dict[str, bytes | None]:
    fs = FileSystem()
    with SpillStore.open(config(root), some_identity(), clock=FakeClock()) as store:
        found: dict[str, bytes | None] = {}
        for pack in store.recover():
            (payloads,) = read_back(fs, store, pack.infos)
            for n, entry in enumerate(pack.info.entries):
                if n not in pack.dead:
                    found[entry.key.rstrip(b"\0.").decode()] = payloads[entry.key]
        return found


@pytest.fixture
def machine() -> Iterator[Machine]:
    with scratch() as folder:
        machine = Machine(folder)
        yield machine
        machine.fs.dead = True
        for keeper in machine.fs.bury():
            keeper.close()


def test_w2_the_first_pack_of_a_new_directory_is_found_after_a_power_cut(machine: Machine) -> None:
    """The names of the folders above it were never flushed."""
    machine.publish("a")
    for found in machine.found_after_power_cuts():
        assert found == {"a": some_payload("a")}


def test_w2_a_pack_in_a_folder_whose_maker_was_killed_is_found_after_a_power_cut(machine: Machine) -> None:
    """Only who made the folder flushed its name, and that process was killed before it came to it."""
    machine.killed(lambda: machine.publish("a"), at="flush_folder")
    machine.publish("b")
    for found in machine.found_after_power_cuts():
        assert found == {"b": some_payload("b")}


def test_w2_a_pack_that_was_adopted_is_found_after_a_power_cut(machine: Machine) -> None:
    """Case 44: its row said that it was published, but who renamed it was killed before the flush of its folder."""
    machine.publish("a")
    machine.killed(lambda: machine.publish("b"), at="flush_folder")
    for found in machine.found_after_power_cuts():
        assert found == {"a": some_payload("a"), "b": some_payload("b")}


def test_d6_no_hole_is_made_for_a_dead_mark_that_is_not_flushed(machine: Machine) -> None:
    """The mark's maker was killed in its commit; the next process saw it and made the hole, and the mark was lost."""
    pack_id = machine.publish("a", "b")
    machine.killed(lambda: machine.store.drop(pack_id, [0]), in_commit=True)
    for found in machine.found_after_power_cuts():
        assert found == {"b": some_payload("b")}


def test_d6_a_dropped_pack_does_not_come_back_once_a_start_has_not_found_it(machine: Machine) -> None:
    """Its row was forgotten while the removal of its file was not flushed: its remover was killed before that."""
    pack_id, other = machine.publish("a"), machine.publish("b", "c")
    machine.killed(lambda: machine.store.drop(pack_id, [0]), at="flush_folder")
    machine.store.drop(other, [0])  # Flushes the index.
    for found in machine.found_after_power_cuts():
        assert found == {"c": some_payload("c")}


def garbage(content: bytes, seed: int) -> bytes:
    """Half of the sectors hold something else."""
    chance = random.Random(seed)
    sectors = [content[start : start + 512] for start in range(0, len(content), 512)]
    return b"".join(chance.randbytes(512) if chance.random() < 0.5 else sector for sector in sectors)


def impossible_size(content: bytes) -> bytes:
    """The first entry of the schema claims a name of 2 GiB; see SQLite's file format, "B-tree Pages"."""
    four_gib = b"\x8f\xff\xff\xff\x7f"
    record = four_gib + b"\x01" + b"\x0b\x17" + four_gib + b"\x17\x01\x01\x01"
    start = int.from_bytes(content[108:110], "big")
    return content[:start] + record + content[start + len(record) :]


@pytest.mark.parametrize("damage", [*(partial(garbage, seed=n) for n in range(24)), impossible_size])
def test_an_index_of_garbage_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A record that claims an impossible size was taken for an error of the device, and no start got past it."""
    root = tmp_path / "spill"
    with SpillStore.open(config(root), some_identity(), clock=FakeClock()) as store:
        for name in "abc":
            publish_chain(FileSystem(), store, [name])
        index = store.identity_folder / "index.sqlite"
    index.write_bytes(damage(index.read_bytes()))
    assert found_in(root) == {name: some_payload(name) for name in "abc"}


def test_d3_what_a_killed_start_left_in_the_folder_of_temporaries_is_removed(tmp_path: Path) -> None:
    """Its name had the number of the process, so the next one did not know it."""
    root = tmp_path / "spill"
    with SpillStore.open(config(root), some_identity(), clock=FakeClock()) as store:
        temporaries = store.rank_folder(0) / "tmp"
    (temporaries / ".direct").write_bytes(bytes(4096))
    with SpillStore.open(config(root), some_identity(), clock=FakeClock()):
        assert list(temporaries.iterdir()) == []
