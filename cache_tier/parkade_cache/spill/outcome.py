"""What became of a write (W3), and what a write asks for and gets."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from parkade_cache.ids import PackId
from parkade_cache.spill.budget import BudgetShare


class WriteOutcome(enum.StrEnum):
    """W3's outcomes, and the one that asks the owner to evict and try again."""

    WRITTEN = "written"
    ALREADY_ON_DISK = "already_on_disk"
    DEADLINE = "deadline"
    REFUSED_BUDGET = "refused_budget"
    REFUSED_FREE_SPACE = "refused_free_space"
    REFUSED_SIZE = "refused_size"
    REFUSED_CAPACITY = "refused_capacity"
    FAILED = "failed"
    TIER_OFF = "tier_off"
    REFUSED_MIN_TOKENS = "refused_min_tokens"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room and budget for one pack, all ranks together; ends by publish, cancel or discard."""

    pack_id: PackId
    nbytes: int
    share: BudgetShare = field(repr=False)
    more: tuple[tuple[int, BudgetShare], ...] = field(default=(), repr=False)
    """Bytes and budget added since, for a pack that grew while it was streamed."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. ``missing_bytes`` is what must go before the same write fits; 0 where that would not help."""

    outcome: WriteOutcome
    missing_bytes: int
    reason: str
