"""What the demo measures, and what follows from it. Pure.

Words: a *later* turn is any but a conversation's first. *Resumable* tokens are those of a prompt that a perfect cache
could have kept: its token-identical prefix with the previous prompt and reply, the reply without its last token (whose
KV is never computed), floored to whole blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

RESUMED_SHARE: Final = 0.95
"""A turn is resumed when at least this share of its resumable tokens was cached."""


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of tokens that two sequences share from their start."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))


def resumable_tokens(prompt: Sequence[int], previous: Sequence[int], reply: Sequence[int], *, block_tokens: int) -> int:
    """Tokens of ``prompt`` that could have been kept from the turn before; 0 for a first turn."""
    kept = [*previous, *reply[:-1]]
    return common_prefix(prompt, kept) // block_tokens * block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigures:
    """One measured turn; ``turn`` counts from 1."""

    conversation: str
    turn: int
    after_restart: bool
    prompt_tokens: int
    cached_tokens: int
    resumable_tokens: int
    first_token_seconds: float
    outcome: str = ""

    @property
    def later(self) -> bool:
        return self.turn > 1

    @property
    def resumed(self) -> bool:
        return self.cached_tokens >= RESUMED_SHARE * self.resumable_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """What the cache says about itself, added up over an engine's restarts; sizes in bytes."""

    parked_bytes_peak: int = 0
    spilled_bytes: int = 0
    read_back_bytes: int = 0
    conversations_dropped: int = 0
    not_captured_blocks: int = 0
    longest_hook_seconds: float = 0.0
    longest_hook: str = ""

    def plus(self, other: CacheFigures) -> CacheFigures:
        """Sums where things add up, the larger one where they do not."""
        longer = max(self, other, key=lambda one: one.longest_hook_seconds)
        return CacheFigures(
            parked_bytes_peak=max(self.parked_bytes_peak, other.parked_bytes_peak),
            spilled_bytes=self.spilled_bytes + other.spilled_bytes,
            read_back_bytes=self.read_back_bytes + other.read_back_bytes,
            conversations_dropped=self.conversations_dropped + other.conversations_dropped,
            not_captured_blocks=self.not_captured_blocks + other.not_captured_blocks,
            longest_hook_seconds=longer.longest_hook_seconds,
            longest_hook=longer.longest_hook,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One whole run."""

    name: str
    ram_budget_bytes: int | None
    """None without a cache."""
    turns: tuple[TurnFigures, ...]
    newcomer: TurnFigures | None
    """The conversation first seen after the restart; its resumable tokens are the shared system prompt's."""
    cache: CacheFigures
    shutdown_seconds: float | None
    """The longest of the run's stops; None where it was killed."""

    @property
    def later_turns(self) -> tuple[TurnFigures, ...]:
        return tuple(turn for turn in self.turns if turn.later)

    @property
    def resumed_turns(self) -> int:
        return sum(turn.resumed for turn in self.later_turns)

    @property
    def cached_share(self) -> float:
        return cached_share(self.later_turns)

    @property
    def worst_share(self) -> float:
        """The share of the later turn that had least of its resumable tokens cached."""
        return min((cached_share([turn]) for turn in self.later_turns), default=1.0)

    @property
    def median_first_token_seconds(self) -> float:
        """Of the later turns: what a user waits for, reading the prompt above all."""
        return statistics.median(turn.first_token_seconds for turn in self.later_turns) if self.later_turns else 0.0


def cached_share(turns: Iterable[TurnFigures]) -> float:
    """Cached over resumable tokens; what was cached beyond the resumable part of a turn does not count."""
    pairs = [(min(turn.cached_tokens, turn.resumable_tokens), turn.resumable_tokens) for turn in turns]
    resumable = sum(total for _, total in pairs)
    return sum(cached for cached, _ in pairs) / resumable if resumable else 1.0
