"""Reading one rank's pack file: refused unless safe and whole, blocks straight into the caller's memory.

What must stay true: a file is opened without following links (D5); no number in it is believed before it is proven
against the file's size; a block is good only when its checksum holds (D4), and a bad or unreadable block costs that
block alone and never raises, while a device that reads nothing at all is an error and no bad block (D8).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from parkade_cache.errors import FormatError, UnsafePathError
from parkade_cache.spill import layout
from parkade_cache.spill.aligned import PAGE_BYTES, Buffer, align_up, aligned_buffer, byte_view, is_aligned, wipe
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.lanes import DEFAULT_DEPTH, Lanes
from parkade_cache.spill.pack import (
    PackAddress,
    PackEntry,
    PackHeader,
    PackInfo,
    check_pair,
    checksum_of,
    parse_footer,
    parse_header,
    parse_trailer,
)
from parkade_cache.spill.transfer import BOUNCE_BYTES, UNIT_BYTES, UNIT_PIECES, read_fully, straight_bytes

SMALLEST_PACK_BYTES = 4 * PAGE_BYTES
"""Header, one block, footer and trailer."""


@dataclass(slots=True, eq=False)
class _Target:
    """One block on its way in: the memory it goes to, and whether every part of it has arrived."""

    entry: PackEntry
    view: memoryview
    arrived: bool = True
    good: bool = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole pages of the file that hold a part of one block; copied where memory cannot take them straight."""

    target: _Target
    offset: int
    view: memoryview
    copied: bool
    last: bool

    @property
    def file_bytes(self) -> int:
        return align_up(len(self.view))


@dataclass(slots=True)
class _Run:
    """Adjacent pages that one read brings."""

    offset: int
    views: list[memoryview] = field(default_factory=list)
    nbytes: int = 0
    bounce: memoryview | None = None
    bounced_bytes: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    copies: list[tuple[memoryview, memoryview]] = field(default_factory=list)
    failed: bool = False

    def takes(self, piece: _Piece) -> bool:
        bounced_bytes = self.bounced_bytes + (piece.file_bytes if piece.copied else 0)
        fits = self.nbytes + piece.file_bytes <= UNIT_BYTES and bounced_bytes <= BOUNCE_BYTES
        return fits and len(self.views) < UNIT_PIECES and piece.offset == self.offset + self.nbytes

    def add(self, piece: _Piece) -> None:
        self.views.append(self._bounced(piece) if piece.copied else piece.view)
        self.pieces.append(piece)
        self.nbytes += piece.file_bytes

    def _bounced(self, piece: _Piece) -> memoryview:
        if self.bounce is None:
            self.bounce = aligned_buffer(BOUNCE_BYTES)
        start = self.bounced_bytes
        self.bounced_bytes += piece.file_bytes
        self.copies.append((piece.view, self.bounce[start : start + len(piece.view)]))
        return self.bounce[start : self.bounced_bytes]


