"""G1 to G9, G13 to G15 and cases 13 to 16, 19, 21, 22, 58, 68, 70: the gate against a simulated host."""

from __future__ import annotations

from typing import Any

import pytest

from parkade_cache.ids import ConversationId
from parkade_cache.memory.gate import (
    UNBOUNDED,
    Admit,
    AwaitWrites,
    Budget,
    Candidate,
    Evict,
    GateProgress,
    GateRequest,
    NeedKind,
    RefusalReason,
    Refuse,
    Release,
    ReleaseScope,
    Reservations,
    Victim,
    decide,
    plan,
)
from parkade_cache.memory.reading import Reading, ReadingSource, unknown

MIB = 1 << 20


def park(need_mib: int, *, floor_mib: int = 0, **more: int | bool) -> GateRequest:
    return GateRequest(
        kind=NeedKind.PARK,
        need_bytes=need_mib * MIB,
        floor_bytes=floor_mib * MIB,
        parked_need_bytes=need_mib * MIB,
        parked_conversations=1,
        **more,
    )


def known(mib: int) -> Reading:
    return Reading(mib * MIB, ReadingSource.CGROUP)


def victim(name: str, mib: int) -> Victim:
    return Victim(conversation=ConversationId(name), freeable_bytes=mib * MIB)


def test_case_13_g1_a_reading_that_fits_admits_without_release_or_eviction(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=100 * MIB, parked=conversations(4))

    decision = decide(park(40, floor_mib=60), host)

    assert decision.admitted
    assert host.log == ["read"]
    assert host.victims_asked == 0, "nobody has to go, so nobody is looked for"


def test_g2_an_unknown_reading_refuses_with_no_release_and_no_eviction(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=1 << 40, parked=conversations(4), held_bytes=1 << 30, unknown_from=1)

    decision = decide(park(0), host)

    assert decision.outcome == Refuse(RefusalReason.UNKNOWN_READING)
    assert host.log == ["read"]


def test_case_14_g3_a_shortage_that_freed_heap_covers_costs_one_release_and_no_eviction(
    simulated_host: Any, conversations: Any
):
    host = simulated_host(available_bytes=4501 * MIB, held_bytes=1024 * MIB, parked=conversations(4, extents=64))

    decision = decide(park(1483, floor_mib=3072), host)

    assert decision.admitted
    assert host.log == ["read", "release", "read"]
    assert host.victims_asked == 0
    assert decision.released_bytes == 1024 * MIB
    assert (decision.before.available_bytes, decision.after.available_bytes) == (4501 * MIB, 5525 * MIB)


def test_case_15_g5_short_by_more_than_everything_evictable_costs_one_release_and_no_eviction(
    simulated_host: Any, conversations: Any
):
    host = simulated_host(available_bytes=100 * MIB, parked=conversations(4, extents=10))

    decision = decide(park(141), host)

    assert host.log == ["read", "release", "read"]
    assert decision.outcome == Refuse(RefusalReason.LOW_MEMORY, missing_bytes=41 * MIB, evictable_bytes=40 * MIB)
    assert decide(park(140), host).admitted, "one less is exactly what eviction can free"


@pytest.mark.parametrize(("missing_mib", "evicted"), [(1, 1), (10, 1), (11, 2), (30, 3), (40, 4)])
def test_case_16_g6_the_minimum_number_goes_oldest_first_on_a_host_that_shows_a_drop_only_after_release(
    simulated_host: Any, conversations: Any, missing_mib: int, evicted: int
):
    host = simulated_host(available_bytes=100 * MIB, parked=conversations(4, extents=10))

    decision = decide(park(100 + missing_mib), host)

    assert decision.admitted
    assert host.evicted == [f"c{index}" for index in range(evicted)]
    assert decision.progress.evicted == tuple(host.evicted)


def test_g6_every_eviction_is_followed_by_a_release_before_the_next_one(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=0, parked=conversations(3))

    decide(park(2), host)

    steps = [entry for entry in host.log if entry != "read"]
    assert steps == ["release", "evict c0", "release", "evict c1", "release"]


