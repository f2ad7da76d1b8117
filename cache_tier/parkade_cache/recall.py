"""Bringing back what an earlier life left on disk, while this one already serves (S2, S3).

What must stay true: a published block is found again as soon as its pack is read, whatever comes after; no block
goes because its conversation is not known yet; the lock is never held for more than a slice of the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from parkade_cache.conversations import Conversation, Tip
from parkade_cache.disk_tier import DiskTier
from parkade_cache.errors import ParkadeError
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId
from parkade_cache.ledger import NO_BLOCK, DiskState
from parkade_cache.receipts import ReceiptKind
from parkade_cache.spill import PackEntry, RecoveredPack
from parkade_cache.state import CacheState

_log = logging.getLogger(__name__)

_SLICE = 256
"""Blocks or conversations entered under one hold of the lock."""

_T = TypeVar("_T")

Tips = Sequence[tuple[bytes, int]]
"""Where a conversation's chains ended when a pack was written: block key and length in tokens."""


class Recall:
    """One pass over the packs on disk, newest first."""

    def __init__(self, state: CacheState, disk: DiskTier, *, stop: Callable[[], bool]) -> None:
        self._state = state
        self._disk = disk
        self._stop = stop
        self._seen: set[ConversationId] = set()
        self._tips: list[tuple[ConversationId, Tips, float]] = []

    def run(self) -> None:
        """Enter every pack, then give each block its conversation; packs that are known already are not read."""
        state = self._state
        started = state.clock.monotonic()
        with state.lock:
            state.recovering = True
        packs = blocks = 0
        try:
            for recovered in self._disk.recover():
                if self._stop():
                    return
                packs += 1
                blocks += self._enter_pack(recovered)
            self._give_conversations()
            self._sort()
        except (ParkadeError, OSError) as error:
            self._disk.failed("recover", error)
            self._give_conversations()
            self._sort()
        finally:
            # Whatever happened: while this says that packs are still to come, no space is given back.
            with state.lock:
                state.recovering = False
                state.changed()
                state.wake.notify_all()
        self._disk.collect_dead()
        self._disk.fit_capacity()
        state.receipts.add(
            kind=ReceiptKind.RECOVER,
            outcome="recovered",
            tier="disk",
            blocks=blocks,
            bytes=blocks * state.geometry.pod_slot_bytes,
            duration_seconds=state.clock.monotonic() - started,
            detail={"packs": packs, "conversations": len(state.conversations)},
        )

    # -- packs -------------------------------------------------------------------------------------------

    def _enter_pack(self, recovered: RecoveredPack) -> int:
        state = self._state
        info = recovered.info
        owner = ConversationId(info.header.conversation)
        living = [(number, entry) for number, entry in enumerate(info.entries) if number not in recovered.dead]
        with state.lock:
            number = state.pack_number(info.header.pack_id, owner)
            state.packs[number].writing = True
        duplicates: list[int] = []
        for part in _slices(living):
            with state.lock:
                duplicates += [n for n, entry in part if not self._enter(number, n, entry)]
                state.changed()
        with state.lock:
            self._remember(owner, info.tips, recovered.last_used)
            state.packs[number].dropping += len(duplicates)
            state.packs[number].writing = False
        if duplicates:
            self._disk.drop_entries(number, duplicates)
        return len(living) - len(duplicates)

    def _enter(self, pack: int, number: int, entry: PackEntry) -> bool:
        """Make one block findable; False when another pack has it already."""
        ledger = self._state.ledger
        parent = NO_BLOCK
        if entry.parent != NO_KEY:
            parent = ledger.intern(entry.parent, NO_BLOCK, max(0, entry.end_token - 1))
        row = ledger.intern(entry.key, parent, entry.end_token)
        if ledger.disk[row] == DiskState.PUBLISHED:
            return False
        # A write of the same block that is under way finds its place taken, and its copy is dropped.
        ledger.disk_published(row, pack, number)
        self._state.packs[pack].live += 1
        return True

    def _remember(self, owner: ConversationId, tips: Tips, last_used: float) -> None:
        """The newest pack of a conversation names all its tips; older ones have been overtaken."""
        state = self._state
        conversation = state.conversations.get(owner)
        if conversation is None:
            conversation = Conversation(id=owner, last_used=last_used)
            state.conversations.insert_old(conversation)
        conversation.last_used = max(conversation.last_used, last_used)
        if owner not in self._seen:
            self._seen.add(owner)
            self._tips.append((owner, tips, last_used))

    # -- conversations -----------------------------------------------------------------------------------

    def _give_conversations(self) -> None:
        for tips in _slices(self._tips):
            with self._state.lock:
                for owner, ends, last_used in tips:
                    self._enter_tips(owner, ends, last_used)
        for rows in _slices(self._orphans()):
            with self._state.lock:
                for row in rows:
                    self._adopt(row)
        for owners in _slices([owner for owner, _, _ in self._tips]):
            with self._state.lock:
                for owner in owners:
                    self._drop_if_empty(owner)

    def _enter_tips(self, owner: ConversationId, tips: Tips, last_used: float) -> None:
        state = self._state
        conversation = state.conversations.get(owner)
        if conversation is None or conversation.forgotten:
            return
        for keys, tokens in _by_chain(tips):
            rows = tuple(state.ledger.rows.get(key, -1) for key in keys)
            if min(rows) >= 0 and not self._is_covered(conversation, rows):
                state.add_tip(conversation, Tip(rows=rows, tokens=tokens, last_used=last_used))

    def _is_covered(self, conversation: Conversation, rows: Sequence[int]) -> bool:
        descends = self._state.ledger.descends
        return any(len(tip.rows) == len(rows) and all(map(descends, tip.rows, rows)) for tip in conversation.tips)

    def _orphans(self) -> list[int]:
        """Published blocks that no chain reaches, deepest first."""
        ledger = self._state.ledger
        with self._state.lock:
            published = np.frombuffer(ledger.disk, dtype=np.uint8) == int(DiskState.PUBLISHED)
            unheld = np.frombuffer(ledger.disk_hold, dtype=np.intc) == 0
            rows = np.flatnonzero(published & unheld)
            depths = np.frombuffer(ledger.end_token, dtype=np.intc)[rows]
        return [int(row) for row in rows[np.argsort(-depths, kind="stable")]]

    def _adopt(self, row: int) -> None:
        """A block that no recorded chain reaches belongs to the conversation that wrote it."""
        state = self._state
        ledger = state.ledger
        if ledger.disk[row] != DiskState.PUBLISHED or ledger.disk_hold[row]:
            return
        owner = state.packs[ledger.pack[row]].conversation
        conversation = state.conversations.open(owner, now=0.0)
        state.add_tip(conversation, Tip(rows=(row,), tokens=ledger.end_token[row], last_used=0.0))

    def _sort(self) -> None:
        """They came back in the order of their packs; victims go in the order of last use (D6)."""
        state = self._state
        with state.lock:
            known = list(state.conversations)
        order = sorted((conversation.last_used, number) for number, conversation in enumerate(known))
        for part in _slices(order):
            with state.lock:
                for _, number in part:
                    state.conversations.put_last(known[number])
        with state.lock:
            # Those that were used meanwhile are the last again.
            used = [known[number] for last_used, number in order if known[number].last_used > last_used]
            for conversation in sorted(used, key=lambda one: one.last_used):
                state.conversations.put_last(conversation)

    def _drop_if_empty(self, owner: ConversationId) -> None:
        conversation = self._state.conversations.get(owner)
        if conversation is not None and not conversation.tips and not conversation.busy:
            self._state.drop_conversation(conversation)


def _by_chain(tips: Tips) -> Iterator[tuple[list[BlockKey], int]]:
    """Tips are listed chain by chain, one key a KV group, groups in rising order (the key's last four bytes)."""
    keys: list[BlockKey] = []
    length = 0
    for key, tokens in tips:
        if keys and (tokens != length or key[-4:] <= keys[-1][-4:]):
            yield keys, length
            keys = []
        keys.append(BlockKey(key))
        length = tokens
    if keys:
        yield keys, length


def _slices(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), _SLICE):
        yield items[start : start + _SLICE]
