"""Slots: one extent one owner, every slot used once, and what is promised is known to the byte."""

from __future__ import annotations

import pytest

from parkade_cache.ids import ConversationId
from parkade_cache.slots import PAGE_BYTES, Geometry, SlotMap

A, B = ConversationId("a"), ConversationId("b")
PER = 4


@pytest.fixture
def slots() -> SlotMap:
    return SlotMap(Geometry(slot_bytes=PAGE_BYTES, slots_per_extent=PER, extent_bytes=PER * PAGE_BYTES, ranks=2))


def test_a_conversation_has_no_slot_before_it_was_granted_an_extent(slots: SlotMap) -> None:
    assert slots.take(A) == -1
    assert slots.take_many(A, 3) == []
    assert slots.free_slots(A) == 0


def test_slots_are_handed_out_once_and_in_order(slots: SlotMap) -> None:
    slots.committed(slots.grant(A, 2))
    taken = slots.take_many(A, 6)
    assert len(set(taken)) == 6
    assert slots.take_many(A, 6) == [slot for slot in range(2 * PER) if slot not in taken][:2]
    assert slots.take(A) == -1
    assert slots.used_slots == 2 * PER


def test_two_conversations_share_no_extent(slots: SlotMap) -> None:
    slots.grant(A, 1)
    slots.grant(B, 1)
    a, b = slots.take_many(A, PER), slots.take_many(B, PER)
    assert {slots.extent_of(slot) for slot in a}.isdisjoint(slots.extent_of(slot) for slot in b)


def test_g15_what_is_granted_and_not_committed_is_reserved_for_all_ranks(slots: SlotMap) -> None:
    fresh = slots.grant(A, 3)
    assert slots.reserved_bytes() == 3 * PER * PAGE_BYTES * 2
    slots.committed(fresh[:2])
    assert slots.reserved_bytes() == PER * PAGE_BYTES * 2
    assert slots.held_bytes() == 3 * PER * PAGE_BYTES * 2


def test_an_extent_is_released_only_when_no_slot_of_it_is_used(slots: SlotMap) -> None:
    (extent,) = slots.grant(A, 1)
    slots.committed([extent])
    one, two = slots.take_many(A, 2)
    slots.put(one)
    assert slots.take_empty() == ()
    slots.put(two)
    assert slots.empty_extents == 1
    assert slots.take_empty() == (extent,)
    assert slots.held_extents == 0


def test_a_slot_put_back_can_be_taken_again_by_its_owner(slots: SlotMap) -> None:
    slots.committed(slots.grant(A, 1))
    taken = slots.take_many(A, PER)
    slots.put(taken[0])
    slots.put(taken[2])
    assert {slots.take(A), slots.take(A)} == {taken[0], taken[2]}


def test_empty_extents_are_granted_before_new_ones_are_committed(slots: SlotMap) -> None:
    (extent,) = slots.grant(A, 1)
    slots.committed([extent])
    slots.put(slots.take(A))
    fresh = slots.grant(B, 2)
    assert len(fresh) == 1
    assert extent not in fresh
    assert slots.free_slots(B) == 2 * PER
    assert slots.free_slots(A) == 0


def test_abandoning_gives_back_extents_that_hold_nothing_and_keeps_the_others(slots: SlotMap) -> None:
    slots.committed(slots.grant(A, 3))
    slots.take_many(A, 1)
    slots.abandon(A)
    assert slots.empty_extents == 2
    assert slots.free_slots(A) == PER - 1


def test_numbers_of_released_extents_are_used_again_only_once_the_arenas_have_released_them(slots: SlotMap) -> None:
    (extent,) = slots.grant(A, 1)
    slots.committed([extent])
    slots.abandon(A)
    slots.take_empty()
    assert slots.grant(B, 1) != (extent,)
    slots.released([extent])
    assert slots.grant(B, 1) == (extent,)


def test_an_extent_that_is_still_being_committed_is_not_released(slots: SlotMap) -> None:
    fresh = slots.grant(A, 1)
    slots.abandon(A)
    assert slots.take_empty() == ()
    slots.committed(fresh)
    assert slots.take_empty() == fresh


def test_some_empty_extents_can_be_kept(slots: SlotMap) -> None:
    slots.committed(slots.grant(A, 3))
    slots.abandon(A)
    assert len(slots.take_empty(keep=1)) == 2
    assert slots.empty_extents == 1


def test_extents_that_could_not_be_committed_leave_unless_a_block_was_promised_one(slots: SlotMap) -> None:
    fresh = slots.grant(A, 2)
    slot = slots.take(A)
    leaving = slots.uncommitted(fresh)
    assert leaving == tuple(extent for extent in fresh if extent != slots.extent_of(slot))
    assert slots.reserved_bytes() == 0
    slots.put(slot)
    assert slots.take_empty() == (slots.extent_of(slot),)
    assert slots.held_extents == 0


def test_the_shape_covers_a_block_in_whole_pages() -> None:
    geometry = Geometry.plan(block_bytes=3 * PAGE_BYTES - 1, parked_max_bytes=1 << 30, ranks=2)
    assert geometry.slot_bytes == 3 * PAGE_BYTES
    assert geometry.pod_slot_bytes == 6 * PAGE_BYTES
    assert geometry.extent_bytes >= geometry.slots_per_extent * geometry.slot_bytes
    assert geometry.pod_extent_bytes == 2 * geometry.extent_bytes
