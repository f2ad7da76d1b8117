"""The demo reads what the cache says about itself, whatever state it finds it in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parkade_serving.demo.accounts import count_drops, outcome_of, packed_bytes, read_cache_figures, receipts_folder
from parkade_serving.pod_client import PodClient


class FakePod(PodClient):
    """Answers with what it was given."""

    def __init__(self, summary: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:1")
        self._summary = summary

    def get(self, path: str, query: object = None, timeout_s: float = 10.0) -> dict[str, Any]:
        return self._summary


def test_figures_come_from_the_summary():
    figures = read_cache_figures(
        FakePod(
            {
                "memory": {"parked_peak_bytes": 10},
                "disk": {"written_bytes_total": 20, "read_bytes_total": 30},
                "hooks": {
                    "lookup": {"count": 5, "max_seconds": 0.001},
                    "wait": {"count": 1, "max_seconds": 0.002},
                    "longest_seconds": 0.002,
                },
                "dropped_conversations_total": 1,
                "not_captured_blocks_total": 2,
            }
        )
    )
    assert (figures.parked_bytes_peak, figures.spilled_bytes, figures.read_back_bytes) == (10, 20, 30)
    assert (figures.conversations_dropped, figures.not_captured_blocks) == (1, 2)
    assert (figures.longest_hook, figures.longest_hook_seconds) == ("wait", 0.002)


def test_a_summary_without_a_disk_or_hooks_counts_nothing():
    assert read_cache_figures(FakePod({"disk": None})).spilled_bytes == 0


def test_the_engine_adds_to_the_id_that_a_client_sees():
    assert outcome_of("chatcmpl-1a", {"chatcmpl-1a-0f": "resumed_ram", "chatcmpl-2b-9c": "reread"}) == "resumed_ram"
    assert outcome_of("chatcmpl-3c", {"chatcmpl-1a-0f": "resumed_ram"}) == ""
    assert outcome_of("", {"chatcmpl-1a-0f": "resumed_ram"}) == ""


def test_drops_are_counted_over_all_files_and_past_a_torn_line(tmp_path: Path):
    folder = receipts_folder(tmp_path)
    folder.mkdir(parents=True)
    lines = [json.dumps({"id": number, "kind": kind}) for number, kind in enumerate(("turn", "drop", "spill"))]
    (folder / "receipts-1.jsonl").write_text("\n".join(lines) + '\n{"id": 4, "kind": "dr')
    (folder / "receipts-2.jsonl").write_text(json.dumps({"kind": "drop"}) + "\n[1]\n")
    assert count_drops(tmp_path) == 2


def test_a_run_that_left_nothing_on_disk_dropped_and_packed_nothing(tmp_path: Path):
    assert count_drops(tmp_path) == 0
    assert packed_bytes(tmp_path) == 0


def test_packs_are_counted_by_what_they_take_on_disk(tmp_path: Path):
    pack = tmp_path / "spill" / "identity" / "rank0" / "packs" / "ab" / "one.pack"
    pack.parent.mkdir(parents=True)
    with pack.open("wb") as file:
        file.truncate(1 << 20)
    assert packed_bytes(tmp_path) < 1 << 20
