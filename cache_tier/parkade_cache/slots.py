"""Which slot of which extent holds which conversation's block.

Why it exists: RAM goes back to the kernel by the extent, so blocks of one conversation are kept together:
an extent has one owner where possible, and letting that conversation go empties whole extents. The map is
numbers only; every rank's arena mirrors it.

What must stay true: a slot is handed out once until it is put back; an extent is released only when no slot
of it is in use; what has been granted by the gate and not yet committed is known exactly (G15).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from parkade_cache.arena import plan_extents
from parkade_cache.ids import ConversationId

PAGE_BYTES = 4096


class ExtentState(enum.Enum):
    """Life of an extent."""

    RELEASED = "released"
    GRANTED = "granted"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of slots and extents, the same on every rank.

    ``slot_bytes`` is one rank's share of a block rounded up to a page; ``extent_bytes`` is what one rank
    commits for an extent; a pod commits that times ``ranks``.
    """

    slot_bytes: int
    slots_per_extent: int
    extent_bytes: int
    ranks: int = 1

    @property
    def pod_extent_bytes(self) -> int:
        """Bytes the pod commits for one extent, all ranks together."""
        return self.extent_bytes * self.ranks

    @property
    def pod_slot_bytes(self) -> int:
        """Bytes of one block in RAM, all ranks together."""
        return self.slot_bytes * self.ranks

    @classmethod
    def plan(cls, *, block_bytes: int, parked_max_bytes: int, ranks: int = 1) -> Geometry:
        """The shape of extents for one rank's share of a block and the pod's RAM budget."""
        slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        shape = plan_extents(slot_bytes=slot_bytes, budget_bytes=parked_max_bytes // ranks)
        return cls(slot_bytes=slot_bytes, slots_per_extent=shape.slots, extent_bytes=shape.extent_bytes, ranks=ranks)


@dataclass(slots=True)
class _Extent:
    state: ExtentState = ExtentState.RELEASED
    owner: ConversationId | None = None
    used: int = 0
    free: list[int] = field(default_factory=list)


class SlotMap:
    """Hands out slots, extent by extent; no I/O, no locks, the caller holds the cache's lock."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._extents: dict[int, _Extent] = {}
        self._released: list[int] = []
        self._next = 0
        self._empty: set[int] = set()
        self._open: dict[ConversationId, list[int]] = {}
        self._shared: set[int] = set()
        self.used_slots = 0
        self.peak_extents = 0

    @property
    def granted_extents(self) -> int:
        """Extents the gate has admitted that no arena has committed yet."""
        return sum(1 for extent in self._extents.values() if extent.state is ExtentState.GRANTED)

    @property
    def held_extents(self) -> int:
        """Extents granted or committed: what counts against the parked budget."""
        return len(self._extents)

    @property
    def empty_extents(self) -> int:
        """Committed extents without a block, ready for use or release."""
        return len(self._empty)

    def held_bytes(self) -> int:
        """Bytes of all ranks that the map holds against the parked budget."""
        return self.held_extents * self.geometry.pod_extent_bytes

    def reserved_bytes(self) -> int:
        """Bytes admitted by the gate and not yet committed (G15)."""
        return self.granted_extents * self.geometry.pod_extent_bytes

    def free_slots(self, owner: ConversationId) -> int:
        """Slots ``owner`` can fill without asking anybody."""
        return sum(len(self._extents[number].free) for number in self._open.get(owner, ()))

    def grant(self, owner: ConversationId, count: int) -> tuple[int, ...]:
        """Give ``owner`` ``count`` more extents; returns those that must still be committed."""
        fresh: list[int] = []
        for _ in range(count):
            if self._empty:
                number = self._empty.pop()
                extent = self._extents[number]
            else:
                number = self._released.pop() if self._released else self._take_number()
                extent = self._extents[number] = _Extent(state=ExtentState.GRANTED)
                fresh.append(number)
            per = self.geometry.slots_per_extent
            extent.owner = owner
            extent.free = list(range(number * per + per - 1, number * per - 1, -1))
            self._open.setdefault(owner, []).append(number)
        self.peak_extents = max(self.peak_extents, len(self._extents))
        return tuple(fresh)

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def take_many(self, owner: ConversationId, most: int) -> list[int]:
        """Up to ``most`` free slots of ``owner``'s extents."""
        taken: list[int] = []
        opened = self._open.get(owner)
        while opened and len(taken) < most:
            extent = self._extents[opened[-1]]
            count = min(most - len(taken), len(extent.free))
            taken += extent.free[: -count - 1 : -1]
            del extent.free[-count:]
            extent.used += count
            self.used_slots += count
            if not extent.free:
                opened.pop()
                if not opened:
                    del self._open[owner]
        return taken

    def committed(self, numbers: Iterable[int]) -> None:
        """The arenas of all ranks have committed these extents."""
        for number in numbers:
            extent = self._extents.get(number)
            if extent is not None and extent.state is ExtentState.GRANTED:
                extent.state = ExtentState.COMMITTED

    def take(self, owner: ConversationId) -> int:
        """A free slot in one of ``owner``'s extents, or -1."""
        taken = self.take_many(owner, 1)
        return taken[0] if taken else -1

    def uncommitted(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The arenas could not commit these: those no block was promised to leave the map, to be released.

        The others stay; their captures fail one by one, and the extent goes when it is empty.
        """
        leaving: list[int] = []
        for number in numbers:
            extent = self._extents.get(number)
            if extent is None:
                continue
            extent.state = ExtentState.COMMITTED
            if extent.used == 0:
                self._close(number, extent)
                self._empty.discard(number)
                del self._extents[number]
                leaving.append(number)
        return tuple(leaving)

    def put(self, slot: int) -> None:
        """The slot's block is gone."""
        number = slot // self.geometry.slots_per_extent
        extent = self._extents[number]
        extent.used -= 1
        self.used_slots -= 1
        if extent.used == 0:
            self._close(number, extent)
            return
        if not extent.free and extent.owner is not None:
            self._open.setdefault(extent.owner, []).insert(0, number)
        extent.free.append(slot)

    def _close(self, number: int, extent: _Extent) -> None:
        owner = extent.owner
        if owner is not None and number in self._open.get(owner, ()):
            self._open[owner].remove(number)
            if not self._open[owner]:
                del self._open[owner]
        extent.owner = None
        extent.free = []
        self._empty.add(number)

    def abandon(self, owner: ConversationId) -> None:
        """``owner`` needs no more slots just now: its extents that hold nothing become empty ones."""
        for number in [n for n in self._open.get(owner, ()) if self._extents[n].used == 0]:
            self._close(number, self._extents[number])

    def take_empty(self, *, keep: int = 0) -> tuple[int, ...]:
        """Take empty extents out of the map so that the arenas release them; ``keep`` stay committed."""
        taken: list[int] = []
        for number in sorted(self._empty)[: max(0, len(self._empty) - keep)]:
            if self._extents[number].state is not ExtentState.COMMITTED:
                continue
            self._empty.discard(number)
            del self._extents[number]
            taken.append(number)
        return tuple(taken)

    def released(self, numbers: Iterable[int]) -> None:
        """The arenas have given these extents back; their numbers may be used again."""
        self._released.extend(numbers)

    def extent_of(self, slot: int) -> int:
        """Extent that a slot lies in."""
        return slot // self.geometry.slots_per_extent
