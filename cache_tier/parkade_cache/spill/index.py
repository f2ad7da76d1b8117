"""The index: which packs are published, which of their blocks are dead, when conversations were used.

Written down in ``docs/formats/index.md``. It is a cache with one duty of its own. A cache: it keeps every pack's
header, footer and trailer verbatim, checked by the pack format's own checksums, and whatever it loses is read again
from the packs. Its duty: a dead mark is on the device before the block's space is given back, so that a hole is never
taken for a block. Hence a publish costs no flush here (a row that power loss takes is adopted from its pack again),
while a dead mark costs one.

Used by one thread at a time. Raises SpillError for what the device does, IndexDamagedError for what must be rebuilt.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkade_cache.errors import FormatError, IndexDamagedError, SpillError, UnsafePathError
from parkade_cache.ids import PackId
from parkade_cache.spill import layout
from parkade_cache.spill.files import INDEX_LOG_BYTES, FileSystem
from parkade_cache.spill.pack import PackInfo, PackPages, decode_pages, encode_pages, require_pack_id, same_shape

SCHEMA_VERSION = 1
MAX_INDEX_BYTES = 4 << 30
"""A larger index is not ours: 4 GiB hold the pages of twenty million blocks."""

SIDE_FILES = ("", "-wal", "-shm", "-journal")

_SCHEMA = """
CREATE TABLE packs (
    pack_id TEXT PRIMARY KEY, conversation TEXT NOT NULL, created REAL NOT NULL, ranks INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL, entries INTEGER NOT NULL,
    dead INTEGER NOT NULL DEFAULT 0, returned_bytes INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE pages (
    pack_id TEXT NOT NULL, rank INTEGER NOT NULL, header BLOB NOT NULL, footer BLOB NOT NULL, trailer BLOB NOT NULL,
    PRIMARY KEY (pack_id, rank)
);
CREATE TABLE dead (
    pack_id TEXT NOT NULL, entry INTEGER NOT NULL, returned INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (pack_id, entry)
) WITHOUT ROWID;
CREATE TABLE conversations (id TEXT PRIMARY KEY, last_used REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX packs_by_conversation ON packs (conversation);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""

_SUMS = "SELECT count(*), coalesce(sum(entries - dead), 0), coalesce(sum(file_bytes - returned_bytes), 0) FROM packs"
_COUNT_DEAD = "UPDATE packs SET dead = (SELECT count(*) FROM dead WHERE pack_id = packs.pack_id) WHERE pack_id = ?"
_DELETE_PACK = (
    "DELETE FROM packs WHERE pack_id = ?",
    "DELETE FROM pages WHERE pack_id = ?",
    "DELETE FROM dead WHERE pack_id = ?",
)
_DELETE_UNUSED_CONVERSATION = (
    "DELETE FROM conversations WHERE id = ? AND NOT EXISTS (SELECT 1 FROM packs WHERE conversation = id)"
)

_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
_SHORT_READ = 522
_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_INTERNAL,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
    }
)
"""What a database of garbage answers with, and a device never does."""


@dataclass(frozen=True, slots=True)
class IndexedPack:
    """A published pack, one ``PackInfo`` a rank. ``returned`` are the dead entries whose space is given back."""

    infos: tuple[PackInfo, ...]
    dead: frozenset[int]
    returned: frozenset[int]
    last_used: float
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class IndexTotals:
    """Sums over all packs and ranks; ``disk_bytes`` without what was given back."""

    packs: int
    entries: int
    disk_bytes: int


