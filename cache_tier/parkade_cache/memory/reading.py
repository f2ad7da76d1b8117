"""How much memory this pod may still use, or that nobody knows.

Why it exists: every decision to keep or let go of a conversation starts from one number. The number is wrong in
a pod unless it takes the container's own limit, every visible ancestor's and the configured cap into account,
and it is dangerous whenever "could not be read" looks like "zero" or like "plenty".

What must stay true: *unknown* is a value of its own (M2, M8, M9); the smallest term wins and is named (M1);
limits are read anew at every sample (M11). A sample costs a few file reads, well under 300 µs, and never blocks
on a disk.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import CgroupTree, Level, read_file

_LOG = logging.getLogger(__name__)

_KIB: Final = 1024
_MAX_KIB: Final = ((1 << 64) - 1) // _KIB
"""The most kB whose bytes still fit an unsigned 64-bit number; more is a broken file, not a large machine (M2)."""


class ReadingSource(enum.StrEnum):
    """Which term of M1 bound the reading."""

    MEMINFO = "meminfo"
    CGROUP = "cgroup"
    FLAG = "flag"


_TIE_ORDER: Final = {ReadingSource.FLAG: 0, ReadingSource.CGROUP: 1, ReadingSource.MEMINFO: 2}
"""Between equal terms the cap is named (M8), then the container's limit: what can be changed before what cannot."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of available memory (M1). ``available_bytes`` is ``None`` when unknown, never 0 for "unknown".

    ``limit_bytes``, ``current_bytes`` and ``credit_bytes`` describe the term that bound the reading; a reading
    bound by the machine has no limit and no current.
    """

    available_bytes: int | None
    source: ReadingSource | None
    limit_bytes: int | None = None
    current_bytes: int | None = None
    credit_bytes: int = 0
    unknown_reason: str = ""

    @property
    def known(self) -> bool:
        return self.available_bytes is not None

    def as_fields(self) -> Mapping[str, str | int | None]:
        """The parts a receipt records: available, source, limit, current and credit."""
        return {
            "available": self.available_bytes,
            "source": None if self.source is None else self.source.value,
            "limit": self.limit_bytes,
            "current": self.current_bytes,
            "credit": self.credit_bytes,
        }


def unknown(reason: str) -> Reading:
    """A reading that nobody could take; ``reason`` is one line for the receipt."""
    return Reading(available_bytes=None, source=None, unknown_reason=reason)


def admits(reading: Reading, *, need_bytes: int, floor_bytes: int, reserved_bytes: int = 0) -> bool:
    """M10: known, at or above the floor, and ``need_bytes`` fits between. Unknown refuses even a need of 0.

    ``reserved_bytes`` were admitted earlier and are not committed yet, so the reading still shows them as free (G15).
    """
    if reading.available_bytes is None:
        return False
    room_bytes = reading.available_bytes - reserved_bytes - floor_bytes
    return room_bytes >= 0 and need_bytes <= room_bytes


def room_bytes(*, limit_bytes: int, current_bytes: int, credit_bytes: int) -> int:
    """M7: what may still be charged under one limit."""
    return max(0, limit_bytes - (current_bytes - credit_bytes))


@dataclass(frozen=True, slots=True)
class MemInfo:
    """The two lines of ``/proc/meminfo`` that count; ``total_bytes`` is ``None`` where it cannot be understood."""

    available_bytes: int
    total_bytes: int | None


def parse_meminfo(text: bytes) -> MemInfo:
    """M2: one ``MemAvailable`` line, unsigned decimal, unit kB, nothing after it, no overflow.

    Raises MalformedAccountError for anything else. ``0 kB`` is a known zero.
    """
    try:
        total_bytes = _meminfo_bytes(text, "MemTotal")
    except MalformedAccountError:
        total_bytes = None
    return MemInfo(available_bytes=_meminfo_bytes(text, "MemAvailable"), total_bytes=total_bytes)


class MemorySampler:
    """Takes readings of this process (M1-M11). Cheap, thread-safe, never raises.

    ``cap_bytes`` is the configured limit (``None`` for none) and may be set at any time; it counts from the next
    sample (M11). ``root`` stands for ``/``: ``proc`` and the mount points named in it are looked up below it.
    """

    def __init__(self, *, cap_bytes: int | None = None, root: Path = Path("/")) -> None:
        self.cap_bytes = cap_bytes
        self._meminfo_path = f"{root}/proc/meminfo"
        self._tree = CgroupTree(root)
        self._warned = False

    def sample(self) -> Reading:
        """Read everything anew and name the smallest term (M1); unknown where a rule says so (M8, M9)."""
        return self.sample_under(self.cap_bytes)

    def sample_under(self, cap_bytes: int | None) -> Reading:
        """As ``sample`` with another cap: what a limit that is not in force yet would leave (case 66)."""
        try:
            meminfo = self._read_meminfo()
        except MalformedAccountError as error:
            return unknown(str(error))
        try:
            rooms = self._rooms(cap_bytes, meminfo)
        except MalformedAccountError as error:
            if cap_bytes is not None:
                return unknown(str(error))
            self._warn_once(error)
            rooms = ()
        machine = Reading(meminfo.available_bytes, ReadingSource.MEMINFO)
        return smallest((machine, *rooms))

    def limits_bytes(self) -> tuple[int, ...] | None:
        """Every finite limit in force now, topmost level first, the cap last: equal as long as nobody changed one.

        None where they cannot be read just now, which does not mean that there are none.
        """
        try:
            found = [limit for level in self._tree.levels() for limit in level.limits_bytes()]
        except MalformedAccountError:
            return None
        return tuple(found) if self.cap_bytes is None else (*found, self.cap_bytes)

    def hard_limit_bytes(self) -> int | None:
        """The smallest limit that is not ours to set: control groups and the machine; None where nobody knows."""
        try:
            found = [limit for level in self._tree.levels() for limit in level.limits_bytes()]
            total_bytes = self._read_meminfo().total_bytes
        except MalformedAccountError:
            return None
        return min([*found, *([] if total_bytes is None else [total_bytes])], default=None)

    def _rooms(self, cap_bytes: int | None, meminfo: MemInfo) -> tuple[Reading, ...]:
        levels, charges = self._tree.levels(), _Charges()
        rooms = tuple(_cgroup_rooms(levels, charges, skip_unusable=cap_bytes is None))
        return rooms if cap_bytes is None else (*rooms, _cap_room(cap_bytes, levels, charges, meminfo))

    def _read_meminfo(self) -> MemInfo:
        text = read_file(self._meminfo_path)
        if text is None:
            raise MalformedAccountError(f"{self._meminfo_path} does not exist")
        return parse_meminfo(text)

    def _warn_once(self, error: MalformedAccountError) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning("control group limits are ignored, only the machine's free memory counts: %s", error)


def smallest(terms: Iterable[Reading]) -> Reading:
    """The binding one of several known readings; the first unknown one makes the whole unknown."""
    listed = tuple(terms)
    for term in listed:
        if not term.known:
            return term
    return min(listed, key=_binding_order)


def _binding_order(term: Reading) -> tuple[int, int]:
    return term.available_bytes or 0, len(_TIE_ORDER) if term.source is None else _TIE_ORDER[term.source]


class _Charges:
    """Usage and credit of the levels, each read once a sample, so that two limits are held against one number."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, int] | None] = {}

    def of(self, level: Level) -> tuple[int, int] | None:
        """``(current, credit)`` in bytes, ``None`` where the level has no usage file."""
        if level.folder not in self._read:
            current_bytes = level.current_bytes()
            charge = None if current_bytes is None else (current_bytes, level.credit_bytes(current_bytes))
            self._read[level.folder] = charge
        return self._read[level.folder]


