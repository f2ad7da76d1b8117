"""The connector's rarer paths in real vLLM: preemption, clients that go, new weights, stuck devices, side calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("paths_process.py")
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """What happened in each scenario."""
    folder = tmp_path_factory.mktemp("paths")
    folder.chmod(0o700)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    result = folder / "facts.json"
    assert result.exists(), f"the engine process ended with {done.returncode}:\n{done.stderr[-4000:]}"
    facts: dict[str, Facts] = json.loads(result.read_text())
    return facts


def of(paths: dict[str, Facts], name: str) -> Facts:
    """A scenario's facts; what must be true of all of them is checked here."""
    facts = paths[name]
    assert "error" not in facts, facts["error"]
    assert facts["leaks"] == {}
    assert facts["totals"]["dropped"] == 0
    return facts


def counted(facts: Facts) -> int:
    """Blocks that were not captured in the scenario."""
    return int(facts["totals"]["not_captured"] - facts["before"]["not_captured"])


def resumed(turn: Facts) -> bool:
    """The text is right, and all that the engine had computed before came from the cache."""
    return bool(turn["right_text"]) and turn["blocks"] >= turn["of"] - 1


# -- preemption ------------------------------------------------------------------------------------------------------


def test_requests_that_preempt_each_other_say_what_they_say_without_a_cache(paths: dict[str, Facts]) -> None:
    """Both outgrow the engine; the one that was cut off goes on from the cache."""
    facts = of(paths, "preempted")
    assert facts["preemptions"] >= 1
    assert all(turn["right_text"] for turn in facts["first"].values())
    assert all(resumed(turn) for turn in facts["second"].values())


def test_blocks_taken_back_before_they_were_copied_are_counted_and_offered_again(paths: dict[str, Facts]) -> None:
    """Traps 2 and 3: nothing waits for the copy, nothing counts as dropped, and the next turn finds all of it."""
    facts = of(paths, "preempted_before_it_was_copied")
    assert facts["preemptions"] >= 1
    assert counted(facts) > 0
    told = [turn["receipt"]["detail"]["not_captured_blocks"] for turn in facts["first"].values()]
    assert sum(told) == counted(facts)
    assert max(given_up for _, given_up in facts["flushes"]) > 0
    assert facts["reoffers"] >= 1
    assert all(turn["right_text"] for turn in facts["first"].values())
    assert all(resumed(turn) for turn in facts["second"].values())


# -- clients that go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        "aborted_in_prefill",
        "aborted_in_decode",
        "aborted_while_restoring",
        "aborted_while_it_waits_for_the_gate",
        "aborted_before_it_was_scheduled",
    ],
)
def test_a_request_whose_client_has_gone_is_closed_and_leaves_nothing_behind(
    paths: dict[str, Facts], scenario: str
) -> None:
    """Section 7: one receipt closes it; no pin, hold, slot, job or engine block is left."""
    facts = of(paths, scenario)
    assert facts["receipt"]["detail"]["ended"] == "aborted"


def test_what_was_computed_before_the_client_went_is_kept(paths: dict[str, Facts]) -> None:
    in_prefill = of(paths, "aborted_in_prefill")
    assert in_prefill["again"]["right_text"]
    assert in_prefill["again"]["blocks"] == in_prefill["computed"] // 32
    assert resumed(of(paths, "aborted_in_decode")["again"])


def test_a_restore_nobody_waits_for_any_more_does_no_harm(paths: dict[str, Facts]) -> None:
    """R5: the blocks are not left as being restored; the next turn restores them."""
    again = of(paths, "aborted_while_restoring")["again"]
    assert resumed(again)
    assert again["receipt"]["outcome"] == "resumed_disk"


# -- the connector's own paths ----------------------------------------------------------------------------------------


def test_after_a_failed_copy_a_running_request_offers_its_blocks_again(paths: dict[str, Facts]) -> None:
    """``offer_again``: a hole would end every later match."""
    facts = of(paths, "device_error")
    assert counted(facts) > 0
    assert facts["reoffers"] >= 1
    assert facts["first"]["right_text"]
    assert resumed(facts["second"])


