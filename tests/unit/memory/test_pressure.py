"""Case 60 and G2: how urgent letting go is, and that a kernel without an opinion has none."""

from __future__ import annotations

from typing import Any

import pytest

from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.pressure import (
    Pressure,
    PressureLevel,
    PressureSampler,
    PressureScope,
    Stall,
    parse_pressure,
    pressure_level,
)
from parkade_cache.memory.reading import Reading, ReadingSource, unknown

QUIET = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
BUSY = "some avg10=12.50 avg60=3.00 avg300=1.00 total=123456\nfull avg10=11.00 avg60=1.00 avg300=0.10 total=99\n"
PLENTY = Reading(100, ReadingSource.CGROUP)


def pressure(some: float, full: float | None, scope: PressureScope = PressureScope.GROUP) -> Pressure:
    return Pressure(scope, Stall(some, 0, 0, 0), None if full is None else Stall(full, 0, 0, 0))


def test_the_kernels_lines_are_parsed():
    parsed = parse_pressure(BUSY.encode(), PressureScope.GROUP)

    assert parsed.some == Stall(12.5, 3.0, 1.0, 123456)
    assert parsed.full == Stall(11.0, 1.0, 0.1, 99)


def test_a_kernel_that_does_not_tell_full_stalls_leaves_them_out():
    assert parse_pressure(QUIET.splitlines(keepends=True)[0].encode(), PressureScope.MACHINE).full is None


@pytest.mark.parametrize("text", [b"", b"some avg10=x\n", b"full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"])
def test_anything_else_is_an_error_of_its_own(text: bytes):
    with pytest.raises(MalformedAccountError):
        parse_pressure(text, PressureScope.GROUP)


def test_the_groups_own_pressure_is_preferred_to_the_machines(pod: Any):
    (pod.root / "proc/pressure").mkdir()
    (pod.root / "proc/pressure/memory").write_text(QUIET)
    assert PressureSampler(root=pod.root).sample().scope is PressureScope.MACHINE

    pod.v2_group("", pressure=BUSY)
    found = PressureSampler(root=pod.root).sample()
    assert (found.scope, found.some.avg10_percent) == (PressureScope.GROUP, 12.5)


def test_a_kernel_without_pressure_information_has_no_opinion(pod: Any, machine: Any):
    assert PressureSampler(root=pod.root).sample() is None


def test_unreadable_pressure_is_no_opinion_either(pod: Any):
    pod.v2_group("", pressure="nonsense")

    assert PressureSampler(root=pod.root).sample() is None


@pytest.mark.parametrize(
    ("available", "level"),
    [(50, PressureLevel.NONE), (49, PressureLevel.WARNING), (25, PressureLevel.WARNING), (24, PressureLevel.CRITICAL)],
)
def test_case_60_less_than_the_floor_is_a_warning_and_less_than_half_of_it_critical(
    available: int, level: PressureLevel
):
    assert pressure_level(None, Reading(available, ReadingSource.CGROUP), floor_bytes=50) is level


def test_case_60_stalls_count_although_there_is_room_on_paper():
    assert pressure_level(pressure(10, 0), PLENTY, floor_bytes=50) is PressureLevel.WARNING
    assert pressure_level(pressure(50, 10), PLENTY, floor_bytes=50) is PressureLevel.CRITICAL
    assert pressure_level(pressure(9.9, 9.9), PLENTY, floor_bytes=50) is PressureLevel.NONE


def test_case_60_stalls_of_the_machine_may_be_another_pods_and_are_never_critical():
    seen = pressure_level(pressure(50, 50, PressureScope.MACHINE), PLENTY, floor_bytes=50)

    assert seen is PressureLevel.WARNING


def test_g2_an_unknown_reading_alone_is_no_pressure():
    assert pressure_level(None, unknown("gone"), floor_bytes=50) is PressureLevel.NONE
