"""Which blocks go first (D6; cases 35, 46)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from parkade_cache.ids import NO_KEY, PackId
from parkade_cache.spill.aligned import PAGE_BYTES
from parkade_cache.spill.eviction import PlannedDrop, plan_eviction
from parkade_cache.spill.pack import PackEntry, PackHeader, PackInfo, pack_file_bytes
from parkade_cache.spill.recovery import RecoveredPack
from parkade_cache.spill.testing import some_key


def pack(
    number: int, conversation: str, names: str, *, parent: str = "", last_used: float = 0.0, dead: tuple[int, ...] = ()
) -> RecoveredPack:
    """One page for each letter, chained; the tip is the last."""
    parents = [some_key(parent) if parent else NO_KEY, *map(some_key, names)]
    entries = tuple(
        PackEntry(some_key(name), parents[n], 16, 0, PAGE_BYTES * (n + 1), PAGE_BYTES, 0)
        for n, name in enumerate(names)
    )
    header = PackHeader(pack_id(number), conversation, "0" * 16, 0, 1, 0.0)
    info = PackInfo(header, entries, ((some_key(names[-1]), 16),), pack_file_bytes([PAGE_BYTES] * len(names)))
    return RecoveredPack((info,), frozenset(dead), last_used)


def pack_id(number: int) -> PackId:
    return PackId(f"{number:032x}")


SHARED = [
    pack(1, "old", "spA", last_used=1.0),
    pack(2, "new", "B", parent="p", last_used=2.0),
]


def test_nothing_goes_when_nothing_is_missing() -> None:
    assert plan_eviction(SHARED, missing_bytes=0) == ()


def test_the_oldest_conversation_goes_and_the_shared_prefix_stays() -> None:
    """Case 46, D6: s and p are the prefix of both."""
    assert plan_eviction(SHARED, missing_bytes=1) == (PlannedDrop("old", pack_id(1), (2,)),)


def test_the_shared_prefix_goes_with_the_last_conversation_that_needs_it() -> None:
    """D6."""
    assert plan_eviction(SHARED, missing_bytes=4 * PAGE_BYTES) == (
        PlannedDrop("old", pack_id(1), (2,)),
        PlannedDrop("new", pack_id(1), (0, 1)),
        PlannedDrop("new", pack_id(2), (0,)),
    )


def test_what_a_newer_state_superseded_goes_before_any_conversation() -> None:
    """Case 35: the tip moved from x to y, both after p."""
    packs = [pack(1, "a", "px", last_used=1.0), pack(2, "a", "y", parent="p", last_used=1.0)]
    assert plan_eviction(packs, missing_bytes=1) == (PlannedDrop("", pack_id(1), (1,)),)


def test_dead_blocks_are_not_counted_again() -> None:
    packs = [pack(1, "a", "pq", last_used=1.0, dead=(1,)), pack(2, "b", "r", last_used=2.0)]
    assert plan_eviction(packs, missing_bytes=PAGE_BYTES) == (PlannedDrop("a", pack_id(1), (0,)),)


chains = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("abcdefghij"), st.floats(0, 100)), min_size=1, max_size=8
)


@given(chains, st.integers(0, 20))
def test_as_much_goes_as_is_missing_or_all_there_is_and_no_block_twice(
    made: list[tuple[int, str, float]], missing: int
) -> None:
    packs = [pack(n + 1, f"c{who}", what + what.upper(), last_used=at) for n, (who, what, at) in enumerate(made)]
    drops = plan_eviction(packs, missing_bytes=missing * PAGE_BYTES)
    gone = Counter((drop.pack_id, entry) for drop in drops for entry in drop.entries)
    assert set(gone.values()) <= {1}
    whole = Counter(pack_id for pack_id, _ in gone)
    freed_bytes = sum(5 * PAGE_BYTES if count == 2 else PAGE_BYTES for count in whole.values())
    assert freed_bytes >= min(missing, 5 * len(packs)) * PAGE_BYTES
