"""Which memory control groups bound this process, and what each of them says right now.

Why it exists: inside a pod the limit that kills is the container's, not the machine's. Where that limit is
found differs between cgroup v1, v2 and hybrid mounts, and between a container (own limit at the mount root)
and a bare process (a path below it).

What must stay true: nothing about limits or usage is remembered between two calls (M11); a file that does not
follow its format is an error of its own and never a number (M9); a path is only followed downwards from a
mount, component by component, and never through ``.`` or ``..`` (M5).
"""

from __future__ import annotations

import enum
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.errors import MalformedAccountError

_UNLIMITED_V1_BYTES: Final = 1 << 62
"""v1 has no word for "no limit": it shows the largest page-rounded signed number, so this much is none (M4)."""

_MAX_COUNT: Final = (1 << 64) - 1
_READ_BYTES: Final = 1 << 16
"""More than the longest file read here (``memory.stat``, ``mountinfo`` of a busy node are read in several pieces)."""

_LONGEST_COUNT: Final = 24
"""Digits of 2^64 and a line break, with some to spare."""

_COUNT = re.compile(rb"[0-9]{1,20}\n?")
_OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")


class CgroupVersion(enum.StrEnum):
    """The two file layouts of the kernel's memory controller."""

    V1 = "v1"
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted hierarchy that may carry the memory controller."""

    version: CgroupVersion
    root: str
    """The group that the mount shows at its top, as a path of the hierarchy."""
    point: str


@dataclass(frozen=True, slots=True)
class OwnGroups:
    """The groups this process is in, by hierarchy; ``None`` where it is in none."""

    v1_memory: str | None
    v2: str | None


@dataclass(frozen=True, slots=True)
class Level:
    """One visible control group on the way from the mount down to this process."""

    version: CgroupVersion
    folder: str

    def limits_bytes(self) -> tuple[int, ...]:
        """Finite limits in force (M3: ``max`` and ``high``; M4); empty where the level has none.

        Raises MalformedAccountError where a limit file cannot be understood.
        """
        found = (self._limit_bytes(name) for name in _LIMIT_FILES[self.version])
        return tuple(limit for limit in found if limit is not None)

    def current_bytes(self) -> int | None:
        """Usage charged to the group and everything below it; ``None`` where the kernel keeps no such file."""
        text = read_file(f"{self.folder}/{_USAGE_FILE[self.version]}")
        return None if text is None else _count(text, self.folder)

    def credit_bytes(self, current_bytes: int) -> int:
        """Clean inactive file cache, which the kernel takes back before it kills (M6).

        0 where it cannot be proven: an unreadable or incomplete ``memory.stat`` is not a reason to know nothing.
        """
        try:
            text = read_file(f"{self.folder}/memory.stat")
        except MalformedAccountError:
            return 0
        if text is None:
            return 0
        inactive, dirty, writeback = (_stat_value(b"\n" + text, key) for key in _STAT_KEYS[self.version])
        if inactive is None or dirty is None or writeback is None:
            return 0
        return min(current_bytes, max(0, inactive - dirty - writeback))

    def has_memory_files(self) -> bool:
        return any(os.path.lexists(f"{self.folder}/{name}") for name in _MEMORY_FILES[self.version])

    def _limit_bytes(self, name: str) -> int | None:
        text = read_file(f"{self.folder}/{name}")
        if text is None:
            return None
        if self.version is CgroupVersion.V2 and text in (b"max\n", b"max"):
            return None
        limit = _count(text, f"{self.folder}/{name}")
        if self.version is CgroupVersion.V1 and limit >= _UNLIMITED_V1_BYTES:
            return None
        return limit


_LIMIT_FILES: Final = {
    CgroupVersion.V1: ("memory.limit_in_bytes",),
    CgroupVersion.V2: ("memory.max", "memory.high"),
}
_USAGE_FILE: Final = {CgroupVersion.V1: "memory.usage_in_bytes", CgroupVersion.V2: "memory.current"}
_MEMORY_FILES: Final = {
    CgroupVersion.V1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    CgroupVersion.V2: ("memory.max", "memory.high", "memory.current", "memory.stat"),
}
_STAT_KEYS: Final = {
    # v1's plain keys leave out child groups while its usage counts them: only the hierarchical ones may be credited.
    CgroupVersion.V1: (b"total_inactive_file", b"total_dirty", b"total_writeback"),
    CgroupVersion.V2: (b"inactive_file", b"file_dirty", b"file_writeback"),
}


@dataclass(frozen=True, slots=True)
class _Trail:
    """Where one hierarchy shows this process: the mount, and the way from there down to its group."""

    version: CgroupVersion
    top: str
    parts: tuple[str, ...]
    refusal: str = ""

    def levels(self) -> tuple[Level, ...]:
        """Levels that exist now; none where the hierarchy does not carry the memory controller.

        A refused path raises MalformedAccountError, except on a v2 mount without memory files: that is a hybrid
        machine's, it bounds nothing, and its odd path must not hide the limits v1 holds.
        """
        if self.refusal and (self.version is CgroupVersion.V1 or Level(self.version, self.top).has_memory_files()):
            raise MalformedAccountError(self.refusal)
        levels = tuple(Level(self.version, folder) for folder in existing_folders(self.top, self.parts))
        return levels if any(level.has_memory_files() for level in levels) else ()


@dataclass(frozen=True, slots=True)
class _Found:
    """Levels found for one content of ``/proc/self/cgroup``."""

    groups: bytes
    levels: tuple[Level, ...]

    def still_true(self, groups: bytes) -> bool:
        """The deepest level existing means that all do; a move shows in the text. Both are cheap to ask."""
        return self.groups == groups and _is_folder(self.levels[-1].folder)


class CgroupTree:
    """Finds the visible levels of this process below ``root``, the folder that stands for ``/``.

    Where the levels are is remembered, because finding out costs more than reading them; what they say is not
    (M11). It is found out again when the process is in another group, when the group is gone, and always while
    the group's own folder is not visible.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = os.fspath(root).rstrip("/")
        self._found: _Found | None = None

    def levels(self) -> tuple[Level, ...]:
        """Visible levels, topmost first; empty where this machine has no memory controller (M5).

        Raises MalformedAccountError where the kernel's description of groups cannot be understood or is refused.
        """
        groups = read_file(f"{self._root}/proc/self/cgroup")
        if groups is None:
            return ()
        found = self._found
        if found is not None and found.still_true(groups):
            return found.levels
        return self._discover(groups)

    def _discover(self, groups: bytes) -> tuple[Level, ...]:
        mounts = parse_mounts(read_file(f"{self._root}/proc/self/mountinfo") or b"")
        for trail in _trails(self._root, mounts, parse_groups(groups)):
            levels = trail.levels()
            if levels:
                whole = len(levels) == len(trail.parts) + 1
                self._found = _Found(groups, levels) if whole else None
                return levels
        return ()


