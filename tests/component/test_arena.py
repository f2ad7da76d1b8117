"""The arena against the real kernel: what it counts is what the kernel has, and a release gives it all back."""

from __future__ import annotations

import errno
import gc
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from parkade_cache.arena import HUGE_PAGE_BYTES, PAGE_BYTES, Advice, Arena, VirtualMemory
from parkade_cache.errors import ArenaError
from parkade_cache.memory.heap import resident_bytes

MIB = 1 << 20
EXTENT = 4 * MIB


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(extent_bytes=EXTENT, max_extents=8)
    yield made
    made.close()


def mapping_of(arena: Arena) -> dict[str, str]:
    """The kernel's own account of the arena's mapping, from ``smaps``."""
    address, found = arena.address(0), {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside:
            key, _, value = line.partition(":")
            found[key] = value.strip()
    return found


def has_huge_pages() -> bool:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return enabled.exists() and "[never]" not in enabled.read_text()


def test_committed_bytes_are_what_the_kernel_has_resident(arena: Arena):
    assert (arena.committed_bytes, arena.resident_bytes()) == (0, 0)

    for extent in (0, 3, 7):
        arena.commit(extent)

    assert arena.committed_bytes == arena.resident_bytes() == 3 * EXTENT
    assert mapping_of(arena)["Rss"] == f"{3 * EXTENT // 1024} kB"


def test_a_release_gives_back_exactly_the_extent_and_leaves_its_neighbours(arena: Arena):
    for extent in range(3):
        arena.commit(extent)
        arena.view(extent)[:] = extent + 1

    assert arena.release(1) == EXTENT

    assert arena.committed_bytes == arena.resident_bytes() == 2 * EXTENT
    assert (arena.view(0) == 1).all()
    assert (arena.view(2) == 3).all()


def test_committing_and_releasing_twice_changes_nothing(arena: Arena):
    arena.commit(2)
    arena.view(2)[:] = 7
    arena.commit(2)

    assert (arena.view(2) == 7).all()
    assert arena.release(2) == EXTENT
    assert arena.release(2) == 0
    assert arena.committed_bytes == arena.resident_bytes() == 0


def test_an_extent_is_zero_when_it_is_committed_again(arena: Arena):
    """What one tenant parked must not be readable in the next one's extent."""
    arena.commit(0)
    arena.view(0)[:] = 0xAA
    arena.release(0)

    arena.commit(0)

    assert not arena.view(0).any()


def test_case_23_twelve_rounds_of_parking_64_mib_and_dropping_the_oldest_leave_with_each_release():
    per_conversation = 64 * MIB // EXTENT
    arena = Arena(extent_bytes=EXTENT, max_extents=2 * per_conversation)
    for extent in range(per_conversation):
        arena.commit(extent)

    for round_number in range(12):
        oldest, newest = round_number % 2, (round_number + 1) % 2
        for extent in range(newest * per_conversation, (newest + 1) * per_conversation):
            arena.commit(extent)
        before = resident_bytes()
        dropped = range(oldest * per_conversation, (oldest + 1) * per_conversation)
        assert abs(resident_bytes() - before) < MIB, "dropping alone changes nothing"
        released = sum(arena.release(extent) for extent in dropped)
        assert released == 64 * MIB
        assert before - resident_bytes() >= 48 * MIB
        assert arena.committed_bytes == arena.resident_bytes() == 64 * MIB
    arena.close()


def test_views_share_the_memory_and_are_aligned(arena: Arena):
    arena.commit(1)
    first, second = arena.view(1), arena.view(1)

    first[100] = 42

    assert second[100] == 42
    assert first.size == EXTENT
    assert first.ctypes.data == arena.address(1)
    assert arena.address(1) % PAGE_BYTES == 0


def test_extents_of_whole_huge_pages_begin_on_one_and_are_backed_by_them(arena: Arena):
    assert arena.address(0) % HUGE_PAGE_BYTES == 0
    if not has_huge_pages():
        pytest.skip("this kernel has no transparent huge pages, or never uses them")

    arena.commit(0)

    assert mapping_of(arena)["AnonHugePages"] == f"{EXTENT // 1024} kB"
    assert "hg" in mapping_of(arena)["VmFlags"].split()


@pytest.mark.parametrize(("extent_bytes", "huge_pages"), [(3 * MIB, True), (EXTENT, False)])
def test_huge_pages_are_declined_where_one_could_span_two_extents_or_nobody_wants_them(
    extent_bytes: int, huge_pages: bool
):
    arena = Arena(extent_bytes=extent_bytes, max_extents=4, huge_pages=huge_pages)
    for extent in range(4):
        arena.commit(extent)

    assert mapping_of(arena)["AnonHugePages"] == "0 kB"
    arena.release(1)
    assert arena.resident_bytes() == arena.committed_bytes == 3 * extent_bytes
    arena.close()


def test_the_memory_is_in_no_core_dump_and_in_no_forked_child(arena: Arena):
    """A child would keep released pages alive, and a dump would hold every tenant's conversation."""
    flags = mapping_of(arena)["VmFlags"].split()

    assert {"dc", "dd"} <= set(flags)


def test_committing_and_releasing_in_any_order_makes_no_further_mappings(arena: Arena):
    """The kernel limits mappings per process; one that grew with extents would run out."""
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for extent in (0, 2, 4, 6):
        arena.commit(extent)
    arena.release(2)

    assert abs(len(Path("/proc/self/maps").read_text().splitlines()) - before) <= 1


def test_a_view_of_what_is_not_committed_is_refused(arena: Arena):
    with pytest.raises(ArenaError, match="not committed"):
        arena.view(0)


@pytest.mark.parametrize("extent", [-1, 8])
def test_an_extent_outside_the_arena_is_refused(arena: Arena, extent: int):
    with pytest.raises(IndexError):
        arena.commit(extent)


@pytest.mark.parametrize(("extent_bytes", "max_extents"), [(0, 1), (4095, 1), (-4096, 1), (4096, 0)])
def test_sizes_that_are_not_whole_pages_are_refused(extent_bytes: int, max_extents: int):
    with pytest.raises(ValueError, match="whole pages"):
        Arena(extent_bytes=extent_bytes, max_extents=max_extents)


def test_addresses_beyond_what_the_machine_has_are_an_error_of_the_arena():
    with pytest.raises(ArenaError, match="cannot reserve"):
        Arena(extent_bytes=1 << 40, max_extents=1 << 10)


def test_reserving_far_more_than_the_machine_has_costs_nothing():
    before = resident_bytes()
    arena = Arena(extent_bytes=32 * MIB, max_extents=1 << 15)

    assert resident_bytes() - before < 4 * MIB
    arena.close()


def test_a_closed_arena_gives_everything_back_and_leaves_old_views_readable():
    arena = Arena(extent_bytes=EXTENT, max_extents=4)
    arena.commit(0)
    view = arena.view(0)
    before = resident_bytes()

    arena.close()
    arena.close()

    assert before - resident_bytes() >= EXTENT - MIB
    assert int(view[0]) == 0, "a stale view must not crash the process"
    with pytest.raises(ArenaError, match="closed"):
        arena.commit(0)


def test_the_addresses_go_with_the_last_view():
    arena = Arena(extent_bytes=EXTENT, max_extents=4)
    arena.commit(0)
    view, address = arena.view(0), arena.address(0)
    arena.close()
    del arena
    gc.collect()
    assert any(address == start for start in mapped(address))

    del view
    gc.collect()

    assert not any(mapped(address))


def mapped(address: int) -> Iterator[int]:
    """``address``, once for each mapping that holds it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            yield address


class FailingMemory(VirtualMemory):
    """A kernel that has no more memory after half an extent."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.touched = 0

    def advise(self, address: int, nbytes: int, advice: Advice) -> None:
        if advice is Advice.POPULATE_WRITE:
            super().advise(address, nbytes // 2, advice)
            raise OSError(self.number, os.strerror(self.number))
        super().advise(address, nbytes, advice)

    def touch(self, address: int, nbytes: int) -> None:
        self.touched += 1
        super().touch(address, nbytes)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT, errno.EAGAIN])
