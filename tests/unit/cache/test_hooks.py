"""Hook times: count, total and longest, and the longest of all."""

from __future__ import annotations

import pytest

from parkade_cache.hooks import HookTimes


def test_calls_are_counted_by_name_and_the_longest_of_all_is_kept() -> None:
    times = HookTimes()
    times.add("match", 0.001)
    times.add("match", 0.003)
    times.add("store", 0.002)
    summary = times.summary()
    assert summary["match"] == {"count": 2, "total_seconds": pytest.approx(0.004), "max_seconds": 0.003}
    assert summary["longest_seconds"] == 0.003


def test_calls_of_another_process_are_added() -> None:
    times = HookTimes()
    times.add("get_finished", 0.001)
    times.merge("get_finished", count=10, total_seconds=0.5, max_seconds=0.2)
    assert times.summary()["get_finished"] == {"count": 11, "total_seconds": pytest.approx(0.501), "max_seconds": 0.2}


def test_a_hook_that_raises_is_timed_too() -> None:
    times = HookTimes()
    with pytest.raises(KeyError), times.timed("match"):
        raise KeyError
    found = times.summary()["match"]
    assert isinstance(found, dict)
    assert found["count"] == 1


def test_without_a_call_the_longest_is_zero() -> None:
    assert HookTimes().summary() == {"longest_seconds": 0.0}
