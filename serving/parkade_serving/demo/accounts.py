"""Reads what the cache says about itself: over HTTP while its pod runs, from its receipt files afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from parkade_serving.demo.figures import CacheFigures
from parkade_serving.demo.plan import spill_folder
from parkade_serving.pod_client import PodClient

_RECEIPTS_AT_ONCE: Final = 1000
_SECTOR_BYTES: Final = 512


def read_cache_figures(pod: PodClient) -> CacheFigures:
    """The figures of one engine since its start; what it dropped is counted from receipts, by `count_drops`."""
    summary = pod.get("/summary")
    memory, disk, hooks = (_section(summary, name) for name in ("memory", "disk", "hooks"))
    name, seconds = _longest_hook(hooks)
    return CacheFigures(
        parked_bytes_peak=_whole(memory, "parked_peak_bytes"),
        spilled_bytes=_whole(disk, "written_bytes_total"),
        read_back_bytes=_whole(disk, "read_bytes_total"),
        conversations_dropped=_whole(summary, "dropped_conversations_total"),
        not_captured_blocks=_whole(summary, "not_captured_blocks_total"),
        longest_hook_seconds=seconds,
        longest_hook=name,
    )


def read_turn_outcomes(pod: PodClient) -> dict[str, str]:
    """Outcome by request, from the pod's newest turn receipts."""
    answer = pod.get("/receipts", {"kind": "turn", "limit": _RECEIPTS_AT_ONCE})
    return {str(one.get("request", "")): str(one.get("outcome", "")) for one in answer.get("receipts", ())}


def outcome_of(request: str, outcomes: Mapping[str, str]) -> str:
    """The outcome of a request by the id in its answer; the engine adds to that id inside."""
    return next((outcome for known, outcome in outcomes.items() if request and known.startswith(request)), "")


def count_drops(folder: Path) -> int:
    """Conversations dropped in the whole run, engines' ends included, by the receipts on disk."""
    return sum(receipt.get("kind") == "drop" for receipt in read_receipts(folder))


def read_receipts(folder: Path) -> Iterator[dict[str, Any]]:
    """Every receipt that a run's engines left on disk; the last line of a killed one may be torn."""
    for path in sorted(receipts_folder(folder).glob("*")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                receipt = json.loads(line)
            except ValueError:
                continue
            if isinstance(receipt, dict):
                yield receipt


def receipts_folder(folder: Path) -> Path:
    """Where a run's receipts are."""
    return spill_folder(folder) / "receipts"


def packed_bytes(folder: Path) -> int:
    """Bytes that a run's packs take on disk."""
    return sum(path.stat().st_blocks * _SECTOR_BYTES for path in spill_folder(folder).rglob("*.pack"))


def _section(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = summary.get(name)
    return found if isinstance(found, Mapping) else {}


def _whole(section: Mapping[str, Any], name: str) -> int:
    return int(section.get(name) or 0)


def _longest_hook(hooks: Mapping[str, Any]) -> tuple[str, float]:
    times = {name: float(entry.get("max_seconds", 0.0)) for name, entry in hooks.items() if isinstance(entry, Mapping)}
    name = max(times, key=times.__getitem__, default="")
    return name, max(times.get(name, 0.0), float(hooks.get("longest_seconds") or 0.0))
