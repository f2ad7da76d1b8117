"""The ledger: blocks form a forest, holds count who needs what, and nothing is kept or lost by a wrong count."""

from __future__ import annotations

import random

import pytest

from parkade_cache.ids import BlockKey
from parkade_cache.ledger import NO_BLOCK, Ledger

GROUP = bytes(4)


def key(name: object) -> BlockKey:
    return BlockKey(str(name).encode().ljust(32, b".") + GROUP)


def chain(ledger: Ledger, *names: str, after: int = NO_BLOCK, ram: bool = True, published: bool = False) -> list[int]:
    """Blocks that follow each other, ready in RAM or published, or both."""
    rows: list[int] = []
    parent = after
    first = ledger.end_token[after] // 16 if after >= 0 else 0
    for number, name in enumerate(names, first + 1):
        parent = ledger.intern(key(name), parent, 16 * number)
        rows.append(parent)
        if ram:
            ledger.ram_filling(parent, len(ledger) + 1000 * number)
            ledger.ram_ready(parent)
        if published:
            ledger.disk_published(parent, 0, number)
    return rows


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


# -- the tree ------------------------------------------------------------------------------------------------


def test_a_key_has_one_row_and_a_missing_parent_is_filled_in_later(ledger: Ledger) -> None:
    child = ledger.intern(key("b"), NO_BLOCK, 32)
    ledger.hold_tip(child, ram=True, disk=True)
    parent = ledger.intern(key("a"), NO_BLOCK, 16)
    assert ledger.intern(key("b"), parent, 32) == child
    assert list(ledger.ancestors(child)) == [child, parent]
    assert (ledger.ram_hold[parent], ledger.disk_hold[parent]) == (1, 1), "a late link passes the holds on"


def test_descends_looks_no_further_up_than_it_must(ledger: Ledger) -> None:
    main = chain(ledger, "a", "b", "c")
    side = chain(ledger, "x", "y", after=main[0])
    assert ledger.descends(main[2], main[0])
    assert ledger.descends(main[2], main[2])
    assert not ledger.descends(side[1], main[1])
    assert not ledger.descends(main[0], main[2])


def test_a_record_dies_with_its_last_use_and_takes_useless_ancestors_along(ledger: Ledger) -> None:
    rows = chain(ledger, "a", "b", "c", ram=False)
    ledger.hold_tip(rows[2], ram=True, disk=True)
    ledger.drop_tip(rows[2], ram=True, disk=True)
    assert len(ledger) == 0
    again = ledger.intern(key("z"), NO_BLOCK, 16)
    assert again in rows, "rows are used again"
    assert ledger.parent[again] == -1
    assert ledger.children[again] == 0


@pytest.mark.parametrize("use", ["ram", "disk", "pin", "tip", "child"])
def test_a_record_lives_while_anything_uses_it(ledger: Ledger, use: str) -> None:
    (row,) = chain(ledger, "a", ram=False)
    if use == "ram":
        ledger.ram_filling(row, 1)
    elif use == "disk":
        ledger.disk_writing(row, 0)
    elif use == "pin":
        ledger.pin(row)
    elif use == "tip":
        ledger.hold_tip(row, ram=False, disk=False)
    else:
        ledger.intern(key("b"), row, 32)
    ledger.forget_if_dead(row)
    assert ledger.find(key("a")) == row


# -- holds ---------------------------------------------------------------------------------------------------


def test_growing_a_chain_moves_the_hold_and_frees_nothing(ledger: Ledger) -> None:
    rows = chain(ledger, "a", "b", "c")
    ledger.hold_tip(rows[1], ram=True, disk=True)
    ledger.hold_tip(rows[2], ram=True, disk=True)
    ledger.drop_tip(rows[1], ram=True, disk=True)
    assert ledger.take_unheld_ram() == []
    assert [ledger.ram_hold[row] for row in rows] == [1, 1, 1]


