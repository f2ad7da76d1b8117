"""M5 and case 9: where the groups of this process are found, and which paths are refused."""

from __future__ import annotations

from typing import Any

import pytest

from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import CgroupTree, parse_groups, parse_mounts
from parkade_cache.memory.reading import ReadingSource

GIB = 1 << 30


def folders(machine: Any) -> list[str]:
    """Folders of the visible levels, as this machine's own root names them."""
    return [level.folder.removeprefix(str(machine.root)) for level in CgroupTree(machine.root).levels()]


def test_case_9_a_group_not_visible_below_the_mount_stops_at_the_nearest_level_that_exists(machine: Any):
    machine.joins(v2="/kubepods/pod1/container")
    machine.mounts(v2="/sys/fs/cgroup")
    machine.v2_group("", max=10 * GIB, current=9 * GIB)
    machine.v2_group("/kubepods", max="max", current=0)

    assert folders(machine) == ["/sys/fs/cgroup", "/sys/fs/cgroup/kubepods"]
    assert machine.sample().available_bytes == GIB


@pytest.mark.parametrize("path", ["/../outside", "/a/../b", "/./a", "/a/.."])
def test_case_9_a_refused_path_leaves_the_machine_without_a_cap_and_is_unknown_with_one(machine: Any, path: str):
    machine.joins(v2=path)
    machine.mounts(v2="/sys/fs/cgroup")
    machine.v2_group("", max=10 * GIB, current=9 * GIB)
    machine.v2_group("/a", max=10 * GIB, current=9 * GIB)

    assert machine.sample().source is ReadingSource.MEMINFO
    assert not machine.sample(cap_bytes=20 * GIB).known


def test_m5_a_refused_path_of_a_v2_mount_without_memory_does_not_hide_v1s_limit(machine: Any):
    machine.joins(v1="/pod", v2="/../elsewhere")
    machine.mounts(v1="/sys/fs/cgroup/memory", v2="/sys/fs/cgroup/unified")
    machine.v1_group("/pod", limit=4 * GIB, usage=3 * GIB)
    (machine.root / "sys/fs/cgroup/unified").mkdir()

    assert machine.sample().available_bytes == GIB


def test_m5_inside_a_pod_the_containers_own_limit_sits_at_the_mount_root(machine: Any):
    """Without a cgroup namespace the kernel names the host's path, and the mount shows exactly that group."""
    machine.joins(v1="/kubepods/pod1/c1")
    machine.mounts(v1="/sys/fs/cgroup/memory", v1_root="/kubepods/pod1/c1")
    machine.v1_group("", limit=4 * GIB, usage=3 * GIB)

    assert folders(machine) == ["/sys/fs/cgroup/memory"]
    assert machine.sample().available_bytes == GIB


def test_m5_a_mount_of_an_ancestor_shows_the_levels_below_it(machine: Any):
    machine.joins(v2="/slice/pod/c1")
    machine.mounts(v2="/sys/fs/cgroup", v2_root="/slice")
    machine.v2_group("", max="max", current=0)
    machine.v2_group("/pod/c1", max="max", current=0)

    assert folders(machine) == ["/sys/fs/cgroup", "/sys/fs/cgroup/pod", "/sys/fs/cgroup/pod/c1"]


def test_m1_of_several_mounts_the_one_that_shows_the_most_ancestors_is_used(machine: Any):
    machine.joins(v2="/slice/pod")
    lines = [
        "50 31 0:38 /slice/pod /other/bind rw - cgroup2 cgroup2 rw",
        "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "51 31 0:38 /slice /third rw - cgroup2 cgroup2 rw",
    ]
    (machine.root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    machine.v2_group("/slice/pod", max="max", current=0)

    assert folders(machine) == ["/sys/fs/cgroup", "/sys/fs/cgroup/slice", "/sys/fs/cgroup/slice/pod"]


def test_m5_of_two_mounts_that_show_the_same_part_the_later_one_is_used(machine: Any):
    machine.joins(v2="/")
    lines = ["41 31 0:38 / /hidden rw - cgroup2 cgroup2 rw", "42 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"]
    (machine.root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    machine.v2_group("", max="max", current=0)
    machine.v2_group("", point="/hidden", max="max", current=0)

    assert folders(machine) == ["/sys/fs/cgroup"]


def test_m5_a_process_that_is_moved_is_followed_at_the_next_sample(machine: Any):
    machine.joins(v2="/a")
    machine.mounts(v2="/sys/fs/cgroup")
    machine.v2_group("/a", max=10 * GIB, current=9 * GIB)
    machine.v2_group("/b", max=10 * GIB, current=7 * GIB)
    sampler = machine.sampler()
    assert sampler.sample().available_bytes == GIB

    machine.joins(v2="/b")
    assert sampler.sample().available_bytes == 3 * GIB


def test_m5_a_group_that_appears_later_is_found(machine: Any):
    machine.joins(v2="/late")
    machine.mounts(v2="/sys/fs/cgroup")
    machine.v2_group("", max="max", current=0)
    sampler = machine.sampler()
    assert sampler.sample().source is ReadingSource.MEMINFO

    machine.v2_group("/late", max=10 * GIB, current=9 * GIB)
    assert sampler.sample().available_bytes == GIB


def test_m5_a_group_that_is_removed_leaves_its_ancestors(machine: Any):
    machine.joins(v2="/a")
    machine.mounts(v2="/sys/fs/cgroup")
    machine.v2_group("", max=50 * GIB, current=9 * GIB)
    machine.v2_group("/a", max=10 * GIB, current=9 * GIB)
    sampler = machine.sampler()
    assert sampler.sample().available_bytes == GIB

    for file in (machine.root / "sys/fs/cgroup/a").iterdir():
        file.unlink()
    (machine.root / "sys/fs/cgroup/a").rmdir()
    assert sampler.sample().available_bytes == 41 * GIB


def test_a_machine_without_control_groups_is_bound_by_itself(machine: Any):
    assert machine.sample().source is ReadingSource.MEMINFO
    assert CgroupTree(machine.root).levels() == ()


@pytest.mark.parametrize("text", [b"nonsense\n", b"0:\n", b"0::relative\n"])
def test_m9_a_malformed_list_of_groups_is_an_error_of_its_own(text: bytes):
    with pytest.raises(MalformedAccountError):
        parse_groups(text)


def test_a_controller_mounted_together_with_others_is_recognised():
    assert parse_groups(b"3:cpu,memory,cpuset:/x:y\n").v1_memory == "/x:y"


def test_mount_points_with_spaces_and_odd_fields_are_read_as_the_kernel_escapes_them():
    line = b"41 31 0:38 /a\\040b /sys/with\\040space rw shared:4 master:1 propagate_from:2 - cgroup2 cgroup2 rw\n"

    (mount,) = parse_mounts(b"1 2 0:1 / / rw - ext4 /dev/x rw\nshort - cgroup2\n" + line)

    assert (mount.root, mount.point) == ("/a b", "/sys/with space")
