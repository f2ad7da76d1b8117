"""Limits, floors and budgets that change while the pod runs.

Why it exists: an operator lowers a limit before the kernel does, and must hear when that is safe; people edit a
file and expect it to count. Both ways end here, and one thread, the gate's, carries the change out.

What must stay true: a policy is checked before anything changes, and the last good one stays in force when a new one
is wrong or cannot be met (case 66); a change has counted, written out and released included, when its answer comes.
Rules: M11, W4, cases 66 and 67.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from parkade_cache.admission import Admission
from parkade_cache.disk_tier import DiskTier
from parkade_cache.errors import PolicyError
from parkade_cache.memory.gate import GateDecision, Refuse
from parkade_cache.memory.reading import MemorySampler
from parkade_cache.policy import Policy, PolicyChange, merge_documents, parse_policy
from parkade_cache.quantity import format_bytes
from parkade_cache.receipts import ReceiptKind
from parkade_cache.state import CacheState

_log = logging.getLogger(__name__)

RETRY_S = 5.0
"""How often a file's policy that was refused for lack of memory is tried again."""

_LARGEST_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """What became of a policy that was sent. ``applied`` False: the one before is still in force."""

    applied: bool
    outcome: str
    """``applied``; ``applied_in_part``: in force, and something in use still exceeds it; ``refused``."""
    reason: str
    seconds: float
    missing_bytes: int
    evicted: int
    """Conversations that left RAM for it."""
    decision: GateDecision | None

    def to_json(self, policy: Policy) -> dict[str, Any]:
        """The answer of ``PUT /parkade/v1/policy``."""
        decision = self.decision
        return {
            "applied": self.applied,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": self.seconds,
            "missing_bytes": self.missing_bytes,
            "evicted": self.evicted,
            "reading": None if decision is None else dict(decision.after.as_fields()),
            "policy": policy.to_json(),
        }


@dataclass(slots=True)
class PolicyOrder:
    """A checked policy on its way to the gate's thread."""

    policy: Policy
    origin: str
    result: PolicyResult | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def finish(self, result: PolicyResult) -> None:
        """Wake whoever waits for the answer."""
        self.result = result
        self.done.set()

    def supersede(self) -> None:
        """A later policy has come before this one was begun."""
        self.finish(_refused("another policy was sent before this one's turn came", 0.0))


class LivePolicy:
    """Checks policies for this pod and carries them out. ``apply`` and ``changed`` run on the gate's thread."""

    def __init__(
        self, state: CacheState, *, sampler: MemorySampler, admission: Admission, disk: DiskTier | None
    ) -> None:
        self.state = state
        self.sampler = sampler
        self.admission = admission
        self.disk = disk
        self._applying = False

    def parse(self, source: str | bytes | Mapping[str, object], origin: str) -> Policy:
        """The policy, checked against this pod as it runs.

        Raises:
            PolicyError: one line that says which field and what to do; a receipt says so too.

        """
        try:
            policy = parse_policy(source, limit_bytes=self.sampler.hard_limit_bytes())
            policy.check_block(self.state.geometry.pod_slot_bytes)
            self._check_disk(policy)
        except PolicyError as error:
            self.rejected(origin, str(error))
            raise
        return policy

    def _check_disk(self, policy: Policy) -> None:
        if policy.spill is None and self.disk is not None:
            raise PolicyError("spill: the disk tier cannot be switched off while the pod runs; keep the section")
        if policy.spill is not None and self.disk is None:
            raise PolicyError("spill: this pod was started without a spill directory; restart it with --spill-dir")

    def rejected(self, origin: str, reason: str) -> None:
        """Say that a policy was not taken; nothing has changed."""
        _log.warning("the policy from %s was not taken: %s; the one before stays in force", origin, reason)
        self.state.metrics.resize.labels(outcome="rejected").inc()
        self.state.receipts.add(
            kind=ReceiptKind.POLICY, outcome="rejected", reason=reason[:300], detail={"origin": origin}
        )

    def apply(self, order: PolicyOrder) -> None:
        """Put ``order`` in force, or refuse it whole; answers it in any case."""
        started = self.state.clock.monotonic()
        try:
            result = self._apply(order, started)
        except Exception as error:
            order.finish(_refused(f"{type(error).__name__}: {error}", self.state.clock.monotonic() - started))
            raise
        order.finish(result)

    def _apply(self, order: PolicyOrder, started: float) -> PolicyResult:
        clock = self.state.clock
        old, new = self.state.policy.memory, order.policy.memory
        evicted = 0
        if new.limit is not None and (old.limit is None or new.limit < old.limit):
            decision = self.admission.make_room_for(new.limit, new)
            if isinstance(decision.outcome, Refuse):
                reason = _cannot(new.limit, decision)
                _log.warning("the policy from %s was refused: %s", order.origin, reason)
                return _refused(reason, clock.monotonic() - started, decision)
            evicted = len(decision.progress.evicted)
        self._applying = True
        try:
            change = self.state.policy_box.replace(order.policy)
        finally:
            self._applying = False
        try:
            decision = self.changed(change)
        except Exception as error:  # noqa: BLE001 - it is in force; whoever sent it must not hear that it is not
            _log.exception("a policy is in force, and not everything within it")
            reason = f"{type(error).__name__}: {error}"
            return _in_force(reason, clock.monotonic() - started, evicted)
        fits = self.disk is None or self.disk.fits()
        return PolicyResult(
            applied=True,
            outcome="applied" if decision.admitted and fits else "applied_in_part",
            reason=decision.reason or ("" if fits else "spill_size"),
            seconds=clock.monotonic() - started,
            missing_bytes=decision.outcome.missing_bytes if isinstance(decision.outcome, Refuse) else 0,
            evicted=evicted + len(decision.progress.evicted),
            decision=decision,
        )

    @property
    def applying(self) -> bool:
        """Whether the change that is being announced just now is this object's own."""
        return self._applying

    def changed(self, change: PolicyChange) -> GateDecision:
        """A policy is in force: tell the parts that keep a copy, then make it hold."""
        self.sampler.cap_bytes = change.new.memory.limit
        if self.disk is not None and change.new.spill is not None:
            self.disk.set_limits(change.new.spill)
        decision = self.admission.policy_changed(change)
        self.state.metrics.resize.labels(outcome="applied").inc()
        return decision


