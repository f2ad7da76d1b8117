"""Starts a program in a control group that it sees as a container sees its own: at the very top.

Why it exists: a pod's cap counts against the topmost group that the pod can see (M8). In a container that is the
container's; here the group is bound over the mount point of its hierarchy, in a mount namespace of the program's own.

What must stay true: the program keeps this process's number, so that whoever started it can end it; it ends with
whoever started it; nothing is mounted outside its own namespace.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from parkade_serving.process import die_with_parent

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWCGROUP: Final = 0x02000000
_MS_BIND: Final = 1 << 12
_MS_REC: Final = 1 << 14
_MS_PRIVATE: Final = 1 << 18


def command(program: Sequence[str], *, python: str, group: Path, mount: Path) -> tuple[str, ...]:
    """The command line that runs ``program`` in ``group``, seen at ``mount``."""
    return (python, "-m", __name__, str(group), str(mount), *program)


def own_mounts() -> None:
    """From now on what this thread, and what it starts, mounts is seen by nobody else and gone with them.

    Raises:
        OSError: not allowed here.

    """
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


def _see_at_top(group: Path, mount: Path) -> None:
    own_mounts()
    # Paths in /proc/self/cgroup then begin at the group too; a kernel without it shows a path that is not mounted.
    _try("unshare", _CLONE_NEWCGROUP)
    _call("mount", os.fsencode(group), os.fsencode(mount), None, _MS_BIND, None)


def _call(name: str, *arguments: object) -> None:
    code = _try(name, *arguments)
    if code:
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _try(name: str, *arguments: object) -> int:
    """The error number of a system call; 0 where it worked."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    return 0 if function(*arguments) == 0 else ctypes.get_errno()


def main(arguments: Sequence[str]) -> None:
    """``GROUP MOUNT PROGRAM [ARGUMENT…]``; does not return."""
    group, mount, *program = arguments
    die_with_parent()
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    _see_at_top(Path(group), Path(mount))
    os.execvp(program[0], program)  # noqa: S606 - the program takes this process over


if __name__ == "__main__":
    main(sys.argv[1:])
