"""How slots are laid into extents: whole slots, little waste, and a tiny budget can be given back in parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkade_cache.arena import EXTENT_TARGET_BYTES, HUGE_PAGE_BYTES, PAGE_BYTES, plan_extents

UNHURRIED = settings(deadline=None)
"""Others may be using the processors: how long one example takes says nothing."""

MIB = 1 << 20
GIB = 1 << 30

SLOTS = st.integers(min_value=1, max_value=40 * MIB // PAGE_BYTES).map(lambda pages: pages * PAGE_BYTES)
BUDGETS = st.integers(min_value=0, max_value=64 * GIB)


@UNHURRIED
@given(slot_bytes=SLOTS, budget_bytes=BUDGETS)
def test_an_extent_holds_whole_slots_and_wastes_at_most_a_sixteenth(slot_bytes: int, budget_bytes: int):
    shape = plan_extents(slot_bytes=slot_bytes, budget_bytes=budget_bytes)

    assert shape.slots >= 1
    assert shape.extent_bytes % PAGE_BYTES == 0
    assert 0 <= shape.waste_bytes <= shape.extent_bytes / 16


@UNHURRIED
@given(slot_bytes=SLOTS, budget_bytes=st.integers(min_value=GIB, max_value=64 * GIB))
def test_extents_of_an_ordinary_budget_are_near_the_target(slot_bytes: int, budget_bytes: int):
    shape = plan_extents(slot_bytes=slot_bytes, budget_bytes=budget_bytes)

    assert shape.slots * slot_bytes <= max(EXTENT_TARGET_BYTES, slot_bytes)
    assert shape.slots * slot_bytes >= min(EXTENT_TARGET_BYTES // 4, slot_bytes)


def test_slots_that_fill_huge_pages_use_them_without_waste():
    shape = plan_extents(slot_bytes=512 * 1024, budget_bytes=GIB)

    assert (shape.slots, shape.extent_bytes, shape.waste_bytes) == (64, EXTENT_TARGET_BYTES, 0)


def test_odd_slots_are_grouped_so_that_rounding_wastes_little():
    """Blocks of 128 tokens of a small model: 2.95 MB."""
    shape = plan_extents(slot_bytes=2953216, budget_bytes=GIB)

    assert shape.extent_bytes % HUGE_PAGE_BYTES == 0
    assert shape.waste_bytes < shape.extent_bytes / 50


def test_slots_that_no_rounding_suits_use_plain_pages():
    slot_bytes = 20 * MIB + PAGE_BYTES
    shape = plan_extents(slot_bytes=slot_bytes, budget_bytes=GIB)

    assert (shape.slots, shape.extent_bytes) == (1, slot_bytes)


@pytest.mark.parametrize("budget_mib", [16, 32, 64, 128])
def test_a_tiny_budget_is_cut_into_several_extents(budget_mib: int):
    shape = plan_extents(slot_bytes=512 * 1024, budget_bytes=budget_mib * MIB)

    assert budget_mib * MIB // shape.extent_bytes >= 8


def test_a_slot_larger_than_the_target_gets_an_extent_of_its_own():
    assert plan_extents(slot_bytes=100 * MIB, budget_bytes=GIB).slots == 1


@pytest.mark.parametrize("slot_bytes", [0, -4096, 4095])
def test_slots_that_are_not_whole_pages_are_refused(slot_bytes: int):
    with pytest.raises(ValueError, match="multiple"):
        plan_extents(slot_bytes=slot_bytes, budget_bytes=GIB)
