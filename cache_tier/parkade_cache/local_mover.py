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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
)
from parkade_cache.slots import PAGE_BYTES, Geometry
from parkade_cache.spill import FileSystem, PackAddress, PackBlock, PackEntry, PackHeader, PackInfo, PackReader, PackWriter
from parkade_cache.spill.layout import pack_path
from parkade_cache.transfers import LoadJob, StoreJob, TransferDone

_log = logging.getLogger(__name__)

WRITE_UNIT_BYTES = 32 << 20
"""W1: what is written out is streamed in units of at most this many bytes."""

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
    expected_bytes: int = 0
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

    def __init__(
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
            self._capture_waiting()

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
            self._capture_to_slots(transfer, job, batch, after)
        self._capture_waiting_now()

    def _capture_to_slots(self, transfer: _Transfer, job: StoreJob, positions: Sequence[int], after: object) -> None:
        captured = False
        with transfer.lock:
            if not transfer.cancelled:
                try:
                    blocks = [job.blocks[position] for position in positions]
                    targets = [self._parked_view(job.targets[p].slot, job.blocks[p].group) for p in positions]
                    self.device.copy_out(blocks, targets, after)
                    captured = True
                    transfer.ram_bytes += sum(len(target) for target in targets)
                except Exception:
                    _log.exception("blocks could not be copied to RAM")
        self._settle(transfer, positions, failed=not captured)

    def _parked_view(self, slot: int, group: int) -> HostBytes:
        """The payload of a slot, its extent committed."""
        self._ensure_committed(slot)
        return self._slot_view(slot)[: self.device.payload_bytes(group)]

    def _capture_waiting(self) -> None:
        self._capture_lane.submit(self._capture_waiting_now)

    def _capture_waiting_now(self) -> None:
        """Runs on the capture lane only."""
        while self._waiting:
            waiting = self._waiting[0]
            if waiting.transfer.cancelled or self._stream_failed(waiting.pack):
                self._waiting.popleft()
                self._settle(waiting.transfer, (waiting.position,), failed=True)
                continue
            buffer = self._bounce.try_take()
            if buffer is None:
                return
            self._waiting.popleft()
            self._capture_to_stream(waiting, buffer)

    def _capture_to_stream(self, waiting: _WaitingCapture, buffer: HostBytes) -> None:
        nbytes = self.device.payload_bytes(waiting.block.group)
        transfer = waiting.transfer
        captured = False
        with transfer.lock:
            if not transfer.cancelled:
                self.device.copy_out((waiting.block,), (buffer[:nbytes],), waiting.after)
                captured = True
        if not captured:
            self._bounce.give(buffer)
        else:
            with self._lock:
                stream = self._streams.setdefault(waiting.pack, _Stream())
                stream.queue.append(_Streamed(waiting.meta, buffer, nbytes))
            self._stream_lane.submit(lambda: self._write_stream(waiting.pack))
        self._settle(transfer, (waiting.position,), failed=not captured)

    def _stream_failed(self, pack: PackId) -> bool:
        with self._lock:
            stream = self._streams.get(pack)
            return stream is not None and bool(stream.failure)

    def _ensure_committed(self, slot: int) -> None:
        self.arena.commit(slot // self.geometry.slots_per_extent)

    def _slot_view(self, slot: int) -> HostBytes:
        extent, place = divmod(slot, self.geometry.slots_per_extent)
        start = place * self.geometry.slot_bytes
        return self.arena.view(extent)[start : start + self.geometry.slot_bytes]

    # -- streams -----------------------------------------------------------------------------------------

    def open_stream(self, order: PackOrder, expected_bytes: int) -> None:
        """See ``Mover.open_stream``."""
        with self._lock:
            stream = self._streams.setdefault(order.pack, _Stream())
            stream.order = order
            stream.expected_bytes = expected_bytes
            stream.started = self._clock()
        self._stream_lane.submit(lambda: self._write_stream(order.pack))

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
                    self._append_unit(stream, unit)
            except (ParkadeError, OSError) as error:
                _log.warning("writing pack %s failed: %s", pack, error)
                self._fail_stream(stream, str(error))
            finally:
                for block in unit:
                    self._bounce.give(block.buffer)
                self._capture_waiting()

    def _append_unit(self, stream: _Stream, unit: Sequence[_Streamed]) -> None:
        assert stream.order is not None
        if stream.writer is None:
            stream.writer = self._new_writer(stream.order, expected_bytes=None)
        entries = stream.writer.append_many(
            [_pack_block(block.meta, block.buffer, block.nbytes) for block in unit]
        )
        stream.written.extend(_written(entry) for entry in entries)

    def _fail_stream(self, stream: _Stream, reason: str) -> None:
        stream.failure = reason or "failed"
        if stream.writer is not None:
            stream.writer.abort()
            stream.writer = None

    def finish_stream(self, job: JobId, order: PackOrder) -> None:
        """See ``Mover.finish_stream``."""
        self._stream_lane.submit(lambda: self._finish_stream(job, order))

    def _finish_stream(self, job: JobId, order: PackOrder) -> None:
        self._write_stream(order.pack)
        with self._lock:
            stream = self._streams.pop(order.pack, None)
        if stream is None or stream.failure or stream.writer is None:
            reason = stream.failure if stream is not None and stream.failure else "nothing was streamed to the pack"
            self._report_pack(job, order, JobOutcome.FAILED, (), 0, 0.0, reason)
            return
        self._complete(job, order, stream.writer, tuple(stream.written), stream.started)

    def abort_stream(self, job: JobId, pack: PackId, reason: str) -> None:
        """See ``Mover.abort_stream``."""
        with self._lock:
            self._streams.setdefault(pack, _Stream()).failure = reason
        self._stream_lane.submit(lambda: self._abort_stream(job, pack, reason))

    def _abort_stream(self, job: JobId, pack: PackId, reason: str) -> None:
        with self._lock:
            stream = self._streams[pack]
            order = stream.order or PackOrder(pack=pack, conversation=_NOBODY, created_at=0.0)
            queue, stream.queue = stream.queue, deque()
        self._fail_stream(stream, reason)
        for block in queue:
            self._bounce.give(block.buffer)

        def gone() -> None:
            self._capture_waiting_now()
            with self._lock:
                self._streams.pop(pack, None)
            self._report_pack(job, order, JobOutcome.CANCELLED, (), 0, 0.0, reason)

        self._capture_lane.submit(gone)

    # -- writes from RAM ---------------------------------------------------------------------------------

    def write(self, job: JobId, order: PackOrder, blocks: Sequence[SlotBlock], *, urgent: bool) -> None:
        """See ``Mover.write``."""
        with self._lock:
            self._queued_writes[job] = order
        lane = self._urgent_lane if urgent else self._write_lane
        lane.submit(lambda: self._write(job, order, tuple(blocks)))

    def cancel(self, job: JobId) -> None:
        """See ``Mover.cancel``. A queued order is answered at once, whatever is queued before it."""
        with self._lock:
            order = self._queued_writes.pop(job, None)
            if order is None and job in self._running_writes:
                self._cancelled_writes.add(job)
        if order is not None:
            self._report_pack(job, order, JobOutcome.CANCELLED, (), 0, 0.0, "cancelled before it began")

    def _is_cancelled(self, job: JobId) -> bool:
        with self._lock:
            return job in self._cancelled_writes

    def _write(self, job: JobId, order: PackOrder, blocks: tuple[SlotBlock, ...]) -> None:
        started = self._clock()
        writer: PackWriter | None = None
        written: list[WrittenEntry] = []
        with self._lock:
            if self._queued_writes.pop(job, None) is None:
                return
            self._running_writes.add(job)
        try:
            writer = self._new_writer(order, expected_bytes=len(blocks) * self.geometry.slot_bytes)
            for unit in _units(blocks, max(1, WRITE_UNIT_BYTES // self.geometry.slot_bytes)):
                written.extend(self._append_slots(writer, unit))
                if self._is_cancelled(job):
                    writer.abort()
                    self._report_pack(job, order, JobOutcome.CANCELLED, (), 0, self._clock() - started, "cancelled")
                    return
            self._complete(job, order, writer, tuple(written), started)
        except (ParkadeError, OSError) as error:
            _log.warning("writing pack %s failed: %s", order.pack, error)
            if writer is not None:
                writer.abort()
            self._report_pack(job, order, JobOutcome.FAILED, (), 0, self._clock() - started, str(error))
        finally:
            with self._lock:
                self._running_writes.discard(job)
                self._cancelled_writes.discard(job)

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
        self,
        job: JobId,
        order: PackOrder,
        writer: PackWriter,
        written: tuple[WrittenEntry, ...],
        started: float,
    ) -> None:
        try:
            info = writer.finish(order.tips)
        except (ParkadeError, OSError) as error:
            writer.abort()
            self._report_pack(job, order, JobOutcome.FAILED, (), 0, self._clock() - started, str(error))
            return
        self._report_pack(job, order, JobOutcome.DONE, written, info.file_bytes, self._clock() - started, "")

    def _report_pack(
        self,
        job: JobId,
        order: PackOrder,
        outcome: JobOutcome,
        entries: tuple[WrittenEntry, ...],
        file_bytes: int,
        seconds: float,
        reason: str,
    ) -> None:
        self._sink(
            PackWritten(
                job=job,
                rank=self.rank,
                outcome=outcome,
                pack=order.pack,
                conversation=order.conversation,
                created_at=order.created_at,
                entries=entries,
                tips=order.tips,
                file_bytes=file_bytes,
                seconds=seconds,
                reason=reason,
            )
        )

    def _attached(self) -> _RankFiles:
        if self._files is None:
            raise ParkadeError("the disk tier is off; nothing can be written or read")
        return self._files

    # -- loads -------------------------------------------------------------------------------------------

    def _load_from_ram(self, transfer: _Transfer, job: LoadJob, positions: Sequence[int], after: object) -> None:
        for batch in _batches(positions, self.device.batch_blocks):
            blocks = [job.blocks[position] for position in batch]
            sources = [
                self._slot_view(job.sources[position].slot)[: self.device.payload_bytes(block.group)]
                for position, block in zip(batch, blocks, strict=True)
            ]
            arrived = False
            with transfer.lock:
                if not transfer.cancelled:
                    self.device.copy_in(sources, blocks, after)
                    transfer.ram_bytes += sum(len(source) for source in sources)
                    arrived = True
            self._settle(transfer, batch, failed=not arrived)

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
            except Exception:
                _log.exception("a load from pack %s failed", job.sources[now[0]].pack)
                self._settle(transfer, now, failed=True)
            finally:
                for buffer in buffers:
                    self._staging.give(buffer)

    def _read_and_deliver(
        self, transfer: _Transfer, job: LoadJob, unit: Sequence[int], buffers: Sequence[HostBytes], after: object
    ) -> None:
        pack = job.sources[unit[0]].pack
        assert pack is not None
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

    def _deliver(
        self, transfer: _Transfer, job: LoadJob, position: int, buffer: HostBytes, after: object
    ) -> bool:
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

    def _read(
        self, pack: PackId, entry_numbers: Sequence[int], buffers: Sequence[HostBytes]
    ) -> tuple[list[bool], bool]:
        """Which blocks are good, and whether the pack itself is damaged; a disk that fails is not a damaged pack."""
        try:
            opened = self._reader(pack)
            entries = [opened.info.entries[number] for number in entry_numbers]
            views = [
                memoryview(buffer[: _whole_pages(entry.nbytes)])
                for entry, buffer in zip(entries, buffers, strict=True)
            ]
            with opened.lock:
                good = opened.reader.read_into(entries, views)
            return good, not all(good)
        except (ParkadeError, OSError, IndexError) as error:
            _log.warning("reading pack %s failed: %s", pack, error)
            self.forget_pack(pack)
            return [False] * len(entry_numbers), isinstance(error, FormatError | UnsafePathError | IndexError)

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
            self._readers[pack] = opened
            spare = [self._readers.popitem(last=False)[1] for _ in range(len(self._readers) - _OPEN_READERS)]
        for other in spare:
            other.close()
        return opened

    def forget_pack(self, pack: PackId) -> None:
        """See ``Mover.forget_pack``; a read under way ends first, on a lane, not here."""
        with self._lock:
            opened = self._readers.pop(pack, None)
        if opened is not None:
            self._memory_lane.submit(opened.close)

    # -- memory ------------------------------------------------------------------------------------------

    def commit(self, job: JobId, extents: Sequence[int]) -> None:
        """See ``Mover.commit``."""
        self._memory_lane.submit(lambda: self._commit(job, tuple(extents)))

    def _commit(self, job: JobId, extents: tuple[int, ...]) -> None:
        started = self._clock()
        outcome, reason = JobOutcome.DONE, ""
        try:
            for extent in extents:
                self.arena.commit(extent)
        except ParkadeError as error:
            outcome, reason = JobOutcome.FAILED, str(error)
        self._sink(
            ExtentsCommitted(
                job=job,
                rank=self.rank,
                outcome=outcome,
                extents=extents,
                nbytes=len(extents) * self.geometry.extent_bytes,
                seconds=self._clock() - started,
                reason=reason,
            )
        )

    def release(self, job: JobId, extents: Sequence[int]) -> None:
        """See ``Mover.release``."""
        self._memory_lane.submit(lambda: self._release(job, tuple(extents)))

    def _release(self, job: JobId, extents: tuple[int, ...]) -> None:
        before = resident_bytes()
        started = self._clock()
        nbytes = sum(self.arena.release(extent) for extent in extents)
        seconds = self._clock() - started
        self._sink(
            ExtentsReleased(
                job=job,
                rank=self.rank,
                outcome=JobOutcome.DONE,
                extents=extents,
                nbytes=nbytes,
                seconds=seconds,
                resident_before_bytes=before,
                resident_after_bytes=resident_bytes(),
            )
        )

    def release_heap(self, job: JobId) -> None:
        """See ``Mover.release_heap``."""
        self._memory_lane.submit(lambda: self._release_heap(job))

    def _release_heap(self, job: JobId) -> None:
        result = self._heap.release()
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


_NOBODY = ConversationId("")
"""Whose pack an aborted stream was when its order never came."""


def _pack_block(meta: BlockMeta, memory: HostBytes, nbytes: int) -> PackBlock:
    """A block for the writer; ``memory`` is whole pages, so it is written straight, padding and all."""
    return PackBlock(
        key=meta.key,
        parent=meta.parent,
        end_token=meta.end_token,
        group=meta.group,
        buffer=memoryview(memory[: _whole_pages(nbytes)]),
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


def _batches(positions: Sequence[int], most: int) -> list[Sequence[int]]:
    return [positions[start : start + most] for start in range(0, len(positions), most)]


def _units(blocks: Sequence[SlotBlock], most: int) -> list[Sequence[SlotBlock]]:
    return [blocks[start : start + most] for start in range(0, len(blocks), most)]
