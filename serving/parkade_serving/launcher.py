"""Runs the engine as a child: passes signals on, drains before it ends, leaves nothing behind.

Why it exists: vLLM ends at once on SIGTERM (engine trap 1), and after a SIGKILL of its API process the rest of it
lives on with its memory (trap 16). Here SIGTERM means: the cache is drained first, then the engine is asked to end,
then what is left of its process group is killed.

What must stay true: the child's group never outlives this process; a second signal hurries, a third kills; the exit
code is the child's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from parkade_serving.process import LAUNCHER_PID_ENV, die_with_parent

logger = logging.getLogger(__name__)

_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_PASSED_ON: Final = frozenset({signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
_WATCHED: Final = _ENDING | _PASSED_ON | {signal.SIGCHLD}
# What the engine needs beyond its own shutdown timeout: worker processes ending, the interpreter's exit.
_EXIT_SLACK_S: Final = 20.0
# A lost SIGCHLD must not leave the launcher waiting for ever.
_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a pod comes to its end."""

    drain: Callable[[float], None]
    """Drain the cache within that many seconds; whatever it raises is logged and the end goes on."""
    drain_seconds: float
    shutdown_seconds: float


class Launcher:
    """One child and its process group. Runs on the main thread, which is the one that gets signals."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], ending: Ending) -> None:
        self._command = list(command)
        self._env = {**env, LAUNCHER_PID_ENV: str(os.getpid())}
        self._ending = ending
        self._pid = 0
        self._exit_code: int | None = None

    def run(self) -> int:
        """Start the child and stay until it and its group are gone; the exit code as a shell would give it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            self._start(before)
            try:
                self._serve()
            finally:
                self._kill_group()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = self._exit_code if self._exit_code is not None else -signal.SIGKILL
        return code if code >= 0 else 128 - code

    def _start(self, mask: set[signal.Signals] | set[int]) -> None:
        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent()

        # The hook is safe: this process has one thread at this point.
        child = subprocess.Popen(
            self._command,
            env=self._env,
            start_new_session=True,
            preexec_fn=in_child,  # noqa: PLW1509
        )
        self._pid = child.pid
        child.returncode = 0  # Reaped below, with everything else that was left to this process.

    def _serve(self) -> None:
        while not self._gone():
            signum = self._next_signal(_POLL_S)
            if signum in _PASSED_ON:
                self._send(signum)
            elif signum in _ENDING:
                self._end()
                return

    def _end(self) -> None:
        logger.info("ending: draining for up to %g s", self._ending.drain_seconds)
        drained = threading.Event()
        threading.Thread(target=self._drain, args=(drained,), name="parkade-drain", daemon=True).start()
        self._wait(self._ending.drain_seconds, until=drained.is_set)
        if self._gone():
            return
        logger.info("ending: asking the engine to stop")
        self._send(signal.SIGTERM)
        self._wait(self._ending.shutdown_seconds + _EXIT_SLACK_S)
        if not self._gone():
            logger.error("ending: the engine did not stop in time and is killed")

    def _drain(self, drained: threading.Event) -> None:
        try:
            self._ending.drain(self._ending.drain_seconds)
        except Exception as error:  # noqa: BLE001 - a cache that cannot drain must not keep the pod from ending
            logger.warning("ending: not drained: %s", error)
        finally:
            drained.set()
            os.kill(os.getpid(), signal.SIGCHLD)  # Wakes the wait below.

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for the child's end, for ``until``, or for another signal to end, which hurries to the next step."""
        deadline = time.monotonic() + seconds
        while not self._gone() and not until():
            left = deadline - time.monotonic()
            if left <= 0 or self._next_signal(min(left, _POLL_S)) in _ENDING:
                return

    def _next_signal(self, seconds: float) -> int | None:
        info = signal.sigtimedwait(_WATCHED, seconds)
        return None if info is None else info.si_signo

    def _gone(self) -> bool:
        """Whether the child has ended; reaps every child, since in a container orphans are left to this process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code is not None

    def _send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signum)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + _POLL_S
        while not self._gone() and time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
