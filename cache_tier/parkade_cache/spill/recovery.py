"""Finding again what was published, and clearing up what a crash left (D3, S2, S3).

Runs in the background and hands packs out one by one, newest first, so that the newest conversation is found first. A
pack that the index knows costs one look at names and sizes; only packs that the index lost are opened. Nothing that a
writer of this process has under way is touched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from parkade_cache.errors import FormatError, IndexDamagedError, SpillError, UnsafePathError
from parkade_cache.ids import PackId
from parkade_cache.spill import layout
from parkade_cache.spill.index import IndexedPack, SpillIndex
from parkade_cache.spill.pack import PackInfo
from parkade_cache.spill.quarantine import Quarantine
from parkade_cache.spill.shelf import PackHealth, PackShelf

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveredPack:
    """A published pack: one ``PackInfo`` a rank, the entries that no lookup may find, and when it was last used."""

    infos: tuple[PackInfo, ...]
    dead: frozenset[int]
    last_used: float

    @property
    def info(self) -> PackInfo:
        """The first rank's; all ranks hold the same blocks."""
        return self.infos[0]


@dataclass(slots=True)
class RecoveryReport:
    """What recovery found and did, for the ``recover`` receipt."""

    indexed: int = 0
    adopted: int = 0
    lost: int = 0
    incomplete: int = 0
    unreadable: int = 0
    quarantined: int = 0
    removed_temporaries: int = 0
    index_rebuilt_because: str = ""


@dataclass(slots=True)
class PackBook:
    """Which packs this process knows of. ``loose`` are on disk without a row, with their bytes."""

    known: set[PackId] = field(default_factory=set)
    in_flight: set[PackId] = field(default_factory=set)
    loose: dict[PackId, int] = field(default_factory=dict)