def _trails(root: str, mounts: tuple[Mount, ...], groups: OwnGroups) -> tuple[_Trail, ...]:
    """The ways to look, v2 before v1 (M5)."""
    wanted = ((CgroupVersion.V2, groups.v2), (CgroupVersion.V1, groups.v1_memory))
    found = (_trail(root, tuple(m for m in mounts if m.version is version), group) for version, group in wanted)
    return tuple(trail for trail in found if trail is not None)


def _trail(root: str, mounts: tuple[Mount, ...], group: str | None) -> _Trail | None:
    if group is None or not mounts:
        return None
    mount = _widest(mounts, group)
    top = root + mount.point.rstrip("/")
    parts = _below_mount(mount.root, group)
    if any(part in {".", ".."} for part in (*parts, *mount.root.split("/"))):
        return _Trail(mount.version, top, (), f"refused control group path {group!r} below {mount.root!r}")
    return _Trail(mount.version, top, parts)


def parse_groups(text: bytes) -> OwnGroups:
    """Read ``/proc/self/cgroup``; raises MalformedAccountError on a line that is not ``id:controllers:path``."""
    v1_memory = v2 = None
    for line in text.decode(errors="surrogateescape").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3 or not fields[2].startswith("/"):
            raise MalformedAccountError(f"/proc/self/cgroup has a line that is not id:controllers:path: {line!r}")
        if fields[0] == "0" and not fields[1]:
            v2 = fields[2]
        elif "memory" in fields[1].split(","):
            v1_memory = fields[2]
    return OwnGroups(v1_memory=v1_memory, v2=v2)


