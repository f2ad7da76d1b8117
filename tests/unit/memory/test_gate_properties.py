"""What holds for every host and every request: G1, G2, G4 to G9, M10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from parkade_cache.ids import ConversationId
from parkade_cache.memory.gate import (
    NOTHING_DONE,
    Admit,
    Budget,
    Candidate,
    Capture,
    Drop,
    Evict,
    GateDecision,
    GateRequest,
    HandToDisk,
    NeedKind,
    RefusalReason,
    Refuse,
    Victim,
    decide,
    plan,
    plan_after_capture,
)
from parkade_cache.memory.reading import Reading, ReadingSource, admits, unknown

UNHURRIED = settings(deadline=None)
"""Others may be using the processors: how long one example takes says nothing."""

SMALL = st.integers(min_value=0, max_value=40)

PARKED = st.lists(
    st.tuples(st.frozensets(st.integers(min_value=0, max_value=15), max_size=4), st.booleans(), st.booleans(), SMALL),
    max_size=8,
).map(
    lambda rows: [
        Candidate(
            conversation=ConversationId(f"c{index}"),
            extents=extents,
            idle_seconds=float(idle),
            published=published,
            pinned=pinned,
        )
        for index, (extents, pinned, published, idle) in enumerate(rows)
    ]
)

REQUESTS = st.builds(
    GateRequest,
    kind=st.sampled_from(NeedKind),
    need_bytes=SMALL,
    floor_bytes=SMALL,
    parked_need_bytes=SMALL,
    parked_conversations=st.integers(min_value=0, max_value=1),
)

THIEVES: st.SearchStrategy[Callable[[int], int] | None] = st.sampled_from(
    [None, lambda available: available, lambda available: available // 2, lambda available: 1]
)

HONEST = {
    "available_bytes": SMALL,
    "parked": PARKED,
    "held_bytes": SMALL,
    "limits": st.none() | st.builds(Budget, parked_bytes=st.just(0), parked_max_bytes=SMALL, max_conversations=SMALL),
}

ANY_HOST = HONEST | {
    "returns": st.sampled_from([1.0, 0.5, 0.2, 0.0]),
    "taken_by_others": THIEVES,
    "unknown_from": st.none() | st.integers(min_value=1, max_value=12),
    "in_flight_bytes": SMALL,
    "wait_lets_go_bytes": SMALL,
    "busy_at_eviction": st.frozensets(st.sampled_from([ConversationId(f"c{n}") for n in range(8)]), max_size=3),
}


def hosts(strategies: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of a simulated host whose extents are one byte, so that numbers stay small."""
    return st.fixed_dictionaries(strategies | {"extent_bytes": st.just(1)})


def decided(build: Callable[..., Any], host: dict[str, Any], request: GateRequest) -> tuple[Any, GateDecision]:
    built = build(**(host | {"parked": list(host["parked"])}))
    return built, decide(request, built)


@UNHURRIED
@given(host=hosts(ANY_HOST), request=REQUESTS)
def test_g8_every_decision_ends_and_takes_each_conversation_at_most_once(
    simulated_host: Any, host: dict[str, Any], request: GateRequest
):
    built, decision = decided(simulated_host, host, request)

    asked = [*decision.progress.evicted, *decision.progress.passed_over]
    assert len(asked) == len(set(asked)) <= len(host["parked"])
    assert built.releases <= 1 + len(asked) + decision.progress.waits
    assert decision.progress.waits <= 1 + len(decision.progress.evicted)


@UNHURRIED
@given(host=hosts(ANY_HOST), request=REQUESTS)
def test_g4_nothing_pinned_is_ever_evicted(simulated_host: Any, host: dict[str, Any], request: GateRequest):
    built, _ = decided(simulated_host, host, request)

    assert not {one.conversation for one in host["parked"] if one.pinned} & set(built.evicted)


@UNHURRIED
@given(host=hosts(ANY_HOST), request=REQUESTS)
def test_g7_an_unknown_reading_is_the_last_thing_that_happens(
    simulated_host: Any, host: dict[str, Any], request: GateRequest
):
    built, decision = decided(simulated_host, host, request)

    if not decision.after.known:
        assert not decision.admitted
        assert built.log[-1] == "read"
        assert built.readings <= host["unknown_from"]


@UNHURRIED
@given(host=hosts(ANY_HOST), request=REQUESTS)
def test_m10_whatever_is_admitted_fits_the_last_reading_and_the_budget(
    simulated_host: Any, host: dict[str, Any], request: GateRequest
):
    built, decision = decided(simulated_host, host, request)

    if decision.admitted:
        assert admits(decision.after, need_bytes=request.need_bytes, floor_bytes=request.floor_bytes)
        assert request.need_bytes + request.floor_bytes <= built.available_bytes
        if request.parked_need_bytes:
            assert built.budget().parked_bytes + request.parked_need_bytes <= built.budget().parked_max_bytes


