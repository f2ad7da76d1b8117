"""How much may be written, from numbers alone (D2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_cache.spill.budget import Shortage, SpaceReading, WriteBudget, min_free_bytes, plan_space
from parkade_cache.spill.files import Space
from parkade_cache.spill.testing import FakeClock

GIB = 1 << 30


@pytest.mark.parametrize(
    ("configured", "total_bytes", "floor_bytes"),
    [(None, 100 * GIB, 10 * GIB), (None, 1000 * GIB, 50 * GIB), (0, 1000 * GIB, 0), (7, 1000 * GIB, 7)],
)
def test_the_floor_is_the_configured_one_or_the_larger_of_10_gib_and_5_percent(
    configured: int | None, total_bytes: int, floor_bytes: int
) -> None:
    """D2."""
    assert min_free_bytes(configured, Space(total_bytes, 0)) == floor_bytes


def reading(**fields: int) -> SpaceReading:
    defaults = {
        "capacity_bytes": 100,
        "used_bytes": 0,
        "foreign_bytes": 0,
        "reserved_bytes": 0,
        "unwritten_bytes": 0,
        "free_bytes": 1000,
        "floor_bytes": 0,
    }
    return SpaceReading(**(defaults | fields))


def test_exactly_what_is_left_fits_and_one_byte_more_does_not() -> None:
    """D2."""
    assert plan_space(reading(used_bytes=40, foreign_bytes=20, reserved_bytes=10), 30) == Shortage(0, 0)
    assert plan_space(reading(used_bytes=40, foreign_bytes=20, reserved_bytes=10), 31) == Shortage(1, 0)


def test_admitted_bytes_that_are_not_on_the_device_yet_are_not_free() -> None:
    """D2: the file system does not know of them."""
    assert plan_space(reading(free_bytes=50, floor_bytes=10, unwritten_bytes=20), 20) == Shortage(0, 0)
    assert plan_space(reading(free_bytes=50, floor_bytes=10, unwritten_bytes=20), 21) == Shortage(0, 1)


def test_free_space_below_the_floor_is_missing_as_well() -> None:
    assert plan_space(reading(free_bytes=5, floor_bytes=10), 1) == Shortage(0, 6)


def test_the_budget_rolls_over_any_hour() -> None:
    """D2: not a counter that is reset at full hours."""
    clock = FakeClock()
    budget = WriteBudget(100, clock)
    budget.take(60)
    clock.advance(1800)
    budget.take(40)
    assert budget.missing_bytes(1, urgent=True) == 1
    clock.advance(1799)
    assert budget.remaining_bytes() == 0
    clock.advance(1)
    assert budget.remaining_bytes() == 60
    clock.advance(1800)
    assert budget.remaining_bytes() == 100


def test_a_failed_write_gives_back_what_did_not_reach_the_device() -> None:
    """D2: physical bytes only."""
    budget = WriteBudget(100, FakeClock())
    share = budget.take(80)
    budget.settle(share, 30)
    assert budget.remaining_bytes() == 70


def test_a_write_that_ends_after_its_hour_changes_nothing() -> None:
    clock = FakeClock()
    budget = WriteBudget(100, clock)
    share = budget.take(80)
    clock.advance(3600)
    assert budget.remaining_bytes() == 100
    budget.settle(share, 0)
    assert budget.remaining_bytes() == 100


def test_a_restart_does_not_renew_the_budget() -> None:
    clock = FakeClock()
    budget = WriteBudget(100, clock)
    budget.seed([(10.0, 30), (3000.0, 50), (3600.0, 500), (-5.0, 5)])
    assert budget.remaining_bytes() == 15
    clock.advance(600)
    assert budget.remaining_bytes() == 65


def test_no_limit_is_not_a_limit_of_zero() -> None:
    clock = FakeClock()
    assert WriteBudget(None, clock).missing_bytes(1 << 60, urgent=False) == 0
    assert WriteBudget(0, clock).missing_bytes(1, urgent=True) == 1


def test_background_writes_leave_what_is_kept_for_write_outs() -> None:
    """W1: a write-out overtakes the background."""
    budget = WriteBudget(100, FakeClock(), kept_for_urgent_bytes=25)
    assert budget.missing_bytes(80, urgent=False) == 5
    assert budget.missing_bytes(80, urgent=True) == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 60)),
            st.tuples(st.just("settle"), st.integers(0, 60)),
            st.tuples(st.just("wait"), st.integers(0, 3000)),
        ),
        max_size=60,
    )
)
def test_no_hour_ever_sees_more_than_the_budget(steps: list[tuple[str, int]]) -> None:
    """D2, against a plain list of what was written when."""
    clock = FakeClock()
    budget = WriteBudget(100, clock)
    shares, written = [], []
    for what, number in steps:
        if what == "wait":
            clock.advance(number)
        elif what == "take" and budget.missing_bytes(number, urgent=True) == 0:
            shares.append(budget.take(number))
            written.append([clock.monotonic(), number])
        elif what == "settle" and shares:
            kept = min(number, shares[-1].nbytes)
            budget.settle(shares[-1], kept)
            written[-1][1] = kept
        last_hour = sum(nbytes for at_s, nbytes in written if at_s > clock.monotonic() - 3600)
        assert budget.remaining_bytes() == 100 - last_hour
        assert last_hour <= 100
