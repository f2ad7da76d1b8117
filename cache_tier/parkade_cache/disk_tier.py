"""The owner's disk side: what is written, what is published, what gives way.

Why it exists: between "a mover has written a pack" and "a lookup may find it" lie the index row and the
ledger, in that order (W2). All writing goes through here, so that a block is written once (W7) and a loss is
always a decision with an outcome (W3).

What must stay true: blocking calls happen without the lock; a row is ``WRITING`` from the order to the end of
its write; a failed write leaves nothing findable and its blocks dirty again. Called by the owner's and the
gate's threads, never by a step hook. Rules: W1-W4, W7, W8, D2, D6, D7.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from parkade_cache.conversations import Conversation, Tip
from parkade_cache.errors import ParkadeError, SpillError
from parkade_cache.ids import BlockKey, PackId
from parkade_cache.ledger import DiskState
from parkade_cache.mover import BlockMeta, JobId, JobOutcome, Mover, PackOrder, PackWritten, SlotBlock
from parkade_cache.policy import SpillPolicy
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

PROBE_INTERVAL_S = 2.0
"""How often a disk that failed is tried again (D8)."""

LONGEST_PROBE_INTERVAL_S = 60.0
"""The interval doubles up to this while the disk fails again within as long of being used again."""

DISK_PATIENCE_S = 10.0
"""How long the owner waits for a step of the disk's; then the disk counts as failed, and the call goes on alone."""

STUCK_AFTER_S = 5.0
"""A write that was given up and does not end for this long hangs, and the disk with it; one that is slow ends."""

_ERROR_LABELS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EIO: "io_error",
    errno.EROFS: "read_only",
    errno.ESTALE: "gone",
    errno.ENOENT: "gone",
    errno.ENODEV: "gone",
    errno.EACCES: "not_permitted",
    errno.EPERM: "not_permitted",
    errno.ETIMEDOUT: "hangs",
}

CANCEL_WAIT_S = 1.0
"""How long a cancelled write may take to say so before its conversation is let go without it."""

RECOVERY_WAIT_S = 5.0
"""How long making room waits for old packs to be found: before that nobody knows which conversation is oldest."""

TOUCH_ONE_BY_ONE = 16
"""Uses noted with their own times in one round; where there are more, those of one round count as simultaneous."""

_ROWS_PER_HOLD = 2000
"""Entries taken out of the ledger under one hold of the lock."""

_ROUNDS = 4
"""A write-out repeats for blocks that came meanwhile; a conversation that keeps growing is in use and stays."""


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
    reason: str = ""
    forgotten: bool = False
    """Its conversation is deleted, or was let go without it: it must never be published (W3, case 69)."""


