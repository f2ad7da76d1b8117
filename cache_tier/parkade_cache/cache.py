"""The engine's side of the conversation cache: what may be called inside an engine step.

Why it exists: the engine asks four things on its step path (is this block there, where does it come from,
where does it go, what happened to it); each is answered here from memory in microseconds per block.

What must stay true: nothing here waits, reads a gauge, touches a file or runs the gate; waiting is an answer
(``RETRY``) with a deadline kept here, since the engine has none; a block is findable only when its bytes are
complete; the caller holds ``state.lock`` for as long as its hook lasts. Rules: R1, R2, R3, R5, W2, W6, W11.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parkade_cache.conversations import MAX_TIPS, Conversation, Tip
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, PackId, RequestId
from parkade_cache.ledger import NO_BLOCK, DiskState, RamState
from parkade_cache.memory.gate import RefusalReason
from parkade_cache.mover import BlockMeta
from parkade_cache.receipts import ReceiptKind
from parkade_cache.state import CacheState
from parkade_cache.transfers import LoadSource, StoreTarget
from parkade_cache.turn_receipts import LoadResult, add_restore_receipt, add_turn_receipt
from parkade_cache.turns import ChainKeys, StreamPack, Turn

PENDING_DEADLINE_S = 2.0
"""How long a request waits for a block that is being copied or written before it is read anew."""

ADMISSION_WAIT_S = 0.1
"""How long a request waits for the gate to say whether RAM has room; after that its blocks go to disk."""

_READY = int(RamState.READY)
_FILLING = int(RamState.FILLING)
_ABSENT = 0
_WRITING = int(DiskState.WRITING)
_PUBLISHED = int(DiskState.PUBLISHED)
_FROM_RAM = -2
"""In ``Turn.load_rows``: the block comes from RAM, and needs no slot on its way."""


class Found(enum.Enum):
    """Answer to a lookup."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class OfferedBlock(NamedTuple):
    """A block the engine has computed and offers to the cache; a tuple, since one is made for every block stored."""

    key: BlockKey
    parent: BlockKey
    end_token: int
    group: int


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Which offered blocks the cache takes, and where each goes."""

    accepted: tuple[int, ...]
    targets: tuple[StoreTarget, ...]


class ConversationCache:
    """Lookups, loads and stores of requests in flight."""

    def __init__(self, state: CacheState) -> None:
        self.state = state

    # -- arrival and match -----------------------------------------------------------------------------

    def begin(
        self,
        request: RequestId,
        *,
        conversation: ConversationId | None,
        keys: ChainKeys,
        prompt_tokens: int,
        block_tokens: int,
    ) -> Turn:
        """A request has arrived; without a conversation id it continues the longest known prefix."""
        state = self.state
        now = state.clock.monotonic()
        known = conversation is not None
        owner = self._conversation(conversation, request, keys)
        owner.in_flight += 1
        state.conversations.used(owner, now=state.clock.wall())
        turn = Turn(
            request=request,
            conversation=owner,
            chains=keys,
            block_tokens=block_tokens,
            prompt_tokens=prompt_tokens,
            started=now,
            known_id=known,
        )
        turn.disk_off = not state.spill_healthy
        state.turns[request] = turn
        self._hold_arrival(turn)
        self._wish(turn, now)
        return turn

    def _hold_arrival(self, turn: Turn) -> None:
        """Hold what is known of the chains until the match: the gate may run in between (G4, case 58)."""
        deepest = (self._deepest_known(chain) for chain in turn.chains())
        turn.arrival = tuple(row for row in deepest if row >= 0)
        for row in turn.arrival:
            self.state.ledger.hold_tip(row, ram=True, disk=True)

    def _let_arrival_go(self, turn: Turn) -> None:
        rows, turn.arrival = turn.arrival, ()
        for row in rows:
            self.state.ledger.drop_tip(row, ram=True, disk=True)

    def let_go(self, turn: Turn) -> None:
        """The turn keeps nothing of its chains any more; what it stores from now on starts anew."""
        self._let_arrival_go(turn)
        for row in turn.tips.values():
            self.state.ledger.drop_tip(row, ram=True, disk=True)
        turn.tips.clear()
        turn.tokens = 0

    def _wish(self, turn: Turn, now: float) -> None:
        """Ask the gate's thread for RAM; with parking off nobody is asked (G14)."""
        state = self.state
        if state.policy.memory.parked.max == 0:
            turn.ram_refused = RefusalReason.PARKING_OFF.value
            return
        turn.admission_pending = True
        turn.admission_deadline = now + ADMISSION_WAIT_S
        state.wishes.append(turn)
        state.wake.notify_all()

    def _conversation(self, conversation: ConversationId | None, request: RequestId, keys: ChainKeys) -> Conversation:
        state = self.state
        now = state.clock.wall()
        if conversation is not None:
            return state.conversations.open(conversation, now=now)
        chain = keys()[0]
        row = self._deepest_known(chain)
        continued = state.conversations.at_tip(row) if row >= 0 else None
        if continued is not None:
            return continued
        seed = (chain[-1] if chain else b"") + request.encode()
        return state.conversations.open(ConversationId(hashlib.sha256(seed).hexdigest()[:32]), now=now)

    def _deepest_known(self, chain: Sequence[BlockKey]) -> int:
        """Row of the deepest block of the chain that the ledger knows: O(log n), a chain has no known gaps."""
        rows = self.state.ledger.rows
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in rows:
                low = middle + 1
            else:
                high = middle
        return rows[chain[low - 1]] if low else NO_BLOCK

    def lookup(self, key: BlockKey, turn: Turn) -> Found:
        """Whether the block can be served, from metadata only (R1)."""
        ledger = self.state.ledger
        row = ledger.rows.get(key, -1)
        if row < 0:
            return Found.MISS
        if row in turn.failed_rows or row in self.state.stale:
            return Found.MISS
        if ledger.ram[row] == _READY:
            return Found.HIT
        disk = _ABSENT if turn.disk_off else ledger.disk[row]
        if disk == _PUBLISHED and row not in self.state.restoring:
            return Found.HIT
        if disk != _ABSENT or ledger.ram[row] == _FILLING:
            # It is being restored (R5), written or captured: its bytes are there soon, or never.
            return Found.MISS if turn.gave_up_waiting else Found.PENDING
        return Found.MISS

    def still_waiting(self, turn: Turn) -> bool:
        """Whether asking now would be too early or give the same answer: O(1), so that a retry costs nothing.

        The gate's answer is awaited before the first match: the engine plans a prompt's stores in the step that
        schedules it, and where they go is decided then.
        """
        now = self.state.clock.monotonic()
        if turn.asked_at is None:
            turn.asked_at = now
        if turn.admission_pending and now < turn.admission_deadline:
            return True
        if not turn.matched and turn.pending_since is None:
            turn.gate_wait_seconds = now - turn.asked_at
        if turn.pending_since is None:
            return False
        if now - turn.pending_since > PENDING_DEADLINE_S:
            turn.gave_up_waiting = True
            return False
        return turn.pending_version == self.state.version

    def waiting(self, turn: Turn) -> None:
        """A lookup was answered with retry."""
        if turn.pending_since is None:
            turn.pending_since = self.state.clock.monotonic()
        turn.pending_version = self.state.version

    def matched(self, turn: Turn, *, engine_tokens: int, cached_tokens: int) -> int:
        """The match is known: returns the tokens to load beyond the engine's own.

        Restoring that is predicted slower than re-reading is skipped with a receipt (R3). The chain up to the
        match is held until the request ends, so that nothing of it goes between the answer and the load.
        """
        if turn.pending_since is not None:
            turn.block_wait_seconds += self.state.clock.monotonic() - turn.pending_since
        turn.pending_since = None
        if turn.prompt_read_seconds is None:
            # After a preemption the engine finds what this very request has computed: that is no reuse.
            turn.engine_tokens = engine_tokens
        if cached_tokens:
            kept_tokens = self._worth_restoring(turn, engine_tokens, cached_tokens)
            turn.skipped_tokens = cached_tokens - kept_tokens
            cached_tokens = kept_tokens
        self._hold_match(turn, engine_tokens + cached_tokens)
        self._let_arrival_go(turn)
        turn.matched = True
        return cached_tokens

    def _worth_restoring(self, turn: Turn, engine_tokens: int, cached_tokens: int) -> int:
        """Tokens of the match that are worth bringing back; what RAM has costs no read (R3)."""
        state = self.state
        if not state.rates.measured:
            return cached_tokens
        ram, ready = state.ledger.ram, _READY
        rows = state.ledger.rows
        first, last = engine_tokens // turn.block_tokens, (engine_tokens + cached_tokens) // turn.block_tokens
        chains = turn.chains()
        on_disk = in_front = 0
        for chain in chains:
            for key in chain[first:last]:
                row = rows.get(key, -1)
                if row >= 0 and ram[row] != ready:
                    on_disk += 1
                elif not on_disk:
                    in_front += 1
        nbytes = on_disk * state.geometry.pod_slot_bytes
        # Several groups resume together or not at all: where the boundary would be is the engine's business.
        kept_tokens = in_front * turn.block_tokens if len(chains) == 1 else 0
        skipped_tokens = cached_tokens - kept_tokens
        if not nbytes or not state.rates.restore_is_slower(disk_bytes=nbytes, tokens=skipped_tokens):
            return cached_tokens
        turn.miss_reason = "restore_slower"
        self._skip_receipt(turn, skipped_tokens, on_disk)
        return kept_tokens

    def _skip_receipt(self, turn: Turn, tokens: int, blocks: int) -> None:
        state = self.state
        state.receipts.add(
            kind=ReceiptKind.RESTORE_SKIPPED,
            outcome="skipped",
            reason="restore_slower",
            conversation=turn.conversation.id,
            request=turn.request,
            tier="disk",
            tokens=tokens,
            blocks=blocks,
            bytes=blocks * state.geometry.pod_slot_bytes,
        )

    def _hold_match(self, turn: Turn, tokens: int) -> None:
        index = tokens // turn.block_tokens - 1
        if index < 0:
            return
        for group, chain in enumerate(turn.chains()):
            row = self._nearest_known(chain, min(index, len(chain) - 1))
            if row >= 0:
                self._move_tip(turn, group, row)
        turn.tokens = max(turn.tokens, tokens)

    def _nearest_known(self, chain: Sequence[BlockKey], index: int) -> int:
        """Row of the deepest known block at or before ``index``: groups with windows have gaps."""
        rows = self.state.ledger.rows
        while index >= 0:
            row = rows.get(chain[index], -1)
            if row >= 0:
                return row
            index -= 1
        return NO_BLOCK

    def _move_tip(self, turn: Turn, group: int, row: int) -> None:
        """The turn's chain now ends at ``row``; the turn holds it in every tier while it lives."""
        old = turn.tips.get(group, -1)
        if old == row:
            return
        self.state.ledger.hold_tip(row, ram=True, disk=True)
        turn.tips[group] = row
        if old >= 0:
            self.state.ledger.drop_tip(old, ram=True, disk=True)

    # -- loads -----------------------------------------------------------------------------------------

    def plan_load(self, turn: Turn, keys: Sequence[BlockKey]) -> list[LoadSource]:
        """Where each block comes from; RAM before disk (R2). Blocks from disk are parked when RAM has room."""
        rows = self.state.ledger.rows
        turn.load_rows.clear()
        turn.load_started = self.state.clock.monotonic()
        turn.loads += 1
        return [self._load_source(turn, rows.get(key, -1)) for key in keys]

    def _load_source(self, turn: Turn, row: int) -> LoadSource:
        state = self.state
        ledger = state.ledger
        if row < 0:
            return LoadSource(slot=-1)
        ledger.pin(row)
        if ledger.ram[row] == _READY:
            turn.load_rows[row] = _FROM_RAM
            return LoadSource(slot=ledger.slot[row])
        park = -1
        if ledger.ram[row] == _ABSENT and self._may_park(turn):
            park = state.slots.take(turn.conversation.id)
            if park >= 0:
                ledger.ram_filling(row, park)
        turn.load_rows[row] = park
        if ledger.disk[row] != _PUBLISHED:
            return LoadSource(slot=-1, park_slot=park)
        state.restoring.add(row)
        pack = state.packs[ledger.pack[row]].pack
        return LoadSource(slot=-1, pack=pack, entry=ledger.entry[row], park_slot=park)

    def load_done(
        self,
        turn: Turn,
        *,
        keys: Sequence[BlockKey],
        failed: Sequence[int],
        disk_bytes: int,
        disk_seconds: float,
        bad_packs: Sequence[PackId] = (),
    ) -> int:
        """A load has ended; returns the tokens of it that must be read anew.

        From the first failed block on, the engine recomputes; before it looks anything up again the request is
        barred from the disk. Packs whose bytes were not what had been written hit no more from now on (D4).
        """
        state = self.state
        lost = set(range(len(keys))) if -1 in failed else set(failed)
        result = self._settle_load(turn, keys, lost)
        self._poison(turn, bad_packs)
        seconds = state.clock.monotonic() - turn.load_started
        turn.restore_seconds += seconds
        if turn.prompt_read_seconds is None:
            turn.ram_tokens += result.ram_blocks * turn.block_tokens
            turn.disk_tokens += result.disk_blocks * turn.block_tokens
        turn.failed_load_tokens += result.failed_blocks * turn.block_tokens
        state.totals.read_bytes += disk_bytes
        state.rates.disk_read_bytes.observe(disk_bytes, disk_seconds)
        state.changed()
        add_restore_receipt(state, turn, result, seconds)
        if lost:
            self._load_failed(turn, late=-1 in failed, damaged=bool(bad_packs))
        return result.failed_blocks * turn.block_tokens

    def _settle_load(self, turn: Turn, keys: Sequence[BlockKey], lost: set[int]) -> LoadResult:
        state = self.state
        ledger = state.ledger
        ram_blocks = disk_blocks = 0
        cut = min(lost, default=len(keys))
        for position, key in enumerate(keys):
            row = ledger.rows.get(key, -1)
            if row not in turn.load_rows:
                continue
            park = turn.load_rows.pop(row)
            ledger.unpin(row)
            if park != _FROM_RAM:
                state.restoring.discard(row)
            if park >= 0:
                self._parked_on_the_way(row, arrived=position not in lost)
            if position in lost:
                turn.failed_rows.add(row)
            if position < cut:
                disk_blocks += park != _FROM_RAM
                ram_blocks += park == _FROM_RAM
            ledger.forget_if_dead(row)
        return LoadResult(ram_blocks, disk_blocks, len(keys) - cut)

    def _parked_on_the_way(self, row: int, *, arrived: bool) -> None:
        ledger = self.state.ledger
        if arrived:
            ledger.ram_ready(row)
        else:
            self.state.slots.put(ledger.ram_gone(row))

    def _load_failed(self, turn: Turn, *, late: bool, damaged: bool) -> None:
        """The request asks no disk again; a device that failed is looked at (D8)."""
        turn.disk_off = True
        turn.miss_reason = "read_deadline" if late else "damaged" if damaged else "read_failed"
        self.state.totals.disk_errors += 1
        if not damaged:
            self.state.probe_due = True

    def _poison(self, turn: Turn, packs: Sequence[PackId]) -> None:
        """Take damaged packs out of the ledger at once; the owner's thread sets their files aside (D4, trap 7).

        What the engine has or computes of them is then stored again, so that the next turn finds it.
        """
        state = self.state
        ledger = state.ledger
        for pack in packs:
            number = state.pack_numbers.get(pack)
            if number is None or state.packs[number].bad:
                continue
            found = state.packs[number]
            found.bad = True
            state.bad_packs.add(number)
            for row in ledger.rows_of_pack(number):
                ledger.disk_gone(row)
                ledger.forget_if_dead(row)
                found.poisoned += 1
            found.live = 0
            writer = state.conversations.get(found.conversation)
            for conversation in (writer, turn.conversation):
                if conversation is not None:
                    state.conversations.mark_dirty(conversation)

    # -- stores ----------------------------------------------------------------------------------------

    def plan_store(self, turn: Turn, offered: Sequence[OfferedBlock]) -> StorePlan:
        """Take what neither tier has: into RAM while the gate's credit lasts, else streamed to disk (G14)."""
        state = self.state
        parks, streams = self._may_store(turn, offered)
        rows, missing = self._place(turn, offered)
        slots = state.slots.take_many(turn.conversation.id, len(missing)) if parks and missing else []
        state.ledger.fill_many([rows[position] for position in missing[: len(slots)]], slots)
        accepted = missing[: len(slots)]
        targets = [StoreTarget(slot) for slot in slots]
        captures = turn.captures
        for position, slot in zip(accepted, slots, strict=True):
            captures[offered[position].key] = slot
        for position in missing[len(slots) :]:
            row, block = rows[position], offered[position]
            if state.ledger.disk[row] != _ABSENT:
                continue
            if not streams:
                turn.uncached += 1
                continue
            targets.append(self._stream_target(turn, row, block))
            state.ledger.pin(row)
            captures[block.key] = -1
            accepted.append(position)
        if slots:
            turn.parked += len(slots)
            state.conversations.mark_dirty(turn.conversation)
        turn.stores_pending += bool(accepted)
        self._top_up(turn)
        return StorePlan(tuple(accepted), tuple(targets))

    def _place(self, turn: Turn, offered: Sequence[OfferedBlock]) -> tuple[list[int], list[int]]:
        """Every block's ledger row, and the positions of those that RAM has not and this turn is not storing yet."""
        ledger = self.state.ledger
        rows: list[int] = []
        ends: dict[int, int] = {}
        while len(rows) < len(offered):
            first = offered[len(rows)]
            rows += ledger.intern_run(offered, len(rows), self._parent_row(turn, first, ends))
            ends[first.group] = rows[-1]
        self._extend(turn, ends)
        ram, captures = ledger.ram, turn.captures
        missing = [position for position, row in enumerate(rows) if not ram[row]]
        if captures:
            missing = [position for position in missing if offered[position].key not in captures]
        return rows, missing

    def _may_store(self, turn: Turn, offered: Sequence[OfferedBlock]) -> tuple[bool, bool]:
        """Whether blocks of the turn may go to RAM, and whether they may be streamed (W10, W11, G14)."""
        state = self.state
        spill = state.policy.spill
        tokens = max(turn.prompt_tokens, offered[-1].end_token if offered else 0)
        parks = self._may_park(turn) and tokens >= state.policy.memory.parked.min_tokens
        long_enough = spill is not None and tokens >= spill.min_tokens
        stream_lives = turn.stream is None or not turn.stream.failed
        streams = state.spill_healthy and long_enough and stream_lives and not turn.conversation.forgotten
        turn.conversation.too_short = state.spill_on and not long_enough
        return parks, streams

    def _may_park(self, turn: Turn) -> bool:
        return turn.conversation.in_ram and not turn.ram_refused and not turn.conversation.forgotten

    def _parent_row(self, turn: Turn, block: OfferedBlock, ends: dict[int, int]) -> int:
        """Row of the block before this one; made when unknown, so that the tree has no gap.

        Of a group with recurrent state the engine keeps a block here and there: the one before is the last kept.
        """
        if block.parent == NO_KEY:
            return NO_BLOCK
        ledger = self.state.ledger
        row = ledger.rows.get(block.parent, -1)
        if row >= 0:
            return row
        if block.group in self.state.recurrent_groups:
            before = ends.get(block.group, turn.tips.get(block.group, -1))
            return before if before >= 0 and ledger.end_token[before] < block.end_token else NO_BLOCK
        return ledger.intern(block.parent, NO_BLOCK, block.end_token - 1)

    def _stream_target(self, turn: Turn, row: int, block: OfferedBlock) -> StoreTarget:
        state = self.state
        ledger = state.ledger
        stream = turn.stream
        if stream is None:
            pack = state.new_pack_id()
            stream = turn.stream = StreamPack(pack, state.pack_number(pack, turn.conversation.id))
            state.packs[stream.number].writing = True
            state.enter_disk(turn.conversation)
            state.wake.notify_all()
        ledger.disk_writing(row, stream.number)
        stream.rows.append(row)
        stream.planned_bytes += state.geometry.pod_slot_bytes
        parent = state.parent_on_disk(row)
        meta = BlockMeta(key=block.key, parent=parent, end_token=block.end_token, group=block.group)
        return StoreTarget(slot=-1, pack=stream.pack, meta=meta)

    def _extend(self, turn: Turn, ends: dict[int, int]) -> None:
        ledger = self.state.ledger
        for group, row in ends.items():
            old = turn.tips.get(group, -1)
            if old < 0 or ledger.end_token[row] > ledger.end_token[old]:
                self._move_tip(turn, group, row)
            turn.tokens = max(turn.tokens, ledger.end_token[row])

    def _top_up(self, turn: Turn) -> None:
        """Ask the gate for more before the credit runs out: replies grow block by block."""
        state = self.state
        if turn.ram_refused or turn.top_up_posted or turn.admission_pending:
            return
        if state.slots.free_slots(turn.conversation.id) < 1:
            turn.top_up_posted = True
            state.wishes.append(turn)
            state.wake.notify_all()

    def store_done(self, turn: Turn | None, keys: Sequence[BlockKey], failed: frozenset[BlockKey]) -> None:
        """A store has ended; blocks the engine took back before they were copied are not captured."""
        if turn is None:
            return
        state = self.state
        ledger = state.ledger
        rows, captures = ledger.rows, turn.captures
        ready: list[int] = []
        lost = 0
        for key in keys:
            slot = captures.pop(key, None)
            if slot is None:
                continue
            row = rows[key]
            if key in failed:
                ledger.unpin(row)
                lost += self._not_captured(turn, row, slot)
            elif slot >= 0:
                ready.append(row)
            else:
                ledger.unpin(row)
        ledger.ready_many(ready)
        if lost:
            state.totals.not_captured_blocks += lost
            state.metrics.not_captured_blocks.inc(lost)
        state.changed()
        turn.not_captured += lost
        turn.stores_pending -= 1
        if turn.closed and turn.stores_pending == 0:
            self._conclude(turn)

    def _not_captured(self, turn: Turn, row: int, slot: int) -> bool:
        """Undo one store; False when it was the stream that gave up, which counts its own losses."""
        ledger = self.state.ledger
        stream = turn.stream
        if slot >= 0:
            self.state.slots.put(ledger.ram_gone(row))
        elif stream is not None and ledger.disk[row] == _WRITING and ledger.pack[row] == stream.number:
            ledger.disk_gone(row)
        ledger.forget_if_dead(row)
        if slot >= 0 or stream is None or not stream.failed:
            return True
        stream.lost += 1
        return False

    # -- the end of a turn --------------------------------------------------------------------------------

    def prompt_read(self, turn: Turn) -> None:
        """The last token of the prompt has been scheduled."""
        if turn.prompt_read_seconds is None:
            state = self.state
            turn.prompt_read_seconds = state.clock.monotonic() - turn.started
            anew = turn.prompt_tokens - turn.engine_tokens - turn.ram_tokens - turn.disk_tokens
            state.rates.prompt_tokens.observe(anew, turn.prompt_read_seconds - turn.restore_seconds)

    def close(self, turn: Turn, *, outcome: str) -> None:
        """The engine issues no more work for the request; stores under way may still end."""
        turn.closed = True
        turn.outcome = outcome
        if turn.stores_pending == 0:
            self._conclude(turn)

    def _conclude(self, turn: Turn) -> None:
        if turn.finished:
            return
        turn.finished = True
        state = self.state
        state.turns.pop(turn.request, None)
        conversation = turn.conversation
        conversation.in_flight -= 1
        conversation.turns += 1
        self._remember_use(conversation)
        self._keep_chain(turn)
        for row in turn.tips.values():
            state.ledger.drop_tip(row, ram=True, disk=True)
        self._let_arrival_go(turn)
        if not conversation.busy:
            if not conversation.tips:
                state.drop_conversation(conversation)
            state.slots.abandon(conversation.id)
        state.free_unheld_ram()
        add_turn_receipt(state, turn)
        if turn.stream is not None:
            state.finished_streams.append(turn)
        if turn.parked and conversation.in_ram:
            state.captured.append(turn)
        state.wake.notify_all()

    def _remember_use(self, conversation: Conversation) -> None:
        state = self.state
        now = state.clock.wall()
        state.conversations.used(conversation, now=now)
        if state.spill_on and not conversation.forgotten:
            state.touched[conversation.id] = now

    def _keep_chain(self, turn: Turn) -> None:
        """The turn's chain becomes the conversation's: in place of the tip it extends, else beside it (W6)."""
        conversation = turn.conversation
        if not turn.tips or conversation.forgotten:
            return
        state = self.state
        rows = tuple(self._deepest_kept(row) for _, row in sorted(turn.tips.items()))
        if NO_BLOCK in rows:
            return
        tip = Tip(rows=rows, tokens=turn.tokens, last_used=state.clock.wall())
        for old in list(conversation.tips):
            if old.rows == rows or (len(old.rows) == len(rows) and self._extends(rows, old.rows)):
                state.remove_tip(conversation, old)
        if any(self._extends(old.rows, rows) for old in conversation.tips if len(old.rows) == len(rows)):
            return
        state.add_tip(conversation, tip)
        while len(conversation.tips) > MAX_TIPS:
            deepest = max(conversation.tips, key=lambda t: t.tokens)
            spare = [t for t in conversation.tips if t is not tip and t is not deepest]
            state.remove_tip(conversation, min(spare, key=lambda t: t.last_used))

    def _deepest_kept(self, row: int) -> int:
        """The deepest block of the chain that some tier has: a tip without bytes would keep its record for ever."""
        ledger = self.state.ledger
        return next((up for up in ledger.ancestors(row) if ledger.ram[up] or ledger.disk[up]), NO_BLOCK)

    def _extends(self, rows: Sequence[int], older: Sequence[int]) -> bool:
        return all(self.state.ledger.descends(row, old) for row, old in zip(rows, older, strict=True))
