"""The ledger: which block is where, and who still needs it.

Why it exists: every decision (match, evict, write, forget) is answered from here, in memory, without
touching a payload. Blocks form a forest: a block's parent is the block before it in its chain, so a shared
prefix is simply a node with several children, and "needed by" is a count that moves up the tree only when a
node's own need begins or ends. Growing a conversation costs its growth, never its length.

What must stay true:

- a *hold* on a tier counts, per block, the chain tips kept there plus the children that are held there;
  a block whose hold is above zero is never taken from that tier;
- a record lives while any tier has its bytes, a job pins it, a tip sits on it or a child record exists;
- columns, not objects: a million blocks add no object the garbage collector has to visit.

The caller holds the cache's lock; nothing here locks, waits or does I/O. Rules: G4, D6, R1, W6.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NewType, Protocol

import numpy as np

from parkade_cache.ids import NO_KEY, BlockKey

BlockIndex = NewType("BlockIndex", int)
"""Row of a block in the ledger; valid while the record lives."""

NO_BLOCK = BlockIndex(-1)
NO_SLOT = -1


class RamState(enum.IntEnum):
    """What RAM holds of a block."""

    ABSENT = 0
    FILLING = 1
    READY = 2


class DiskState(enum.IntEnum):
    """What local disk holds of a block. Only PUBLISHED may serve a hit (W2)."""

    ABSENT = 0
    WRITING = 1
    PUBLISHED = 2


class Link(Protocol):
    """A block as it is offered: its key, the key of the block before it, and the position in tokens behind it."""

    @property
    def key(self) -> BlockKey: ...

    @property
    def parent(self) -> BlockKey: ...

    @property
    def end_token(self) -> int: ...


_PAGE_ROWS = 4096
_ZEROS = array("i", [0]) * _PAGE_ROWS
_MINUS_ONES = array("i", [-1]) * _PAGE_ROWS

_ABSENT = 0
_FILLING = 1
_READY = 2
_PUBLISHED = 2


class Ledger:
    """Blocks, their tree, their tiers and the holds on them."""

    def __init__(self) -> None:
        self.rows: dict[BlockKey, int] = {}
        self.key: list[BlockKey] = []
        self.parent = array("i")
        self.end_token = array("i")
        self.slot = array("i")
        self.ram = bytearray()
        self.disk = bytearray()
        self.pack = array("i")
        self.entry = array("i")
        self.ram_hold = array("i")
        self.disk_hold = array("i")
        self.children = array("i")
        self.tips = array("i")
        self.pins = array("i")
        self._free: list[int] = []
        self.ram_blocks = 0
        self.disk_blocks = 0
        self.dirty_blocks = 0
        self._unheld_ram: list[int] = []
        self._unheld_disk: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    # -- records ---------------------------------------------------------------------------------

    def find(self, key: BlockKey) -> BlockIndex:
        """Row of ``key``, or ``NO_BLOCK``."""
        return BlockIndex(self.rows.get(key, -1))

    def intern(self, key: BlockKey, parent: int, end_token: int) -> BlockIndex:
        """Row of ``key``, made when it is new; a missing link to its parent is filled in.

        ``end_token`` is the position in tokens just behind the block.
        """
        row = self.rows.get(key, -1)
        if row < 0:
            row = self._new_row(key)
        self.end_token[row] = end_token
        if parent >= 0 and self.parent[row] < 0 and parent != row:
            self._link(row, parent)
        return row  # type: ignore[return-value]  # a NewType call here is a tenth of a store's time

    def intern_run(self, blocks: Sequence[Link], start: int, parent: int) -> list[int]:
        """As ``intern`` for ``blocks`` from ``start`` on, as long as each follows the one before; at least one.

        Written out, since it is where a step's stores spend their time.
        """
        rows, free, keys = self.rows, self._free, self.key
        parents, ends, children = self.parent, self.end_token, self.children
        get, run, previous = rows.get, [], blocks[start].parent
        for block in islice(blocks, start, None):
            if block.parent != previous:
                break
            previous = block.key
            row = get(previous, -1)
            if row >= 0:
                if parent >= 0 and parents[row] < 0 and parent != row:
                    self._link(row, parent)
            else:
                row = free.pop() if free else len(rows)
                if row == len(keys):
                    self._grow()
                keys[row] = previous
                rows[previous] = row
                if parent >= 0:
                    parents[row] = parent
                    children[parent] += 1
            ends[row] = block.end_token
            parent = row
            run.append(row)
        return run

    def _new_row(self, key: BlockKey) -> int:
        if self._free:
            row = self._free.pop()
            self.key[row] = key
            self.rows[key] = row
            return row
        row = len(self.rows)
        if row == len(self.key):
            self._grow()
        self.key[row] = key
        self.rows[key] = row
        return row

    def _grow(self) -> None:
        # Rows come in pages: one extend per column instead of ten appends per block.
        self.key.extend([NO_KEY] * _PAGE_ROWS)
        for column in (self.parent, self.slot, self.pack, self.entry):
            column.extend(_MINUS_ONES)
        for column in (self.end_token, self.ram_hold, self.disk_hold, self.children, self.tips, self.pins):
            column.extend(_ZEROS)
        self.ram.extend(bytes(_PAGE_ROWS))
        self.disk.extend(bytes(_PAGE_ROWS))

    def _link(self, row: int, parent: int) -> None:
        self.parent[row] = parent
        self.children[parent] += 1
        if self.ram_hold[row] > 0:
            self._raise(self.ram_hold, parent)
        if self.disk_hold[row] > 0:
            self._raise(self.disk_hold, parent)

    def forget_if_dead(self, row: int) -> None:
        """Remove the record, and every ancestor that dies with it, when nothing needs it any more."""
        while (
            row >= 0
            and self.key[row] != NO_KEY
            and not self.children[row]
            and not self.tips[row]
            and not self.pins[row]
            and self.ram[row] == _ABSENT
            and self.disk[row] == _ABSENT
        ):
            parent = self.parent[row]
            del self.rows[self.key[row]]
            self.key[row] = NO_KEY
            self.parent[row] = -1
            self._free.append(row)
            if parent >= 0:
                self.children[parent] -= 1
            row = parent

    def ancestors(self, row: int) -> Iterator[BlockIndex]:
        """``row`` and every block before it in its chain, deepest first."""
        parent = self.parent
        while row >= 0:
            yield BlockIndex(row)
            row = parent[row]

    def descends(self, row: int, ancestor: int) -> bool:
        """Whether ``ancestor`` is ``row`` or lies before it in its chain."""
        floor = self.end_token[ancestor]
        parent, end_token = self.parent, self.end_token
        while row >= 0 and end_token[row] > floor:
            row = parent[row]
        return row == ancestor

    # -- holds -----------------------------------------------------------------------------------

    def hold_tip(self, row: int, *, ram: bool, disk: bool) -> None:
        """A chain now ends at ``row``; keep it and everything before it in the tiers named."""
        self.tips[row] += 1
        if ram:
            self._raise(self.ram_hold, row)
        if disk:
            self._raise(self.disk_hold, row)

    def drop_tip(self, row: int, *, ram: bool, disk: bool) -> None:
        """The chain that ended at ``row`` is gone; blocks nobody holds now come out of ``take_unheld_*``."""
        self.tips[row] -= 1
        if ram:
            self._lower(self.ram_hold, row, self._unheld_ram)
        if disk:
            self._lower(self.disk_hold, row, self._unheld_disk)
        self.forget_if_dead(row)

    def hold_ram(self, row: int) -> None:
        """Keep an existing tip's chain in RAM again."""
        self._raise(self.ram_hold, row)

    def unhold_ram(self, row: int) -> None:
        """Stop keeping a tip's chain in RAM; the tip itself stays."""
        self._lower(self.ram_hold, row, self._unheld_ram)

    def hold_disk(self, row: int) -> None:
        """Keep an existing tip's chain on disk again."""
        self._raise(self.disk_hold, row)

    def unhold_disk(self, row: int) -> None:
        """Stop keeping a tip's chain on disk; the tip itself stays."""
        self._lower(self.disk_hold, row, self._unheld_disk)

    def _raise(self, hold: array[int], row: int) -> None:
        parent = self.parent
        while row >= 0:
            hold[row] += 1
            if hold[row] > 1:
                return
            row = parent[row]

    def _lower(self, hold: array[int], row: int, unheld: list[int]) -> None:
        parent = self.parent
        while row >= 0:
            hold[row] -= 1
            if hold[row] > 0:
                return
            unheld.append(row)
            row = parent[row]

    def take_unheld_ram(self) -> list[int]:
        """Blocks whose RAM hold ended since the last call and that still have none."""
        rows, self._unheld_ram = self._unheld_ram, []
        # A hold that ended, began and ended again has put its row here twice.
        return [row for row in dict.fromkeys(rows) if not self.ram_hold[row] and self.ram[row] != _ABSENT]

    def take_unheld_disk(self) -> list[int]:
        """Blocks whose disk hold ended since the last call and that still have none."""
        rows, self._unheld_disk = self._unheld_disk, []
        return [row for row in dict.fromkeys(rows) if not self.disk_hold[row] and self.disk[row] != _ABSENT]

    def unheld_in_ram(self) -> list[int]:
        """Blocks in RAM that nobody keeps there and that a job still uses; meaningful after they were taken."""
        return [row for row in self._unheld_ram if not self.ram_hold[row] and self.ram[row] != _ABSENT]

    def postpone_unheld(self, *, ram: Iterable[int] = (), disk: Iterable[int] = ()) -> None:
        """Hand rows back that are pinned just now; the next ``take_unheld_*`` returns them again."""
        self._unheld_ram.extend(ram)
        self._unheld_disk.extend(disk)

    # -- pins: jobs that read or write the bytes ----------------------------------------------------

    def pin(self, row: int) -> None:
        """A job uses the block's bytes; no tier may let them go."""
        self.pins[row] += 1

    def unpin(self, row: int) -> None:
        """The job is over."""
        self.pins[row] -= 1

    # -- tiers -----------------------------------------------------------------------------------

    def ram_filling(self, row: int, slot: int) -> None:
        """A job copies the block into ``slot``."""
        self.slot[row] = slot
        self.ram[row] = _FILLING
        self.ram_blocks += 1

    def fill_many(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """As ``ram_filling`` for each, and pinned until ``ready_many``: what a step stores, without a call a block."""
        slot_of, ram, pins = self.slot, self.ram, self.pins
        for row, slot in zip(rows, slots, strict=True):
            slot_of[row] = slot
            ram[row] = _FILLING
            pins[row] += 1
        self.ram_blocks += len(rows)

    def ready_many(self, rows: Sequence[int]) -> None:
        """As ``ram_ready`` and ``unpin`` for each."""
        ram, disk, pins = self.ram, self.disk, self.pins
        dirty = 0
        for row in rows:
            if ram[row] != _FILLING:
                raise ValueError("a block must be filling before it is ready")
            ram[row] = _READY
            pins[row] -= 1
            dirty += disk[row] != _PUBLISHED
        self.dirty_blocks += dirty

    def ram_ready(self, row: int) -> None:
        """The copy into RAM is complete: the block may serve hits."""
        if self.ram[row] != _FILLING:
            raise ValueError("a block must be filling before it is ready")
        self.ram[row] = _READY
        if self.disk[row] != _PUBLISHED:
            self.dirty_blocks += 1

    def ram_gone(self, row: int) -> int:
        """RAM lets the block go; returns the slot that is free now."""
        slot = self.slot[row]
        if self.ram[row] == _READY and self.disk[row] != _PUBLISHED:
            self.dirty_blocks -= 1
        if self.ram[row] != _ABSENT:
            self.ram_blocks -= 1
        self.ram[row] = _ABSENT
        self.slot[row] = NO_SLOT
        return slot

    def disk_writing(self, row: int, pack: int) -> None:
        """A write of the block into ``pack`` has been ordered."""
        self.disk[row] = DiskState.WRITING
        self.pack[row] = pack

    def disk_published(self, row: int, pack: int, entry: int) -> None:
        """The block is published (W2) as entry ``entry`` of ``pack``."""
        if self.disk[row] != _PUBLISHED:
            self.disk_blocks += 1
            if self.ram[row] == _READY:
                self.dirty_blocks -= 1
        self.disk[row] = _PUBLISHED
        self.pack[row] = pack
        self.entry[row] = entry

    def disk_gone(self, row: int) -> None:
        """Disk has the block no more: dropped, failed or poisoned."""
        if self.disk[row] == _PUBLISHED:
            self.disk_blocks -= 1
            if self.ram[row] == _READY:
                self.dirty_blocks += 1
        self.disk[row] = _ABSENT
        self.pack[row] = -1
        self.entry[row] = -1

    def ram_stale(self, row: int) -> None:
        """The bytes in RAM are no longer what the key says, and a job still uses them: they serve no hit any more."""
        if self.ram[row] == _READY:
            self.dirty_blocks -= self.disk[row] != _PUBLISHED
            self.ram[row] = _FILLING

    # -- questions -------------------------------------------------------------------------------

    def dirty_chain(self, row: int) -> list[BlockIndex]:
        """Blocks of the chain ending at ``row`` that RAM has and no write has been ordered for, root first."""
        ram, disk, parent = self.ram, self.disk, self.parent
        found: list[BlockIndex] = []
        while row >= 0:
            if ram[row] == _READY and disk[row] == _ABSENT:
                found.append(BlockIndex(row))
            row = parent[row]
        found.reverse()
        return found

    def is_checkpoint(self, row: int) -> bool:
        """Whether a recurrent state is worth a place on disk: a chain ends here, begins here, or several part (D7)."""
        return self.children[row] != 1 or self.tips[row] > 0 or self.parent[row] < 0

    def rows_of_pack(self, pack: int) -> list[int]:
        """Rows published in ``pack``; one pass over a column, for the rare case of a damaged pack."""
        # A view, not a copy; it is gone before the column can grow again.
        candidates = np.flatnonzero(np.frombuffer(self.pack, dtype=np.intc) == pack)
        return [int(row) for row in candidates if self.disk[row] == _PUBLISHED]

    def ram_frees(self, row: int, gone: dict[int, int]) -> list[int]:
        """RAM blocks that would be free if the hold of the chain ending at ``row`` went, pinned ones included.

        ``gone`` carries the holds that chains assumed gone before would have taken away; it is updated, so
        that a sequence of calls gives what a sequence of evictions gives (G4).
        """
        return [free for free in self._frees(self.ram_hold, row, gone) if self.ram[free] != _ABSENT]

    def disk_frees(self, row: int, gone: dict[int, int]) -> list[int]:
        """As ``ram_frees``, for published blocks on disk (D6)."""
        return [free for free in self._frees(self.disk_hold, row, gone) if self.disk[free] == _PUBLISHED]

    def _frees(self, hold: array[int], row: int, gone: dict[int, int]) -> Iterator[int]:
        parent = self.parent
        while row >= 0:
            gone[row] = gone.get(row, 0) + 1
            if hold[row] > gone[row]:
                return
            yield row
            row = parent[row]
