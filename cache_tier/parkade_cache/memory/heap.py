"""Giving the freed heap of this process back to the kernel, and proving it.

Why it exists: parked blocks live in extents, but everything else in the pod's processes goes through an
allocator that keeps what is freed. A gate that is short asks for that first, because it costs nobody a
conversation (G3).

What must stay true: the allocator that is asked is the one that serves ``malloc`` in this process, which a preload
may have replaced; what is measured around the call is not inside its time (section 7 of the rules). The call
locks the allocator's arenas and may stall other threads that allocate: run it between steps of the engine.
"""

from __future__ import annotations

import ctypes
import enum
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import read_file


class Allocator(enum.StrEnum):
    """Who serves ``malloc`` here."""

    GLIBC = "glibc"
    JEMALLOC = "jemalloc"
    TCMALLOC = "tcmalloc"
    MIMALLOC = "mimalloc"
    OTHER = "other"
    """One without a known way to give memory back (musl, for one, does so by itself)."""


@dataclass(frozen=True, slots=True)
class HeapSize:
    """What the allocator holds: ``heap_bytes`` from the kernel, of which ``free_bytes`` serve nobody."""

    heap_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapRelease:
    """One release of this process's heap, as its receipt records it. ``None`` where the allocator does not tell."""

    allocator: Allocator
    seconds: float
    resident_before_bytes: int
    resident_after_bytes: int
    heap_before_bytes: int | None
    heap_free_before_bytes: int | None
    returned: bool

    @property
    def released_bytes(self) -> int:
        """Never negative: other threads may have touched more memory than the release gave back."""
        return max(0, self.resident_before_bytes - self.resident_after_bytes)


