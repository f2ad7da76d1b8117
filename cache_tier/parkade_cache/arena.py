"""RAM for parked blocks that can really be given back.

Why it exists: memory freed through an allocator stays with the process until the allocator thinks otherwise. Here
a large range of addresses is reserved once and filled and emptied by extent with ``madvise``: releasing an extent
lowers the control group's usage before the call returns.

What must stay true: ``committed_bytes`` is what the kernel charges for this arena (``resident_bytes`` asks it);
a commit that fails leaves nothing committed; an extent is unpinned before it is released; memory of the arena
is in no core dump and no forked child, where it would outlive its release; nothing that blocks holds the
interpreter lock or the arena's own.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from parkade_cache.errors import ArenaError

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
HUGE_PAGE_BYTES: Final = 2 << 20
"""Size and alignment of a transparent huge page on x86-64 and on ARM with 4 KiB pages."""

EXTENT_TARGET_BYTES: Final = 32 << 20
"""Small enough to be given back one by one, large enough for few system calls and sequential writes."""

_PROT_READ_WRITE: Final = 0x1 | 0x2
_MAP_PRIVATE_ANONYMOUS_NORESERVE: Final = 0x02 | 0x20 | 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class Advice(enum.IntEnum):
    """What ``madvise`` is asked for; numbers of the kernel's interface."""

    DONTNEED = 4
    DONTFORK = 10
    HUGEPAGE = 14
    NOHUGEPAGE = 15
    DONTDUMP = 16
    POPULATE_WRITE = 23


