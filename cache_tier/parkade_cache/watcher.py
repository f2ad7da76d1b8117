"""Looks at memory, limits and the policy file between requests, whatever the engine does.

Why it exists: the engine core sleeps without requests, and memory runs short all the same: a neighbour grows, a limit
is lowered by hand, an operator edits a policy. A thread of the owner looks four times a second, and at once where
the kernel reports stalls.

What must stay true: it only looks; letting go is decided by the gate, one decision after the other (G15). What it
asks for is asked for again while it lasts, but never in a loop. Rules: M11, W4, cases 60, 61 and 67.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parkade_cache.admission import Admission
from parkade_cache.conversations import Conversation
from parkade_cache.disk_tier import DiskTier
from parkade_cache.ids import ConversationId
from parkade_cache.live_policy import PolicyFile, PolicyOrders
from parkade_cache.memory.pressure import PressureLevel, PressureSampler, StallTrigger
from parkade_cache.memory.reading import MemorySampler
from parkade_cache.memory.watch import PressureWatch, Strain, relief_band_bytes
from parkade_cache.receipts import ReceiptKind
from parkade_cache.state import CacheState

_log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
"""How often memory, limits and the policy file are looked at."""

RELIEF_INTERVAL_S = 1.0
"""How often relief is tried again while pressure lasts and the last one has not won the floor back."""

LONGEST_INTERVAL_S = 30.0
"""The interval doubles up to this while relief brings nothing."""

_WORTH_BYTES = 8 << 20
"""Relief that released less, and let nobody go, has brought nothing: an allocator always finds a few pages."""

_RETRY_AFTER_S = 2
"""When a request that was refused because its conversation is unwritten may come again (case 61)."""


def _untold(_: bool) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the pod looks at and tells besides its readings."""

    pressure: PressureSampler = field(default_factory=PressureSampler)
    policy_file: PolicyFile | None = None
    overloaded: Callable[[bool], None] = _untold
    """Told when requests should ask ``Watcher.may_arrive`` before any work, and when no longer."""