def test_case_33_a_shared_prefix_stays_while_anybody_needs_it(ledger: Ledger) -> None:
    prefix = chain(ledger, "p", "q")
    one, two = chain(ledger, "a1", "a2", after=prefix[1]), chain(ledger, "b1", after=prefix[1])
    for tip in (one[1], two[0]):
        ledger.hold_tip(tip, ram=True, disk=True)
    ledger.unhold_ram(one[1])
    assert sorted(ledger.take_unheld_ram()) == sorted(one)
    assert ledger.ram_hold[prefix[1]] == 1
    ledger.unhold_ram(two[0])
    assert set(prefix) <= set(ledger.take_unheld_ram())


def test_w6_a_branch_holds_its_own_blocks_and_the_common_ones_once(ledger: Ledger) -> None:
    main = chain(ledger, "a", "b", "c")
    side = chain(ledger, "x", after=main[0])
    ledger.hold_tip(main[2], ram=True, disk=True)
    ledger.hold_tip(side[0], ram=True, disk=True)
    ledger.drop_tip(side[0], ram=True, disk=True)
    assert ledger.take_unheld_ram() == side
    assert [ledger.ram_hold[row] for row in main] == [1, 1, 1]


def test_holds_of_ram_and_disk_are_separate(ledger: Ledger) -> None:
    rows = chain(ledger, "a", "b", published=True)
    ledger.hold_tip(rows[1], ram=True, disk=True)
    ledger.unhold_ram(rows[1])
    assert sorted(ledger.take_unheld_ram()) == sorted(rows)
    assert ledger.take_unheld_disk() == []
    ledger.hold_ram(rows[1])
    assert [ledger.ram_hold[row] for row in rows] == [1, 1]
    ledger.unhold_disk(rows[1])
    assert sorted(ledger.take_unheld_disk()) == sorted(rows)
    ledger.hold_disk(rows[1])
    assert [ledger.disk_hold[row] for row in rows] == [1, 1]


def test_a_row_whose_hold_ended_twice_is_handed_out_once(ledger: Ledger) -> None:
    """A hold that ended, began and ended again had its slot put back twice."""
    (row,) = chain(ledger, "a", published=True)
    for _ in range(2):
        ledger.hold_tip(row, ram=True, disk=True)
        ledger.drop_tip(row, ram=True, disk=True)
    assert ledger.take_unheld_ram() == [row]
    assert ledger.take_unheld_disk() == [row]


def test_a_row_that_is_held_again_is_not_handed_out(ledger: Ledger) -> None:
    (row,) = chain(ledger, "a")
    ledger.hold_tip(row, ram=True, disk=True)
    ledger.drop_tip(row, ram=True, disk=True)
    ledger.hold_tip(row, ram=True, disk=True)
    assert ledger.take_unheld_ram() == []


def test_what_is_pinned_comes_again_after_it_was_handed_back(ledger: Ledger) -> None:
    (row,) = chain(ledger, "a")
    ledger.hold_tip(row, ram=True, disk=True)
    ledger.pin(row)
    ledger.drop_tip(row, ram=True, disk=True)
    ledger.postpone_unheld(ram=ledger.take_unheld_ram())
    assert ledger.unheld_in_ram() == [row]
    assert ledger.take_unheld_ram() == [row]


def test_g4_what_a_sequence_of_evictions_would_free_counts_what_went_before(ledger: Ledger) -> None:
    prefix = chain(ledger, "p", published=True)
    one, two = chain(ledger, "a", after=prefix[0], published=True), chain(ledger, "b", after=prefix[0], published=True)
    for tip in (one[0], two[0]):
        ledger.hold_tip(tip, ram=True, disk=True)
    for frees in (ledger.ram_frees, ledger.disk_frees):
        gone: dict[int, int] = {}
        assert frees(one[0], gone) == one
        assert frees(two[0], gone) == [*two, *prefix], "with both gone the shared prefix goes too"


def test_what_would_be_freed_includes_pinned_blocks(ledger: Ledger) -> None:
    """A pinned block was not counted, and its loss went unnoticed."""
    (row,) = chain(ledger, "a")
    ledger.hold_tip(row, ram=True, disk=True)
    ledger.pin(row)
    assert ledger.ram_frees(row, {}) == [row]