def parse_mounts(text: bytes) -> tuple[Mount, ...]:
    """Mounts in ``/proc/self/mountinfo`` that may carry the memory controller, in the kernel's order."""
    found = (_parse_mount(line) for line in text.splitlines() if b" - cgroup" in line)
    return tuple(mount for mount in found if mount is not None)


def existing_folders(top: str, parts: tuple[str, ...]) -> list[str]:
    """``top`` and the folders below it along ``parts``, as far down as they exist (M5)."""
    folders = [top]
    for part in parts:
        deeper = f"{folders[-1]}/{part}"
        if not _is_folder(deeper):
            break
        folders.append(deeper)
    return folders


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)  # noqa: PTH116 - no Path objects on the path of every sample
    except OSError:
        return False


def read_file(path: str) -> bytes | None:
    """Whole content of a small kernel file, ``None`` where it does not exist.

    Raises MalformedAccountError where it exists and cannot be read. Unbuffered calls, because a reading is taken
    on paths that count microseconds.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MalformedAccountError(f"cannot open {path}: {error.strerror}") from error
    try:
        return _read_all(descriptor)
    except OSError as error:
        # A group removed between open and read answers ENODEV: as gone as one that was never there.
        if error.errno == _NO_DEVICE:
            return None
        raise MalformedAccountError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


_NO_DEVICE: Final = 19


def _read_all(descriptor: int) -> bytes:
    first = os.read(descriptor, _READ_BYTES)
    pieces = [first]
    while pieces[-1]:
        pieces.append(os.read(descriptor, _READ_BYTES))
    return first if len(pieces) == 2 else b"".join(pieces)


def _count(text: bytes, where: str) -> int:
    if _COUNT.fullmatch(text) is None or (value := int(text)) > _MAX_COUNT:
        raise MalformedAccountError(f"{where} does not hold one unsigned number: {text[:40]!r}")
    return value


def _stat_value(text: bytes, key: bytes) -> int | None:
    """The number on the line ``key number`` of a ``memory.stat`` that starts with a line break."""
    mark = b"\n" + key + b" "
    start = text.find(mark)
    if start < 0:
        return None
    number, _, _ = text[start + len(mark) : start + len(mark) + _LONGEST_COUNT].partition(b"\n")
    return int(number) if number.isdigit() else None


def _parse_mount(line: bytes) -> Mount | None:
    """One line of mountinfo: ``id parent dev root point options [tags] - type source super-options``."""
    left, _, right = line.decode(errors="surrogateescape").partition(" - ")
    mounted, described = left.split(" "), right.split(" ")
    if len(mounted) < 6 or not described:
        return None
    root, point = _unescape(mounted[3]), _unescape(mounted[4])
    if described[0] == "cgroup2":
        return Mount(CgroupVersion.V2, root, point)
    if described[0] == "cgroup" and "memory" in described[-1].split(","):
        return Mount(CgroupVersion.V1, root, point)
    return None


def _unescape(field: str) -> str:
    return _OCTAL_ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), field)


def _widest(mounts: tuple[Mount, ...], group: str) -> Mount:
    """The mount that shows this group together with the most of its ancestors (M1: every visible ancestor).

    Bind mounts show the same hierarchy again, further down; of two that show the same part the later one is on top.
    """
    containing = [mount for mount in mounts if _is_within(group, mount.root)]
    return min(reversed(containing or mounts), key=lambda mount: len(mount.root))


def _is_within(group: str, root: str) -> bool:
    return root in {"/", group} or group.startswith(root + "/")


def _below_mount(root: str, group: str) -> tuple[str, ...]:
    """Components of ``group`` below the mount's root; the whole path where the mount does not show it."""
    relative = group[len(root) :] if root != "/" and _is_within(group, root) else group
    return tuple(part for part in relative.split("/") if part)