class Watcher:
    """Takes samples and tells the gate what is due."""

    def __init__(
        self,
        state: CacheState,
        *,
        sampler: MemorySampler,
        admission: Admission,
        disk: DiskTier | None,
        surroundings: Surroundings,
        orders: PolicyOrders,
    ) -> None:
        self.state = state
        self.sampler = sampler
        self.admission = admission
        self.disk = disk
        self._surroundings = surroundings
        self._orders = orders
        self._watch = PressureWatch()
        self._strain: Strain | None = None
        self._relieved_at = float("-inf")
        self._relieved_in_full = False
        self._interval_s = RELIEF_INTERVAL_S
        self._overloaded = False

    def run(self, stopping: threading.Event) -> None:
        """The body of the watching thread."""
        trigger = self._surroundings.pressure.trigger()
        while not stopping.is_set():
            try:
                if trigger is None:
                    stopping.wait(WATCH_INTERVAL_S)
                else:
                    trigger.wait(WATCH_INTERVAL_S)
            except OSError:
                _close(trigger)
                trigger = None
            try:
                self.watch()
            except Exception:  # noqa: BLE001 - the next look must still be taken
                _log.exception("memory could not be watched")
        _close(trigger)

    def watch(self) -> Strain:
        """Look once; what must be done is left to the gate."""
        state = self.state
        now = state.clock.monotonic()
        strain = self._watch.look(
            reading=self.sampler.sample(),
            pressure=self._surroundings.pressure.sample(),
            limits_bytes=self.sampler.limits_bytes(),
            floor_bytes=state.policy.memory.floor,
            now=now,
        )
        state.pressure = strain.level
        state.metrics.memory_pressure_level.set(list(PressureLevel).index(strain.level))
        if strain.limits_before_bytes is not None:
            self._note_limits(strain, strain.limits_before_bytes)
        if strain.rose or strain.limits_changed:
            self._interval_s = RELIEF_INTERVAL_S
        pressing = strain.asks or self.admission.over_budget()
        due = strain.rose or self._lost_again(strain) or now - self._relieved_at >= self._interval_s
        if strain.limits_changed or (pressing and due):
            self._relieved_at, self._relieved_in_full = now, False
            with state.lock:
                self._strain = strain
                state.wake.notify_all()
        self._note_overload(strain)
        if self._surroundings.policy_file is not None:
            self._surroundings.policy_file.follow(self._orders, state.policy, now)
        return strain

    def _lost_again(self, strain: Strain) -> bool:
        """What the last relief had won back is gone: somebody grows, and waiting would let them reach the limit."""
        available_bytes = strain.reading.available_bytes
        return (
            self._relieved_in_full and available_bytes is not None and available_bytes < self.state.policy.memory.floor
        )

    def take_strain(self, *, critical_only: bool) -> Strain | None:
        """What relief is due, once; the caller holds the lock."""
        strain = self._strain
        if strain is None or (critical_only and strain.level is not PressureLevel.CRITICAL):
            return None
        self._strain = None
        return strain

    def relieve(self, strain: Strain) -> None:
        """Carry out what is due, on the gate's thread."""
        decision = self.admission.relieve(strain)
        worth_bytes = max(_WORTH_BYTES, relief_band_bytes(self.state.policy.memory.floor))
        in_vain = decision is None or not (decision.progress.evicted or decision.released_bytes >= worth_bytes)
        with self.state.lock:
            self._relieved_in_full = decision is not None and decision.admitted
            # The wait until the next try counts from the end: a long write-out must not be followed by another at once,
            # nor by one that was asked for meanwhile and knows nothing of what this one has given back.
            self._strain = None
            self._relieved_at = self.state.clock.monotonic()
            # Where nothing is left to give back, asking every second would only cost every process a trim.
            self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S) if in_vain else RELIEF_INTERVAL_S

    def _note_limits(self, strain: Strain, before_bytes: tuple[int, ...]) -> None:
        """A limit was changed: in the kernel's files, or by a policy, which has a receipt of its own as well."""
        _log.info("memory limits changed from %s to %s bytes", before_bytes, strain.limits_bytes)
        self.state.metrics.resize.labels(outcome="noticed").inc()
        self.state.receipts.add(
            kind=ReceiptKind.RESIZE,
            outcome="noticed",
            floor_bytes=self.state.policy.memory.floor,
            reading_after=strain.reading,
            still_parked_bytes=self.state.slots.held_bytes(),
            detail={"old": list(before_bytes), "new": list(strain.limits_bytes)},
        )

    # -- requests while nothing is left to give (case 61) -----------------------------------------------------

    def _note_overload(self, strain: Strain) -> None:
        short = strain.level is PressureLevel.CRITICAL and self.admission.refused_under_pressure
        if short != self._overloaded:
            self._overloaded = short
            self._surroundings.overloaded(short)

    def may_arrive(self, conversation: ConversationId) -> dict[str, Any]:
        """Whether a request may begin now; one whose own state is unwritten waits for its write.

        Memory that the pod is short of is held by that very state: written, it can go, and the request then restores
        what it needs within bounds.
        """
        if not self._must_wait(conversation):
            return {"admit": True}
        self.state.receipts.add(
            kind=ReceiptKind.REFUSE,
            outcome="retry_later",
            reason="own_state_unwritten",
            conversation=conversation,
            floor_bytes=self.state.policy.memory.floor,
            reading_after=self.sampler.sample(),
        )
        return {"admit": False, "retry_after_s": _RETRY_AFTER_S}

    def _must_wait(self, conversation: ConversationId) -> bool:
        state = self.state
        if not self._overloaded or self.disk is None or not state.spill_healthy:
            return False
        with state.lock:
            found = state.conversations.get(conversation)
            if found is None or not _is_unwritten(found):
                return False
            if not found.writing and found.retry_write_at > state.clock.monotonic():
                return False  # It could not be written just now: waiting would not help.
            if not found.writing:
                # The disk is not for the thread of a request to wait for: the owner's tick orders the write.
                state.wanted_on_disk[found.id] = found
                state.wake.notify_all()
            return True


def _close(trigger: StallTrigger | None) -> None:
    if trigger is not None:
        trigger.close()


def _is_unwritten(conversation: Conversation) -> bool:
    return conversation.in_ram and (conversation.dirty or bool(conversation.writing))
