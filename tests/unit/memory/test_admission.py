"""M10 and case 3: what fits, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkade_cache.memory.reading import Reading, ReadingSource, admits, unknown

UNHURRIED = settings(deadline=None)
"""Others may be using the processors: how long one example takes says nothing."""

SIZES = st.integers(min_value=0, max_value=1 << 50)


def known(available_bytes: int) -> Reading:
    return Reading(available_bytes, ReadingSource.CGROUP)


@pytest.mark.parametrize(("available", "fits"), [(100, True), (99, False), (59, False)])
def test_case_3_exactly_need_and_floor_fits_and_one_byte_less_does_not(available: int, fits: bool):
    assert admits(known(available), need_bytes=40, floor_bytes=60) is fits


def test_m10_below_the_floor_nothing_fits_not_even_nothing():
    assert not admits(known(59), need_bytes=0, floor_bytes=60)
    assert admits(known(60), need_bytes=0, floor_bytes=60)


def test_m10_unknown_refuses_even_need_0():
    assert not admits(unknown("no telemetry"), need_bytes=0, floor_bytes=0)


@UNHURRIED
@given(available=SIZES, need=SIZES, floor=SIZES, reserved=SIZES)
def test_m10_and_g15_admission_is_the_same_as_the_sum_fitting(available: int, need: int, floor: int, reserved: int):
    fits = admits(known(available), need_bytes=need, floor_bytes=floor, reserved_bytes=reserved)

    assert fits is (need + floor + reserved <= available)
