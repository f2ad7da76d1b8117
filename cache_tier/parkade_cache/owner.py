"""The owner: the threads that keep a pod's conversations while the engine works or sleeps.

Why it exists: the engine core sleeps without requests, so admission, write-behind, publishing, recovery and
draining must not depend on an engine step. One thread answers the movers, one runs the gate, one does what is due
from time to time, one brings back what an earlier life left on disk.

What must stay true: only these threads and the step hooks change the ledger, always under ``state.lock``;
whoever asks (HTTP, operator, launcher) goes through the handlers at the end. Rules: W7, W8, S1-S3.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parkade_cache.admission import Admission
from parkade_cache.cache import ConversationCache
from parkade_cache.conversations import Conversation
from parkade_cache.disk_tier import DiskTier, WriteTicket
from parkade_cache.errors import ParkadeError, PolicyError
from parkade_cache.heaps import PodHeaps
from parkade_cache.hooks import HookTimes
from parkade_cache.ids import ConversationId
from parkade_cache.live_policy import LivePolicy, PolicyOrder
from parkade_cache.memory.reading import MemorySampler
from parkade_cache.mover import ExtentsCommitted, ExtentsReleased, HeapReleased, JobId, Mover, PackWritten, Report
from parkade_cache.policy import PolicyChange
from parkade_cache.recall import Recall
from parkade_cache.receipts import HeapRecord, ReceiptKind
from parkade_cache.spill import SpillStore, WriteOutcome
from parkade_cache.state import CacheState
from parkade_cache.summaries import IdentityFacts, describe, find, list_conversations, summarise
from parkade_cache.watcher import Surroundings, Watcher

__all__ = ["IdentityFacts", "Owner"]

_log = logging.getLogger(__name__)

TICK_S = 0.25
"""How often the owner looks for conversations that have become idle."""

TOUCH_INTERVAL_S = 5.0
"""How often the disk's index learns which conversations were used; a crash forgets at most this much of the order."""

DIRTY_WATERMARK = 0.25
"""W8: unwritten share of ``parked.max`` above which writing does not wait for a conversation to be idle."""

FORGET_WAIT_S = 10.0
"""How long a deletion waits for writes of its conversation that are under way."""

HEAP_WAIT_S = 30.0
"""How long somebody who asks for the heaps waits behind other decisions."""

POLICY_WAIT_S = 170.0
"""How long a policy's sender waits for its answer; the change goes on without it."""

_ENDING = "the pod is ending; no policy counts any more"

_TURNS_SHARE = 0.5
"""Share of a drain's grace that running turns may take; the rest is for writing out (S1)."""

_SAFE = frozenset({WriteOutcome.WRITTEN, WriteOutcome.ALREADY_ON_DISK})


