"""SIGKILL at 300 random moments of a pod's owner and movers: the next start serves what was published (S2).

``pod_life.py`` is the program: it says what each life checks. ``PARKADE_SIGKILL_SEED`` chooses other moments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from crash.power_loss_life import scratch

SEED = os.environ.get("PARKADE_SIGKILL_SEED", "1")
PROGRAM = Path(__file__).with_name("pod_life.py")
PODS = {
    "write-behind": (100, ()),
    "on-evict": (70, ("--mode", "OnEvict")),
    "two-ranks": (70, ("--ranks", "2")),
    "streams": (60, ("--streams",)),
}

Program = subprocess.Popen[str]


@pytest.fixture(scope="module")
def programs() -> Iterator[Mapping[str, Program]]:
    """All of them at once: each waits more than it works."""
    with scratch() as folder:
        started = {name: start(folder / name, kills, settings) for name, (kills, settings) in PODS.items()}
        yield started
        for program in started.values():
            program.kill()
            program.communicate()


def start(folder: Path, kills: int, settings: tuple[str, ...]) -> Program:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), "--seed", SEED, "--kills", str(kills), *settings],
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pod", PODS)
def test_s2_sigkill_at_any_moment_loses_nothing_published_and_no_start_fails(
    programs: Mapping[str, Program], pod: str
) -> None:
    """S2, D3, cases 36, 44, 69: killed in the middle of starts, turns, write-outs, streams, deletions and drains."""
    said, complained = programs[pod].communicate()
    assert programs[pod].returncode == 0, complained[-8000:]
    numbers = json.loads(said.splitlines()[-1])
    kills, _ = PODS[pod]
    assert numbers["kills"] == kills
    # Most kills came after the checks, and there was something to lose.
    assert numbers["checked"] >= kills / 2
    assert numbers["published"] >= kills
