"""One engine as a process: start it, wait until it answers, end it gently or kill it.

What must stay true: nothing that was started here outlives the demo, whatever ends it. A launcher may put the engine
into a session of its own, so processes are found by descent, not by group alone.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from parkade_cache.errors import ParkadeError

START_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 180.0
_GONE_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.25
_TAIL_LINES: Final = 12
_CAUSES: Final = 4
_CAUSE: Final = re.compile(r"\b\w*(?:Error|Exception): .+")
_HARMLESS: Final = re.compile(r"\b(?:INFO|WARNING)\b")

Waiting = Callable[[float], None]
"""Called now and then with the seconds waited so far."""


class EngineFailedError(ParkadeError, RuntimeError):
    """The engine did not start, or ended by itself; the message carries the end of its log."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Engine:
    """One engine process and its descendants; ``log`` gets everything they print."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, port: int, log: Path) -> None:
        self.port = port
        self.log = log
        with log.open("ab") as sink:
            self._child = subprocess.Popen(
                command, env=env, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._root = psutil.Process(self._child.pid)
        self._known: dict[int, psutil.Process] = {self._child.pid: self._root}

    @property
    def pid(self) -> int:
        """The first process."""
        return self._child.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, waiting: Waiting, *, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until ``/health`` answers; the seconds it took.

        Raises:
            EngineFailedError: it ended, or did not answer in time.

        """
        begun = time.monotonic()
        while not self._healthy():
            waited = time.monotonic() - begun
            self._look()
            if self._child.poll() is not None:
                raise EngineFailedError(self._describe(f"the engine ended with status {self._child.returncode}"))
            if waited > timeout_s:
                raise EngineFailedError(self._describe(f"the engine did not answer within {timeout_s:.0f} s"))
            waiting(waited)
            time.sleep(_POLL_S)
        self._look()
        return time.monotonic() - begun

    def stop(self, waiting: Waiting, *, timeout_s: float = STOP_TIMEOUT_S) -> float:
        """End it as a pod is ended, with SIGTERM to the first process; the seconds until all of it was gone.

        Raises:
            EngineFailedError: something of it was still there at the end of the time; it has been killed.

        """
        self._look()
        begun = time.monotonic()
        self._child.send_signal(signal.SIGTERM)
        while self._alive():
            waited = time.monotonic() - begun
            if waited > timeout_s:
                self.kill()
                raise EngineFailedError(self._describe(f"the engine did not end within {timeout_s:.0f} s"))
            waiting(waited)
            time.sleep(_POLL_S / 5)
        return time.monotonic() - begun

    def kill(self) -> None:
        """SIGKILL to every process of it, at one stroke; returns when they are gone."""
        self._look()
        for group in self._groups():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for process in self._known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.poll()
        psutil.wait_procs(list(self._known.values()), timeout=_GONE_TIMEOUT_S)
        self._child.wait(timeout=_GONE_TIMEOUT_S)

    def tail(self) -> str:
        """What it printed about errors, and the end of what it printed."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        # The cause of a failure is far above the end: each process up to the first adds a traceback of its own.
        causes = list(
            dict.fromkeys(
                match.group() for line in lines if not _HARMLESS.search(line) and (match := _CAUSE.search(line))
            )
        )
        return "\n".join([*causes[:_CAUSES], "...", *lines[-_TAIL_LINES:]])

    def _look(self) -> None:
        """Remember all descendants: once their parents are gone they could not be found any more."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._root.children(recursive=True):
                self._known.setdefault(process.pid, process)

    def _groups(self) -> set[int]:
        """Their process groups, less our own."""
        found: set[int] = set()
        for pid in self._known:
            with contextlib.suppress(ProcessLookupError):
                found.add(os.getpgid(pid))
        return found - {os.getpgid(0)}

    def _alive(self) -> bool:
        self._child.poll()
        return any(_runs(process) for process in self._known.values())

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _describe(self, what: str) -> str:
        return f"{what}; the end of its log {self.log}:\n{self.tail()}"


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
