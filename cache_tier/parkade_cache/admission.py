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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from parkade_cache.conversations import Conversation, Tip
from parkade_cache.disk_tier import DiskTier
from parkade_cache.heaps import PodHeaps
from parkade_cache.ids import ConversationId
from parkade_cache.ledger import DiskState
from parkade_cache.memory.gate import (
    NOTHING_DONE,
    AwaitWrites,
    BackOff,
    Budget,
    Candidate,
    Capture,
    CaptureStep,
    Drop,
    Evict,
    GateDecision,
    GateProgress,
    GateRequest,
    HandToDisk,
    Margin,
    NeedKind,
    RefusalReason,
    Release,
    Victim,
    decide,
    plan_after_capture,
    victims_of,
)
from parkade_cache.memory.pressure import PressureLevel, PressureScope
from parkade_cache.memory.reading import MemorySampler, Reading
from parkade_cache.memory.watch import Strain, relief_band_bytes
from parkade_cache.mover import ExtentsCommitted, ExtentsReleased, HeapReleased, JobId, JobOutcome, Mover
from parkade_cache.policy import MemoryPolicy, PolicyChange
from parkade_cache.receipts import GivenBack, HeapRecord, ReceiptKind
from parkade_cache.spill import WriteOutcome
from parkade_cache.state import CacheState
from parkade_cache.turns import Turn

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""How long a decision waits for a mover to release memory before it reads again without its answer."""

IDLE_HEAP_INTERVAL_S = 30.0
"""Heaps are released at most this often while nothing is short; the gate itself asks whenever it is short (G3)."""

CRITICAL_WRITE_OUT_S = 5.0
"""Deadline of the write-outs of one relief at critical pressure (case 60)."""

_WARNING_SHARE = 0.25
"""What one relief at warning level lets go of at most, as a share of what is parked: the next one looks again."""

_STALL_SHARE = 0.125
"""What relief frees for stalls alone, where the reading shows nothing missing, as a share of what is parked."""

_SAFE = frozenset({WriteOutcome.WRITTEN, WriteOutcome.ALREADY_ON_DISK})


@dataclass(slots=True)
class _Asked:
    """An order to the movers whose answers a decision waits for."""

    left: int
    reports: list[ExtentsReleased | HeapReleased] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Granted:
    """Extents of one grant that the movers are committing, and what the gate had reckoned they take."""

    turn: Turn
    extents: tuple[int, ...]
    estimate_bytes: int


@dataclass(slots=True)
class _Tally:
    """What one decision has done, for its receipt."""

    evicted: list[ConversationId] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    skipped_busy: list[ConversationId] = field(default_factory=list)
    dropped: int = 0
    write_out_seconds: float = 0.0
    released_bytes: int = 0
    heaps: list[HeapRecord] = field(default_factory=list)
    own_written_out: int = 0
    started: float = 0.0
    deadline: float = 0.0

    def count(self, outcome: WriteOutcome) -> None:
        """One conversation went with this outcome."""
        self.outcomes[outcome.value] = self.outcomes.get(outcome.value, 0) + 1


@dataclass(frozen=True, slots=True)
class _LetGo:
    """One conversation that left RAM, for its receipts."""

    conversation: ConversationId
    reason: str
    outcome: WriteOutcome
    tokens: int
    freed_blocks: int
    lost_blocks: int
    seconds: float


class Admission:
    """Grants extents to turns; implements the gate's host."""

    def __init__(
        self,
        state: CacheState,
        *,
        sampler: MemorySampler,
        mover: Mover,
        disk: DiskTier | None,
        heaps: PodHeaps | None = None,
    ) -> None:
        self.state = state
        self.sampler = sampler
        self.mover = mover
        self.disk = disk
        self._margin = Margin()
        self._back_off = BackOff()
        self._asked: dict[JobId, _Asked] = {}
        self._commits: dict[JobId, _Granted] = {}
        self._tally = _Tally()
        self._asking: Turn | None = None
        self._victims: Sequence[Victim] | None = None
        self._heaps = heaps
        self._last_heap_release = float("-inf")
        self._ending = False
        self._candidate_cap: int | None = None
        self._may_lose = True
        self._keep_empty = 0
        self._cheapest_first = False
        self._most_bytes: int | None = None
        self.refused_under_pressure = False
        """The last relief could not restore the floor (case 61)."""

    # -- wishes --------------------------------------------------------------------------------------------

    def serve(self, turn: Turn) -> None:
        """Decide on RAM for what ``turn`` brings: restored, read anew and generated blocks."""
        state = self.state
        try:
            with state.lock:
                if turn.finished or turn.conversation.forgotten:
                    return
                too_short = turn.prompt_tokens < state.policy.memory.parked.min_tokens
                if too_short:
                    turn.ram_refused = "min_tokens"
                extents = 0 if too_short else self._extents_wanted(turn)
                if not extents and not too_short:
                    state.enter_ram(turn.conversation)
            if extents:
                self._admit(turn, extents)
        finally:
            with state.lock:
                turn.admission_pending = False
                turn.top_up_posted = False
                state.changed()

    def _extents_wanted(self, turn: Turn) -> int:
        """Extents beyond what the conversation has free."""
        state = self.state
        rows, ram = state.ledger.rows, state.ledger.ram
        missing = 1
        if turn.admission_pending:
            for chain in turn.chains():
                for key in chain:
                    row = rows.get(key, -1)
                    missing += row < 0 or not ram[row]
        missing -= state.slots.free_slots(turn.conversation.id)
        return max(0, -(-missing // state.geometry.slots_per_extent))

    def _admit(self, turn: Turn, extents: int) -> None:
        request, fresh, is_new = self._request(turn, extents)
        memory = self.state.policy.memory
        limits_bytes = self.sampler.limits_bytes()
        if limits_bytes is not None:
            self._back_off.limits_are((memory.floor, memory.parked.max, limits_bytes))
        if not self._back_off.should_ask(request.kind, new_conversation=is_new):
            self._refused(turn, RefusalReason.BACK_OFF.value)
            self._back_off_receipt(turn, request)
            return
        self._asking = turn
        self._keep_empty = extents - fresh
        try:
            decision = self._decide(request)
        finally:
            self._asking = None
            self._keep_empty = 0
        if decision.admitted:
            self._back_off.succeeded(request.kind)
            self._grant(turn, extents, request.need_bytes)
        else:
            self._back_off.refused(request.kind)
            self._refused(turn, decision.reason)
        self._decision_receipt(turn, request, decision)

    def _request(self, turn: Turn, extents: int) -> tuple[GateRequest, int, bool]:
        """What the gate is asked, how many extents of it are not committed yet, and whether the conversation is seen
        for the first time (G12).
        """
        state = self.state
        memory = state.policy.memory
        with state.lock:
            fresh = max(0, extents - state.slots.empty_extents)
            parked_need = self._parked_need(turn, extents * state.geometry.pod_extent_bytes)
            parked = turn.conversation.in_ram
            is_new = not parked and turn.conversation.turns == 0
        request = GateRequest(
            kind=NeedKind.PARK,
            need_bytes=self._margin.apply(NeedKind.PARK, fresh * state.geometry.pod_extent_bytes),
            floor_bytes=memory.floor,
            parked_need_bytes=parked_need,
            parked_conversations=0 if parked else 1,
            new_conversation=is_new,
        )
        return request, fresh, is_new

    def _parked_need(self, turn: Turn, parked_need: int) -> int:
        """A conversation larger than the whole budget is never parked in part (case 28)."""
        geometry = self.state.geometry
        own = sum(len(chain) for chain in turn.chains())
        whole = -(-own // geometry.slots_per_extent) * geometry.pod_extent_bytes
        return max(parked_need, whole) if whole > self.state.policy.memory.parked.max else parked_need

    def _grant(self, turn: Turn, extents: int, estimate_bytes: int) -> None:
        state = self.state
        with state.lock:
            if turn.finished or turn.conversation.forgotten:
                return
            fresh = state.slots.grant(turn.conversation.id, extents)
            state.enter_ram(turn.conversation)
            turn.ram_refused = ""
            state.totals.parked_peak_bytes = max(state.totals.parked_peak_bytes, state.slots.held_bytes())
            if not fresh:
                return
            job = state.next_job()
            self._commits[job] = _Granted(turn, fresh, estimate_bytes)
        self.mover.commit(job, fresh)

    def _refused(self, turn: Turn, reason: str) -> None:
        with self.state.lock:
            turn.ram_refused = reason

    def committed(self, reports: Sequence[ExtentsCommitted]) -> None:
        """All ranks have answered a commit; extents that are not there on every rank are taken back."""
        state = self.state
        done = all(report.outcome is JobOutcome.DONE for report in reports)
        with state.lock:
            granted = self._commits.pop(reports[0].job, None)
            if granted is None:
                return
            if done:
                state.slots.committed(granted.extents)
                leaving: tuple[int, ...] = ()
            else:
                granted.turn.ram_refused = "commit_failed"
                leaving = state.slots.uncommitted(granted.extents)
            job = state.next_job()
        actual_bytes = sum(report.nbytes for report in reports if report.outcome is JobOutcome.DONE)
        if done:
            self._margin.observe(NeedKind.PARK, estimate_bytes=granted.estimate_bytes, actual_bytes=actual_bytes)
        else:
            _log.error("extents could not be committed: %s", next(r.reason for r in reports if r.reason))
            if leaving:
                # Another rank may have committed them.
                self._ask(job)
                self.mover.release(job, leaving)
        self._park_receipt(granted, reports, actual_bytes, done=done)

    def _park_receipt(
        self, granted: _Granted, reports: Sequence[ExtentsCommitted], actual_bytes: int, *, done: bool
    ) -> None:
        self.state.receipts.add(
            kind=ReceiptKind.PARK,
            outcome="committed" if done else "commit_failed",
            reason=next((report.reason for report in reports if report.reason), ""),
            conversation=granted.turn.conversation.id,
            request=granted.turn.request,
            tier="ram",
            bytes=actual_bytes,
            estimate_bytes=granted.estimate_bytes,
            actual_bytes=actual_bytes,
            duration_seconds=max(report.seconds for report in reports),
            still_parked_bytes=self.state.slots.held_bytes(),
        )

    # -- after a capture -------------------------------------------------------------------------------------

    def after_capture(self, turn: Turn) -> None:
        """G10: a turn's blocks are in RAM; see that floor and budget still hold, and make them hold."""
        state = self.state
        with state.lock:
            conversation = turn.conversation
            if not conversation.in_ram:
                return
            fresh = Capture(
                conversation=conversation.id,
                parked_bytes=len(self._extents_of(conversation)) * state.geometry.pod_extent_bytes,
                floor_bytes=state.policy.memory.floor,
                disk_takes_it=state.spill_healthy,
            )
        self._begin_tally()
        progress = replace(NOTHING_DONE, writes_in_flight_bytes=self.writes_in_flight_bytes())
        before: Reading | None = None
        while True:
            reading, reserved_bytes = self.read()
            before = before or reading
            step = plan_after_capture(
                fresh,
                reading=reading,
                reserved_bytes=reserved_bytes,
                budget=self.budget(),
                others=self.victims,
                progress=progress,
            )
            following = self._carry_out(step, progress)
            if following is None:
                break
            progress = following
        if progress != NOTHING_DONE and (progress.releases or progress.evicted or progress.fresh_gone):
            self._capture_receipt(turn, step, before, reading)

    def _carry_out(self, step: CaptureStep, progress: GateProgress) -> GateProgress | None:
        """The progress after a step of ``after_capture``; None when it was the last."""
        match step:
            case Release():
                self.release(step)
            case AwaitWrites():
                self.await_writes(step)
            case Evict(conversation):
                if not self.evict(conversation):
                    return progress.passing_over(step)
            case HandToDisk(conversation, reason) | Drop(conversation, reason):
                # A conversation that is in use again stays; its next capture asks again.
                self.let_go(conversation, reason=reason.value)
            case _:
                return None
        return progress.after(step, writes_in_flight_bytes=self.writes_in_flight_bytes())

    def _capture_receipt(self, turn: Turn, step: CaptureStep, before: Reading, after: Reading) -> None:
        tally = self._tally
        self.state.receipts.add(
            kind=ReceiptKind.PARK,
            outcome="kept" if turn.conversation.in_ram else "handed_to_disk",
            reason=step.reason.value if hasattr(step, "reason") else "",
            conversation=turn.conversation.id,
            request=turn.request,
            tier="ram",
            floor_bytes=self.state.policy.memory.floor,
            reading_before=before,
            reading_after=after,
            evicted=tuple(tally.evicted),
            released_bytes=tally.released_bytes,
            still_parked_bytes=self.state.slots.held_bytes(),
            heaps=tuple(tally.heaps),
            dropped=tally.dropped,
            skipped_busy=tuple(tally.skipped_busy),
            write_out_seconds=tally.write_out_seconds,
        )

    # -- a changed policy ------------------------------------------------------------------------------------

    def policy_changed(self, change: PolicyChange) -> GateDecision:
        """A new limit, floor or budget is in force: make it hold at once, as far as that is possible (case 67)."""
        old, new = change.old.memory, change.new.memory
        started = self.state.clock.monotonic()
        request = GateRequest(kind=NeedKind.PRESSURE, need_bytes=0, floor_bytes=new.floor)
        decision = self._give_back(request)
        self.release_empty()
        self.state.receipts.add(
            kind=ReceiptKind.POLICY,
            outcome="applied" if decision.admitted else "applied_in_part",
            reason=decision.reason,
            duration_seconds=self.state.clock.monotonic() - started,
            **self._given_back(decision),
            detail={"old": _limits_of(old), "new": _limits_of(new)},
        )
        return decision

    def make_room_for(self, limit_bytes: int, policy: MemoryPolicy) -> GateDecision:
        """Case 66: a lowered limit, before it is in force; all of it, or a refusal that lets go of nothing in vain."""
        started = self.state.clock.monotonic()
        request = GateRequest(kind=NeedKind.RESIZE, need_bytes=policy.headroom, floor_bytes=policy.floor)
        self._candidate_cap = limit_bytes
        # The limit is not in force yet: refusing it costs nothing, losing a conversation for it would.
        self._may_lose = False
        try:
            decision = self._give_back(request)
        finally:
            self._candidate_cap = None
            self._may_lose = True
        outcome = "confirmed" if decision.admitted else "refused"
        self.state.metrics.resize.labels(outcome=outcome).inc()
        self.state.receipts.add(
            kind=ReceiptKind.RESIZE,
            outcome=outcome,
            reason=decision.reason,
            duration_seconds=self.state.clock.monotonic() - started,
            **self._given_back(decision),
            detail={"limit": limit_bytes},
        )
        return decision

    def relieve(self, strain: Strain) -> GateDecision | None:
        """Give back what pressure asks for, the cheapest memory first: heaps, published, then unwritten ones.

        None where nothing was decided: stalls that may be a neighbour's cost nobody a conversation.
        """
        started = self.state.clock.monotonic()
        reason = "limit_changed" if strain.limits_changed else strain.level.value
        if strain.level is PressureLevel.NONE and self.over_budget():
            reason = "budget"
        floor_bytes = self.state.policy.memory.floor
        if strain.stalls_of_neighbours and not strain.limits_changed and not self.over_budget():
            self.release_heaps("stalls_elsewhere")
            return None
        request = GateRequest(
            kind=NeedKind.PRESSURE, need_bytes=self._relief_bytes(strain, floor_bytes), floor_bytes=floor_bytes
        )
        decision = self._give_back(request, level=strain.level)
        self.refused_under_pressure = not decision.admitted and strain.level is PressureLevel.CRITICAL
        self.state.metrics.relief.labels(reason=reason, outcome="held" if decision.admitted else "short").inc()
        if decision.progress == NOTHING_DONE and decision.admitted:
            return decision
        self.state.receipts.add(
            kind=ReceiptKind.RELEASE,
            outcome="relieved" if decision.admitted else "short",
            reason=reason,
            duration_seconds=self.state.clock.monotonic() - started,
            **self._given_back(decision),
            detail={"level": strain.level.value, "refusal": decision.reason},
        )
        return decision

    def _relief_bytes(self, strain: Strain, floor_bytes: int) -> int:
        """What must become available above the floor: a little more than it, or a step where only stalls say so."""
        if strain.level is PressureLevel.NONE:
            return 0
        band_bytes = relief_band_bytes(floor_bytes)
        available_bytes = self.sampler.sample().available_bytes
        if strain.short or strain.stalls is not PressureScope.GROUP or available_bytes is None:
            return band_bytes
        return max(band_bytes, available_bytes - floor_bytes + int(self.state.slots.held_bytes() * _STALL_SHARE))

    def _give_back(self, request: GateRequest, *, level: PressureLevel = PressureLevel.NONE) -> GateDecision:
        """One decision that adds nothing and lets go of what it must."""
        self._cheapest_first = True
        if level is PressureLevel.WARNING:
            self._most_bytes = int(self.state.slots.held_bytes() * _WARNING_SHARE)
        try:
            return self._decide(request, within_s=CRITICAL_WRITE_OUT_S if level is PressureLevel.CRITICAL else None)
        finally:
            self._cheapest_first = False
            self._most_bytes = None

    def _given_back(self, decision: GateDecision) -> GivenBack:
        """What the receipts of limits, floors and pressure have in common."""
        tally = self._tally
        return GivenBack(
            tier="ram",
            need_bytes=decision.request.need_bytes,
            floor_bytes=decision.request.floor_bytes,
            reading_before=decision.before,
            reading_after=decision.after,
            evicted=tuple(tally.evicted),
            released_bytes=tally.released_bytes,
            still_parked_bytes=self.state.slots.held_bytes(),
            heaps=tuple(tally.heaps),
            written_out=tally.outcomes.get(WriteOutcome.WRITTEN.value, 0),
            already_on_disk=tally.outcomes.get(WriteOutcome.ALREADY_ON_DISK.value, 0),
            dropped=tally.dropped,
            skipped_busy=tuple(tally.skipped_busy),
            write_out_seconds=tally.write_out_seconds,
        )

    # -- decisions -------------------------------------------------------------------------------------------

    def _begin_tally(self, within_s: float | None = None) -> None:
        spill = self.state.policy.spill
        seconds = float(spill.write_out_seconds) if spill is not None else 0.0
        seconds = seconds if within_s is None else min(seconds, within_s)
        self._tally = _Tally(started=self.state.clock.monotonic(), deadline=self.state.clock.monotonic() + seconds)
        self._victims = None

    def _decide(self, request: GateRequest, *, within_s: float | None = None) -> GateDecision:
        state = self.state
        self._begin_tally(within_s)
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
        cap_bytes = self._candidate_cap
        reading = self.sampler.sample() if cap_bytes is None else self.sampler.sample_under(cap_bytes)
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

    def over_budget(self) -> bool:
        """Whether more is parked than may be, as when what was in use outlived a lowered budget."""
        budget = self.budget()
        too_many = 0 < budget.max_conversations < budget.conversations
        return budget.parked_bytes > budget.parked_max_bytes or too_many

    def victims(self) -> Sequence[Victim]:
        """Those that may go, in order (G4, G6): worked out once a decision, and anew when one was passed over."""
        if self._victims is None:
            found = victims_of(
                self._candidates(),
                extent_bytes=self.state.geometry.pod_extent_bytes,
                held_extents=self._held_extents(),
                cheapest_first=self._cheapest_first,
            )
            self._victims = found if self._most_bytes is None else _first_bytes(found, self._most_bytes)
        return self._victims

    def _held_extents(self) -> frozenset[int]:
        """Extents that eviction cannot empty: a job uses their blocks (G9), or the request needs them (G4)."""
        state = self.state
        with state.lock:
            held = self._extents_of_rows(state.ledger.unheld_in_ram())
            if self._asking is None:
                return held
            tops = (*self._asking.arrival, *self._asking.tips.values())
            return held | self._extents_of_chains(tops)

    def _candidates(self) -> list[Candidate]:
        state = self.state
        now = state.clock.wall()
        asking = self._asking.conversation if self._asking is not None else None
        found: list[Candidate] = []
        with state.lock:
            conversations = list(state.parked.values())
        for conversation in conversations:
            # The lock is let go in between: a step hook waits for one conversation's chain at most.
            with state.lock:
                spare = self._spare_chains(conversation)
                if spare:
                    found.append(self._candidate(conversation, spare, now))
                kept = [tip for tip in conversation.tips if tip not in spare] if spare else conversation.tips
                found.append(
                    replace(
                        self._candidate(conversation, kept, now),
                        pinned=conversation.pinned,
                        busy=conversation.busy,
                        incoming=conversation is asking or self._is_extended(conversation),
                    )
                )
        return found

    def _candidate(self, conversation: Conversation, tips: Iterable[Tip], now: float) -> Candidate:
        return Candidate(
            conversation=conversation.id,
            extents=self._extents_of_chains(row for tip in tips for row in tip.rows),
            idle_seconds=max(0.0, now - conversation.last_used),
            published=not conversation.dirty and not conversation.writing,
        )

    def _spare_chains(self, conversation: Conversation) -> list[Tip]:
        """Chains of the asker's own conversation that its request neither extends nor restores from (W5).

        None while another request of it is in flight, and never all: what the conversation was last at stays.
        """
        asking = self._asking
        if asking is None or conversation is not asking.conversation or conversation.in_flight != 1:
            return []
        if conversation.pinned or not conversation.in_ram or not conversation.tips:
            return []
        used = {*asking.arrival, *asking.tips.values()}
        descends = self.state.ledger.descends
        spare = [
            tip
            for tip in conversation.tips
            if not any(descends(row, top) or descends(top, row) for row in tip.rows for top in used)
        ]
        if len(spare) == len(conversation.tips):
            # A request that has nothing to do with any of them, such as a title call: the newest state stays (W6).
            spare.remove(max(spare, key=lambda tip: tip.last_used))
        return [tip for tip in spare if tip.in_ram]

    def _is_extended(self, conversation: Conversation) -> bool:
        """Whether the request's prompt extends one of the conversation's chains (case 58)."""
        if self._asking is None:
            return False
        descends = self.state.ledger.descends
        return any(descends(top, row) for top in self._asking.arrival for row in conversation.rows())

    def _extents_of(self, conversation: Conversation) -> frozenset[int]:
        return self._extents_of_chains(conversation.rows())

    def _extents_of_chains(self, tops: Iterable[int]) -> frozenset[int]:
        ledger = self.state.ledger
        return self._extents_of_rows(row for top in tops for row in ledger.ancestors(top) if ledger.ram[row])

    def _extents_of_rows(self, rows: Iterable[int]) -> frozenset[int]:
        slot, per = self.state.ledger.slot, self.state.geometry.slots_per_extent
        return frozenset(slot[row] // per for row in rows)

    def release(self, step: Release) -> int:
        """Give empty extents back, and on the first step of a decision the heaps too (G3)."""
        before = self._tally.released_bytes
        # Empty extents that the asker is going to use are no memory to give back: its need has left them out (G15).
        self.release_empty(keep=self._keep_empty)
        if step.first:
            self._ask_heaps()
        return self._tally.released_bytes - before

    def evict(self, conversation: ConversationId) -> bool:
        """Write the conversation out, then let its RAM go; False when it turned out to be busy (case 55)."""
        asking = self._asking
        if asking is not None and asking.conversation.id == conversation:
            went = self._let_spare_chains_go(asking.conversation)
        else:
            went = self.let_go(conversation, reason="pressure" if self._cheapest_first else "gate")
        if went:
            if self._most_bytes is not None:
                self._most_bytes -= sum(v.freeable_bytes for v in self._victims or () if v.conversation == conversation)
            return True
        self._victims = None
        return False

    def await_writes(self, step: AwaitWrites) -> None:
        """Wait, bounded, for writes and restores that still use memory of conversations let go (G9)."""
        del step
        state = self.state
        deadline = min(self._tally.deadline, state.clock.monotonic() + ANSWER_TIMEOUT_S)
        with state.lock:
            while state.ledger.unheld_in_ram() and state.clock.monotonic() < deadline:
                state.wake.wait(max(0.001, deadline - state.clock.monotonic()))
                state.free_unheld_ram()

    def writes_in_flight_bytes(self) -> int:
        """Memory of conversations that were let go and that a write or restore still uses (G9)."""
        state = self.state
        with state.lock:
            state.free_unheld_ram()
            return len(state.ledger.unheld_in_ram()) * state.geometry.pod_slot_bytes

    # -- letting go ------------------------------------------------------------------------------------------

    def let_go(self, victim: ConversationId, *, reason: str) -> bool:
        """W1, W3: write out what is unpublished, then free what nobody else keeps; a loss is a decision.

        False when the conversation turned out to be in use, before or after its write-out (W5, case 55).
        """
        state = self.state
        with state.lock:
            conversation = state.conversations.get(victim)
            if conversation is None or not self._may_go(conversation):
                self._tally.skipped_busy.append(victim)
                return False
        started = state.clock.monotonic()
        outcome = self._write_out(conversation)
        seconds = state.clock.monotonic() - started
        self._tally.write_out_seconds += seconds
        with state.lock:
            lost = self._lost_blocks(conversation.rows())
            # Blocks that are unwritten after a complete write-out came with a turn that began and ended meanwhile.
            used_meanwhile = lost > 0 and (outcome in _SAFE or not self._may_lose)
            if state.conversations.get(victim) is not conversation or used_meanwhile or not self._may_go(conversation):
                self._tally.skipped_busy.append(victim)
                return False
            gone = self._leave(conversation, outcome, reason, lost, seconds)
        self._tally.evicted.append(victim)
        self._tally.count(outcome)
        self._let_go_receipts(gone)
        if self.disk is not None:
            self.disk.collect_dead()
        return True

    def _let_spare_chains_go(self, conversation: Conversation) -> bool:
        """W5: the asker's own chains that its request has no use for leave RAM, after their write-out."""
        state = self.state
        started = state.clock.monotonic()
        outcome = self._write_out(conversation)
        seconds = state.clock.monotonic() - started
        self._tally.write_out_seconds += seconds
        with state.lock:
            spare = self._spare_chains(conversation)
            lost = self._lost_blocks(row for tip in spare for row in tip.rows)
            if not spare or lost:
                self._tally.skipped_busy.append(conversation.id)
                return False
            tokens = max(tip.tokens for tip in spare)
            for tip in spare:
                state.leave_ram_alone(conversation, tip)
            freed = state.free_unheld_ram()
            state.changed()
        self._tally.count(outcome)
        self._tally.own_written_out += outcome in _SAFE
        self._let_go_receipts(_LetGo(conversation.id, "own_conversation", outcome, tokens, freed, lost, seconds))
        return True

    def _may_go(self, conversation: Conversation) -> bool:
        return conversation.in_ram and not conversation.busy and not conversation.pinned

    def _leave(
        self, conversation: Conversation, outcome: WriteOutcome, reason: str, lost: int, seconds: float
    ) -> _LetGo:
        state = self.state
        tokens = conversation.tokens
        state.leave_ram(conversation)
        state.conversations.mark_clean(conversation)
        freed = state.free_unheld_ram()
        state.slots.abandon(conversation.id)
        if not self._has_disk(conversation):
            state.drop_conversation(conversation)
        state.changed()
        return _LetGo(conversation.id, reason, outcome, tokens, freed, lost, seconds)

    def _write_out(self, conversation: Conversation) -> WriteOutcome:
        if self.disk is None or not self.state.spill_healthy:
            return WriteOutcome.TIER_OFF
        return self.disk.write_out(conversation, deadline=self._tally.deadline)

    def _lost_blocks(self, tops: Iterable[int]) -> int:
        """Blocks that would be nowhere any more once the chains ending at ``tops`` have left RAM."""
        ledger = self.state.ledger
        gone: dict[int, int] = {}
        keeps = self.state.keeps_on_disk
        return sum(
            1
            for row in tops
            for freed in ledger.ram_frees(row, gone)
            if ledger.disk[freed] != DiskState.PUBLISHED and keeps(freed)
        )

    def _has_disk(self, conversation: Conversation) -> bool:
        ledger = self.state.ledger
        return any(
            ledger.disk[row] == DiskState.PUBLISHED for top in conversation.rows() for row in ledger.ancestors(top)
        )

    def _let_go_receipts(self, gone: _LetGo) -> None:
        state = self.state
        state.receipts.add(
            kind=ReceiptKind.EVICT,
            outcome=gone.outcome.value,
            reason=gone.reason,
            conversation=gone.conversation,
            tier="ram",
            tokens=gone.tokens,
            blocks=gone.freed_blocks,
            bytes=gone.freed_blocks * state.geometry.pod_slot_bytes,
            write_out_seconds=gone.seconds,
        )
        if gone.lost_blocks:
            self._tally.dropped += 1
            state.add_drop_receipt(gone.conversation, gone.outcome.value, gone.lost_blocks, tier="ram")

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
        if not wait:
            return
        if not asked.done.wait(ANSWER_TIMEOUT_S):
            _log.warning("a mover has not released extents within %.0f s", ANSWER_TIMEOUT_S)
        self._tally.released_bytes += sum(r.nbytes for r in list(asked.reports) if isinstance(r, ExtentsReleased))

    def heaps_rested(self) -> bool:
        """Whether a release of the heaps that nothing asks for is due (rate limit; the gate is not bound by it)."""
        return self.state.clock.monotonic() - self._last_heap_release >= IDLE_HEAP_INTERVAL_S

    def release_heaps(self, reason: str, *, limited: bool = True) -> Sequence[HeapRecord]:
        """Release the heaps off the request path, where it is not too soon; its receipt says what came of it."""
        if limited and not self.heaps_rested():
            return ()
        self._begin_tally()
        started = self.state.clock.monotonic()
        self._ask_heaps()
        self.state.receipts.add(
            kind=ReceiptKind.RELEASE,
            outcome="released",
            reason=reason,
            released_bytes=self._tally.released_bytes,
            duration_seconds=self.state.clock.monotonic() - started,
            heaps=tuple(self._tally.heaps),
        )
        return tuple(self._tally.heaps)

    def _ask_heaps(self) -> None:
        """Ask every process of the pod, and wait until each has answered or timed out (G3)."""
        started = self.state.clock.monotonic()
        with self.state.lock:
            job = self.state.next_job()
        asked = self._ask(job)
        self.mover.release_heap(job)
        records = list(self._heaps.release(ANSWER_TIMEOUT_S)) if self._heaps is not None else []
        asked.done.wait(ANSWER_TIMEOUT_S)
        self._last_heap_release = self.state.clock.monotonic()
        records += [_heap_record(report) for report in asked.reports if isinstance(report, HeapReleased)]
        for record in records:
            self._heap_released(record)
        self.state.metrics.release_seconds.labels(what="heaps").observe(self._last_heap_release - started)

    def _heap_released(self, record: HeapRecord) -> None:
        metrics = self.state.metrics
        labels = {"process": record.process, "allocator": record.allocator}
        given_back = max(0, record.resident_before_bytes - record.resident_after_bytes)
        metrics.trim_seconds.labels(**labels).observe(record.trim_seconds)
        metrics.trim_released_bytes.labels(**labels).inc(given_back)
        metrics.released_bytes.labels(what="heaps").inc(given_back)
        metrics.trim_resident_bytes.labels(process=record.process, when="before").set(record.resident_before_bytes)
        metrics.trim_resident_bytes.labels(process=record.process, when="after").set(record.resident_after_bytes)
        if record.heap_bytes_before is not None and record.heap_free_before_bytes is not None:
            used_bytes = max(0, record.heap_bytes_before - record.heap_free_before_bytes)
            metrics.heap_bytes.labels(process=record.process, state="in_use").set(used_bytes)
            metrics.heap_bytes.labels(process=record.process, state="free").set(record.heap_free_before_bytes)
        self._tally.released_bytes += given_back
        self._tally.heaps.append(record)

    def _ask(self, job: JobId) -> _Asked:
        asked = _Asked(left=self.state.geometry.ranks)
        with self.state.lock:
            self._asked[job] = asked
            if self._ending:
                asked.done.set()
        return asked

    def stop_waiting(self) -> None:
        """The owner ends: nobody hears the movers' answers any more, so nobody waits for them."""
        with self.state.lock:
            self._ending = True
            for asked in self._asked.values():
                asked.done.set()

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

    def _back_off_receipt(self, turn: Turn, request: GateRequest) -> None:
        self.state.receipts.add(
            kind=ReceiptKind.REFUSE,
            outcome="refused",
            reason=RefusalReason.BACK_OFF.value,
            conversation=turn.conversation.id,
            request=turn.request,
            tier="ram",
            bytes=request.parked_need_bytes,
            need_bytes=request.need_bytes,
            floor_bytes=request.floor_bytes,
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
            estimate_bytes=request.need_bytes,
            reading_before=decision.before,
            reading_after=decision.after,
            evicted=tuple(tally.evicted),
            released_bytes=tally.released_bytes,
            still_parked_bytes=state.slots.held_bytes(),
            heaps=tuple(tally.heaps),
            written_out=outcomes.get(WriteOutcome.WRITTEN.value, 0),
            own_conversation_written_out=tally.own_written_out,
            already_on_disk=outcomes.get(WriteOutcome.ALREADY_ON_DISK.value, 0),
            dropped=tally.dropped,
            skipped_busy=tuple(tally.skipped_busy),
            write_out_seconds=tally.write_out_seconds,
            duration_seconds=self.state.clock.monotonic() - tally.started,
        )


def _first_bytes(victims: Sequence[Victim], nbytes: int) -> tuple[Victim, ...]:
    """The first victims that together free ``nbytes``."""
    freed = 0
    for count, victim in enumerate(victims, start=1):
        freed += victim.freeable_bytes
        if freed >= nbytes:
            return tuple(victims[:count])
    return tuple(victims)


def _limits_of(memory: MemoryPolicy) -> dict[str, int | None]:
    return {"limit": memory.limit, "floor": memory.floor, "parked_max": memory.parked.max}


def _heap_record(report: HeapReleased) -> HeapRecord:
    return HeapRecord(
        process=report.process,
        allocator=report.allocator,
        trim_seconds=report.seconds,
        resident_before_bytes=report.resident_before_bytes,
        resident_after_bytes=report.resident_after_bytes,
        heap_bytes_before=report.heap_bytes,
        heap_free_before_bytes=report.heap_free_bytes,
        returned=report.returned,
    )