@pytest.mark.parametrize("returns", [0.5, 0.2, 0.0])
def test_g5_on_a_host_that_returns_only_a_part_the_gate_refuses_as_soon_as_the_rest_cannot_cover_it(
    simulated_host: Any, conversations: Any, returns: float
):
    """The test is repeated after each reading against what is still evictable, so a lying host ends it early."""
    host = simulated_host(available_bytes=0, parked=conversations(10, extents=10), returns=returns)

    decision = decide(park(100), host)

    assert not decision.admitted
    assert host.evicted == ["c0"], "all ten were needed, so one that frees too little settles it"


def test_g6_on_a_host_that_returns_half_twice_as_many_go(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=0, parked=conversations(10, extents=10), returns=0.5)

    decision = decide(park(30), host)

    assert decision.admitted
    assert 3 < len(host.evicted) <= 6


def test_case_19_g8_another_process_that_takes_what_each_eviction_frees_ends_in_a_refusal_with_counts(
    simulated_host: Any, conversations: Any
):
    host = simulated_host(
        available_bytes=0, parked=conversations(6, extents=10), taken_by_others=lambda available: available
    )

    decision = decide(park(10), host)

    assert not decision.admitted
    assert decision.reason == "low_memory"
    assert len(decision.progress.evicted) == len(set(decision.progress.evicted)) == 6
    assert decision.progress.releases == 7
    assert decision.released_bytes == 60 * MIB


def test_case_21_g4_pinned_conversations_stay_and_the_oldest_other_goes(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=0, parked=conversations(4, pinned=2))

    assert decide(park(1), host).admitted
    assert host.evicted == ["c2"]


def test_case_21_g4_with_only_pinned_ones_left_it_refuses_without_eviction(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=0, parked=conversations(4, pinned=4))

    decision = decide(park(1), host)

    assert decision.outcome == Refuse(RefusalReason.LOW_MEMORY, missing_bytes=MIB, evictable_bytes=0)
    assert host.evicted == []


def test_case_22_under_the_floor_with_nothing_parked_it_releases_and_refuses(simulated_host: Any):
    host = simulated_host(available_bytes=10 * MIB)

    decision = decide(park(0, floor_mib=60), host)

    assert not decision.admitted
    assert host.log == ["read", "release", "read"]


def test_case_58_g4_the_chain_that_the_prompt_extends_is_never_taken(simulated_host: Any):
    incoming, other = (
        Candidate(
            conversation=ConversationId(name), extents=frozenset({n}), idle_seconds=n, published=True, incoming=n == 9
        )
        for name, n in (("a", 9), ("b", 1))
    )
    host = simulated_host(available_bytes=0, parked=[incoming, other])

    assert decide(park(1), host).admitted
    assert host.evicted == ["b"]
    assert not decide(park(3), host).admitted
    assert host.evicted == ["b"]


def test_case_55_w5_one_that_became_busy_is_passed_over_listed_and_not_asked_again(
    simulated_host: Any, conversations: Any
):
    host = simulated_host(available_bytes=0, parked=conversations(3), busy_at_eviction=frozenset({"c0"}))

    decision = decide(park(1), host)

    assert decision.admitted
    assert decision.progress.passed_over == ("c0",)
    assert decision.progress.evicted == ("c1",)


@pytest.mark.parametrize("last_known", [1, 2, 3, 4])
def test_g7_a_reading_that_turns_unknown_ends_the_loop_and_nothing_more_goes(
    simulated_host: Any, conversations: Any, last_known: int
):
    host = simulated_host(available_bytes=0, parked=conversations(10), unknown_from=last_known + 1)

    decision = decide(park(10), host)

    assert decision.reason == "unknown_reading"
    assert host.log[-1] == "read"
    assert len(host.evicted) == last_known // 2, "a release is read between two evictions"