class Recovery:
    """One pass over index and packs; may be run again after the device or the index has failed."""

    def __init__(
        self,
        *,
        index: SpillIndex,
        shelf: PackShelf,
        quarantine: Quarantine,
        book: PackBook,
        report: RecoveryReport,
        require_home: Callable[[], None] = lambda: None,
    ) -> None:
        """Shares index and book with the store, on the store's thread.

        ``require_home`` raises SpillError where the files that are missing are those of a whole disk.
        """
        self._index = index
        self._shelf = shelf
        self._quarantine = quarantine
        self._book = book
        self._report = report
        self._require_home = require_home

    def run(self) -> Iterator[RecoveredPack]:
        """Packs that the owner does not know yet, newest first; cleaning comes last."""
        unreturned: list[PackId] = []
        try:
            yield from self._indexed(unreturned)
        except IndexDamagedError as error:
            self._index.reset(because=str(error))
            unreturned.clear()
        self._report.index_rebuilt_because = self._index.empty_because
        yield from self._orphans()
        if unreturned:
            # Marks that an earlier process made may be seen and not be flushed yet: it was killed in between.
            self._index.flush()
        for pack_id in unreturned:
            self.return_space(pack_id)
        self._remove_unfinished()

    def load(self, pack_id: PackId) -> IndexedPack | None:
        """A published pack; a damaged row is made again from the files first."""
        try:
            return self._index.load(pack_id)
        except IndexDamagedError:
            raise
        except FormatError as error:
            _log.warning("%s; reading it again from the pack", error)
            self._index.delete(pack_id)
            self.adopt(pack_id)
            return self._index.load(pack_id)

    def return_space(self, pack_id: PackId) -> int:
        """Give the space of a pack's dead blocks back, or of all of it when none lives; the bytes, all ranks."""
        pack = self.load(pack_id)
        if pack is None:
            return 0
        if len(pack.dead) == len(pack.infos[0].entries):
            return self._remove_dead(pack_id, pack)
        entries = pack.dead - pack.returned
        nbytes = self._shelf.punch(pack.infos, entries)
        self._index.mark_returned(pack_id, entries, nbytes)
        return nbytes

    def adopt(self, pack_id: PackId) -> RecoveredPack | None:
        """Make a pack's row from its files, or clear it up when that cannot be; case 44."""
        try:
            return self._adopt(pack_id)
        except IndexDamagedError:
            raise
        except FormatError as error:
            self.quarantine(pack_id, str(error))
        except UnsafePathError as error:
            _log.warning("pack %s is refused and left alone: %s", pack_id, error)
            self._report.unreadable += 1
        return None

    def quarantine(self, pack_id: PackId, reason: str) -> None:
        """Take a damaged pack out of service. Files first: a row without files is dropped at the next open."""
        _log.warning("pack %s is damaged and goes to quarantine: %s", pack_id, reason)
        self._quarantine.take(self._shelf.paths(pack_id), fingerprint=self._shelf.fingerprint)
        self._forget(pack_id)
        self._report.quarantined += 1

    def _indexed(self, unreturned: list[PackId]) -> Iterator[RecoveredPack]:
        for pack_id in self._index.pack_ids():
            if pack_id in self._book.known:
                continue
            pack = self._load_checked(pack_id)
            if pack is None:
                continue
            if pack.dead - pack.returned:
                unreturned.append(pack_id)
            if len(pack.dead) == len(pack.infos[0].entries):
                continue
            self._report.indexed += 1
            yield self._hand_out(pack_id, RecoveredPack(pack.infos, pack.dead, pack.last_used))

    def _load_checked(self, pack_id: PackId) -> IndexedPack | None:
        try:
            pack = self._index.load(pack_id)
        except IndexDamagedError:
            raise
        except FormatError as error:
            # Only this row is damaged: the pack is an orphan now and its row is made again from its files.
            _log.warning("%s; reading it again from the pack", error)
            self._index.delete(pack_id)
            return None
        if pack is None:
            return None
        health = self._shelf.check(pack.infos)
        if health is PackHealth.WHOLE:
            return pack
        self._give_up(pack_id, health)
        return None

    def _give_up(self, pack_id: PackId, health: PackHealth) -> None:
        if health is PackHealth.DAMAGED:
            self.quarantine(pack_id, "a file has another size than when it was published")
            return
        self._require_home()
        _log.warning("pack %s is in the index, but its files are %s", pack_id, health)
        with contextlib.suppress(UnsafePathError):
            self._shelf.remove(pack_id)
        # Whoever removed the others may have been killed before that was flushed, and only the row keeps them dead.
        self._shelf.flush_names(pack_id)
        self._forget(pack_id)
        self._report.lost += 1

    def _orphans(self) -> Iterator[RecoveredPack]:
        for pack_id in self._shelf.pack_ids():
            # Asked anew for each: the owner publishes while this runs.
            if pack_id in self._book.in_flight or self._index.has(pack_id):
                continue
            pack = self._adopt_or_leave(pack_id)
            if pack is not None and pack_id not in self._book.known:
                yield self._hand_out(pack_id, pack)

    def _adopt_or_leave(self, pack_id: PackId) -> RecoveredPack | None:
        """A device error on one pack does not end the recovery of the others; a later pass tries it again."""
        try:
            return self.adopt(pack_id)
        except IndexDamagedError:
            raise
        except OSError as error:
            _log.warning("pack %s cannot be read now: %s", pack_id, error)
            self._report.unreadable += 1
            self._book.loose[pack_id] = self._shelf.disk_bytes(pack_id)
            return None

    def _adopt(self, pack_id: PackId) -> RecoveredPack | None:
        if not self._shelf.is_complete(pack_id):
            if self._shelf.disk_bytes(pack_id) == 0:
                return None  # dropped since it was listed
            # Some rank never finished, so the pack was never published.
            self._shelf.remove(pack_id)
            self._book.loose.pop(pack_id, None)
            self._report.incomplete += 1
            return None
        infos = self._shelf.read_infos(pack_id)
        dead = self._shelf.holes(infos)
        if len(dead) == len(infos[0].entries):
            self._shelf.remove(pack_id)
            self._book.loose.pop(pack_id, None)
            return None
        # A row says that the pack is published: its names are flushed first, its writer may not have come to it (W2).
        self._shelf.flush_names(pack_id)
        returned_bytes = sum(info.entries[n].padded_bytes for info in infos for n in dead)
        last_used = infos[0].header.created_at
        self._index.publish(infos, last_used=last_used, dead=dead, returned_bytes=returned_bytes)
        self._book.loose.pop(pack_id, None)
        self._report.adopted += 1
        return RecoveredPack(infos, dead, last_used)

    def _hand_out(self, pack_id: PackId, pack: RecoveredPack) -> RecoveredPack:
        self._book.known.add(pack_id)
        return pack

    def _remove_dead(self, pack_id: PackId, pack: IndexedPack) -> int:
        self._shelf.remove(pack_id)
        self._forget(pack_id)
        return pack.disk_bytes

    def _forget(self, pack_id: PackId) -> None:
        self._index.delete(pack_id)
        self._book.known.discard(pack_id)
        self._book.loose.pop(pack_id, None)

    def _remove_unfinished(self) -> None:
        for path in self._shelf.unfinished():
            pack_id = layout.pack_id_of(path.name, suffix=layout.TEMPORARY_SUFFIX)
            if pack_id is None or pack_id in self._book.in_flight:
                continue
            with contextlib.suppress(UnsafePathError, SpillError):
                self._shelf.remove_unfinished(path)
                self._report.removed_temporaries += 1
