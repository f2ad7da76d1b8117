"""A rank's mover: parked memory, copies to and from the engine, pack payloads.

Why it exists: everything that takes time happens here, on lanes of its own, so that the engine's step and the
owner's decisions never wait for it.

What must stay true: a block is reported captured only when its bytes are in a slot or a bounce buffer; bytes
from disk reach the engine only after their checksum was verified and only while their job is still wanted
(R4, D4); a pack is reported written only when it is flushed and in place (W2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from parkade_cache.arena import Arena
from parkade_cache.buffers import BOUNCE_BYTES, BufferPool
from parkade_cache.device import Device, DeviceBlock, HostBytes
from parkade_cache.errors import FormatError, ParkadeError, UnsafePathError
from parkade_cache.ids import ConversationId, PackId
from parkade_cache.lanes import Lane
from parkade_cache.memory.heap import Heap, resident_bytes
from parkade_cache.mover import (
    BlockMeta,
    ExtentsCommitted,
    ExtentsReleased,
    HeapReleased,
    JobId,
    JobOutcome,
    Mover,
    PackOrder,
    PackWritten,
    ReportSink,
    SlotBlock,
    WrittenEntry,
    heap_kept,
    no_pack,
    not_committed,
    not_released,
)
from parkade_cache.slots import PAGE_BYTES, Geometry
from parkade_cache.spill import (
    FileSystem,
    PackAddress,
    PackBlock,
    PackEntry,
    PackHeader,
    PackInfo,
    PackReader,
    PackWriter,
)
from parkade_cache.spill.layout import pack_path
from parkade_cache.transfers import LoadJob, StoreJob, TransferDone

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

WRITE_UNIT_BYTES = 32 << 20
"""W1: what is written out is streamed in units of at most this many bytes."""

_OVER_PACKS = 4096
"""Streams remembered as over: a block that is captured for one of them has nowhere to go."""

_OPEN_READERS = 64
"""Packs kept open for reading; a reader is one file descriptor and the pack's footer."""


@dataclass(frozen=True, slots=True)
class _RankFiles:
    """Where this rank's packs are, and what identifies them."""

    folder: Path
    identity: str
    direct: bool