def test_g8_budget_and_memory_are_planned_together_so_no_eviction_for_the_budget_precedes_a_refusal(
    simulated_host: Any, conversations: Any
):
    """Two evictions would satisfy the budget, but memory is short by more than all four: nobody goes."""
    host = simulated_host(
        available_bytes=0,
        parked=conversations(4, extents=10),
        limits=Budget(parked_bytes=0, parked_max_bytes=60 * MIB),
    )

    decision = decide(park(41), host)

    assert decision.reason == "low_memory"
    assert host.evicted == []


def test_g8_a_budget_that_is_short_evicts_the_minimum_without_any_release_before(
    simulated_host: Any, conversations: Any
):
    host = simulated_host(
        available_bytes=1000 * MIB,
        parked=conversations(4, extents=10),
        limits=Budget(parked_bytes=0, parked_max_bytes=50 * MIB),
    )

    decision = decide(park(25), host)

    assert decision.admitted
    assert host.evicted == ["c0", "c1"]
    assert host.log[:2] == ["read", "evict c0"]


def test_g3_memory_that_runs_short_after_an_eviction_for_the_budget_still_gets_its_one_full_release():
    for_the_budget = GateProgress().after(Evict(ConversationId("a"))).after(Release(ReleaseScope.EXTENTS))

    step = plan(park(10), reading=known(9), reserved_bytes=0, budget=UNBOUNDED, victims=[], progress=for_the_budget)

    assert step == Release(ReleaseScope.EVERYTHING)


def test_g8_a_budget_that_eviction_cannot_meet_refuses_with_0_evictions(simulated_host: Any, conversations: Any):
    host = simulated_host(
        available_bytes=1000 * MIB,
        parked=conversations(4, extents=10, pinned=3),
        limits=Budget(parked_bytes=0, parked_max_bytes=50 * MIB),
    )

    decision = decide(park(25), host)

    assert decision.reason == "budget"
    assert host.evicted == []


def test_g8_the_count_of_conversations_is_a_budget_as_well(simulated_host: Any, conversations: Any):
    host = simulated_host(
        available_bytes=1000 * MIB,
        parked=conversations(4),
        limits=Budget(parked_bytes=0, parked_max_bytes=1000 * MIB, max_conversations=3),
    )

    assert decide(park(1), host).admitted
    assert host.evicted == ["c0", "c1"]


def test_g8_a_conversation_that_frees_nothing_is_not_evicted_for_bytes(simulated_host: Any):
    """Everything of c0 lies in extents that a pinned one needs: its loss would help nobody."""
    shared, own = frozenset({1}), frozenset({2})
    c0, pinned, c1 = (
        Candidate(conversation=ConversationId(name), extents=extents, idle_seconds=idle, published=True, pinned=pin)
        for name, extents, idle, pin in (("c0", shared, 9, False), ("p", shared, 8, True), ("c1", own, 7, False))
    )
    host = simulated_host(available_bytes=0, parked=[c0, pinned, c1])

    assert decide(park(1), host).admitted
    assert host.evicted == ["c1"]


def test_g9_memory_held_by_a_write_is_waited_for_before_anything_is_evicted(simulated_host: Any, conversations: Any):
    host = simulated_host(
        available_bytes=0, parked=conversations(4), in_flight_bytes=5 * MIB, wait_lets_go_bytes=5 * MIB
    )

    decision = decide(park(5), host)

    assert decision.admitted
    assert host.log == ["read", "release", "read", "wait", "read", "release", "read"]


def test_g9_memory_held_by_a_write_is_waited_for_before_a_refusal(simulated_host: Any):
    host = simulated_host(available_bytes=0, in_flight_bytes=5 * MIB, wait_lets_go_bytes=5 * MIB)

    assert decide(park(5), host).admitted


