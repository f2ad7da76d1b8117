"""A real memory control group for the rehearsed pod, made below this process's own and taken away again.

Why it exists: what the kernel does at a limit cannot be played. The group looks to the pod as a container's own does;
the kernel's counter of what it has killed decides whether the rehearsal was passed.

What must stay true: only groups made here are changed, but for one thing: cgroup v2 hands a controller only to groups
below one that holds no process itself, so the processes of such a group may be moved one level down meanwhile. All
of it is undone at the end. Nothing is ever killed but what is in the group that was made here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.errors import MalformedAccountError, ParkadeError
from parkade_cache.memory.cgroup import CgroupTree, CgroupVersion, Level

_NAME: Final = "parkade-rehearsal-"
_ASIDE: Final = "-others"
_STALE: Final = re.compile(rf"{_NAME}([0-9]+)(?:{_ASIDE})?")
_CONTROLLERS_OF_CHILDREN: Final = "cgroup.subtree_control"
_PROCESSES: Final = "cgroup.procs"
_LIMIT: Final = {CgroupVersion.V1: "memory.limit_in_bytes", CgroupVersion.V2: "memory.max"}
_NO_LIMIT: Final = {CgroupVersion.V1: "-1", CgroupVersion.V2: "max"}
_EVENTS: Final = {CgroupVersion.V1: "memory.oom_control", CgroupVersion.V2: "memory.events"}
_NO_SWAP: Final = {CgroupVersion.V1: "memory.swappiness", CgroupVersion.V2: "memory.swap.max"}
_OOM_KILLS: Final = "oom_kill"
_GONE_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.05


class NoGroupError(ParkadeError, OSError):
    """No memory control group can be made here; the message says why."""


class LimitRefusedError(ParkadeError, OSError):
    """The kernel does not lower the limit: more is in use than it could take back (EBUSY)."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that holds the pod and its neighbour, and nobody else."""

    level: Level
    mount: Path
    """Where the hierarchy is mounted; seen from inside, the group itself is to lie there."""

    @property
    def folder(self) -> Path:
        return Path(self.level.folder)

    @property
    def processes_file(self) -> Path:
        """Whoever writes its own number there is in the group."""
        return self.folder / _PROCESSES

    def net_bytes(self) -> int:
        """What is charged to the group, less what the kernel would take back (M6, M7)."""
        current_bytes = self.level.current_bytes() or 0
        return current_bytes - self.level.credit_bytes(current_bytes)

    def oom_kills(self) -> int:
        """How many processes of the group the kernel has killed for want of memory."""
        return read_counter((self.folder / _EVENTS[self.level.version]).read_text(), _OOM_KILLS)

    def set_limit(self, limit_bytes: int | None) -> None:
        """The kernel's limit; None takes it away.

        Raises:
            LimitRefusedError: more is in use than the kernel could take back.

        """
        text = _NO_LIMIT[self.level.version] if limit_bytes is None else str(limit_bytes)
        try:
            (self.folder / _LIMIT[self.level.version]).write_text(text)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise LimitRefusedError(errno.EBUSY, "the kernel refuses: more is in use") from None
            raise

    def _empty(self) -> None:
        """Kill whoever is left in it, and wait until they are gone."""
        deadline = time.monotonic() + _GONE_TIMEOUT_S
        while (left := _processes_in(self.folder)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def read_counter(text: str, name: str) -> int:
    """The number on the line ``name number``.

    Raises:
        NoGroupError: there is no such line; the kernel is too old to say.

    """
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    raise NoGroupError(errno.ENOTSUP, f"this kernel does not count {name} per control group; it needs 4.13 or newer")


@contextlib.contextmanager
def made_group() -> Iterator[MemoryGroup]:
    """A new, empty memory control group, gone afterwards.

    Raises:
        NoGroupError: none can be made; the message says why in one line.

    """
    levels = _visible_levels()
    with contextlib.ExitStack() as undo:
        parent = _parent(levels, undo)
        _remove_stale(Path(parent.folder))
        folder = Path(parent.folder) / f"{_NAME}{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            raise NoGroupError(error.errno, f"{parent.folder} takes no new group: {error.strerror}") from None
        group = MemoryGroup(Level(parent.version, str(folder)), Path(levels[0].folder))
        undo.callback(_remove, folder)
        undo.callback(group._empty)  # noqa: SLF001 - nobody else may empty it
        if group.level.current_bytes() is None:
            raise NoGroupError(errno.ENOTSUP, f"{parent.folder} does not hand the memory controller down")
        group.oom_kills()
        # Memory that goes to swap would hide what this is about.
        with contextlib.suppress(OSError):
            (folder / _NO_SWAP[parent.version]).write_text("0")
        yield group


def _visible_levels() -> tuple[Level, ...]:
    if os.geteuid() != 0:
        raise NoGroupError(errno.EPERM, "making a memory control group needs root")
    try:
        levels = CgroupTree().levels()
    except MalformedAccountError as error:
        raise NoGroupError(errno.ENOTSUP, str(error)) from None
    if not levels:
        raise NoGroupError(errno.ENOTSUP, "no memory controller is mounted here")
    return levels


def _parent(levels: tuple[Level, ...], undo: contextlib.ExitStack) -> Level:
    """The group below which a group with the memory controller can be made."""
    if levels[0].version is CgroupVersion.V1:
        return levels[-1]
    for level in reversed(levels):
        if _hands_memory_down(level):
            return level
    # No level does yet, as in a container: its own group has to, and must hold no process for that.
    own = levels[-1]
    try:
        _hand_memory_down(Path(own.folder), undo)
    except OSError as error:
        reason = f"{own.folder} cannot be given groups of its own ({error.strerror}); mount the control groups writable"
        raise NoGroupError(error.errno, reason) from None
    return own


def _hands_memory_down(level: Level) -> bool:
    try:
        return "memory" in (Path(level.folder) / _CONTROLLERS_OF_CHILDREN).read_text().split()
    except OSError:
        return False


def _hand_memory_down(folder: Path, undo: contextlib.ExitStack) -> None:
    control = folder / _CONTROLLERS_OF_CHILDREN
    try:
        control.write_text("+memory")
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        aside = folder / f"{_NAME}{os.getpid()}{_ASIDE}"
        aside.mkdir()
        undo.callback(_remove, aside)
        undo.callback(_move, aside, folder)
        _move(folder, aside)
        control.write_text("+memory")
    undo.callback(_quietly, lambda: control.write_text("-memory"))


def _move(source: Path, target: Path) -> None:
    for pid in _processes_in(source):
        # One that has ended meanwhile, or the kernel's own.
        with contextlib.suppress(OSError):
            (target / _PROCESSES).write_text(str(pid))


def _processes_in(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / _PROCESSES).read_text().split()]
    except OSError:
        return []


def _remove(folder: Path) -> None:
    """Remove an empty group; the kernel may need a moment after its last process."""
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)
        else:
            return


def _remove_stale(parent: Path) -> None:
    """Groups of rehearsals that were killed; one that still holds a process stays."""
    for folder in parent.glob(f"{_NAME}*"):
        found = _STALE.fullmatch(folder.name)
        if found is not None and not Path(f"/proc/{found.group(1)}").exists():
            _quietly(folder.rmdir)


def _quietly(action: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        action()