class Heap:
    """The heap of this process. ``library`` holds the process's own symbols; the default is the process itself."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = ctypes.CDLL(None) if library is None else library
        self.allocator = detect_allocator(self._library)

    def release(self) -> HeapRelease:
        """Give back what is free. Blocks for tens of milliseconds per GiB with the interpreter lock released."""
        size = self.size()
        resident_before_bytes = resident_bytes()
        give_back = _RELEASES[self.allocator]
        started = time.perf_counter()
        said_yes = give_back(self._library)
        seconds = time.perf_counter() - started
        resident_after_bytes = resident_bytes()
        return HeapRelease(
            allocator=self.allocator,
            seconds=seconds,
            resident_before_bytes=resident_before_bytes,
            resident_after_bytes=resident_after_bytes,
            heap_before_bytes=None if size is None else size.heap_bytes,
            heap_free_before_bytes=None if size is None else size.free_bytes,
            returned=resident_after_bytes < resident_before_bytes if said_yes is None else said_yes,
        )

    def size(self) -> HeapSize | None:
        """``None`` where the allocator keeps no such statistics."""
        measure = _SIZES.get(self.allocator)
        return None if measure is None else measure(self._library)


_MARKS: Final = (
    (Allocator.JEMALLOC, "mallctl"),
    (Allocator.TCMALLOC, "MallocExtension_ReleaseFreeMemory"),
    (Allocator.MIMALLOC, "mi_collect"),
    (Allocator.GLIBC, "malloc_trim"),
)
"""A function only that allocator has. glibc comes last: it is loaded in every process, replaced or not."""


def detect_allocator(library: ctypes.CDLL) -> Allocator:
    """The allocator whose own function lives in the same file as ``malloc``.

    A library may carry an allocator for itself without serving ``malloc``: asking that one would do nothing.
    """
    serving = _file_of(library, "malloc")
    for allocator, mark in _MARKS:
        if serving is not None and _file_of(library, mark) == serving:
            return allocator
    return Allocator.OTHER


def resident_bytes() -> int:
    """Resident memory of this process, as the kernel counts it (approximate by a few pages per processor).

    0 where it cannot be read: a release that worked must not fail for a statistic.
    """
    try:
        text = read_file("/proc/self/statm") or b"0 0"
    except MalformedAccountError:
        return 0
    return int(text.split()[1]) * _PAGE_BYTES


_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of ``dlfcn.h``."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def _file_of(library: ctypes.CDLL, symbol: str) -> str | None:
    """The file that defines ``symbol``, ``None`` where nobody does or the loader cannot tell."""
    try:
        function, look_up = getattr(library, symbol), library.dladdr
    except AttributeError:
        return None
    info = _SymbolInfo()
    look_up.argtypes = (ctypes.c_void_p, ctypes.POINTER(_SymbolInfo))
    if not look_up(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)) or info.file_name is None:
        return None
    return str(Path(os.fsdecode(info.file_name)).resolve())


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` of ``malloc.h``; summed over all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _glibc_size(library: ctypes.CDLL) -> HeapSize | None:
    try:
        call = library.mallinfo2
    except AttributeError:
        return None
    call.restype = _MallInfo2
    info = call()
    return HeapSize(heap_bytes=info.arena + info.hblkhd, free_bytes=info.fordblks)


def _glibc_release(library: ctypes.CDLL) -> bool | None:
    library.malloc_trim.argtypes = (ctypes.c_size_t,)
    return bool(library.malloc_trim(0))


_JEMALLOC_ALL_ARENAS: Final = 4096
"""``MALLCTL_ARENAS_ALL``: stands for every arena in the names of the control tree."""


def _jemalloc_release(library: ctypes.CDLL) -> bool | None:
    library.mallctl(b"thread.tcache.flush", None, None, None, ctypes.c_size_t(0))
    library.mallctl(f"arena.{_JEMALLOC_ALL_ARENAS}.purge".encode(), None, None, None, ctypes.c_size_t(0))
    return None


def _jemalloc_size(library: ctypes.CDLL) -> HeapSize | None:
    epoch = ctypes.c_uint64(1)
    # Statistics are a snapshot; writing the epoch takes a new one.
    library.mallctl(b"epoch", None, None, ctypes.byref(epoch), ctypes.c_size_t(ctypes.sizeof(epoch)))
    allocated_bytes = _jemalloc_number(library, b"stats.allocated")
    held_bytes = _jemalloc_number(library, b"stats.resident")
    if allocated_bytes is None or held_bytes is None:
        return None
    return HeapSize(heap_bytes=held_bytes, free_bytes=max(0, held_bytes - allocated_bytes))


def _jemalloc_number(library: ctypes.CDLL, name: bytes) -> int | None:
    value = ctypes.c_size_t()
    length = ctypes.c_size_t(ctypes.sizeof(value))
    failed = library.mallctl(name, ctypes.byref(value), ctypes.byref(length), None, ctypes.c_size_t(0))
    return None if failed else value.value


def _tcmalloc_release(library: ctypes.CDLL) -> bool | None:
    library.MallocExtension_ReleaseFreeMemory()
    return None


def _tcmalloc_size(library: ctypes.CDLL) -> HeapSize | None:
    heap_bytes = _tcmalloc_number(library, b"generic.heap_size")
    used_bytes = _tcmalloc_number(library, b"generic.current_allocated_bytes")
    unmapped_bytes = _tcmalloc_number(library, b"tcmalloc.pageheap_unmapped_bytes")
    if heap_bytes is None or used_bytes is None or unmapped_bytes is None:
        return None
    held_bytes = heap_bytes - unmapped_bytes
    return HeapSize(heap_bytes=held_bytes, free_bytes=max(0, held_bytes - used_bytes))


def _tcmalloc_number(library: ctypes.CDLL, name: bytes) -> int | None:
    try:
        call = library.MallocExtension_GetNumericProperty
    except AttributeError:
        return None
    value = ctypes.c_size_t()
    return value.value if call(name, ctypes.byref(value)) else None


def _mimalloc_release(library: ctypes.CDLL) -> bool | None:
    """It honours its own purge delay (tens of milliseconds) even when forced: what stays now, leaves by itself."""
    library.mi_collect.argtypes = (ctypes.c_bool,)
    library.mi_collect.restype = None
    library.mi_collect(True)
    return None


def _no_release(library: ctypes.CDLL) -> bool | None:
    del library
    return False


_RELEASES: Final[Mapping[Allocator, Callable[[ctypes.CDLL], bool | None]]] = {
    Allocator.GLIBC: _glibc_release,
    Allocator.JEMALLOC: _jemalloc_release,
    Allocator.TCMALLOC: _tcmalloc_release,
    Allocator.MIMALLOC: _mimalloc_release,
    Allocator.OTHER: _no_release,
}
"""Each answers whether it gave anything back, ``None`` where it does not say."""

_SIZES: Final[Mapping[Allocator, Callable[[ctypes.CDLL], HeapSize | None]]] = {
    Allocator.GLIBC: _glibc_size,
    Allocator.JEMALLOC: _jemalloc_size,
    Allocator.TCMALLOC: _tcmalloc_size,
}
