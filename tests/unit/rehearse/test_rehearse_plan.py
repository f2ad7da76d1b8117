"""Limits and rounds of a rehearsal: nothing is asked for that a pod could not give."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_cache.policy import parse_policy
from parkade_serving.demo.plan import EngineChoice
from parkade_serving.rehearse.plan import (
    DEFAULT_ROUNDS,
    FLOOR_BYTES,
    GENEROUS_LIMIT_BYTES,
    GIB,
    LOWERED_SHARE,
    MIB,
    QUICK_ROUNDS,
    Need,
    choose_rounds,
    deficit_bytes,
    pod_command,
    policy_document,
    unannounced_limit,
    upper_limit,
)

SIZES = st.integers(min_value=0, max_value=64 * GIB)


@given(base=SIZES, parked=SIZES, given_bytes=SIZES)
def test_case_66_a_lowered_limit_never_falls_below_what_cannot_be_given_back_and_the_floor(
    base: int, parked: int, given_bytes: int
):
    limit = Need(base, parked).lowered_limit(given_bytes)
    assert limit >= base + FLOOR_BYTES
    assert limit >= base + FLOOR_BYTES + parked - given_bytes
    assert limit % MIB == 0


def test_w5_a_limit_leaves_room_for_what_is_in_use():
    need = Need(base_bytes=2 * GIB, parked_bytes=300 * MIB)
    assert need.lowered_limit(100 * MIB) == 2 * GIB + FLOOR_BYTES + 200 * MIB
    assert need.lowered_limit(100 * MIB, in_use_bytes=250 * MIB) == 2 * GIB + FLOOR_BYTES + 250 * MIB


@given(lowered=st.integers(min_value=GIB, max_value=64 * GIB))
def test_case_66_the_limit_before_is_the_one_of_which_the_lowered_one_is_60_percent(lowered: int):
    assert lowered / upper_limit(lowered) == pytest.approx(LOWERED_SHARE, abs=0.001)


@given(net=SIZES, share=st.floats(min_value=0.0, max_value=1.0))
def test_m11_an_unannounced_limit_is_never_below_what_is_in_use(net: int, share: float):
    """A kernel with cgroup v2 would kill for it."""
    assert unannounced_limit(net, share) >= net


@given(idle=SIZES, share=st.floats(min_value=0.0, max_value=0.45))
def test_a_neighbour_never_takes_more_than_half_of_what_idle_conversations_hold(idle: int, share: float):
    assert 0 <= deficit_bytes(idle, share) <= idle / 2
    assert deficit_bytes(idle, share) < FLOOR_BYTES / 2


def test_a_pod_that_has_parked_more_than_it_uses_needs_nothing():
    assert Need.of(net_bytes=10, parked_bytes=30).base_bytes == 0


def test_the_policy_is_one_that_the_pod_accepts():
    document = policy_document(limit_bytes=4 * GIB, parked_max_bytes=400 * MIB)
    policy = parse_policy(document, limit_bytes=GENEROUS_LIMIT_BYTES)
    assert policy.memory.limit == 4 * GIB
    assert policy.memory.floor == FLOOR_BYTES
    assert policy.spill is not None
    assert "limit" not in policy_document(limit_bytes=None, parked_max_bytes=MIB)["memory"]


def test_of_a_flag_that_comes_twice_the_smaller_engines_counts():
    choice = EngineChoice(python="python", model="model", dtype="float32", cores=None)
    command = pod_command(choice, port=1, folder=Path("folder"), sockets=Path("sockets"))
    sizes = [flag for flag in command if flag.startswith("--max-model-len=")]
    assert sizes == ["--max-model-len=4096", "--max-model-len=3072"]
    assert command[:5] == ("python", "-m", "parkade_serving.cli", "serve", "model")


def test_more_changes_get_more_time_unless_the_time_was_named():
    assert choose_rounds(quick=False, changes=None, minutes=None) == DEFAULT_ROUNDS
    assert choose_rounds(quick=True, changes=None, minutes=None) == QUICK_ROUNDS
    many = choose_rounds(quick=False, changes=20, minutes=None)
    assert many.changes == 20
    assert many.minutes > DEFAULT_ROUNDS.minutes
    assert choose_rounds(quick=False, changes=20, minutes=7.0).minutes == 7.0
    assert choose_rounds(quick=False, changes=1, minutes=None).minutes == DEFAULT_ROUNDS.minutes
