"""Conversations: the order in which they may go, whose chains end where, and which have something to write."""

from __future__ import annotations

import pytest

from parkade_cache.conversations import Conversation, Conversations, Tip
from parkade_cache.ids import ConversationId


@pytest.fixture
def known() -> Conversations:
    conversations = Conversations()
    for number, name in enumerate("abc"):
        conversations.open(ConversationId(name), now=float(number))
    return conversations


def ids(conversations: Conversations) -> str:
    return "".join(conversation.id for conversation in conversations)


def one(conversations: Conversations, name: str) -> Conversation:
    found = conversations.get(ConversationId(name))
    assert found is not None
    return found


def test_the_least_recently_used_comes_first(known: Conversations) -> None:
    known.used(one(known, "a"), now=10.0)
    assert ids(known) == "bca"


def test_a_use_never_makes_a_conversation_older(known: Conversations) -> None:
    known.used(one(known, "c"), now=-5.0)
    assert one(known, "c").last_used == 2.0


def test_old_ones_are_put_before_all_that_are_known(known: Conversations) -> None:
    known.insert_old(Conversation(ConversationId("old"), last_used=-1.0))
    known.insert_old(Conversation(ConversationId("older"), last_used=-5.0))
    assert ids(known) == "olderoldabc"
    known.put_last(one(known, "older"))
    assert ids(known) == "oldabcolder"


def test_a_chain_end_belongs_to_the_conversation_that_reached_it_last(known: Conversations) -> None:
    a, b = one(known, "a"), one(known, "b")
    tip = Tip(rows=(7,), tokens=16, last_used=0.0)
    known.tip_added(a, tip)
    assert known.at_tip(7) is a
    other = Tip(rows=(7,), tokens=16, last_used=0.0)
    known.tip_added(b, other)
    known.tip_removed(a, tip)
    assert known.at_tip(7) is b
    assert known.at_tip(8) is None


def test_removing_a_conversation_does_not_touch_a_new_one_of_the_same_id(known: Conversations) -> None:
    old = one(known, "a")
    known.remove(old)
    new = known.open(ConversationId("a"), now=9.0)
    known.remove(old)
    assert one(known, "a") is new


def test_who_has_something_to_write_is_known_in_the_order_of_waiting(known: Conversations) -> None:
    for name in "cab":
        known.mark_dirty(one(known, name))
    known.mark_dirty(one(known, "c"))
    assert [c.id for c in known.dirty()] == ["a", "b", "c"]
    known.mark_clean(one(known, "b"))
    known.remove(one(known, "a"))
    assert [c.id for c in known.dirty()] == ["c"]


def test_a_conversation_that_is_gone_has_nothing_to_write(known: Conversations) -> None:
    gone = one(known, "a")
    known.remove(gone)
    known.mark_dirty(gone)
    assert list(known.dirty()) == []


def test_w5_a_conversation_with_a_request_in_flight_is_busy(known: Conversations) -> None:
    a = one(known, "a")
    assert not a.busy
    a.in_flight += 1
    assert a.busy


def test_its_length_is_that_of_its_longest_chain(known: Conversations) -> None:
    a = one(known, "a")
    assert a.tokens == 0
    for rows, tokens in (((1,), 32), ((2,), 128), ((3,), 64)):
        known.tip_added(a, Tip(rows=rows, tokens=tokens, last_used=0.0))
    assert a.tokens == 128
    assert list(a.rows()) == [1, 2, 3]