def test_a_commit_that_the_kernel_refuses_leaves_nothing_committed(number: int):
    arena = Arena(extent_bytes=EXTENT, max_extents=2, memory=FailingMemory(number))

    with pytest.raises(ArenaError, match="cannot commit extent 1"):
        arena.commit(1)

    assert arena.committed_bytes == arena.resident_bytes() == 0
    assert not arena.is_committed(1)
    assert arena.release(1) == 0


def test_a_kernel_that_cannot_populate_has_its_pages_touched_instead():
    memory = FailingMemory(errno.EINVAL)
    arena = Arena(extent_bytes=EXTENT, max_extents=2, memory=memory)

    arena.commit(0)
    arena.commit(1)

    assert memory.touched == 2
    assert arena.committed_bytes == arena.resident_bytes() == 2 * EXTENT


def test_an_extent_is_pinned_once_it_is_resident_and_unpinned_before_it_goes():
    seen: list[tuple[str, int, int, int]] = []
    arena = Arena(
        extent_bytes=EXTENT,
        max_extents=2,
        pin=lambda address, nbytes: seen.append(("pin", address, nbytes, arena.resident_bytes())),
        unpin=lambda address, nbytes: seen.append(("unpin", address, nbytes, arena.resident_bytes())),
    )

    arena.commit(1)
    arena.release(1)

    assert seen == [("pin", arena.address(1), EXTENT, EXTENT), ("unpin", arena.address(1), EXTENT, EXTENT)]


