"""An aged server: real vLLM under a real limit, its heap full of holes, conversations that return all the same."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import CgroupTree, CgroupVersion

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.kernel, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("aged_process.py")
TESTS = Path(__file__).parents[1]

IN_A_GROUP_OF_ITS_OWN = 'echo $$ > "$1/cgroup.procs" && mount --bind "$1" "$2" && shift 2 && exec "$@"'
"""As in a container: the group is the topmost that the process sees."""


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[Path, Path]]:
    """A new memory group, and where its hierarchy is mounted; skips with the reason where none can be made."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("making a control group and a mount namespace needs root and unshare")
    try:
        levels = CgroupTree().levels()
    except MalformedAccountError as error:
        pytest.skip(str(error))
    if not levels or levels[-1].version is not CgroupVersion.V1:
        pytest.skip("no memory controller of cgroup v1 is mounted here")
    group = Path(levels[-1].folder) / f"parkade-aged-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"{group.parent} is not writable: {error.strerror}")
    try:
        yield group, Path(levels[0].folder)
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


@pytest.fixture(scope="module")
def aged(groups: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the server did on the way up."""
    group, mount = groups
    folder = tmp_path_factory.mktemp("aged")
    folder.chmod(0o700)
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", IN_A_GROUP_OF_ITS_OWN, "sh"),
            *(str(group), str(mount), sys.executable, str(SCRIPT), str(folder), str(mount)),
        ],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    result = folder / "facts.json"
    if not result.exists() and "mount" in done.stderr and "denied" in done.stderr:
        pytest.skip(f"a mount namespace cannot be made here: {done.stderr.strip()[-200:]}")
    assert result.exists(), f"the engine process ended with {done.returncode}:\n{done.stderr[-4000:]}"
    facts: dict[str, Any] = json.loads(result.read_text())
    return facts


def test_the_limit_that_binds_is_the_groups_own(aged: dict[str, Any]) -> None:
    """M1, M5: as in a container."""
    assert aged["reading"]["source"] == "cgroup"
    assert aged["reading"]["limit"] == aged["limit"] // 4096 * 4096


def test_every_revisit_is_resumed(aged: dict[str, Any]) -> None:
    """Every whole block that was known comes from RAM or disk."""
    revisits = [turn for turn in aged["turns"] if turn["known"]]
    assert len(revisits) >= 12
    assert [turn for turn in revisits if turn["reused"]["ram"] + turn["reused"]["disk"] < turn["known"]] == []
    assert {turn["outcome"] for turn in revisits} <= {"resumed_ram", "resumed_disk"}


def test_the_gate_refuses_nothing_while_memory_can_be_had(aged: dict[str, Any]) -> None:
    """G3, G5: the heap's holes are asked back first, then conversations go; a refusal means that nothing was left."""
    assert [refusal for refusal in aged["refusals"] if refusal["evictable"]] == []
    assert [receipt for receipt in aged["refuse_receipts"] if receipt["reason"] == "back_off"] == []


def test_memory_was_short_and_the_heap_gave_some_back(aged: dict[str, Any]) -> None:
    """G3: the run would prove nothing otherwise."""
    assert aged["heap_releases"] >= 1
    assert aged["heap_given_back"] >= 16 << 20
    assert [reason for _, reason in aged["evictions"]].count("gate") >= 1


def test_nobody_is_killed_and_nothing_is_lost(aged: dict[str, Any]) -> None:
    assert aged["oom_kills"] == 0
    assert aged["dropped"] == 0
    assert {outcome for outcome, _ in aged["evictions"]} <= {"written", "already_on_disk"}
    assert aged["leaks"] == {}
