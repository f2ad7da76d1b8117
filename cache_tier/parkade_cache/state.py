"""What the parts of the owner share, under one lock.

Why it exists: the step hooks, the gate thread and the report thread change the same ledger. The lock is our
own and short: no file, no socket and no SQLite under it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from parkade_cache.conversations import Conversation, Conversations, Tip
from parkade_cache.errors import ParkadeError
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, PackId, RequestId
from parkade_cache.ledger import DiskState, Ledger, RamState
from parkade_cache.memory.pressure import PressureLevel
from parkade_cache.metrics import CacheMetrics
from parkade_cache.mover import JobId
from parkade_cache.policy import Policy, PolicyBox
from parkade_cache.rates import Rates
from parkade_cache.receipts import ReceiptKind, ReceiptLog
from parkade_cache.slots import Geometry, SlotMap
from parkade_cache.turns import Turn


@dataclass(slots=True)
class PackState:
    """A pack the ledger's rows point at by number."""

    pack: PackId
    conversation: ConversationId
    live: int = 0
    """Published blocks that rows point at."""
    writing: bool = False
    """A write or stream of it is under way."""
    dropping: int = 0
    """Entries that no row points at any more and that the store still has to drop."""
    bad: bool = False
    """Damaged, and not yet set aside."""
    poisoned: int = 0
    """Blocks that were published in it when it was found damaged."""

    @property
    def in_use(self) -> bool:
        """Whether its number still means something."""
        return self.live > 0 or self.writing or self.dropping > 0 or self.bad


@dataclass(slots=True)
class Totals:
    """Counts since the start that summaries show; metrics count the same things for Prometheus."""

    turns: dict[str, int] = field(default_factory=dict)
    dropped_conversations: int = 0
    not_captured_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    disk_errors: int = 0
    parked_peak_bytes: int = 0

    def turn(self, outcome: str) -> None:
        """Count one turn."""
        self.turns[outcome] = self.turns.get(outcome, 0) + 1


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, injected: ``wall`` in seconds since the epoch, ``monotonic`` for deadlines."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


