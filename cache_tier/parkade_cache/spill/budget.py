"""How much may be written, decided from numbers alone (D2): size, rolling write budget, capacity, free-space floor.

Pure: readings and clock come from outside. Budget is taken when a write is admitted and given back for what was not
written, so that two admitted writes never spend the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from parkade_cache.spill.clock import Clock
from parkade_cache.spill.files import Space

HOUR_SECONDS = 3600.0
DEFAULT_MIN_FREE_BYTES = 10 << 30
DEFAULT_MIN_FREE_PERCENT = 5


def min_free_bytes(configured: int | None, space: Space) -> int:
    """The free-space floor: as configured, else the larger of 10 GiB and 5 % (D2)."""
    if configured is not None:
        return configured
    return max(DEFAULT_MIN_FREE_BYTES, space.total_bytes * DEFAULT_MIN_FREE_PERCENT // 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceReading:
    """What is taken and what is left at one moment; ``unwritten_bytes`` are admitted but not on the device yet."""

    capacity_bytes: int
    used_bytes: int
    foreign_bytes: int
    reserved_bytes: int
    unwritten_bytes: int
    free_bytes: int
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """What is missing for a write; zero is enough."""

    capacity_bytes: int
    free_bytes: int

    @property
    def largest_bytes(self) -> int:
        """What must go so that the write fits."""
        return max(self.capacity_bytes, self.free_bytes)


def plan_space(reading: SpaceReading, nbytes: int) -> Shortage:
    """What a write of ``nbytes`` lacks. Foreign bytes count against the capacity (D1)."""
    taken = reading.used_bytes + reading.foreign_bytes + reading.reserved_bytes
    left = reading.free_bytes - reading.unwritten_bytes - reading.floor_bytes
    return Shortage(
        capacity_bytes=max(0, taken + nbytes - reading.capacity_bytes),
        free_bytes=max(0, nbytes - left),
    )


@dataclass(slots=True, eq=False)
class BudgetShare:
    """Bytes of the hourly budget that one write holds."""

    at_s: float
    nbytes: int


class WriteBudget:
    """At most so many bytes in any hour; None is no limit, 0 is no writes."""

    def __init__(self, per_hour_bytes: int | None, clock: Clock, *, kept_for_urgent_bytes: int = 0) -> None:
        """``kept_for_urgent_bytes`` of the budget are left by background writes for write-outs."""
        self._per_hour_bytes = per_hour_bytes
        self._kept_bytes = kept_for_urgent_bytes
        self._clock = clock
        self._shares: deque[BudgetShare] = deque()
        self._spent_bytes = 0

    def set_limit(self, per_hour_bytes: int | None) -> None:
        """Another limit from now on; what was spent within the hour stays spent."""
        self._per_hour_bytes = per_hour_bytes

    def seed(self, written: Iterable[tuple[float, int]]) -> None:
        """Count what an earlier process wrote: (seconds ago, bytes). A restart does not renew the budget."""
        now_s = self._clock.monotonic()
        for age_s, nbytes in sorted(written, reverse=True):
            self._add(BudgetShare(now_s - max(0.0, age_s), nbytes))

    def remaining_bytes(self) -> int | None:
        """What may still be written this hour; None without a limit."""
        if self._per_hour_bytes is None:
            return None
        self._forget_old()
        return max(0, self._per_hour_bytes - self._spent_bytes)

    def missing_bytes(self, nbytes: int, *, urgent: bool) -> int:
        """What the budget lacks for a write; 0 when it may go."""
        remaining = self.remaining_bytes()
        if remaining is None:
            return 0
        return max(0, nbytes - max(0, remaining - (0 if urgent else self._kept_bytes)))

    def take(self, nbytes: int) -> BudgetShare:
        """Spend; the caller has asked ``missing_bytes`` before."""
        share = BudgetShare(self._clock.monotonic(), nbytes)
        self._add(share)
        return share

    def settle(self, share: BudgetShare, written_bytes: int) -> None:
        """Correct a share to what was physically written."""
        if share in self._shares:
            self._spent_bytes += written_bytes - share.nbytes
        share.nbytes = written_bytes

    def _add(self, share: BudgetShare) -> None:
        self._shares.append(share)
        self._spent_bytes += share.nbytes

    def _forget_old(self) -> None:
        oldest_s = self._clock.monotonic() - HOUR_SECONDS
        while self._shares and self._shares[0].at_s <= oldest_s:
            self._spent_bytes -= self._shares.popleft().nbytes
