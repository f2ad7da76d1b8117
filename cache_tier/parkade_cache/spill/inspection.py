"""Looking at a spill directory from outside, beside a living pod or after a dead one, without touching it.

Why it exists: people ask what is on the disk while a pod uses it, or after nothing could be opened any more. What must
stay true: nothing in the directory is made, changed, locked for longer than an instant or opened by SQLite. The file
system in use refuses every change, and the index is read from a copy: a copy of the database and its log taken so that
together they are one state that was committed. Run this in a process of its own: closing a database file gives up the
POSIX locks that SQLite has on it in the same process.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from parkade_cache.errors import FormatError, IndexDamagedError, ParkadeError, SpillError, UnsafePathError
from parkade_cache.ids import PackId
from parkade_cache.spill import layout
from parkade_cache.spill.aligned import PAGE_BYTES
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.foreign import OWN_NAMES
from parkade_cache.spill.generation import GenerationLife, stored_generation
from parkade_cache.spill.holdings import Holdings, PackView, find_holdings
from parkade_cache.spill.identity import Identity
from parkade_cache.spill.index import MAX_INDEX_BYTES, IndexedPack, SpillIndex
from parkade_cache.spill.layout import IdentityFolder
from parkade_cache.spill.pack import PackHeader, parse_header, require_fingerprint
from parkade_cache.spill.shelf import PackHealth, PackShelf

RECEIPTS_NAME = "receipts"
"""The folder in which a pod keeps its receipts, in the spill directory."""

KEPT_NAMES = OWN_NAMES | {RECEIPTS_NAME, "id.key"}
"""What Parkade makes in a spill directory, generations aside."""

COPY_ATTEMPTS = 10
"""How often the index is copied again because it was emptied into the database meanwhile."""

_COPY_BYTES = 8 << 20
_LOG_HEAD_BYTES = 32
_RANK = re.compile(r"rank-(\d{1,4})")


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise SpillError(errno.EROFS, f"{name}: this only looks, and never changes a spill directory")

    return refuse


class ReadOnlyFileSystem(FileSystem):
    """The real file system without everything that changes it. A folder that is missing has no names."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Descriptor of ``path``, for reading only."""
        if flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC):
            _refused("open for writing")()
        return super().open(path, flags, mode)

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, sorted; none where it is missing, as after a crash or beside a pod that removes it."""
        try:
            return super().names(folder)
        except FileNotFoundError:
            return []


READING = frozenset({"open", "close", "fstat", "lstat", "preadv", "first_data", "drop_cache", "names", "space"})
"""Operations that change nothing. Every other one, also one that is yet to come, is refused."""

for _name in vars(FileSystem).keys() - READING:
    if not _name.startswith("_"):
        setattr(ReadOnlyFileSystem, _name, _refused(_name))


# -- who has it, and is it one -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """The living process that has the directory; what it said of itself, None where it did not."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return "another process" if self.pid is None else f"process {self.pid} on host {self.host}"


