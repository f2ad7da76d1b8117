"""How urgent letting go is: levels with hysteresis, changed limits, stalls (W4, M11, case 60)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from parkade_cache.memory.pressure import Pressure, PressureLevel, PressureScope, Stall
from parkade_cache.memory.reading import Reading, ReadingSource, unknown
from parkade_cache.memory.watch import CALM_S, PressureWatch, Strain, relief_band_bytes

MIB = 1 << 20
FLOOR = 160 * MIB
BAND = relief_band_bytes(FLOOR)


@dataclass
class Looking:
    """A watch and the time it is looked at."""

    watch: PressureWatch = field(default_factory=PressureWatch)
    now: float = 100.0
    limits: tuple[int, ...] | None = (1 << 30,)

    def at(self, available: int | None, *, after: float = 0.25, pressure: Pressure | None = None) -> Strain:
        self.now += after
        reading = unknown("test") if available is None else Reading(available, ReadingSource.CGROUP)
        return self.watch.look(
            reading=reading, pressure=pressure, limits_bytes=self.limits, floor_bytes=FLOOR, now=self.now
        )


@pytest.fixture
def looking() -> Looking:
    return Looking()


def stalls(
    percent: float, *, full: float = 0.0, scope: PressureScope = PressureScope.GROUP, total_us: int = 0
) -> Pressure:
    return Pressure(scope, Stall(percent, 0.0, 0.0, total_us), Stall(full, 0.0, 0.0, 0))


def test_a_level_rises_at_once(looking: Looking) -> None:
    assert looking.at(FLOOR).level is PressureLevel.NONE
    strain = looking.at(FLOOR - 1)
    assert (strain.level, strain.rose) == (PressureLevel.WARNING, True)
    strain = looking.at(FLOOR // 2 - 1)
    assert (strain.level, strain.rose) == (PressureLevel.CRITICAL, True)
    assert not looking.at(FLOOR // 2 - 1).rose


def test_a_level_falls_only_once_it_has_been_lower_for_a_while(looking: Looking) -> None:
    looking.at(FLOOR - 1)
    assert looking.at(FLOOR + BAND).level is PressureLevel.WARNING
    assert looking.at(FLOOR + BAND, after=CALM_S - 0.1).level is PressureLevel.WARNING
    assert looking.at(FLOOR + BAND, after=0.1).level is PressureLevel.NONE


def test_a_level_that_comes_back_meanwhile_starts_the_wait_anew(looking: Looking) -> None:
    looking.at(FLOOR - 1)
    looking.at(FLOOR + BAND)
    looking.at(FLOOR - 1)
    assert looking.at(FLOOR + BAND, after=CALM_S).level is PressureLevel.WARNING


def test_under_pressure_a_little_more_than_the_floor_must_be_free(looking: Looking) -> None:
    looking.at(FLOOR - 1)
    for _ in range(20):
        assert looking.at(FLOOR + BAND - 1).level is PressureLevel.WARNING


def test_g2_an_unknown_reading_changes_no_level(looking: Looking) -> None:
    assert looking.at(None).level is PressureLevel.NONE
    looking.at(FLOOR - 1)
    strain = looking.at(None, after=10 * CALM_S)
    assert (strain.level, strain.rose, strain.reading.known) == (PressureLevel.WARNING, False, False)


def test_m11_a_limit_changed_by_anybody_is_seen_once(looking: Looking) -> None:
    assert not looking.at(FLOOR).limits_changed
    looking.limits = (1 << 29,)
    strain = looking.at(FLOOR)
    assert (strain.limits_before_bytes, strain.limits_bytes) == ((1 << 30,), (1 << 29,))
    assert not looking.at(FLOOR).limits_changed


def test_the_groups_own_stalls_count_although_the_reading_is_good(looking: Looking) -> None:
    strain = looking.at(10 * FLOOR, pressure=stalls(20.0))
    assert (strain.level, strain.asks, strain.stalls_of_neighbours) == (PressureLevel.WARNING, True, False)
    strain = looking.at(10 * FLOOR, pressure=stalls(20.0, full=20.0, total_us=200_000))
    assert strain.level is PressureLevel.CRITICAL


def test_a_stall_that_has_ended_asks_for_nothing_although_the_average_remembers_it(looking: Looking) -> None:
    looking.at(10 * FLOOR, pressure=stalls(40.0, total_us=900_000))
    for _ in range(40):
        strain = looking.at(10 * FLOOR, pressure=stalls(40.0, total_us=900_000))
        assert not strain.asks
    assert strain.level is PressureLevel.NONE


def test_a_level_that_only_waits_to_fall_asks_for_nothing(looking: Looking) -> None:
    assert looking.at(FLOOR - 1).asks
    calm = stalls(0.0)
    strain = looking.at(FLOOR + BAND, pressure=calm)
    assert (strain.level, strain.asks) == (PressureLevel.WARNING, False)
    assert looking.at(FLOOR + BAND - 1, pressure=calm).asks


def test_limits_that_cannot_be_read_just_now_have_not_changed(looking: Looking) -> None:
    looking.at(FLOOR)
    before, looking.limits = looking.limits, None
    assert not looking.at(FLOOR).limits_changed
    looking.limits = before
    assert not looking.at(FLOOR).limits_changed


def test_the_machines_stalls_alone_are_marked_as_perhaps_a_neighbours(looking: Looking) -> None:
    strain = looking.at(10 * FLOOR, pressure=stalls(90.0, full=90.0, scope=PressureScope.MACHINE))
    assert (strain.level, strain.stalls_of_neighbours) == (PressureLevel.WARNING, True)
    strain = looking.at(FLOOR - 1, pressure=stalls(90.0, scope=PressureScope.MACHINE))
    assert not strain.stalls_of_neighbours