def _in_force(reason: str, seconds: float, evicted: int) -> PolicyResult:
    return PolicyResult(
        applied=True,
        outcome="applied_in_part",
        reason=reason,
        seconds=seconds,
        missing_bytes=0,
        evicted=evicted,
        decision=None,
    )


def _refused(reason: str, seconds: float, decision: GateDecision | None = None) -> PolicyResult:
    outcome = None if decision is None else decision.outcome
    return PolicyResult(
        applied=False,
        outcome="refused",
        reason=reason,
        seconds=seconds,
        missing_bytes=outcome.missing_bytes if isinstance(outcome, Refuse) else 0,
        evicted=0 if decision is None else len(decision.progress.evicted),
        decision=decision,
    )


def _cannot(limit_bytes: int, decision: GateDecision) -> str:
    limit = format_bytes(limit_bytes)
    if not decision.after.known:
        return f"memory cannot be read, so nobody knows whether a limit of {limit} can be met; look at the pod's log"
    outcome = decision.outcome
    missing, evictable = (outcome.missing_bytes, outcome.evictable_bytes) if isinstance(outcome, Refuse) else (0, 0)
    return (
        f"a limit of {limit} cannot be met now: {format_bytes(missing)} are missing and {format_bytes(evictable)} can "
        "be given back; retry when fewer conversations are in use, or lower the floor"
    )


class PolicyOrders(Protocol):
    """Where policies go."""

    def send_if_new(self, document: Mapping[str, object], origin: str) -> PolicyOrder | None:
        """Check a document and hand it to the gate's thread; None where it is in force already."""

    def reject_policy(self, origin: str, reason: str) -> None:
        """Say that a document was not even readable."""


class PolicyFile:
    """A file with a policy, such as a mounted ConfigMap; looked at, never locked or changed.

    ``over`` is laid over its document: what the command line has fixed.
    """

    def __init__(self, path: Path, *, over: Mapping[str, object] | None = None) -> None:
        self.path = path
        self._over = dict(over or {})
        # Not what is there now: it may have changed since the command line was read, while the engine started.
        self._seen: tuple[int, int, int, int] | None = None
        self._order: PolicyOrder | None = None
        self._again_at = float("inf")
        self._refused_over: Policy | None = None

    def _signature(self) -> tuple[int, int, int, int] | None:
        # Through links: a ConfigMap is swapped by moving one.
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def changed(self) -> bool:
        """Whether the file is another than at the last call; one that is gone changes nothing."""
        now = self._signature()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True

    def document(self) -> dict[str, object]:
        """The policy's document.

        Raises:
            PolicyError: unreadable, too large, or no JSON object.

        """
        try:
            with self.path.open("rb") as file:
                text = file.read(_LARGEST_FILE_BYTES + 1)
        except OSError as error:
            raise PolicyError(f"{self.path} cannot be read: {os.strerror(error.errno or 0)}") from None
        if len(text) > _LARGEST_FILE_BYTES:
            raise PolicyError(f"{self.path} is larger than {format_bytes(_LARGEST_FILE_BYTES)}: that is no policy")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"{self.path} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise PolicyError(f"{self.path} must hold a JSON object")
        return merge_documents(document, self._over)

    def follow(self, orders: PolicyOrders, in_force: Policy, now: float) -> None:
        """Send the file's policy on when it has changed, and again while it is right but cannot be met yet.

        A wrong one is reported and changes nothing; one that was refused is not tried again once another has been put
        in force meanwhile. ``now`` is monotonic seconds.
        """
        if self._order is not None and self._order.done.is_set():
            result, self._order = self._order.result, None
            refused = result is not None and not result.applied
            self._again_at = now + RETRY_S if refused else float("inf")
            self._refused_over = in_force if refused else None
        again = now >= self._again_at and in_force is self._refused_over
        if not self.changed() and not again:
            return
        self._again_at = float("inf")
        origin = str(self.path)
        try:
            document = self.document()
        except PolicyError as error:
            orders.reject_policy(origin, str(error))
            return
        with contextlib.suppress(PolicyError):  # Said where it was checked.
            self._order = orders.send_if_new(document, origin)
