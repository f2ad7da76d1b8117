"""Judges the measured runs against what Parkade promises. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from parkade_serving.demo.figures import RunFigures
from parkade_serving.demo.plan import RunName

MOST_TINY_TO_LARGE: Final = 1.3
LEAST_GAIN: Final = 2.0
LEAST_SHARE: Final = 0.95
LONGEST_HOOK_S: Final = 0.020


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise, and whether these runs kept it."""

    promise: str
    measured: str
    kept: bool


def ratios(runs: Mapping[str, RunFigures]) -> dict[str, float]:
    """Median first-token times against each other, of the runs that there are."""
    found: dict[str, float] = {}
    medians = {name: run.median_first_token_seconds for name, run in runs.items() if run.later_turns}
    if RunName.LARGE in medians:
        for small in (RunName.TINY, RunName.TINY_KILLED):
            if small in medians:
                found[f"{small}_to_{RunName.LARGE}"] = medians[small] / medians[RunName.LARGE]
    if RunName.NO_CACHE in medians:
        for cached in (RunName.LARGE, RunName.TINY, RunName.TINY_KILLED):
            if cached in medians:
                found[f"{RunName.NO_CACHE}_to_{cached}"] = medians[RunName.NO_CACHE] / medians[cached]
    return found


def judge(runs: Mapping[str, RunFigures]) -> tuple[Verdict, ...]:
    """Every promise that these runs can be held to."""
    cached = {name: run for name, run in runs.items() if run.ram_budget_bytes is not None}
    verdicts = [verdict for run in cached.values() for verdict in _judge_run(run)]
    return (*verdicts, *_judge_ratios(ratios(runs)))


def _judge_run(run: RunFigures) -> Iterator[Verdict]:
    later = len(run.later_turns)
    yield Verdict(f"{run.name}: all later turns resumed", f"{run.resumed_turns} of {later}", run.resumed_turns == later)
    yield Verdict(
        f"{run.name}: at least {LEAST_SHARE:.0%} of what is resumable cached",
        f"{run.cached_share:.1%}, worst turn {run.worst_share:.1%}",
        run.worst_share >= LEAST_SHARE,
    )
    if (new := run.newcomer) is not None:
        yield Verdict(
            f"{run.name}: new conversation after the restart: system prompt from disk",
            f"{new.cached_tokens} of {new.resumable_tokens} tokens",
            new.cached_tokens >= new.resumable_tokens > 0,
        )
    dropped = run.cache.conversations_dropped
    yield Verdict(f"{run.name}: no conversation dropped", str(dropped), dropped == 0)
    longest = run.cache.longest_hook_seconds
    yield Verdict(
        f"{run.name}: no hook of the engine's step over {LONGEST_HOOK_S * 1000:.0f} ms",
        f"{longest * 1000:.1f} ms" + (f" ({run.cache.longest_hook})" if run.cache.longest_hook else ""),
        longest <= LONGEST_HOOK_S,
    )


def _judge_ratios(found: Mapping[str, float]) -> Iterator[Verdict]:
    tiny = found.get(f"{RunName.TINY}_to_{RunName.LARGE}")
    if tiny is not None:
        yield Verdict(f"tiny RAM at most {MOST_TINY_TO_LARGE} x large RAM", f"{tiny:.2f} x", tiny <= MOST_TINY_TO_LARGE)
    for cached in (RunName.LARGE, RunName.TINY):
        gain = found.get(f"{RunName.NO_CACHE}_to_{cached}")
        if gain is not None:
            promise = f"{cached}: first token at least {LEAST_GAIN:.0f} x sooner than without cache"
            yield Verdict(promise, f"{gain:.1f} x", gain >= LEAST_GAIN)
