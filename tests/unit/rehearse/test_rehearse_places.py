"""What a rehearsal makes on a machine, and that nothing of it stays: groups, disks, neighbours, mounts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parkade_cache.memory.cgroup import CgroupTree, CgroupVersion, Level
from parkade_serving.rehearse import group as group_module
from parkade_serving.rehearse.disk import NoDiskError, made_disk
from parkade_serving.rehearse.enclosure import InGroup, PolicyOnly
from parkade_serving.rehearse.ending import undisturbed
from parkade_serving.rehearse.group import LimitRefusedError, MemoryGroup, NoGroupError, made_group, read_counter
from parkade_serving.rehearse.inside import command
from parkade_serving.rehearse.neighbour import Neighbour, NeighbourGoneError

MIB = 1 << 20

READ_MEMORY = """
from parkade_cache.memory.reading import MemorySampler
reading = MemorySampler(cap_bytes={cap}).sample()
print(reading.source, reading.limit_bytes, reading.current_bytes)
"""

HAS_V2 = (
    "memory" in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    if Path("/sys/fs/cgroup/cgroup.controllers").exists()
    else False
)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with made_group() as made:
            yield made
            folder = made.folder
    except NoGroupError as error:
        pytest.skip(str(error))
    assert not folder.exists()


@pytest.mark.kernel
def test_m8_a_program_in_the_group_sees_it_as_a_container_sees_its_own(group: MemoryGroup):
    group.set_limit(300 * MIB)
    code = READ_MEMORY.format(cap=200 * MIB)
    inside = command([sys.executable, "-c", code], python=sys.executable, group=group.folder, mount=group.mount)
    done = subprocess.run(inside, capture_output=True, text=True, check=True)
    source, limit, current = done.stdout.split()
    assert (source, int(limit)) == ("flag", 200 * MIB)
    assert 0 < int(current) < 100 * MIB


@pytest.mark.kernel
def test_nothing_is_mounted_outside_the_programs_own_namespace(group: MemoryGroup):
    before = Path("/proc/self/mountinfo").read_text()
    inside = command(["true"], python=sys.executable, group=group.folder, mount=group.mount)
    subprocess.run(inside, check=True)
    assert Path("/proc/self/mountinfo").read_text() == before


@pytest.mark.kernel
def test_a_neighbour_takes_what_it_is_told_to_and_gives_it_back(group: MemoryGroup):
    neighbour = Neighbour(InGroup(group).processes_file)
    try:
        before = group.net_bytes()
        neighbour.hold(64 * MIB)
        assert group.net_bytes() - before == pytest.approx(64 * MIB, rel=0.1)
        neighbour.hold(0)
        assert group.net_bytes() - before < 8 * MIB
    finally:
        neighbour.end()


@pytest.mark.kernel
def test_whoever_is_left_in_the_group_ends_with_it():
    try:
        with made_group() as group:
            inside = command(["sleep", "600"], python=sys.executable, group=group.folder, mount=group.mount)
            child = subprocess.Popen(inside)
            while not group.processes_file.read_text().split():
                assert child.poll() is None
    except NoGroupError as error:
        pytest.skip(str(error))
    assert child.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.kernel
def test_a_kernel_that_kills_is_counted(group: MemoryGroup):
    group.set_limit(64 * MIB)
    neighbour = Neighbour(group.processes_file)
    try:
        with pytest.raises(NeighbourGoneError):
            neighbour.hold(256 * MIB)
    finally:
        neighbour.end()
    assert group.oom_kills() == 1
    group.set_limit(None)


@pytest.mark.kernel
@pytest.mark.skipif(HAS_V2, reason="this kernel has cgroup v2, which kills instead of refusing")
def test_a_limit_below_what_is_in_use_is_refused_by_the_kernel(group: MemoryGroup):
    neighbour = Neighbour(group.processes_file)
    try:
        neighbour.hold(64 * MIB)
        with pytest.raises(LimitRefusedError):
            group.set_limit(32 * MIB)
    finally:
        neighbour.end()


@pytest.mark.kernel
def test_what_an_earlier_rehearsal_left_behind_is_taken_away(group: MemoryGroup):
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = group.folder / f"parkade-rehearsal-{gone.pid}"
    mine = group.folder / f"parkade-rehearsal-{os.getpid()}"
    stale.mkdir()
    mine.mkdir()
    group_module._remove_stale(group.folder)
    assert not stale.exists()
    mine.rmdir()


def test_without_root_no_group_is_made_and_one_line_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoGroupError, match="needs root"), made_group():
        pass


def test_without_a_memory_controller_no_group_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(CgroupTree, "levels", lambda _: ())
    with pytest.raises(NoGroupError, match="no memory controller"), made_group():
        pass


def test_where_no_level_hands_memory_down_and_none_can_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A container whose control groups are mounted read-only."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(CgroupTree, "levels", lambda _: (Level(CgroupVersion.V2, str(tmp_path)),))

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", read_only)
    with pytest.raises(NoGroupError, match="mount the control groups writable"), made_group():
        pass


@pytest.mark.parametrize("text", ["", "oom 3\n", "oom_kill many\n"])
def test_a_kernel_that_does_not_count_what_it_kills_is_refused(text: str):
    with pytest.raises(NoGroupError, match=r"4\.13"):
        read_counter(text, "oom_kill")
    assert read_counter("oom 1\noom_kill 3\n", "oom_kill") == 3


def test_without_a_group_the_memory_that_counts_is_what_the_pod_counts():
    place = PolicyOnly()
    assert place.net_bytes() > 0
    assert place.oom_kills() is None
    assert place.wrap(["parkade", "serve"], python="python") == ("parkade", "serve")


def test_a_neighbour_that_is_gone_is_said_to_be():
    neighbour = Neighbour(None)
    neighbour.hold(8 * MIB)
    neighbour._child.kill()
    with pytest.raises(NeighbourGoneError):
        neighbour.hold(16 * MIB)
    neighbour.end()


FILL = """
import os, sys
from pathlib import Path
from parkade_serving.rehearse.disk import NoDiskError, made_disk
from parkade_serving.rehearse.inside import own_mounts
try:
    own_mounts()
    with made_disk(Path(sys.argv[1]), nbytes=64 << 20) as disk:
        before = os.statvfs(disk.mount).f_bavail
        disk.fill()
        assert os.statvfs(disk.mount).f_bavail == 0
        try:
            (disk.mount / "more").write_bytes(bytes(1 << 20))
        except OSError as error:
            print(error.errno)
        (disk.mount / "more").unlink()
        disk.make_space()
        assert os.statvfs(disk.mount).f_bavail == before
except OSError as error:
    print("skip", error)
"""


@pytest.mark.kernel
def test_a_disk_of_its_own_is_filled_to_the_last_block_and_gone_afterwards(tmp_path: Path):
    before = Path("/proc/self/mountinfo").read_text()
    done = subprocess.run([sys.executable, "-c", FILL, str(tmp_path)], capture_output=True, text=True, check=True)
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout.strip())
    assert done.stdout.strip() == str(errno.ENOSPC)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    assert Path("/proc/self/mountinfo").read_text() == before


def test_without_a_tool_to_make_it_there_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoDiskError, match="e2fsprogs"), made_disk(tmp_path, nbytes=MIB):
        pass


def test_nobody_interrupts_what_is_being_undone():
    before = signal.getsignal(signal.SIGTERM)
    undone: list[str] = []

    def undo() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        undone.append("group")

    def interrupted() -> None:
        with undisturbed() as stack:
            stack.callback(undo)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert undone == ["group"]
    assert signal.getsignal(signal.SIGTERM) is before
