"""The release benchmark, small: what it measures is there and means what it says. Its speeds are judged elsewhere."""

from __future__ import annotations

import json

import pytest

from parkade_cache.memory.heap import Allocator, Heap
from parkade_serving.bench.release import run

MIB = 1 << 20


@pytest.mark.skipif(Heap().allocator is not Allocator.GLIBC, reason="compares with glibc's malloc_trim")
def test_usage_falls_by_what_was_released_and_both_ways_are_timed():
    measured = run(total_bytes=64 * MIB, repeats=1)

    assert json.loads(json.dumps(measured)) == measured
    assert measured["figures"]["released_bytes"] == 64 * MIB
    assert measured["figures"]["malloc_trim_released_bytes"] >= 56 * MIB
    assert measured["ratios"]["usage_fall_to_released"] >= 0.95
    assert measured["ratios"]["malloc_trim_seconds_to_release_seconds"] > 0
