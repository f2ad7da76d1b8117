"""Processes of the engine end with their parent, and only in pods that Parkade started (engine trap 16)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from parkade_serving.process import expected_parent, register

POD = """
import multiprocessing, os, signal
from parkade_serving.process import register
def engine_core():
    register()
    register()
    os.write(1, b"up\\n")
    signal.pause()
context = multiprocessing.get_context("fork")
child = context.Process(target=engine_core)
child.start()
signal.pause()
"""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PARKADE_SOCKET_DIR": ""},
        {"PARKADE_SOCKET_DIR": "/x"},
        {"PARKADE_SOCKET_DIR": "/x", "PARKADE_LAUNCHER_PID": "1x"},
        {"PARKADE_LAUNCHER_PID": str(os.getppid())},
        {"PARKADE_SOCKET_DIR": "/x", "PARKADE_LAUNCHER_PID": "999999999"},
    ],
)
def test_a_process_that_a_shell_started_is_left_alone(env: dict[str, str]) -> None:
    assert expected_parent(env) is None


def test_the_launchers_child_ends_with_the_launcher() -> None:
    env = {"PARKADE_SOCKET_DIR": "/x", "PARKADE_LAUNCHER_PID": str(os.getppid())}
    assert expected_parent(env) == os.getppid()


def test_registering_outside_a_pod_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARKADE_SOCKET_DIR", raising=False)
    register()


def test_an_engine_core_dies_with_its_killed_api_process() -> None:
    environment = {**os.environ, "PARKADE_SOCKET_DIR": "/x"}
    process = subprocess.Popen([sys.executable, "-c", POD], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "up\n"
        process.send_signal(signal.SIGKILL)
        assert output.readline() == "", "the pipe ends when the last process of the pod is gone"
    process.wait()
