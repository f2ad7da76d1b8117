"""The gate at work: who gets RAM, who has to make room, one decision after the other.

Why it exists: the engine's step must find credit ready (trap 4), so a thread of the owner asks the gate ahead
of need, carries out what it says (release, write-out, eviction) and grants extents. Decisions are made one at
a time, so no reading is spent twice (G15).

What must stay true: nothing is let go of unwritten while a disk can take it (W1); a refusal costs nothing but
RAM: what is not parked is streamed (G14); every decision leaves a receipt (G11). Rules: G1-G15, W1-W5.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parkade_cache.conversations import Conversation
from parkade_cache.disk_tier import DiskTier
from parkade_cache.ids import ConversationId
from parkade_cache.memory.gate import (
    AwaitWrites,
    BackOff,
    Budget,
    Candidate,
    GateDecision,
    GateRequest,
    Margin,
    NeedKind,
    RefusalReason,
    Release,
    Victim,
    decide,
    victims_of,
)
from parkade_cache.memory.reading import MemorySampler, Reading
from parkade_cache.mover import ExtentsReleased, HeapReleased, JobId, Mover, Report
from parkade_cache.receipts import HeapRecord, ReceiptKind
from parkade_cache.spill import WriteOutcome
from parkade_cache.state import CacheState
from parkade_cache.turns import Turn

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""How long a decision waits for a mover to release memory before it reads again without its answer."""

HEAP_RELEASE_INTERVAL_S = 2.0
"""Heaps are asked at most this often by the same thread: a heap that was just trimmed has nothing to give."""

_LOST = frozenset(
    {
        WriteOutcome.DEADLINE,
        WriteOutcome.FAILED,
        WriteOutcome.REFUSED_BUDGET,
        WriteOutcome.REFUSED_FREE_SPACE,
        WriteOutcome.REFUSED_SIZE,
    }
)


@dataclass(slots=True)
class _Asked:
    """An order to the movers whose answers a decision waits for."""

    left: int
    reports: list[Report] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Tally:
    """What one decision has done, for its receipt."""

    evicted: list[ConversationId] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    skipped_busy: list[ConversationId] = field(default_factory=list)
    write_out_seconds: float = 0.0
    released_bytes: int = 0
    heaps: list[HeapRecord] = field(default_factory=list)
    deadline: float = 0.0


