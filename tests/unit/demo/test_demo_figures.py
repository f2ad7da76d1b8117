"""What the demo concludes from token counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_serving.demo.figures import (
    CacheFigures,
    RunFigures,
    TurnFigures,
    cached_share,
    common_prefix,
    resumable_tokens,
)


def turn(**changed: object) -> TurnFigures:
    values: dict[str, object] = {
        "conversation": "ada",
        "turn": 2,
        "after_restart": False,
        "prompt_tokens": 1000,
        "cached_tokens": 896,
        "resumable_tokens": 896,
        "first_token_seconds": 1.0,
    }
    return TurnFigures(**(values | changed))  # type: ignore[arg-type]


def run(*turns: TurnFigures) -> RunFigures:
    return RunFigures(
        name="tiny", ram_budget_bytes=1, turns=turns, newcomer=None, cache=CacheFigures(), shutdown_seconds=None
    )


def test_the_last_token_of_a_reply_is_not_resumable_because_its_kv_was_never_computed():
    assert resumable_tokens([1, 2, 3, 4, 9], [1, 2], [3, 4], block_tokens=1) == 3


def test_resumable_tokens_end_at_the_first_token_that_differs():
    assert resumable_tokens([1, 2, 7, 4], [1, 2], [3, 4], block_tokens=1) == 2


def test_resumable_tokens_are_whole_blocks():
    prompt = list(range(300))
    assert resumable_tokens(prompt, prompt[:200], prompt[200:270], block_tokens=128) == 256


def test_a_first_turn_has_nothing_to_resume():
    assert resumable_tokens([1, 2, 3], [], [], block_tokens=1) == 0


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_a_common_prefix_is_common_and_cannot_be_longer(left: list[int], right: list[int]):
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert left[: length + 1] != right[: length + 1] or length in (len(left), len(right))


@pytest.mark.parametrize(("cached", "resumed"), [(1000, True), (950, True), (949, False), (0, False)])
def test_a_turn_is_resumed_from_ninety_five_percent(cached: int, resumed: bool):
    assert turn(resumable_tokens=1000, cached_tokens=cached).resumed is resumed


def test_more_cached_than_resumable_in_one_turn_does_not_make_up_for_another():
    turns = [turn(resumable_tokens=100, cached_tokens=200), turn(resumable_tokens=100, cached_tokens=0)]
    assert cached_share(turns) == 0.5


def test_first_turns_count_in_no_figure_of_a_run():
    figures = run(
        turn(turn=1, cached_tokens=0, resumable_tokens=0, first_token_seconds=99.0),
        turn(turn=2, first_token_seconds=1.0),
        turn(turn=3, first_token_seconds=3.0),
    )
    assert len(figures.later_turns) == figures.resumed_turns == 2
    assert figures.median_first_token_seconds == 2.0


def test_the_worst_turn_of_a_run_is_seen_behind_a_good_total():
    figures = run(turn(resumable_tokens=10_000, cached_tokens=10_000), turn(resumable_tokens=100, cached_tokens=10))
    assert figures.cached_share > 0.99
    assert figures.worst_share == pytest.approx(0.1)


def test_an_engines_figures_add_up_over_its_restarts():
    before = CacheFigures(
        parked_bytes_peak=10, spilled_bytes=5, conversations_dropped=1, longest_hook_seconds=0.3, longest_hook="a"
    )
    after = CacheFigures(
        parked_bytes_peak=4, spilled_bytes=2, read_back_bytes=7, longest_hook_seconds=0.1, longest_hook="b"
    )
    assert before.plus(after) == CacheFigures(
        parked_bytes_peak=10,
        spilled_bytes=7,
        read_back_bytes=7,
        conversations_dropped=1,
        longest_hook_seconds=0.3,
        longest_hook="a",
    )
