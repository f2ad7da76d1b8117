"""The owner's disk side: what is written, what is published, what gives way.

Why it exists: between "a mover has written a pack" and "a lookup may find it" lie the index row and the
ledger, in that order (W2). All writing goes through here, so that a block is written once (W7) and a loss is
always a decision with an outcome (W3).

What must stay true: blocking calls happen without the lock; a row is ``WRITING`` from the order to the end of
its write; a failed write leaves nothing findable and its blocks dirty again. Called by the owner's and the
gate's threads, never by a step hook. Rules: W1-W4, W7, W8, D2, D6, D7.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from parkade_cache.conversations import Conversation
from parkade_cache.errors import ParkadeError
from parkade_cache.ids import NO_KEY, BlockKey, PackId
from parkade_cache.ledger import DiskState, RamState
from parkade_cache.mover import BlockMeta, JobId, JobOutcome, Mover, PackOrder, PackWritten, SlotBlock
from parkade_cache.receipts import ReceiptKind
from parkade_cache.spill import (
    PackEntry,
    PackHeader,
    PackInfo,
    RecoveredPack,
    Refusal,
    Reservation,
    SpillStore,
    SpillUsage,
    WriteOutcome,
)
from parkade_cache.state import CacheState
from parkade_cache.turns import StreamPack, Turn

_log = logging.getLogger(__name__)

PACK_OVERHEAD_BYTES = 16 << 10
"""Header, footer and trailer of a pack, generously; what is reserved on top of its blocks."""

RETRY_AFTER_FAILURE_S = 5.0
"""A conversation whose write failed is tried again after this long, not at once."""


@dataclass(slots=True)
class WriteTicket:
    """One ordered write: whose, what, and how it ended."""

    job: JobId
    conversation: Conversation
    order: PackOrder
    number: int
    rows: tuple[int, ...]
    nbytes: int
    reservation: Reservation
    urgent: bool
    started: float
    done: threading.Event = field(default_factory=threading.Event)
    outcome: WriteOutcome = WriteOutcome.FAILED
    stream: StreamPack | None = None
    turn: Turn | None = None
    reason: str = ""
    forgotten: bool = False


class DiskTier:
    """Writes, publications and disk eviction for one pod."""

    def __init__(self, state: CacheState, store: SpillStore, mover: Mover) -> None:
        self.state = state
        self.store = store
        self.mover = mover
        self._tickets: dict[JobId, WriteTicket] = {}
        self._reservations: dict[PackId, Reservation] = {}
        self._io = threading.RLock()
        state.new_pack_id = self._name_stream
        mover.attach(str(store.identity_folder), store.fingerprint, direct=store.direct)

    def _name_stream(self) -> PackId:
        """A pack's name before its space is reserved; called by a step hook, so nothing is asked of the store."""
        stamp = (int(self.state.clock.wall() * 1000) & ((1 << 48) - 1)) << 16
        return PackId(f"{stamp:016x}{secrets.randbits(64):016x}")

    def usage(self) -> SpillUsage:
        """What the disk tier takes and may take."""
        with self._io:
            return self.store.usage()

    def recover(self) -> Iterator[RecoveredPack]:
        """Old packs, newest first; other work gets its turn between two of them (S3)."""
        packs = self.store.recover()
        while True:
            with self._io:
                pack = next(packs, None)
            if pack is None:
                return
            yield pack

    def touch(self, conversations: Sequence[Conversation]) -> None:
        """Remember across a restart when these conversations were last used."""
        with self._io:
            for conversation in conversations:
                self.store.touch([conversation.id], conversation.last_used)

    # -- orders ------------------------------------------------------------------------------------------

    def order_write(self, conversation: Conversation, *, urgent: bool) -> WriteTicket | WriteOutcome:
        """Order the write of everything of ``conversation`` that is in RAM only.

        Returns the ticket of the write, or why there is none; ``ALREADY_ON_DISK`` when nothing is left to do.
        """
        state = self.state
        with state.lock:
            rows = self._dirty_rows(conversation)
            if not rows:
                conversation.dirty = bool(conversation.writing)
                return WriteOutcome.ALREADY_ON_DISK
            if conversation.tokens < self._min_tokens():
                self._too_short(conversation)
                return WriteOutcome.REFUSED_MIN_TOKENS
        nbytes = len(rows) * state.geometry.pod_slot_bytes + PACK_OVERHEAD_BYTES * state.geometry.ranks
        reservation = self.reserve(nbytes, urgent=urgent, keep=conversation)
        if isinstance(reservation, Refusal):
            return reservation.outcome
        return self._start(conversation, reservation, nbytes, urgent=urgent)

    def _start(
        self, conversation: Conversation, reservation: Reservation, nbytes: int, *, urgent: bool
    ) -> WriteTicket | WriteOutcome:
        state = self.state
        ledger = state.ledger
        with state.lock:
            rows = self._dirty_rows(conversation)
            empty = not rows
        if empty:
            with self._io:
                self.store.cancel(reservation)
            return WriteOutcome.ALREADY_ON_DISK
        with state.lock:
            rows = [row for row in rows if ledger.disk[row] == DiskState.ABSENT and ledger.ram[row] == RamState.READY]
            order = self._order(conversation, reservation.pack_id)
            number = state.pack_number(order.pack, conversation.id)
            blocks = []
            for row in rows:
                ledger.disk_writing(row, number)
                ledger.pin(row)
                blocks.append(SlotBlock(self._meta(row), ledger.slot[row]))
            ticket = WriteTicket(
                job=state.next_job(),
                conversation=conversation,
                order=order,
                number=number,
                rows=tuple(rows),
                nbytes=nbytes,
                reservation=reservation,
                urgent=urgent,
                started=state.clock.monotonic(),
            )
            self._tickets[ticket.job] = ticket
            conversation.writing.add(ticket.job)
        self.mover.write(ticket.job, order, blocks, urgent=urgent)
        return ticket

    def _order(self, conversation: Conversation, pack: PackId) -> PackOrder:
        return PackOrder(
            pack=pack,
            conversation=conversation.id,
            created_at=self.state.clock.wall(),
            tips=self._tips(conversation),
        )

    def _tips(self, conversation: Conversation) -> tuple[tuple[BlockKey, int], ...]:
        ledger = self.state.ledger
        return tuple((ledger.key[row], tip.tokens) for tip in conversation.tips for row in tip.rows)

    def _meta(self, row: int) -> BlockMeta:
        ledger = self.state.ledger
        parent = ledger.parent[row]
        key = ledger.key[row]
        return BlockMeta(
            key=key,
            parent=ledger.key[parent] if parent >= 0 else NO_KEY,
            end_token=ledger.end_token[row],
            group=self.state.group_of(key),
        )

    def _dirty_rows(self, conversation: Conversation) -> list[int]:
        """Rows to write, every chain's root first, each once."""
        seen: dict[int, None] = {}
        for row in conversation.rows():
            for dirty in self.state.ledger.dirty_chain(row):
                if not self.state.ledger.pins[dirty]:
                    seen[dirty] = None
        return list(seen)

    def _min_tokens(self) -> int:
        spill = self.state.policy.spill
        return spill.min_tokens if spill is not None else 0

    def _too_short(self, conversation: Conversation) -> None:
        conversation.dirty = False
        if not conversation.too_short:
            conversation.too_short = True
            _log.info("conversation %s is shorter than spill.minTokens and is not written", conversation.id)
        self.state.metrics.write_out.labels(outcome=WriteOutcome.REFUSED_MIN_TOKENS.value).inc()

    # -- streams -----------------------------------------------------------------------------------------

    def open_streams(self) -> None:
        """Reserve space for what turns stream, and let the movers write it."""
        state = self.state
        with state.lock:
            wanting = [
                (turn, turn.stream)
                for turn in state.turns.values()
                if turn.stream is not None
                and not turn.stream.failed
                and turn.stream.planned_bytes > turn.stream.reserved_bytes
            ]
        for turn, stream in wanting:
            self._open_stream(turn, stream)

    def _open_stream(self, turn: Turn, stream: StreamPack) -> None:
        state = self.state
        expected = max(0, turn.prompt_tokens - turn.engine_tokens) // max(1, turn.block_tokens)
        ahead = max(stream.planned_bytes, (expected + 4) * state.geometry.pod_slot_bytes)
        if stream.opened:
            ahead = stream.planned_bytes + 4 * state.geometry.pod_slot_bytes
        missing = ahead - stream.reserved_bytes
        reservation = self.reserve(
            missing + PACK_OVERHEAD_BYTES, urgent=True, keep=turn.conversation, grow=self._reservations.get(stream.pack), pack=stream.pack
        )
        if isinstance(reservation, Refusal):
            self._refuse_stream(turn, stream, reservation)
            return
        self._reservations[stream.pack] = reservation
        stream.reserved_bytes += missing
        if not stream.opened:
            stream.opened = True
            order = PackOrder(stream.pack, turn.conversation.id, state.clock.wall())
            self.mover.open_stream(order, ahead)

    def _refuse_stream(self, turn: Turn, stream: StreamPack, refusal: Refusal) -> None:
        state = self.state
        with state.lock:
            stream.failed = True
            stream.reason = refusal.outcome.value
            job = state.next_job()
        self.mover.abort_stream(job, stream.pack, refusal.outcome.value)
        self.state.metrics.write_out.labels(outcome=refusal.outcome.value).inc()

    def finish_stream(self, turn: Turn) -> None:
        """A turn has ended: complete the pack its blocks were streamed to."""
        state = self.state
        stream = turn.stream
        if stream is None:
            return
        if not stream.opened and not stream.failed:
            self._open_stream(turn, stream)
        with state.lock:
            reservation = self._reservations.pop(stream.pack, None)
            order = PackOrder(
                stream.pack, turn.conversation.id, state.clock.wall(), self._tips(turn.conversation)
            )
            rows = tuple(
                row
                for top in turn.tips.values()
                for row in state.ledger.ancestors(top)
                if state.ledger.pack[row] == stream.number and state.ledger.disk[row] == DiskState.WRITING
            )
            lost = stream.failed or reservation is None
            if lost:
                self._stream_lost(turn, stream, rows)
        if lost:
            if reservation is not None:
                with self._io:
                    self.store.cancel(reservation)
            return
        assert reservation is not None
        with state.lock:
            for row in rows:
                state.ledger.pin(row)
            ticket = WriteTicket(
                job=state.next_job(),
                conversation=turn.conversation,
                order=order,
                number=stream.number,
                rows=rows,
                nbytes=stream.planned_bytes,
                reservation=reservation,
                urgent=True,
                started=state.clock.monotonic(),
                stream=stream,
                turn=turn,
            )
            self._tickets[ticket.job] = ticket
            turn.conversation.writing.add(ticket.job)
        self.mover.finish_stream(ticket.job, order)

    def _stream_lost(self, turn: Turn, stream: StreamPack, rows: Sequence[int]) -> None:
        """What was streamed reaches no disk: the blocks are gone, and the loss is counted."""
        state = self.state
        for row in rows:
            state.ledger.disk_gone(row)
            state.ledger.forget_if_dead(row)
        state.changed()
        reason = stream.reason or "failed"
        if rows:
            self._drop_receipt(turn.conversation, reason, len(rows), tier="stream")

    def _drop_receipt(self, conversation: Conversation, reason: str, blocks: int, *, tier: str) -> None:
        state = self.state
        state.totals.dropped_conversations += 1
        state.metrics.dropped_conversations.labels(reason=reason).inc()
        state.receipts.add(
            kind=ReceiptKind.DROP,
            outcome="dropped",
            reason=reason,
            conversation=conversation.id,
            tier=tier,
            blocks=blocks,
            bytes=blocks * state.geometry.pod_slot_bytes,
            dropped=1,
        )

    # -- answers of the movers -----------------------------------------------------------------------------

    def pack_written(self, reports: Sequence[PackWritten]) -> None:
        """All ranks have answered for one pack: publish it, or undo what was announced."""
        job = reports[0].job
        with self.state.lock:
            ticket = self._tickets.pop(job, None)
        if ticket is None:
            return
        ticket.turn = None
        if all(report.outcome is JobOutcome.DONE for report in reports) and not ticket.forgotten:
            self._publish(ticket, reports)
        else:
            self._undo(ticket, reports)
        with self.state.lock:
            ticket.conversation.writing.discard(job)
            if not ticket.conversation.writing and not self._dirty_rows(ticket.conversation):
                ticket.conversation.dirty = False
            self.state.changed()
        self.collect_dead()
        ticket.done.set()

    def _publish(self, ticket: WriteTicket, reports: Sequence[PackWritten]) -> None:
        try:
            with self._io:
                self.store.publish([self._info(report, ticket) for report in reports], ticket.reservation)
        except (ParkadeError, OSError) as error:
            _log.error("pack %s is written but could not be published: %s", ticket.order.pack, error)
            ticket.reason = str(error)
            self._undo(ticket, reports)
            return
        dead = self._enter(ticket, reports[0])
        nbytes = sum(report.file_bytes for report in reports)
        self._spill_receipt(ticket, reports, nbytes)
        if dead:
            self.drop_entries(ticket.number, dead)
        ticket.outcome = WriteOutcome.WRITTEN

    def _info(self, report: PackWritten, ticket: WriteTicket) -> PackInfo:
        header = PackHeader(
            pack_id=report.pack,
            conversation=report.conversation,
            identity=self.store.fingerprint,
            rank=report.rank,
            ranks=self.state.geometry.ranks,
            created_at=report.created_at,
        )
        entries = tuple(
            PackEntry(
                key=entry.meta.key,
                parent=entry.meta.parent,
                end_token=entry.meta.end_token,
                group=entry.meta.group,
                offset=entry.offset,
                nbytes=entry.nbytes,
                checksum=entry.checksum,
            )
            for entry in report.entries
        )
        return PackInfo(header=header, entries=entries, tips=report.tips, file_bytes=report.file_bytes)

    def _enter(self, ticket: WriteTicket, report: PackWritten) -> list[int]:
        """Make the pack's blocks findable; returns entries that nobody wants any more."""
        state = self.state
        ledger = state.ledger
        dead: list[int] = []
        with state.lock:
            for row in ticket.rows:
                ledger.unpin(row)
            pack = state.packs[ticket.number]
            for number, entry in enumerate(report.entries):
                row = ledger.find(entry.meta.key)
                wanted = row >= 0 and ledger.disk[row] == DiskState.WRITING and ledger.pack[row] == ticket.number
                if not wanted:
                    dead.append(number)
                    continue
                if not ledger.disk_hold[row]:
                    ledger.disk_gone(row)
                    ledger.forget_if_dead(row)
                    dead.append(number)
                    continue
                ledger.disk_published(row, ticket.number, number)
                pack.live += 1
            self._rest_gone(ticket)
        return dead

    def _rest_gone(self, ticket: WriteTicket) -> None:
        """Rows of the ticket that are still announced were not in the pack: they are dirty or gone again."""
        ledger = self.state.ledger
        for row in ticket.rows:
            if ledger.disk[row] == DiskState.WRITING and ledger.pack[row] == ticket.number:
                ledger.disk_gone(row)
                ledger.forget_if_dead(row)

    def _undo(self, ticket: WriteTicket, reports: Sequence[PackWritten]) -> None:
        state = self.state
        cancelled = any(report.outcome is JobOutcome.CANCELLED for report in reports) or ticket.forgotten
        reason = ticket.reason or next((report.reason for report in reports if report.reason), "failed")
        with self._io:
            end = self.store.discard if ticket.forgotten else self.store.cancel
            end(ticket.reservation)
        with state.lock:
            for row in ticket.rows:
                state.ledger.unpin(row)
            lost = ticket.stream is not None and not ticket.forgotten
            self._rest_gone(ticket)
            ticket.conversation.dirty = True
            ticket.conversation.retry_write_at = state.clock.monotonic() + RETRY_AFTER_FAILURE_S
        ticket.outcome = WriteOutcome.DEADLINE if cancelled else WriteOutcome.FAILED
        if not cancelled:
            state.totals.disk_errors += 1
            state.metrics.spill_errors.labels(op="write", reason="failed").inc()
            _log.warning("pack %s was not written: %s", ticket.order.pack, reason)
        if lost and ticket.rows:
            self._drop_receipt(ticket.conversation, "failed", len(ticket.rows), tier="stream")

    def _spill_receipt(self, ticket: WriteTicket, reports: Sequence[PackWritten], nbytes: int) -> None:
        state = self.state
        seconds = max(report.seconds for report in reports)
        state.totals.written_bytes += nbytes
        state.metrics.spill_write_bytes.inc(nbytes)
        state.metrics.spill_write_seconds.observe(seconds)
        state.receipts.add(
            kind=ReceiptKind.SPILL,
            outcome="written",
            reason="write_out" if ticket.urgent and ticket.stream is None else "stream" if ticket.stream else "write_behind",
            conversation=ticket.conversation.id,
            tier="disk",
            blocks=len(reports[0].entries),
            bytes=nbytes,
            duration_seconds=seconds,
        )

    # -- space ---------------------------------------------------------------------------------------------

    def reserve(
        self,
        nbytes: int,
        *,
        urgent: bool,
        keep: Conversation | None,
        grow: Reservation | None = None,
        pack: PackId | None = None,
    ) -> Reservation | Refusal:
        """Space on disk, made by letting the oldest conversations on disk go when capacity is short (D6).

        ``grow`` adds to what a pack has already; ``pack`` names a pack that has a name already.
        """
        while True:
            with self._io:
                if grow is None:
                    answer = self.store.reserve(nbytes, urgent=urgent, pack_id=pack)
                else:
                    answer = self.store.grow(grow, nbytes, urgent=urgent)
            if not isinstance(answer, Refusal) or answer.missing_bytes <= 0:
                return answer
            if not self._evict_oldest(answer.missing_bytes, keep):
                return answer

    def _evict_oldest(self, missing_bytes: int, keep: Conversation | None) -> bool:
        """Let the least recently used conversations go from disk until ``missing_bytes`` came back."""
        state = self.state
        returned = 0
        while returned < missing_bytes:
            with state.lock:
                victim = next(
                    (
                        conversation
                        for conversation in state.conversations
                        if conversation.on_disk
                        and conversation is not keep
                        and not conversation.busy
                        and not conversation.pinned
                        and not conversation.writing
                        and conversation.tips
                    ),
                    None,
                )
                if victim is None:
                    break
                tokens = victim.tokens
                state.leave_disk(victim)
                if not victim.in_ram:
                    state.drop_conversation(victim)
                else:
                    victim.dirty = False
            freed = self.collect_dead()
            returned += freed
            state.receipts.add(
                kind=ReceiptKind.EVICT,
                outcome="evicted",
                reason="disk_capacity",
                conversation=victim.id,
                tier="disk",
                tokens=tokens,
                bytes=freed,
            )
        return returned > 0

    def collect_dead(self) -> int:
        """Give the space of entries nobody keeps back to the file system; returns the bytes."""
        state = self.state
        with state.lock:
            dead = state.take_unheld_disk()
            bad = list(state.bad_packs)
        returned = 0
        for number, entries in dead.items():
            returned += self.drop_entries(number, entries)
        for number in bad:
            self._quarantine(number)
        return returned

    def drop_entries(self, number: int, entries: Iterable[int]) -> int:
        """Entries of a pack that no row points at any more: their space goes back to the file system (D6)."""
        pack = self.state.packs[number]
        try:
            with self._io:
                nbytes = self.store.drop(pack.pack, sorted(entries))
        except (ParkadeError, OSError) as error:
            _log.warning("space of pack %s could not be given back: %s", pack.pack, error)
            self.state.metrics.spill_errors.labels(op="drop", reason="failed").inc()
            return 0
        with self.state.lock:
            gone = pack.live == 0
            if gone:
                self.state.forget_pack(number)
        if gone:
            self.mover.forget_pack(pack.pack)
        return nbytes

    def _quarantine(self, number: int) -> None:
        """A block of the pack was damaged: set the whole pack aside; its other blocks become misses (D4)."""
        state = self.state
        ledger = state.ledger
        with state.lock:
            pack = state.packs[number]
            if not pack.bad:
                return
            rows = ledger.rows_of_pack(number)
            if any(ledger.pins[row] for row in rows):
                return
            pack.bad = False
            state.bad_packs.discard(number)
            for row in rows:
                ledger.disk_gone(row)
                ledger.forget_if_dead(row)
            pack.live = 0
            conversation = state.conversations.get(pack.conversation)
            if conversation is not None:
                conversation.dirty = True
            state.changed()
        self.mover.forget_pack(pack.pack)
        state.metrics.spill_corrupt_blocks.inc()
        try:
            with self._io:
                self.store.quarantine(pack.pack, "a block's checksum did not match")
        except (ParkadeError, OSError) as error:
            _log.error("damaged pack %s could not be set aside: %s", pack.pack, error)
        state.receipts.add(
            kind=ReceiptKind.DROP,
            outcome="quarantined",
            reason="damaged",
            conversation=pack.conversation,
            tier="disk",
            blocks=len(rows),
            bytes=len(rows) * state.geometry.pod_slot_bytes,
        )

    # -- write-out -----------------------------------------------------------------------------------------

    def write_out(self, conversation: Conversation, *, deadline: float) -> WriteOutcome:
        """Write what is unpublished of ``conversation`` before its RAM is let go; waits until ``deadline`` (W1, W3)."""
        state = self.state
        started = state.clock.monotonic()
        outcome = self._write_out(conversation, deadline)
        state.metrics.write_out.labels(outcome=outcome.value).inc()
        state.metrics.write_out_seconds.observe(state.clock.monotonic() - started)
        return outcome

    def _write_out(self, conversation: Conversation, deadline: float) -> WriteOutcome:
        wrote = False
        while True:
            self._join_writes(conversation, deadline)
            if self.state.clock.monotonic() >= deadline:
                return WriteOutcome.DEADLINE
            ticket = self.order_write(conversation, urgent=True)
            if isinstance(ticket, WriteOutcome):
                return WriteOutcome.WRITTEN if wrote and ticket is WriteOutcome.ALREADY_ON_DISK else ticket
            if not ticket.done.wait(max(0.0, deadline - self.state.clock.monotonic())):
                self.mover.cancel(ticket.job)
                ticket.done.wait(1.0)
                return ticket.outcome if ticket.outcome is WriteOutcome.WRITTEN else WriteOutcome.DEADLINE
            if ticket.outcome is not WriteOutcome.WRITTEN:
                return ticket.outcome
            wrote = True

    def _join_writes(self, conversation: Conversation, deadline: float) -> None:
        """Wait for writes of the conversation that are under way: their blocks need not be written again."""
        with self.state.lock:
            tickets = [self._tickets[job] for job in conversation.writing if job in self._tickets]
        for ticket in tickets:
            ticket.done.wait(max(0.0, deadline - self.state.clock.monotonic()))

    def forget_writes(self, conversation: Conversation) -> None:
        """The conversation is deleted: no write of it is ever published (case 69)."""
        with self.state.lock:
            tickets = [self._tickets[job] for job in conversation.writing if job in self._tickets]
            for ticket in tickets:
                ticket.forgotten = True
        for ticket in tickets:
            self.mover.cancel(ticket.job)
