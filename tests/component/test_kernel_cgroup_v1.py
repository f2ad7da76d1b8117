"""M1, M4, M6, M10, M11 and the arena's promise, on the kernel this runs on, where it has cgroup v1.

Every check runs inside a control group with a limit that really kills (``cgroup_checks.py``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.kernel

MIB = 1 << 20
SIZE_MIB = 128


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each check saw. Skips with the reason where no v1 group can be made."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cgroup_checks.py")), "v1", str(SIZE_MIB)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=tmp_path_factory.mktemp("files"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if "skip" in found:
        pytest.skip(found["skip"])
    return found


def test_m11_a_live_change_of_the_limit_counts_from_the_next_reading(kernel: dict[str, Any]):
    readings = kernel["live_limit"]

    assert [readings[name]["limit"] for name in ("first", "lowered", "raised")] == [
        factor * SIZE_MIB * MIB for factor in (4, 3, 5)
    ]
    for reading in readings.values():
        assert reading["source"] == "cgroup"
        assert reading["available"] == reading["limit"] - reading["current"] + reading["credit"]


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
    assert seen["parked_bytes"] >= (SIZE_MIB - 8 - 4 - 8) * MIB


def test_without_the_gate_the_same_limit_kills(kernel: dict[str, Any]):
    assert kernel["parked_without_the_gate"] == {"signal": signal.SIGKILL}


def test_m6_file_cache_is_credited_once_it_is_clean(kernel: dict[str, Any]):
    seen = kernel["file_cache"]
    dirty, clean, written = seen["dirty"], seen["clean"], seen["written"]

    if clean["current"] - seen["before"]["current"] < written // 2:
        pytest.skip("the file system of the temporary folder keeps no page cache")
    assert clean["credit"] >= 0.9 * written
    assert dirty["credit"] <= clean["credit"]