class Owner:
    """Owns one pod's cache; ``mover`` must deliver its reports to ``report``."""

    def __init__(
        self,
        state: CacheState,
        *,
        sampler: MemorySampler,
        store: SpillStore | None,
        identity: IdentityFacts,
        heaps: PodHeaps | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.state = state
        self.cache = ConversationCache(state)
        self.hooks = HookTimes()
        self.sampler = sampler
        self.store = store
        self.identity = identity
        self._mover: Mover | None = None
        self.disk: DiskTier | None = None
        self._admission: Admission | None = None
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._partial: dict[JobId, list[Report]] = {}
        self._background: WriteTicket | None = None
        self._policy_changes: deque[PolicyChange] = deque()
        self._policy_orders: deque[PolicyOrder] = deque()
        self._heaps = heaps
        self._surroundings = surroundings or Surroundings()
        self._relieved_last = False
        self._turns_at_heap_release = 0
        self._heap_orders: deque[queue.SimpleQueue[Sequence[HeapRecord]]] = deque()
        self._heaps_due = False
        self._live: LivePolicy | None = None
        self._watcher: Watcher | None = None
        self._next_background = float("-inf")
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._touched_at = float("-inf")
        self.deciding = False
        self._counted_lost: set[ConversationId] = set()
        self._unsubscribe: Callable[[], None] = _nothing

    @property
    def admission(self) -> Admission:
        """The gate's thread; there once the mover is attached."""
        if self._admission is None:
            raise ParkadeError("the owner has not been started")
        return self._admission

    @property
    def mover(self) -> Mover:
        """The movers of all ranks."""
        if self._mover is None:
            raise ParkadeError("the owner has not been started")
        return self._mover

    @property
    def live_policy(self) -> LivePolicy:
        """Checks and carries out changes of the policy; there once the mover is attached."""
        if self._live is None:
            raise ParkadeError("the owner has not been started")
        return self._live

    @property
    def watcher(self) -> Watcher:
        """Looks at memory between requests; there once the mover is attached."""
        if self._watcher is None:
            raise ParkadeError("the owner has not been started")
        return self._watcher

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, mover: Mover, *, watch: bool = True) -> None:
        """Attach the movers and start the threads; without ``watch`` nobody looks at memory between requests."""
        self._mover = mover
        if self.store is not None:
            self.disk = DiskTier(self.state, self.store, mover)
        self._admission = Admission(self.state, sampler=self.sampler, mover=mover, disk=self.disk, heaps=self._heaps)
        self._live = LivePolicy(self.state, sampler=self.sampler, admission=self._admission, disk=self.disk)
        self._watcher = Watcher(
            self.state,
            sampler=self.sampler,
            admission=self._admission,
            disk=self.disk,
            surroundings=self._surroundings,
            orders=self,
        )
        self._unsubscribe = self.state.policy_box.subscribe(self._policy_changed)
        for name, body in (("reports", self._run_reports), ("gate", self._run_gate), ("tick", self._run_ticks)):
            self._spawn(name, body)
        if watch:
            self._spawn("watch", lambda: self.watcher.run(self._stopping))
        if self.disk is not None:
            self._spawn("recall", Recall(self.state, self.disk, stop=self._stopping.is_set).run)
        else:
            self.state.recovering = False

    def _spawn(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name=f"parkade-owner-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self, *, grace_s: float = 30.0) -> None:
        """Write out what is left within ``grace_s``, then stop the threads and close the store."""
        if self._stopping.is_set():
            return
        self.abandon_turns()
        self.drain(grace_s=grace_s)
        self.end_threads()
        self.mover.close()
        if self.store is not None:
            self.store.close()
        self.state.receipts.flush()
        self.state.receipts.close()

    def abandon_turns(self) -> None:
        """The engine takes no further step: what its running requests have stored so far is all there will be."""
        state = self.state
        with state.lock:
            for turn in list(state.turns.values()):
                turn.stores_pending = 0
                self.cache.close(turn, outcome="shutdown")

    def leaving(self, grace_s: float) -> None:
        """A mover is about to go, as when the engine ends without a drain: write out what only RAM has (trap 1)."""
        if not self._stopping.is_set():
            self.abandon_turns()
            self.drain(grace_s=grace_s)

    def end_threads(self) -> None:
        """Stop working; nothing is written out."""
        self._unsubscribe()
        self._stopping.set()
        with self.state.lock:
            self.state.wake.notify_all()
        self._reports.put(None)
        if self._admission is not None:
            self._admission.stop_waiting()
        while self._policy_orders:
            self._policy_orders.popleft().done.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    # -- reports of the movers ---------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Called by the movers, from any thread."""
        self._reports.put(report)

    def _run_reports(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._handle(report)
            except Exception:  # noqa: BLE001 - the next report must still be heard
                _log.exception("a mover's report could not be handled: %s", type(report).__name__)

    def _handle(self, report: Report) -> None:
        if isinstance(report, ExtentsReleased | HeapReleased):
            self.admission.answered(report)
            return
        parts = self._partial.setdefault(report.job, [])
        parts.append(report)
        if len(parts) < self.state.geometry.ranks:
            return
        del self._partial[report.job]
        commits = [part for part in parts if isinstance(part, ExtentsCommitted)]
        packs = [part for part in parts if isinstance(part, PackWritten)]
        if commits:
            self.admission.committed(commits)
        elif packs and self.disk is not None:
            self.disk.pack_written(packs)

    # -- the gate's thread ---------------------------------------------------------------------------------------

    def _run_gate(self) -> None:
        while (work := self._next_decision()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - without RAM the blocks go to disk; the next decision must be made
                _log.exception("the gate could not decide")

    def _next_decision(self) -> Callable[[], object] | None:
        """Wait for something to decide: requests that wait for RAM come first. None when the owner stops."""
        state = self.state
        with state.lock:
            self.deciding = False
            while not self._stopping.is_set():
                work = self._due_decision()
                if work is not None:
                    self.deciding = True
                    return work
                state.wake.wait()
        return None

    def _due_decision(self) -> Callable[[], object] | None:
        """A limit that is about to fall, and critical pressure, come before requests; whatever can wait after them."""
        state = self.state
        if self._policy_orders:
            order = self._policy_orders.popleft()
            return lambda: self.live_policy.apply(order)
        if self._policy_changes:
            change = self._policy_changes.popleft()
            return lambda: self.live_policy.changed(change)
        # Between two reliefs somebody who waits is served: one that lasts must not keep everybody waiting.
        waiting = bool(state.wishes)
        strain = None if waiting and self._relieved_last else self.watcher.take_strain(critical_only=waiting)
        if strain is not None:
            self._relieved_last = True
            return lambda: self.watcher.relieve(strain)
        self._relieved_last = False
        if state.wishes:
            wish = state.wishes.popleft()
            return lambda: self.admission.serve(wish)
        if state.captured:
            turn = state.captured.popleft()
            return lambda: self.admission.after_capture(turn)
        if self._heap_orders:
            answer = self._heap_orders.popleft()
            return lambda: answer.put(self.admission.release_heaps("asked", limited=False))
        if self._heaps_due:
            self._heaps_due = False
            return lambda: self.admission.release_heaps("idle")
        return None

    def release_heaps(self) -> list[HeapRecord]:
        """Ask every process for its heap now and wait for what came of it; TimeoutError when the gate is busy."""
        answer: queue.SimpleQueue[Sequence[HeapRecord]] = queue.SimpleQueue()
        with self.state.lock:
            self._heap_orders.append(answer)
            self.state.wake.notify_all()
        try:
            return list(answer.get(timeout=HEAP_WAIT_S))
        except queue.Empty:
            raise TimeoutError("the gate is busy letting go of conversations; ask again") from None

    # -- policies ---------------------------------------------------------------------------------------------------

    def send_if_new(self, document: Mapping[str, object], origin: str) -> PolicyOrder | None:
        """As ``send_policy``; None where it is in force already."""
        policy = self.live_policy.parse(document, origin)
        with self.state.lock:
            in_force = not self._policy_orders and policy == self.state.policy
        return None if in_force else self._queue(PolicyOrder(policy, origin))

    def send_policy(self, document: Mapping[str, object], origin: str) -> PolicyOrder:
        """Check a policy and hand it to the gate's thread, in place of one that has not begun yet.

        Raises:
            PolicyError: it is wrong, and nothing has changed.

        """
        return self._queue(PolicyOrder(self.live_policy.parse(document, origin), origin))

    def _queue(self, order: PolicyOrder) -> PolicyOrder:
        with self.state.lock:
            if self._stopping.is_set():
                raise PolicyError(_ENDING)
            while self._policy_orders:
                self._policy_orders.popleft().supersede()
            self._policy_orders.append(order)
            self.state.wake.notify_all()
        return order

    def reject_policy(self, origin: str, reason: str) -> None:
        """Say that a policy was not even readable."""
        self.live_policy.rejected(origin, reason)

    def set_policy(self, document: Mapping[str, object], *, origin: str = "http") -> dict[str, Any]:
        """Put a whole policy in force and wait until it counts; see ``PolicyResult``.

        Raises:
            PolicyError: it is wrong, and nothing has changed.
            TimeoutError: it is still being carried out.

        """
        order = self.send_policy(document, origin)
        if not order.done.wait(POLICY_WAIT_S):
            raise TimeoutError(f"the policy is still being carried out after {POLICY_WAIT_S:g} s; ask again")
        if order.result is None:
            raise PolicyError(_ENDING)
        return order.result.to_json(self.state.policy)

    def _policy_changed(self, change: PolicyChange) -> None:
        if self.live_policy.applying:
            return
        with self.state.lock:
            self._policy_changes.append(change)
            self.state.wake.notify_all()

    # -- the ticking thread: streams, write-behind, empty extents ---------------------------------------------------

    def _run_ticks(self) -> None:
        state = self.state
        failed = False
        while not self._stopping.is_set():
            with state.lock:
                if failed or not (state.finished_streams or self._streams_wanting()):
                    state.wake.wait(TICK_S)
            failed = False
            try:
                self.tick()
            except Exception:  # noqa: BLE001 - what is due stays due: the next tick tries again
                failed = True
                _log.exception("the owner's tick failed; the next one tries again")

    def _streams_wanting(self) -> bool:
        return any(
            stream is not None and not stream.failed and stream.planned_bytes > stream.reserved_bytes
            for stream in (turn.stream for turn in self.state.turns.values())
        )

    def tick(self) -> None:
        """One round of what needs no engine step."""
        if self.disk is not None:
            self.disk.open_streams()
            self._finish_streams(self.disk)
            if self.disk.check_health():
                Recall(self.state, self.disk, stop=self._stopping.is_set).run()
            self._write_wanted(self.disk)
            self._write_behind(self.disk)
            self.disk.collect_dead()
            self.disk.fit_capacity()
            self._touch(self.disk)
        with self.state.lock:
            self.state.free_unheld_ram()
            idle = not self.state.turns and not self.state.wishes
            turns = sum(self.state.totals.turns.values())
        if idle:
            self.admission.release_empty(wait=False)
            if turns != self._turns_at_heap_release and self.admission.heaps_rested():
                self._turns_at_heap_release = turns
                with self.state.lock:
                    self._heaps_due = True
                    self.state.wake.notify_all()

    def _finish_streams(self, disk: DiskTier) -> None:
        while True:
            with self.state.lock:
                if not self.state.finished_streams:
                    return
                turn = self.state.finished_streams[0]
            try:
                disk.finish_stream(turn)
            finally:
                # Only now: whoever waits for streams to end must see it here or in the backlog.
                with self.state.lock:
                    if self.state.finished_streams and self.state.finished_streams[0] is turn:
                        self.state.finished_streams.popleft()

    def _touch(self, disk: DiskTier) -> None:
        now = self.state.clock.monotonic()
        if now - self._touched_at >= TOUCH_INTERVAL_S:
            self._touched_at = now
            disk.touch()

    def _write_wanted(self, disk: DiskTier) -> None:
        """Case 61: conversations whose requests wait for their write."""
        state = self.state
        while True:
            with state.lock:
                if not state.wanted_on_disk:
                    return
                _, conversation = state.wanted_on_disk.popitem()
                if conversation.writing:
                    continue
            ticket = disk.order_write(conversation, urgent=True)
            if not isinstance(ticket, WriteTicket):
                with state.lock:
                    # Nothing is left to write, or it cannot be written now: nobody waits for it any more.
                    conversation.retry_write_at = state.clock.monotonic() + 5.0

    def _write_behind(self, disk: DiskTier) -> None:
        """W7, W8: one background write at a time, of the conversation that has been idle longest."""
        state = self.state
        if self._background is not None and not self._background.done.is_set():
            return
        self._background = None
        spill = state.policy.spill
        if spill is None or spill.mode.value != "WriteBehind" or state.draining or not state.spill_healthy:
            return
        if spill.write_behind_per_second and state.clock.monotonic() < self._next_background:
            return
        with state.lock:
            conversation = self._next_to_write(float(spill.write_behind_idle_seconds))
        if conversation is None:
            return
        ticket = disk.order_write(conversation, urgent=False)
        if isinstance(ticket, WriteTicket):
            self._background = ticket
            if spill.write_behind_per_second:
                self._next_background = state.clock.monotonic() + ticket.nbytes / spill.write_behind_per_second
        elif ticket is not WriteOutcome.ALREADY_ON_DISK:
            state.metrics.write_out.labels(outcome=ticket.value).inc()
            with state.lock:
                conversation.retry_write_at = state.clock.monotonic() + 5.0

    def _next_to_write(self, idle_seconds: float) -> Conversation | None:
        """The one that has waited longest, once it is idle; above the watermark at once, in use or not.

        They wait in the order of their last stores: where the first is not idle yet, none is.
        """
        state = self.state
        now, monotonic = state.clock.wall(), state.clock.monotonic()
        over = self._over_watermark()
        in_use: Conversation | None = None
        for conversation in state.conversations.dirty():
            if conversation.writing or conversation.retry_write_at > monotonic:
                continue
            if not conversation.busy:
                return conversation if over or now - conversation.last_used >= idle_seconds else None
            in_use = in_use or conversation
        return in_use if over else None

    def _over_watermark(self) -> bool:
        state = self.state
        dirty = state.ledger.dirty_blocks * state.geometry.pod_slot_bytes
        return dirty > DIRTY_WATERMARK * state.policy.memory.parked.max

    # -- drain -----------------------------------------------------------------------------------------------------

    def drain(self, *, grace_s: float) -> dict[str, Any]:
        """S1: let running turns end, then write out everything, newest first; returns what was done."""
        state = self.state
        started = state.clock.monotonic()
        deadline = started + grace_s
        with state.lock:
            state.draining = True
        self._await_turns(started + _TURNS_SHARE * grace_s)
        if self.disk is not None:
            self._settle_streams(self.disk, deadline)
        outcomes, dropped = self._write_everything(deadline)
        if self.disk is not None:
            self.disk.touch()
        seconds = state.clock.monotonic() - started
        state.metrics.drain_seconds.observe(seconds)
        state.receipts.add(
            kind=ReceiptKind.DRAIN,
            outcome="incomplete" if dropped else "done",
            duration_seconds=seconds,
            written_out=outcomes.get(WriteOutcome.WRITTEN.value, 0),
            already_on_disk=outcomes.get(WriteOutcome.ALREADY_ON_DISK.value, 0),
            dropped=dropped,
            detail={"outcomes": outcomes},
        )
        state.receipts.flush()
        return {"seconds": seconds, "outcomes": outcomes, "dropped": dropped}

    def _await_turns(self, deadline: float) -> None:
        state = self.state
        with state.lock:
            while state.turns and state.clock.monotonic() < deadline:
                state.wake.wait(0.1)

    def _settle_streams(self, disk: DiskTier, deadline: float) -> None:
        self._finish_streams(disk)
        state = self.state
        with state.lock:
            while disk.backlog_bytes and state.clock.monotonic() < deadline:
                state.wake.wait(0.05)

    def _write_everything(self, deadline: float) -> tuple[dict[str, int], int]:
        """Outcomes by name, and how many conversations lose blocks when the pod ends now."""
        state = self.state
        with state.lock:
            # Also those that count as written: another conversation's failed write may have left them with a gap.
            waiting = [c for c in state.conversations if c.in_ram or c.dirty or c.writing]
        outcomes: dict[str, int] = {}
        dropped = 0
        for left, conversation in zip(range(len(waiting) - 1, -1, -1), reversed(waiting), strict=True):
            outcome = WriteOutcome.TIER_OFF
            if self.disk is not None and state.spill_healthy:
                outcome = self.disk.write_out(conversation, deadline=deadline)
            outcomes[outcome.value] = outcomes.get(outcome.value, 0) + 1
            dropped += self._count_lost(conversation, outcome)
            if outcome is not WriteOutcome.ALREADY_ON_DISK:
                _log.info("drain: %s %s, %d conversations left", conversation.id, outcome.value, left)
        return outcomes, dropped

    def _count_lost(self, conversation: Conversation, outcome: WriteOutcome) -> bool:
        """Whether blocks of the conversation are nowhere but in RAM, and end with the pod; said once."""
        state = self.state
        with state.lock:
            lost = state.unpublished_blocks(conversation)
        if not lost:
            return False
        if conversation.id not in self._counted_lost:
            self._counted_lost.add(conversation.id)
            reason = "in_use" if outcome in _SAFE else outcome.value
            state.add_drop_receipt(conversation.id, reason, lost, tier="ram")
        return True

    # -- handlers for whoever asks --------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], object]]:
        """What the owner's socket answers."""
        return {
            "summary": lambda _: self.summary(),
            "conversations": lambda p: self.list_conversations(limit=int(p.get("limit") or 100), after=p.get("after")),
            "conversation": lambda p: self.describe(ConversationId(str(p["id"]))),
            "forget": lambda p: self.forget(ConversationId(str(p["id"]))),
            "pin": lambda p: self.pin(ConversationId(str(p["id"])), pinned=bool(p.get("pinned", True))),
            "receipts": self.list_receipts,
            "policy": lambda _: self.state.policy.to_json(),
            "set_policy": lambda p: self.set_policy(_mapping(p.get("policy")), origin=str(p.get("origin") or "http")),
            "release_heaps": lambda _: self.release_heaps(),
            "arriving": lambda p: self.watcher.may_arrive(ConversationId(str(p["conversation"]))),
            "ready": lambda _: {"ready": self.ready, "draining": self.state.draining},
            "live": lambda _: {"live": True},
            "drain": lambda p: self.drain(grace_s=float(p.get("grace_s") or 60.0)),
            "metrics": lambda _: self.export_metrics(),
        }

    @property
    def ready(self) -> bool:
        """Whether new requests are welcome."""
        return not self.state.draining and not self._stopping.is_set()

    def export_metrics(self) -> list[dict[str, Any]]:
        """All metric families, gauges brought up to date."""
        self.state.metrics.observe(self.summary())
        self.state.metrics.receipts_unwritten.set(self.state.receipts.unwritten_total)
        return self.state.metrics.export()

    def list_receipts(self, params: Mapping[str, Any]) -> list[dict[str, object]]:
        """Receipts, newest last."""
        found = self.state.receipts.query(
            since=params.get("since"),
            conversation=params.get("conversation"),
            request=params.get("request"),
            kind=params.get("kind"),
            limit=int(params.get("limit") or 100),
        )
        return [receipt.to_json() for receipt in found]

    def list_conversations(self, *, limit: int, after: str | None) -> dict[str, Any]:
        """A page of conversations, most recently used first."""
        return list_conversations(self.state, limit=limit, after=after)

    def describe(self, conversation: ConversationId) -> dict[str, Any] | None:
        """One conversation, or None."""
        return find(self.state, conversation)

    def pin(self, conversation: ConversationId, *, pinned: bool) -> dict[str, Any] | None:
        """Keep the conversation from being let go, or stop doing so."""
        with self.state.lock:
            found = self.state.conversations.get(conversation)
            if found is None:
                return None
            found.pinned = pinned
        return describe(self.state, found)

    def forget(self, conversation: ConversationId, *, wait_s: float = FORGET_WAIT_S) -> dict[str, Any] | None:
        """Delete the conversation from every tier; queued and running writes of it are never published (case 69).

        Waits for writes under way to end, so that what is answered as gone stays gone after a kill.
        """
        state = self.state
        with state.lock:
            found = state.conversations.get(conversation)
            if found is None:
                return None
            found.forgotten = True
            turns = [turn for turn in state.turns.values() if turn.conversation is found]
        if self.disk is not None:
            give_up = state.clock.monotonic() + wait_s
            for ticket in self.disk.forget(found, turns):
                ticket.done.wait(max(0.0, give_up - state.clock.monotonic()))
        with state.lock:
            state.drop_conversation(found)
            freed = state.free_unheld_ram()
            state.slots.abandon(conversation)
            state.changed()
        returned = self.disk.collect_dead() if self.disk is not None else 0
        state.receipts.add(
            kind=ReceiptKind.DROP,
            outcome="forgotten",
            reason="deleted",
            conversation=conversation,
            blocks=freed,
            bytes=freed * state.geometry.pod_slot_bytes + returned,
        )
        return {"id": conversation, "forgotten": True}

    def reset(self) -> None:
        """New weights: nothing cached before may ever be served again, on no tier and after no restart (trap 14).

        Requests under way let go of their chains as well: when they go on, they must not find what they had.
        """
        state = self.state
        with state.lock:
            for turn in state.turns.values():
                self.cache.let_go(turn)
        try:
            for conversation in list(self.state.conversations):
                self.forget(conversation.id, wait_s=0.0)
        finally:
            with state.lock:
                state.forget_contents()
            if self.disk is not None:
                self.disk.new_generation()

    def summary(self) -> dict[str, Any]:
        """The pod's cache in numbers: what the operator, ``parkade top`` and the demo read."""
        summary = summarise(self.state, self.disk, self.identity, self.sampler.sample())
        return summary | {"ready": self.ready, "hooks": self.hooks.summary()}


def _nothing() -> None:
    return None


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise PolicyError("the policy must be a JSON object")
    return value
