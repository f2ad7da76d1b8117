"""Which blocks go when the disk must hold less: by conversation, oldest first, shared blocks last (D6).

Pure. A block that no conversation's chain reaches any more (a longer state superseded it, case 35) goes before any
conversation; a block that several conversations reach goes with the last of them (case 46). The owner of a running pod
plans with its ledger; this plan needs only what is on the disk, for the start and for tools that work offline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parkade_cache.ids import NO_KEY, BlockKey, PackId
from parkade_cache.spill.recovery import RecoveredPack


@dataclass(frozen=True, slots=True)
class PlannedDrop:
    """Entries of one pack that go; ``conversation`` is empty for blocks that none reaches."""

    conversation: str
    pack_id: PackId
    entries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    pack_id: PackId
    entry: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Conversation:
    id: str
    last_used: float
    chain: frozenset[BlockKey]


def plan_eviction(packs: Sequence[RecoveredPack], *, missing_bytes: int) -> tuple[PlannedDrop, ...]:
    """What to drop so that at least ``missing_bytes`` come back, all ranks together; all there is when less."""
    if missing_bytes <= 0:
        return ()
    places = _places(packs)
    conversations = _conversations(packs)
    needed = Counter(key for conversation in conversations for key in conversation.chain)
    ledger = _Ledger(packs)
    drops: list[PlannedDrop] = []
    freed_bytes = 0
    for name, keys in _goes(places, conversations, needed):
        gone = [place for key in keys for place in places[key]]
        drops += _by_pack(name, gone)
        freed_bytes += sum(ledger.take(place) for place in gone)
        if freed_bytes >= missing_bytes:
            break
    return tuple(drops)


class _Ledger:
    """What each drop brings back: the block, and with a pack's last block the rest of its files."""

    def __init__(self, packs: Iterable[RecoveredPack]) -> None:
        self._live: dict[PackId, int] = {}
        self._rest_bytes: dict[PackId, int] = {}
        for pack in packs:
            pack_id = pack.info.header.pack_id
            payload_bytes = sum(entry.padded_bytes for entry in pack.info.entries)
            self._live[pack_id] = len(pack.info.entries) - len(pack.dead)
            self._rest_bytes[pack_id] = (pack.info.file_bytes - payload_bytes) * len(pack.infos)

    def take(self, place: _Place) -> int:
        self._live[place.pack_id] -= 1
        rest_bytes = 0 if self._live[place.pack_id] else self._rest_bytes[place.pack_id]
        return place.nbytes + rest_bytes


def _goes(
    places: dict[BlockKey, list[_Place]], conversations: list[_Conversation], needed: Counter[BlockKey]
) -> Iterator[tuple[str, list[BlockKey]]]:
    yield "", [key for key in places if not needed[key]]
    for conversation in conversations:
        needed.subtract(conversation.chain)
        yield conversation.id, [key for key in places if key in conversation.chain and not needed[key]]


def _places(packs: Iterable[RecoveredPack]) -> dict[BlockKey, list[_Place]]:
    places: dict[BlockKey, list[_Place]] = {}
    for pack in packs:
        for n, entry in enumerate(pack.info.entries):
            if n not in pack.dead:
                nbytes = entry.padded_bytes * len(pack.infos)
                places.setdefault(entry.key, []).append(_Place(pack.info.header.pack_id, n, nbytes))
    return places


def _conversations(packs: Iterable[RecoveredPack]) -> list[_Conversation]:
    """Least recently used first; a conversation's newest pack has its tips."""
    newest: dict[str, RecoveredPack] = {}
    parents: dict[BlockKey, BlockKey] = {}
    for pack in packs:
        parents.update((entry.key, entry.parent) for entry in pack.info.entries)
        known = newest.get(pack.info.header.conversation)
        if known is None or known.info.header.pack_id < pack.info.header.pack_id:
            newest[pack.info.header.conversation] = pack
    found = [
        _Conversation(name, pack.last_used, frozenset(_chain([key for key, _ in pack.info.tips], parents)))
        for name, pack in newest.items()
    ]
    return sorted(found, key=lambda conversation: (conversation.last_used, conversation.id))


def _chain(tips: Iterable[BlockKey], parents: dict[BlockKey, BlockKey]) -> Iterator[BlockKey]:
    seen: set[BlockKey] = set()
    for tip in tips:
        key = tip
        while key != NO_KEY and key not in seen:
            seen.add(key)
            yield key
            key = parents.get(key, NO_KEY)


def _by_pack(conversation: str, places: Iterable[_Place]) -> list[PlannedDrop]:
    entries: dict[PackId, list[int]] = {}
    for place in places:
        entries.setdefault(place.pack_id, []).append(place.entry)
    return [PlannedDrop(conversation, pack_id, tuple(sorted(gone))) for pack_id, gone in entries.items()]
