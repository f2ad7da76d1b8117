"""The rehearsal's control group where a container without systemd runs on a kernel with cgroup v2.

As ``test_cgroup_v2.py``: ``PARKADE_CGROUP2`` names a program that runs a command on such a kernel over the same files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.kernel

MIB = 1 << 20


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    runner = shutil.which(os.environ.get("PARKADE_CGROUP2") or "no runner was named")
    if runner is None:
        pytest.skip("PARKADE_CGROUP2 names no runner")
    done = subprocess.run(
        [runner, sys.executable, str(Path(__file__).with_name("rehearsal_container.py"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode in {125, 126, 127}:
        pytest.skip(f"{runner} could not run it: {(done.stderr or done.stdout).strip()[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if "skip" in found:
        pytest.skip(found["skip"])
    return found


def test_a_group_is_made_below_one_that_holds_processes(seen: dict[str, Any]):
    assert seen["processes_before"] > 0
    assert seen["handed_down"] == ["memory"]
    assert seen["oom_kills"] == 0


def test_m8_the_pod_sees_the_new_group_at_the_top(seen: dict[str, Any]):
    assert (seen["seen"]["source"], seen["seen"]["limit"]) == ("flag", 200 * MIB)
    assert 0 < seen["seen"]["current"] < 100 * MIB


def test_all_of_it_is_undone(seen: dict[str, Any]):
    assert seen["handed_down_after"] == []
    assert seen["processes_after"] == seen["processes_before"]
    assert seen["left"] == []