class PackReader:
    """One open pack file of one rank. Not thread-safe."""

    def __init__(
        self,
        fs: FileSystem,
        path: Path,
        *,
        expected: PackAddress,
        direct: bool,
        depth: int = DEFAULT_DEPTH,
    ) -> None:
        """Open the file; UnsafePathError for anything but a regular file of ours, SpillError when it cannot be opened.

        UnsafePathError also when the file alone is gone; where the folder around it is missing too, the disk is gone.
        ``read_info`` checks that the file is the ``expected`` one.
        """
        self._fs = fs
        self._expected = expected
        self._direct = direct
        self._depth = depth
        self._lanes = Lanes(depth=depth)
        self._fd = -1
        try:
            self._fd = layout.open_checked(fs, path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            self._file_bytes = fs.fstat(self._fd).st_size
        except OSError as error:
            self.close()
            if isinstance(error, FileNotFoundError) and _has_place(fs, path):
                raise UnsafePathError(errno.ENOENT, f"pack {expected.pack_id} was removed from its place") from error
            layout.raise_spill_error(error, f"opening pack {expected.pack_id}")

    def read_info(self) -> PackInfo:
        """Header, entries and tips; FormatError when anything about them does not hold (case 42)."""
        try:
            return self._read_info()
        except OSError as error:
            layout.raise_spill_error(error, f"reading pack {self._expected.pack_id}")

    def read_into(self, entries: Sequence[PackEntry], buffers: Sequence[Buffer], *, verify: bool = True) -> list[bool]:
        """Read blocks into the caller's memory; for each, whether its bytes are what was written (D4).

        A buffer has the entry's size or that rounded up to a page; page-aligned and padded ones are read straight.
        Buffers are staging memory: one whose block is bad is wiped, so that nothing of it can be used by mistake.
        Never raises for what is on the disk; SpillError when the device fails to read the file's first page as well,
        ValueError for buffers of the wrong size.
        """
        targets = [_target(entry, buffer) for entry, buffer in zip(entries, buffers, strict=True)]
        wanted = sorted((t for t in targets if self._is_possible(t.entry)), key=lambda target: target.entry.offset)
        self._read_runs(wanted, verify=verify)
        for target in targets:
            if not target.good:
                wipe(target.view)
        if not all(target.arrived for target in wanted):
            self._require_device()
        return [target.good for target in targets]

    def close(self) -> None:
        """Give the file back; safe to call twice."""
        self._lanes.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if not self._direct:
                # What read-ahead brought beyond the ranges that were asked for.
                with contextlib.suppress(OSError):
                    self._fs.drop_cache(fd, 0, 0)
            self._fs.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read_info(self) -> PackInfo:
        if self._file_bytes < SMALLEST_PACK_BYTES or not is_aligned(self._file_bytes):
            raise FormatError(f"pack of {self._file_bytes} bytes: cut short or not a pack")
        header_page = self._read_at(0, PAGE_BYTES)
        header = self._checked_header(header_page)
        trailer = parse_trailer(self._read_at(self._file_bytes - PAGE_BYTES, PAGE_BYTES), file_bytes=self._file_bytes)
        check_pair(header_page, header, trailer)
        entries, tips = parse_footer(self._read_at(trailer.footer_offset, align_up(trailer.footer_bytes)), trailer)
        return PackInfo(header=header, entries=entries, tips=tips, file_bytes=self._file_bytes)

    def _checked_header(self, page: bytes) -> PackHeader:
        header = parse_header(page)
        if PackAddress(header.pack_id, header.identity, header.rank) != self._expected:
            raise FormatError(f"not the pack, identity or rank that its place says: {self._expected.pack_id}")
        return header

    def _read_at(self, offset: int, nbytes: int) -> bytes:
        buffer = aligned_buffer(nbytes)[:nbytes]
        self._read(views=[buffer], offset=offset, nbytes=nbytes)
        return bytes(buffer)

    def _read(self, *, views: Sequence[memoryview], offset: int, nbytes: int) -> None:
        read_fully(self._fs, self._fd, views, offset)
        if not self._direct:
            self._fs.drop_cache(self._fd, offset, nbytes)

    def _is_possible(self, entry: PackEntry) -> bool:
        ends_inside = entry.offset + entry.padded_bytes <= self._file_bytes - PAGE_BYTES
        return is_aligned(entry.offset) and entry.offset >= PAGE_BYTES and ends_inside

    def _read_runs(self, targets: Sequence[_Target], *, verify: bool) -> None:
        """One run is verified while the next ones are read."""
        under_way: deque[_Run] = deque()
        try:
            for run in self._runs(targets):
                if self._lanes.full:
                    self._lanes.wait_oldest()
                self._lanes.submit(partial(self._read_run, run))
                under_way.append(run)
                if len(under_way) > self._depth:
                    self._settle(under_way.popleft(), verify=verify)
        finally:
            self._lanes.drain()
        for run in under_way:
            self._settle(run, verify=verify)

    def _runs(self, targets: Sequence[_Target]) -> Iterator[_Run]:
        run: _Run | None = None
        for target in targets:
            for piece in _pieces(target, direct=self._direct):
                if run is not None and not run.takes(piece):
                    yield run
                    run = None
                run = run or _Run(offset=piece.offset)
                run.add(piece)
        if run is not None:
            yield run

    def _read_run(self, run: _Run) -> None:
        try:
            self._read(views=run.views, offset=run.offset, nbytes=run.nbytes)
        except OSError:
            run.failed = True

    def _settle(self, run: _Run, *, verify: bool) -> None:
        for view, bounced in run.copies:
            view[:] = bounced
        for piece in run.pieces:
            piece.target.arrived &= not run.failed
        for target in (piece.target for piece in run.pieces if piece.last):
            if not target.arrived:
                self._read_alone(target)
            target.good = target.arrived and (not verify or _is_whole(target))

    def _require_device(self) -> None:
        """A bad sector is the pack's damage (D4); where nothing can be read, it is the device that fails (D8)."""
        try:
            self._read_at(0, PAGE_BYTES)
        except OSError as error:
            layout.raise_spill_error(error, f"reading pack {self._expected.pack_id}")

    def _read_alone(self, target: _Target) -> None:
        """Again without its neighbours: one unreadable sector costs one block, not the run it was read in."""
        target.arrived = True
        for run in self._runs([target]):
            self._read_run(run)
            target.arrived &= not run.failed
            for view, bounced in run.copies:
                view[:] = bounced


def _has_place(fs: FileSystem, path: Path) -> bool:
    """Whether the rank's folder of packs is there."""
    try:
        fs.lstat(path.parents[1])
    except OSError:
        return False
    return True


def _target(entry: PackEntry, buffer: Buffer) -> _Target:
    view = byte_view(buffer)
    if view.readonly or len(view) not in {entry.nbytes, entry.padded_bytes}:
        raise ValueError("a buffer to read into is writable and as large as its block, or that rounded up to a page")
    return _Target(entry=entry, view=view)


def _is_whole(target: _Target) -> bool:
    return checksum_of(target.view[: target.entry.nbytes]) == target.entry.checksum


def _pieces(target: _Target, *, direct: bool) -> Iterator[_Piece]:
    straight = straight_bytes(target.view, direct=direct)
    ends = [*range(UNIT_BYTES, straight, UNIT_BYTES), straight] if straight else []
    copied_ends = [*range(straight + BOUNCE_BYTES, len(target.view), BOUNCE_BYTES), len(target.view)]
    start = 0
    for end in ends + copied_ends * (straight < len(target.view)):
        view = target.view[start:end]
        last = end == len(target.view)
        yield _Piece(target, target.entry.offset + start, view, copied=end > straight, last=last)
        start = end
