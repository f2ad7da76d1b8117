"""``parkade rehearse`` as people run it: real vLLM in a real memory control group, a short one.

How long things took is judged by the rehearsal itself, on a machine that is left alone; here only what must be true on
any machine is looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from parkade_serving.command_line import ExitCode
from parkade_serving.rehearse.group import NoGroupError, made_group

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak, pytest.mark.kernel, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsal")


@pytest.fixture(scope="module")
def rehearsal(folder: Path) -> dict[str, Any]:
    try:
        with made_group():
            pass
    except NoGroupError as error:
        pytest.skip(str(error))
    written = folder / "rehearse.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "parkade_serving.cli", "rehearse", "--quick", "--changes", "1"),
            *("--minutes", "25", "--seed", "4711", "--dir", str(folder), "--json", str(written)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {ExitCode.OK, ExitCode.NO}, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(written.read_text())
    found["said"] = done.stdout
    return found


def test_nothing_is_lost_and_nobody_killed(rehearsal: dict[str, Any]) -> None:
    """W1, W4, D8, S2 with the processes of a real pod; the kernel's own counter."""
    figures = rehearsal["figures"]
    assert figures["oom_kills"] == 0, rehearsal["said"]
    assert figures["conversations_dropped"] == 0, rehearsal["said"]
    assert 0 < figures["written_first"] == figures["releases"], rehearsal["said"]
    assert figures["requests_failed"] == 0, rehearsal["said"]
    assert figures["cached_share"] >= 0.97, rehearsal["said"]


def test_a_lowered_limit_is_confirmed_or_noticed_or_rightly_refused(rehearsal: dict[str, Any]) -> None:
    """M11, case 66."""
    outcomes = {change["manner"]: change["outcome"] for change in rehearsal["figures"]["changes"]}
    assert outcomes["announced"] in {"confirmed", "kernel_refused"}, rehearsal["said"]
    assert outcomes["unannounced"] in {"noticed", "kernel_refused"}, rehearsal["said"]


def test_what_a_neighbour_took_was_given_back(rehearsal: dict[str, Any]) -> None:
    (gulp,) = rehearsal["figures"]["gulps"]
    assert gulp["below_floor_bytes"] > 0, rehearsal["said"]
    assert gulp["give_back_seconds"] is not None, rehearsal["said"]
    assert gulp["turns"] > 0, rehearsal["said"]


def test_what_was_on_disk_survives_a_kill(rehearsal: dict[str, Any]) -> None:
    """S2."""
    killing = rehearsal["figures"]["kill"]
    assert killing["lost"] == [], rehearsal["said"]
    assert killing["resumed"] == killing["published"] > 0, rehearsal["said"]


def test_the_verdict_and_where_to_look_next_are_said(rehearsal: dict[str, Any]) -> None:
    assert rehearsal["verdict"] == ("fail" if rehearsal["failures"] else "pass")
    assert f"verdict: {rehearsal['verdict']}" in rehearsal["said"]
    assert "parkade explain" in rehearsal["said"]
    assert rehearsal["receipts"]["turn"]


def test_it_leaves_nothing_behind(rehearsal: dict[str, Any], folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["rehearse.json"]
    assert not any("parkade-rehearsal" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    assert not any(str(folder) in " ".join(_command_line(process)) for process in psutil.process_iter())


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