def test_blocks_shared_with_a_finished_request_are_not_given_up_for_the_next_one(paths: dict[str, Facts]) -> None:
    """``to_flush``: the engine names the copies under way, and nobody overwrites their blocks."""
    facts = of(paths, "shared_blocks")
    assert facts["engine_blocks"] == 8
    assert facts["held"] == 2
    assert [wanted for wanted, _ in facts["flushes"]]
    assert [given_up for _, given_up in facts["flushes"]] == [0] * len(facts["flushes"])
    assert counted(facts) == 0
    assert resumed(facts["again"])


def test_blocks_held_for_a_stuck_disk_are_given_up_at_the_limit_once_and_counted(paths: dict[str, Facts]) -> None:
    """``HOLD_LIMIT_S``: the engine gets its blocks back; what was copied before reaches the disk."""
    facts = of(paths, "disk_that_does_not_take_it")
    first, second = facts["first"], facts["second"]
    assert facts["waiting"] == counted(facts) == first["receipt"]["detail"]["not_captured_blocks"] > 0
    assert first["right_text"]
    assert second["right_text"]
    assert second["blocks"] == 10 - facts["waiting"]


def test_a_damaged_block_is_read_anew_and_its_pack_set_aside(paths: dict[str, Facts]) -> None:
    """D4, trap 7."""
    facts = of(paths, "damaged")
    hurt = facts["hurt"]
    assert hurt["right_text"]
    assert (hurt["receipt"]["outcome"], hurt["receipt"]["reason"]) == ("partial", "damaged")
    assert hurt["receipt"]["reused_disk_tokens"] == 5 * 32
    assert facts["quarantined"] == 1
    assert [(drop["outcome"], drop["reason"]) for drop in facts["drops"]] == [("quarantined", "damaged")]
    assert resumed(facts["healed"])


# -- new weights ------------------------------------------------------------------------------------------------------


def speaks_the_new_weights(turn: Facts) -> bool:
    """The turn and the one after it say what the new weights say; that this is something else is checked as well."""
    assert not turn["old_text"], "the new weights say the same as the old ones"
    return bool(turn["true_text"]) and bool(turn["again"])


def test_after_a_reset_nothing_from_before_is_served_from_any_tier(paths: dict[str, Facts]) -> None:
    """Trap 14: from RAM, from disk, or from a write that was under way."""
    facts = of(paths, "reset_at_rest")
    assert (facts["known"], facts["ram_blocks"], facts["disk_blocks"]) == (0, 0, 0)
    assert facts["old_packs"] == []
    for turn in facts["turns"].values():
        assert turn["blocks"] == 0
        assert speaks_the_new_weights(turn)


def test_a_request_that_is_started_anew_by_a_reset_finds_nothing_of_what_it_had(paths: dict[str, Facts]) -> None:
    """Trap 14; its copies under way end as stale jobs, which keep nothing."""
    facts = of(paths, "reset_with_a_request_running")
    assert facts["answer"] is True
    assert facts["stale"] == facts["jobs"] > 0
    assert facts["true_text"]
    assert speaks_the_new_weights(facts["next"])


def test_blocks_on_their_way_from_disk_at_a_reset_serve_nobody(paths: dict[str, Facts]) -> None:
    facts = of(paths, "reset_while_restoring")
    assert facts["stale"] == 1
    assert facts["other"]["receipt"]["reused_disk_tokens"] == 0
    assert facts["other"]["true_text"]
    assert speaks_the_new_weights(facts["next"])


@pytest.mark.parametrize("scenario", ["reset_while_loading", "reset_while_writing"])
def test_blocks_in_ram_that_a_job_uses_at_a_reset_serve_nobody(paths: dict[str, Facts], scenario: str) -> None:
    """Trap 14: the engine is at rest and a background write runs, or a load; the next prompts are the same."""
    facts = of(paths, scenario)
    assert facts["other"]["receipt"]["reused_ram_tokens"] == 0
    assert facts["other"]["true_text"]
    assert speaks_the_new_weights(facts["next"])


# -- side calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["captured", "written", "streamed", "answered", "over"])
def test_a_side_call_does_not_cost_the_conversation_its_newest_state(paths: dict[str, Facts], moment: str) -> None:
    """W6: while that is being copied, written, streamed or computed, or at rest, with RAM for one."""
    assert "error" not in paths["side_calls"], paths["side_calls"].get("error")
    facts = of(paths["side_calls"], moment)
    assert counted(facts) == 0
    assert resumed(facts["next"])
