"""The launcher with real processes and signals; what happened is read from the pipe they all write to.

The pipe's end means that every process of the pod is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PREAMBLE = """
import os, signal, subprocess, sys, threading
def say(word):
    os.write(1, (word + "\\n").encode())
"""
LAUNCHER = (
    PREAMBLE
    + """
from parkade_serving.launcher import Ending, Launcher
def drain(seconds):
    say("drain")
    {drain}
command = [sys.executable, "-c", sys.argv[1]]
ending = Ending(drain=drain, drain_seconds=60, shutdown_seconds=60)
sys.exit(Launcher(command, dict(os.environ), ending).run())
"""
)
POLITE = (
    PREAMBLE
    + """
def end(signum, frame):
    say("term")
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, lambda *_: say("usr1"))
say("up")
while True:
    signal.pause()
"""
)
STUBBORN = (
    PREAMBLE
    + """
signal.signal(signal.SIGTERM, lambda *_: say("term"))
say("up")
while True:
    signal.pause()
"""
)
WITH_A_HELPER = (
    PREAMBLE
    + """
subprocess.Popen([sys.executable, "-c", "import os, signal; os.write(1, b'helper up\\\\n'); signal.pause()"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
{then}
"""
)


@contextmanager
def launched(child: str, drain: str = "pass") -> Iterator[subprocess.Popen[str]]:
    script = LAUNCHER.format(drain=drain)
    process = subprocess.Popen(
        [sys.executable, "-c", script, child], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_cache_is_drained_before_the_engine_is_asked_to_end_and_its_exit_code_is_kept() -> None:
    """S1, engine trap 1."""
    with launched(POLITE) as pod:
        assert word(pod) == "up"
        pod.send_signal(signal.SIGTERM)
        assert [word(pod), word(pod), word(pod)] == ["drain", "term", ""]
        assert pod.wait() == 7


@pytest.mark.parametrize("drain", ["raise OSError('disk')", "raise RuntimeError('no owner')"])
def test_a_drain_that_fails_does_not_keep_the_pod_from_ending(drain: str) -> None:
    with launched(POLITE, drain) as pod:
        assert word(pod) == "up"
        pod.send_signal(signal.SIGINT)
        assert [word(pod), word(pod), word(pod)] == ["drain", "term", ""]


def test_a_second_signal_hurries_past_the_drain_and_a_third_kills() -> None:
    with launched(STUBBORN, "threading.Event().wait()") as pod:
        assert word(pod) == "up"
        pod.send_signal(signal.SIGTERM)
        assert word(pod) == "drain"
        pod.send_signal(signal.SIGTERM)
        assert word(pod) == "term"
        pod.send_signal(signal.SIGTERM)
        assert word(pod) == ""
        assert pod.wait() == 128 + signal.SIGKILL


def test_an_engine_that_ends_during_the_drain_is_not_waited_for() -> None:
    with launched(PREAMBLE + "say(str(os.getpid()))\nsignal.pause()", "threading.Event().wait()") as pod:
        engine = int(word(pod))
        pod.send_signal(signal.SIGTERM)
        assert word(pod) == "drain"
        os.kill(engine, signal.SIGKILL)
        assert pod.wait() == 128 + signal.SIGKILL


def test_when_the_engine_dies_nothing_of_its_group_is_left() -> None:
    """Engine trap 16."""
    with launched(WITH_A_HELPER.format(then="sys.stdin.read(0); os.kill(os.getpid(), signal.SIGKILL)")) as pod:
        assert pod.wait() == 128 + signal.SIGKILL
        assert pod.stdout is not None
        assert pod.stdout.read() in {"", "helper up\n"}


def test_when_the_launcher_is_killed_the_engine_dies_with_it() -> None:
    with launched(STUBBORN) as pod:
        assert word(pod) == "up"
        pod.kill()
        assert word(pod) == ""


def test_other_signals_are_passed_on() -> None:
    with launched(POLITE) as pod:
        assert word(pod) == "up"
        pod.send_signal(signal.SIGUSR1)
        assert word(pod) == "usr1"


def test_an_engine_that_ends_by_itself_ends_the_pod_with_its_code() -> None:
    with launched("import sys; sys.exit(5)") as pod:
        assert pod.wait() == 5


def test_the_child_does_not_inherit_blocked_signals_and_knows_its_launcher() -> None:
    child = PREAMBLE + (
        "say(str(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))));"
        "say(str(os.environ['PARKADE_LAUNCHER_PID'] == str(os.getppid())))"
    )
    with launched(child) as pod:
        assert [word(pod), word(pod)] == ["[]", "True"]
        assert pod.wait() == 0