class Admission:
    """Grants extents to turns; implements the gate's host."""

    def __init__(
        self,
        state: CacheState,
        *,
        sampler: MemorySampler,
        mover: Mover,
        disk: DiskTier | None,
        stop: Callable[[], bool],
    ) -> None:
        self.state = state
        self.sampler = sampler
        self.mover = mover
        self.disk = disk
        self.last_reading: Reading | None = None
        self._stop = stop
        self._margin = Margin()
        self._back_off = BackOff()
        self._asked: dict[JobId, _Asked] = {}
        self._commits: dict[JobId, tuple[int, ...]] = {}
        self._tally = _Tally()
        self._asking: Conversation | None = None
        self._last_heap_release = float("-inf")

    # -- wishes --------------------------------------------------------------------------------------------

    def serve(self, turn: Turn) -> None:
        """Decide on RAM for what ``turn`` brings: restored, read anew and generated blocks."""
        state = self.state
        with state.lock:
            if turn.finished:
                return
            extents, new = self._extents_wanted(turn)
        try:
            if extents:
                self._admit(turn, extents, new=new)
            elif state.policy.memory.parked.max > 0:
                with state.lock:
                    state.enter_ram(turn.conversation)
        finally:
            with state.lock:
                turn.admission_pending = False
                turn.top_up_posted = False
                state.changed()

    def _extents_wanted(self, turn: Turn) -> tuple[int, bool]:
        """Extents beyond what the conversation has free, and whether it is new to RAM."""
        state = self.state
        ledger = state.ledger
        conversation = turn.conversation
        if self._too_short(turn):
            turn.ram_refused = "min_tokens"
            return 0, True
        missing = 0
        if turn.admission_pending:
            for chain in turn.keys():
                missing += sum(1 for key in chain if not self._in_ram(ledger.rows.get(key, -1)))
            missing += 1
        else:
            missing = 1
        missing -= state.slots.free_slots(conversation.id)
        if missing <= 0:
            return 0, not conversation.in_ram
        return -(-missing // state.geometry.slots_per_extent), not conversation.in_ram

    def _in_ram(self, row: int) -> bool:
        return row >= 0 and self.state.ledger.ram[row] != 0

    def _too_short(self, turn: Turn) -> bool:
        return turn.prompt_tokens < self.state.policy.memory.parked.min_tokens

    def _admit(self, turn: Turn, extents: int, *, new: bool) -> None:
        state = self.state
        policy = state.policy
        with state.lock:
            fresh = max(0, extents - state.slots.empty_extents)
            parked_need = extents * state.geometry.pod_extent_bytes
        kind = NeedKind.PARK
        need = self._margin.apply(kind, fresh * state.geometry.pod_extent_bytes)
        request = GateRequest(
            kind=kind,
            need_bytes=need,
            floor_bytes=policy.memory.floor,
            parked_need_bytes=self._parked_need(turn, parked_need),
            parked_conversations=1 if new else 0,
            new_conversation=new,
        )
        self._back_off.limits_are((policy.memory.floor, policy.memory.parked.max, self.sampler.limits_bytes()))
        if not self._back_off.should_ask(kind, new_conversation=new):
            self._refused(turn, RefusalReason.BACK_OFF.value)
            return
        self._asking = turn.conversation
        decision = self._decide(request)
        if decision.admitted:
            self._back_off.succeeded(kind)
            self._grant(turn, extents)
        else:
            if decision.reason != RefusalReason.PARKING_OFF.value:
                self._back_off.refused(kind)
            self._refused(turn, decision.reason)
        self._decision_receipt(turn, request, decision)

    def _parked_need(self, turn: Turn, parked_need: int) -> int:
        """A conversation larger than the whole budget is never parked in part (case 28)."""
        state = self.state
        with state.lock:
            own = sum(1 for chain in turn.keys() for key in chain)
        whole = -(-own // state.geometry.slots_per_extent) * state.geometry.pod_extent_bytes
        return max(parked_need, whole) if whole > state.policy.memory.parked.max else parked_need

    def _grant(self, turn: Turn, extents: int) -> None:
        state = self.state
        with state.lock:
            if turn.finished:
                return
            fresh = state.slots.grant(turn.conversation.id, extents)
            state.enter_ram(turn.conversation)
            turn.ram_refused = ""
            state.totals.parked_peak_bytes = max(state.totals.parked_peak_bytes, state.slots.held_bytes())
            if not fresh:
                return
            job = state.next_job()
            self._commits[job] = fresh
        self.mover.commit(job, fresh)

    def _refused(self, turn: Turn, reason: str) -> None:
        with self.state.lock:
            turn.ram_refused = reason

    def committed(self, job: JobId, *, done: bool) -> None:
        """All ranks have answered a commit."""
        with self.state.lock:
            extents = self._commits.pop(job, ())
            self.state.slots.committed(extents)
            if not done:
                _log.error("extents %s could not be committed; blocks that needed them are not captured", extents)

    # -- decisions -------------------------------------------------------------------------------------------

    def _decide(self, request: GateRequest) -> GateDecision:
        state = self.state
        spill = state.policy.spill
        seconds = float(spill.write_out_seconds) if spill is not None else 0.0
        self._tally = _Tally(deadline=state.clock.monotonic() + seconds)
        started = state.clock.monotonic()
        decision = decide(request, self)
        state.metrics.gate_decision_seconds.observe(state.clock.monotonic() - started)
        state.metrics.gate_decisions.labels(
            kind=request.kind.value, outcome="admit" if decision.admitted else "refuse", reason=decision.reason
        ).inc()
        return decision

    def read(self) -> tuple[Reading, int]:
        """A new reading, and what is admitted and not yet committed, in the only safe order (G15)."""
        with self.state.lock:
            reserved = self.state.slots.reserved_bytes()
        reading = self.sampler.sample()
        self.last_reading = reading
        if not reading.known:
            self.state.metrics.memory_unknown.inc()
        return reading, reserved

    def budget(self) -> Budget:
        """What is parked: extents held, less the empty ones that a grant would use first."""
        state = self.state
        with state.lock:
            held = state.slots.held_extents - state.slots.empty_extents
            return Budget(
                parked_bytes=held * state.geometry.pod_extent_bytes,
                parked_max_bytes=state.policy.memory.parked.max,
                conversations=state.parked_conversations(),
                max_conversations=state.policy.memory.parked.max_conversations,
            )

    def victims(self) -> Sequence[Victim]:
        """Those that may go, in order (G4, G6); the gate asks only when something must."""
        return victims_of(
            self._candidates(), extent_bytes=self.state.geometry.pod_extent_bytes, held_extents=self._held_extents()
        )

    def _held_extents(self) -> frozenset[int]:
        """Extents with blocks that a job reads or writes just now (G9)."""
        return frozenset()

    def _candidates(self) -> list[Candidate]:
        state = self.state
        now = state.clock.wall()
        found: list[Candidate] = []
        with state.lock:
            conversations = [c for c in state.conversations if c.in_ram]
        for conversation in conversations:
            with state.lock:
                found.append(
                    Candidate(
                        conversation=conversation.id,
                        extents=self._extents_of(conversation),
                        idle_seconds=max(0.0, now - conversation.last_used),
                        published=not conversation.dirty and not conversation.writing,
                        pinned=conversation.pinned,
                        busy=conversation.busy,
                        incoming=conversation is self._asking,
                    )
                )
        return found

    def _extents_of(self, conversation: Conversation) -> frozenset[int]:
        ledger, slots = self.state.ledger, self.state.slots
        return frozenset(
            slots.extent_of(ledger.slot[row])
            for top in conversation.rows()
            for row in ledger.ancestors(top)
            if ledger.ram[row]
        )

    def release(self, step: Release) -> int:
        """Give empty extents back, and on the first step of a decision the heaps too (G3)."""
        before = self._tally.released_bytes
        self.release_empty()
        if step.first:
            self._release_heaps()
        return self._tally.released_bytes - before

    def evict(self, conversation: ConversationId) -> bool:
        """Write the conversation out, then let its RAM go; False when it turned out to be busy (case 55)."""
        return self.let_go(conversation, reason="gate")

    def await_writes(self, step: AwaitWrites) -> None:
        """Writes hold extents of conversations only; those are waited for when the conversation goes."""
        del step

    def writes_in_flight_bytes(self) -> int:
        """No write holds memory beyond its conversation's: streams use a bounded buffer."""
        return 0

    # -- letting go ------------------------------------------------------------------------------------------

    def let_go(self, victim: ConversationId, *, reason: str) -> bool:
        """W1, W3: write out what is unpublished, then free what nobody else keeps; a loss is a decision."""
        state = self.state
        with state.lock:
            conversation = state.conversations.get(victim)
            if conversation is None or conversation.busy or conversation.pinned or not conversation.in_ram:
                self._tally.skipped_busy.append(victim)
                return False
        started = state.clock.monotonic()
        outcome = self._write_out(conversation)
        seconds = state.clock.monotonic() - started
        self._tally.write_out_seconds += seconds
        with state.lock:
            if conversation.busy:
                self._tally.skipped_busy.append(victim)
                return False
            lost = self._lost_blocks(conversation) if outcome is not WriteOutcome.WRITTEN else 0
            tokens = conversation.tokens
            state.leave_ram(conversation)
            freed = state.free_unheld_ram()
            state.slots.abandon(conversation.id)
            if not state.spill_on or not self._has_disk(conversation):
                state.drop_conversation(conversation)
                state.free_unheld_ram()
            state.changed()
        self._tally.evicted.append(victim)
        self._tally.outcomes[outcome.value] = self._tally.outcomes.get(outcome.value, 0) + 1
        self._let_go_receipt(conversation, outcome, reason, tokens, freed, lost, seconds)
        if self.disk is not None:
            self.disk.collect_dead()
        return True

    def _write_out(self, conversation: Conversation) -> WriteOutcome:
        if self.disk is None or not self.state.spill_healthy:
            return WriteOutcome.TIER_OFF
        return self.disk.write_out(conversation, deadline=self._tally.deadline)

    def _lost_blocks(self, conversation: Conversation) -> int:
        ledger = self.state.ledger
        gone: dict[int, int] = {}
        return sum(
            1
            for row in conversation.rows()
            for freed in ledger.ram_frees(row, gone)
            if ledger.disk[freed] == 0
        )

    def _has_disk(self, conversation: Conversation) -> bool:
        ledger = self.state.ledger
        return any(ledger.disk[row] for top in conversation.rows() for row in ledger.ancestors(top))

    def _let_go_receipt(
        self,
        conversation: Conversation,
        outcome: WriteOutcome,
        reason: str,
        tokens: int,
        freed: int,
        lost: int,
        seconds: float,
    ) -> None:
        state = self.state
        state.receipts.add(
            kind=ReceiptKind.EVICT,
            outcome=outcome.value,
            reason=reason,
            conversation=conversation.id,
            tier="ram",
            tokens=tokens,
            blocks=freed,
            bytes=freed * state.geometry.pod_slot_bytes,
            write_out_seconds=seconds,
        )
        if lost:
            state.totals.dropped_conversations += 1
            state.metrics.dropped_conversations.labels(reason=outcome.value).inc()
            state.receipts.add(
                kind=ReceiptKind.DROP,
                outcome="dropped",
                reason=outcome.value,
                conversation=conversation.id,
                tier="ram",
                tokens=tokens,
                blocks=lost,
                bytes=lost * state.geometry.pod_slot_bytes,
                dropped=1,
            )

    def release_empty(self, *, keep: int = 0, wait: bool = True) -> None:
        """Give empty extents back to the kernel; waits for the movers' answers unless told not to."""
        state = self.state
        with state.lock:
            extents = state.slots.take_empty(keep=keep)
            job = state.next_job()
        if not extents:
            return
        asked = self._ask(job)
        self.mover.release(job, extents)
        if wait and not asked.done.wait(ANSWER_TIMEOUT_S):
            _log.warning("a mover has not released extents within %.0f s", ANSWER_TIMEOUT_S)

    def _release_heaps(self) -> None:
        now = self.state.clock.monotonic()
        if now - self._last_heap_release < HEAP_RELEASE_INTERVAL_S:
            return
        with self.state.lock:
            job = self.state.next_job()
        asked = self._ask(job)
        self.mover.release_heap(job)
        asked.done.wait(ANSWER_TIMEOUT_S)
        self._last_heap_release = self.state.clock.monotonic()
        for report in asked.reports:
            if isinstance(report, HeapReleased):
                self._heap_released(report)

    def _heap_released(self, report: HeapReleased) -> None:
        metrics = self.state.metrics
        labels = {"process": report.process, "allocator": report.allocator}
        given_back = max(0, report.resident_before_bytes - report.resident_after_bytes)
        metrics.trim_seconds.labels(**labels).observe(report.seconds)
        metrics.trim_released_bytes.labels(**labels).inc(given_back)
        metrics.trim_resident_bytes.labels(process=report.process, when="before").set(report.resident_before_bytes)
        metrics.trim_resident_bytes.labels(process=report.process, when="after").set(report.resident_after_bytes)
        self._tally.released_bytes += given_back
        self._tally.heaps.append(
            HeapRecord(
                process=report.process,
                allocator=report.allocator,
                trim_seconds=report.seconds,
                resident_before_bytes=report.resident_before_bytes,
                resident_after_bytes=report.resident_after_bytes,
                heap_bytes_before=report.heap_bytes,
                heap_free_before_bytes=report.heap_free_bytes,
                returned=report.returned,
            )
        )

    def _ask(self, job: JobId) -> _Asked:
        asked = _Asked(left=self.state.geometry.ranks)
        with self.state.lock:
            self._asked[job] = asked
        return asked

    def answered(self, report: ExtentsReleased | HeapReleased) -> None:
        """A rank has released memory."""
        with self.state.lock:
            asked = self._asked.get(report.job)
            if asked is None:
                return
            asked.reports.append(report)
            asked.left -= 1
            over = asked.left == 0
            if over:
                del self._asked[report.job]
                if isinstance(report, ExtentsReleased):
                    self.state.slots.released(report.extents)
        if isinstance(report, ExtentsReleased):
            self.state.metrics.release_seconds.labels(what="extents").observe(report.seconds)
            self.state.metrics.released_bytes.labels(what="extents").inc(report.nbytes)
            self._tally.released_bytes += report.nbytes
            self._release_receipt(report)
        if over:
            asked.done.set()

    def _release_receipt(self, report: ExtentsReleased) -> None:
        state = self.state
        state.receipts.add(
            kind=ReceiptKind.RELEASE,
            outcome="released",
            reason="empty_extents",
            tier="ram",
            bytes=report.nbytes,
            released_bytes=report.nbytes,
            duration_seconds=report.seconds,
            still_parked_bytes=state.slots.held_bytes(),
            detail={
                "rank": report.rank,
                "extents": len(report.extents),
                "resident_before_bytes": report.resident_before_bytes,
                "resident_after_bytes": report.resident_after_bytes,
            },
        )

    def _decision_receipt(self, turn: Turn, request: GateRequest, decision: GateDecision) -> None:
        state = self.state
        tally = self._tally
        outcomes = tally.outcomes
        state.receipts.add(
            kind=ReceiptKind.ADMIT if decision.admitted else ReceiptKind.REFUSE,
            outcome="admitted" if decision.admitted else "refused",
            reason=decision.reason,
            conversation=turn.conversation.id,
            request=turn.request,
            tier="ram",
            bytes=request.parked_need_bytes,
            need_bytes=request.need_bytes,
            floor_bytes=request.floor_bytes,
            reading_before=decision.before,
            reading_after=decision.after,
            evicted=tuple(tally.evicted),
            released_bytes=tally.released_bytes,
            still_parked_bytes=state.slots.held_bytes(),
            heaps=tuple(tally.heaps),
            written_out=outcomes.get(WriteOutcome.WRITTEN.value, 0),
            already_on_disk=outcomes.get(WriteOutcome.ALREADY_ON_DISK.value, 0),
            dropped=sum(outcomes.get(outcome.value, 0) for outcome in _LOST),
            skipped_busy=tuple(tally.skipped_busy),
            write_out_seconds=tally.write_out_seconds,
        )