@UNHURRIED
@given(host=hosts(ANY_HOST), request=REQUESTS)
def test_g1_what_fits_at_the_first_reading_costs_nothing(
    simulated_host: Any, host: dict[str, Any], request: GateRequest
):
    built, decision = decided(simulated_host, host, request)

    if admits(decision.before, need_bytes=request.need_bytes, floor_bytes=request.floor_bytes) and not host["limits"]:
        assert decision.admitted
        assert built.log == ["read"]


@UNHURRIED
@given(host=hosts(HONEST), request=REQUESTS)
def test_g5_on_an_honest_host_a_refusal_follows_no_eviction(
    simulated_host: Any, host: dict[str, Any], request: GateRequest
):
    """Pressure alone takes what helps although it is not enough."""
    built, decision = decided(simulated_host, host, request)

    if not decision.admitted and request.kind is not NeedKind.PRESSURE:
        assert built.evicted == []


@UNHURRIED
@given(host=hosts(HONEST), request=REQUESTS)
def test_g6_on_an_honest_host_the_shortest_sufficient_run_of_victims_goes(
    simulated_host: Any, host: dict[str, Any], request: GateRequest
):
    """With the last one left out it would not have fitted."""
    built, decision = decided(simulated_host, host, request)

    if decision.admitted and built.evicted:
        last = built.evicted[-1]
        without = [one for one in host["parked"] if one.conversation not in built.evicted[:-1]]
        kept = replace(built, parked=without, log=[], evicted=[])
        extents = {extent for one in without for extent in one.extents}
        freed_by_last = len(extents) - len(
            {extent for one in without if one.conversation != last for extent in one.extents}
        )
        reading = Reading(built.available_bytes - freed_by_last, ReadingSource.CGROUP)
        step = plan(
            request,
            reading=reading,
            reserved_bytes=0,
            budget=kept.budget(),
            victims=kept.victims(),
            progress=decision.progress,
        )
        assert not isinstance(step, Admit)


VICTIMS = st.lists(
    st.builds(Victim, conversation=st.sampled_from("abcdefgh").map(ConversationId), freeable_bytes=SMALL),
    max_size=6,
    unique_by=lambda victim: victim.conversation,
)
BUDGETS = st.builds(Budget, parked_bytes=SMALL, parked_max_bytes=SMALL, conversations=SMALL, max_conversations=SMALL)
READINGS = SMALL.map(lambda available: Reading(available, ReadingSource.CGROUP)) | st.just(unknown("gone"))


@UNHURRIED
@given(request=REQUESTS, reading=READINGS, reserved=SMALL, budget=BUDGETS, victims=VICTIMS)
def test_g2_and_g5_a_plan_evicts_only_on_a_known_reading_and_only_where_it_can_help(
    request: GateRequest, reading: Reading, reserved: int, budget: Budget, victims: list[Victim]
):
    step = plan(request, reading=reading, reserved_bytes=reserved, budget=budget, victims=victims)

    if reading.available_bytes is None:
        assert isinstance(step, Refuse)
    elif isinstance(step, Evict) and request.kind is not NeedKind.PRESSURE:
        freed = sum(victim.freeable_bytes for victim in victims)
        assert reading.available_bytes - reserved + freed >= request.need_bytes + request.floor_bytes


@UNHURRIED
@given(
    parked=SMALL,
    disk=st.booleans(),
    readings=st.lists(READINGS, min_size=1, max_size=30),
    budget=BUDGETS,
    others=VICTIMS,
)
def test_g10_after_a_capture_the_steps_end_and_the_fresh_one_is_dropped_only_where_no_disk_takes_it(
    parked: int, disk: bool, readings: list[Reading], budget: Budget, others: list[Victim]
):
    capture = Capture(conversation=ConversationId("fresh"), parked_bytes=parked, floor_bytes=20, disk_takes_it=disk)
    progress, steps = NOTHING_DONE, []
    for reading in (*readings, *[readings[-1]] * 40):
        step = plan_after_capture(
            capture, reading=reading, reserved_bytes=0, budget=budget, others=others, progress=progress
        )
        steps.append(step)
        if isinstance(step, Admit | Refuse):
            break
        progress = progress.after(step)

    assert isinstance(steps[-1], Admit | Refuse)
    assert sum(isinstance(step, HandToDisk | Drop) for step in steps) <= 1
    assert not (disk and any(isinstance(step, Drop) for step in steps))
    if steps[-1] == Refuse(RefusalReason.UNKNOWN_READING):
        assert progress.fresh_gone
