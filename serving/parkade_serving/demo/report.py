"""What the demo leaves: a table with verdicts for people, a JSON file for everything else. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from parkade_serving.demo.figures import RunFigures, TurnFigures
from parkade_serving.demo.plan import shown_size
from parkade_serving.demo.verdicts import Verdict, judge, ratios

_GAP: Final = "  "


def table(runs: Sequence[RunFigures]) -> str:
    """One column per run."""
    rows = [
        ("", [run.name for run in runs]),
        ("RAM budget", [shown_size(run.ram_budget_bytes) for run in runs]),
        ("median first token, later turns", [f"{run.median_first_token_seconds:.2f} s" for run in runs]),
        ("turns resumed", [f"{run.resumed_turns} of {len(run.later_turns)}" for run in runs]),
        ("cached share of the resumable", [f"{run.cached_share:.1%}" for run in runs]),
        ("parked in RAM, peak", [_cached(run, shown_size(run.cache.parked_bytes_peak)) for run in runs]),
        ("spilled to disk", [_cached(run, shown_size(run.cache.spilled_bytes)) for run in runs]),
        ("read back from disk", [_cached(run, shown_size(run.cache.read_back_bytes)) for run in runs]),
        ("conversations dropped", [_cached(run, str(run.cache.conversations_dropped)) for run in runs]),
        ("blocks not captured", [_cached(run, str(run.cache.not_captured_blocks)) for run in runs]),
        ("longest connector hook", [_cached(run, f"{run.cache.longest_hook_seconds * 1e3:.1f} ms") for run in runs]),
        ("shut down within", [_seconds(run.shutdown_seconds) for run in runs]),
    ]
    label_width = max(len(label) for label, _ in rows)
    widths = [max(len(values[column]) for _, values in rows) for column in range(len(runs))]
    lines = [
        _GAP.join(
            [label.ljust(label_width), *(value.rjust(width) for value, width in zip(values, widths, strict=True))]
        )
        for label, values in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cached(run: RunFigures, value: str) -> str:
    return "-" if run.ram_budget_bytes is None else value


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def verdict_lines(verdicts: Sequence[Verdict]) -> str:
    """One line per promise."""
    width = max((len(verdict.promise) for verdict in verdicts), default=0)
    return "\n".join(f"{'ok  ' if one.kept else 'FAIL'} {one.promise.ljust(width)}  {one.measured}" for one in verdicts)


def document(
    runs: Sequence[RunFigures], *, version: str, machine: Mapping[str, object], engine: Mapping[str, str]
) -> dict[str, object]:
    """The JSON file; the keys of the public interface, and a few more."""
    by_name = {run.name: run for run in runs}
    return {
        "version": version,
        "machine": dict(machine),
        "engine": dict(engine),
        "runs": [_run(run) for run in runs],
        "ratios": ratios(by_name),
        "verdicts": [dataclasses.asdict(verdict) for verdict in judge(by_name)],
    }


def _run(run: RunFigures) -> dict[str, object]:
    return {
        "name": run.name,
        "ram_budget_bytes": run.ram_budget_bytes,
        "later_turns": len(run.later_turns),
        "resumed_turns": run.resumed_turns,
        "cached_share": run.cached_share,
        "median_first_token_seconds": run.median_first_token_seconds,
        "conversations_dropped": run.cache.conversations_dropped,
        "parked_bytes_peak": run.cache.parked_bytes_peak,
        "spilled_bytes": run.cache.spilled_bytes,
        "read_back_bytes": run.cache.read_back_bytes,
        "longest_hook_seconds": run.cache.longest_hook_seconds,
        "longest_hook": run.cache.longest_hook,
        "not_captured_blocks": run.cache.not_captured_blocks,
        "shutdown_seconds": run.shutdown_seconds,
        "turns": [_turn(turn) for turn in run.turns],
        "new_conversation": None if run.newcomer is None else _turn(run.newcomer),
    }


def _turn(turn: TurnFigures) -> dict[str, object]:
    return dataclasses.asdict(turn)