def _cgroup_rooms(levels: tuple[Level, ...], charges: _Charges, *, skip_unusable: bool) -> Iterable[Reading]:
    """Room under every finite limit (M3, M4). Of two limits of one group the lower one leaves the smaller room.

    A finite limit without a usage file says nothing usable. Without a cap the other levels still bound the
    reading; with one the reading must not come out larger than the truth, so it is malformed (M9).
    """
    for level in levels:
        limits = level.limits_bytes()
        if not limits:
            continue
        charge = charges.of(level)
        if charge is not None:
            yield _limited(ReadingSource.CGROUP, min(limits), *charge)
        elif not skip_unusable:
            raise MalformedAccountError(f"{level.folder} has a memory limit and no usage file")


def _cap_room(cap_bytes: int, levels: tuple[Level, ...], charges: _Charges, meminfo: MemInfo) -> Reading:
    """M8: the cap less the topmost visible group's net usage, else less what the machine has in use."""
    charge = charges.of(levels[0]) if levels else None
    if charge is not None:
        return _limited(ReadingSource.FLAG, cap_bytes, *charge)
    if meminfo.total_bytes is None:
        return unknown("no usage of a control group, and MemTotal cannot be understood: the cap has nothing to count")
    used_bytes = max(0, meminfo.total_bytes - meminfo.available_bytes)
    return _limited(ReadingSource.FLAG, cap_bytes, used_bytes, 0)


def _limited(source: ReadingSource, limit_bytes: int, current_bytes: int, credit_bytes: int) -> Reading:
    available = room_bytes(limit_bytes=limit_bytes, current_bytes=current_bytes, credit_bytes=credit_bytes)
    return Reading(available, source, limit_bytes, current_bytes, credit_bytes)


_MEMINFO_VALUE: Final = re.compile(rb"[ \t]*([0-9]{1,20}) kB")


def _meminfo_bytes(text: bytes, key: str) -> int:
    value = _only_line(text, key)
    match = _MEMINFO_VALUE.fullmatch(value)
    if match is None:
        raise MalformedAccountError(f"/proc/meminfo has a {key} that is not an unsigned number of kB: {value[:40]!r}")
    kib = int(match.group(1))
    if kib > _MAX_KIB:
        raise MalformedAccountError(f"/proc/meminfo has a {key} too large to be true: {kib} kB")
    return kib * _KIB


def _only_line(text: bytes, key: str) -> bytes:
    """What follows ``key:`` on its only line; plain searches, because this runs at every sample."""
    mark = b"\n" + key.encode() + b":"
    padded = b"\n" + text
    start = padded.find(mark)
    if start < 0 or padded.find(mark, start + 1) >= 0:
        raise MalformedAccountError(f"/proc/meminfo has no {key} line, or more than one")
    end = padded.find(b"\n", start + 1)
    return padded[start + len(mark) : end if end >= 0 else len(padded)]
