"""M1, M3, M6, M10, M11 and the arena's promise, on a real kernel with cgroup v2.

Runs directly where this machine has a writable v2 memory controller. Elsewhere ``PARKADE_CGROUP2`` may name a
program that runs a command on such a kernel over the same files (user-mode Linux, for one). A first touch of a page
may be slow there, so sizes are small.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.kernel

MIB = 1 << 20
SIZE_MIB = 32
RUNNER_DID_NOT_GET_THAT_FAR = 125


def run_checks(runner: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*runner, sys.executable, str(Path(__file__).with_name("cgroup_checks.py")), "v2", str(SIZE_MIB)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


COMMAND_WAS_NOT_FOUND = (126, 127)
"""A shell's answers where the interpreter of this environment cannot be run in there, as with a /tmp of its own."""


def found_runner() -> str | None:
    named = os.environ.get("PARKADE_CGROUP2")
    return shutil.which(named) if named else None


@pytest.fixture(scope="module")
def kernel() -> dict[str, Any]:
    """What each check saw. Skips with the reason where no kernel with cgroup v2 can be had."""
    done = run_checks([])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if "skip" not in found:
        return found
    runner = found_runner()
    if runner is None:
        pytest.skip(f"{found['skip']}, and PARKADE_CGROUP2 names no runner")
    done = run_checks([runner])
    if done.returncode in COMMAND_WAS_NOT_FOUND:
        pytest.skip(f"the kernel that {runner} starts does not see this folder: {done.stdout.strip()[-200:]}")
    if done.returncode == RUNNER_DID_NOT_GET_THAT_FAR or "is missing" in done.stderr:
        pytest.skip(f"{runner} could not start a kernel: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "skip" not in found, found
    return found


def test_m11_a_live_change_of_the_limit_counts_from_the_next_reading(kernel: dict[str, Any]):
    readings = kernel["live_limit"]

    assert [readings[name]["limit"] for name in ("first", "lowered", "raised")] == [
        factor * SIZE_MIB * MIB for factor in (4, 3, 5)
    ]
    for reading in readings.values():
        assert reading["source"] == "cgroup"
        assert reading["available"] == reading["limit"] - reading["current"] + reading["credit"]


def test_m3_memory_high_below_memory_max_binds(kernel: dict[str, Any]):
    assert kernel["live_limit"]["high"]["limit"] == 2 * SIZE_MIB * MIB


def test_m1_a_limit_on_an_ancestor_binds(kernel: dict[str, Any]):
    reading = kernel["ancestor"]

    assert (reading["source"], reading["limit"]) == ("cgroup", 2 * SIZE_MIB * MIB)


def test_a_commit_raises_usage_and_lowers_the_reading_by_what_the_arena_counts(kernel: dict[str, Any]):
    empty, full = kernel["arena_usage"]["empty"], kernel["arena_usage"]["full"]

    assert full["committed"] == full["resident"] == SIZE_MIB * MIB
    assert full["usage"] - empty["usage"] == pytest.approx(full["committed"], rel=0.05)
    assert empty["available"] - full["available"] == pytest.approx(full["committed"], rel=0.05)


def test_a_release_lowers_usage_by_at_least_95_percent_of_what_it_says_it_gave_back(kernel: dict[str, Any]):
    seen = kernel["arena_usage"]
    full, halved, after = seen["full"], seen["halved"], seen["after"]

    assert halved["committed"] == halved["resident"] == SIZE_MIB * MIB // 2
    assert full["usage"] - halved["usage"] >= 0.95 * halved["committed"]
    assert seen["released"] == SIZE_MIB * MIB
    assert full["usage"] - after["usage"] >= 0.95 * seen["released"]
    assert (after["committed"], after["resident"]) == (0, 0)


def test_m10_parking_until_the_gate_refuses_fills_the_limit_up_to_the_floor_and_never_gets_killed(
    kernel: dict[str, Any],
):
    seen = kernel["parked_by_the_gate"]

    assert seen["oom_kills"] == 0
    assert seen["asked_for_a_release"]
    assert 8 * MIB <= seen["refused_at"]["available"] < 12 * MIB
    assert seen["parked_bytes"] >= (SIZE_MIB - 8 - 4 - 4) * MIB


def test_without_the_gate_the_same_limit_kills(kernel: dict[str, Any]):
    assert kernel["parked_without_the_gate"] == {"signal": signal.SIGKILL}


def test_m6_file_cache_is_credited_once_it_is_clean(kernel: dict[str, Any]):
    seen = kernel["file_cache"]

    assert seen["clean"]["credit"] >= 0.9 * seen["written"]
    assert seen["dirty"]["credit"] <= seen["clean"]["credit"]