def test_g9_a_write_that_never_lets_go_is_waited_for_at_most_once_per_eviction(simulated_host: Any, conversations: Any):
    host = simulated_host(
        available_bytes=0,
        parked=conversations(3),
        in_flight_bytes=50 * MIB,
        wait_lets_go_bytes=0,
        taken_by_others=lambda available: available,
    )

    decision = decide(park(1), host)

    assert not decision.admitted
    assert decision.progress.waits == 4
    assert len(host.evicted) == 3


def test_g9_nothing_is_waited_for_when_it_fits(simulated_host: Any):
    host = simulated_host(available_bytes=10 * MIB, in_flight_bytes=5 * MIB)

    assert decide(park(5), host).progress.waits == 0


def test_g13_a_restore_is_priced_with_its_own_bytes_and_needs_no_room_in_the_budget_when_streamed(simulated_host: Any):
    host = simulated_host(available_bytes=10 * MIB, limits=Budget(parked_bytes=0, parked_max_bytes=0))
    restore = GateRequest(kind=NeedKind.RESTORE, need_bytes=10 * MIB, floor_bytes=0)

    assert decide(restore, host).admitted


def test_g14_parked_max_0_refuses_at_once_and_does_not_ask():
    step = plan(
        park(1),
        reading=unknown("would be asked"),
        reserved_bytes=0,
        budget=Budget(parked_bytes=0, parked_max_bytes=0),
        victims=[victim("a", 100)],
    )

    assert step == Refuse(RefusalReason.PARKING_OFF, missing_bytes=MIB)


def test_case_28_one_larger_than_the_whole_budget_evicts_nothing(simulated_host: Any, conversations: Any):
    host = simulated_host(
        available_bytes=0, parked=conversations(4), limits=Budget(parked_bytes=0, parked_max_bytes=256 * MIB)
    )

    decision = decide(park(600), host)

    assert decision.reason == "over_budget"
    assert host.log == ["read"]


def test_case_68_budget_low_memory_and_unknown_refuse_each_with_its_own_reason(simulated_host: Any):
    """The disk takes each of them (G14); which one it was is in the receipt."""
    small = simulated_host(available_bytes=10**12, limits=Budget(parked_bytes=0, parked_max_bytes=256 * MIB))
    full = simulated_host(available_bytes=300 * MIB)
    blind = simulated_host(available_bytes=10**12, unknown_from=1)

    assert [decide(park(600), host).reason for host in (small, full, blind)] == [
        "over_budget",
        "low_memory",
        "unknown_reading",
    ]


def test_case_70_g15_two_requests_at_the_same_reading_with_room_for_one_admit_one(simulated_host: Any):
    host = simulated_host(available_bytes=100 * MIB)

    first = decide(park(60), host)
    reservation = host.reservations.reserve(60 * MIB)
    second = decide(park(60), host)
    smaller = decide(park(40), host)

    assert (first.admitted, second.admitted, smaller.admitted) == (True, False, True)
    assert second.reserved_bytes == 60 * MIB
    host.reservations.close(reservation)
    assert decide(park(60), host).admitted, "the first gave up, so its bytes are free again"


def test_g15_bytes_are_held_until_they_are_committed_and_come_off_every_reading():
    reservations = Reservations()
    first, second = reservations.reserve(10), reservations.reserve(5)

    reservations.committed(first, 4)
    assert reservations.total_bytes == 11
    reservations.committed(first, 100)
    assert reservations.total_bytes == 5
    reservations.close(second)
    reservations.close(second)
    reservations.committed(second, 1)
    assert reservations.total_bytes == 0


def test_g15_reserved_bytes_are_taken_before_the_reading_so_a_commit_in_between_counts_twice_not_never():
    reservations = Reservations()
    reservation = reservations.reserve(30 * MIB)

    def sample_while_it_commits() -> Reading:
        reservations.close(reservation)
        return known(70)

    reading, reserved_bytes = reservations.read(sample_while_it_commits)

    assert (reading.available_bytes, reserved_bytes) == (70 * MIB, 30 * MIB)