def holder_of(fs: FileSystem, root: Path) -> Holder | None:
    """Who holds the directory's lock; None when nobody does."""
    path = root / "lock"
    try:
        fd = layout.open_checked_file(fs, path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        # Shared and for an instant: those who look do not see each other, and a pod that starts now tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder_in(fs, path)
    finally:
        fs.close(fd)
    return None


def _holder_in(fs: FileSystem, path: Path) -> Holder:
    try:
        found = json.loads(layout.read_small_file(fs, path))
        return Holder(int(found["pid"]), str(found["host"])[:253])
    except (OSError, ValueError, TypeError, KeyError, ParkadeError):
        return Holder(None, None)


def require_spill_directory(fs: FileSystem, root: Path) -> None:
    """SpillError that says what to do unless ``root`` is a spill directory that this user may read."""
    try:
        names = fs.names(root) if root.exists() else None
        if names is None:
            raise SpillError(errno.ENOENT, f"there is no directory {root}")
        identities = layout.identities_folder(root)
        if identities.name not in names:
            raise SpillError(
                errno.EINVAL, f"{root} is not a spill directory: give the one that a pod has as --spill-dir"
            )
        user = fs.lstat(identities).st_uid
        if user != os.geteuid():
            raise SpillError(errno.EACCES, f"{root} belongs to user {user}: run this as that user")
        layout.check_folder(fs, identities)
    except OSError as error:
        layout.raise_spill_error(error, f"reading spill directory {root}")


# -- the index, from a copy --------------------------------------------------------------------------------------------


class IndexState(enum.StrEnum):
    """What the index was good for. ``REFUSED`` is a link or another user's file: with it no pod starts."""

    READ = "read"
    MISSING = "missing"
    DAMAGED = "damaged"
    REFUSED = "refused"
    NOT_COPIED = "not_copied"


class IndexCopy:
    """An identity's index as of one moment, in a private folder elsewhere that goes with this object."""

    def __init__(self, fs: FileSystem, folder: IdentityFolder) -> None:
        """Copy it; ``state`` and ``reason`` say what came of it, nothing is raised."""
        self.state = IndexState.READ
        self.reason = ""
        self._index: SpillIndex | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._open(fs, folder)
        except FileNotFoundError:
            self.give_up(IndexState.MISSING, "missing")
        except UnsafePathError as error:
            self.give_up(IndexState.REFUSED, str(error))
        except IndexDamagedError as error:
            self.give_up(IndexState.DAMAGED, str(error))
        except OSError as error:
            self.give_up(IndexState.NOT_COPIED, error.strerror or str(error))

    def pack_ids(self) -> list[PackId]:
        """All packs that it lists, newest first; none when it could not be read."""
        return [] if self._index is None else self._index.pack_ids()

    def load(self, pack_id: PackId) -> IndexedPack | None:
        """One pack; None when it is not listed; FormatError when its row is damaged."""
        return None if self._index is None else self._index.load(pack_id)

    def give_up(self, state: IndexState, reason: str) -> None:
        """Do without it from here on."""
        self.close()
        self.state, self.reason = state, reason

    def close(self) -> None:
        """Remove the copy; safe to call twice."""
        index, self._index = self._index, None
        if index is not None:
            index.close()
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.cleanup()

    def _open(self, fs: FileSystem, folder: IdentityFolder) -> None:
        for path in (folder.index, _log_of(folder.index)):
            _check_index_file(fs, path, must_exist=path == folder.index)
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix="parkade-cache-", ignore_cleanup_errors=True)
        except OSError as error:
            raise SpillError(
                errno.ENOSPC, f"no folder for a copy of the index ({error.strerror}): set TMPDIR"
            ) from error
        copy = Path(self._temporary.name) / folder.index.name
        _copy_index(fs, folder.index, copy)
        index = SpillIndex.open(FileSystem(), copy, identity=folder.fingerprint)
        self._index = index
        if index.empty_because:
            # What was opened is the empty index that replaced a bad one, in the copy.
            state = IndexState.MISSING if index.empty_because == "missing" else IndexState.DAMAGED
            self.give_up(state, index.empty_because)


def _log_of(index: Path) -> Path:
    return index.with_name(f"{index.name}-wal")


def _check_index_file(fs: FileSystem, path: Path, *, must_exist: bool) -> None:
    try:
        found = fs.lstat(path)
    except FileNotFoundError:
        if must_exist:
            raise
        return
    layout.check_file(found, path)
    if found.st_size > MAX_INDEX_BYTES:
        raise IndexDamagedError(f"spill index of {found.st_size} bytes is larger than any of ours")


def _copy_index(fs: FileSystem, source: Path, target: Path) -> None:
    """Copy database and write-ahead log so that the log makes up for all that changed in the database meanwhile.

    Pages go from log to database (a checkpoint) while the owner writes on. Copied first, the database may hold a part
    of them; but all of them are in the log that is copied after it, and SQLite looks into the log first. That ends when
    the log begins anew, and then its head is another: the copy is taken again.
    """
    log, log_copy = _log_of(source), _log_of(target)
    for _ in range(COPY_ATTEMPTS):
        before = _head_of(fs, log)
        _copy_file(fs, source, target)
        log_copy.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            _copy_file(fs, log, log_copy)
        if before == _head_of(fs, log_copy) == _head_of(fs, log):
            return
    raise SpillError(errno.EBUSY, "the index changed faster than it could be copied: try again")


