"""The kernel's promises and ours on the kernel this runs on, where it has cgroup v1; sizes are hundreds of MiB."""

from __future__ import annotations

from typing import Any

import pytest

pytest.register_assert_rewrite("component.kernel_conformance")

from component.kernel_conformance import (  # noqa: E402
    MIB,
    PodConformance,
    ReadingsConformance,
    loses_nothing,
    scene,
    seen_by,
)

pytestmark = pytest.mark.kernel

SIZE_MIB = 128
POD_MIB = 256


@pytest.fixture(scope="module")
def kernel() -> dict[str, Any]:
    return seen_by("cgroup_checks.py", "v1", SIZE_MIB)


@pytest.fixture(scope="module")
def lives() -> dict[str, Any]:
    return seen_by("cgroup_pod.py", "v1", POD_MIB, timeout_s=280)


class TestReadings(ReadingsConformance):
    size_mib = SIZE_MIB


class TestPod(PodConformance):
    def test_a_limit_below_what_is_in_use_is_refused_by_the_kernel_and_changes_nothing(self, lives: dict[str, Any]):
        """M4, M11: EBUSY is the kernel's right answer; nobody has lowered anything, so nothing is given back."""
        seen = scene(lives, "refused", "below_use")

        assert seen["answer"] == "EBUSY"
        assert seen["before"] == seen["after"]
        assert seen["receipts"] == {}
        loses_nothing(seen)
        loses_nothing(scene(lives, "refused", "next_turns"))

    def test_w1_writing_out_takes_at_most_64_mib_and_no_page_cache(self, lives: dict[str, Any]):
        seen = scene(lives, "written", "writing_out")

        assert seen["unwritten"] >= 512 * MIB
        assert set(seen["drained"]["outcomes"]) == {"written"}
        assert seen["resident_growth"] <= 64 * MIB
        assert seen["page_cache_growth"] <= 8 * MIB
        loses_nothing(seen)
        loses_nothing(scene(lives, "written", "next_turns"))
