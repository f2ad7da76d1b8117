"""G4 and G6: who may go, in which order, and what that really frees."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from parkade_cache.ids import ConversationId
from parkade_cache.memory.gate import Candidate, Victim, order_victims, victims_of

UNHURRIED = settings(deadline=None)
"""Others may be using the processors: how long one example takes says nothing."""


def candidate(
    name: str, idle: float = 100, *, extents: Collection[int] = (), published: bool = True, **states: bool
) -> Candidate:
    return Candidate(
        conversation=ConversationId(name),
        extents=frozenset(extents),
        idle_seconds=idle,
        published=published,
        **states,
    )


def names(victims: Iterable[Victim | Candidate]) -> list[str]:
    return [victim.conversation for victim in victims]


def test_g6_the_least_recently_used_goes_first():
    ordered = order_victims([candidate("b", 20), candidate("c", 10), candidate("a", 30)])

    assert names(ordered) == ["a", "b", "c"]


def test_g6_a_published_one_idle_at_least_half_as_long_goes_before_an_unwritten_one():
    ordered = order_victims([candidate("unwritten", 100, published=False), candidate("published", 50)])

    assert names(ordered) == ["published", "unwritten"]


def test_g6_a_published_one_idle_less_than_half_as_long_waits_its_turn():
    ordered = order_victims([candidate("unwritten", 100, published=False), candidate("published", 49.9)])

    assert names(ordered) == ["unwritten", "published"]


def test_g6_the_rule_is_applied_to_each_place_in_turn():
    ordered = order_victims(
        [
            candidate("u100", 100, published=False),
            candidate("p60", 60),
            candidate("p40", 40),
            candidate("u70", 70, published=False),
        ]
    )

    assert names(ordered) == ["p60", "u100", "p40", "u70"]


def test_g4_pinned_busy_and_the_requests_own_chain_are_not_evictable():
    all_of_them = [
        candidate("pinned", extents={1}, pinned=True),
        candidate("busy", extents={2}, busy=True),
        candidate("incoming", extents={3}, incoming=True),
        candidate("free", extents={4}),
    ]

    assert names(victims_of(all_of_them, extent_bytes=10)) == ["free"]


def test_g4_freeable_counts_wholly_empty_extents_cumulatively_not_sizes():
    """a and b share extent 2: it counts once, and only for the one that leaves it last."""
    victims = victims_of([candidate("a", 30, extents={1, 2}), candidate("b", 20, extents={2, 3})], extent_bytes=10)

    assert [(victim.conversation, victim.freeable_bytes) for victim in victims] == [("a", 10), ("b", 20)]


def test_g4_a_prefix_that_a_kept_conversation_needs_is_not_counted():
    victims = victims_of(
        [candidate("goes", extents={1, 2}), candidate("stays", extents={1}, pinned=True)], extent_bytes=10
    )

    assert [victim.freeable_bytes for victim in victims] == [10]


def test_g9_an_extent_that_a_write_holds_is_not_counted():
    victims = victims_of([candidate("a", extents={1, 2})], extent_bytes=10, held_extents={2})

    assert [(victim.freeable_bytes, victim.helps) for victim in victims] == [(10, True)]


def test_g4_one_whose_every_extent_is_kept_by_others_helps_nobody():
    victims = victims_of(
        [candidate("a", 30, extents={1}), candidate("b", 20, extents={1, 2}), candidate("p", extents={1}, pinned=True)],
        extent_bytes=10,
    )

    assert [(victim.conversation, victim.helps) for victim in victims] == [("a", False), ("b", True)]


CANDIDATES = st.lists(
    st.tuples(
        st.floats(min_value=0, max_value=1e6),
        st.booleans(),
        st.booleans(),
        st.frozensets(st.integers(min_value=0, max_value=12), max_size=5),
    ),
    max_size=12,
).map(
    lambda rows: [
        candidate(f"c{index}", idle, published=published, pinned=pinned, extents=extents)
        for index, (idle, published, pinned, extents) in enumerate(rows)
    ]
)


@UNHURRIED
@given(CANDIDATES)
def test_g4_after_any_number_of_victims_exactly_the_announced_extents_are_empty(parked: list[Candidate]):
    victims = victims_of(parked, extent_bytes=1)
    used_at_first = set().union(*(one.extents for one in parked))

    for count in range(len(victims) + 1):
        gone = set(names(victims[:count]))
        still_used = set().union(*(one.extents for one in parked if one.conversation not in gone))
        assert sum(victim.freeable_bytes for victim in victims[:count]) == len(used_at_first - still_used)


@UNHURRIED
@given(CANDIDATES)
def test_g4_every_evictable_one_is_listed_once_and_no_other(parked: list[Candidate]):
    assert sorted(names(victims_of(parked, extent_bytes=1))) == sorted(names(one for one in parked if one.evictable))


@UNHURRIED
@given(CANDIDATES)
def test_g6_each_place_is_the_oldest_or_a_published_one_at_least_half_as_old(parked: list[Candidate]):
    ordered = list(order_victims(parked))
    while ordered:
        oldest = max(one.idle_seconds for one in ordered)
        unwritten_oldest = not any(one.published and one.idle_seconds == oldest for one in ordered)
        first = ordered.pop(0)
        assert first.idle_seconds == oldest or (
            unwritten_oldest and first.published and first.idle_seconds * 2 >= oldest
        )