class CacheState:
    """Ledger, slots, conversations and packs of one pod."""

    def __init__(
        self,
        *,
        geometry: Geometry,
        policy: PolicyBox,
        receipts: ReceiptLog,
        metrics: CacheMetrics,
        spill_on: bool,
        clock: Clock | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.clock = clock or Clock()
        self.geometry = geometry
        self.policy_box = policy
        self.receipts = receipts
        self.metrics = metrics
        self.spill_on = spill_on
        self.spill_healthy = spill_on
        self.spill_reason = ""
        self.ledger = Ledger()
        self.slots = SlotMap(geometry)
        self.conversations = Conversations()
        self.turns: dict[RequestId, Turn] = {}
        self.packs: list[PackState] = []
        self.pack_numbers: dict[PackId, int] = {}
        self._free_packs: list[int] = []
        self.bad_packs: set[int] = set()
        self.parked: dict[ConversationId, Conversation] = {}
        self.restoring: set[int] = set()
        self.stale: set[int] = set()
        """Blocks of earlier weights in RAM that a job still uses; they go when it ends, whoever keeps them."""
        self.recurrent_groups: frozenset[int] = frozenset()
        self.touched: dict[ConversationId, float] = {}
        self.probe_due = False
        self.pressure = PressureLevel.NONE
        self.wanted_on_disk: dict[ConversationId, Conversation] = {}
        """Conversations whose requests wait for their write (case 61)."""
        self.rates = Rates.unmeasured()
        self.totals = Totals()
        self.version = 0
        self.draining = False
        self.recovering = spill_on
        self.group_positions: dict[int, int] = {}
        self.started_at = self.clock.wall()
        self._jobs = itertools.count(1)
        self.wishes: deque[Turn] = deque()
        self.finished_streams: deque[Turn] = deque()
        self.captured: deque[Turn] = deque()
        self.new_pack_id: Callable[[], PackId] = _no_pack_id
        self.wake = threading.Condition(self.lock)

    @property
    def policy(self) -> Policy:
        """Limits and floors in force."""
        return self.policy_box.current

    def next_job(self) -> JobId:
        """A job id never given out before."""
        return JobId(next(self._jobs))

    def group_of(self, key: BlockKey) -> int:
        """Position of the key's KV group among those the cache keeps; its last four bytes name the group."""
        number = int.from_bytes(key[-4:], "big")
        return self.group_positions.get(number, number)

    def changed(self) -> None:
        """Something a waiting lookup may care about has changed."""
        self.version += 1

    def pack_number(self, pack: PackId, conversation: ConversationId) -> int:
        """The number rows use for ``pack``; numbers of packs that are gone are used again."""
        number = self.pack_numbers.get(pack)
        if number is not None:
            return number
        if self._free_packs:
            number = self._free_packs.pop()
            self.packs[number] = PackState(pack, conversation)
        else:
            number = len(self.packs)
            self.packs.append(PackState(pack, conversation))
        self.pack_numbers[pack] = number
        return number

    def pack_settled(self, number: int) -> PackId | None:
        """Free the pack's number once nothing uses it; returns the pack that is gone with it."""
        found = self.packs[number]
        if found.in_use or self.pack_numbers.get(found.pack) != number:
            return None
        del self.pack_numbers[found.pack]
        self._free_packs.append(number)
        return found.pack

    # -- holds of conversations ------------------------------------------------------------------------

    def add_tip(self, conversation: Conversation, tip: Tip) -> None:
        """The conversation keeps one more chain, in the tiers it is in."""
        for row in tip.rows:
            self.ledger.hold_tip(row, ram=conversation.in_ram, disk=conversation.on_disk)
        self.conversations.tip_added(conversation, tip)

    def remove_tip(self, conversation: Conversation, tip: Tip) -> None:
        """The conversation keeps one chain less."""
        self.conversations.tip_removed(conversation, tip)
        for row in tip.rows:
            self.ledger.drop_tip(row, ram=conversation.in_ram and tip.in_ram, disk=conversation.on_disk)

    def leave_ram(self, conversation: Conversation) -> None:
        """Stop keeping the conversation in RAM; ``free_unheld_ram`` takes what nobody else needs."""
        if conversation.in_ram:
            for tip in conversation.tips:
                self.leave_ram_alone(conversation, tip)
                tip.in_ram = True
            conversation.in_ram = False
            if self.parked.get(conversation.id) is conversation:
                del self.parked[conversation.id]

    def leave_ram_alone(self, conversation: Conversation, tip: Tip) -> None:
        """Stop keeping one chain of a parked conversation in RAM; the conversation's others stay (W5)."""
        if conversation.in_ram and tip.in_ram:
            for row in tip.rows:
                self.ledger.unhold_ram(row)
            tip.in_ram = False

    def enter_ram(self, conversation: Conversation) -> None:
        """Keep the conversation's chains in RAM, as far as they are there."""
        if not conversation.in_ram:
            for row in conversation.rows():
                self.ledger.hold_ram(row)
            conversation.in_ram = True
            self.parked[conversation.id] = conversation

    def leave_disk(self, conversation: Conversation) -> None:
        """Stop keeping the conversation on disk."""
        if conversation.on_disk:
            for row in conversation.rows():
                self.ledger.unhold_disk(row)
            conversation.on_disk = False

    def enter_disk(self, conversation: Conversation) -> None:
        """Keep the conversation's chains on disk again, as far as they are there."""
        if not conversation.on_disk:
            for row in conversation.rows():
                self.ledger.hold_disk(row)
            conversation.on_disk = True

    def free_unheld_ram(self) -> int:
        """Free the slots of blocks nobody keeps in RAM; returns how many. Pinned ones wait."""
        postponed: list[int] = []
        freed = self._free_stale() if self.stale else 0
        for row in self.ledger.take_unheld_ram():
            if self.ledger.pins[row]:
                postponed.append(row)
                continue
            self.slots.put(self.ledger.ram_gone(row))
            self.ledger.forget_if_dead(row)
            freed += 1
        self.ledger.postpone_unheld(ram=postponed)
        return freed

    def _free_stale(self) -> int:
        over = [row for row in self.stale if not self.ledger.pins[row]]
        for row in over:
            self.stale.discard(row)
            self.slots.put(self.ledger.ram_gone(row))
            self.ledger.forget_if_dead(row)
        if over:
            self.changed()
        return len(over)

    def forget_contents(self) -> None:
        """New weights: what is left of the old ones because a job uses it is found by nobody any more (trap 14)."""
        ledger = self.ledger
        for key, row in list(ledger.rows.items()):
            if ledger.rows.get(key) != row:
                continue
            if ledger.disk[row] == DiskState.PUBLISHED:
                self.packs[ledger.pack[row]].live -= 1
            if ledger.disk[row]:
                ledger.disk_gone(row)
            if ledger.ram[row] == RamState.READY:
                ledger.ram_stale(row)
                self.stale.add(row)
            ledger.forget_if_dead(row)
        self.free_unheld_ram()
        self.changed()

    def take_unheld_disk(self, *, most: int) -> dict[int, list[int]]:
        """Up to ``most`` entries nobody keeps on disk, by pack number; they are out of the ledger already."""
        dead: dict[int, list[int]] = {}
        if self.recovering:
            # A block whose conversation is still to be found again must not go because nobody holds it yet (S2).
            return dead
        ledger = self.ledger
        postponed: list[int] = []
        unheld = ledger.take_unheld_disk()
        for row in unheld[:most]:
            if ledger.pins[row] or ledger.disk[row] == DiskState.WRITING:
                postponed.append(row)
                continue
            number, entry = ledger.pack[row], ledger.entry[row]
            ledger.disk_gone(row)
            ledger.forget_if_dead(row)
            self.packs[number].live -= 1
            self.packs[number].dropping += 1
            dead.setdefault(number, []).append(entry)
        ledger.postpone_unheld(disk=[*unheld[most:], *postponed])
        return dead

    def drop_conversation(self, conversation: Conversation) -> None:
        """Forget the conversation; its blocks become free where nobody else needs them."""
        for tip in list(conversation.tips):
            self.remove_tip(conversation, tip)
        self.leave_ram(conversation)
        self.conversations.remove(conversation)

    def keeps_on_disk(self, row: int) -> bool:
        """Whether a written conversation keeps this block: of recurrent state only the deepest and the root (D7)."""
        group = self.group_of(self.ledger.key[row]) if self.recurrent_groups else -1
        return group not in self.recurrent_groups or self.ledger.is_checkpoint(row)

    def unpublished_blocks(self, conversation: Conversation) -> int:
        """Blocks of the conversation that RAM has, or is about to have, and that disk has not published."""
        ledger = self.ledger
        rows = {row for top in conversation.rows() for row in ledger.ancestors(top)}
        return sum(
            1 for row in rows if ledger.ram[row] and ledger.disk[row] != DiskState.PUBLISHED and self.keeps_on_disk(row)
        )

    def parent_on_disk(self, row: int) -> BlockKey:
        """The parent a pack records: for recurrent state the nearest one that stays on disk for good (D7)."""
        ledger = self.ledger
        parent = ledger.parent[row]
        if self.recurrent_groups and self.group_of(ledger.key[row]) in self.recurrent_groups:
            while parent >= 0 and ledger.children[parent] == 1 and ledger.parent[parent] >= 0:
                parent = ledger.parent[parent]
        return ledger.key[parent] if parent >= 0 else NO_KEY

    def add_drop_receipt(self, conversation: ConversationId, reason: str, blocks: int, *, tier: str) -> None:
        """A conversation has lost blocks: count it, and say so (section 7)."""
        self.totals.dropped_conversations += 1
        self.metrics.dropped_conversations.labels(reason=reason).inc()
        self.receipts.add(
            kind=ReceiptKind.DROP,
            outcome="dropped",
            reason=reason,
            conversation=conversation,
            tier=tier,
            blocks=blocks,
            bytes=blocks * self.geometry.pod_slot_bytes,
            dropped=1,
        )

    def parked_conversations(self) -> int:
        """Conversations that RAM is kept for."""
        return len(self.parked)


def _no_pack_id() -> PackId:
    raise ParkadeError("the disk tier is off; no pack can be named")