# -- tiers ---------------------------------------------------------------------------------------------------


def test_a_block_is_dirty_from_ready_to_published_and_again_when_the_disk_loses_it(ledger: Ledger) -> None:
    row = ledger.intern(key("a"), NO_BLOCK, 16)
    ledger.ram_filling(row, 5)
    assert (ledger.ram_blocks, ledger.dirty_blocks) == (1, 0)
    ledger.ram_ready(row)
    assert ledger.dirty_blocks == 1
    ledger.disk_writing(row, 3)
    assert ledger.dirty_blocks == 1
    ledger.disk_published(row, 3, 0)
    assert (ledger.dirty_blocks, ledger.disk_blocks) == (0, 1)
    ledger.disk_gone(row)
    assert (ledger.dirty_blocks, ledger.disk_blocks) == (1, 0)
    assert ledger.ram_gone(row) == 5
    assert (ledger.dirty_blocks, ledger.ram_blocks) == (0, 0)


def test_only_a_filling_block_becomes_ready(ledger: Ledger) -> None:
    row = ledger.intern(key("a"), NO_BLOCK, 16)
    with pytest.raises(ValueError, match="filling"):
        ledger.ram_ready(row)
    with pytest.raises(ValueError, match="filling"):
        ledger.ready_many([row])


def test_filling_and_readying_many_is_the_same_as_one_by_one(ledger: Ledger) -> None:
    rows = chain(ledger, "a", "b", ram=False)
    ledger.fill_many(rows, [7, 8])
    assert [ledger.pins[row] for row in rows] == [1, 1]
    ledger.ready_many(rows)
    assert (ledger.ram_blocks, ledger.dirty_blocks) == (2, 2)
    assert [ledger.slot[row] for row in rows] == [7, 8]
    assert [ledger.pins[row] for row in rows] == [0, 0]


def test_the_dirty_part_of_a_chain_comes_root_first_and_without_what_is_being_written(ledger: Ledger) -> None:
    rows = chain(ledger, "a", "b", "c", "d")
    ledger.disk_published(rows[0], 0, 0)
    ledger.disk_writing(rows[2], 1)
    assert ledger.dirty_chain(rows[3]) == [rows[1], rows[3]]


def test_the_rows_of_a_pack_are_those_published_in_it(ledger: Ledger) -> None:
    rows = chain(ledger, "a", "b", "c")
    ledger.disk_published(rows[0], 4, 0)
    ledger.disk_published(rows[1], 5, 0)
    ledger.disk_writing(rows[2], 4)
    assert ledger.rows_of_pack(4) == [rows[0]]
    ledger.intern(key("grows after a look"), NO_BLOCK, 16)


def test_d7_checkpoints_are_where_chains_begin_part_and_end(ledger: Ledger) -> None:
    rows = chain(ledger, "1", "2", "3", "4", "5")
    chain(ledger, "branch", after=rows[2])
    ledger.hold_tip(rows[4], ram=True, disk=True)
    assert [ledger.is_checkpoint(row) for row in rows] == [True, False, True, False, True]


def test_random_use_leaves_the_counts_of_a_recount(ledger: Ledger) -> None:
    chance = random.Random(7)
    tips: list[int] = []
    for step in range(600):
        if tips and chance.random() < 0.4:
            row = tips.pop(chance.randrange(len(tips)))
            ledger.drop_tip(row, ram=True, disk=True)
            for free in ledger.take_unheld_ram():
                ledger.ram_gone(free)
                ledger.forget_if_dead(free)
        else:
            after = chance.choice(tips) if tips and chance.random() < 0.7 else NO_BLOCK
            tips.append(chain(ledger, f"s{step}a", f"s{step}b", after=after)[-1])
            ledger.hold_tip(tips[-1], ram=True, disk=True)
        expected = {row for tip in tips for row in ledger.ancestors(tip)}
        assert {row for row in ledger.rows.values() if ledger.ram[row]} == expected
        assert ledger.ram_blocks == ledger.dirty_blocks == len(expected) == len(ledger)
