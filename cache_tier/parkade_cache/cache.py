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

from parkade_cache.conversations import MAX_TIPS, Conversation, Tip
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, PackId, RequestId
from parkade_cache.ledger import NO_BLOCK, BlockIndex, DiskState, RamState
from parkade_cache.mover import BlockMeta
from parkade_cache.receipts import ReceiptKind
from parkade_cache.state import CacheState
from parkade_cache.transfers import LoadSource, StoreTarget
from parkade_cache.turns import ChainKeys, StreamPack, Turn

PENDING_DEADLINE_S = 2.0
"""How long a request waits for a block that is being copied or written before it is read anew."""

ADMISSION_WAIT_S = 0.025
"""How long a request waits for the gate to say whether RAM has room; after that its blocks go to disk."""

_READY = int(RamState.READY)
_FILLING = int(RamState.FILLING)
_ABSENT = 0
_WRITING = int(DiskState.WRITING)
_PUBLISHED = int(DiskState.PUBLISHED)


class Found(enum.Enum):
    """Answer to a lookup."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A block the engine has computed and offers to the cache."""

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
            keys=keys,
            block_tokens=block_tokens,
            prompt_tokens=prompt_tokens,
            started=now,
            known_id=known,
        )
        turn.admission_pending = state.policy.memory.parked.max > 0
        turn.admission_deadline = now + ADMISSION_WAIT_S
        state.turns[request] = turn
        state.wishes.append(turn)
        state.wake.notify_all()
        return turn

    def _conversation(
        self, conversation: ConversationId | None, request: RequestId, keys: ChainKeys
    ) -> Conversation:
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
        if ledger.ram[row] == _READY:
            return Found.HIT
        if turn.disk_off:
            return Found.MISS
        if ledger.disk[row] == _PUBLISHED:
            return Found.HIT
        if ledger.ram[row] == _FILLING or ledger.disk[row] == _WRITING:
            return Found.MISS if turn.gave_up_waiting else Found.PENDING
        return Found.MISS

    def still_waiting(self, turn: Turn) -> bool:
        """Whether asking now would be too early or give the same answer: O(1), so that a retry costs nothing.

        The gate's answer is awaited before the first match: the engine plans a prompt's stores in the step that
        schedules it, and where they go is decided then.
        """
        now = self.state.clock.monotonic()
        if turn.admission_pending and now < turn.admission_deadline:
            return True
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
            turn.pending_since = None
        turn.engine_tokens = engine_tokens
        if cached_tokens and self._not_worth_it(turn, engine_tokens, cached_tokens):
            turn.skipped_tokens = cached_tokens
            turn.miss_reason = "restore_slower"
            cached_tokens = 0
        self._hold_match(turn, engine_tokens + cached_tokens)
        turn.matched = True
        return cached_tokens

    def _not_worth_it(self, turn: Turn, engine_tokens: int, cached_tokens: int) -> bool:
        state = self.state
        ledger = state.ledger
        first, last = engine_tokens // turn.block_tokens, (engine_tokens + cached_tokens) // turn.block_tokens
        on_disk = 0
        for chain in turn.keys():
            for key in chain[first:last]:
                row = ledger.rows.get(key, -1)
                on_disk += row >= 0 and ledger.ram[row] != _READY
        nbytes = on_disk * state.geometry.slot_bytes
        if not nbytes or not state.rates.restore_is_slower(disk_bytes=nbytes, tokens=cached_tokens):
            return False
        state.receipts.add(
            kind=ReceiptKind.RESTORE_SKIPPED,
            outcome="skipped",
            reason="restore_slower",
            conversation=turn.conversation.id,
            request=turn.request,
            tier="disk",
            tokens=cached_tokens,
            blocks=on_disk,
            bytes=nbytes,
        )
        return True

    def _hold_match(self, turn: Turn, tokens: int) -> None:
        index = tokens // turn.block_tokens - 1
        if index < 0:
            return
        for group, chain in enumerate(turn.keys()):
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
        state = self.state
        ledger = state.ledger
        sources: list[LoadSource] = []
        turn.load_rows.clear()
        turn.load_started = state.clock.monotonic()
        for key in keys:
            row = ledger.rows.get(key, -1)
            if row < 0:
                sources.append(LoadSource(slot=-1))
                continue
            ledger.pin(row)
            if ledger.ram[row] == _READY:
                turn.load_rows[row] = -1
                sources.append(LoadSource(slot=ledger.slot[row]))
                continue
            park = -1
            if ledger.ram[row] == _ABSENT and self._parks(turn):
                park = state.slots.take(turn.conversation.id)
                if park >= 0:
                    ledger.ram_filling(row, park)
            turn.load_rows[row] = park
            pack = state.packs[ledger.pack[row]].pack if ledger.pack[row] >= 0 else None
            sources.append(LoadSource(slot=-1, pack=pack, entry=ledger.entry[row], park_slot=park))
        turn.loads += 1
        return sources

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
        barred from the disk. Packs whose bytes were not what had been written are set aside (D4).
        """
        state = self.state
        ledger = state.ledger
        lost = set(range(len(keys))) if -1 in failed else set(failed)
        ram_blocks = disk_blocks = 0
        cut = min(lost, default=len(keys))
        for position, key in enumerate(keys):
            row = ledger.rows.get(key, -1)
            if row < 0:
                continue
            park = turn.load_rows.pop(row, -1)
            ledger.unpin(row)
            if park >= 0:
                self._parked_on_the_way(row, arrived=position not in lost)
            if position < cut:
                from_ram = ledger.ram[row] == _READY and park < 0
                ram_blocks += from_ram
                disk_blocks += not from_ram
        for pack in bad_packs:
            number = state.pack_numbers.get(pack)
            if number is not None:
                state.packs[number].bad = True
                state.bad_packs.add(number)
        seconds = state.clock.monotonic() - turn.load_started
        turn.restore_seconds += seconds
        turn.ram_tokens += ram_blocks * turn.block_tokens
        turn.disk_tokens += disk_blocks * turn.block_tokens
        turn.failed_load_tokens += (len(keys) - cut) * turn.block_tokens
        state.totals.read_bytes += disk_bytes
        state.rates.disk_read_bytes.observe(disk_bytes, disk_seconds)
        state.changed()
        self._restore_receipt(turn, ram_blocks, disk_blocks, len(keys) - cut, disk_bytes, seconds)
        if lost:
            turn.disk_off = True
            turn.miss_reason = "read_deadline" if -1 in failed else "damaged"
            state.totals.disk_errors += 1
        return (len(keys) - cut) * turn.block_tokens

    def _parked_on_the_way(self, row: int, *, arrived: bool) -> None:
        ledger = self.state.ledger
        if ledger.ram[row] != _FILLING:
            return
        if arrived:
            ledger.ram_ready(row)
        else:
            self.state.slots.put(ledger.ram_gone(row))

    def _restore_receipt(
        self, turn: Turn, ram_blocks: int, disk_blocks: int, failed_blocks: int, disk_bytes: int, seconds: float
    ) -> None:
        state = self.state
        outcome = "failed" if failed_blocks and not (ram_blocks or disk_blocks) else "partial" if failed_blocks else "restored"
        tier = "disk" if disk_blocks or (failed_blocks and not ram_blocks) else "ram"
        state.receipts.add(
            kind=ReceiptKind.RESTORE,
            outcome=outcome,
            conversation=turn.conversation.id,
            request=turn.request,
            tier=tier,
            tokens=(ram_blocks + disk_blocks) * turn.block_tokens,
            blocks=ram_blocks + disk_blocks,
            bytes=(ram_blocks + disk_blocks) * state.geometry.pod_slot_bytes,
            duration_seconds=seconds,
            detail={"ram_blocks": ram_blocks, "disk_blocks": disk_blocks, "failed_blocks": failed_blocks},
        )
        for name, blocks in (("ram", ram_blocks), ("disk", disk_blocks)):
            if blocks:
                state.metrics.restored_tokens.labels(tier=name).inc(blocks * turn.block_tokens)
                state.metrics.restore_bytes.labels(tier=name).inc(blocks * state.geometry.pod_slot_bytes)
        state.metrics.restore_seconds.labels(tier=tier).observe(seconds)

    # -- stores ----------------------------------------------------------------------------------------

    def _parks(self, turn: Turn) -> bool:
        return not turn.ram_refused and turn.conversation.in_ram

    def plan_store(self, turn: Turn, offered: Sequence[OfferedBlock]) -> StorePlan:
        """Take what neither tier has: into RAM while the gate's credit lasts, else streamed to disk (G14)."""
        state = self.state
        ledger = state.ledger
        accepted: list[int] = []
        targets: list[StoreTarget] = []
        ends: dict[int, int] = {}
        parks = self._parks(turn) and self._long_enough_to_park(turn, offered)
        streams = state.spill_on and state.spill_healthy and self._long_enough_to_spill(turn, offered)
        conversation = turn.conversation.id
        parent_row = -1
        previous = NO_KEY
        for position, block in enumerate(offered):
            if block.parent != previous or parent_row < 0:
                parent_row = self._parent_row(block)
            row = ledger.intern(block.key, parent=BlockIndex(parent_row), end_token=block.end_token)
            ends[block.group] = row
            parent_row, previous = row, block.key
            if ledger.ram[row] != _ABSENT:
                continue
            slot = state.slots.take(conversation) if parks else -1
            if slot >= 0:
                ledger.ram_filling(row, slot)
                targets.append(StoreTarget(slot))
            elif streams and ledger.disk[row] == _ABSENT:
                targets.append(self._stream_target(turn, row, block))
            else:
                if ledger.disk[row] == _ABSENT:
                    self._refused(turn, streams=streams)
                continue
            ledger.pin(row)
            accepted.append(position)
        self._extend(turn, ends)
        if accepted:
            turn.stores_pending += 1
        self._top_up(turn)
        return StorePlan(tuple(accepted), tuple(targets))

    def _parent_row(self, block: OfferedBlock) -> int:
        """Row of the block before this one; made when unknown, so that the tree has no gap."""
        if block.parent == NO_KEY:
            return NO_BLOCK
        row = self.state.ledger.rows.get(block.parent, -1)
        if row < 0:
            row = self.state.ledger.intern(
                block.parent, parent=NO_BLOCK, end_token=block.end_token - 1
            )
        return row

    def _stream_target(self, turn: Turn, row: int, block: OfferedBlock) -> StoreTarget:
        state = self.state
        stream = turn.stream
        if stream is None:
            pack = state.new_pack_id()
            stream = turn.stream = StreamPack(pack, state.pack_number(pack, turn.conversation.id))
            state.wake.notify_all()
        state.ledger.disk_writing(row, stream.number)
        stream.planned_bytes += state.geometry.pod_slot_bytes
        meta = BlockMeta(key=block.key, parent=block.parent, end_token=block.end_token, group=block.group)
        return StoreTarget(slot=-1, pack=stream.pack, meta=meta)

    def _long_enough_to_park(self, turn: Turn, offered: Sequence[OfferedBlock]) -> bool:
        return self._length(turn, offered) >= self.state.policy.memory.parked.min_tokens

    def _long_enough_to_spill(self, turn: Turn, offered: Sequence[OfferedBlock]) -> bool:
        spill = self.state.policy.spill
        return spill is not None and self._length(turn, offered) >= spill.min_tokens

    def _length(self, turn: Turn, offered: Sequence[OfferedBlock]) -> int:
        return max(turn.prompt_tokens, offered[-1].end_token if offered else 0)

    def _refused(self, turn: Turn, *, streams: bool) -> None:
        turn.conversation.too_short = self.state.spill_on and not streams and self.state.spill_healthy
        if not turn.ram_refused:
            turn.ram_refused = "no_credit"

    def _extend(self, turn: Turn, ends: dict[int, int]) -> None:
        ledger = self.state.ledger
        for group, row in ends.items():
            old = turn.tips.get(group, -1)
            if old < 0 or ledger.end_token[row] > ledger.end_token[old]:
                self._move_tip(turn, group, row)
            turn.tokens = max(turn.tokens, ledger.end_token[row])
        turn.conversation.dirty = True

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
        state = self.state
        ledger = state.ledger
        lost = 0
        for key in keys:
            row = ledger.rows.get(key, -1)
            if row < 0:
                continue
            ledger.unpin(row)
            if ledger.ram[row] == _FILLING:
                if key in failed:
                    state.slots.put(ledger.ram_gone(row))
                    lost += 1
                else:
                    ledger.ram_ready(row)
            elif key in failed and ledger.disk[row] == _WRITING:
                ledger.disk_gone(row)
                lost += 1
            ledger.forget_if_dead(row)
        if lost:
            state.totals.not_captured_blocks += lost
            state.metrics.not_captured_blocks.inc(lost)
        state.changed()
        if turn is not None:
            turn.not_captured += lost
            turn.stores_pending -= 1
            if turn.closed and turn.stores_pending == 0:
                self._conclude(turn)

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
        state.conversations.used(conversation, now=state.clock.wall())
        self._keep_chain(turn)
        for row in turn.tips.values():
            state.ledger.drop_tip(row, ram=True, disk=True)
        if not conversation.tips and not conversation.busy:
            state.conversations.remove(conversation)
        state.slots.abandon(conversation.id)
        state.free_unheld_ram()
        self._turn_receipt(turn)
        if turn.stream is not None:
            state.finished_streams.append(turn)
        state.wake.notify_all()

    def _keep_chain(self, turn: Turn) -> None:
        """The turn's chain becomes the conversation's: in place of the tip it extends, else beside it (W6)."""
        conversation = turn.conversation
        if not turn.tips or conversation.forgotten:
            return
        state = self.state
        rows = tuple(row for _, row in sorted(turn.tips.items()))
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

    def _extends(self, rows: Sequence[int], older: Sequence[int]) -> bool:
        return all(self.state.ledger.descends(row, old) for row, old in zip(rows, older, strict=True))

    def _turn_receipt(self, turn: Turn) -> None:
        state = self.state
        reused = turn.engine_tokens + turn.ram_tokens + turn.disk_tokens
        anew = max(0, turn.prompt_tokens - reused)
        outcome = _turn_outcome(turn, anew)
        reason = turn.miss_reason if anew > turn.block_tokens else "tail"
        state.totals.turn(outcome)
        state.metrics.turns.labels(outcome=outcome).inc()
        state.metrics.reread_tokens.labels(reason=reason).inc(anew)
        state.receipts.add(
            kind=ReceiptKind.TURN,
            outcome=outcome,
            reason=reason,
            conversation=turn.conversation.id,
            request=turn.request,
            tokens=turn.prompt_tokens,
            duration_seconds=state.clock.monotonic() - turn.started,
            prompt_tokens=turn.prompt_tokens,
            reused_engine_tokens=turn.engine_tokens,
            reused_ram_tokens=turn.ram_tokens,
            reused_disk_tokens=turn.disk_tokens,
            reused_archive_tokens=0,
            read_anew_tokens=anew,
            prompt_read_seconds=turn.prompt_read_seconds,
            waited_restore_seconds=turn.restore_seconds,
            waited_write_out_seconds=0.0,
            detail={
                "ended": turn.outcome,
                "parked": not turn.ram_refused,
                "park_refusal": turn.ram_refused,
                "not_captured_blocks": turn.not_captured,
            },
        )


def _turn_outcome(turn: Turn, anew: int) -> str:
    """How the turn was served; the last partial block of a prompt is always read anew."""
    restored = turn.ram_tokens + turn.disk_tokens
    if turn.failed_load_tokens or turn.skipped_tokens:
        return "partial" if restored or turn.engine_tokens else "reread"
    if turn.disk_tokens:
        return "resumed_disk"
    if turn.ram_tokens:
        return "resumed_ram"
    if turn.engine_tokens:
        return "resumed_engine"
    return "reread"
