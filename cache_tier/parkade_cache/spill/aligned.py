"""Memory that may go straight to the device: direct I/O wants address, offset and length in whole pages."""

from __future__ import annotations

import mmap
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
"""Alignment of everything in a pack; a multiple of every logical block size in use."""

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]
"""Contiguous memory that a pack is written from or read into."""


def align_up(nbytes: int) -> int:
    """The next multiple of a page, at or above ``nbytes``."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def is_aligned(value: int) -> bool:
    """Whether an address, offset or length is in whole pages."""
    return value % PAGE_BYTES == 0


def byte_view(buffer: Buffer) -> memoryview:
    """A flat view of the caller's bytes, without a copy; ValueError when they are not contiguous."""
    view = memoryview(cast("bytes", buffer))  # numpy's stubs hide the buffer protocol below Python 3.12
    if not view.c_contiguous:
        raise ValueError("a pack is written from and read into contiguous memory only")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def address_of(view: memoryview) -> int:
    """Address of a non-empty view's first byte."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed, page-aligned memory of at least ``nbytes``, rounded up; gone when the last view of it goes."""
    return memoryview(mmap.mmap(-1, align_up(max(nbytes, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def wipe(view: memoryview) -> None:
    """Overwrite writable memory with zeros."""
    np.frombuffer(view, dtype=np.uint8)[:] = 0
