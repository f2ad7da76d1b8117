"""Pressure-stall information: how long tasks waited for memory, before anything is killed.

Why it exists: a reading says how much is left, not how hard the kernel works to keep it so. A pod that thrashes
under ``memory.high`` has room on paper.

What must stay true: a kernel without this information answers ``None``, which means "no opinion", never "no
pressure"; a pod is judged by its own group where the kernel keeps one, because the machine's number also counts
the neighbours.
"""

from __future__ import annotations

import enum
import os
import re
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import CgroupTree, CgroupVersion, read_file
from parkade_cache.memory.reading import Reading

WARNING_SOME_PERCENT: Final = 10.0
"""Some task waited for memory a tenth of the last ten seconds: reclaim has begun to cost turns."""

CRITICAL_FULL_PERCENT: Final = 10.0
"""No task at all could run for a tenth of the time: what oomd-style killers react to, with some room before them."""


class PressureScope(enum.StrEnum):
    """Whose stalls are counted."""

    GROUP = "cgroup"
    MACHINE = "machine"


class PressureLevel(enum.StrEnum):
    """How urgent letting go is (case 60)."""

    NONE = "none"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Stall:
    """Share of time stalled, in percent over three windows, and the total since boot in microseconds."""

    avg10_percent: float
    avg60_percent: float
    avg300_percent: float
    total_us: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """``some``: at least one task waited; ``full``: all of them did (``None`` on kernels that do not say)."""

    scope: PressureScope
    some: Stall
    full: Stall | None


def parse_pressure(text: bytes, scope: PressureScope) -> Pressure:
    """Parse a ``memory.pressure`` file; raises MalformedAccountError where it is not one."""
    stalls = {match.group(1): _stall(match) for match in _LINE.finditer(text)}
    if b"some" not in stalls:
        raise MalformedAccountError(f"not pressure-stall information: {text[:80]!r}")
    return Pressure(scope=scope, some=stalls[b"some"], full=stalls.get(b"full"))


class PressureSampler:
    """Reads the pressure on this process's own group, else on the machine. Never raises."""

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._machine_path = f"{root}/proc/pressure/memory"
        self._tree = CgroupTree(root)

    def sample(self) -> Pressure | None:
        """``None`` where this kernel keeps no pressure-stall information or it cannot be read."""
        for path, scope in ((self._group_path(), PressureScope.GROUP), (self._machine_path, PressureScope.MACHINE)):
            found = None if path is None else _read(path, scope)
            if found is not None:
                return found
        return None

    def trigger(self) -> StallTrigger | None:
        """A wake-up by the kernel for this process's own group; None where it offers none or does not let us ask."""
        path = self._group_path()
        return None if path is None else StallTrigger.open(path)

    def _group_path(self) -> str | None:
        try:
            levels = self._tree.levels()
        except MalformedAccountError:
            return None
        if not levels or levels[-1].version is not CgroupVersion.V2:
            return None
        return f"{levels[-1].folder}/memory.pressure"


TRIGGER_STALL_US: Final = 100_000
TRIGGER_WINDOW_US: Final = 2_000_000
"""Tasks waited for memory a tenth of a second within two: windows of whole two seconds need no privilege."""


class StallTrigger:
    """Wakes its waiter when tasks of a group stall on memory (``psi`` triggers of Linux 5.2 and newer)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLPRI | select.POLLERR)

    @classmethod
    def open(cls, path: str) -> Self | None:
        """None where the file cannot be written, as in most containers, or the kernel knows no triggers."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            os.write(descriptor, f"some {TRIGGER_STALL_US} {TRIGGER_WINDOW_US}\0".encode())
        except OSError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds``; whether the kernel reported stalls. OSError when the group is gone."""
        for _, events in self._poll.poll(seconds * 1000):
            if events & select.POLLERR:
                raise OSError(_NO_DEVICE, "the control group is gone")
            return True
        return False

    def close(self) -> None:
        self._poll.unregister(self._descriptor)
        os.close(self._descriptor)


_NO_DEVICE: Final = 19


def pressure_level(pressure: Pressure | None, reading: Reading, *, floor_bytes: int) -> PressureLevel:
    """How urgent letting go is, from the reading first and stalls second.

    Less than the floor available is a warning, less than half of it critical. Stalls of the machine alone never
    make it critical: they may be another pod's. An unknown reading adds nothing, because unknown evicts nothing (G2).
    """
    if reading.available_bytes is not None and reading.available_bytes * 2 < floor_bytes:
        return PressureLevel.CRITICAL
    if pressure is not None and _is_critical(pressure):
        return PressureLevel.CRITICAL
    if reading.available_bytes is not None and reading.available_bytes < floor_bytes:
        return PressureLevel.WARNING
    if pressure is not None and pressure.some.avg10_percent >= WARNING_SOME_PERCENT:
        return PressureLevel.WARNING
    return PressureLevel.NONE


def stalls_count(pressure: Pressure) -> bool:
    """Whether the stalls alone make a level."""
    return _is_critical(pressure) or pressure.some.avg10_percent >= WARNING_SOME_PERCENT


def _is_critical(pressure: Pressure) -> bool:
    own = pressure.scope is PressureScope.GROUP
    return own and pressure.full is not None and pressure.full.avg10_percent >= CRITICAL_FULL_PERCENT


_LINE: Final = re.compile(
    rb"^(some|full) avg10=([0-9]+\.[0-9]+) avg60=([0-9]+\.[0-9]+) avg300=([0-9]+\.[0-9]+) total=([0-9]{1,20})$",
    re.MULTILINE,
)


def _stall(match: re.Match[bytes]) -> Stall:
    avg10, avg60, avg300, total = match.groups()[1:]
    return Stall(float(avg10), float(avg60), float(avg300), int(total))


def _read(path: str, scope: PressureScope) -> Pressure | None:
    try:
        text = read_file(path)
        return None if text is None else parse_pressure(text, scope)
    except MalformedAccountError:
        return None
