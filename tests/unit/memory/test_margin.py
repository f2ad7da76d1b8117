"""G11 and G13: a need includes what was learnt about earlier estimates; a restore knows its own bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkade_cache.memory.gate import Margin, NeedKind

UNHURRIED = settings(deadline=None)
"""Others may be using the processors: how long one example takes says nothing."""

BYTES = st.integers(min_value=0, max_value=1 << 45)


def test_g11_without_experience_a_need_is_what_was_estimated():
    assert Margin().apply(NeedKind.PARK, 1000) == 1000


def test_g11_a_measured_overshoot_is_added_at_once():
    margin = Margin()

    margin.observe(NeedKind.PARK, estimate_bytes=1000, actual_bytes=1250)

    assert margin.ratio(NeedKind.PARK) == pytest.approx(0.25)
    assert margin.apply(NeedKind.PARK, 2000) == 2500


def test_g11_estimates_that_hold_let_it_fade_slowly():
    margin = Margin()
    margin.observe(NeedKind.PARK, estimate_bytes=1000, actual_bytes=1500)

    margin.observe(NeedKind.PARK, estimate_bytes=1000, actual_bytes=1000)
    assert 0.4 < margin.ratio(NeedKind.PARK) < 0.5
    for _ in range(60):
        margin.observe(NeedKind.PARK, estimate_bytes=1000, actual_bytes=1000)
    assert margin.apply(NeedKind.PARK, 1000) <= 1001


def test_g11_one_absurd_measurement_does_not_close_the_gate():
    margin = Margin()

    margin.observe(NeedKind.PARK, estimate_bytes=1, actual_bytes=1 << 40)

    assert margin.apply(NeedKind.PARK, 1000) == 2000


def test_g13_a_restore_is_priced_with_its_own_bytes_whatever_was_learnt():
    margin = Margin()
    margin.observe(NeedKind.RESTORE, estimate_bytes=1000, actual_bytes=2000)
    margin.observe(NeedKind.PARK, estimate_bytes=1000, actual_bytes=2000)

    assert margin.apply(NeedKind.RESTORE, 1000) == 1000


@UNHURRIED
@given(observed=st.lists(st.tuples(BYTES, BYTES)), need=BYTES)
def test_g11_a_margin_never_shrinks_a_need_and_never_more_than_doubles_it(observed: list[tuple[int, int]], need: int):
    margin = Margin()
    for estimate, actual in observed:
        margin.observe(NeedKind.PARK, estimate_bytes=estimate, actual_bytes=actual)

    assert need <= margin.apply(NeedKind.PARK, need) <= 2 * need
