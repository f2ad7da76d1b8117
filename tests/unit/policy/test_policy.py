"""Limits, floors and budgets: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_cache.errors import PolicyError
from parkade_cache.policy import (
    Policy,
    PolicyBox,
    PolicyChange,
    SpillMode,
    default_floor_bytes,
    merge_documents,
    parse_policy,
)

GIB = 1024**3
MIB = 1024**2

FULL = {
    "memory": {
        "limit": "96Gi",
        "floor": "6Gi",
        "parked": {"max": "64Gi", "maxConversations": 10, "minTokens": 5},
        "headroom": "512Mi",
    },
    "spill": {
        "size": "400Gi",
        "minFree": "20Gi",
        "minTokens": 7,
        "mode": "OnEvict",
        "writeBudgetPerHour": "64Gi",
        "writeOutSeconds": 20,
        "writeBehindIdleSeconds": 4,
        "readDeadlineSeconds": 9,
    },
}


def refusal_of(document: object, **options: int) -> str:
    with pytest.raises(PolicyError) as refusal:
        parse_policy(json.dumps(document), **options)
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_the_custom_resources_keys_are_understood() -> None:
    policy = parse_policy(FULL)
    assert policy.memory.limit == 96 * GIB
    assert policy.memory.parked.max_conversations == 10
    assert policy.spill is not None
    assert policy.spill.mode is SpillMode.ON_EVICT
    assert policy.spill.min_free == 20 * GIB


def test_a_policy_survives_its_own_document() -> None:
    policy = parse_policy(FULL)
    assert parse_policy(policy.to_json()) == policy
    assert parse_policy(json.dumps(policy.to_json())) == policy


def test_the_defaults_are_those_of_the_design() -> None:
    policy = parse_policy({"memory": {"parked": {"max": "1Gi"}}, "spill": {"size": "10Gi"}})
    assert policy.memory.floor == 512 * MIB
    assert policy.spill is not None
    assert (policy.spill.write_budget_per_hour, policy.spill.write_out_seconds) == (128 * GIB, 30)
    assert policy.spill.mode is SpillMode.WRITE_BEHIND
    assert policy.spill.min_free is None


@pytest.mark.parametrize(("limit", "floor"), [(4 * GIB, 512 * MIB), (20 * GIB, GIB), (100 * GIB, 5 * GIB)])
def test_the_floor_is_five_percent_of_the_limit_and_at_least_512_mib(limit: int, floor: int) -> None:
    assert default_floor_bytes(limit) == floor
    assert parse_policy({}, limit_bytes=limit).memory.floor == floor


def test_a_cap_below_the_found_limit_decides_the_defaults() -> None:
    policy = parse_policy({"memory": {"limit": "20Gi"}}, limit_bytes=100 * GIB)
    assert policy.memory.floor == GIB
    assert policy.memory.parked.max == (20 * GIB - GIB) // 2


def test_without_any_limit_the_budget_must_be_given() -> None:
    assert "memory.parked.max: must be set" in refusal_of({})


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"memory": {"limit": "8Gi", "floor": "8Gi", "parked": {"max": 0}}}, "floor"),
        ({"memory": {"limit": "8Gi", "floor": "7Gi", "headroom": "1Gi", "parked": {"max": 0}}}, "headroom"),
        ({"memory": {"limit": "8Gi", "floor": "1Gi", "parked": {"max": "8Gi"}}}, "parked.max"),
        ({"memory": {"parked": {"max": "1Gi"}}, "spill": {}}, "spill.size: must be set"),
        ({"memory": {"parked": {"max": "1Gi"}}, "spill": {"size": 0}}, "size must be greater than 0"),
        ({"memory": {"parked": {"max": "1Gi"}}, "spill": {"size": "1Gi", "mode": "Never"}}, "spill.mode"),
        ({"memory": {"parked": {"max": "lots"}}}, "memory.parked.max"),
        ({"memory": {"parked": {"max": "1Gi", "maxConversation": 1}}}, "no such key"),
        ({"memory": {"parked": {"max": "1Gi", "minTokens": -1}}}, "memory.parked.minTokens"),
        ({"memory": {"parked": {"max": "1Gi", "minTokens": 1.5}}}, "memory.parked.minTokens"),
        ({"memory": {"parked": []}}, "memory.parked"),
        ({"memory": 5}, "memory"),
        ([], "JSON object"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_field(document: object, said: str) -> None:
    assert said in refusal_of(document)


def test_text_that_is_no_json_is_refused_in_one_line() -> None:
    with pytest.raises(PolicyError, match="not JSON"):
        parse_policy("{")
    with pytest.raises(PolicyError, match="not JSON"):
        parse_policy("[" * 100_000)


def test_the_limit_that_was_found_out_counts_too() -> None:
    message = refusal_of({"memory": {"floor": "2Gi", "parked": {"max": 0}}}, limit_bytes=GIB)
    assert "must be below the limit 1.0 GiB" in message


def test_a_floor_exactly_below_the_limit_is_accepted() -> None:
    parse_policy({"memory": {"floor": GIB - 1, "parked": {"max": 0}}}, limit_bytes=GIB)


def test_a_tier_that_could_never_hold_a_block_is_refused() -> None:
    tiny_disk = parse_policy({"memory": {"parked": {"max": 0}}, "spill": {"size": 4095}})
    with pytest.raises(PolicyError, match=r"spill\.size"):
        tiny_disk.check_block(4096)
    tiny_ram = parse_policy({"memory": {"parked": {"max": 4095}}})
    with pytest.raises(PolicyError, match=r"parked\.max"):
        tiny_ram.check_block(4096)
    parse_policy({"memory": {"parked": {"max": 0}}, "spill": {"size": 4096}}).check_block(4096)


def test_documents_are_merged_section_by_section() -> None:
    base = {"memory": {"floor": "1Gi", "parked": {"max": "2Gi"}}, "spill": {"size": "9Gi"}}
    over = {"memory": {"parked": {"max": "3Gi"}}, "spill": None}
    assert merge_documents(base, over) == {"memory": {"floor": "1Gi", "parked": {"max": "3Gi"}}}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists))
def test_no_document_raises_anything_but_a_policy_error(document: object) -> None:
    with contextlib.suppress(PolicyError):
        parse_policy(json.dumps({"memory": document, "spill": document}), limit_bytes=GIB)


def policy_with(parked: int) -> Policy:
    return parse_policy({"memory": {"parked": {"max": parked}}})


def test_a_replacement_is_in_force_when_subscribers_hear_of_it() -> None:
    box = PolicyBox(policy_with(1))
    heard: list[tuple[PolicyChange, Policy]] = []
    box.subscribe(lambda change: heard.append((change, box.current)))
    change = box.replace(policy_with(2))
    assert heard == [(PolicyChange(policy_with(1), policy_with(2)), policy_with(2))]
    assert change.old == policy_with(1)


def test_one_failing_subscriber_does_not_keep_the_others_from_being_told() -> None:
    box = PolicyBox(policy_with(1))
    heard: list[str] = []

    def fail(_: PolicyChange) -> None:
        heard.append("failing")
        raise RuntimeError("cannot resize")

    box.subscribe(fail)
    box.subscribe(lambda _: heard.append("second"))
    with pytest.raises(RuntimeError, match="cannot resize"):
        box.replace(policy_with(2))
    assert heard == ["failing", "second"]
    assert box.current == policy_with(2)


def test_who_has_unsubscribed_hears_nothing() -> None:
    box = PolicyBox(policy_with(1))
    heard: list[PolicyChange] = []
    unsubscribe = box.subscribe(heard.append)
    unsubscribe()
    unsubscribe()
    box.replace(policy_with(2))
    assert heard == []