class DiskTier:
    """Writes, publications and disk eviction for one pod."""

    def __init__(self, state: CacheState, store: SpillStore, mover: Mover) -> None:
        self.state = state
        self.store = store
        self.mover = mover
        self._tickets: dict[JobId, WriteTicket] = {}
        self._fit = threading.Lock()
        self._fitting = True
        """The disk may hold more than its capacity."""
        self._ending: dict[JobId, WriteTicket] = {}
        """Writes that have ended and are being published or undone: nobody can give them up any more."""
        self._reservations: dict[PackId, Reservation] = {}
        self._io = threading.RLock()
        self._streams = threading.Lock()
        self._probe_at = float("-inf")
        self._probe_interval_s = 0.0
        self._healthy_since = float("-inf")
        self._failed_since = float("-inf")
        self._given_up: dict[JobId, float] = {}
        self._look_at = float("-inf")
        self._space_due = float("inf")
        self._no_space = ""
        store.patience.seconds = DISK_PATIENCE_S
        state.new_pack_id = self._name_stream
        mover.attach(str(store.identity_folder), store.fingerprint, direct=store.direct)

    def _name_stream(self) -> PackId:
        """A pack's name before its space is reserved; called by a step hook, so nothing is asked of the store."""
        stamp = (int(self.state.clock.wall() * 1000) & ((1 << 48) - 1)) << 16
        return PackId(f"{stamp:016x}{secrets.randbits(64):016x}")

    def usage(self) -> SpillUsage | None:
        """What the disk tier takes and may take; None while the disk cannot say."""
        try:
            with self._io:
                return self.store.usage()
        except (ParkadeError, OSError) as error:
            self.failed("measure", error)
            return None

    def recover(self) -> Iterator[RecoveredPack]:
        """Old packs, newest first; other work gets its turn between two of them (S3)."""
        packs = self.store.recover()
        while True:
            with self._io:
                pack = next(packs, None)
            if pack is None:
                return
            yield pack

    def touch(self) -> None:
        """Remember across a restart when conversations were last used (D6)."""
        state = self.state
        with state.lock:
            used, state.touched = state.touched, {}
        if not used or not state.spill_healthy:
            return
        try:
            with self._io:
                if len(used) > TOUCH_ONE_BY_ONE:
                    self.store.touch(list(used), max(used.values()))
                else:
                    for conversation, at in used.items():
                        self.store.touch([conversation], at)
        except (ParkadeError, OSError) as error:
            self.failed("touch", error)

    # -- health ------------------------------------------------------------------------------------------

    def failed(self, operation: str, error: object) -> None:
        """An operation of the disk failed: count it, and look at the disk before it is used again (D8)."""
        state = self.state
        now = state.clock.monotonic()
        reason = f"{operation}: {error}"
        with state.lock:
            state.totals.disk_errors += 1
            was_healthy, state.spill_healthy = state.spill_healthy, False
            is_news = was_healthy or reason != state.spill_reason
            state.spill_reason = reason
            if was_healthy:
                again = now - self._healthy_since < LONGEST_PROBE_INTERVAL_S
                longer = min(2 * self._probe_interval_s, LONGEST_PROBE_INTERVAL_S)
                self._probe_interval_s = longer if again else PROBE_INTERVAL_S
                self._failed_since = now
            if was_healthy or operation == "probe":
                # What else fails meanwhile must not put the next look off.
                self._probe_at = now + self._probe_interval_s
        state.metrics.spill_errors.labels(op=operation, reason=_error_label(error)).inc()
        _log.log(logging.WARNING if is_news else logging.DEBUG, "spill: %s failed: %s", operation, error)
        if was_healthy:
            state.receipts.add(kind=ReceiptKind.SPILL, outcome="degraded", reason=reason[:200], tier="disk")
        if _error_label(error) == "hangs":
            self._give_up_streams()

    def _give_up_streams(self) -> None:
        """What waits to be streamed to a disk that hangs keeps blocks of the engine: let them go."""
        with self.state.lock:
            streams = [turn.stream for turn in self.state.turns.values()]
        for stream in streams:
            if stream is not None and not stream.failed:
                self._refuse_stream(stream, "failed")

    def check_health(self) -> bool:
        """Try a disk that has failed; True when its index or packs must be read again now that it works (D8).

        Also notices a disk that hangs, and one that has no room left for what was to be written last.
        """
        state = self.state
        stuck = self._stuck_writes()
        if stuck and state.spill_healthy:
            self.failed("write", SpillError(errno.ETIMEDOUT, f"{stuck} writes that were given up have not ended"))
        with state.lock:
            asked, state.probe_due = state.probe_due or self._takes_long(), False
            due = not state.spill_healthy and state.clock.monotonic() >= self._probe_at
        if not (asked or due) or stuck:
            self._check_space()
            return False
        try:
            with self._io:
                self._try()
        except (ParkadeError, OSError) as error:
            self.failed("probe", error)
            return False
        self._works()
        return self.store.needs_recovery

    def _try(self) -> None:
        """Write and read a little, then do what the disk has left undone; SpillError while it does not work."""
        store = self.store
        served = store.fingerprint
        store.probe()
        store.resume()
        if store.fingerprint != served:
            self.mover.attach(str(store.identity_folder), store.fingerprint, direct=store.direct)

    def _works(self) -> None:
        state = self.state
        now = state.clock.monotonic()
        with state.lock:
            recovered, state.spill_healthy = not state.spill_healthy, True
            state.spill_reason = self._no_space
            if recovered:
                self._healthy_since = now
        if recovered:
            state.receipts.add(
                kind=ReceiptKind.RECOVER,
                outcome="disk_healthy",
                tier="disk",
                duration_seconds=max(0.0, now - self._failed_since),
            )

    def _takes_long(self) -> bool:
        """Whether a write has been under way for long, and the disk has not been looked at since; under the lock."""
        now = self.state.clock.monotonic()
        if not self.state.spill_healthy or now < self._look_at:
            return False
        begun = [ticket.started for ticket in self._tickets.values()]
        begun += [turn.started for turn in self.state.turns.values() if turn.stream and not turn.stream.failed]
        if min(begun, default=now) > now - DISK_PATIENCE_S:
            return False
        self._look_at = now + DISK_PATIENCE_S
        return True

    def _stuck_writes(self) -> int:
        """Writes that were given up long ago and whose movers are still in the kernel with them."""
        now = self.state.clock.monotonic()
        with self.state.lock:
            given_up = [job for job, ticket in self._tickets.items() if ticket.forgotten]
        self._given_up = {job: self._given_up.get(job, now) for job in given_up}
        return sum(now - since >= STUCK_AFTER_S for since in self._given_up.values())

    def _check_space(self) -> None:
        """Say so when the free-space floor refuses writes: no failure, since what is there is still read (case 38)."""
        state = self.state
        now = state.clock.monotonic()
        if not state.spill_healthy or not (self.store.refused_bytes or self._no_space):
            self._space_due = float("inf")
            return
        # Not at once: a refusal may just be making the oldest conversations give way.
        self._space_due = min(self._space_due, now + PROBE_INTERVAL_S)
        if now < self._space_due:
            return
        self._space_due = float("inf")
        try:
            with self._io:
                missing = self.store.missing_space()
        except (ParkadeError, OSError) as error:
            self.failed("measure", error)
            return
        reason = f"no space: the free-space floor leaves {missing} bytes too little for the next write"
        was_short, self._no_space = bool(self._no_space), reason if missing else ""
        with state.lock:
            if state.spill_healthy:
                state.spill_reason = self._no_space
        if missing and not was_short:
            _log.warning("spill: %s", reason)
            state.metrics.spill_errors.labels(op="reserve", reason="no_space").inc()
            state.receipts.add(kind=ReceiptKind.SPILL, outcome="no_space", reason=reason, tier="disk")
        elif was_short and not missing:
            state.receipts.add(kind=ReceiptKind.RECOVER, outcome="space_again", tier="disk")

    # -- orders ------------------------------------------------------------------------------------------

    def order_write(self, conversation: Conversation, *, urgent: bool) -> WriteTicket | WriteOutcome:
        """Order the write of everything of ``conversation`` that is in RAM only.

        Returns the ticket of the write, or why there is none; ``ALREADY_ON_DISK`` when nothing is left to do.
        """
        state = self.state
        with state.lock:
            rows = self._dirty_rows(conversation)
            if not rows:
                if not conversation.writing:
                    state.conversations.mark_clean(conversation)
                return WriteOutcome.ALREADY_ON_DISK
            if conversation.tokens < self._min_tokens():
                self._too_short(conversation)
                return WriteOutcome.REFUSED_MIN_TOKENS
        nbytes = len(rows) * state.geometry.pod_slot_bytes + PACK_OVERHEAD_BYTES * state.geometry.ranks
        reservation = self.reserve(nbytes, urgent=urgent, keep=conversation)
        if isinstance(reservation, Refusal):
            return reservation.outcome
        ticket, blocks = self._start(conversation, reservation, nbytes, urgent=urgent)
        if ticket is None:
            with self._io:
                self.store.cancel(reservation)
            return WriteOutcome.ALREADY_ON_DISK
        self.mover.write(ticket.job, ticket.order, blocks, urgent=urgent)
        return ticket

    def _start(
        self, conversation: Conversation, reservation: Reservation, nbytes: int, *, urgent: bool
    ) -> tuple[WriteTicket | None, list[SlotBlock]]:
        """Announce the write in the ledger; what to write is asked anew, since the lock was let go in between."""
        state = self.state
        ledger = state.ledger
        with state.lock:
            rows = self._dirty_rows(conversation)
            if not rows or conversation.forgotten:
                return None, []
            state.enter_disk(conversation)
            order = self._order(conversation, reservation.pack_id)
            number = state.pack_number(order.pack, conversation.id)
            state.packs[number].writing = True
            blocks = [SlotBlock(self._meta(row), ledger.slot[row]) for row in rows]
            for row in rows:
                ledger.disk_writing(row, number)
                ledger.pin(row)
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
        return ticket, blocks

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
        key = ledger.key[row]
        return BlockMeta(
            key=key,
            parent=self.state.parent_on_disk(row),
            end_token=ledger.end_token[row],
            group=self.state.group_of(key),
        )

    def _dirty_rows(self, conversation: Conversation) -> list[int]:
        """Rows to write, every chain's root first, each once."""
        state = self.state
        chains = (state.ledger.dirty_chain(row) for row in conversation.rows())
        rows = dict.fromkeys(row for chain in chains for row in chain)
        if not state.recurrent_groups:
            return list(rows)
        return [row for row in rows if state.keeps_on_disk(row)]

    def _min_tokens(self) -> int:
        spill = self.state.policy.spill
        return spill.min_tokens if spill is not None else 0

    def _too_short(self, conversation: Conversation) -> None:
        self.state.conversations.mark_clean(conversation)
        if not conversation.too_short:
            conversation.too_short = True
            _log.info("conversation %s is shorter than spill.minTokens and is not written", conversation.id)

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
            with self._streams:
                self._open_stream(turn, stream)

    def _open_stream(self, turn: Turn, stream: StreamPack) -> None:
        if stream.ended:
            return
        state = self.state
        slot_bytes = state.geometry.pod_slot_bytes
        ahead = stream.planned_bytes + 4 * slot_bytes
        if not stream.opened:
            expected = max(0, turn.prompt_tokens - turn.engine_tokens) // max(1, turn.block_tokens)
            ahead = max(ahead, (expected + 4) * slot_bytes)
        missing = ahead - stream.reserved_bytes
        reservation = self.reserve(
            missing + PACK_OVERHEAD_BYTES * state.geometry.ranks,
            urgent=True,
            keep=turn.conversation,
            grow=self._reservations.get(stream.pack),
            pack=stream.pack,
        )
        if isinstance(reservation, Refusal):
            self._refuse_stream(stream, reservation.outcome.value)
            return
        self._reservations[stream.pack] = reservation
        stream.reserved_bytes += missing
        if not stream.opened:
            stream.opened = True
            self.mover.open_stream(PackOrder(stream.pack, turn.conversation.id, state.clock.wall()), ahead)

    def _refuse_stream(self, stream: StreamPack, reason: str) -> None:
        """Nothing more is streamed to the pack, and what was is given up; the loss is counted when the turn ends."""
        state = self.state
        with state.lock:
            stream.failed = True
            stream.reason = reason
            job = state.next_job()
        self.mover.abort_stream(job, stream.pack, reason)
        state.metrics.write_out.labels(outcome=reason).inc()

    def finish_stream(self, turn: Turn) -> None:
        """A turn has ended: complete the pack its blocks were streamed to."""
        if turn.stream is not None:
            with self._streams:
                self._finish_stream(turn, turn.stream)

    def _finish_stream(self, turn: Turn, stream: StreamPack) -> None:
        if stream.ended:
            return
        if not stream.failed and turn.conversation.forgotten:
            self._refuse_stream(stream, "forgotten")
        if not stream.failed and not self._streamed_rows(stream):
            self._refuse_stream(stream, "nothing_captured")
        if not stream.failed and stream.planned_bytes > stream.reserved_bytes:
            self._open_stream(turn, stream)
        stream.ended = True
        reservation = self._reservations.pop(stream.pack, None)
        if stream.failed or reservation is None:
            self._stream_lost(turn, stream, reservation)
            return
        ticket = self._stream_ticket(turn, stream, reservation)
        self.mover.finish_stream(ticket.job, ticket.order)

    def _streamed_rows(self, stream: StreamPack) -> list[int]:
        """Rows that are still announced for the stream, each once."""
        ledger = self.state.ledger
        with self.state.lock:
            return [
                row
                for row in dict.fromkeys(stream.rows)
                if ledger.pack[row] == stream.number and ledger.disk[row] == DiskState.WRITING
            ]

    def _stream_ticket(self, turn: Turn, stream: StreamPack, reservation: Reservation) -> WriteTicket:
        state = self.state
        with state.lock:
            rows = self._streamed_rows(stream)
            for row in rows:
                state.ledger.pin(row)
            ticket = WriteTicket(
                job=state.next_job(),
                conversation=turn.conversation,
                order=self._order(turn.conversation, stream.pack),
                number=stream.number,
                rows=tuple(rows),
                nbytes=stream.planned_bytes,
                reservation=reservation,
                urgent=True,
                started=state.clock.monotonic(),
                stream=stream,
            )
            self._tickets[ticket.job] = ticket
            turn.conversation.writing.add(ticket.job)
        return ticket

    def _stream_lost(self, turn: Turn, stream: StreamPack, reservation: Reservation | None) -> None:
        """What was streamed reaches no disk: the blocks are gone, and the loss is counted."""
        state = self.state
        ledger = state.ledger
        with state.lock:
            rows = self._streamed_rows(stream)
            lost = stream.lost + turn.uncached + sum(1 for row in rows if not ledger.ram[row])
            for row in rows:
                ledger.disk_gone(row)
                ledger.forget_if_dead(row)
            state.packs[stream.number].writing = False
            state.changed()
        if reservation is not None:
            self._give_back(reservation)
        if lost and not turn.conversation.forgotten:
            state.add_drop_receipt(turn.conversation.id, stream.reason or "failed", lost, tier="stream")
        self._settle(stream.number)

    def _give_back(self, reservation: Reservation, *, discard: bool = False) -> None:
        """End a reservation; a disk that cannot even clean up is a failed disk, not a lost ledger."""
        end = self.store.discard if discard else self.store.cancel
        try:
            with self._io:
                end(reservation)
        except (ParkadeError, OSError) as error:
            self.failed("cancel", error)

    def _settle(self, number: int) -> None:
        """The pack's number is free once nothing uses it, and then the movers close what they have open of it."""
        with self.state.lock:
            pack = self.state.pack_settled(number)
        if pack is not None:
            self.mover.forget_pack(pack)

    # -- answers of the movers -----------------------------------------------------------------------------

    def pack_written(self, reports: Sequence[PackWritten]) -> None:
        """All ranks have answered for one pack: publish it, or undo what was announced."""
        in_order = sorted(reports, key=lambda report: report.rank)
        with self.state.lock:
            ticket = self._tickets.pop(in_order[0].job, None)
            if ticket is None:
                return
            self._ending[ticket.job] = ticket
        try:
            if all(report.outcome is JobOutcome.DONE for report in in_order) and not ticket.forgotten:
                self._publish(ticket, in_order)
            else:
                self._undo(ticket, in_order)
        finally:
            self._ended(ticket)
        self.collect_dead()
        with self.state.lock:
            del self._ending[ticket.job]
        ticket.done.set()

    def _ended(self, ticket: WriteTicket) -> None:
        state = self.state
        conversation = ticket.conversation
        with state.lock:
            state.packs[ticket.number].writing = False
            conversation.writing.discard(ticket.job)
            if not conversation.writing and not self._dirty_rows(conversation):
                state.conversations.mark_clean(conversation)
            state.free_unheld_ram()
            state.changed()
            state.wake.notify_all()
        self._settle(ticket.number)

    def _publish(self, ticket: WriteTicket, reports: Sequence[PackWritten]) -> None:
        try:
            with self._io:
                self.store.publish([self._info(report) for report in reports], ticket.reservation)
        except (ParkadeError, OSError) as error:
            ticket.reason = f"written, but could not be published: {error}"
            self._undo(ticket, reports)
            return
        dead = self._enter(ticket, reports[0])
        nbytes = sum(report.file_bytes for report in reports)
        self._spill_receipt(ticket, reports, nbytes)
        for number, entries in dead.items():
            self.drop_entries(number, entries)
        ticket.outcome = WriteOutcome.WRITTEN

    def _info(self, report: PackWritten) -> PackInfo:
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

    def _enter(self, ticket: WriteTicket, report: PackWritten) -> dict[int, list[int]]:
        """Make the pack's blocks findable; returns entries that nobody wants any more, by pack number."""
        state = self.state
        ledger = state.ledger
        dead: dict[int, list[int]] = {}
        with state.lock:
            for row in ticket.rows:
                ledger.unpin(row)
            pack = state.packs[ticket.number]
            for number, entry in enumerate(report.entries):
                row = ledger.rows.get(entry.meta.key, -1)
                wanted = row >= 0 and ledger.disk[row] == DiskState.WRITING and ledger.pack[row] == ticket.number
                if wanted and ledger.disk_hold[row] and state.keeps_on_disk(row):
                    ledger.disk_published(row, ticket.number, number)
                    pack.live += 1
                else:
                    dead.setdefault(ticket.number, []).append(number)
            pack.dropping += len(dead.get(ticket.number, ()))
            self._rest_gone(ticket)
            self._superseded_states(ticket.conversation, dead)
        return dead

    def _superseded_states(self, conversation: Conversation, dead: dict[int, list[int]]) -> None:
        """Recurrent states on disk that are neither the deepest nor the root any more (D7)."""
        state = self.state
        ledger = state.ledger
        if not state.recurrent_groups:
            return
        for top in conversation.rows():
            if state.group_of(ledger.key[top]) not in state.recurrent_groups:
                continue
            for row in ledger.ancestors(top):
                if ledger.disk[row] != DiskState.PUBLISHED or ledger.pins[row] or ledger.is_checkpoint(row):
                    continue
                number, entry = ledger.pack[row], ledger.entry[row]
                ledger.disk_gone(row)
                state.packs[number].live -= 1
                state.packs[number].dropping += 1
                dead.setdefault(number, []).append(entry)

    def _rest_gone(self, ticket: WriteTicket) -> None:
        """Rows of the ticket that are still announced were not in the pack: they are dirty or gone again."""
        ledger = self.state.ledger
        for row in ticket.rows:
            if ledger.disk[row] == DiskState.WRITING and ledger.pack[row] == ticket.number:
                ledger.disk_gone(row)
            ledger.forget_if_dead(row)

    def _undo(self, ticket: WriteTicket, reports: Sequence[PackWritten]) -> None:
        state = self.state
        ledger = state.ledger
        cancelled = ticket.forgotten or any(report.outcome is JobOutcome.CANCELLED for report in reports)
        reason = ticket.reason or next((report.reason for report in reports if report.reason), "failed")
        self._give_back(ticket.reservation, discard=ticket.forgotten)
        with state.lock:
            for row in ticket.rows:
                ledger.unpin(row)
            lost = sum(1 for row in ticket.rows if ledger.disk[row] == DiskState.WRITING and not ledger.ram[row])
            self._rest_gone(ticket)
            state.conversations.mark_dirty(ticket.conversation)
            ticket.conversation.retry_write_at = state.clock.monotonic() + RETRY_AFTER_FAILURE_S
        ticket.outcome = WriteOutcome.DEADLINE if cancelled else WriteOutcome.FAILED
        if not cancelled:
            self.failed("write", f"pack {ticket.order.pack}: {reason}")
        if lost and not ticket.conversation.forgotten:
            state.add_drop_receipt(ticket.conversation.id, ticket.outcome.value, lost, tier="stream")

    def _spill_receipt(self, ticket: WriteTicket, reports: Sequence[PackWritten], nbytes: int) -> None:
        state = self.state
        seconds = max(report.seconds for report in reports)
        state.totals.written_bytes += nbytes
        state.metrics.spill_write_bytes.inc(nbytes)
        state.metrics.spill_write_seconds.observe(seconds)
        state.receipts.add(
            kind=ReceiptKind.SPILL,
            outcome="written",
            reason="stream" if ticket.stream is not None else "write_out" if ticket.urgent else "write_behind",
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
            if isinstance(answer, Refusal) and answer.outcome is WriteOutcome.FAILED:
                self.failed("reserve", answer.reason)
            if not isinstance(answer, Refusal) or answer.missing_bytes <= 0:
                return answer
            if not self.evict_oldest(answer.missing_bytes, keep):
                return answer

    def set_limits(self, spill: SpillPolicy) -> None:
        """A new policy's capacity, free-space floor and write budget count from now on."""
        with self._io:
            self.store.set_limits(
                capacity_bytes=spill.size,
                min_free_bytes=spill.min_free,
                write_budget_bytes_per_hour=spill.write_budget_per_hour,
            )
        with self.state.lock:
            self._fitting = True
            self.state.wake.notify_all()

    def fits(self) -> bool:
        """Whether the disk holds no more than its capacity; what is over goes with the next ticks."""
        usage = self.usage() if self._fitting else None
        return usage is None or usage.over_bytes <= 0

    def fit_capacity(self) -> None:
        """A disk that holds more than its capacity, as after a smaller one was set, gives some up (D1, case 45).

        Foreign and damaged files go first, then the conversations used longest ago, as far as they may go now; what
        stays over is tried again. Called by the tick and after a recovery: it may take long.
        """
        with self._fit:
            self._fit_capacity()

    def _fit_capacity(self) -> None:
        if not self._fitting or self.state.recovering or not self.state.spill_healthy:
            return
        try:
            with self._io:
                self.store.make_room(0)
        except (ParkadeError, OSError) as error:
            self.failed("make_room", error)
            return
        usage = self.usage()
        if usage is None:
            return
        if usage.over_bytes > 0:
            self.evict_oldest(usage.over_bytes, None, as_far_as_possible=True)
            usage = self.usage()
        self._fitting = usage is None or usage.over_bytes > 0

    def evict_oldest(self, missing_bytes: int, keep: Conversation | None, *, as_far_as_possible: bool = False) -> bool:
        """Let the least recently used conversations go from disk until ``missing_bytes`` came back (D6).

        Where all of them together would not bring that much, none goes and the answer is False, unless it is
        ``as_far_as_possible``.
        """
        if not self._recovered():
            return False
        victims = self._disk_victims(missing_bytes, keep, as_far_as_possible=as_far_as_possible)
        returned = 0
        for victim in victims:
            if returned >= missing_bytes or not self.state.spill_healthy:
                break
            returned += self._evict(victim)
        return returned > 0

    def _recovered(self) -> bool:
        """Whether all old packs are known; waits a little for them, since the oldest comes last."""
        state = self.state
        deadline = state.clock.monotonic() + RECOVERY_WAIT_S
        with state.lock:
            while state.recovering and state.clock.monotonic() < deadline:
                state.wake.wait(0.1)
            return not state.recovering

    def _disk_victims(
        self, missing_bytes: int, keep: Conversation | None, *, as_far_as_possible: bool
    ) -> list[Conversation]:
        """Conversations to let go, oldest first, that together bring ``missing_bytes``; empty when all do not."""
        state = self.state
        slot_bytes = state.geometry.pod_slot_bytes
        with state.lock:
            conversations = list(state.conversations)
        gone: dict[int, int] = {}
        victims: list[Conversation] = []
        found = 0
        for conversation in conversations:
            with state.lock:
                if conversation is keep or not self._may_leave_disk(conversation):
                    continue
                ledger = state.ledger
                frees = sum(len(ledger.disk_frees(row, gone)) for row in conversation.rows())
            victims.append(conversation)
            found += frees * slot_bytes
            if found >= missing_bytes:
                return victims
        return victims if as_far_as_possible else []

    def _may_leave_disk(self, conversation: Conversation) -> bool:
        return (
            conversation.on_disk
            and bool(conversation.tips)
            and not (conversation.busy or conversation.pinned or conversation.writing)
        )

    def _evict(self, victim: Conversation) -> int:
        state = self.state
        with state.lock:
            if not self._may_leave_disk(victim):
                return 0
            tokens = victim.tokens
            state.leave_disk(victim)
            state.conversations.mark_clean(victim)
            for tip in [tip for tip in victim.tips if not self._serves_without_disk(tip)]:
                # Its beginning was on disk only: what RAM has of the rest can never be matched again.
                state.remove_tip(victim, tip)
            if not victim.in_ram or not victim.tips:
                state.drop_conversation(victim)
            state.free_unheld_ram()
        freed = self.collect_dead()
        state.receipts.add(
            kind=ReceiptKind.EVICT,
            outcome="evicted",
            reason="disk_capacity",
            conversation=victim.id,
            tier="disk",
            tokens=tokens,
            bytes=freed,
        )
        return freed

    def _serves_without_disk(self, tip: Tip) -> bool:
        """Whether the chain is whole in RAM and in what others keep on disk."""
        ledger = self.state.ledger
        return all(
            ledger.ram[row] or (ledger.disk[row] == DiskState.PUBLISHED and ledger.disk_hold[row] > 0)
            for top in tip.rows
            for row in ledger.ancestors(top)
        )

    def collect_dead(self) -> int:
        """Give the space of entries nobody keeps back to the file system; returns the bytes."""
        state = self.state
        returned = 0
        while True:
            with state.lock:
                dead = state.take_unheld_disk(most=_ROWS_PER_HOLD)
                bad = list(state.bad_packs)
            for number, entries in dead.items():
                returned += self.drop_entries(number, entries)
            if not dead:
                break
        for number in bad:
            self._quarantine(number)
        return returned

    def drop_entries(self, number: int, entries: Sequence[int]) -> int:
        """Entries of a pack that no row points at any more: their space goes back to the file system (D6).

        They must have been added to the pack's ``dropping``.
        """
        pack = self.state.packs[number]
        nbytes = 0
        try:
            with self._io:
                nbytes = self.store.drop(pack.pack, sorted(entries))
        except (ParkadeError, OSError) as error:
            self.failed("drop", error)
        with self.state.lock:
            pack.dropping -= len(entries)
        self._settle(number)
        return nbytes

    def _quarantine(self, number: int) -> None:
        """A block of the pack was damaged: set its files aside; the ledger has let go of it already (D4)."""
        state = self.state
        with state.lock:
            pack = state.packs[number]
            if number not in state.bad_packs:
                return
            state.bad_packs.discard(number)
        self.mover.forget_pack(pack.pack)
        state.metrics.spill_corrupt_blocks.inc()
        try:
            with self._io:
                self.store.quarantine(pack.pack, "a block's checksum did not match")
        except (ParkadeError, OSError) as error:
            self.failed("quarantine", error)
        state.receipts.add(
            kind=ReceiptKind.DROP,
            outcome="quarantined",
            reason="damaged",
            conversation=pack.conversation,
            tier="disk",
            blocks=pack.poisoned,
            bytes=pack.poisoned * state.geometry.pod_slot_bytes,
        )
        with state.lock:
            pack.bad = False
        self._settle(number)

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
        for _ in range(_ROUNDS):
            if not self._join_writes(conversation, deadline) or self.state.clock.monotonic() >= deadline:
                return WriteOutcome.DEADLINE
            ticket = self.order_write(conversation, urgent=True)
            if ticket is WriteOutcome.ALREADY_ON_DISK and self._is_being_written(conversation):
                continue  # Somebody has ordered that write since it was looked: it is waited for as well.
            if isinstance(ticket, WriteOutcome):
                return WriteOutcome.WRITTEN if wrote and ticket is WriteOutcome.ALREADY_ON_DISK else ticket
            if not self._await(ticket, deadline):
                return WriteOutcome.DEADLINE
            if ticket.outcome is not WriteOutcome.WRITTEN:
                return ticket.outcome
            wrote = True
        return WriteOutcome.WRITTEN

    def _is_being_written(self, conversation: Conversation) -> bool:
        ledger = self.state.ledger
        with self.state.lock:
            return any(
                ledger.disk[row] == DiskState.WRITING for top in conversation.rows() for row in ledger.ancestors(top)
            )

    def _await(self, ticket: WriteTicket, deadline: float) -> bool:
        """Whether the write ended in time; one that did not is given up and never published (W3)."""
        if ticket.done.wait(max(0.0, deadline - self.state.clock.monotonic())):
            return True
        with self.state.lock:
            ticket.forgotten = ticket.job in self._tickets
        self.mover.cancel(ticket.job)
        return ticket.done.wait(CANCEL_WAIT_S) and ticket.outcome is WriteOutcome.WRITTEN

    def _join_writes(self, conversation: Conversation, deadline: float) -> bool:
        """Wait for writes under way that hold blocks of the conversation, its own and others': W7 writes none twice.

        False when the conversation's own did not end in time; they are given up then.
        """
        state = self.state
        ledger = state.ledger
        with state.lock:
            numbers = {
                ledger.pack[row]
                for top in conversation.rows()
                for row in ledger.ancestors(top)
                if ledger.disk[row] == DiskState.WRITING
            }
            tickets = [
                ticket
                for ticket in (*self._tickets.values(), *self._ending.values())
                if ticket.conversation is conversation or ticket.number in numbers
            ]
        in_time = True
        for ticket in tickets:
            if ticket.conversation is conversation:
                in_time &= self._await(ticket, deadline)
            else:
                ticket.done.wait(max(0.0, deadline - state.clock.monotonic()))
        return in_time

    def forget(self, conversation: Conversation, turns: Iterable[Turn]) -> list[WriteTicket]:
        """The conversation is deleted: no write or stream of it is ever published (case 69).

        Returns its writes that have not ended: until they have, a kill may leave a complete pack for the next start.
        """
        with self.state.lock:
            tickets = [ticket for ticket in self._tickets.values() if ticket.conversation is conversation]
            for ticket in tickets:
                ticket.forgotten = True
            ending = [ticket for ticket in self._ending.values() if ticket.conversation is conversation]
            streams = [turn.stream for turn in turns if turn.stream is not None and not turn.stream.failed]
        for ticket in tickets:
            self.mover.cancel(ticket.job)
        for stream in streams:
            self._refuse_stream(stream, "forgotten")
        return [*tickets, *ending]

    @property
    def backlog_bytes(self) -> int:
        """Bytes of the writes that are ordered and not over."""
        with self.state.lock:
            return sum(ticket.nbytes for ticket in (*self._tickets.values(), *self._ending.values()))

    def new_generation(self) -> None:
        """Nothing that is on disk is ever found again; what is under way can no longer be published (trap 14)."""
        with self._io:
            self.store.new_generation()
        self.mover.attach(str(self.store.identity_folder), self.store.fingerprint, direct=self.store.direct)
        with self.state.lock:
            numbers = list(self.state.pack_numbers.values())
        for number in numbers:
            self._settle(number)


def _error_label(error: object) -> str:
    """The metric's label for an error, which may have come from another process as text."""
    code = getattr(error, "errno", None)
    if code in _ERROR_LABELS:
        return _ERROR_LABELS[code]
    text = str(error)
    return next((label for number, label in _ERROR_LABELS.items() if os.strerror(number) in text), "failed")
