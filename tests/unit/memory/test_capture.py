"""G10, G11 and cases 27 and 28: after a capture the floor and the budget are checked again."""

from __future__ import annotations

from parkade_cache.ids import ConversationId
from parkade_cache.memory.gate import (
    NOTHING_DONE,
    UNBOUNDED,
    Admit,
    Budget,
    Capture,
    Drop,
    Evict,
    GateProgress,
    HandToDisk,
    RefusalReason,
    Refuse,
    Release,
    ReleaseScope,
    Victim,
    plan_after_capture,
)
from parkade_cache.memory.reading import Reading, ReadingSource, unknown

MIB = 1 << 20
FRESH = ConversationId("fresh")
RELEASED = GateProgress(releases=1, everything_released=True)


def fresh(*, mib: int = 50, disk: bool = True, floor_mib: int = 100) -> Capture:
    return Capture(conversation=FRESH, parked_bytes=mib * MIB, floor_bytes=floor_mib * MIB, disk_takes_it=disk)


def after(
    capture: Capture,
    reading: Reading | int,
    *,
    others: int = 0,
    progress: GateProgress = NOTHING_DONE,
    budget: Budget = UNBOUNDED,
):
    """``others`` conversations of 10 MiB each; a reading given in MiB is known."""
    return plan_after_capture(
        capture,
        reading=Reading(reading * MIB, ReadingSource.CGROUP) if isinstance(reading, int) else reading,
        reserved_bytes=0,
        budget=budget,
        others=[Victim(conversation=ConversationId(f"c{n}"), freeable_bytes=10 * MIB) for n in range(others)],
        progress=progress,
    )


def test_g10_a_floor_that_holds_needs_nothing():
    assert after(fresh(), 100, others=3) == Admit()


def test_g10_short_means_a_release_before_anything_else():
    assert after(fresh(), 99, others=3) == Release(ReleaseScope.EVERYTHING)


def test_g10_then_the_oldest_others_go_and_the_fresh_one_stays():
    step = after(fresh(), 85, others=3, progress=RELEASED)
    assert step == Evict(ConversationId("c0"))

    progress = RELEASED.after(step)
    assert after(fresh(), 85, others=3, progress=progress) == Release(ReleaseScope.EXTENTS)
    assert after(fresh(), 95, others=3, progress=progress.after(Release(ReleaseScope.EXTENTS))) == Evict(
        ConversationId("c1")
    )


def test_g10_only_when_the_others_do_not_suffice_the_fresh_one_goes_to_disk_and_nobody_else():
    assert after(fresh(), 60, others=3, progress=RELEASED) == HandToDisk(FRESH, RefusalReason.LOW_MEMORY)


def test_g10_the_fresh_one_itself_is_never_among_the_others():
    step = plan_after_capture(
        fresh(),
        reading=Reading(0, ReadingSource.CGROUP),
        reserved_bytes=0,
        budget=UNBOUNDED,
        others=[Victim(conversation=FRESH, freeable_bytes=1000 * MIB)],
        progress=RELEASED,
    )

    assert step == HandToDisk(FRESH, RefusalReason.LOW_MEMORY)


def test_g10_with_the_fresh_one_gone_and_the_floor_still_broken_others_go_as_far_as_it_helps():
    gone = RELEASED.after(HandToDisk(FRESH, RefusalReason.LOW_MEMORY)).after(Release(ReleaseScope.EXTENTS))

    assert after(fresh(), 60, others=3, progress=gone) == Evict(ConversationId("c0"))
    assert after(fresh(), 60, others=0, progress=gone) == Refuse(
        RefusalReason.LOW_MEMORY, missing_bytes=40 * MIB, evictable_bytes=0
    )


def test_g10_bytes_promised_to_others_come_off_the_reading_after_a_capture_too():
    step = plan_after_capture(
        fresh(),
        reading=Reading(100 * MIB, ReadingSource.CGROUP),
        reserved_bytes=1,
        budget=UNBOUNDED,
        others=[],
    )

    assert step == Release(ReleaseScope.EVERYTHING)


def test_case_27_unknown_after_a_capture_evicts_nothing_and_hands_the_fresh_one_to_disk():
    step = after(fresh(), unknown("gone"), others=3)

    assert step == HandToDisk(FRESH, RefusalReason.UNKNOWN_READING)
    assert after(fresh(), unknown("gone"), others=3, progress=NOTHING_DONE.after(step)) == Refuse(
        RefusalReason.UNKNOWN_READING
    )


def test_case_27_where_no_disk_takes_it_it_is_dropped_as_a_stated_decision():
    assert after(fresh(disk=False), unknown("gone"), others=3) == Drop(FRESH, RefusalReason.UNKNOWN_READING)


def test_case_28_a_capture_larger_than_its_estimate_evicts_the_oldest_for_the_budget():
    budget = Budget(parked_bytes=105 * MIB, parked_max_bytes=100 * MIB)

    assert after(fresh(), 500, others=3, budget=budget) == Evict(ConversationId("c0"))


def test_case_28_one_over_the_whole_budget_evicts_nothing_and_goes_to_disk_itself():
    budget = Budget(parked_bytes=105 * MIB, parked_max_bytes=40 * MIB)

    assert after(fresh(mib=50), 500, others=10, budget=budget) == HandToDisk(FRESH, RefusalReason.OVER_BUDGET)


def test_case_28_a_budget_that_the_others_cannot_meet_sends_the_fresh_one_to_disk():
    budget = Budget(parked_bytes=150 * MIB, parked_max_bytes=100 * MIB)

    assert after(fresh(), 500, others=3, budget=budget) == HandToDisk(FRESH, RefusalReason.BUDGET)


def test_g8_the_count_of_conversations_is_checked_after_a_capture_too():
    budget = Budget(parked_bytes=0, parked_max_bytes=100 * MIB, conversations=4, max_conversations=3)

    assert after(fresh(), 500, others=3, budget=budget) == Evict(ConversationId("c0"))
