"""Runs pip quietly, keeps its whole output in a log, and still shows that something moves.

Why it exists: an engine install takes minutes. pip's own output is hundreds of lines, and with ``--quiet`` it is
none. Here a step prints one line, a heartbeat every few seconds, and the log's tail only when it fails.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_S = 15.0
_TAIL_LINES = 25


@dataclass(frozen=True)
class PipResult:
    """How one pip command ended; ``output`` is all it printed."""

    code: int
    output: str
    seconds: float

    @property
    def not_found(self) -> bool:
        """True when no index that pip knows offers what was asked for."""
        return self.code != 0 and "No matching distribution found" in self.output


class InstallError(SystemExit):
    """pip failed; the message says where to look. Ends the program with status 1."""


def _last_words(log: Path, offset: int) -> str:
    lines = log.read_text(errors="replace")[offset:].strip().splitlines()
    return lines[-1].strip()[:90] if lines else "starting"


def run_pip(python: Path, arguments: Sequence[str], *, log: Path, label: str) -> PipResult:
    """Run ``python -m pip ARGUMENTS``, appending to ``log``; never raises for pip's own failures."""
    log.parent.mkdir(parents=True, exist_ok=True)
    offset = len(log.read_text(errors="replace")) if log.exists() else 0
    print(f"==> {label}", flush=True)
    begun = time.monotonic()
    with log.open("ab") as sink:
        command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        while True:
            try:
                code = child.wait(timeout=HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                print(f"    {time.monotonic() - begun:4.0f} s  {_last_words(log, offset)}", flush=True)
            except KeyboardInterrupt:
                child.terminate()
                raise
    return PipResult(code=code, output=log.read_text(errors="replace")[offset:], seconds=time.monotonic() - begun)


def check(result: PipResult, *, log: Path, label: str) -> None:
    """Raise `InstallError` with the end of pip's output when ``result`` is a failure."""
    if result.code == 0:
        return
    tail = "\n".join(result.output.strip().splitlines()[-_TAIL_LINES:])
    raise InstallError(f"{tail}\nerror: {label} failed (pip's exit status {result.code}); all of its output is in {log}")
