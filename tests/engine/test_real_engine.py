"""Real vLLM on the CPU with a real model: what comes back is what went in, from RAM, from disk, after a restart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("engine_process.py")
BLOCK = 128
RESUMABLE = 650 // BLOCK * BLOCK


def live(folder: Path, phase: str, parked: str) -> dict[str, Any]:
    folder.chmod(0o700)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), phase, parked],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    result = folder / f"{phase}.json"
    assert result.exists(), f"the engine process ended with {done.returncode}:\n{done.stderr[-4000:]}"
    facts: dict[str, Any] = json.loads(result.read_text())
    return facts


@pytest.fixture(scope="module", params=["512Mi", "12Mi"], ids=["ram-for-all", "ram-too-small-for-any"])
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Three lives of one pod over one spill directory."""
    folder = tmp_path_factory.mktemp("pod")
    return {phase: live(folder, phase, request.param) for phase in ("first-life", "second-life", "damaged")} | {
        "parked": {"max": request.param}
    }


def test_a_conversation_that_left_the_engine_is_restored_in_full(lives: dict[str, dict[str, Any]]) -> None:
    """R1, R2, cases 29 and 32: every whole block of the returning prompt is cached."""
    restored = lives["first-life"]["restored"]
    assert restored["cached"] == RESUMABLE
    tier = "ram" if lives["parked"]["max"] == "512Mi" else "disk"
    assert restored["receipt"]["outcome"] == f"resumed_{tier}"


def test_generated_tokens_are_kept_too(lives: dict[str, dict[str, Any]]) -> None:
    """The next turn's prompt contains the reply: the grown prompt resumes beyond the first prompt's blocks."""
    assert lives["first-life"]["grown"]["cached"] >= RESUMABLE


def test_restored_blocks_are_bit_identical_to_those_saved(lives: dict[str, dict[str, Any]]) -> None:
    saved = set(lives["first-life"]["out"])
    for phase in ("first-life", "second-life"):
        entered = lives[phase]["entered"]
        assert entered, "no block entered the engine"
        assert lives[phase]["differing"] == 0
        assert set(entered) <= saved | set(lives[phase]["out"])


def test_greedy_text_is_the_same_as_after_a_hit_in_the_engines_own_cache(lives: dict[str, dict[str, Any]]) -> None:
    first = lives["first-life"]
    assert first["engine_hit"]["cached"] == first["restored"]["cached"]
    assert first["restored"]["reply"] == first["engine_hit"]["reply"]
    assert lives["second-life"]["restored"]["reply"] == first["engine_hit"]["reply"]


def test_everything_published_is_served_after_a_restart(lives: dict[str, dict[str, Any]]) -> None:
    """S2, S3: the engine ended without a drain; what only RAM had was written while its worker left."""
    restored = lives["second-life"]["restored"]
    assert restored["cached"] == RESUMABLE
    assert restored["receipt"]["outcome"] == "resumed_disk"


def test_a_conversation_first_seen_after_a_restart_gets_the_shared_prefix_from_disk(
    lives: dict[str, dict[str, Any]],
) -> None:
    """Case 72."""
    newcomer = lives["second-life"]["newcomer"]
    assert newcomer["cached"] == 300 // BLOCK * BLOCK
    assert newcomer["receipt"]["reused_disk_tokens"] == newcomer["cached"]


def test_a_damaged_block_is_recomputed_and_the_pod_lives(lives: dict[str, dict[str, Any]]) -> None:
    """D4, trap 7: the damaged block and what follows is read anew, the text is right, the next turn resumes."""
    facts = lives["damaged"]
    right = [lives["first-life"][turn]["reply"] for turn in ("engine_hit", "other")]
    assert [turn["reply"] for turn in facts["damaged"]] == right
    hit, missed = sorted(facts["damaged"], key=lambda turn: -turn["cached"])
    assert hit["cached"] == RESUMABLE
    assert missed["cached"] < RESUMABLE
    assert missed["receipt"]["reason"] == "damaged"
    assert facts["quarantined"] == 1
    assert [turn["cached"] for turn in facts["healed"]] == [RESUMABLE] * 2
    assert [turn["reply"] for turn in facts["healed"]] == right
    assert facts["differing"] == 0


def test_requests_that_share_a_prefix_do_not_cost_each_other_their_blocks(lives: dict[str, dict[str, Any]]) -> None:
    """The engine wants the stores of shared blocks flushed; nothing overwrites them, so nothing is given up."""
    assert [twin["cached"] for twin in lives["first-life"]["twins"]] == [406 // BLOCK * BLOCK] * 2


def test_nothing_is_dropped_and_no_hook_waits(lives: dict[str, dict[str, Any]]) -> None:
    for phase in ("first-life", "second-life"):
        summary = lives[phase]["summary"]
        assert summary["dropped_conversations_total"] == 0
        assert summary["not_captured_blocks_total"] == 0
        assert {"turn", "recover"} <= set(lives[phase]["kinds"])


def test_the_engine_ends_promptly(lives: dict[str, dict[str, Any]]) -> None:
    """A worker that leaves waits for the owner's last drain, not for its timeout."""
    assert all(lives[phase]["shutdown_seconds"] < 15 for phase in ("first-life", "second-life", "damaged"))
