"""M1 and M3 to M9, M11: which limit binds, on v1, v2 and hybrid machines, with and without a cap."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from parkade_cache.memory.reading import ReadingSource, room_bytes

GIB = 1 << 30
MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def nested(machine: Any):
    """Case 4: root 100 GiB with 90 used, a 60/58, a/b without a limit; MemAvailable 80 GiB."""
    machine.joins(v2="/a/b")
    machine.mounts(v2="/sys/fs/cgroup")
    machine.v2_group("", max=100 * GIB, current=90 * GIB)
    machine.v2_group("/a", max=60 * GIB, current=58 * GIB)
    machine.v2_group("/a/b", max="max", current=50 * GIB)
    return machine


def test_case_4_m1_the_tightest_visible_ancestor_binds_and_is_named(nested: Any):
    reading = nested.sample()

    assert reading.available_bytes == 2 * GIB
    assert reading.source is ReadingSource.CGROUP
    assert (reading.limit_bytes, reading.current_bytes) == (60 * GIB, 58 * GIB)


def test_case_4_a_group_above_its_limit_is_a_known_zero(nested: Any):
    nested.v2_group("/a", current=61 * GIB)

    reading = nested.sample()

    assert reading.known
    assert reading.available_bytes == 0


def test_case_4_when_the_middle_has_room_the_root_binds_and_then_the_machine(nested: Any):
    nested.v2_group("/a", current=10 * GIB)
    assert (nested.sample().available_bytes, nested.sample().limit_bytes) == (10 * GIB, 100 * GIB)

    nested.meminfo(available_bytes=4 * GIB)
    reading = nested.sample()
    assert (reading.available_bytes, reading.source) == (4 * GIB, ReadingSource.MEMINFO)
    assert (reading.limit_bytes, reading.current_bytes, reading.credit_bytes) == (None, None, 0)


def test_case_5_m3_memory_high_binds_below_memory_max(pod: Any):
    pod.v2_group("", max=100 * GIB, high=99 * GIB + 900 * MIB, current=99 * GIB)
    assert pod.sample().available_bytes == 900 * MIB

    pod.v2_group("", high="max")
    assert pod.sample().available_bytes == GIB


def test_m3_an_absent_memory_high_is_no_limit(pod: Any):
    (pod.root / "sys/fs/cgroup/memory.high").unlink()
    pod.v2_group("", max=10 * GIB, current=8 * GIB)

    assert pod.sample().available_bytes == 2 * GIB


def test_m3_a_finite_limit_without_usage_leaves_the_other_levels_and_is_unknown_under_a_cap(nested: Any):
    (nested.root / "sys/fs/cgroup/a/memory.current").unlink()

    assert (nested.sample().available_bytes, nested.sample().limit_bytes) == (10 * GIB, 100 * GIB)
    assert not nested.sample(cap_bytes=200 * GIB).known


def test_m4_on_v1_the_limit_less_usage_counts(machine: Any):
    machine.joins(v1="/pod")
    machine.mounts(v1="/sys/fs/cgroup/memory")
    machine.v1_group("", limit=UNLIMITED_V1, usage=70 * GIB)
    machine.v1_group("/pod", limit=8 * GIB, usage=5 * GIB)

    reading = machine.sample()

    assert (reading.available_bytes, reading.limit_bytes, reading.current_bytes) == (3 * GIB, 8 * GIB, 5 * GIB)


@pytest.mark.parametrize(("limit", "source"), [(2**62, "meminfo"), (2**62 - 1, "cgroup"), (UNLIMITED_V1, "meminfo")])
def test_m4_two_to_the_62_and_more_is_unlimited_on_v1(machine: Any, limit: int, source: str):
    machine.joins(v1="/")
    machine.mounts(v1="/sys/fs/cgroup/memory")
    machine.v1_group("", limit=limit, usage=2**62 - 1 - GIB)

    assert machine.sample().source == source


def test_case_10_on_v1_the_limited_level_in_the_middle_binds(machine: Any):
    machine.joins(v1="/mid/leaf")
    machine.mounts(v1="/sys/fs/cgroup/memory")
    machine.v1_group("", limit=UNLIMITED_V1, usage=90 * GIB)
    machine.v1_group("/mid", limit=64 * GIB, usage=60 * GIB)
    machine.v1_group("/mid/leaf", limit=UNLIMITED_V1, usage=1 * GIB)

    assert (machine.sample().available_bytes, machine.sample().source) == (4 * GIB, ReadingSource.CGROUP)


def test_case_10_m5_on_a_hybrid_machine_v2_wins_when_it_has_memory_files(machine: Any):
    machine.joins(v1="/pod", v2="/pod")
    machine.mounts(v1="/sys/fs/cgroup/memory", v2="/sys/fs/cgroup/unified")
    machine.v1_group("/pod", limit=8 * GIB, usage=5 * GIB)
    (machine.root / "sys/fs/cgroup/unified/pod").mkdir(parents=True)
    assert machine.sample().available_bytes == 3 * GIB

    machine.v2_group("/pod", point="/sys/fs/cgroup/unified", max=8 * GIB, current=7 * GIB)
    assert machine.sample().available_bytes == 1 * GIB


def test_case_10_m6_on_v1_only_the_hierarchical_counts_are_credited(machine: Any):
    machine.joins(v1="/pod")
    machine.mounts(v1="/sys/fs/cgroup/memory")
    plain = {"inactive_file": 5 * GIB, "dirty": 0, "writeback": 0}
    machine.v1_group("/pod", limit=8 * GIB, usage=7 * GIB, stat=plain)
    assert machine.sample().credit_bytes == 0

    total = {"total_inactive_file": 3 * GIB, "total_dirty": GIB // 2, "total_writeback": GIB // 2}
    machine.v1_group("/pod", limit=8 * GIB, usage=7 * GIB, stat=plain | total)
    reading = machine.sample()
    assert (reading.credit_bytes, reading.available_bytes) == (2 * GIB, 3 * GIB)


def test_m6_only_the_clean_inactive_file_cache_is_credited(pod: Any):
    stat = {
        "shadow_inactive_file": 9 * GIB,
        "anon": 9 * GIB,
        "active_file": 9 * GIB,
        "shmem": 9 * GIB,
        "unevictable": 9 * GIB,
        "inactive_file": 3 * GIB,
        "file_dirty": GIB,
        "file_writeback": GIB // 2,
    }
    pod.v2_group("", max=10 * GIB, current=9 * GIB, stat=stat)

    reading = pod.sample()

    assert reading.credit_bytes == GIB + GIB // 2
    assert reading.available_bytes == 2 * GIB + GIB // 2


def test_m6_credit_is_never_more_than_current_and_never_negative(pod: Any):
    pod.v2_group("", max=10 * GIB, current=GIB, stat={"inactive_file": 5 * GIB, "file_dirty": 0, "file_writeback": 0})
    assert (pod.sample().credit_bytes, pod.sample().available_bytes) == (GIB, 10 * GIB)

    pod.v2_group("", stat={"inactive_file": GIB, "file_dirty": 5 * GIB, "file_writeback": 0})
    assert pod.sample().credit_bytes == 0


@pytest.mark.parametrize(
    "stat", ["", "inactive_file 5\n", "inactive_file x\nfile_dirty 0\nfile_writeback 0", "garbage"]
)
def test_m6_an_unreadable_or_incomplete_stat_credits_nothing_and_is_not_unknown(pod: Any, stat: str):
    pod.v2_group("", max=10 * GIB, current=9 * GIB, stat=stat)

    reading = pod.sample()

    assert (reading.known, reading.credit_bytes, reading.available_bytes) == (True, 0, GIB)


def test_m6_an_absent_stat_credits_nothing(pod: Any):
    pod.v2_group("", max=10 * GIB, current=9 * GIB)
    (pod.root / "sys/fs/cgroup/memory.stat").unlink()

    assert pod.sample().available_bytes == GIB


@pytest.mark.parametrize(
    ("limit", "current", "credit", "room"), [(10, 4, 0, 6), (10, 4, 3, 9), (10, 12, 0, 0), (10, 12, 5, 3)]
)
def test_m7_room_is_the_limit_less_net_usage_and_never_negative(limit: int, current: int, credit: int, room: int):
    assert room_bytes(limit_bytes=limit, current_bytes=current, credit_bytes=credit) == room


def test_m8_the_cap_is_held_against_the_topmost_visible_groups_net_usage(nested: Any):
    nested.v2_group(
        "", max="max", current=90 * GIB, stat={"inactive_file": 5 * GIB, "file_dirty": 0, "file_writeback": 0}
    )
    nested.v2_group("/a", max="max")

    reading = nested.sample(cap_bytes=86 * GIB)

    assert (reading.available_bytes, reading.source) == (1 * GIB, ReadingSource.FLAG)
    assert (reading.limit_bytes, reading.current_bytes, reading.credit_bytes) == (86 * GIB, 90 * GIB, 5 * GIB)


def test_m8_without_a_group_the_cap_is_held_against_what_the_machine_uses(machine: Any):
    reading = machine.sample(cap_bytes=50 * GIB)

    assert (reading.available_bytes, reading.source) == (2 * GIB, ReadingSource.FLAG)
    assert reading.current_bytes == 48 * GIB


def test_m8_a_v2_root_without_a_usage_file_falls_back_to_what_the_machine_uses(pod: Any):
    for name in ("memory.max", "memory.high", "memory.current"):
        (pod.root / "sys/fs/cgroup" / name).unlink()

    assert pod.sample(cap_bytes=50 * GIB).current_bytes == 48 * GIB


def test_m8_without_any_usage_the_cap_makes_it_unknown(machine: Any):
    machine.meminfo_text("MemAvailable: 100 kB\n")

    assert machine.sample().known
    assert not machine.sample(cap_bytes=GIB).known


def test_case_8_equal_room_under_cap_and_group_reports_the_flag(pod: Any):
    pod.v2_group("", max=10 * GIB, current=8 * GIB)

    assert pod.sample(cap_bytes=10 * GIB).source is ReadingSource.FLAG
    assert pod.sample(cap_bytes=10 * GIB + 4096).source is ReadingSource.CGROUP


def test_case_8_equal_room_under_cap_and_machine_reports_the_flag(pod: Any):
    pod.v2_group("", max="max", current=0)

    assert pod.sample(cap_bytes=80 * GIB).source is ReadingSource.FLAG


MALFORMED = ["", "many", "9" * 5000, "-1", "+5", "1 2", "max max", "12MiB", str(2**64)]


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("name", ["max", "high", "current"])
def test_m9_a_malformed_group_file_leaves_the_machine_without_a_cap_and_is_unknown_with_one(
    pod: Any, name: str, text: str
):
    pod.v2_group("", **({"max": 10 * GIB, "current": 9 * GIB} | {name: text}))

    reading = pod.sample()

    assert (reading.available_bytes, reading.source) == (80 * GIB, ReadingSource.MEMINFO)
    assert not pod.sample(cap_bytes=20 * GIB).known


def test_m9_an_unreadable_group_file_is_malformed(pod: Any):
    """A folder in its place fails to read for root as well, which a mode of 000 would not."""
    (pod.root / "sys/fs/cgroup/memory.max").unlink()
    (pod.root / "sys/fs/cgroup/memory.max").mkdir()

    assert pod.sample().source is ReadingSource.MEMINFO
    assert not pod.sample(cap_bytes=GIB).known


def test_m9_the_fallback_warns_once_per_sampler(pod: Any, caplog: pytest.LogCaptureFixture):
    pod.v2_group("", max="many")
    sampler = pod.sampler()

    with caplog.at_level(logging.WARNING):
        sampler.sample()
        sampler.sample()

    assert len(caplog.records) == 1


def test_m11_a_limit_that_is_changed_counts_from_the_next_sample(pod: Any):
    pod.v2_group("", max=10 * GIB, current=8 * GIB)
    sampler = pod.sampler()
    assert sampler.sample().available_bytes == 2 * GIB

    pod.v2_group("", max=9 * GIB)
    assert sampler.sample().available_bytes == 1 * GIB

    pod.v2_group("", max=20 * GIB)
    assert sampler.sample().available_bytes == 12 * GIB

    sampler.cap_bytes = 11 * GIB
    assert (sampler.sample().available_bytes, sampler.sample().source) == (3 * GIB, ReadingSource.FLAG)


def test_m11_the_limits_in_force_are_listed_for_whoever_must_notice_a_change(nested: Any):
    sampler = nested.sampler(cap_bytes=50 * GIB)
    assert sampler.limits_bytes() == (100 * GIB, 60 * GIB, 50 * GIB)

    nested.v2_group("/a", max=61 * GIB)
    assert sampler.limits_bytes() == (100 * GIB, 61 * GIB, 50 * GIB)


def test_m1_a_reading_says_for_its_receipt_where_it_comes_from(nested: Any):
    assert nested.sample().as_fields() == {
        "available": 2 * GIB,
        "source": "cgroup",
        "limit": 60 * GIB,
        "current": 58 * GIB,
        "credit": 0,
    }