def _head_of(fs: FileSystem, path: Path) -> bytes:
    """The log's salts and counters; empty for a log without any."""
    try:
        fd = layout.open_checked_file(fs, path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        head = bytearray(_LOG_HEAD_BYTES)
        return bytes(head) if fs.preadv(fd, [memoryview(head)], 0) == _LOG_HEAD_BYTES else b""
    finally:
        fs.close(fd)


def _copy_file(fs: FileSystem, source: Path, target: Path) -> None:
    fd = layout.open_checked_file(fs, source, os.O_RDONLY)
    try:
        with target.open("wb") as file:
            part = memoryview(bytearray(_COPY_BYTES))
            offset = 0
            while nbytes := fs.preadv(fd, [part], offset):
                file.write(part[:nbytes])
                offset += nbytes
    finally:
        fs.close(fd)


# -- packs -------------------------------------------------------------------------------------------------------------


class PackFate(enum.StrEnum):
    """Why the next start does not serve a pack, and what it does with it."""

    INCOMPLETE = "incomplete"
    """A rank's file is missing and no row says it was published: removed."""
    MISSING = "missing"
    """Published, and a rank's file is gone: forgotten, and the rest removed."""
    DAMAGED = "damaged"
    """Goes to quarantine."""
    EMPTY = "empty"
    """No block of it lives: removed."""
    UNSAFE = "unsafe"
    """A link, a second name or another user's file: neither served nor removed."""
    UNREADABLE = "unreadable"
    """The device refuses: tried again at every start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPack:
    """A pack that the next start does not serve. ``conversation`` is None where nothing readable names it."""

    pack_id: PackId
    fate: PackFate
    reason: str
    disk_bytes: int
    conversation: str | None
    indexed: bool


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file that serves nobody: a temporary or a quarantined one. ``conversation`` None where it does not say."""

    path: Path
    nbytes: int
    conversation: str | None


class IdentityView:
    """One identity's folder, being looked at; its index is a copy as of the beginning."""

    def __init__(self, fs: FileSystem, root: Path, fingerprint: str) -> None:
        """Copies the index; close it."""
        self.fs = fs
        self.folder = IdentityFolder(root, fingerprint)
        self.index = IndexCopy(fs, self.folder)
        self.ranks = _ranks_in(fs, self.folder, self.index)
        self.shelf = PackShelf(fs, self.folder, ranks=self.ranks)

    def close(self) -> None:
        """Remove the copy of the index."""
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def packs(self) -> tuple[list[PackView], list[LostPack]]:
        """What the next start serves, and what it does not; the index is given up where it turns out damaged."""
        try:
            return self._packs()
        except IndexDamagedError as error:
            self.index.give_up(IndexState.DAMAGED, str(error))
            return self._packs()

    def prove_index(self) -> None:
        """Read all of the index, so that it is given up now if it is damaged anywhere."""
        try:
            for pack_id in self.index.pack_ids():
                self.row(pack_id)
        except IndexDamagedError as error:
            self.index.give_up(IndexState.DAMAGED, str(error))

    def look_at(self, pack_id: PackId, row: IndexedPack | None) -> PackView | LostPack | None:
        """One pack, with its row where it has one; None when there is nothing of it."""
        return self._published(pack_id, row) if row is not None else self._loose(pack_id)

    def row(self, pack_id: PackId) -> IndexedPack | None:
        """The pack's row; None where it has none or a damaged one, which the next start makes again from the files."""
        try:
            return self.index.load(pack_id)
        except IndexDamagedError:
            raise
        except FormatError:
            return None

    def temporaries(self) -> list[LeftFile]:
        """Files of writes that did not end, or have not ended yet."""
        named = [
            path
            for path in self.shelf.unfinished()
            if layout.pack_id_of(path.name, suffix=layout.TEMPORARY_SUFFIX) is not None
        ]
        return [left_file(self.fs, path) for path in named]

    def all_pack_ids(self) -> list[PackId]:
        """Packs with a row or a file, newest first."""
        return sorted({*self.index.pack_ids(), *self.shelf.pack_ids()}, reverse=True)

    def _packs(self) -> tuple[list[PackView], list[LostPack]]:
        views: list[PackView] = []
        lost: list[LostPack] = []
        for pack_id in self.all_pack_ids():
            found = self.look_at(pack_id, self.row(pack_id))
            if isinstance(found, PackView):
                views.append(found)
            elif found is not None:
                lost.append(found)
        return views, lost

    def _published(self, pack_id: PackId, row: IndexedPack) -> PackView | LostPack:
        if len(row.infos) != self.ranks:
            return self._lost(pack_id, PackFate.DAMAGED, f"made by {len(row.infos)} ranks, not {self.ranks}", row)
        if len(row.dead) == len(row.infos[0].entries):
            return self._lost(pack_id, PackFate.EMPTY, "all its blocks are dead", row)
        health = self.shelf.check(row.infos)
        if health is PackHealth.WHOLE:
            return PackView(
                info=row.infos[0],
                ranks=self.ranks,
                dead=row.dead,
                returned=row.returned,
                last_used=row.last_used,
                disk_bytes=row.disk_bytes,
                indexed=True,
            )
        fate, reason = _FATES[health]
        return self._lost(pack_id, fate, reason, row)

    def _loose(self, pack_id: PackId) -> PackView | LostPack | None:
        if not self.shelf.is_complete(pack_id):
            if not any(_exists(self.fs, path) for path in self.shelf.paths(pack_id)):
                return None
            return self._lost(pack_id, PackFate.INCOMPLETE, "a rank's file is missing")
        try:
            infos = self.shelf.read_infos(pack_id)
            dead = self.shelf.holes(infos)
        except FormatError as error:
            return self._lost(pack_id, PackFate.DAMAGED, str(error))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None  # dropped since it was listed
            fate = PackFate.UNSAFE if isinstance(error, UnsafePathError) else PackFate.UNREADABLE
            return self._lost(pack_id, fate, error.strerror or str(error))
        if len(dead) == len(infos[0].entries):
            return self._lost(pack_id, PackFate.EMPTY, "all its blocks are dead")
        return PackView(
            info=infos[0],
            ranks=self.ranks,
            dead=dead,
            returned=dead,
            last_used=infos[0].header.created_at,
            disk_bytes=self.shelf.disk_bytes(pack_id),
            indexed=False,
        )

    def _lost(self, pack_id: PackId, fate: PackFate, reason: str, row: IndexedPack | None = None) -> LostPack:
        return LostPack(
            pack_id=pack_id,
            fate=fate,
            reason=reason,
            disk_bytes=self.shelf.disk_bytes(pack_id),
            conversation=row.infos[0].header.conversation if row is not None else self._written_by(pack_id),
            indexed=row is not None,
        )

    def _written_by(self, pack_id: PackId) -> str | None:
        named = (conversation_in(self.fs, path) for path in self.shelf.paths(pack_id))
        return next((conversation for conversation in named if conversation is not None), None)


_FATES = {
    PackHealth.MISSING: (PackFate.MISSING, "a rank's file is missing"),
    PackHealth.DAMAGED: (PackFate.DAMAGED, "a file has another size than when it was published"),
    PackHealth.UNSAFE: (PackFate.UNSAFE, "a link, a second name or another user's file in a pack's place"),
}


def header_in(fs: FileSystem, path: Path) -> PackHeader | None:
    """The header of a file that begins as packs do; None when it does not or cannot be read."""
    try:
        fd = layout.open_checked(fs, path, os.O_RDONLY)
        try:
            page = bytearray(PAGE_BYTES)
            nbytes = fs.preadv(fd, [memoryview(page)], 0)
        finally:
            fs.close(fd)
        return parse_header(bytes(page[:nbytes]))
    except (OSError, FormatError):
        return None


def conversation_in(fs: FileSystem, path: Path) -> str | None:
    """The conversation that a pack file, finished or not, says it is of."""
    header = header_in(fs, path)
    return None if header is None else header.conversation


def left_file(fs: FileSystem, path: Path) -> LeftFile:
    """What is to be said of a file that serves nobody."""
    return LeftFile(path, layout.tree_bytes(fs, path), conversation_in(fs, path))


def _exists(fs: FileSystem, path: Path) -> bool:
    try:
        fs.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _ranks_in(fs: FileSystem, folder: IdentityFolder, index: IndexCopy) -> int:
    """How many files make one pack: as the newest row or file says, else as many as there are folders."""
    with contextlib.suppress(FormatError):
        for pack_id in index.pack_ids()[:1]:
            row = index.load(pack_id)
            if row is not None:
                return len(row.infos)
    numbers = [int(match[1]) for name in fs.names(folder.path) if (match := _RANK.fullmatch(name))]
    folders = max(numbers, default=-1) + 1
    shelf = PackShelf(fs, folder, ranks=folders)
    for pack_id in shelf.pack_ids():
        for path in shelf.paths(pack_id):
            header = header_in(fs, path)
            if header is not None:
                return max(header.ranks, folders)
    return folders


# -- the whole directory -----------------------------------------------------------------------------------------------


class Standing(enum.StrEnum):
    """Whose an identity's files are, as far as can be told without the pod."""

    OWN = "own"
    """The one in use; without a pod, the one used last."""
    FOREIGN = "foreign"
    OUTDATED = "outdated"
    """Its generation is over: no start will find it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentitySurvey:
    """One identity's folder. ``identity`` is None where it is not described; ``disk_bytes`` with everything in it."""

    fingerprint: str
    identity: Identity | None
    standing: Standing
    ranks: int
    last_used: float
    disk_bytes: int
    index: IndexState
    index_reason: str
    packs: tuple[PackView, ...]
    lost: tuple[LostPack, ...]
    temporaries: tuple[LeftFile, ...]
    holdings: Holdings

    @property
    def owed_bytes(self) -> int:
        """Space of dead blocks that was not given back yet."""
        return sum(pack.owed_bytes for pack in self.packs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A spill directory at one moment; ``holder`` is the living process that has it."""

    root: Path
    holder: Holder | None
    identities: tuple[IdentitySurvey, ...]
    quarantine: tuple[LeftFile, ...]
    receipts_bytes: int
    other_bytes: int

    @property
    def disk_bytes(self) -> int:
        """Everything, on disk."""
        quarantined = sum(file.nbytes for file in self.quarantine)
        parts = sum(identity.disk_bytes for identity in self.identities)
        return parts + quarantined + self.receipts_bytes + self.other_bytes


def survey_directory(root: Path, *, locked: bool = False, fs: FileSystem | None = None) -> Survey:
    """Look at everything in a spill directory; ``locked`` says that the caller has its lock, so that no pod has it.

    SpillError when it is none, belongs to another user or cannot be read.
    """
    fs = fs or ReadOnlyFileSystem()
    require_spill_directory(fs, root)
    try:
        return _survey(fs, root, None if locked else holder_of(fs, root))
    except OSError as error:
        layout.raise_spill_error(error, f"reading spill directory {root}")


def fingerprints_in(fs: FileSystem, root: Path) -> list[str]:
    """Folders of identities that are safe to look into."""
    folder = layout.identities_folder(root)
    return [name for name in fs.names(folder) if _is_identity(fs, folder / name)]


def describe_identity(fs: FileSystem, folder: IdentityFolder) -> Identity | None:
    """What the folder's ``identity.json`` says; None when it is missing.

    FormatError when it cannot be understood, UnsafePathError for a link or another user's file.
    """
    path = folder.path / "identity.json"
    try:
        return Identity(**json.loads(layout.read_small_file(fs, path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise FormatError(f"damaged: {path}") from error


def _survey(fs: FileSystem, root: Path, holder: Holder | None) -> Survey:
    found = [_survey_identity(fs, root, name, live=holder is not None) for name in fingerprints_in(fs, root)]
    own = _own_of(fs, root, found, live=holder is not None)
    return Survey(
        root=root,
        holder=holder,
        identities=tuple(replace(one, standing=Standing.OWN) if one.fingerprint == own else one for one in found),
        quarantine=tuple(quarantined(fs, root)),
        receipts_bytes=layout.tree_bytes(fs, root / RECEIPTS_NAME),
        other_bytes=sum(layout.tree_bytes(fs, path) for path in _others(fs, root, found)),
    )


def quarantined(fs: FileSystem, root: Path) -> list[LeftFile]:
    """Damaged packs that were set aside."""
    folder = layout.quarantine_folder(root)
    return [left_file(fs, folder / name) for name in fs.names(folder)]


def _survey_identity(fs: FileSystem, root: Path, fingerprint: str, *, live: bool) -> IdentitySurvey:
    with IdentityView(fs, root, fingerprint) as view:
        packs, lost = view.packs()
        try:
            identity = describe_identity(fs, view.folder)
        except (FormatError, UnsafePathError):
            identity = None
        outdated = identity is not None and _is_outdated(fs, root, fingerprint, identity, live=live)
        return IdentitySurvey(
            fingerprint=fingerprint,
            identity=identity,
            standing=Standing.OUTDATED if outdated else Standing.FOREIGN,
            ranks=view.ranks,
            last_used=max((pack.last_used for pack in packs), default=_made_at(fs, view.folder)),
            disk_bytes=layout.tree_bytes(fs, view.folder.path),
            index=view.index.state,
            index_reason=view.index.reason,
            packs=tuple(packs),
            lost=tuple(lost),
            temporaries=tuple(view.temporaries()),
            holdings=find_holdings(packs),
        )


def _is_identity(fs: FileSystem, path: Path) -> bool:
    try:
        require_fingerprint(path.name)
        layout.check_folder(fs, path)
    except (UnsafePathError, FileNotFoundError):
        return False
    return True


def _is_outdated(fs: FileSystem, root: Path, fingerprint: str, identity: Identity, *, live: bool) -> bool:
    """Whether no start will use this folder: new weights came, or its weights went with the process that had them."""
    try:
        generation = stored_generation(fs, root, identity)
    except (FormatError, UnsafePathError):
        return not live  # with its count damaged, the next start begins a new one
    if generation.life is GenerationLife.UNTIL_RESTART and not live:
        return True
    return identity.at_generation(generation.number) != fingerprint


def _own_of(fs: FileSystem, root: Path, found: Sequence[IdentitySurvey], *, live: bool) -> str | None:
    """The identity in use. A living pod has its index open, which shows; else it is the one used last."""
    current = [one for one in found if one.standing is not Standing.OUTDATED]
    opened = {one.fingerprint: _opened_at(fs, IdentityFolder(root, one.fingerprint)) for one in current if live}
    if any(opened.values()):
        return max(opened, key=lambda fingerprint: opened[fingerprint])
    return max(current, key=lambda one: one.last_used).fingerprint if current else None


def _opened_at(fs: FileSystem, folder: IdentityFolder) -> float:
    return _changed_at(fs, folder.index.with_name(f"{folder.index.name}-shm"))


def _made_at(fs: FileSystem, folder: IdentityFolder) -> float:
    return _changed_at(fs, folder.path / "identity.json")


def _changed_at(fs: FileSystem, path: Path) -> float:
    try:
        return fs.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _others(fs: FileSystem, root: Path, found: Sequence[IdentitySurvey]) -> Iterator[Path]:
    """Files that Parkade did not make, or cannot tell what they are."""
    for name in fs.names(root):
        if name not in KEPT_NAMES and not name.endswith(".generation"):
            yield root / name
    known = {one.fingerprint for one in found}
    folder = layout.identities_folder(root)
    for name in fs.names(folder):
        if name not in known:
            yield folder / name
