"""How urgent letting go is, from one sample to the next, without an engine step.

Why it exists: a pod comes under pressure while its engine sleeps, and its limit is changed by others. Somebody must
look, and must not change its mind with every sample.

What must stay true: a level rises at once and falls only after it has been lower for a while (hysteresis); an
unknown reading changes no level, because unknown evicts nothing (G2); a limit that was changed by anybody is seen
at the next sample (M11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from parkade_cache.memory.pressure import Pressure, PressureLevel, PressureScope, pressure_level, stalls_count
from parkade_cache.memory.reading import Reading

CALM_S: Final = 2.0
"""How long a lower level must last before it counts."""

_BAND_DIVISOR: Final = 16

_GOING_ON_SHARE: Final = 0.01
"""Tasks that stalled for less than this share of the time since the last look do not stall any more."""

_RANK: Final = {PressureLevel.NONE: 0, PressureLevel.WARNING: 1, PressureLevel.CRITICAL: 2}


def relief_band_bytes(floor_bytes: int) -> int:
    """Bytes above the floor that relief aims for, so that the next allocation does not bring pressure back."""
    return floor_bytes // _BAND_DIVISOR


@dataclass(frozen=True, slots=True)
class Strain:
    """What the watch makes of one sample."""

    level: PressureLevel
    reading: Reading
    rose: bool
    """The level is higher than at the sample before."""
    limits_before_bytes: tuple[int, ...] | None
    """Limits in force before, where somebody has changed one since the last sample; None where nobody has."""
    limits_bytes: tuple[int, ...]
    short: bool
    """The reading itself asks for relief: less is available than the floor, and the band where a level has risen."""
    stalls: PressureScope | None
    """Whose tasks stall on memory now; None where nobody's do, or nobody can tell."""

    @property
    def stalls_of_neighbours(self) -> bool:
        """Only the machine's stalls say so, which may be another pod's: nobody's conversation goes for that."""
        return not self.short and self.stalls is PressureScope.MACHINE

    @property
    def asks(self) -> bool:
        """Whether something must be given back now; a level that is only waiting to fall asks for nothing."""
        return self.reading.known and self.level is not PressureLevel.NONE and (self.short or self.stalls is not None)

    @property
    def limits_changed(self) -> bool:
        return self.limits_before_bytes is not None


class PressureWatch:
    """Turns samples into levels. Pure but for what it remembers; not thread-safe, one thread watches."""

    def __init__(self) -> None:
        self.level = PressureLevel.NONE
        self._lower_since: float | None = None
        self._limits_bytes: tuple[int, ...] | None = None
        self._stalled: tuple[float, int] | None = None

    def look(
        self,
        *,
        reading: Reading,
        pressure: Pressure | None,
        limits_bytes: tuple[int, ...] | None,
        floor_bytes: int,
        now: float,
    ) -> Strain:
        """Note one sample; ``now`` is monotonic seconds. Limits that could not be read (None) count as unchanged."""
        before = self.level
        stalling = pressure if self._goes_on(pressure, now) else None
        if reading.known:
            self._settle(self._wanted(reading, stalling, floor_bytes), now)
        known_limits = self._limits_bytes
        if limits_bytes is not None:
            self._limits_bytes = limits_bytes
        changed = known_limits is not None and known_limits != self._limits_bytes
        wanted_bytes = floor_bytes if self.level is PressureLevel.NONE else floor_bytes + relief_band_bytes(floor_bytes)
        return Strain(
            level=self.level,
            reading=reading,
            rose=_RANK[self.level] > _RANK[before],
            limits_before_bytes=known_limits if changed else None,
            limits_bytes=self._limits_bytes or (),
            short=reading.available_bytes is not None and reading.available_bytes < wanted_bytes,
            stalls=stalling.scope if stalling is not None and stalls_count(stalling) else None,
        )

    def _goes_on(self, pressure: Pressure | None, now: float) -> bool:
        """Whether tasks still stall: the kernel's average remembers a stall for long after it has ended."""
        if pressure is None:
            self._stalled = None
            return False
        before, self._stalled = self._stalled, (now, pressure.some.total_us)
        if before is None:
            return True
        at, total_us = before
        return pressure.some.total_us - total_us >= _GOING_ON_SHARE * (now - at) * 1e6

    def _wanted(self, reading: Reading, pressure: Pressure | None, floor_bytes: int) -> PressureLevel:
        """The level this sample speaks for; once under pressure, the relief band must be free as well."""
        wanted = pressure_level(pressure, reading, floor_bytes=floor_bytes)
        if wanted is PressureLevel.NONE and self.level is not PressureLevel.NONE:
            return pressure_level(pressure, reading, floor_bytes=floor_bytes + relief_band_bytes(floor_bytes))
        return wanted

    def _settle(self, wanted: PressureLevel, now: float) -> None:
        if _RANK[wanted] >= _RANK[self.level]:
            self.level, self._lower_since = wanted, None
        elif self._lower_since is None:
            self._lower_since = now
        elif now - self._lower_since >= CALM_S:
            self.level, self._lower_since = wanted, None
