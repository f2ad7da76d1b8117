"""The demo says plainly which promise was not kept."""

from __future__ import annotations

import dataclasses
import json

import pytest

from parkade_serving.demo.figures import CacheFigures, RunFigures, TurnFigures
from parkade_serving.demo.report import document, table, verdict_lines
from parkade_serving.demo.verdicts import judge, ratios

KEYS_OF_A_RUN = {
    "name", "ram_budget_bytes", "later_turns", "resumed_turns", "cached_share", "median_first_token_seconds",
    "conversations_dropped", "parked_bytes_peak", "spilled_bytes", "read_back_bytes", "longest_hook_seconds",
    "not_captured_blocks", "shutdown_seconds", "turns",
}  # fmt: skip
KEYS_OF_A_TURN = {
    "conversation", "turn", "after_restart", "prompt_tokens", "cached_tokens", "resumable_tokens",
    "first_token_seconds", "outcome",
}  # fmt: skip


def turns(*, cached: int, seconds: float) -> tuple[TurnFigures, ...]:
    return tuple(
        TurnFigures(
            conversation=name,
            turn=number,
            after_restart=number > 3,
            prompt_tokens=2000,
            cached_tokens=cached if number > 1 else 0,
            resumable_tokens=1920 if number > 1 else 0,
            first_token_seconds=seconds,
            outcome="resumed_disk",
        )
        for number in range(1, 6)
        for name in ("ada", "ben", "cyd")
    )


def run(name: str, *, cached: int = 1920, seconds: float = 1.0, **changed: object) -> RunFigures:
    newcomer = dataclasses.replace(turns(cached=640, seconds=1.0)[3], resumable_tokens=640)
    figures = RunFigures(
        name=name,
        ram_budget_bytes=None if name == "no-cache" else 1 << 20,
        turns=turns(cached=cached, seconds=seconds),
        newcomer=None if name == "no-cache" else newcomer,
        cache=CacheFigures(longest_hook_seconds=0.004, longest_hook="start_load_kv"),
        shutdown_seconds=1.5,
    )
    return dataclasses.replace(figures, **changed)  # type: ignore[arg-type]


def by_name(*runs: RunFigures) -> dict[str, RunFigures]:
    return {one.name: one for one in runs}


GOOD = by_name(
    run("no-cache", cached=0, seconds=5.0),
    run("large"),
    run("tiny", seconds=1.2),
    run("tiny-killed", seconds=1.2),
)


def broken(runs: dict[str, RunFigures]) -> list[str]:
    return [verdict.promise for verdict in judge(runs) if not verdict.kept]


def test_good_runs_keep_every_promise():
    assert broken(GOOD) == []
    assert len(judge(GOOD)) == 3 * 5 + 3


def test_the_run_without_a_cache_is_held_to_nothing():
    assert judge(by_name(run("no-cache", cached=0))) == ()


@pytest.mark.parametrize(
    ("changed", "promise"),
    [
        ({"turns": turns(cached=1700, seconds=1.0)}, "all later turns resumed"),
        ({"turns": turns(cached=1700, seconds=1.0)}, "cached"),
        ({"cache": CacheFigures(conversations_dropped=1)}, "no conversation dropped"),
        ({"cache": CacheFigures(longest_hook_seconds=0.021)}, "no hook of the engine's step over 20 ms"),
    ],
)
def test_a_promise_that_one_run_breaks_is_named_with_the_run(changed: dict[str, object], promise: str):
    found = broken(GOOD | by_name(run("tiny-killed", **changed)))
    assert any(one.startswith("tiny-killed: ") and promise in one for one in found)
    assert not any(one.startswith("large") for one in found)


def test_a_new_conversation_that_re_reads_its_system_prompt_breaks_a_promise():
    newcomer = dataclasses.replace(turns(cached=512, seconds=1.0)[3], resumable_tokens=640)
    assert len(broken(GOOD | by_name(run("large", newcomer=newcomer)))) == 1


def test_a_new_conversation_that_shares_nothing_proves_nothing():
    newcomer = dataclasses.replace(turns(cached=0, seconds=1.0)[3], resumable_tokens=0)
    assert len(broken(GOOD | by_name(run("large", newcomer=newcomer)))) == 1


def test_a_tiny_budget_may_cost_thirty_percent_and_no_more():
    assert broken(GOOD | by_name(run("tiny", seconds=1.3))) == []
    assert broken(GOOD | by_name(run("tiny", seconds=1.31))) == ["tiny RAM at most 1.3 x large RAM"]


def test_ratios_exist_only_for_runs_that_were_made():
    assert ratios(by_name(run("large"))) == {}
    assert ratios(GOOD)["no-cache_to_large"] == pytest.approx(5.0)
    assert ratios(GOOD)["tiny_to_large"] == pytest.approx(1.2)


def test_the_document_has_the_keys_of_the_public_interface():
    written = json.loads(json.dumps(document(list(GOOD.values()), version="1", machine={}, engine={"name": "vllm"})))
    assert {"version", "machine", "engine", "runs"} <= written.keys()
    assert all(one.keys() >= KEYS_OF_A_RUN for one in written["runs"])
    assert all(one.keys() >= KEYS_OF_A_TURN for one in written["runs"][1]["turns"])
    assert [one["later_turns"] for one in written["runs"]] == [12] * 4
    assert written["runs"][0]["ram_budget_bytes"] is None


def test_the_table_has_a_column_per_run_and_no_ragged_line():
    lines = table(list(GOOD.values())).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["no-cache", "large", "tiny", "tiny-killed"]
    assert "12 of 12" in table([run("tiny")])


def test_a_broken_promise_stands_out_in_the_list():
    shown = verdict_lines(judge(by_name(run("tiny", cache=CacheFigures(conversations_dropped=2)))))
    assert [line.split()[0] for line in shown.splitlines()].count("FAIL") == 1
