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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from parkade_cache.admission import Admission
from parkade_cache.conversations import Conversation
from parkade_cache.disk_tier import DiskTier, WriteTicket
from parkade_cache.ids import ConversationId
from parkade_cache.live_policy import PolicyFile, PolicyOrder
from parkade_cache.memory.pressure import PressureLevel, PressureSampler
from parkade_cache.memory.reading import MemorySampler
from parkade_cache.memory.watch import PressureWatch, Strain
from parkade_cache.receipts import ReceiptKind
from parkade_cache.state import CacheState

_log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
"""How often memory, limits and the policy file are looked at."""

RELIEF_INTERVAL_S = 1.0
"""How often relief is tried again while pressure lasts and the last one has not won the floor back."""

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


class PolicyOrders(Protocol):
    """Where policies go."""

    def send_policy(self, document: Mapping[str, object], origin: str) -> PolicyOrder: ...

    def reject_policy(self, origin: str, reason: str) -> None: ...


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
                trigger = None
            try:
                self.watch()
            except Exception:  # noqa: BLE001 - the next look must still be taken
                _log.exception("memory could not be watched")
        if trigger is not None:
            trigger.close()

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
        pressing = strain.reading.known and strain.level is not PressureLevel.NONE
        pressing |= self.admission.over_budget()
        due = strain.rose or self._lost_again(strain) or now - self._relieved_at >= RELIEF_INTERVAL_S
        if strain.limits_changed or (pressing and due):
            self._relieved_at, self._relieved_in_full = now, False
            with state.lock:
                self._strain = strain
                state.wake.notify_all()
        self._note_overload(strain)
        if self._surroundings.policy_file is not None:
            self._surroundings.policy_file.follow(self._orders.send_policy, self._orders.reject_policy, now)
        return strain

    def _lost_again(self, strain: Strain) -> bool:
        """What the last relief had won back is gone: somebody grows, and waiting would let them reach the limit."""
        available_bytes = strain.reading.available_bytes
        return (
            self._relieved_in_full
            and available_bytes is not None
            and available_bytes < self.state.policy.memory.floor
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
        self._relieved_in_full = decision is not None and decision.admitted
        # The wait until the next try counts from the end: a long write-out must not be followed by another at once.
        self._relieved_at = self.state.clock.monotonic()

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
            if found.writing:
                return True
        # Where nothing is left to write, or it cannot be written, waiting would not help.
        return isinstance(self.disk.order_write(found, urgent=True), WriteTicket)


def _is_unwritten(conversation: Conversation) -> bool:
    return conversation.in_ram and (conversation.dirty or bool(conversation.writing))
