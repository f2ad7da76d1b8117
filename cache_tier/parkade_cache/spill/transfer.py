"""How much goes to or comes from the device at once, and doing all of it when the kernel does only a part."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from parkade_cache.spill.aligned import PAGE_BYTES, address_of, is_aligned
from parkade_cache.spill.files import FileSystem

UNIT_BYTES = 32 << 20
"""Most bytes of one transfer (W1): large enough to keep a device busy, small enough to let memory go in steps."""

UNIT_PIECES = 1000
"""Most pieces of memory in one transfer; the kernel takes 1024."""

BOUNCE_BYTES = 8 << 20
"""Copied at once where memory is not aligned; with two transfers under way and one filling, at most 24 MiB."""


def straight_bytes(view: memoryview, *, direct: bool) -> int:
    """How many of a block's bytes, from its start, need no copy: whole pages, in aligned memory if I/O is direct."""
    if direct and not is_aligned(address_of(view)):
        return 0
    return len(view) // PAGE_BYTES * PAGE_BYTES


def write_fully(fs: FileSystem, fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all of it, however short the kernel's single writes are; ENOSPC when it stops taking any."""
    rest = list(views)
    while rest:
        written = fs.pwritev(fd, rest, offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += written
        rest = _after(rest, written)


def read_fully(fs: FileSystem, fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Read all of it; EIO where the file ends before. Packs end on a page, so a read that does not was cut short."""
    rest = list(views)
    while rest:
        got = fs.preadv(fd, rest, offset)
        if got <= 0 or not is_aligned(got):
            raise OSError(errno.EIO, "the file ends before its blocks do")
        offset += got
        rest = _after(rest, got)


def _after(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []
