"""Conversations: whose chains are kept, and in which order they may go.

Why it exists: victims are conversations, never single blocks, so that what comes back comes back whole. A
conversation may have several chain tips: a title or summary call under its id is a short branch beside its
newest state and must not cost it that state (W6).

What must stay true: a conversation with a request in flight is never a victim (W5); the order of victims is
the order of last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from parkade_cache.ids import ConversationId
from parkade_cache.mover import JobId

MAX_TIPS = 4
"""Branches kept of one conversation; the one used longest ago goes first, never the newest state."""


@dataclass(slots=True)
class Tip:
    """Where one chain of a conversation ends: a ledger row per KV group, and its length in tokens."""

    rows: tuple[int, ...]
    tokens: int
    last_used: float
    in_ram: bool = True
    """Kept in RAM whenever its conversation is; False once it was let go by itself (W5)."""


@dataclass(slots=True)
class Conversation:
    """What is known of a conversation; sizes are asked of the ledger."""

    id: ConversationId
    last_used: float
    tips: list[Tip] = field(default_factory=list)
    in_ram: bool = False
    on_disk: bool = True
    pinned: bool = False
    in_flight: int = 0
    turns: int = 0
    dirty: bool = False
    """It may have blocks in RAM only. Set through ``Conversations``, which keeps those that are in order."""
    too_short: bool = False
    writing: set[JobId] = field(default_factory=set)
    retry_write_at: float = 0.0
    forgotten: bool = False

    @property
    def busy(self) -> bool:
        """A request of the conversation is in flight (W5)."""
        return self.in_flight > 0

    @property
    def tokens(self) -> int:
        """Length of the longest chain."""
        return max((tip.tokens for tip in self.tips), default=0)

    def rows(self) -> Iterator[int]:
        """The ledger row of every tip and group."""
        for tip in self.tips:
            yield from tip.rows


class Conversations:
    """All conversations, least recently used first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[ConversationId, Conversation] = OrderedDict()
        self._tip_owner: dict[int, ConversationId] = {}
        self._dirty: OrderedDict[ConversationId, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(list(self._by_id.values()))

    def get(self, conversation: ConversationId) -> Conversation | None:
        """The conversation, or None."""
        return self._by_id.get(conversation)

    def at_tip(self, row: int) -> Conversation | None:
        """The conversation whose chain ends exactly at ``row``."""
        owner = self._tip_owner.get(row)
        return self._by_id.get(owner) if owner is not None else None

    def open(self, conversation: ConversationId, *, now: float) -> Conversation:
        """The conversation, made when it is new."""
        found = self._by_id.get(conversation)
        if found is None:
            found = self._by_id[conversation] = Conversation(id=conversation, last_used=now)
        return found

    def used(self, conversation: Conversation, *, now: float) -> None:
        """The conversation has just been used: it is the last to go."""
        conversation.last_used = max(conversation.last_used, now)
        self.put_last(conversation)

    def insert_old(self, conversation: Conversation) -> None:
        """Bring back a conversation found at start, newest first: it goes before all that are known."""
        self._by_id[conversation.id] = conversation
        self._by_id.move_to_end(conversation.id, last=False)

    def put_last(self, conversation: Conversation) -> None:
        """The conversation is the last to go, as far as it is known."""
        if self._by_id.get(conversation.id) is conversation:
            self._by_id.move_to_end(conversation.id)

    # -- which may have something to write -----------------------------------------------------------------

    def dirty(self) -> Iterator[Conversation]:
        """Those that may have blocks in RAM only, the one that has waited longest first."""
        return iter(self._dirty.values())

    def mark_dirty(self, conversation: Conversation) -> None:
        """The conversation may have blocks in RAM only; it is the last to be written behind."""
        conversation.dirty = True
        if self._by_id.get(conversation.id) is conversation:
            self._dirty[conversation.id] = conversation
            self._dirty.move_to_end(conversation.id)

    def mark_clean(self, conversation: Conversation) -> None:
        """Nothing of the conversation needs to be written just now."""
        conversation.dirty = False
        if self._dirty.get(conversation.id) is conversation:
            del self._dirty[conversation.id]

    # -- tips -----------------------------------------------------------------------------------------------

    def tip_added(self, conversation: Conversation, tip: Tip) -> None:
        """Remember that ``tip`` is where a chain of the conversation ends."""
        conversation.tips.append(tip)
        for row in tip.rows:
            self._tip_owner[row] = conversation.id

    def tip_removed(self, conversation: Conversation, tip: Tip) -> None:
        """Forget the tip."""
        conversation.tips.remove(tip)
        for row in tip.rows:
            if self._tip_owner.get(row) == conversation.id:
                del self._tip_owner[row]

    def remove(self, conversation: Conversation) -> None:
        """The conversation is gone from every tier; another that has since begun under its id is not touched."""
        self.mark_clean(conversation)
        if self._by_id.get(conversation.id) is conversation:
            del self._by_id[conversation.id]
