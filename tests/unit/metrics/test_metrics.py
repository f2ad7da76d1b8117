"""The metrics a pod shows: their names are an interface, their values are never stale."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parkade_cache.metrics import CacheMetrics

# What interfaces.md promises; more is welcome, none of these may go.
PROMISED = """
memory_available_bytes memory_limit_bytes memory_floor_bytes memory_unknown_total gate_decisions_total
gate_decision_seconds trim_seconds trim_released_bytes_total trim_resident_bytes heap_bytes release_seconds
released_bytes_total conversations blocks_bytes dirty_bytes turn_wait_seconds turns_total restored_tokens_total
reread_tokens_total restore_seconds restore_bytes_total write_out_total write_out_seconds spill_write_bytes_total
spill_write_seconds spill_backlog_bytes spill_bytes spill_capacity_bytes spill_free_bytes
spill_write_budget_remaining_bytes spill_errors_total spill_corrupt_blocks_total dropped_conversations_total
receipts_total drain_seconds resize_total build_info
"""

SUMMARY: dict[str, Any] = {
    "version": "0.1.0",
    "memory": {"limit_bytes": 100, "floor_bytes": 10, "available_bytes": 50, "source": "cgroup"},
    "ram": {"conversations": 3, "blocks": 30, "bytes": 3000},
    "disk": {"conversations": 2, "blocks": 20, "bytes": 2000, "capacity_bytes": 9000, "free_bytes": 5},
    "hooks": {"on_schedule": {"count": 4, "total_seconds": 0.5, "max_seconds": 0.25}, "longest_seconds": 0.25},
    "dirty_bytes": 7,
    "draining": False,
    "ready": True,
}


def value(metrics: CacheMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"parkade_{name}", labels)


def test_every_promised_metric_exists() -> None:
    metrics = CacheMetrics()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()}
    assert {f"parkade_{name}" for name in PROMISED.split()} <= names


def test_the_summary_sets_the_gauges() -> None:
    metrics = CacheMetrics()
    metrics.observe(SUMMARY)
    assert value(metrics, "memory_available_bytes", source="cgroup") == 50
    assert value(metrics, "blocks_bytes", tier="disk") == 2000
    assert value(metrics, "spill_free_bytes") == 5
    assert value(metrics, "hook_longest_seconds", hook="on_schedule") == 0.25
    assert value(metrics, "ready") == 1


def test_a_reading_that_turns_unknown_shows_nothing_instead_of_the_old_number() -> None:
    metrics = CacheMetrics()
    metrics.observe(SUMMARY)
    metrics.observe({"memory": {"available_bytes": None, "source": None}})
    assert value(metrics, "memory_available_bytes", source="cgroup") is None


def test_a_known_zero_is_shown_as_zero() -> None:
    metrics = CacheMetrics()
    metrics.observe({"memory": {"available_bytes": 0, "source": "meminfo"}})
    assert value(metrics, "memory_available_bytes", source="meminfo") == 0


@pytest.mark.parametrize("summary", [{}, {"memory": None, "disk": None, "hooks": None}])
def test_a_summary_with_holes_is_taken(summary: dict[str, Any]) -> None:
    CacheMetrics().observe(summary)


def test_the_export_is_json_and_carries_the_values() -> None:
    metrics = CacheMetrics()
    metrics.gate_decisions.labels(kind="park", outcome="refuse", reason="unknown").inc()
    families = json.loads(json.dumps(metrics.export()))
    decisions = next(family for family in families if family["name"] == "parkade_gate_decisions")
    sample = ["parkade_gate_decisions_total", {"kind": "park", "outcome": "refuse", "reason": "unknown"}, 1.0]
    assert decisions["type"] == "counter"
    assert decisions["samples"] == [sample]


def test_two_caches_in_one_process_do_not_share_numbers() -> None:
    one, other = CacheMetrics(), CacheMetrics()
    one.memory_unknown.inc()
    assert value(other, "memory_unknown_total") == 0