@dataclass(slots=True)
class _OpenPack:
    """A pack open for reading; one read at a time, the reader itself reads in parallel."""

    reader: PackReader
    info: PackInfo
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Close the file once a read under way has ended."""
        with self.lock:
            self.reader.close()


@dataclass(slots=True)
class _Transfer:
    """A store or load job under way."""

    job: JobId
    is_load: bool
    open: set[int]
    started: float
    deadline: float = float("inf")
    cancelled: bool = False
    failed: set[int] = field(default_factory=set)
    bad_packs: set[PackId] = field(default_factory=set)
    ram_bytes: int = 0
    disk_bytes: int = 0
    disk_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class _Streamed:
    """A captured block that waits in a bounce buffer to be written."""

    meta: BlockMeta
    buffer: HostBytes
    nbytes: int


@dataclass(slots=True)
class _Stream:
    """A pack that blocks are streamed to."""

    order: PackOrder | None = None
    writer: PackWriter | None = None
    queue: deque[_Streamed] = field(default_factory=deque)
    written: list[WrittenEntry] = field(default_factory=list)
    failure: str = ""
    started: float = 0.0


@dataclass(slots=True)
class _WaitingCapture:
    """A block of the engine that waits for a bounce buffer."""

    transfer: _Transfer
    position: int
    block: DeviceBlock
    pack: PackId
    meta: BlockMeta
    after: object


class LocalMover(Mover):
    """The mover of one rank, in the process that holds the engine's memory.

    Reports go to ``sink`` from the mover's own threads. Without ``attach`` there is no disk.
    """

    def __init__(  # noqa: PLR0913 - one rank's parts, each by keyword
        self,
        *,
        geometry: Geometry,
        arena: Arena,
        device: Device,
        sink: ReportSink,
        rank: int = 0,
        fs: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
        process: str = "worker",
        bounce_bytes: int = BOUNCE_BYTES,
    ) -> None:
        self.geometry = geometry
        self.arena = arena
        self.device = device
        self.rank = rank
        self._fs = fs or FileSystem()
        self._files: _RankFiles | None = None
        self._sink = sink
        self._clock = clock
        self._process = process
        self._heap = Heap()
        self._transfers: dict[JobId, _Transfer] = {}
        self._finished: deque[TransferDone] = deque()
        self._lock = threading.Lock()
        self._bounce = BufferPool(buffer_bytes=geometry.slot_bytes, limit_bytes=bounce_bytes)
        self._staging = BufferPool(buffer_bytes=geometry.slot_bytes, limit_bytes=bounce_bytes)
        self._waiting: deque[_WaitingCapture] = deque()
        self._streams: dict[PackId, _Stream] = {}
        self._over: OrderedDict[PackId, None] = OrderedDict()
        self._queued_writes: dict[JobId, PackOrder] = {}
        self._running_writes: set[JobId] = set()
        self._cancelled_writes: set[JobId] = set()
        self._readers: OrderedDict[PackId, _OpenPack] = OrderedDict()
        self._capture_lane = Lane("capture")
        self._ram_lane = Lane("load")
        self._read_lane = Lane("read", threads=2)
        self._stream_lane = Lane("stream")
        self._write_lane = Lane("write")
        self._urgent_lane = Lane("write-out")
        self._memory_lane = Lane("memory")

    def attach(self, identity_folder: str, identity: str, *, direct: bool) -> None:
        """See ``Mover.attach``."""
        self._files = _RankFiles(Path(identity_folder) / f"rank-{self.rank}", identity, direct)

    # -- the engine's transfers ----------------------------------------------------------------------

    def store(self, job: StoreJob, after: object = None) -> None:
        """Capture blocks of the engine; ``after`` is the device's fence. Returns at once."""
        transfer = _Transfer(job=job.job, is_load=False, open=set(range(len(job.blocks))), started=self._clock())
        with self._lock:
            self._transfers[job.job] = transfer
        if not job.blocks:
            self._settle(transfer, ())
            return
        self._capture_lane.submit(lambda: self._capture(transfer, job, after))

    def load(self, job: LoadJob, after: object = None) -> None:
        """Bring blocks into the engine; returns at once."""
        now = self._clock()
        transfer = _Transfer(
            job=job.job, is_load=True, open=set(range(len(job.blocks))), started=now, deadline=now + job.deadline_s
        )
        with self._lock:
            self._transfers[job.job] = transfer
        if not job.blocks:
            self._settle(transfer, ())
            return
        in_ram = [position for position, source in enumerate(job.sources) if source.slot >= 0]
        on_disk = [position for position, source in enumerate(job.sources) if source.slot < 0]
        if in_ram:
            self._ram_lane.submit(lambda: self._load_from_ram(transfer, job, in_ram, after))
        for unit in self._read_units(job, on_disk):
            self._read_lane.submit(lambda unit=unit: self._load_from_disk(transfer, job, unit, after))  # type: ignore[misc]

    def take_finished(self) -> list[TransferDone]:
        """Transfers that ended since the last call; loads past their deadline end here as failed (R4)."""
        self._expire_loads()
        done: list[TransferDone] = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    def cancel_transfers(self, jobs: Sequence[JobId]) -> None:
        """The engine takes these jobs' blocks away now: what is not yet copied never will be.

        Waits for the copy of the block that is under way, never for a disk (trap 3).
        """
        for job in jobs:
            with self._lock:
                transfer = self._transfers.get(job)
            if transfer is None:
                continue
            with transfer.lock:
                transfer.cancelled = True
            self._capture_lane.try_submit(self._capture_waiting_now)

    def _expire_loads(self) -> None:
        now = self._clock()
        with self._lock:
            late = [t for t in self._transfers.values() if t.is_load and now > t.deadline]
        for transfer in late:
            with transfer.lock:
                transfer.cancelled = True
            self._finish(transfer, expired=True)

    def _settle(self, transfer: _Transfer, positions: Sequence[int], *, failed: bool = False) -> None:
        """These positions are over; one that is over already stays as it ended."""
        with transfer.lock:
            fresh = transfer.open.intersection(positions)
            transfer.open -= fresh
            if failed:
                transfer.failed |= fresh
            over = not transfer.open
        if over:
            self._finish(transfer)

    def _finish(self, transfer: _Transfer, *, expired: bool = False) -> None:
        with self._lock:
            if self._transfers.pop(transfer.job, None) is None:
                return
        failed = tuple(sorted(transfer.failed))
        if expired:
            # Which blocks have arrived is not worth knowing: the whole load is recomputed.
            failed = (-1,)
        self._finished.append(
            TransferDone(
                job=transfer.job,
                is_load=transfer.is_load,
                failed=failed,
                ram_bytes=transfer.ram_bytes,
                disk_bytes=transfer.disk_bytes,
                seconds=self._clock() - transfer.started,
                disk_seconds=transfer.disk_seconds,
                bad_packs=tuple(transfer.bad_packs),
            )
        )

    # -- capture ---------------------------------------------------------------------------------------

    def _capture(self, transfer: _Transfer, job: StoreJob, after: object) -> None:
        to_slots: list[int] = []
        for position, target in enumerate(job.targets):
            if target.slot >= 0:
                to_slots.append(position)
            elif target.pack is not None and target.meta is not None:
                block = job.blocks[position]
                self._waiting.append(_WaitingCapture(transfer, position, block, target.pack, target.meta, after))
            else:
                self._settle(transfer, (position,), failed=True)
        for batch in _batches(to_slots, self.device.batch_blocks):
            captured = self._copy_out_to_slots(transfer, job, batch, after)
            self._settle(transfer, batch, failed=not captured)
        self._capture_waiting_now()

    def _copy_out_to_slots(self, transfer: _Transfer, job: StoreJob, positions: Sequence[int], after: object) -> bool:
        with transfer.lock:
            if transfer.cancelled:
                return False
            try:
                blocks = [job.blocks[position] for position in positions]
                targets = [self._parked_view(job.targets[p].slot, job.blocks[p].group) for p in positions]
                self.device.copy_out(blocks, targets, after)
            except Exception:  # noqa: BLE001 - whatever a device raises, these blocks are not captured
                _log.exception("blocks could not be copied to RAM")
                return False
            transfer.ram_bytes += sum(len(target) for target in targets)
            return True

    def _parked_view(self, slot: int, group: int) -> HostBytes:
        """The payload of a slot, its extent committed."""
        self._ensure_committed(slot)
        return self._slot_view(slot)[: self.device.payload_bytes(group)]

    def _capture_waiting_now(self) -> None:
        """Runs on the capture lane only."""
        self._drop_hopeless()
        while self._waiting:
            waiting = self._waiting[0]
            buffer = self._bounce.try_take()
            if buffer is None:
                return
            self._waiting.popleft()
            self._capture_to_stream(waiting, buffer)

    def _drop_hopeless(self) -> None:
        """Give up what was cancelled, wherever it waits: a slow disk before it must not keep the engine's blocks."""
        hopeful: deque[_WaitingCapture] = deque()
        for waiting in self._waiting:
            if waiting.transfer.cancelled or self._stream_failed(waiting.pack):
                self._settle(waiting.transfer, (waiting.position,), failed=True)
            else:
                hopeful.append(waiting)
        self._waiting = hopeful

    def _capture_to_stream(self, waiting: _WaitingCapture, buffer: HostBytes) -> None:
        nbytes = self.device.payload_bytes(waiting.block.group)
        captured = self._copy_out_to_buffer(waiting, buffer[:nbytes])
        with self._lock:
            captured &= waiting.pack not in self._over
            if captured:
                stream = self._streams.setdefault(waiting.pack, _Stream())
                stream.queue.append(_Streamed(waiting.meta, buffer, nbytes))
        if captured:
            self._stream_lane.submit(lambda: self._write_stream(waiting.pack))
        else:
            self._bounce.give(buffer)
        self._settle(waiting.transfer, (waiting.position,), failed=not captured)

    def _copy_out_to_buffer(self, waiting: _WaitingCapture, target: HostBytes) -> bool:
        with waiting.transfer.lock:
            if waiting.transfer.cancelled:
                return False
            try:
                self.device.copy_out((waiting.block,), (target,), waiting.after)
            except Exception:  # noqa: BLE001 - whatever a device raises, this block is not captured
                _log.exception("a block could not be copied to its stream")
                return False
            return True

    def _stream_failed(self, pack: PackId) -> bool:
        with self._lock:
            stream = self._streams.get(pack)
            return pack in self._over or (stream is not None and bool(stream.failure))

    def _stream_is_over(self, pack: PackId) -> None:
        """Nothing more may be captured for it; the caller holds the lock."""
        self._over[pack] = None
        while len(self._over) > _OVER_PACKS:
            self._over.popitem(last=False)

    def _ensure_committed(self, slot: int) -> None:
        self.arena.commit(slot // self.geometry.slots_per_extent)

    def _slot_view(self, slot: int) -> HostBytes:
        extent, place = divmod(slot, self.geometry.slots_per_extent)
        start = place * self.geometry.slot_bytes
        return self.arena.view(extent)[start : start + self.geometry.slot_bytes]

    # -- streams -----------------------------------------------------------------------------------------

    def open_stream(self, order: PackOrder, expected_bytes: int) -> None:  # noqa: ARG002 - its file grows by itself
        """See ``Mover.open_stream``."""
        with self._lock:
            if order.pack in self._over:
                return
            stream = self._streams.setdefault(order.pack, _Stream())
            stream.order = order
            stream.started = self._clock()
        self._stream_lane.try_submit(lambda: self._write_stream(order.pack))

    def _write_stream(self, pack: PackId) -> None:
        """Runs on the stream lane only."""
        while True:
            with self._lock:
                stream = self._streams.get(pack)
                if stream is None or stream.order is None or not stream.queue:
                    return
                unit = [stream.queue.popleft() for _ in range(min(len(stream.queue), self._bounce.count))]
            try:
                if not stream.failure:
                    self._append_unit(stream, stream.order, unit)
            except Exception as error:  # noqa: BLE001 - whatever went wrong, the pack cannot become whole any more
                _log.warning("writing pack %s failed: %s", pack, error)
                self._fail_stream(stream, str(error))
            finally:
                self._give_back(unit)

    def _append_unit(self, stream: _Stream, order: PackOrder, unit: Sequence[_Streamed]) -> None:
        if stream.writer is None:
            stream.writer = self._new_writer(order, expected_bytes=None)
        entries = stream.writer.append_many([_pack_block(block.meta, block.buffer, block.nbytes) for block in unit])
        stream.written.extend(_written(entry) for entry in entries)

    def _give_back(self, unit: Iterable[_Streamed]) -> None:
        for block in unit:
            self._bounce.give(block.buffer)
        self._capture_lane.try_submit(self._capture_waiting_now)

    def _fail_stream(self, stream: _Stream, reason: str) -> None:
        stream.failure = reason or "failed"
        if stream.writer is not None:
            self._abort(stream.writer)
            stream.writer = None

    def finish_stream(self, job: JobId, order: PackOrder) -> None:
        """See ``Mover.finish_stream``."""
        if not self._stream_lane.try_submit(lambda: self._finish_stream(job, order)):
            self._report_pack(job, order, JobOutcome.CANCELLED, reason=_CLOSED)

    def _finish_stream(self, job: JobId, order: PackOrder) -> None:
        self._write_stream(order.pack)
        stream = self._take_stream(order.pack)
        if stream.failure or stream.writer is None:
            reason = stream.failure or "nothing was streamed to the pack"
            self._report_pack(job, order, JobOutcome.FAILED, reason=reason)
            return
        self._complete(job, order, stream.writer, tuple(stream.written), stream.started)

    def _take_stream(self, pack: PackId) -> _Stream:
        """The stream, over from now on, with nothing left in its queue."""
        with self._lock:
            self._stream_is_over(pack)
            stream = self._streams.pop(pack, None) or _Stream()
            left, stream.queue = stream.queue, deque()
        self._give_back(left)
        return stream

    def abort_stream(self, job: JobId, pack: PackId, reason: str) -> None:
        """See ``Mover.abort_stream``."""
        with self._lock:
            self._stream_is_over(pack)
            stream = self._streams.get(pack)
            order = stream.order if stream is not None else None
            if stream is not None:
                stream.failure = reason or "aborted"
        order = order or PackOrder(pack=pack, conversation=_NOBODY, created_at=0.0)
        # Captures that wait for a buffer must not wait for a disk that hangs: they are given up at once.
        self._capture_lane.try_submit(self._capture_waiting_now)
        if not self._stream_lane.try_submit(lambda: self._abort_stream(job, order, reason)):
            self._report_pack(job, order, JobOutcome.CANCELLED, reason=reason)

    def _abort_stream(self, job: JobId, order: PackOrder, reason: str) -> None:
        self._fail_stream(self._take_stream(order.pack), reason)
        self._report_pack(job, order, JobOutcome.CANCELLED, reason=reason)

    # -- writes from RAM ---------------------------------------------------------------------------------

    def write(self, job: JobId, order: PackOrder, blocks: Sequence[SlotBlock], *, urgent: bool) -> None:
        """See ``Mover.write``."""
        with self._lock:
            self._queued_writes[job] = order
        lane = self._urgent_lane if urgent else self._write_lane
        if not lane.try_submit(lambda: self._write(job, order, tuple(blocks))):
            self.cancel(job)

    def cancel(self, job: JobId) -> None:
        """See ``Mover.cancel``. A queued order is answered at once, whatever is queued before it."""
        with self._lock:
            order = self._queued_writes.pop(job, None)
            if order is None and job in self._running_writes:
                self._cancelled_writes.add(job)
        if order is not None:
            self._report_pack(job, order, JobOutcome.CANCELLED, reason="cancelled before it began")

    def _is_cancelled(self, job: JobId) -> bool:
        with self._lock:
            return job in self._cancelled_writes

    def _write(self, job: JobId, order: PackOrder, blocks: tuple[SlotBlock, ...]) -> None:
        with self._lock:
            if self._queued_writes.pop(job, None) is None:
                return
            self._running_writes.add(job)
        try:
            self._write_units(job, order, blocks, self._clock())
        finally:
            with self._lock:
                self._running_writes.discard(job)
                self._cancelled_writes.discard(job)

    def _write_units(self, job: JobId, order: PackOrder, blocks: tuple[SlotBlock, ...], started: float) -> None:
        writer: PackWriter | None = None
        written: list[WrittenEntry] = []
        try:
            writer = self._new_writer(order, expected_bytes=len(blocks) * self.geometry.slot_bytes)
            for unit in _batches(blocks, max(1, WRITE_UNIT_BYTES // self.geometry.slot_bytes)):
                written.extend(self._append_slots(writer, unit))
                if self._is_cancelled(job):
                    self._abort(writer)
                    self._report_pack(job, order, JobOutcome.CANCELLED, reason="cancelled while it ran")
                    return
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the order must be answered
            _log.warning("writing pack %s failed: %s", order.pack, error)
            if writer is not None:
                self._abort(writer)
            self._report_pack(job, order, JobOutcome.FAILED, reason=str(error) or type(error).__name__)
            return
        self._complete(job, order, writer, tuple(written), started)

    def _abort(self, writer: PackWriter) -> None:
        """Remove what was written; a file that cannot be removed now is cleaned up at the next start (D3)."""
        try:
            writer.abort()
        except (ParkadeError, OSError) as error:
            _log.warning("what was written of a pack could not be removed: %s", error)

    def _append_slots(self, writer: PackWriter, unit: Sequence[SlotBlock]) -> list[WrittenEntry]:
        entries = writer.append_many(
            [
                _pack_block(block.meta, self._slot_view(block.slot), self.device.payload_bytes(block.meta.group))
                for block in unit
            ]
        )
        return [_written(entry) for entry in entries]

    def _new_writer(self, order: PackOrder, *, expected_bytes: int | None) -> PackWriter:
        files = self._attached()
        header = PackHeader(
            pack_id=order.pack,
            conversation=order.conversation,
            identity=files.identity,
            rank=self.rank,
            ranks=self.geometry.ranks,
            created_at=order.created_at,
        )
        return PackWriter(self._fs, files.folder, header, direct=files.direct, expected_bytes=expected_bytes)

    def _complete(
        self, job: JobId, order: PackOrder, writer: PackWriter, written: tuple[WrittenEntry, ...], started: float
    ) -> None:
        try:
            info = writer.finish(order.tips)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the order must be answered
            self._abort(writer)
            self._report_pack(job, order, JobOutcome.FAILED, reason=str(error) or type(error).__name__)
            return
        self._sink(
            PackWritten(
                job=job,
                rank=self.rank,
                outcome=JobOutcome.DONE,
                pack=order.pack,
                conversation=order.conversation,
                created_at=info.header.created_at,
                entries=written,
                tips=order.tips,
                file_bytes=info.file_bytes,
                seconds=self._clock() - started,
            )
        )

    def _report_pack(self, job: JobId, order: PackOrder, outcome: JobOutcome, *, reason: str) -> None:
        """There is no such pack."""
        self._sink(no_pack(job, self.rank, order, outcome, reason=reason))

    def _attached(self) -> _RankFiles:
        if self._files is None:
            raise ParkadeError("the disk tier is off; nothing can be written or read")
        return self._files

    # -- loads -------------------------------------------------------------------------------------------

    def _load_from_ram(self, transfer: _Transfer, job: LoadJob, positions: Sequence[int], after: object) -> None:
        for batch in _batches(positions, self.device.batch_blocks):
            arrived = self._copy_in_from_slots(transfer, job, batch, after)
            self._settle(transfer, batch, failed=not arrived)

    def _copy_in_from_slots(self, transfer: _Transfer, job: LoadJob, positions: Sequence[int], after: object) -> bool:
        blocks = [job.blocks[position] for position in positions]
        with transfer.lock:
            if transfer.cancelled:
                return False
            try:
                sources = [
                    self._slot_view(job.sources[position].slot)[: self.device.payload_bytes(block.group)]
                    for position, block in zip(positions, blocks, strict=True)
                ]
                self.device.copy_in(sources, blocks, after)
            except Exception:  # noqa: BLE001 - whatever a device raises, these blocks are recomputed
                _log.exception("blocks could not be copied from RAM")
                return False
            transfer.ram_bytes += sum(len(source) for source in sources)
            return True

    def _read_units(self, job: LoadJob, positions: Sequence[int]) -> list[list[int]]:
        """Split disk positions by pack, each unit no larger than half the staging buffers."""
        most = max(1, self._staging.count // 2)
        units: list[list[int]] = []
        for position in positions:
            last = units[-1] if units else None
            if last and len(last) < most and job.sources[last[0]].pack == job.sources[position].pack:
                last.append(position)
            else:
                units.append([position])
        return units

    def _load_from_disk(self, transfer: _Transfer, job: LoadJob, unit: list[int], after: object) -> None:
        while unit:
            if transfer.cancelled:
                self._settle(transfer, unit, failed=True)
                return
            buffers = self._staging.take_many(len(unit))
            now, unit = unit[: len(buffers)], unit[len(buffers) :]
            try:
                self._read_and_deliver(transfer, job, now, buffers, after)
            except Exception:  # noqa: BLE001 - whatever went wrong, these blocks are recomputed
                _log.exception("a load from pack %s failed", job.sources[now[0]].pack)
                self._settle(transfer, now, failed=True)
            finally:
                for buffer in buffers:
                    self._staging.give(buffer)

    def _read_and_deliver(
        self, transfer: _Transfer, job: LoadJob, unit: Sequence[int], buffers: Sequence[HostBytes], after: object
    ) -> None:
        pack = job.sources[unit[0]].pack
        if pack is None:
            # The block went between its match and its load.
            self._settle(transfer, unit, failed=True)
            return
        started = self._clock()
        good, damaged = self._read(pack, [job.sources[position].entry for position in unit], buffers)
        seconds = self._clock() - started
        for position, buffer, ok in zip(unit, buffers, good, strict=True):
            delivered = ok and self._deliver(transfer, job, position, buffer, after)
            if damaged:
                with transfer.lock:
                    transfer.bad_packs.add(pack)
            if position == unit[-1]:
                with transfer.lock:
                    transfer.disk_seconds += seconds
            self._settle(transfer, (position,), failed=not delivered)

    def _deliver(self, transfer: _Transfer, job: LoadJob, position: int, buffer: HostBytes, after: object) -> bool:
        block, source = job.blocks[position], job.sources[position]
        nbytes = self.device.payload_bytes(block.group)
        with transfer.lock:
            if transfer.cancelled:
                return False
            self.device.copy_in((buffer[:nbytes],), (block,), after)
            if source.park_slot >= 0:
                self._ensure_committed(source.park_slot)
                self._slot_view(source.park_slot)[:nbytes] = buffer[:nbytes]
            transfer.disk_bytes += nbytes
        return True

    def _read(self, pack: PackId, numbers: Sequence[int], buffers: Sequence[HostBytes]) -> tuple[list[bool], bool]:
        """Which blocks are good, and whether the pack itself is damaged; a disk that fails is not a damaged pack."""
        try:
            opened = self._reader(pack)
            entries = [opened.info.entries[number] for number in numbers]
            views = [buffer[: _whole_pages(entry.nbytes)].data for entry, buffer in zip(entries, buffers, strict=True)]
            with opened.lock:
                good = opened.reader.read_into(entries, views)
            return good, not all(good)
        except (ParkadeError, OSError, IndexError) as error:
            _log.warning("reading pack %s failed: %s", pack, error)
            self.forget_pack(pack)
            return [False] * len(numbers), isinstance(error, FormatError | UnsafePathError | IndexError)

    def _reader(self, pack: PackId) -> _OpenPack:
        with self._lock:
            found = self._readers.get(pack)
            if found is not None:
                self._readers.move_to_end(pack)
                return found
        files = self._attached()
        reader = PackReader(
            self._fs,
            pack_path(files.folder, pack),
            expected=PackAddress(pack_id=pack, identity=files.identity, rank=self.rank),
            direct=files.direct,
        )
        opened = _OpenPack(reader, reader.read_info())
        with self._lock:
            kept = self._readers.setdefault(pack, opened)
            spare = [self._readers.popitem(last=False)[1] for _ in range(len(self._readers) - _OPEN_READERS)]
        if kept is not opened:
            # The other reading thread was faster.
            spare.append(opened)
        for other in spare:
            other.close()
        return kept

    def forget_pack(self, pack: PackId) -> None:
        """See ``Mover.forget_pack``; a read under way ends first, on a lane, not here."""
        with self._lock:
            opened = self._readers.pop(pack, None)
        if opened is not None:
            self._memory_lane.try_submit(opened.close)

    # -- memory ------------------------------------------------------------------------------------------

    def commit(self, job: JobId, extents: Sequence[int]) -> None:
        """See ``Mover.commit``."""
        if not self._memory_lane.try_submit(lambda: self._commit(job, tuple(extents))):
            self._sink(not_committed(job, self.rank, extents, JobOutcome.CANCELLED, reason=_CLOSED))

    def _commit(self, job: JobId, extents: tuple[int, ...]) -> None:
        started = self._clock()
        try:
            for extent in extents:
                self.arena.commit(extent)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the order must be answered
            self._sink(not_committed(job, self.rank, extents, JobOutcome.FAILED, reason=str(error)))
            return
        self._sink(
            ExtentsCommitted(
                job=job,
                rank=self.rank,
                outcome=JobOutcome.DONE,
                extents=extents,
                nbytes=len(extents) * self.geometry.extent_bytes,
                seconds=self._clock() - started,
            )
        )

    def release(self, job: JobId, extents: Sequence[int]) -> None:
        """See ``Mover.release``."""
        if not self._memory_lane.try_submit(lambda: self._release(job, tuple(extents))):
            self._sink(not_released(job, self.rank, extents, JobOutcome.CANCELLED, reason=_CLOSED))

    def _release(self, job: JobId, extents: tuple[int, ...]) -> None:
        before = resident_bytes()
        started = self._clock()
        nbytes, reason = 0, ""
        for extent in extents:
            try:
                nbytes += self.arena.release(extent)
            except Exception as error:  # noqa: BLE001 - the others can still be released
                reason = str(error) or type(error).__name__
        seconds = self._clock() - started
        self._sink(
            ExtentsReleased(
                job=job,
                rank=self.rank,
                outcome=JobOutcome.FAILED if reason else JobOutcome.DONE,
                extents=extents,
                nbytes=nbytes,
                seconds=seconds,
                resident_before_bytes=before,
                resident_after_bytes=resident_bytes(),
                reason=reason,
            )
        )

    def release_heap(self, job: JobId) -> None:
        """See ``Mover.release_heap``."""
        if not self._memory_lane.try_submit(lambda: self._release_heap(job)):
            self._sink(heap_kept(job, self.rank, JobOutcome.CANCELLED, reason=_CLOSED))

    def _release_heap(self, job: JobId) -> None:
        try:
            result = self._heap.release()
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the order must be answered
            self._sink(heap_kept(job, self.rank, JobOutcome.FAILED, reason=str(error)))
            return
        self._sink(
            HeapReleased(
                job=job,
                rank=self.rank,
                outcome=JobOutcome.DONE,
                process=self._process,
                allocator=result.allocator.value,
                seconds=result.seconds,
                resident_before_bytes=result.resident_before_bytes,
                resident_after_bytes=result.resident_after_bytes,
                heap_bytes=result.heap_before_bytes,
                heap_free_bytes=result.heap_free_before_bytes,
                returned=result.returned,
            )
        )

    def close(self) -> None:
        """See ``Mover.close``."""
        for lane in (
            self._capture_lane,
            self._ram_lane,
            self._read_lane,
            self._stream_lane,
            self._write_lane,
            self._urgent_lane,
            self._memory_lane,
        ):
            lane.close()
        with self._lock:
            readers, self._readers = list(self._readers.values()), OrderedDict()
        for opened in readers:
            opened.close()


_CLOSED = "the mover is closed"

_NOBODY = ConversationId("")
"""Whose pack an aborted stream was when its order never came."""


def _pack_block(meta: BlockMeta, memory: HostBytes, nbytes: int) -> PackBlock:
    """A block for the writer; ``memory`` is whole pages, so it is written straight, padding and all."""
    return PackBlock(
        key=meta.key,
        parent=meta.parent,
        end_token=meta.end_token,
        group=meta.group,
        buffer=memory[: _whole_pages(nbytes)].data,
        nbytes=nbytes,
    )


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _written(entry: PackEntry) -> WrittenEntry:
    return WrittenEntry(
        meta=BlockMeta(key=entry.key, parent=entry.parent, end_token=entry.end_token, group=entry.group),
        offset=entry.offset,
        nbytes=entry.nbytes,
        checksum=entry.checksum,
    )


def _batches(items: Sequence[_T], most: int) -> list[Sequence[_T]]:
    return [items[start : start + most] for start in range(0, len(items), most)]