class SpillIndex:
    """An open index of one identity."""

    def __init__(self, fs: FileSystem, path: Path, *, identity: str) -> None:
        """Use ``open``."""
        self._fs = fs
        self._path = path
        self._identity = identity
        self._db: sqlite3.Connection | None = None
        self.empty_because = ""

    @classmethod
    def open(cls, fs: FileSystem, path: Path, *, identity: str) -> SpillIndex:
        """Open what is there; a missing, damaged, older or oversized index is replaced by an empty one.

        ``empty_because`` then says why, and the packs' rows must be made again from the packs.
        """
        index = cls(fs, path, identity=identity)
        try:
            index._connect()
        except IndexDamagedError as error:
            index.reset(because=str(error))
        return index

    def reset(self, *, because: str) -> None:
        """Replace a damaged index by an empty one; it holds nothing that the packs do not."""
        self.close()
        for suffix in SIDE_FILES:
            layout.remove_file(self._fs, self._path.with_name(self._path.name + suffix))
        self._connect()
        self.empty_because = because

    def flush(self) -> None:
        """All that was ever committed is on the device when this returns."""
        with _translated("flushing"):
            # SQLite flushes its log before it copies from it, and there is no other way to ask for that.
            self._execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def keep_room(self) -> None:
        """Set space aside for the log, where there is some.

        On a full disk space comes back only once blocks are marked dead, and marking them takes space.
        """
        with contextlib.suppress(OSError):
            self._fs.set_aside(self._path.with_name(f"{self._path.name}-wal"), INDEX_LOG_BYTES)

    def close(self) -> None:
        """Give the database back; safe to call twice."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def publish(
        self,
        infos: Sequence[PackInfo],
        *,
        last_used: float,
        dead: frozenset[int] = frozenset(),
        returned_bytes: int = 0,
    ) -> None:
        """Commit a pack's row, the last step of publishing (W2)."""
        header = infos[0].header
        file_bytes = sum(info.file_bytes for info in infos)
        row = (header.pack_id, header.conversation, header.created_at, header.ranks, file_bytes, len(infos[0].entries))
        with _translated("publishing in"), self._transaction():
            self._execute("INSERT OR REPLACE INTO packs VALUES (?,?,?,?,?,?,?,?)", (*row, len(dead), returned_bytes))
            for info in infos:
                pages = encode_pages(info)
                page_row = (header.pack_id, info.header.rank, pages.header, pages.footer, pages.trailer)
                self._execute("INSERT OR REPLACE INTO pages VALUES (?,?,?,?,?)", page_row)
            self._execute_many("INSERT OR REPLACE INTO dead VALUES (?,?,1)", [(header.pack_id, n) for n in dead])
            self._touch([header.conversation], last_used)

    def pack_ids(self) -> list[PackId]:
        """All packs, newest first."""
        with _translated("listing"):
            rows = self._execute("SELECT pack_id FROM packs ORDER BY pack_id DESC").fetchall()
            return [_pack_id_in(row) for row in rows]

    def has(self, pack_id: PackId) -> bool:
        """Whether a pack is published."""
        with _translated("reading"):
            return self._execute("SELECT 1 FROM packs WHERE pack_id = ?", (pack_id,)).fetchone() is not None

    def newest(self) -> PackId | None:
        """The newest pack's name."""
        with _translated("reading"):
            row = self._execute("SELECT pack_id FROM packs ORDER BY pack_id DESC LIMIT 1").fetchone()
            return None if row is None else _pack_id_in(row)

    def load(self, pack_id: PackId) -> IndexedPack | None:
        """One pack; None when it is not published; FormatError when its row is damaged."""
        with _translated("reading"):
            row = self._execute(
                "SELECT ranks, conversation, last_used, created, file_bytes - returned_bytes FROM packs"
                " LEFT JOIN conversations ON id = conversation WHERE pack_id = ?",
                (pack_id,),
            ).fetchone()
            if row is None:
                return None
            ranks, conversation, last_used, created, disk_bytes = row
            infos = self._infos(pack_id)
            _check_row(infos, pack_id=pack_id, ranks=ranks, conversation=conversation)
            dead = self._execute("SELECT entry, returned FROM dead WHERE pack_id = ?", (pack_id,)).fetchall()
            known = [(n, returned) for n, returned in dead if n in range(len(infos[0].entries))]
            return IndexedPack(
                infos=infos,
                dead=frozenset(n for n, _ in known),
                returned=frozenset(n for n, returned in known if returned),
                last_used=float(created if last_used is None else last_used),
                disk_bytes=int(disk_bytes),
            )

    def mark_dead(self, entries: Mapping[PackId, Iterable[int]]) -> None:
        """Blocks that no lookup may find again; on the device when this returns, with one flush for all of them."""
        with _translated("marking in"), self._transaction(durable=True):
            for pack_id, numbers in entries.items():
                rows = [(pack_id, number) for number in numbers]
                self._execute_many("INSERT OR IGNORE INTO dead (pack_id, entry) VALUES (?,?)", rows)
                self._execute(_COUNT_DEAD, (pack_id,))

    def mark_returned(self, pack_id: PackId, entries: Iterable[int], nbytes: int) -> None:
        """Dead blocks whose space the file system has back."""
        with _translated("marking in"), self._transaction():
            self._execute_many(
                "UPDATE dead SET returned = 1 WHERE pack_id = ? AND entry = ?", [(pack_id, n) for n in entries]
            )
            self._execute("UPDATE packs SET returned_bytes = returned_bytes + ? WHERE pack_id = ?", (nbytes, pack_id))

    def delete(self, pack_id: PackId) -> None:
        """Forget a pack whose files are gone, and its conversation when that was its last."""
        with _translated("deleting from"), self._transaction():
            row = self._execute("SELECT conversation FROM packs WHERE pack_id = ?", (pack_id,)).fetchone()
            for statement in _DELETE_PACK:
                self._execute(statement, (pack_id,))
            self._execute(_DELETE_UNUSED_CONVERSATION, row or ("",))

    def touch(self, conversations: Iterable[str], now: float) -> None:
        """Conversations were used; those without a pack are ignored."""
        with _translated("touching in"), self._transaction():
            self._execute_many(
                "UPDATE conversations SET last_used = max(last_used, ?) WHERE id = ?", [(now, c) for c in conversations]
            )

    def totals(self) -> IndexTotals:
        """What all packs take."""
        with _translated("summing"):
            packs, entries, disk_bytes = self._execute(_SUMS).fetchone()
            return IndexTotals(packs=int(packs), entries=int(entries), disk_bytes=int(disk_bytes))

    def written_since(self, since: float) -> list[tuple[float, int]]:
        """(creation time, bytes) of the packs created after a time."""
        with _translated("summing"):
            rows = self._execute("SELECT created, file_bytes FROM packs WHERE created > ?", (since,)).fetchall()
            return [(float(created), int(file_bytes)) for created, file_bytes in rows]

    def _connect(self) -> None:
        with _translated("opening"):
            _check_file(self._fs, self._path)
            self._db = self._fs.connect(self._path)
            try:
                self._prepare(self._identity)
            except BaseException:
                self.close()
                raise

    def _prepare(self, identity: str) -> None:
        self._execute("PRAGMA journal_mode = WAL")
        self._execute("PRAGMA synchronous = NORMAL")
        (version,) = self._execute("PRAGMA user_version").fetchone()
        (tables,) = self._execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            self._create(identity)
            self.empty_because = "missing"
            return
        if version != SCHEMA_VERSION:
            raise IndexDamagedError(f"spill index has schema {version}, this build reads {SCHEMA_VERSION}")
        if self._execute("SELECT value FROM meta WHERE name = 'identity'").fetchone() != (identity,):
            raise IndexDamagedError("spill index belongs to another identity")

    def _create(self, identity: str) -> None:
        with self._transaction(durable=True):
            for statement in _SCHEMA.split(";"):
                self._execute(statement)
            self._execute("INSERT INTO meta VALUES ('identity', ?)", (identity,))
            self._execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _infos(self, pack_id: PackId) -> tuple[PackInfo, ...]:
        rows = self._execute(
            "SELECT header, footer, trailer FROM pages WHERE pack_id = ? ORDER BY rank", (pack_id,)
        ).fetchall()
        return tuple(decode_pages(PackPages(*map(bytes, row))) for row in rows)

    def _touch(self, conversations: Iterable[str], now: float) -> None:
        self._execute_many(
            "INSERT INTO conversations VALUES (?, ?)"
            " ON CONFLICT (id) DO UPDATE SET last_used = max(last_used, excluded.last_used)",
            [(conversation, now) for conversation in conversations],
        )

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._open_db().execute(statement, values)

    def _execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        self._open_db().executemany(statement, rows)

    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise SpillError(errno.EBADF, "the spill index is closed")
        return self._db

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        """All or nothing; with ``durable`` the log is flushed, and with it all that was committed before."""
        self._execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._execute("ROLLBACK")
            raise


