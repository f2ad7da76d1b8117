"""One request of a conversation, from its arrival to its receipt.

Why it exists: the engine tells the cache about a request in pieces (arrival, lookups, loads, stores, finish);
this is where the pieces of one turn are kept until its receipt closes them (section 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parkade_cache.conversations import Conversation
from parkade_cache.ids import BlockKey, PackId, RequestId

ChainKeys = Callable[[], Sequence[Sequence[BlockKey]]]
"""The request's block keys so far, per KV group, in order."""


@dataclass(slots=True)
class StreamPack:
    """The pack a turn's blocks are streamed to while RAM has no room for them."""

    pack: PackId
    number: int
    planned_bytes: int = 0
    reserved_bytes: int = 0
    opened: bool = False
    failed: bool = False
    reason: str = ""
    ended: bool = False
    lost: int = 0
    """Blocks that were to be streamed and are nowhere because the stream was given up."""
    rows: list[int] = field(default_factory=list)
    """Ledger rows announced for it; some may have ended otherwise since."""


@dataclass(slots=True)
class Turn:
    """A request in flight."""

    request: RequestId
    conversation: Conversation
    chains: ChainKeys
    block_tokens: int
    prompt_tokens: int
    started: float
    known_id: bool = True
    tips: dict[int, int] = field(default_factory=dict)
    arrival: tuple[int, ...] = ()
    """Where the known part of its chains ended when it arrived: held until the match is known (G4, case 58)."""
    tokens: int = 0
    matched: bool = False
    engine_tokens: int = 0
    ram_tokens: int = 0
    disk_tokens: int = 0
    skipped_tokens: int = 0
    failed_load_tokens: int = 0
    miss_reason: str = "not_cached"
    pending_since: float | None = None
    pending_version: int = -1
    gave_up_waiting: bool = False
    admission_pending: bool = False
    admission_deadline: float = 0.0
    ram_refused: str = ""
    top_up_posted: bool = False
    stream: StreamPack | None = None
    stores_pending: int = 0
    captures: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks being stored: the slot each goes to, or -1 for the stream."""
    load_rows: dict[int, int] = field(default_factory=dict)
    """Blocks being loaded, by ledger row: the slot each is parked in on its way from disk; negative where none is."""
    parked: int = 0
    """Blocks the turn has put into RAM."""
    asked_at: float | None = None
    """When the engine first asked for its match."""
    gate_wait_seconds: float = 0.0
    """Waited for the gate: its readings, releases, evictions and their write-outs."""
    block_wait_seconds: float = 0.0
    """Waited for blocks that were just being captured, written or restored by others."""
    load_started: float = 0.0
    restore_seconds: float = 0.0
    prompt_read_seconds: float | None = None
    closed: bool = False
    finished: bool = False
    outcome: str = "finished"
    not_captured: int = 0
    """Blocks the engine took back before they were copied."""
    uncached: int = 0
    """Blocks that neither tier took; the reason is in the turn's receipt."""
    loads: int = 0
    failed_rows: set[int] = field(default_factory=set)
    """Blocks whose load has failed in this request: they are misses for the rest of it."""
    disk_off: bool = False
    """The disk is off, or a load of this request has failed: it must not hit the same block for ever (trap 7)."""
