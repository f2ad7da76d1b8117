"""Judges a rehearsal, and says it: one line per failure, a table for people, a JSON file for everything else. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from parkade_cache.quantity import format_bytes
from parkade_serving.rehearse.figures import Change, ChangeOutcome, Gulp, Manner, Measured, spread, trims

LEAST_SHARE: Final = 0.97
NOTICED_WITHIN_S: Final = 1.0
GIVEN_BACK_WITHIN_S: Final = 2.0
LONGEST_HOOK_S: Final = 0.020

_MOST_NAMED: Final = 5


def judge(measured: Measured) -> list[str]:
    """Every promise that was broken, one line each; empty when the rehearsal was passed."""
    return [
        *([f"it could not be carried out to its end: {measured.broken}"] if measured.broken else []),
        *_about_losses(measured),
        *_about_requests(measured),
        *(line for gulp in measured.gulps for line in _about_gulp(gulp)),
        *(line for change in measured.changes for line in _about_change(change)),
        *_about_disk(measured),
        *_about_kill(measured),
    ]


def _about_losses(measured: Measured) -> Iterator[str]:
    if measured.oom_kills:
        yield f"the kernel killed {measured.oom_kills} processes for want of memory"
    if measured.conversations_dropped:
        reasons = sorted({str(drop.get("reason", "")) for drop in measured.drops})
        yield f"{measured.conversations_dropped} conversations were dropped ({', '.join(reasons) or 'no receipt'})"
    released, written = len(measured.releases), measured.written_first
    if written < released:
        yield f"{released - written} of {released} conversations left memory before they were on disk"


def _about_requests(measured: Measured) -> Iterator[str]:
    if measured.failures:
        shown = "; ".join(measured.failures[:_MOST_NAMED])
        yield f"{len(measured.failures)} requests failed: {shown}"
    if measured.revisits and measured.cached_share < LEAST_SHARE:
        share = f"{measured.cached_share:.1%} of what could be resumed was cached"
        yield f"{share}, at least {LEAST_SHARE:.0%} was promised"
    if measured.hook.seconds > LONGEST_HOOK_S:
        took = f"{measured.hook.seconds * 1e3:.1f} ms ({measured.hook.name})"
        yield (
            f"a hook of the engine's step took {took}, at most {LONGEST_HOOK_S * 1e3:.0f} ms were promised;"
            f" the rehearsal itself waited up to {measured.core_wait_seconds * 1e3:.0f} ms for a core"
        )


def _about_gulp(gulp: Gulp) -> Iterator[str]:
    pushed = f"pushed {format_bytes(gulp.below_floor_bytes)} below the floor"
    if gulp.give_back_seconds is None:
        yield f"{pushed}, the pod did not give enough back"
    elif gulp.give_back_seconds > GIVEN_BACK_WITHIN_S:
        yield f"{pushed}, the pod took {gulp.give_back_seconds:.1f} s to give it back, not {GIVEN_BACK_WITHIN_S:.0f} s"
    if not gulp.turns:
        yield f"{pushed}, the pod answered nobody"


def _about_change(change: Change) -> Iterator[str]:
    limit = f"a limit of {format_bytes(change.to_bytes)}"
    if change.outcome is ChangeOutcome.POD_REFUSED:
        yield f"{limit} could be met and was refused by the pod: {change.detail}"
    elif change.outcome is ChangeOutcome.UNNOTICED:
        yield f"{limit} was not noticed"
    elif change.manner is Manner.UNANNOUNCED and (change.seconds or 0.0) > NOTICED_WITHIN_S:
        yield f"{limit} was noticed after {change.seconds:.1f} s, not within {NOTICED_WITHIN_S:.0f} s"


def _about_disk(measured: Measured) -> Iterator[str]:
    disk = measured.full_disk
    if disk is None:
        return
    if disk.degraded_seconds is None:
        yield "the disk was full and the pod did not say so"
    if disk.recovered_seconds is None:
        yield "the disk had space again and the pod did not go back to it"
    if not disk.turns:
        yield "while the disk was full the pod answered nobody"


def _about_kill(measured: Measured) -> Iterator[str]:
    killing = measured.killing
    if killing is None:
        return
    if killing.lost:
        shown = ", ".join(killing.lost[:_MOST_NAMED])
        yield f"{len(killing.lost)} of {killing.published} conversations on disk did not survive the kill: {shown}"
    if not killing.published:
        yield "no conversation was on disk when the pod was killed"


# -- what is left behind ----------------------------------------------------------------------------------------------


def document(measured: Measured, *, version: str, machine: Mapping[str, object]) -> dict[str, object]:
    """The JSON file."""
    failures = judge(measured)
    counts: dict[str, dict[str, int]] = {}
    for receipt in measured.receipts:
        of_kind = counts.setdefault(str(receipt["kind"]), {})
        outcome = str(receipt.get("outcome", ""))
        of_kind[outcome] = of_kind.get(outcome, 0) + 1
    return {
        "verdict": "fail" if failures else "pass",
        "figures": figures(measured),
        "failures": failures,
        "version": version,
        "machine": dict(machine),
        "receipts": counts,
    }


def figures(measured: Measured) -> dict[str, object]:
    """The figures by their public names; seconds and bytes."""
    announced = [one for one in measured.changes if one.manner is Manner.ANNOUNCED]
    unannounced = [one for one in measured.changes if one.manner is Manner.UNANNOUNCED]
    return {
        "oom_kills": measured.oom_kills,
        "conversations_dropped": measured.conversations_dropped,
        "releases": len(measured.releases),
        "written_first": measured.written_first,
        "cached_share": measured.cached_share,
        "revisits": len(measured.revisits),
        "limit_changes": len(measured.changes),
        "limit_changes_refused_by_kernel": _count(measured, ChangeOutcome.KERNEL_REFUSED),
        "limit_confirm_seconds": spread(one.seconds for one in announced),
        "notice_seconds": spread(one.seconds for one in unannounced),
        "give_back_seconds": spread(gulp.give_back_seconds for gulp in measured.gulps),
        "give_back_under_lowered_limit_seconds": spread(one.give_back_seconds for one in unannounced),
        "longest_hook_seconds": measured.hook.seconds,
        "longest_hook": measured.hook.name,
        "longest_wait_for_a_core_seconds": measured.core_wait_seconds,
        "requests": len(measured.turns) + len(measured.failures),
        "requests_failed": len(measured.failures),
        "requests_retried": measured.retried,
        "trims": trims(measured.receipts),
        "gulps": [dataclasses.asdict(gulp) for gulp in measured.gulps],
        "changes": [dataclasses.asdict(change) for change in measured.changes],
        "full_disk": None if measured.full_disk is None else dataclasses.asdict(measured.full_disk),
        "kill": None if measured.killing is None else dataclasses.asdict(measured.killing),
        "base_bytes": measured.base_bytes,
        "limit_bytes": measured.limit_bytes,
        "parked_max_bytes": measured.parked_max_bytes,
        "skipped": list(measured.skipped),
        "seconds": measured.seconds,
    }


def _count(measured: Measured, outcome: ChangeOutcome) -> int:
    return sum(change.outcome is outcome for change in measured.changes)


def table(measured: Measured) -> str:
    """The figures that people look at first."""
    rows = [
        ("killed by the kernel for memory", "nobody counts" if measured.oom_kills is None else str(measured.oom_kills)),
        ("conversations dropped", str(measured.conversations_dropped)),
        ("left memory, written first", f"{len(measured.releases)}, {measured.written_first}"),
        ("cached of what could be resumed", f"{measured.cached_share:.1%} over {len(measured.revisits)} revisits"),
        ("requests answered, failed, asked to come again", _requests(measured)),
        ("limit lowered and raised", _changes(measured)),
        ("announced: confirmed after", _spread(measured, "limit_confirm_seconds")),
        ("unannounced: noticed after", _spread(measured, "notice_seconds")),
        ("neighbour: floor free again after", _spread(measured, "give_back_seconds")),
        ("disk full: said after, recovered after", _disk(measured)),
        ("killed: on disk, resumed", _kill(measured)),
        ("longest hook of the engine's step", f"{measured.hook.seconds * 1e3:.1f} ms {measured.hook.name}".rstrip()),
        *_heap_rows(measured),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows)


def _requests(measured: Measured) -> str:
    return f"{len(measured.turns)}, {len(measured.failures)}, {measured.retried}"


def _changes(measured: Measured) -> str:
    refused = _count(measured, ChangeOutcome.KERNEL_REFUSED)
    return f"{len(measured.changes)} times" + (f", {refused} rightly refused by the kernel" if refused else "")


def _spread(measured: Measured, name: str) -> str:
    found: Any = figures(measured)[name]
    return f"{found['median']:.2f} s, at most {found['max']:.2f} s" if found else "-"


def _disk(measured: Measured) -> str:
    disk = measured.full_disk
    return "-" if disk is None else f"{_seconds(disk.degraded_seconds)}, {_seconds(disk.recovered_seconds)}"


def _kill(measured: Measured) -> str:
    killing = measured.killing
    return "-" if killing is None else f"{killing.published}, {killing.resumed}"


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _heap_rows(measured: Measured) -> Iterator[tuple[str, str]]:
    for heap in trims(measured.receipts):
        given_back = format_bytes(heap["released_bytes"])
        took = f"{heap['median_seconds'] * 1e3:.1f} ms, at most {heap['max_seconds'] * 1e3:.1f} ms"
        label = f"heap of {heap['process']} ({heap['allocator']}) released"
        yield label, f"{heap['count']} times, {took}, {given_back} given back"
