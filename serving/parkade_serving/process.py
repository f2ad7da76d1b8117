"""Set-up of every process of the engine: a vLLM general plug-in.

Why it exists: after a SIGKILL of the API process the engine core lives on with its memory (engine trap 16), and the
next start finds the socket, the spill directory and half of the limit taken. Here each process asks the kernel to end
it together with its parent.

What must stay true: harmless and idempotent; acts only in pods that ``parkade serve`` started, and never on a process
whose parent is somebody's shell.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Mapping
from typing import Final

from parkade_serving.sockets import SOCKET_DIR_ENV

LAUNCHER_PID_ENV: Final = "PARKADE_LAUNCHER_PID"
"""Set by the launcher for its child: that child's parent is the launcher and nobody else."""
_PR_SET_PDEATHSIG: Final = 1


def register() -> None:
    """The entry point; vLLM calls it in every process, sometimes more than once."""
    parent = expected_parent(os.environ)
    if parent is None:
        return
    die_with_parent()
    if os.getppid() != parent:  # It went before the kernel was asked: nobody would tell us any more.
        os.kill(os.getpid(), signal.SIGKILL)


def expected_parent(env: Mapping[str, str]) -> int | None:
    """The parent this process must not outlive; None where that is nobody's business here."""
    if not env.get(SOCKET_DIR_ENV):
        return None
    started_by = multiprocessing.parent_process()
    if started_by is not None:
        return started_by.pid
    launcher = env.get(LAUNCHER_PID_ENV, "")
    is_launchers_child = launcher.isascii() and launcher.isdigit() and int(launcher) == os.getppid()
    return os.getppid() if is_launchers_child else None


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``signum`` to this process when the thread that started it ends (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
