"""Writing one rank's pack file: straight from the caller's memory to the device, in large units.

Guards the publish order up to the rename (D3): private temporary, payload, flush, rename, flush of the folder. Until
``finish`` has returned, nothing of the file can be found under a pack's name or is believed by anybody; a failed write
removes its file (W7). Extra memory is bounded by the bounce buffers, and the page cache does not grow: direct I/O, or
where that is impossible, write-back and drop behind every unit.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from parkade_cache.errors import SpillError
from parkade_cache.ids import BlockKey
from parkade_cache.spill import layout
from parkade_cache.spill.aligned import PAGE_BYTES, Buffer, align_up, aligned_buffer, byte_view
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.lanes import DEFAULT_DEPTH, Lanes
from parkade_cache.spill.pack import (
    MAX_ENTRIES,
    MAX_KEY_BYTES,
    PackEntry,
    PackHeader,
    PackInfo,
    checksum_of,
    encode_footer,
    encode_header,
    encode_trailer,
)
from parkade_cache.spill.transfer import BOUNCE_BYTES, UNIT_BYTES, UNIT_PIECES, straight_bytes, write_fully

_ZEROS = memoryview(bytes(PAGE_BYTES))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackBlock:
    """A block to write. ``buffer`` holds ``nbytes`` of payload, or that rounded up to a page: then it is written whole.

    With a page-aligned address and a padded buffer nothing is copied on the way to the device.
    """

    key: BlockKey
    parent: BlockKey
    end_token: int
    group: int
    buffer: Buffer
    nbytes: int | None = None


class WriterState(enum.StrEnum):
    """A writer goes from open to finished, or to failed and aborted; never back."""

    OPEN = "open"
    FAILED = "failed"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class _Payload:
    block: PackBlock
    view: memoryview
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    view: memoryview
    copied: bool
    file_bytes: int


@dataclass(slots=True)
class _Unit:
    offset: int
    pieces: list[memoryview] = field(default_factory=list)
    nbytes: int = 0
    bounce: memoryview | None = None
    bounced_bytes: int = 0

    def has_room(self, piece: _Piece) -> bool:
        bounced = self.bounced_bytes + piece.file_bytes if piece.copied else 0
        return (
            self.nbytes + piece.file_bytes <= UNIT_BYTES and len(self.pieces) < UNIT_PIECES and bounced <= BOUNCE_BYTES
        )


class PackWriter:
    """One pack file of one rank. Not thread-safe; the caller's memory is free again when a call returns or raises."""

    def __init__(
        self,
        fs: FileSystem,
        rank_folder: Path,
        header: PackHeader,
        *,
        direct: bool,
        expected_bytes: int | None = None,
        depth: int = DEFAULT_DEPTH,
    ) -> None:
        """Create the private temporary. ``expected_bytes``, the final size where known, is allocated at once."""
        self._fs = fs
        self._folder = rank_folder
        self._header = header
        self._header_page = encode_header(header)
        self._path = layout.temporary_path(rank_folder, header.pack_id)
        self._direct = direct
        self._entries: list[PackEntry] = []
        self._keys: set[BlockKey] = set()
        self._written = 0
        self._end = PAGE_BYTES
        self._allocated = 0
        self._lanes = Lanes(depth=depth)
        self._bounces: list[memoryview] = []
        self._state = WriterState.OPEN
        self._fd = self._create()
        if expected_bytes is not None:
            self._allocate(expected_bytes)

    @property
    def state(self) -> WriterState:
        """Where this writer stands."""
        return self._state

    @property
    def payload_end(self) -> int:
        """Bytes of header and payload so far."""
        return self._end

    def append(self, block: PackBlock) -> PackEntry:
        """Write one block; several at once are faster."""
        return self.append_many([block])[0]

    def append_many(self, blocks: Sequence[PackBlock]) -> list[PackEntry]:
        """Write blocks in order, in units of at most 32 MiB (W1), checksums computed while they are under way.

        SpillError when the device refuses; the writer is then failed and its file is removed (W7).
        """
        self._require_open()
        payloads = [_payload_of(block) for block in blocks]
        self._check_new(payloads)
        try:
            checksums = self._write(payloads)
        except OSError as error:
            self._fail()
            layout.raise_spill_error(error, f"writing pack {self._header.pack_id}")
        except BaseException:
            self._fail()
            raise
        return self._record(payloads, checksums)

    def finish(self, tips: Iterable[tuple[BlockKey, int]]) -> PackInfo:
        """Footer, flush, rename, flush of the folder. Only then is the file complete, and only the index publishes it.

        SpillError when a step fails. Before the rename the file is removed; a failed flush of the folder leaves it in
        place, to be adopted at the next start (case 47).
        """
        self._require_open()
        if not self._entries:
            self.abort()
            raise SpillError(errno.EINVAL, f"pack {self._header.pack_id} has no blocks")
        try:
            info = self._complete(tuple(tips))
        except OSError as error:
            self._fail()
            layout.raise_spill_error(error, f"finishing pack {self._header.pack_id}")
        except BaseException:
            self._fail()
            raise
        self._state = WriterState.FINISHED
        self._flush_names()
        return info

    def abort(self) -> None:
        """Remove the unfinished file (W7); does nothing to a finished one. Safe to call twice."""
        if self._state in {WriterState.FINISHED, WriterState.ABORTED}:
            return
        self._fail()
        self._state = WriterState.ABORTED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | (os.O_DIRECT if self._direct else 0)
        try:
            layout.check_folder(self._fs, self._path.parent)
            return self._fs.open(self._path, flags, 0o600)
        except OSError as error:
            if error.errno == errno.EINVAL:
                # A file system without direct I/O has made the file before it says so.
                self._remove()
            layout.raise_spill_error(error, f"creating pack {self._header.pack_id}")

    def _allocate(self, nbytes: int) -> None:
        try:
            if self._fs.allocate(self._fd, nbytes):
                self._allocated = nbytes
        except OSError as error:
            self._fail()
            layout.raise_spill_error(error, f"allocating {nbytes} bytes for pack {self._header.pack_id}")

    def _require_open(self) -> None:
        if self._state is not WriterState.OPEN:
            raise SpillError(errno.EBADF, f"pack {self._header.pack_id} is {self._state}")

    def _check_new(self, payloads: Sequence[_Payload]) -> None:
        keys = [payload.block.key for payload in payloads]
        if len(self._entries) + len(keys) > MAX_ENTRIES:
            raise ValueError(f"a pack holds at most {MAX_ENTRIES} blocks")
        if len(set(keys)) != len(keys) or not self._keys.isdisjoint(keys):
            raise ValueError("a block is written once (W7), but this key is in the pack already")

    def _write(self, payloads: Sequence[_Payload]) -> list[int]:
        checksums: list[int] = []
        hashed = iter(payloads)
        try:
            for unit, begun in self._units(payloads):
                self._lanes.submit(partial(self._write_unit, unit))
                checksums += [checksum_of(payload.view[: payload.nbytes]) for payload in islice(hashed, begun)]
        finally:
            self._lanes.drain()
        return checksums

    def _units(self, payloads: Sequence[_Payload]) -> Iterator[tuple[_Unit, int]]:
        """Units in file order, each with how many payloads begin in it."""
        unit, begun = _Unit(offset=self._written), 0
        if self._written == 0:
            self._add(unit, _Piece(memoryview(self._header_page), copied=self._direct, file_bytes=PAGE_BYTES))
        for payload in payloads:
            begun += 1
            for piece in _pieces(payload, direct=self._direct):
                if not unit.has_room(piece):
                    yield unit, begun
                    unit, begun = _Unit(offset=unit.offset + unit.nbytes), 0
                self._add(unit, piece)
        self._written = unit.offset + unit.nbytes
        if unit.nbytes:
            yield unit, begun

    def _add(self, unit: _Unit, piece: _Piece) -> None:
        view = self._bounced(unit, piece) if piece.copied else piece.view
        unit.pieces.append(view)
        unit.nbytes += piece.file_bytes

    def _bounced(self, unit: _Unit, piece: _Piece) -> memoryview:
        if unit.bounce is None:
            unit.bounce = self._take_bounce()
        start, end = unit.bounced_bytes, unit.bounced_bytes + len(piece.view)
        unit.bounced_bytes += piece.file_bytes
        unit.bounce[start:end] = piece.view
        unit.bounce[end : unit.bounced_bytes] = _ZEROS[: unit.bounced_bytes - end]
        return unit.bounce[start : unit.bounced_bytes]

    def _take_bounce(self) -> memoryview:
        # A bounce comes back when its write has ended; with all lanes taken the oldest write ends first.
        while not self._bounces and self._lanes.full:
            self._lanes.wait_oldest()
        return self._bounces.pop() if self._bounces else aligned_buffer(BOUNCE_BYTES)

    def _write_unit(self, unit: _Unit) -> None:
        write_fully(self._fs, self._fd, unit.pieces, unit.offset)
        if not self._direct:
            self._fs.write_back(self._fd, unit.offset, unit.nbytes)
            self._fs.drop_cache(self._fd, unit.offset, unit.nbytes)
        if unit.bounce is not None:
            self._bounces.append(unit.bounce)

    def _record(self, payloads: Sequence[_Payload], checksums: Sequence[int]) -> list[PackEntry]:
        fresh = []
        for payload, checksum in zip(payloads, checksums, strict=True):
            block = payload.block
            entry = PackEntry(
                block.key, block.parent, block.end_token, block.group, self._end, payload.nbytes, checksum
            )
            self._end += entry.padded_bytes
            fresh.append(entry)
        self._entries += fresh
        self._keys.update(entry.key for entry in fresh)
        return fresh

    def _complete(self, tips: tuple[tuple[BlockKey, int], ...]) -> PackInfo:
        footer = encode_footer(self._entries, tips)
        file_bytes = self._end + align_up(len(footer)) + PAGE_BYTES
        info = PackInfo(header=self._header, entries=tuple(self._entries), tips=tips, file_bytes=file_bytes)
        end = aligned_buffer(file_bytes - self._end)
        end[: len(footer)] = footer
        end[-PAGE_BYTES:] = encode_trailer(info, header_page=self._header_page, footer=footer)
        write_fully(self._fs, self._fd, [end], self._end)
        if self._allocated > file_bytes:
            self._fs.truncate(self._fd, file_bytes)
        self._fs.flush(self._fd)
        if not self._direct:
            self._fs.drop_cache(self._fd, 0, 0)
        self._close()
        self._rename()
        return info

    def _rename(self) -> None:
        target = layout.pack_path(self._folder, self._header.pack_id)
        layout.ensure_folder(self._fs, target.parent)
        if not self._fs.names(target.parent):
            # Its first file makes sure of the folder's own name, whoever made it and however that ended.
            self._fs.flush_folder(target.parent.parent)
        self._fs.rename(self._path, target)

    def _flush_names(self) -> None:
        try:
            self._fs.flush_folder(layout.pack_path(self._folder, self._header.pack_id).parent)
        except OSError as error:
            doing = f"flushing the folder of pack {self._header.pack_id}, which is complete and stays"
            layout.raise_spill_error(error, doing)

    def _close(self) -> None:
        self._lanes.close()
        self._bounces.clear()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._fs.close(fd)

    def _fail(self) -> None:
        if self._state is WriterState.OPEN:
            self._state = WriterState.FAILED
            with contextlib.suppress(OSError):
                self._close()
            self._remove()

    def _remove(self) -> None:
        try:
            self._fs.unlink(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            # A file that cannot be removed now is cleaned at the next open; the write's own error is the one to report.
            _log.warning("unfinished pack %s could not be removed: %s", self._header.pack_id, error)


def _payload_of(block: PackBlock) -> _Payload:
    view = byte_view(block.buffer)
    nbytes = len(view) if block.nbytes is None else block.nbytes
    if nbytes < 1 or len(view) not in {nbytes, align_up(nbytes)}:
        raise ValueError("a block's buffer holds its bytes, exactly or rounded up to a page")
    if not 0 < len(block.key) <= MAX_KEY_BYTES or len(block.parent) > MAX_KEY_BYTES:
        raise ValueError(f"a block key is 1 to {MAX_KEY_BYTES} bytes")
    return _Payload(block=block, view=view, nbytes=nbytes)


def _pieces(payload: _Payload, *, direct: bool) -> Iterator[_Piece]:
    """The block as pieces of memory that fill whole pages of the file."""
    straight = straight_bytes(payload.view, direct=direct)
    for start in range(0, straight, UNIT_BYTES):
        piece = payload.view[start : min(start + UNIT_BYTES, straight)]
        yield _Piece(piece, copied=False, file_bytes=len(piece))
    for start in range(straight, payload.nbytes, BOUNCE_BYTES - PAGE_BYTES):
        piece = payload.view[start : min(start + BOUNCE_BYTES - PAGE_BYTES, payload.nbytes)]
        yield _Piece(piece, copied=True, file_bytes=align_up(len(piece)))
