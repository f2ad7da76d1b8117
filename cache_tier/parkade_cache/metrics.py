"""Every ``parkade_`` metric of a pod, defined once, with its meaning.

Why it exists: the owner counts in the engine process while the scrape arrives in the API process. Counting here costs
microseconds and needs no disk; the whole registry travels as plain values when somebody asks.

What must stay true: base units, bounded labels, never an id or a salt in a label; a gauge that mirrors state is set
from the owner's summary and shows nothing rather than something old when the state is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Decisions and hooks take microseconds to milliseconds, releases and trims milliseconds to seconds, disk and drains
# up to minutes.
_FAST_SECONDS: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 0.3, 1.0)
_MEDIUM_SECONDS: Final = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_SLOW_SECONDS: Final = (1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0)
_NAMESPACE: Final = "parkade"


class CacheMetrics:
    """One attribute a metric; the name on the wire is ``parkade_`` plus the name given below."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._define_memory()
        self._define_conversations()
        self._define_spill()
        self._define_archive()
        self._define_process()

    def observe(self, summary: Mapping[str, Any]) -> None:
        """Set every gauge that mirrors state from the owner's summary; missing sections are left alone."""
        self._observe_memory(summary.get("memory") or {})
        self._observe_tiers(summary)
        self._observe_spill(summary.get("disk") or {})
        self._observe_hooks(summary.get("hooks") or {})
        _set(self.dirty_bytes, summary.get("dirty_bytes"))
        _set(self.uptime_seconds, summary.get("uptime_seconds"))
        _set(self.draining, summary.get("draining"))
        _set(self.ready, summary.get("ready"))
        self._observe_build(summary)

    def export(self) -> list[dict[str, Any]]:
        """All families as plain JSON-able values, for a process that rebuilds them."""
        return [
            {
                "name": family.name,
                "help": family.documentation,
                "type": family.type,
                "samples": [
                    [sample.name, dict(sample.labels), sample.value]
                    for sample in family.samples
                    if not sample.name.endswith("_created")
                ],
            }
            for family in self.registry.collect()
        ]

    def _define_memory(self) -> None:
        self.memory_available_bytes = self._gauge(
            "memory_available_bytes",
            "Available memory at the last reading; absent while it is unknown.",
            "source",
        )
        self.memory_limit_bytes = self._gauge("memory_limit_bytes", "The limit that bound the last reading.")
        self.memory_floor_bytes = self._gauge("memory_floor_bytes", "Bytes that must stay available under the limit.")
        self.memory_parked_max_bytes = self._gauge("memory_parked_max_bytes", "RAM budget for parked blocks.")
        self.memory_reserved_bytes = self._gauge("memory_reserved_bytes", "Admitted and not yet committed.")
        self.memory_unknown = self._counter("memory_unknown", "Readings that were unknown; unknown refuses.")
        self.gate_decisions = self._counter("gate_decisions", "Decisions of the gate.", "kind", "outcome", "reason")
        self.gate_decision_seconds = self._histogram(
            "gate_decision_seconds", "Time one decision took, releases and write-outs included.", _MEDIUM_SECONDS
        )
        self.trim_seconds = self._histogram(
            "trim_seconds", "Time one heap release took.", _MEDIUM_SECONDS, "process", "allocator"
        )
        self.trim_released_bytes = self._counter(
            "trim_released_bytes", "Resident bytes given back by heap releases.", "process", "allocator"
        )
        self.trim_resident_bytes = self._gauge(
            "trim_resident_bytes", "Resident size around the last heap release.", "process", "when"
        )
        self.heap_bytes = self._gauge("heap_bytes", "Heap before the last release.", "process", "state")
        self.release_seconds = self._histogram(
            "release_seconds", "Time to give memory back to the kernel.", _MEDIUM_SECONDS, "what"
        )
        self.released_bytes = self._counter("released_bytes", "Bytes given back to the kernel.", "what")
        self.resize = self._counter("resize", "Changes of a limit, floor or budget while running.", "outcome")
        self.relief = self._counter("relief", "Times memory was given back under pressure.", "reason", "outcome")
        self.memory_pressure_level = self._gauge("memory_pressure_level", "0 none, 1 warning, 2 critical.")

    def _define_conversations(self) -> None:
        self.conversations = self._gauge("conversations", "Conversations that have blocks in a tier.", "tier")
        self.blocks = self._gauge("blocks", "Blocks held in a tier.", "tier")
        self.blocks_bytes = self._gauge("blocks_bytes", "Bytes of blocks held in a tier.", "tier")
        self.dirty_bytes = self._gauge("dirty_bytes", "Parked bytes that are not on disk yet.")
        self.turns = self._counter("turns", "Finished turns by how their prompt was had.", "outcome")
        self.turn_wait_seconds = self._histogram(
            "turn_wait_seconds", "Time turns waited for restores and write-outs.", _MEDIUM_SECONDS, "for"
        )
        self.restored_tokens = self._counter("restored_tokens", "Prompt tokens that were brought back.", "tier")
        self.reread_tokens = self._counter("reread_tokens", "Prompt tokens that were read anew.", "reason")
        self.restore_seconds = self._histogram("restore_seconds", "Time of one restore.", _MEDIUM_SECONDS, "tier")
        self.restore_bytes = self._counter("restore_bytes", "Bytes brought back.", "tier")
        self.dropped_conversations = self._counter(
            "dropped_conversations", "Conversations let go without a copy; should stay 0.", "reason"
        )
        self.not_captured_blocks = self._counter(
            "not_captured_blocks", "Blocks the engine reused before they could be copied."
        )
        self.receipts = self._counter("receipts", "Receipts written.", "kind", "outcome")
        self.receipts_unwritten = self._gauge("receipts_unwritten", "Receipts the disk did not take.")

    def _define_spill(self) -> None:
        self.write_out = self._counter("write_out", "Write-outs before memory was let go.", "outcome")
        self.write_out_seconds = self._histogram("write_out_seconds", "Time of one write-out.", _SLOW_SECONDS)
        self.spill_write_bytes = self._counter("spill_write_bytes", "Physical bytes written to the spill directory.")
        self.spill_write_seconds = self._histogram("spill_write_seconds", "Time of one pack.", _SLOW_SECONDS)
        self.spill_backlog_bytes = self._gauge("spill_backlog_bytes", "Bytes queued to be written.")
        self.spill_bytes = self._gauge("spill_bytes", "Bytes the spill directory holds.")
        self.spill_capacity_bytes = self._gauge("spill_capacity_bytes", "Bytes the spill directory may hold.")
        self.spill_free_bytes = self._gauge("spill_free_bytes", "Free bytes of its file system.")
        self.spill_write_budget_remaining_bytes = self._gauge(
            "spill_write_budget_remaining_bytes", "What may still be written within the hour."
        )
        self.spill_errors = self._counter("spill_errors", "Failed operations on the spill directory.", "op", "reason")
        self.spill_corrupt_blocks = self._counter("spill_corrupt_blocks", "Blocks whose checksum did not match.")
        self.spill_quarantined = self._gauge("spill_quarantined", "Packs set aside because they were damaged.")

    def _define_archive(self) -> None:
        self.archive_operations = self._counter("archive_operations", "Operations on object storage.", "op", "outcome")
        self.archive_bytes = self._counter("archive_bytes", "Bytes moved to or from object storage.", "op")
        self.archive_seconds = self._histogram(
            "archive_seconds", "Time of one operation on object storage.", _SLOW_SECONDS, "op"
        )

    def _define_process(self) -> None:
        self.drain_seconds = self._histogram("drain_seconds", "Time of a drain.", _SLOW_SECONDS)
        self.draining = self._gauge("draining", "1 while the pod drains.")
        self.ready = self._gauge("ready", "1 while the cache takes part in serving.")
        self.hook_calls = self._gauge("hook_calls", "Calls of an engine step hook since the start.", "hook")
        self.hook_seconds = self._gauge("hook_seconds", "Time spent in an engine step hook since the start.", "hook")
        self.hook_longest_seconds = self._gauge("hook_longest_seconds", "Longest call of an engine step hook.", "hook")
        self.hook_errors = self._counter(
            "hook_errors", "Errors of the cache inside an engine step; the request went on without it.", "hook"
        )
        self.uptime_seconds = self._gauge("uptime_seconds", "Age of the cache.")
        self.build_info = self._gauge("build_info", "1; what runs here.", "version", "format")

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(name, meaning, labels, namespace=_NAMESPACE, registry=self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, namespace=_NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, meaning, labels, namespace=_NAMESPACE, registry=self.registry, buckets=buckets)

    def _observe_memory(self, memory: Mapping[str, Any]) -> None:
        _set(self.memory_limit_bytes, memory.get("limit_bytes"))
        _set(self.memory_floor_bytes, memory.get("floor_bytes"))
        _set(self.memory_parked_max_bytes, memory.get("parked_max_bytes"))
        _set(self.memory_reserved_bytes, memory.get("reserved_bytes"))
        if "available_bytes" in memory:
            self.memory_available_bytes.clear()  # The source changes, and unknown is no number.
            if memory["available_bytes"] is not None:
                source = str(memory.get("source") or "unknown")
                self.memory_available_bytes.labels(source=source).set(memory["available_bytes"])

    def _observe_tiers(self, summary: Mapping[str, Any]) -> None:
        for tier, section in (("ram", "ram"), ("disk", "disk")):
            values = summary.get(section) or {}
            _set(self.conversations.labels(tier=tier), values.get("conversations"))
            _set(self.blocks.labels(tier=tier), values.get("blocks"))
            _set(self.blocks_bytes.labels(tier=tier), values.get("bytes"))

    def _observe_spill(self, disk: Mapping[str, Any]) -> None:
        _set(self.spill_bytes, disk.get("bytes"))
        _set(self.spill_capacity_bytes, disk.get("capacity_bytes"))
        _set(self.spill_free_bytes, disk.get("free_bytes"))
        _set(self.spill_write_budget_remaining_bytes, disk.get("budget_remaining_bytes"))
        _set(self.spill_backlog_bytes, disk.get("backlog_bytes"))
        _set(self.spill_quarantined, disk.get("quarantined"))

    def _observe_hooks(self, hooks: Mapping[str, Any]) -> None:
        for name, values in hooks.items():
            if isinstance(values, Mapping):
                _set(self.hook_calls.labels(hook=name), values.get("count"))
                _set(self.hook_seconds.labels(hook=name), values.get("total_seconds"))
                _set(self.hook_longest_seconds.labels(hook=name), values.get("max_seconds"))

    def _observe_build(self, summary: Mapping[str, Any]) -> None:
        version = summary.get("version")
        if version is not None:
            identity = summary.get("identity") or {}
            self.build_info.labels(version=str(version), format=str(identity.get("format_version", ""))).set(1)


def _set(gauge: Gauge, value: float | None) -> None:
    if value is not None:
        gauge.set(float(value))
