"""The owner's side of the disk: room and budget before a write, publishing after it, dropping, finding again.

Blocking, on the owner's I/O thread, never from a step hook and never under the ledger's lock. What must stay true: a
pack is found only when every rank's file is complete and its index row is committed (W2); nothing published is lost by
a crash between any two steps (D3, S2); no two writes are admitted to the same bytes (D2). Errors of the device come
out as SpillError or as an outcome, never as a loss; nothing is written where another directory has taken the place of
the one that was opened (D8).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Self, TypeVar

from parkade_cache.errors import (
    DirectoryInUseError,
    FormatError,
    IndexDamagedError,
    SettingsError,
    SpillError,
    UnsafePathError,
)
from parkade_cache.ids import ConversationId, PackId
from parkade_cache.spill import layout
from parkade_cache.spill.budget import HOUR_SECONDS, Shortage, SpaceReading, WriteBudget, min_free_bytes, plan_space
from parkade_cache.spill.clock import Clock
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.foreign import ForeignFiles
from parkade_cache.spill.generation import GenerationLife, open_generation, store_generation
from parkade_cache.spill.identity import Identity
from parkade_cache.spill.index import SpillIndex
from parkade_cache.spill.layout import IdentityFolder
from parkade_cache.spill.lock import DirectoryLock
from parkade_cache.spill.outcome import Refusal, Reservation, WriteOutcome
from parkade_cache.spill.pack import PackInfo, pack_file_bytes, same_shape
from parkade_cache.spill.patience import HeardFileSystem, Patience
from parkade_cache.spill.quarantine import Quarantine
from parkade_cache.spill.recovery import PackBook, RecoveredPack, Recovery, RecoveryReport
from parkade_cache.spill.shelf import PackShelf

DAY_SECONDS = 86400.0

_Result = TypeVar("_Result")

_PROBE = b"parkade"
_NO_ROOM_BYTES = 64 << 10
"""A file system with less than this takes no index: whatever error that brings, it is full."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillConfig:
    """Where and how much (D2). ``min_free_bytes`` None is max(10 GiB, 5 %); a budget of None is no limit, 0 no writes.

    ``block_bytes`` is one rank's share of a block. ``write_budget_urgent_bytes`` of the hourly budget are kept for
    write-outs; background writes leave them.
    """

    root: Path
    capacity_bytes: int
    min_free_bytes: int | None
    write_budget_bytes_per_hour: int | None
    block_bytes: int
    ranks: int
    write_budget_urgent_bytes: int = 0

    def check(self) -> None:
        """SettingsError for what could never hold a block."""
        least_bytes = pack_file_bytes([self.block_bytes]) * self.ranks
        if self.capacity_bytes < least_bytes:
            raise SettingsError(
                f"spill size {self.capacity_bytes} is below one block of {least_bytes} bytes: raise spill.size"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillUsage:
    """What the disk tier takes and may take. ``budget_remaining_bytes`` None is no limit."""

    capacity_bytes: int
    used_bytes: int
    foreign_bytes: int
    reserved_bytes: int
    free_bytes: int
    floor_bytes: int
    budget_remaining_bytes: int | None
    packs: int
    entries: int
    quarantined: int

    @property
    def over_bytes(self) -> int:
        """What must go for the capacity to hold, as after a lowered size (case 45)."""
        return max(0, self.used_bytes + self.foreign_bytes + self.reserved_bytes - self.capacity_bytes)


class SpillStore:
    """An open spill directory. One thread at a time."""

    def __init__(
        self,
        config: SpillConfig,
        identity: Identity,
        *,
        fs: FileSystem,
        clock: Clock,
        entropy: Callable[[int], int],
        lock: DirectoryLock,
    ) -> None:
        """Use ``open``."""
        self._config = config
        self._identity = identity
        self.patience = Patience()
        """Without limit until it is given one: who must not hang with the disk sets ``seconds``."""
        self._fs = fs = HeardFileSystem(fs, self.patience.heard)
        self._clock = clock
        self._entropy = entropy
        self._lock = lock
        self._quarantine = Quarantine(fs, config.root, capacity_bytes=config.capacity_bytes)
        self._foreign = ForeignFiles(fs, config.root)
        self._reservations: dict[PackId, Reservation] = {}
        self._held: Counter[PackId] = Counter()
        self._owed: set[PackId] = set()
        self._undropped: dict[PackId, set[int]] = {}
        self._unended: list[Callable[[], None]] = []
        self._owed_life: GenerationLife | None = None
        self.refused_bytes = 0
        """The last write that the free-space floor refused, and that did not fit since."""
        self._closed = False
        self._last_id = 0
        self._index_damage = ""
        self.recovery_report = RecoveryReport()
        self._generation = open_generation(fs, clock, config.root, identity)
        self._open_identity()
        self.direct = fs.supports_direct(self.rank_folder(0) / "tmp")
        self._budget = WriteBudget(
            config.write_budget_bytes_per_hour, clock, kept_for_urgent_bytes=config.write_budget_urgent_bytes
        )
        self._seed_budget()

    @classmethod
    def open(
        cls,
        config: SpillConfig,
        identity: Identity,
        *,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        entropy: Callable[[int], int] = secrets.randbits,
        wait_s: float = 0.0,
    ) -> SpillStore:
        """Lock the directory and open its index; does not look at the packs (S3).

        SettingsError when the capacity is below one block, DirectoryInUseError when another process has the directory
        after ``wait_s``, SpillError when it cannot be used.
        """
        config.check()
        fs, clock = fs or FileSystem(), clock or Clock()
        doing = f"opening spill directory {config.root}, which must exist or be creatable, and be writable"
        try:
            _prepare_root(fs, config.root)
            lock = DirectoryLock.acquire(fs, clock, config.root, wait_s=wait_s)
            try:
                return cls(config, identity, fs=fs, clock=clock, entropy=entropy, lock=lock)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            _raise_at_open(fs, config.root, error, doing)

    def close(self) -> None:
        """Let go of index and lock; safe to call twice. A pack that is finished later is adopted (case 40)."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(SpillError):
                # What hangs now is let go of when the process ends.
                self.patience.call(self._let_go)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- names -------------------------------------------------------------------------------------------------------

    @property
    def identity_folder(self) -> Path:
        """The folder of the identity in force; each rank's files are in ``rank-N`` below it."""
        return self._folder.path

    @property
    def fingerprint(self) -> str:
        """The identity in force, with its generation: what every pack's header must say."""
        return self._folder.fingerprint

    @property
    def ranks(self) -> int:
        """How many files make one pack."""
        return self._config.ranks

    def rank_folder(self, rank: int) -> Path:
        """Where one rank's mover writes."""
        return self._folder.rank(rank)

    def path_of(self, pack_id: PackId, rank: int) -> Path:
        """One rank's file of a published pack."""
        return layout.pack_path(self.rank_folder(rank), pack_id)

    def new_pack_id(self) -> PackId:
        """A name ordered by time, also when the clock goes back; until it is published or cancelled it is in flight."""
        self._last_id = max(self._last_id + 1, self._stamp(self._clock.now()))
        pack_id = PackId(f"{self._last_id:016x}{self._entropy(64):016x}")
        self._book.in_flight.add(pack_id)
        return pack_id

    # -- finding again -----------------------------------------------------------------------------------------------

    @property
    def needs_recovery(self) -> bool:
        """Whether ``recover`` must run again: a damaged index, a pack without a row, or a pass that came to no end."""
        return self._index_damage != "" or self._adoptable

    def recover(self) -> Iterator[RecoveredPack]:
        """Published packs that were not handed out yet, newest first, then clearing up (D3, S2, S3, case 44).

        May be interleaved with every other call, and run again at any time; SpillError when the device fails.
        """
        packs = self._recover()
        while True:
            pack = self.patience.call(lambda: next(packs, None), too_late=self._not_handed_out)
            if pack is None:
                return
            yield pack

    def _recover(self) -> Iterator[RecoveredPack]:
        try:
            with self._guarded("recovering"):
                if self._index_damage:
                    self._index.reset(because=self._index_damage)
                    self._index_damage = ""
                self._adoptable = False
                yield from self._recovery().run()
                self._scan()
        except SpillError:
            self._adoptable = True
            raise

    def _not_handed_out(self, pack: RecoveredPack | None) -> None:
        if pack is not None:
            self._hand_out_again(pack.info.header.pack_id)

    def _hand_out_again(self, pack_id: PackId) -> None:
        """The owner does not have the pack, whatever the disk says: the next ``recover`` brings it."""
        self._book.known.discard(pack_id)
        self._adoptable = True

    def load(self, pack_id: PackId) -> RecoveredPack | None:
        """A published pack from the index; None when it is not published."""
        return self._do("loading", lambda: self._load(pack_id))

    def _load(self, pack_id: PackId) -> RecoveredPack | None:
        pack = self._recovery().load(pack_id)
        return None if pack is None else RecoveredPack(pack.infos, pack.dead, pack.last_used)

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, *, urgent: bool = False, pack_id: PackId | None = None) -> Reservation | Refusal:
        """Room and budget for one pack of ``nbytes``, all ranks together, or why not (D2).

        ``pack_id`` names a pack that was named before its room was asked for, as streams are.

        A refusal changes nothing on the disk, but that other identities' files and quarantined ones go when that
        makes room (D1). REFUSED_CAPACITY asks the owner to evict ``missing_bytes`` and try again.
        """
        return self._admit(
            lambda: self._refusal(nbytes, urgent=urgent) or self._reserved(nbytes, pack_id), too_late=self._take_back
        )

    def grow(self, reservation: Reservation, nbytes: int, *, urgent: bool = False) -> Reservation | Refusal:
        """Room and budget for ``nbytes`` more in a pack that is being streamed; a refusal leaves what it has."""
        # What comes too late is given back with the rest of the pack.
        return self._admit(
            lambda: self._refusal(nbytes, urgent=urgent) or self._grown(reservation, nbytes), too_late=lambda _: None
        )

    def _admit(
        self, ask: Callable[[], Reservation | Refusal], *, too_late: Callable[[Reservation | Refusal], None]
    ) -> Reservation | Refusal:
        try:
            return self.patience.call(lambda: self._asked_at_home(ask), too_late=too_late)
        except (OSError, IndexDamagedError) as error:
            self._note(error)
            return Refusal(WriteOutcome.FAILED, 0, str(error))

    def _asked_at_home(self, ask: Callable[[], Reservation | Refusal]) -> Reservation | Refusal:
        self._require_home()
        return ask()

    def _take_back(self, answer: Reservation | Refusal) -> None:
        if isinstance(answer, Reservation):
            self._end(answer, written_bytes=0)

    def _grown(self, reservation: Reservation, nbytes: int) -> Reservation:
        grown = replace(
            reservation,
            nbytes=reservation.nbytes + nbytes,
            more=(*reservation.more, (nbytes, self._budget.take(nbytes))),
        )
        self._reservations[reservation.pack_id] = grown
        return grown

    def publish(self, infos: Sequence[PackInfo], reservation: Reservation) -> None:
        """Commit the index row of a pack that every rank has finished: from here on it is published (W2).

        FormatError when the ranks' files do not belong together; SpillError when the row cannot be committed, and
        then ``cancel`` leaves the complete files to be adopted.
        """
        self._check_finished(infos, reservation)
        self._do(
            "publishing",
            lambda: self._publish(infos, reservation),
            too_late=lambda _: self._hand_out_again(reservation.pack_id),
        )

    def _publish(self, infos: Sequence[PackInfo], reservation: Reservation) -> None:
        self._index.publish(infos, last_used=infos[0].header.created_at)
        self._book.known.add(reservation.pack_id)
        self._end(reservation, written_bytes=sum(info.file_bytes for info in infos))

    def cancel(self, reservation: Reservation, *, written_bytes: int = 0) -> None:
        """Give room and budget back after a failed write; ``written_bytes`` reached the device and stay spent.

        What ranks left unfinished is removed (W7). A pack complete on every rank stays: its data is good, only the
        news of it failed, so it is adopted by the next ``recover`` (case 47).
        """
        self._give_up(lambda: self._cancel(reservation, written_bytes))

    def _cancel(self, reservation: Reservation, written_bytes: int) -> None:
        self._end(reservation, written_bytes=written_bytes)
        with self._guarded("cancelling"):
            if self._shelf.is_complete(reservation.pack_id):
                self._book.loose[reservation.pack_id] = self._shelf.disk_bytes(reservation.pack_id)
                self._adoptable = True
            else:
                self._shelf.remove(reservation.pack_id)

    def discard(self, reservation: Reservation, *, written_bytes: int = 0) -> None:
        """Cancel a write whose conversation is gone: nothing of it stays, complete or not (case 69).

        Only when every rank's writer has ended, or one of them may still rename its file into place.
        """
        self._give_up(lambda: self._discard(reservation, written_bytes))

    def _discard(self, reservation: Reservation, written_bytes: int) -> None:
        self._end(reservation, written_bytes=written_bytes)
        with self._guarded("discarding"):
            self._shelf.remove(reservation.pack_id)

    def _give_up(self, end: Callable[[], None]) -> None:
        """End a reservation; one that cannot be asked for now, since the disk hangs, is ended by ``resume``."""
        if self.patience.lost:
            self._unended.append(end)
        self.patience.call(end)

    # -- letting go --------------------------------------------------------------------------------------------------

    def drop(self, pack_id: PackId, entries: Iterable[int]) -> int:
        """``drop_many`` for one pack."""
        return self.drop_many({pack_id: entries})

    def drop_many(self, entries: Mapping[PackId, Iterable[int]]) -> int:
        """Blocks that nobody needs: marked dead on the device, then their space returned; the bytes, all ranks (D6).

        With its last block a pack's files go. After SpillError no lookup may use the blocks; they are marked and their
        space comes back with the next ``resume``. A held pack's space comes back at ``unhold``.
        """
        wanted = {pack_id: set(numbers) for pack_id, numbers in entries.items()}
        try:
            return self._do("dropping", lambda: self._drop(wanted))
        except SpillError:
            for pack_id, numbers in wanted.items():
                self._undropped.setdefault(pack_id, set()).update(numbers)
            raise

    def _drop(self, entries: Mapping[PackId, Iterable[int]]) -> int:
        known = {pack_id: self._known_entries(pack_id, numbers) for pack_id, numbers in entries.items()}
        going = {pack_id: numbers for pack_id, numbers in known.items() if numbers}
        if not going:
            return 0
        self._index.mark_dead(going)
        self._owed.update(going)
        return sum(self._return_owed(pack_id) for pack_id in going)

    def hold(self, pack_id: PackId) -> None:
        """A mover reads this pack: no hole is made and no file removed until ``unhold`` (D6)."""
        self._held[pack_id] += 1

    def unhold(self, pack_id: PackId) -> int:
        """A mover is done; the bytes that drops meanwhile now return."""
        self._held[pack_id] -= 1
        return self._do("dropping", lambda: self._return_owed(pack_id))

    def touch(self, conversations: Iterable[ConversationId], now: float) -> None:
        """Conversations were used at ``now``, seconds since the epoch; in one transaction."""
        self._do("touching", lambda: self._index.touch(conversations, now))

    def quarantine(self, pack_id: PackId, reason: str) -> None:
        """Take a pack with bad blocks out of service (D4); its files stay for a person to look at, within bounds.

        After SpillError it is handed out by the next ``recover``, to be judged once more by a disk that works.
        """
        try:
            self._do("quarantining", lambda: self._recovery().quarantine(pack_id, reason))
        except SpillError:
            self._hand_out_again(pack_id)
            raise

    def make_room(self, nbytes: int) -> int:
        """Remove quarantined and other identities' files until ``nbytes`` fit (D1); what then still is missing."""
        return self._do("making room", lambda: self._make_room(nbytes).largest_bytes)

    def new_generation(self, *, life: GenerationLife = GenerationLife.UNTIL_RESTART) -> None:
        """New weights: nothing written so far is found again (trap 14). Writes under way can no longer be published.

        By default the new packs are not found after a restart either: weights that were put into the running engine
        are not the ones the next start loads. DURABLE is for weights replaced where the engine loads them from.
        After SpillError nothing is done any more for the old weights: every call fails until ``resume`` or another
        call of this one has begun the new generation.
        """
        self._owed_life = life
        self.patience.call(lambda: self._begin_generation(life))

    def _begin_generation(self, life: GenerationLife) -> None:
        with self._translated("beginning a new generation"):
            self._require_root()
            old = self._folder
            self._generation = store_generation(
                self._fs, self._config.root, self._identity, self._generation.next(life)
            )
            self._index.close()
            self._reservations.clear()
            self._undropped.clear()
            self._open_identity()
            self._owed_life = None
            layout.remove_tree(self._fs, old.path)

    def set_limits(
        self, *, capacity_bytes: int, min_free_bytes: int | None, write_budget_bytes_per_hour: int | None
    ) -> None:
        """Another capacity, free-space floor and budget from now on; nothing goes before somebody needs the room."""
        self._config = replace(
            self._config,
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
            write_budget_bytes_per_hour=write_budget_bytes_per_hour,
        )
        self._budget.set_limit(write_budget_bytes_per_hour)
        self._quarantine.set_capacity(capacity_bytes)

    # -- looking -----------------------------------------------------------------------------------------------------

    def usage(self) -> SpillUsage:
        """What is taken and left now."""
        return self._do("measuring", self._usage)

    def missing_space(self) -> int:
        """Bytes of the file system that the write refused last still lacks; 0 once it would fit."""
        return self._do("measuring", self._missing_space)

    def _missing_space(self) -> int:
        missing = plan_space(self._reading(), self.refused_bytes).free_bytes if self.refused_bytes else 0
        if not missing:
            self.refused_bytes = 0
        return missing

    def _usage(self) -> SpillUsage:
        self._scan_once()
        reading, totals = self._reading(), self._index.totals()
        return SpillUsage(
            capacity_bytes=reading.capacity_bytes,
            used_bytes=reading.used_bytes,
            foreign_bytes=reading.foreign_bytes,
            reserved_bytes=reading.reserved_bytes,
            free_bytes=reading.free_bytes,
            floor_bytes=reading.floor_bytes,
            budget_remaining_bytes=self._budget.remaining_bytes(),
            packs=totals.packs,
            entries=totals.entries,
            quarantined=self._quarantine.files,
        )

    def probe(self) -> None:
        """SpillError while the directory cannot be written and read, or is not the one that was opened (D8)."""
        if self._owed_life is None:
            self._do("probing", self._probe)

    def _probe(self) -> None:
        path = self._folder.path / "probe"
        layout.write_small_file(self._fs, path, _PROBE)
        if layout.read_small_file(self._fs, path, from_device=True) != _PROBE:
            raise SpillError(errno.EIO, "what was just written reads as something else")

    def resume(self) -> None:
        """Once the disk works again: do what could not be done while it did not. SpillError when it still cannot."""
        if self._owed_life is not None:
            self.new_generation(life=self._owed_life)
        while self._unended:
            self.patience.call(self._unended[-1])
            self._unended.pop()
        undropped, self._undropped = self._undropped, {}
        self.drop_many(undropped)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_identity(self) -> None:
        root = self._config.root
        self._folder = IdentityFolder(root, self._identity.at_generation(self._generation.number))
        self._book = PackBook()
        self._scanned = False
        self._adoptable = False
        self._index_damage = ""
        for path in (layout.identities_folder(root), self._folder.path):
            layout.ensure_folder(self._fs, path)
            # At every start: the process that made it may have been killed before it could flush.
            self._fs.flush_folder(path.parent)
        self._shelf = PackShelf(self._fs, self._folder, ranks=self._config.ranks)
        self._shelf.prepare()
        self._describe_identity()
        self._index: SpillIndex = SpillIndex.open(self._fs, self._folder.index, identity=self._folder.fingerprint)
        self._last_id = self._newest_stamp()
        self._home = _place_of(self._fs.lstat(self._folder.path))
        self._root_place = _place_of(self._fs.lstat(root))

    def _stamp(self, at_s: float) -> int:
        return (int(at_s * 1000) & ((1 << 48) - 1)) << 16

    def _newest_stamp(self) -> int:
        """Names go on after those of an earlier process, unless its clock was more than a day ahead."""
        try:
            newest = self._index.newest()
        except IndexDamagedError as error:
            self._note(error)
            return 0
        stamp = int(newest[:16], 16) if newest else 0
        return stamp if stamp <= self._stamp(self._clock.now() + DAY_SECONDS) else 0

    def _describe_identity(self) -> None:
        path = self._folder.path / "identity.json"
        with contextlib.suppress(FileNotFoundError, FormatError):
            if layout.read_small_file(self._fs, path) == self._identity.to_json():
                return
        layout.write_small_file(self._fs, path, self._identity.to_json())

    def _seed_budget(self) -> None:
        now = self._clock.now()
        try:
            written = self._index.written_since(now - HOUR_SECONDS)
        except IndexDamagedError as error:
            self._note(error)
            return
        self._budget.seed((now - created, nbytes) for created, nbytes in written)

    def _recovery(self) -> Recovery:
        return Recovery(
            index=self._index,
            shelf=self._shelf,
            quarantine=self._quarantine,
            book=self._book,
            report=self.recovery_report,
            require_home=self._require_home,
        )

    def _scan_once(self) -> None:
        if not self._scanned:
            self._scan()

    def _scan(self) -> None:
        self._foreign.scan(own_fingerprint=self._folder.fingerprint)
        self._quarantine.scan()
        indexed = set(self._index.pack_ids())
        on_disk = set(self._shelf.pack_ids()) | self._unfinished_ids()
        self._book.loose = {
            pack_id: self._shelf.disk_bytes(pack_id) for pack_id in on_disk - indexed - self._book.in_flight
        }
        self._index.keep_room()
        self._scanned = True

    def _unfinished_ids(self) -> set[PackId]:
        names = (path.name for path in self._shelf.unfinished())
        found = (layout.pack_id_of(name, suffix=layout.TEMPORARY_SUFFIX) for name in names)
        return {pack_id for pack_id in found if pack_id is not None}

    def _reading(self) -> SpaceReading:
        space = self._fs.space(self._config.root)
        outstanding = self._reservations.values()
        return SpaceReading(
            capacity_bytes=self._config.capacity_bytes,
            used_bytes=self._index.totals().disk_bytes + sum(self._book.loose.values()),
            foreign_bytes=self._foreign.nbytes + self._quarantine.nbytes,
            reserved_bytes=sum(reservation.nbytes for reservation in outstanding),
            unwritten_bytes=sum(max(0, r.nbytes - self._shelf.disk_bytes(r.pack_id)) for r in outstanding),
            free_bytes=space.free_bytes,
            floor_bytes=min_free_bytes(self._config.min_free_bytes, space),
        )

    def _refusal(self, nbytes: int, *, urgent: bool) -> Refusal | None:
        capacity = self._config.capacity_bytes
        if nbytes > capacity:
            reason = f"one write of {nbytes} bytes is above the capacity of {capacity}"
            return Refusal(WriteOutcome.REFUSED_SIZE, 0, reason)
        short = self._budget.missing_bytes(nbytes, urgent=urgent)
        if short:
            return Refusal(WriteOutcome.REFUSED_BUDGET, 0, f"the hour's write budget is {short} bytes short")
        self._scan_once()
        refusal = _space_refusal(self._make_room(nbytes))
        if refusal is not None and refusal.outcome is WriteOutcome.REFUSED_FREE_SPACE:
            self.refused_bytes = nbytes
        elif refusal is None and nbytes >= self.refused_bytes:
            self.refused_bytes = 0
        return refusal

    def _known_entries(self, pack_id: PackId, numbers: Iterable[int]) -> list[int]:
        pack = self._recovery().load(pack_id)
        return [] if pack is None else [n for n in set(numbers) if n in range(len(pack.infos[0].entries))]

    def _return_owed(self, pack_id: PackId) -> int:
        if self._held[pack_id] > 0 or pack_id not in self._owed:
            return 0
        nbytes = self._recovery().return_space(pack_id)
        self._owed.discard(pack_id)
        return nbytes

    def _make_room(self, nbytes: int) -> Shortage:
        shortage = plan_space(self._reading(), nbytes)
        removable = self._quarantine.nbytes + self._foreign.removable_bytes
        if not removable or shortage.free_bytes > max(removable, shortage.capacity_bytes):
            # What could go would not bring the free space, so nothing goes.
            return shortage
        missing = shortage.largest_bytes
        self._foreign.clear(missing - self._quarantine.clear(missing))
        return plan_space(self._reading(), nbytes)

    def _reserved(self, nbytes: int, pack_id: PackId | None) -> Reservation:
        if pack_id is not None:
            self._book.in_flight.add(pack_id)
        reservation = Reservation(pack_id or self.new_pack_id(), nbytes, self._budget.take(nbytes))
        self._reservations[reservation.pack_id] = reservation
        return reservation

    def _end(self, reservation: Reservation, *, written_bytes: int) -> None:
        # A caller may hold the value from before the pack grew; what is settled is all that was taken.
        latest = self._reservations.pop(reservation.pack_id, reservation)
        self._book.in_flight.discard(reservation.pack_id)
        first_bytes = latest.nbytes - sum(nbytes for nbytes, _ in latest.more)
        *older, (_, newest) = [(first_bytes, latest.share), *latest.more]
        for nbytes, share in older:
            spent_bytes = min(nbytes, written_bytes)
            self._budget.settle(share, spent_bytes)
            written_bytes -= spent_bytes
        self._budget.settle(newest, written_bytes)

    def _check_finished(self, infos: Sequence[PackInfo], reservation: Reservation) -> None:
        expected = [(reservation.pack_id, self.fingerprint, n, self._config.ranks) for n in range(self._config.ranks)]
        found = [(h.pack_id, h.identity, h.rank, h.ranks) for h in (info.header for info in infos)]
        if found != expected:
            raise FormatError(f"pack {reservation.pack_id} is not one finished file of this generation for each rank")
        if not all(same_shape(infos[0], info) for info in infos):
            raise FormatError(f"the ranks of pack {reservation.pack_id} wrote different blocks")

    def _note(self, error: Exception) -> None:
        if isinstance(error, IndexDamagedError):
            self._index_damage = str(error)
            _log.warning("the spill index is damaged and will be rebuilt from the packs: %s", error)

    def _let_go(self) -> None:
        self._index.close()
        self._lock.release()

    def _is_place(self, path: Path, place: tuple[int, int]) -> bool:
        try:
            return _place_of(self._fs.lstat(path)) == place
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _require_root(self) -> None:
        root = self._config.root
        if not self._is_place(root, self._root_place):
            raise SpillError(
                errno.ESTALE,
                f"{root} is gone or was replaced; mount again what was there, or restart the pod to use what is there",
            )

    def _require_home(self) -> None:
        """SpillError while the directory is not the one that was opened.

        Where a disk was unmounted, the node's own lies under its mount point: nothing may be written there, and what is
        not there is not lost.
        """
        if self._owed_life is not None:
            raise SpillError(errno.ESTALE, "new weights: the old ones' blocks could not be put away yet")
        if not self._is_place(self._folder.path, self._home):
            self._require_root()
            raise SpillError(
                errno.ESTALE, f"what was in {self._config.root} was removed; restart the pod to begin anew there"
            )

    def _do(
        self, doing: str, work: Callable[[], _Result], *, too_late: Callable[[_Result], None] = lambda _: None
    ) -> _Result:
        """``work`` on the directory that was opened, for as long as patience lasts."""

        def guarded() -> _Result:
            with self._guarded(doing):
                return work()

        return self.patience.call(guarded, too_late=too_late)

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Nothing is done but in the directory that was opened; errors as ``_translated`` has them."""
        with self._translated(doing):
            self._require_home()
            yield

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """The device's errors as SpillError; a damaged index as one too, healed by the next ``recover``."""
        try:
            yield
        except IndexDamagedError as error:
            self._note(error)
            raise SpillError(errno.EIO, f"{doing}: {error}; recover again") from error
        except OSError as error:
            layout.raise_spill_error(error, f"{doing} in spill directory {self._config.root}")


