"""Which conversation needs which blocks, told from the packs alone, as the next start will find it. Pure.

A running pod has a ledger for this. A tool that works beside it or after it has only the packs: a conversation's newest
pack names the ends of its chains, every block names the one before it, and a block that no chain reaches belongs to the
conversation that wrote it (S2, D6). What must stay true: a block that a kept conversation needs is never counted as
belonging to another alone, in whosever pack it lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parkade_cache.ids import NO_KEY, BlockKey, PackId
from parkade_cache.spill.pack import PackEntry, PackInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """A pack that the next start serves. One rank's ``info`` stands for all ``ranks``: they hold the same blocks.

    ``dead`` entries are found by no lookup, ``returned`` ones have given their space back; ``disk_bytes`` is of all
    ranks. ``indexed`` is False for a pack that the next start will have to adopt.
    """

    info: PackInfo
    ranks: int
    dead: frozenset[int]
    returned: frozenset[int]
    last_used: float
    disk_bytes: int
    indexed: bool

    @property
    def pack_id(self) -> PackId:
        """Its name."""
        return self.info.header.pack_id

    @property
    def conversation(self) -> str:
        """The conversation that wrote it."""
        return self.info.header.conversation

    @property
    def rest_bytes(self) -> int:
        """What it takes beside its blocks, all ranks: gone when its files go."""
        payload_bytes = sum(entry.padded_bytes for entry in self.info.entries)
        return (self.info.file_bytes - payload_bytes) * self.ranks

    @property
    def owed(self) -> frozenset[int]:
        """Dead blocks whose space was not given back yet."""
        return self.dead - self.returned

    @property
    def owed_bytes(self) -> int:
        """The space of those, all ranks."""
        return self.bytes_of(self.owed)

    def bytes_of(self, entries: Iterable[int]) -> int:
        """What some of its blocks take, all ranks."""
        return sum(self.info.entries[n].padded_bytes for n in entries) * self.ranks

    def living(self) -> Iterator[tuple[int, PackEntry]]:
        """Blocks that a lookup may find, with their places."""
        return ((n, entry) for n, entry in enumerate(self.info.entries) if n not in self.dead)


class Place(NamedTuple):
    """Where a living block lies; ``nbytes`` of all ranks."""

    pack_id: PackId
    entry: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What one conversation has on disk. ``complete`` is False when a chain of it has a gap."""

    conversation: str
    tokens: int
    last_used: float
    keys: frozenset[BlockKey]
    complete: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """All conversations of one identity, most recently used first, and where every living block lies."""

    conversations: Mapping[str, Holding]
    places: Mapping[BlockKey, Sequence[Place]]

    def bytes_of(self, keys: Iterable[BlockKey]) -> int:
        """What some blocks take, all ranks; one that lies in two packs counts once."""
        return sum(self.places[key][0].nbytes for key in keys)

    def packs_of(self, keys: Iterable[BlockKey]) -> frozenset[PackId]:
        """The packs that some blocks lie in."""
        return frozenset(self.places[key][0].pack_id for key in keys)

    def sharers(self) -> Counter[BlockKey]:
        """How many conversations need each block."""
        return Counter(key for holding in self.conversations.values() for key in holding.keys)

    def only_of(self, conversations: Sequence[str]) -> dict[str, list[BlockKey]]:
        """For each of these, the blocks that go with it when all of them go: no other conversation needs them.

        One that several of them share goes with the first.
        """
        leaving = frozenset(conversations)
        kept = (holding for name, holding in self.conversations.items() if name not in leaving)
        taken = {key for holding in kept for key in holding.keys}
        going: dict[str, list[BlockKey]] = {}
        for name in conversations:
            keys = self.conversations[name].keys - taken if name in self.conversations else ()
            going[name] = sorted(keys)
            taken.update(keys)
        return going


@dataclass(slots=True)
class _Growing:
    last_used: float
    tokens: int = 0
    complete: bool = True
    keys: set[BlockKey] = field(default_factory=set)


def find_holdings(packs: Iterable[PackView]) -> Holdings:
    """Who needs what in the packs of one identity."""
    newest_first = sorted(packs, key=lambda pack: pack.pack_id, reverse=True)
    blocks = _Blocks(newest_first)
    found: dict[str, _Growing] = {}
    for pack in newest_first:
        known = found.get(pack.conversation)
        if known is None:
            known = found[pack.conversation] = _Growing(pack.last_used)
            # The newest pack names all ends; those of older packs have been overtaken.
            for key, tokens in pack.info.tips:
                blocks.follow(key, tokens, known)
        known.last_used = max(known.last_used, pack.last_used)
    held = {key for growing in found.values() for key in growing.keys}
    for key in blocks.unreached(held):
        if key not in held:
            held.update(blocks.follow(key, blocks.end_token[key], found[blocks.writer[key]]))
    by_use = sorted(found.items(), key=lambda item: (-item[1].last_used, item[0]))
    return Holdings(
        conversations={
            name: Holding(name, growing.tokens, growing.last_used, frozenset(growing.keys), growing.complete)
            for name, growing in by_use
            if growing.keys
        },
        places=blocks.places,
    )


class _Blocks:
    """Every block that a pack names: where it lies, what came before it, who wrote it."""

    def __init__(self, newest_first: Iterable[PackView]) -> None:
        self.places: dict[BlockKey, list[Place]] = {}
        self.end_token: dict[BlockKey, int] = {}
        self.writer: dict[BlockKey, str] = {}
        self._parent: dict[BlockKey, BlockKey] = {}
        for pack in newest_first:
            for n, entry in enumerate(pack.info.entries):
                self._parent.setdefault(entry.key, entry.parent)
                if n not in pack.dead:
                    place = Place(pack.pack_id, n, entry.padded_bytes * pack.ranks)
                    self.places.setdefault(entry.key, []).append(place)
                    self.end_token.setdefault(entry.key, entry.end_token)
                    self.writer.setdefault(entry.key, pack.conversation)

    def unreached(self, held: set[BlockKey]) -> list[BlockKey]:
        """Living blocks that are not held, deepest first."""
        return sorted((key for key in self.places if key not in held), key=lambda key: -self.end_token[key])

    def follow(self, tip: BlockKey, tokens: int, growing: _Growing) -> list[BlockKey]:
        """Add the chain that ends at a living block, and say what of it is new; at a dead one nothing ends any more."""
        if tip not in self.places:
            return []
        growing.tokens = max(growing.tokens, tokens)
        walked: dict[BlockKey, bool] = {}
        key: BlockKey | None = tip
        while key is not None and key != NO_KEY and key not in walked and key not in growing.keys:
            walked[key] = key in self.places
            key = self._parent.get(key)
        reached_known = key is not None and (key == NO_KEY or key in growing.keys)
        growing.complete &= reached_known and all(walked.values())
        added = [key for key, living in walked.items() if living]
        growing.keys.update(added)
        return added
