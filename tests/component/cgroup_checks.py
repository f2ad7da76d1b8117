"""What a real kernel does with readings, arena and gate in a memory control group; run as a program.

``python cgroup_checks.py v1|v2 MIB`` makes a group below this process's own, runs each check in a child process
inside it and prints one JSON object: what each check saw, or ``{"skip": reason}``. It only observes; the tests that
run it say what must be true. A program, because a kernel with the other version may be another machine.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkade_cache.arena import Arena
from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import CgroupTree, CgroupVersion, parse_groups, parse_mounts
from parkade_cache.memory.gate import UNBOUNDED, Admit, GateRequest, NeedKind, Release, plan
from parkade_cache.memory.pressure import StallTrigger
from parkade_cache.memory.reading import MemorySampler, Reading

MIB = 1 << 20
EXTENT_BYTES = 4 * MIB
STALLING_MIB = 32


@dataclass(frozen=True)
class Group:
    """The group that a check runs in, and how much memory it may play with."""

    version: CgroupVersion
    folder: Path
    mib: int

    def limit(self, mib: int) -> None:
        self.set_limit(mib * MIB)

    def set_limit(self, nbytes: int) -> None:
        """v1 answers EBUSY (OSError) where more is in use and cannot be taken back; v2 kills."""
        name = "memory.limit_in_bytes" if self.version is CgroupVersion.V1 else "memory.max"
        (self.folder / name).write_text(str(nbytes))

    def set_high(self, nbytes: int | None) -> None:
        """v2's limit that slows down and never kills; None takes it away."""
        (self.folder / "memory.high").write_text("max" if nbytes is None else str(nbytes))

    def usage_bytes(self) -> int:
        name = "memory.usage_in_bytes" if self.version is CgroupVersion.V1 else "memory.current"
        return int((self.folder / name).read_text())

    def events(self) -> dict[str, int]:
        """The kernel's own counters: ``oom_kill`` and, on v2, ``oom``, ``max`` and ``high``."""
        name = "memory.oom_control" if self.version is CgroupVersion.V1 else "memory.events"
        lines = (line.split() for line in (self.folder / name).read_text().splitlines())
        return {key: int(count) for key, count in lines}

    def stat(self) -> dict[str, int]:
        lines = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return {key: int(count) for key, count in lines}

    def page_cache_bytes(self) -> int:
        """Files in the group's memory; shared memory, which v2 counts among them, is none."""
        stat = self.stat()
        return stat["cache"] - stat["shmem"] if self.version is CgroupVersion.V1 else stat["file"] - stat["shmem"]

    def oom_kills(self) -> int:
        return self.events()["oom_kill"]

    def join(self, folder: Path | None = None) -> None:
        ((folder or self.folder) / "cgroup.procs").write_text(str(os.getpid()))

    def as_in_a_container(self) -> Group:
        """Make this the topmost group that this process can see, and all that it starts, as a container does (M8)."""
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_bytes())
        point = next(mount.point for mount in mounts if mount.version is self.version).encode()
        _call("unshare", _NEW_MOUNT_NAMESPACE)
        _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
        with tempfile.TemporaryDirectory() as aside:
            _call("mount", os.fsencode(self.folder), aside.encode(), None, _BIND, None)
            _call("umount2", point, _DETACH)
            _call("mount", aside.encode(), point, None, _MOVE, None)
        return Group(self.version, Path(point.decode()), self.mib)


_NEW_MOUNT_NAMESPACE = 0x00020000
_BIND, _MOVE, _RECURSIVE, _PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000
_DETACH = 2