PinHook = Callable[[int, int], None]
"""Called with address and bytes of an extent: registers it with a device, or takes it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentShape:
    """How slots are laid into extents. ``extent_bytes`` covers the slots and what rounding adds."""

    slot_bytes: int
    slots: int
    extent_bytes: int

    @property
    def waste_bytes(self) -> int:
        return self.extent_bytes - self.slots * self.slot_bytes


def plan_extents(*, slot_bytes: int, budget_bytes: int, target_bytes: int = EXTENT_TARGET_BYTES) -> ExtentShape:
    """The shape of extents for slots of ``slot_bytes`` (a multiple of the page). Pure.

    Whole slots, between half the target and the target, rounded to whole huge pages with the least waste; plain
    pages where rounding would waste more than a sixteenth. A slot larger than the target gets an extent of its own.
    Where the budget holds fewer than eight such extents they are smaller, so that it can still be given back in parts.
    """
    if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
        raise ValueError(f"a slot must be a positive multiple of {PAGE_BYTES} bytes, not {slot_bytes}")
    small_bytes = max(slot_bytes, budget_bytes // _EXTENTS_OF_A_TINY_BUDGET)
    most = max(1, min(small_bytes, target_bytes) // slot_bytes)
    shapes = (_huge_shape(slot_bytes, slots) for slots in range(most, max(1, most // 2) - 1, -1))
    best = min(shapes, key=lambda shape: shape.waste_bytes / shape.extent_bytes)
    if best.waste_bytes * _MOST_WASTE_DIVISOR <= best.extent_bytes:
        return best
    return ExtentShape(slot_bytes=slot_bytes, slots=most, extent_bytes=most * slot_bytes)


_EXTENTS_OF_A_TINY_BUDGET: Final = 8
_MOST_WASTE_DIVISOR: Final = 16


def _huge_shape(slot_bytes: int, slots: int) -> ExtentShape:
    extent_bytes = -(-slots * slot_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return ExtentShape(slot_bytes=slot_bytes, slots=slots, extent_bytes=extent_bytes)


class VirtualMemory:
    """The kernel's calls behind the arena; a seam for tests that make them fail. Each releases the interpreter lock."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._munmap, self._madvise, self._mincore = libc.mmap, libc.munmap, libc.madvise, libc.mincore
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        )  # fmt: skip
        self._munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def reserve(self, nbytes: int) -> int:
        """Address of a fresh private range that costs nothing until it is touched. Raises OSError."""
        address = self._mmap(None, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if address is None or address == _MAP_FAILED:
            raise _last_error()
        return int(address)

    def unmap(self, address: int, nbytes: int) -> None:
        if self._munmap(address, nbytes):
            raise _last_error()

    def advise(self, address: int, nbytes: int, advice: Advice) -> None:
        if self._madvise(address, nbytes, int(advice)):
            raise _last_error()

    def touch(self, address: int, nbytes: int) -> None:
        """Make every page resident by writing zeros; for kernels without ``POPULATE_WRITE`` (before 5.14)."""
        ctypes.memset(address, 0, nbytes)

    def resident_pages(self, address: int, nbytes: int) -> int:
        """Pages of the range that are in memory, by ``mincore``."""
        found = np.zeros(-(-nbytes // PAGE_BYTES), dtype=np.uint8)
        if self._mincore(address, nbytes, found.ctypes.data):
            raise _last_error()
        return int(np.count_nonzero(found & 1))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


class _Range:
    """The reserved addresses. Unmapped when the arena and every view of it are gone, never under a view."""

    def __init__(self, memory: VirtualMemory, nbytes: int) -> None:
        self._memory = memory
        self._reserved_bytes = nbytes + HUGE_PAGE_BYTES
        self._start = memory.reserve(self._reserved_bytes)
        self.address = -(-self._start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    def __del__(self) -> None:
        if hasattr(self, "_start"):
            self._memory.unmap(self._start, self._reserved_bytes)


class _State(enum.Enum):
    EMPTY = enum.auto()
    COMMITTED = enum.auto()
    CHANGING = enum.auto()
    """A thread is committing or releasing it; others wait for that."""


class Arena:
    """Extents of parked memory, numbered from 0. Thread-safe; different extents commit and release in parallel.

    ``extent_bytes`` is a multiple of the page. Huge pages are used where the kernel has them and ``extent_bytes``
    is a multiple of theirs; otherwise they are declined, because a huge page across two extents could only be given
    back with both. ``pin`` and ``unpin`` run on the thread that commits or releases. Reserving is free: reserve for
    the largest budget that a live change may set.
    """

    def __init__(
        self,
        *,
        extent_bytes: int,
        max_extents: int,
        huge_pages: bool = True,
        pin: PinHook | None = None,
        unpin: PinHook | None = None,
        memory: VirtualMemory | None = None,
    ) -> None:
        if extent_bytes <= 0 or extent_bytes % PAGE_BYTES or max_extents <= 0:
            raise ValueError(f"extents must be whole pages and at least one, not {max_extents} of {extent_bytes} bytes")
        self.extent_bytes = extent_bytes
        self.max_extents = max_extents
        self._pin, self._unpin = pin, unpin
        self._memory = memory or VirtualMemory()
        self._changed = threading.Condition()
        self._states = [_State.EMPTY] * max_extents
        self._committed = 0
        self._can_populate = True
        self._range: _Range | None = self._reserve(huge_pages=huge_pages)

    def commit(self, extent: int) -> None:
        """Make the whole extent resident, zeroed, and pinned where there is a hook; nothing if it is already.

        Raises ArenaError with nothing committed.
        """
        with self._change(extent, unless=_State.COMMITTED) as change:
            if change is None:
                return
            address = self.address(extent)
            try:
                self._populate(address)
                if self._pin is not None:
                    self._pin(address, self.extent_bytes)
            except Exception as error:
                self._memory.advise(address, self.extent_bytes, Advice.DONTNEED)
                raise ArenaError(f"cannot commit extent {extent} of {self.extent_bytes} bytes: {error}") from error
            change.becomes(_State.COMMITTED)

    def release(self, extent: int) -> int:
        """Give the extent back to the kernel; returns the bytes given back, 0 where it was not committed.

        What it held is gone; views of it must no longer be used (a touch would make pages resident that nobody
        counts). Raises ArenaError where it cannot be unpinned: it then stays committed.
        """
        with self._change(extent, unless=_State.EMPTY) as change:
            if change is None:
                return 0
            address = self.address(extent)
            try:
                if self._unpin is not None:
                    self._unpin(address, self.extent_bytes)
                self._memory.advise(address, self.extent_bytes, Advice.DONTNEED)
            except Exception as error:
                raise ArenaError(f"cannot release extent {extent}: {error}") from error
            change.becomes(_State.EMPTY)
            return self.extent_bytes

    def is_committed(self, extent: int) -> bool:
        return self._states[extent] is _State.COMMITTED

    def address(self, extent: int) -> int:
        """Where the extent begins: aligned to the page, and to huge pages where ``extent_bytes`` is."""
        if not 0 <= extent < self.max_extents:
            raise IndexError(f"extent {extent} of {self.max_extents}")
        return self._open_range().address + extent * self.extent_bytes

    def view(self, extent: int) -> npt.NDArray[np.uint8]:
        """The extent's bytes without a copy. Raises ArenaError where it is not committed."""
        if not self.is_committed(extent):
            raise ArenaError(f"extent {extent} is not committed")
        buffer = (ctypes.c_uint8 * self.extent_bytes).from_address(self.address(extent))
        buffer.range = self._open_range()  # type: ignore[attr-defined]  # keeps the addresses mapped under the view
        return np.frombuffer(memoryview(buffer), dtype=np.uint8)

    @property
    def committed_bytes(self) -> int:
        return self._committed * self.extent_bytes

    def resident_bytes(self) -> int:
        """What the kernel has in memory for this arena, extent by extent; for checks, not for the step path."""
        pages = sum(
            self._memory.resident_pages(self.address(extent), self.extent_bytes) for extent in range(self.max_extents)
        )
        return pages * PAGE_BYTES

    def close(self) -> None:
        """Release everything. The addresses stay reserved until the last view is gone. Closing twice is harmless."""
        if self._range is None:
            return
        for extent in range(self.max_extents):
            self.release(extent)
        self._range = None

    def _reserve(self, *, huge_pages: bool) -> _Range:
        nbytes = self.extent_bytes * self.max_extents
        try:
            reserved = _Range(self._memory, nbytes)
            for advice in (Advice.DONTFORK, Advice.DONTDUMP):
                self._memory.advise(reserved.address, nbytes, advice)
        except OSError as error:
            raise ArenaError(f"cannot reserve addresses for {nbytes} bytes: {error}") from error
        fits = self.extent_bytes % HUGE_PAGE_BYTES == 0
        self._advise_if_known(reserved.address, nbytes, Advice.HUGEPAGE if huge_pages and fits else Advice.NOHUGEPAGE)
        return reserved

    def _advise_if_known(self, address: int, nbytes: int, advice: Advice) -> None:
        """A kernel built without huge pages answers EINVAL, and then has none to decline either."""
        try:
            self._memory.advise(address, nbytes, advice)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise ArenaError(f"cannot set {advice.name} for the arena: {error}") from error

    def _populate(self, address: int) -> None:
        if self._can_populate:
            try:
                self._memory.advise(address, self.extent_bytes, Advice.POPULATE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._can_populate = False
            else:
                return
        self._memory.touch(address, self.extent_bytes)

    def _open_range(self) -> _Range:
        if self._range is None:
            raise ArenaError("the arena is closed")
        return self._range

    @contextmanager
    def _change(self, extent: int, *, unless: _State) -> Iterator[_Change | None]:
        """The exclusive right to change one extent, without a lock held; ``None`` where it already is as wanted.

        Whatever happens inside, the extent leaves CHANGING: as it was, or as ``becomes`` said.
        """
        self.address(extent)
        with self._changed:
            self._changed.wait_for(lambda: self._states[extent] is not _State.CHANGING)
            before = self._states[extent]
            if before is not unless:
                self._states[extent] = _State.CHANGING
        if before is unless:
            yield None
            return
        change = _Change(before)
        try:
            yield change
        finally:
            with self._changed:
                self._committed += (change.state is _State.COMMITTED) - (before is _State.COMMITTED)
                self._states[extent] = change.state
                self._changed.notify_all()


class _Change:
    """How an extent will be once its change is over."""

    def __init__(self, state: _State) -> None:
        self.state = state

    def becomes(self, state: _State) -> None:
        self.state = state
