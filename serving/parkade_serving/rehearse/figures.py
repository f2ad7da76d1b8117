"""What a rehearsal measured, and what follows from it. Pure.

Words: a *release* is one conversation that left RAM; it was *written first* when all of it was on disk by then. A
*change* is one lowering of the limit with the raising after it. A *gulp* is one helping of the neighbour's.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from parkade_serving.demo.figures import TurnFigures, cached_share

_SAFE_OUTCOMES: Final = frozenset({"written", "already_on_disk"})
_FORGOTTEN: Final = "forgotten"


class Manner(enum.StrEnum):
    """How a limit was lowered."""

    ANNOUNCED = "announced"
    """The policy first, the kernel's limit once the pod has confirmed, as an operator does it."""
    UNANNOUNCED = "unannounced"
    """The kernel's limit only."""


class ChangeOutcome(enum.StrEnum):
    """What came of lowering a limit."""

    CONFIRMED = "confirmed"
    NOTICED = "noticed"
    KERNEL_REFUSED = "kernel_refused"
    """EBUSY: more was in use than the kernel could take back. It is right to refuse."""
    POD_REFUSED = "pod_refused"
    UNNOTICED = "unnoticed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One lowering; ``seconds`` until confirmed or noticed."""

    manner: Manner
    from_bytes: int
    to_bytes: int
    outcome: ChangeOutcome
    seconds: float | None = None
    give_back_seconds: float | None = None
    """Until the floor was free again under the new limit; None where it was not, or was never missing."""
    released: int = 0
    """Conversations that left RAM for it."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gulp:
    """One helping of the neighbour's."""

    eaten_bytes: int
    below_floor_bytes: int
    """How far below the floor the pod was pushed."""
    give_back_seconds: float | None
    """From the first moment below the floor until it was free again; None where it was not in time."""
    released: int
    turns: int
    """Answered while the neighbour held on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDisk:
    """What the pod did while its disk was full."""

    degraded_seconds: float | None
    """Until it said so, by its condition or by a refused write."""
    condition: bool
    """Whether its condition said so."""
    recovered_seconds: float | None
    """From the moment that there was space until it was healthy and everything idle was written."""
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Killing:
    """One SIGKILL of the whole pod and what came back after it."""

    published: int
    """Conversations that were completely on disk when it was killed."""
    resumed: int
    """How many of them went on where they were."""
    lost: tuple[str, ...]
    not_judged: int
    """Conversations with something unwritten at that moment."""
    start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestHook:
    """The longest single call of a hook in the engine's step, over all lives of the pod."""

    name: str = ""
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything that was measured, while it is being measured."""

    oom_kills: int | None = None
    conversations_dropped: int = 0
    turns: Sequence[TurnFigures] = ()
    failures: Sequence[str] = ()
    retried: int = 0
    gulps: list[Gulp] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    full_disk: FullDisk | None = None
    killing: Killing | None = None
    hook: LongestHook = field(default_factory=LongestHook)
    core_wait_seconds: float = 0.0
    """The longest that the rehearsal itself, ready to run, had to wait for a core."""
    receipts: Sequence[Mapping[str, Any]] = ()
    skipped: list[str] = field(default_factory=list)
    """What was left out, each with its reason."""
    base_bytes: int = 0
    limit_bytes: int = 0
    parked_max_bytes: int = 0
    unpublished: frozenset[str] = frozenset()
    """Conversations whose first turn after the kill is not judged, because they were not wholly on disk."""
    seconds: float = 0.0
    broken: str = ""
    """How the pod ended by itself, where it did."""

    @property
    def revisits(self) -> list[TurnFigures]:
        """Later turns, but for those that a kill had the right to cost."""
        return [
            turn
            for turn in self.turns
            if turn.later and not (turn.after_restart and turn.conversation in self.unpublished)
        ]

    @property
    def cached_share(self) -> float:
        return cached_share(self.revisits)

    @property
    def releases(self) -> list[Mapping[str, Any]]:
        """Receipts of conversations that left RAM."""
        return releases(self.receipts)

    @property
    def written_first(self) -> int:
        return sum(receipt.get("outcome") in _SAFE_OUTCOMES for receipt in self.releases)

    @property
    def drops(self) -> list[Mapping[str, Any]]:
        """Receipts of losses; what a client deleted is none."""
        return [one for one in self.receipts if one["kind"] == "drop" and one.get("outcome") != _FORGOTTEN]


def releases(receipts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those among ``receipts`` by which a conversation left RAM."""
    return [one for one in receipts if one["kind"] == "evict" and one.get("tier") == "ram"]


def spread(seconds: Iterable[float | None]) -> dict[str, float]:
    """Median and maximum of those that there are; empty where there are none."""
    known = [one for one in seconds if one is not None]
    return {"median": statistics.median(known), "max": max(known)} if known else {}


def trims(receipts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Heap releases by process and allocator, from the receipts that tell of them."""
    by_heap: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for receipt in receipts:
        for heap in receipt.get("heaps") or ():
            by_heap.setdefault((str(heap["process"]), str(heap["allocator"])), []).append(heap)
    return [
        {
            "process": process,
            "allocator": allocator,
            "count": len(heaps),
            "median_seconds": statistics.median(float(heap["trim_seconds"]) for heap in heaps),
            "max_seconds": max(float(heap["trim_seconds"]) for heap in heaps),
            "released_bytes": sum(_given_back(heap) for heap in heaps),
        }
        for (process, allocator), heaps in sorted(by_heap.items())
    ]


def _given_back(heap: Mapping[str, Any]) -> int:
    return max(0, int(heap["resident_before_bytes"]) - int(heap["resident_after_bytes"]))


def resumed(turn: TurnFigures, on_disk_tokens: int) -> bool:
    """Whether a first turn after a kill found all that was on disk of what it could use."""
    return turn.cached_tokens >= min(turn.resumable_tokens, on_disk_tokens)