def _check_file(fs: FileSystem, path: Path) -> None:
    for suffix in SIDE_FILES:
        side = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            found = fs.lstat(side)
            layout.check_file(found, side)
            if found.st_size > MAX_INDEX_BYTES:
                raise IndexDamagedError(f"spill index of {found.st_size} bytes is larger than any of ours")


def _pack_id_in(row: tuple[object]) -> PackId:
    try:
        return require_pack_id(str(row[0]))
    except UnsafePathError as error:
        raise IndexDamagedError(f"spill index holds a row that is {error}") from error


def _check_row(infos: Sequence[PackInfo], *, pack_id: PackId, ranks: object, conversation: object) -> None:
    expected = [(pack_id, conversation, rank, ranks) for rank in range(len(infos))]
    found = [(h.pack_id, h.conversation, h.rank, h.ranks) for h in (info.header for info in infos)]
    if not infos or len(infos) != ranks or found != expected or not all(same_shape(infos[0], i) for i in infos):
        raise FormatError(f"the index row of pack {pack_id} does not hold together")


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """SQLite's errors as ours: damage is rebuilt, everything else is the device's."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF in _DAMAGE or code == _SHORT_READ:
            raise IndexDamagedError(f"{doing} the spill index: {error}") from error
        raise SpillError(_ERRNO.get(code & 0xFF, errno.EIO), f"{doing} the spill index: {error}") from error
    except FormatError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise IndexDamagedError(f"{doing} the spill index: a value of the wrong kind: {error}") from error
    except OSError as error:
        layout.raise_spill_error(error, f"{doing} the spill index")