def _call(name: str, *args: object) -> None:
    """A call of the C library that answers 0; OSError where it does not."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def seen(reading: Reading) -> dict[str, Any]:
    return dict(reading.as_fields())


def live_limit(group: Group) -> dict[str, Any]:
    """M11: readings by one sampler while the limit is lowered and raised."""
    group.limit(4 * group.mib)
    group.join()
    sampler = MemorySampler()
    readings = {"first": seen(sampler.sample())}
    group.limit(3 * group.mib)
    readings["lowered"] = seen(sampler.sample())
    group.limit(5 * group.mib)
    readings["raised"] = seen(sampler.sample())
    if group.version is CgroupVersion.V2:
        (group.folder / "memory.high").write_text(str(2 * group.mib * MIB))
        readings["high"] = seen(sampler.sample())
    return readings


def ancestor(group: Group) -> dict[str, Any]:
    """M1: the limit sits on the group above the process's own."""
    leaf = group.folder / "leaf"
    leaf.mkdir()
    if group.version is CgroupVersion.V2:
        (group.folder / "cgroup.subtree_control").write_text("+memory")
    group.limit(2 * group.mib)
    group.join(leaf)
    return seen(MemorySampler().sample())


def arena_usage(group: Group) -> dict[str, Any]:
    """What the group is charged for commits and releases, next to the arena's own counters."""
    group.limit(4 * group.mib)
    group.join()
    arena = Arena(extent_bytes=EXTENT_BYTES, max_extents=group.mib * MIB // EXTENT_BYTES)
    sampler = MemorySampler()
    arena.commit(0)
    arena.release(0)
    empty = {"usage": group.usage_bytes(), "available": sampler.sample().available_bytes}
    for extent in range(arena.max_extents):
        arena.commit(extent)
    full = {
        "usage": group.usage_bytes(),
        "available": sampler.sample().available_bytes,
        "committed": arena.committed_bytes,
        "resident": arena.resident_bytes(),
    }
    half = range(arena.max_extents // 2)
    released_half = sum(arena.release(extent) for extent in half)
    halved = {"usage": group.usage_bytes(), "committed": arena.committed_bytes, "resident": arena.resident_bytes()}
    released = released_half + sum(arena.release(extent) for extent in range(arena.max_extents))
    after = {"usage": group.usage_bytes(), "committed": arena.committed_bytes, "resident": arena.resident_bytes()}
    return {"empty": empty, "full": full, "halved": halved, "after": after, "released": released}


def parked_by_the_gate(group: Group) -> dict[str, Any]:
    """Parks extents for as long as the gate admits them under a limit that kills."""
    floor_bytes = 8 * MIB
    group.limit(group.mib)
    group.join()
    arena = Arena(extent_bytes=EXTENT_BYTES, max_extents=1 + 2 * group.mib * MIB // EXTENT_BYTES)
    sampler, parked = MemorySampler(), 0
    request = GateRequest(kind=NeedKind.PARK, need_bytes=EXTENT_BYTES, floor_bytes=floor_bytes)
    while True:
        reading = sampler.sample()
        step = plan(request, reading=reading, reserved_bytes=0, budget=UNBOUNDED, victims=[])
        if not isinstance(step, Admit):
            break
        arena.commit(parked)
        parked += 1
    return {
        "parked_bytes": arena.committed_bytes,
        "refused_at": seen(reading),
        "asked_for_a_release": isinstance(step, Release),
        "usage": group.usage_bytes(),
        "oom_kills": group.oom_kills(),
    }


def parked_without_the_gate(group: Group) -> dict[str, Any]:
    """The same without asking: shows that the limit of these checks really kills."""
    group.limit(group.mib)
    group.join()
    arena = Arena(extent_bytes=EXTENT_BYTES, max_extents=1 + 2 * group.mib * MIB // EXTENT_BYTES)
    for extent in range(arena.max_extents):
        arena.commit(extent)
    return {"survived": True}


def file_cache(group: Group) -> dict[str, Any]:
    """M6: clean file cache is charged to the group, and credited."""
    group.limit(4 * group.mib)
    group.join()
    sampler = MemorySampler()
    before = sampler.sample()
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        for _ in range(group.mib):
            file.write(os.urandom(MIB))
        file.flush()
        dirty = sampler.sample()
        os.fsync(file.fileno())
        clean = sampler.sample()
    return {"before": seen(before), "dirty": seen(dirty), "clean": seen(clean), "written": group.mib * MIB}


def stalls(group: Group) -> dict[str, Any]:
    """The kernel's trigger on the group's own stalls: quiet at first, then while a file is read that does not fit."""
    group.limit(STALLING_MIB)
    group.join()
    with _stall_folder(group) as folder:
        trigger = None if folder is None else StallTrigger.open(str(folder / "memory.pressure"))
        if trigger is None:
            return {"offered": False}
        quiet = not trigger.wait(0.3)
        fired, deadline = False, time.monotonic() + 20
        with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
            for _ in range(3 * STALLING_MIB):
                file.write(os.urandom(MIB))
            file.flush()
            os.fsync(file.fileno())
            while not fired and time.monotonic() < deadline:
                file.seek(0)
                while file.read(MIB):
                    pass
                fired = trigger.wait(0.0)
        trigger.close()
        return {"offered": True, "quiet": quiet, "fired": fired}


@contextmanager
def _stall_folder(group: Group) -> Iterator[Path | None]:
    """The v2 group whose stalls this process counts in; on a hybrid machine one is made beside the v1 group."""
    if group.version is CgroupVersion.V2:
        yield group.folder
        return
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_bytes())
    unified = next((Path(mount.point) for mount in mounts if mount.version is CgroupVersion.V2), None)
    if unified is None:
        yield None
        return
    before = unified.joinpath(*(parse_groups(Path("/proc/self/cgroup").read_bytes()).v2 or "/").split("/"))
    folder = unified / group.folder.name
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield folder
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


CHECKS: dict[str, Callable[[Group], dict[str, Any]]] = {
    check.__name__: check
    for check in (live_limit, ancestor, arena_usage, parked_by_the_gate, parked_without_the_gate, file_cache, stalls)
}


def in_child(check: Callable[[Group], dict[str, Any]], group: Group) -> dict[str, Any]:
    """Runs in a forked child that joins the group; ``{"signal": 9}`` where the kernel killed it."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _report(sending, check, group)
    os.close(sending)
    with os.fdopen(receiving) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    found: dict[str, Any] = json.loads(answer)
    return found


def _report(sending: int, check: Callable[[Group], dict[str, Any]], group: Group) -> None:
    try:
        answer = check(group)
    except BaseException:  # noqa: BLE001 - a forked child must report whatever happened and end here
        answer = {"error": traceback.format_exc()}
    os.write(sending, json.dumps(answer).encode())
    os._exit(0)


@contextmanager
def made_group(version: CgroupVersion, parent: Path, name: str, mib: int) -> Iterator[Group]:
    folder = parent / f"parkade-check-{os.getpid()}-{name}"
    folder.mkdir()
    try:
        yield Group(version, folder, mib)
    finally:
        for leaf in folder.glob("leaf"):
            leaf.rmdir()
        _remove(folder)


def _remove(folder: Path) -> None:
    """Where its process was killed, what that had started ends a moment later."""
    deadline = time.monotonic() + 5
    while True:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def parent_for(version: CgroupVersion) -> Path:
    """Where a group with the memory controller can be made; raises LookupError with the reason where it cannot."""
    if os.geteuid() != 0:
        raise LookupError("making control groups needs root")
    try:
        levels = CgroupTree().levels()
    except MalformedAccountError as error:
        raise LookupError(str(error)) from error
    if not levels or levels[0].version is not version:
        raise LookupError(f"no memory controller of cgroup {version} is mounted here")
    # v2 allows no processes beside child groups with controllers, except at the top.
    parent = Path(levels[-1 if version is CgroupVersion.V1 else 0].folder)
    if version is CgroupVersion.V2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        raise LookupError(f"{parent} does not hand the memory controller down")
    probe = parent / f"parkade-check-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise LookupError(f"{parent} is not writable: {error.strerror}") from error
    return parent


def main(version: CgroupVersion, mib: int) -> dict[str, Any]:
    try:
        parent = parent_for(version)
    except LookupError as reason:
        return {"skip": str(reason)}
    found = {}
    for name, check in CHECKS.items():
        with made_group(version, parent, name, mib) as group:
            found[name] = in_child(check, group)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(CgroupVersion(sys.argv[1]), int(sys.argv[2]))) + "\n")