def refuse(address: int, nbytes: int) -> None:
    raise RuntimeError("the device says no")


def test_an_extent_that_cannot_be_pinned_is_not_committed():
    arena = Arena(extent_bytes=EXTENT, max_extents=1, pin=refuse)

    with pytest.raises(ArenaError, match="the device says no"):
        arena.commit(0)

    assert arena.committed_bytes == arena.resident_bytes() == 0


def test_an_extent_that_cannot_be_unpinned_stays_committed():
    """A device may still write to it: giving the pages to somebody else would corrupt them."""
    arena = Arena(extent_bytes=EXTENT, max_extents=1, unpin=refuse)
    arena.commit(0)

    with pytest.raises(ArenaError, match="cannot release extent 0"):
        arena.release(0)

    assert arena.committed_bytes == arena.resident_bytes() == EXTENT
    assert arena.is_committed(0)


def test_many_threads_commit_and_release_without_losing_count():
    arena = Arena(extent_bytes=MIB, max_extents=32)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(arena.commit, range(32)))
        assert arena.committed_bytes == arena.resident_bytes() == 32 * MIB
        released = sum(threads.map(arena.release, [*range(0, 32, 2)] * 2))

    assert released == 16 * MIB
    assert arena.committed_bytes == arena.resident_bytes() == 16 * MIB
    arena.close()


def test_two_threads_that_want_the_same_extent_commit_it_once_and_both_return_with_it_ready():
    pinned: list[int] = []
    entered, may_go_on = threading.Event(), threading.Event()

    def pin(address: int, nbytes: int) -> None:
        pinned.append(address)
        entered.set()
        assert may_go_on.wait(60)

    arena = Arena(extent_bytes=MIB, max_extents=2, pin=pin)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(arena.commit, 0)
        assert entered.wait(60)
        assert not arena.is_committed(0)
        second = threads.submit(arena.commit, 0)
        may_go_on.set()
        first.result(60)
        second.result(60)

    assert pinned == [arena.address(0)]
    assert arena.is_committed(0)


def test_the_arena_can_be_used_by_the_kernels_calls_directly(arena: Arena, tmp_path: Path):
    """Blocks are written to files straight from the extent."""
    arena.commit(0)
    arena.view(0)[:] = np.arange(EXTENT, dtype=np.uint32).astype(np.uint8)
    path = tmp_path / "payload"
    with path.open("wb", buffering=0) as file:
        assert os.writev(file.fileno(), [memoryview(arena.view(0))[:PAGE_BYTES]]) == PAGE_BYTES

    assert path.read_bytes() == arena.view(0)[:PAGE_BYTES].tobytes()
