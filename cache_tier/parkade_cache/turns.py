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


@dataclass(slots=True)
class Turn:
    """A request in flight."""

    request: RequestId
    conversation: Conversation
    keys: ChainKeys
    block_tokens: int
    prompt_tokens: int
    started: float
    known_id: bool = True
    tips: dict[int, int] = field(default_factory=dict)
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
    load_rows: dict[int, int] = field(default_factory=dict)
    load_started: float = 0.0
    restore_seconds: float = 0.0
    prompt_read_seconds: float | None = None
    closed: bool = False
    finished: bool = False
    outcome: str = "finished"
    not_captured: int = 0
    loads: int = 0
    disk_off: bool = False
    """A load of this request has failed: it asks no disk again, so that the same hit cannot repeat for ever (trap 7)."""