def test_g15_what_a_release_frees_belongs_to_the_request_it_was_made_for(simulated_host: Any):
    """The first was admitted on released memory; the next decision must not spend the same bytes."""
    host = simulated_host(available_bytes=0, held_bytes=50 * MIB)

    assert decide(park(50), host).admitted
    host.reservations.reserve(50 * MIB)

    assert not decide(park(50), host).admitted


def test_g3_pressure_releases_first_and_then_takes_as_much_as_helps(simulated_host: Any, conversations: Any):
    """Already under the floor, a part is better than nothing: the limit kills, a refusal does not help."""
    host = simulated_host(available_bytes=0, parked=conversations(4, extents=10))
    relief = GateRequest(kind=NeedKind.PRESSURE, need_bytes=0, floor_bytes=100 * MIB)

    decision = decide(relief, host)

    assert host.log[:3] == ["read", "release", "read"]
    assert host.evicted == ["c0", "c1", "c2", "c3"]
    assert decision.outcome == Refuse(RefusalReason.LOW_MEMORY, missing_bytes=60 * MIB, evictable_bytes=0)


def test_g3_pressure_stops_as_soon_as_the_floor_holds(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=95 * MIB, parked=conversations(4, extents=10))

    assert decide(GateRequest(kind=NeedKind.PRESSURE, need_bytes=0, floor_bytes=100 * MIB), host).admitted
    assert host.evicted == ["c0"]


def test_g3_pressure_that_only_freed_heap_causes_costs_nobody(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=0, held_bytes=100 * MIB, parked=conversations(4))

    assert decide(GateRequest(kind=NeedKind.PRESSURE, need_bytes=0, floor_bytes=100 * MIB), host).admitted
    assert host.evicted == []


def test_g2_pressure_with_an_unknown_reading_evicts_nothing(simulated_host: Any, conversations: Any):
    host = simulated_host(available_bytes=0, parked=conversations(4), unknown_from=1)

    assert not decide(GateRequest(kind=NeedKind.PRESSURE, need_bytes=0, floor_bytes=MIB), host).admitted
    assert host.log == ["read"]


def test_case_66_a_lowered_limit_is_met_in_full_or_refused_with_0_evictions(simulated_host: Any, conversations: Any):
    resize = GateRequest(kind=NeedKind.RESIZE, need_bytes=0, floor_bytes=20 * MIB)
    possible = simulated_host(available_bytes=0, parked=conversations(4, extents=10))
    impossible = simulated_host(available_bytes=0, parked=conversations(1, extents=10))

    assert decide(resize, possible).admitted
    assert possible.evicted == ["c0", "c1"]
    assert not decide(resize, impossible).admitted
    assert impossible.evicted == []


def test_the_steps_can_be_driven_by_hand_with_values_alone():
    """What the owner does: plan, carry out, note it, read again."""
    request, victims = park(30), [victim("a", 10), victim("b", 10), victim("c", 10)]
    progress, seen = GateProgress(), []
    for reading in (known(15), known(15), known(15), known(25), known(25), known(35)):
        step = plan(request, reading=reading, reserved_bytes=0, budget=UNBOUNDED, victims=victims, progress=progress)
        seen.append(step)
        progress = progress.after(step)

    assert seen == [
        Release(ReleaseScope.EVERYTHING),
        Evict(ConversationId("a")),
        Release(ReleaseScope.EXTENTS),
        Evict(ConversationId("b")),
        Release(ReleaseScope.EXTENTS),
        Admit(),
    ]


def test_g9_the_progress_carries_what_writes_hold_and_renews_it_with_each_step():
    progress = GateProgress(writes_in_flight_bytes=7)
    step = plan(
        park(1),
        reading=known(0),
        reserved_bytes=0,
        budget=UNBOUNDED,
        victims=[],
        progress=progress.after(Release(ReleaseScope.EVERYTHING)),
    )

    assert step == AwaitWrites(held_bytes=7)
    assert progress.after(step, writes_in_flight_bytes=3).writes_in_flight_bytes == 3
