"""What must be true in a real memory control group, whichever version the kernel has.

The programs ``cgroup_checks.py`` (readings, arena, gate) and ``cgroup_pod.py`` (a whole pod) say what they saw in
groups with limits that really kill; the classes here judge it. ``test_kernel_cgroup_v1.py`` and
``test_cgroup_v2.py`` run them on a kernel each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20

RUNNER_DID_NOT_GET_THAT_FAR = 125
COMMAND_WAS_NOT_FOUND = (126, 127)
"""A shell's answers where the interpreter of this environment cannot be run in there, as with a /tmp of its own."""


def seen_by(
    program: str, version: str, mib: int, *, runner: str | None = None, timeout_s: float = 110
) -> dict[str, Any]:
    """What the program saw here or, where this kernel has another version, on the one that ``runner`` starts.

    Skips with the reason where no such kernel can be had.
    """
    done = _run([], program, version, mib, timeout_s)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if "skip" not in found:
        return found
    if runner is None:
        pytest.skip(found["skip"] + (", and PARKADE_CGROUP2 names no runner" if version == "v2" else ""))
    done = _run([runner], program, version, mib, timeout_s)
    if done.returncode in COMMAND_WAS_NOT_FOUND:
        pytest.skip(f"the kernel that {runner} starts does not see this folder: {done.stdout.strip()[-200:]}")
    if done.returncode == RUNNER_DID_NOT_GET_THAT_FAR or "is missing" in done.stderr:
        pytest.skip(f"{runner} could not start a kernel: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    # Another kernel has one stream for everything; what was seen is its last line.
    found = json.loads(done.stdout.splitlines()[-1])
    assert "skip" not in found, found
    return found


def found_runner() -> str | None:
    named = os.environ.get("PARKADE_CGROUP2")
    return shutil.which(named) if named else None


def _run(runner: list[str], program: str, version: str, mib: int, timeout_s: float) -> subprocess.CompletedProcess[str]:
    # A folder on a disk, and one that a kernel with a /tmp of its own sees as well.
    with tempfile.TemporaryDirectory(prefix="parkade-kernel-", dir="/var/tmp") as folder:
        return subprocess.run(
            [*runner, sys.executable, str(Path(__file__).with_name(program)), version, str(mib)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


class ReadingsConformance:
    """M1, M6, M10, M11 and the arena's promise. The fixture ``kernel`` is what ``cgroup_checks.py`` saw."""

    size_mib: int
    spare_mib = 8
    """What the process itself may take of the limit that is filled up."""

    def test_m11_a_live_change_of_the_limit_counts_from_the_next_reading(self, kernel: dict[str, Any]):
        readings = kernel["live_limit"]

        assert [readings[name]["limit"] for name in ("first", "lowered", "raised")] == [
            factor * self.size_mib * MIB for factor in (4, 3, 5)
        ]
        for reading in readings.values():
            assert reading["source"] == "cgroup"
            assert reading["available"] == reading["limit"] - reading["current"] + reading["credit"]

    def test_m1_a_limit_on_an_ancestor_binds(self, kernel: dict[str, Any]):
        reading = kernel["ancestor"]

        assert (reading["source"], reading["limit"]) == ("cgroup", 2 * self.size_mib * MIB)

    def test_a_commit_raises_usage_and_lowers_the_reading_by_what_the_arena_counts(self, kernel: dict[str, Any]):
        empty, full = kernel["arena_usage"]["empty"], kernel["arena_usage"]["full"]

        assert full["committed"] == full["resident"] == self.size_mib * MIB
        assert full["usage"] - empty["usage"] == pytest.approx(full["committed"], rel=0.05)
        assert empty["available"] - full["available"] == pytest.approx(full["committed"], rel=0.05)

    def test_a_release_lowers_usage_by_at_least_95_percent_of_what_it_says_it_gave_back(self, kernel: dict[str, Any]):
        seen = kernel["arena_usage"]
        full, halved, after = seen["full"], seen["halved"], seen["after"]

        assert halved["committed"] == halved["resident"] == self.size_mib * MIB // 2
        assert full["usage"] - halved["usage"] >= 0.95 * halved["committed"]
        assert seen["released"] == self.size_mib * MIB
        assert full["usage"] - after["usage"] >= 0.95 * seen["released"]
        assert (after["committed"], after["resident"]) == (0, 0)

    def test_m10_parking_until_the_gate_refuses_fills_the_limit_up_to_the_floor_and_never_gets_killed(
        self, kernel: dict[str, Any]
    ):
        seen = kernel["parked_by_the_gate"]

        assert seen["oom_kills"] == 0
        assert seen["asked_for_a_release"]
        assert 8 * MIB <= seen["refused_at"]["available"] < 12 * MIB
        assert seen["parked_bytes"] >= (self.size_mib - 8 - 4 - self.spare_mib) * MIB

    def test_without_the_gate_the_same_limit_kills(self, kernel: dict[str, Any]):
        assert kernel["parked_without_the_gate"] == {"signal": signal.SIGKILL}

    def test_m6_file_cache_is_credited_once_it_is_clean(self, kernel: dict[str, Any]):
        seen = kernel["file_cache"]
        dirty, clean, written = seen["dirty"], seen["clean"], seen["written"]

        if clean["current"] - seen["before"]["current"] < written // 2:
            pytest.skip("the file system of the temporary folder keeps no page cache")
        assert clean["credit"] >= 0.9 * written
        assert dirty["credit"] <= clean["credit"]

    def test_a_trigger_of_the_kernel_is_quiet_without_stalls_and_wakes_with_them(self, kernel: dict[str, Any]):
        seen = kernel["stalls"]

        if not seen["offered"]:
            pytest.skip("this kernel keeps no pressure-stall information of a group")
        assert seen["quiet"]
        assert seen["fired"]


@pytest.mark.slow
@pytest.mark.timeout(300)
class PodConformance:
    """Nothing is lost while limits and neighbours move. The fixture ``lives`` is what ``cgroup_pod.py`` saw."""

    given_back_within_s = 2.0

    def test_case_66_a_limit_lowered_to_60_percent_once_it_is_confirmed_costs_nothing_20_times(
        self, lives: dict[str, Any]
    ):
        """Case 66, M8: policy first, then the kernel's file, then both back, under turns."""
        seen = scene(lives, "limits", "announced")

        assert seen["refused"] == []
        assert seen["times"] == 20
        assert seen["given_back_mib"]["median"] > 0
        loses_nothing(seen)

    def test_m11_a_limit_lowered_without_a_word_is_noticed_within_a_second_and_the_floor_is_won_back(
        self, lives: dict[str, Any]
    ):
        """M11, W4: only the kernel's file, in steps that leave less than the floor."""
        noticed_and_won_back(lives, "unannounced")

    def test_memory_that_a_neighbour_takes_is_given_back_within_two_seconds_while_turns_are_served(
        self, lives: dict[str, Any]
    ):
        """W4, case 60: from the first reading below the floor to the next one that is not."""
        seen = scene(lives, "limits", "waves")

        assert seen["lowest_available"] < lives["limits"]["sizes"]["floor"]
        assert seen["seconds_below_floor"] <= self.given_back_within_s
        assert min(seen["turns_in_waves"]) > 0
        loses_nothing(seen)

    def test_w4_every_conversation_resumes_with_the_right_bytes_afterwards(self, lives: dict[str, Any]):
        for life in ("limits", "neighbour"):
            seen = scene(lives, life, "next_turns")

            assert seen["turns"] == 10
            loses_nothing(seen)

    def test_an_idle_pod_gives_back_before_a_growing_neighbour_meets_the_limit(self, lives: dict[str, Any]):
        """W4, case 60, with 70 % of the limit parked, and no request to wake anybody."""
        seen = scene(lives, "neighbour", "steady")

        assert seen["parked_share"] >= 0.65
        assert seen["turns"] == 0
        assert seen["reliefs"] > 0
        assert seen["lowest_available"] < lives["neighbour"]["sizes"]["floor"]
        assert seen["seconds_below_floor"] <= self.given_back_within_s
        loses_nothing(seen)


def scene(lives: dict[str, Any], life: str, scenario: str) -> dict[str, Any]:
    """What one scenario saw."""
    found = lives[life]
    assert "signal" not in found, f"the kernel killed the pod of {life}: {found}"
    assert "error" not in found, found["error"]
    seen: dict[str, Any] = found[scenario]
    return seen


def loses_nothing(seen: dict[str, Any]) -> None:
    """No kill by the kernel's own counters, no conversation dropped, every turn got back what it had."""
    assert seen["events"]["oom_kill"] == 0
    assert seen["events"].get("oom", 0) == 0
    assert [name for name in seen["receipts"] if name.startswith("drop")] == []
    assert {name for name in seen["receipts"] if name.startswith("evict")} <= {"evict written", "evict already_on_disk"}
    assert seen["turns_failed"] == ""
    assert seen["turns_short"] == []


def noticed_and_won_back(lives: dict[str, Any], scenario: str) -> dict[str, Any]:
    seen = scene(lives, "limits", scenario)
    assert seen["limit"] == lives["limits"]["sizes"]["lowered"]
    assert seen["noticed_seconds"]["most"] is not None, "a change was never noticed"
    assert seen["noticed_seconds"]["most"] <= 1.0
    assert seen["floor_back_seconds"]["most"] is not None, "the floor never came back"
    loses_nothing(seen)
    return seen