def _space_refusal(shortage: Shortage) -> Refusal | None:
    if shortage.free_bytes > shortage.capacity_bytes:
        reason = f"the free-space floor leaves {shortage.free_bytes} bytes too little"
        return Refusal(WriteOutcome.REFUSED_FREE_SPACE, shortage.free_bytes, reason)
    if shortage.capacity_bytes:
        reason = f"the capacity is {shortage.capacity_bytes} bytes short"
        return Refusal(WriteOutcome.REFUSED_CAPACITY, shortage.capacity_bytes, reason)
    return None


def _place_of(found: os.stat_result) -> tuple[int, int]:
    """What tells a folder from any other that may come to lie in its place."""
    return found.st_dev, found.st_ino


def _raise_at_open(fs: FileSystem, root: Path, error: OSError, doing: str) -> NoReturn:
    """One line for whoever started the pod: which directory, and what is wrong with it."""
    if isinstance(error, DirectoryInUseError | UnsafePathError):
        raise error
    code, reason = error.errno or errno.EIO, error.strerror or str(error)
    with contextlib.suppress(OSError):
        if fs.space(root).free_bytes < _NO_ROOM_BYTES:
            code, reason = errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; free some there ({reason})"
    raise SpillError(code, f"{doing}: {reason}") from error


def _prepare_root(fs: FileSystem, root: Path) -> None:
    with contextlib.suppress(FileExistsError):
        fs.make_folder(root)
    if not root.is_dir():
        raise SpillError(errno.ENOTDIR, f"not a folder: {root}")
    if not layout.identities_folder(root).exists():
        # The first use: a pack is as lasting as the names of all folders above it. That folder may be anybody's.
        with contextlib.suppress(OSError):
            fs.flush_folder(root.parent)
