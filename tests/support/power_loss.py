"""What a disk may hold after the power went: recorded operations, and the states that they allow.

Why it exists: SIGKILL leaves the page cache in place and a power cut does not, so whether the store flushes the right
things in the right order (D3, S2) shows here only. ``RecordingFileSystem`` does every operation of the spill store for
real and writes it down in a ``Journal``; ``Journal.state_at`` makes up what may be on the disk when the power goes
between two of them. What must stay true: everything that ext4 and XFS allow can come up, and nothing that was flushed
is ever missing.

The model, stricter than those file systems with their defaults:

- Bytes. What was written to a file since its last flush may be there or not, whole or in any of its 512-byte sectors,
  in any order. A sector that did not get there holds what it held before, a hole's zeros, or bytes of another file. A
  size that grew may have grown or not; a hole may be there in some of its pages. A file's flush keeps its bytes and its
  size, not its name.
- Names. What was made, renamed or removed since its folder's flush is there up to some moment (as with a journal) or
  each for itself, as chance has it (stricter). A rename is one step, kept by the flush of the folder it leads to. What
  lies in a folder whose own name did not get there is lost, flushed or not.
- The index. SQLite's own reads and writes are not recorded: its database and log are compared after every commit, and
  what differs counts as written. Where it flushes is taken from its documentation for a write-ahead log: a commit under
  ``synchronous = FULL`` flushes the log; a new log's header is flushed (the first time with the folder) before its
  frames follow; before pages are copied into the database the log is flushed, and after it the database. Its
  shared-memory file never survives. Beyond what is allowed to happen, in some states the index is gone, garbage, cut
  short or without its log: it must be made again from the packs then, and ``DiskState.index_lost`` says so.

Not modelled: devices that lie about a flush, sectors that go bad, the rollback journal while a database is first made.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import random
import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from parkade_cache.spill.aligned import PAGE_BYTES
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.testing import SimulatedCrash

SECTOR_BYTES = 512
"""What a device writes whole or not at all."""

INDEX_NAME = "index.sqlite"
LOG_HEADER_BYTES = 32
INDEX_LOST_SHARE = 0.12
"""How many of the states lose the index, which no file system does by itself."""

_ZERO_PAGE = bytes(PAGE_BYTES)
_MOST_PIECES = 512


# -- files ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Image:
    """A file's bytes: its size and its pages, by number; a page that is not there is a hole."""

    size: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Image:
        return Image(self.size, dict(self.pages))

    def write(self, offset: int, data: bytes) -> None:
        number, at = divmod(offset, PAGE_BYTES)
        done = 0
        while done < len(data):
            piece = data[done : done + PAGE_BYTES - at]
            if len(piece) < PAGE_BYTES:
                old = self.pages.get(number, _ZERO_PAGE)
                self.pages[number] = old[:at] + piece + old[at + len(piece) :]
            else:
                self.pages[number] = piece
            done += len(piece)
            number, at = number + 1, 0
        self.size = max(self.size, offset + len(data))

    def resize(self, nbytes: int) -> None:
        last, at = divmod(nbytes, PAGE_BYTES)
        self.pages = {number: page for number, page in self.pages.items() if number < last + (at > 0)}
        if at and last in self.pages:
            self.pages[last] = self.pages[last][:at] + bytes(PAGE_BYTES - at)
        self.size = nbytes

    def punch(self, number: int) -> None:
        self.pages.pop(number, None)

    def save(self, path: str) -> None:
        """Make the file, its holes as holes."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for first, pages in self._runs():
                os.pwritev(fd, pages, first * PAGE_BYTES)
            os.ftruncate(fd, self.size)
        finally:
            os.close(fd)

    @classmethod
    def load(cls, path: Path) -> Image:
        """What a file holds now; a page of zeros counts as a hole, since it reads the same."""
        data = path.read_bytes()
        image = cls(len(data))
        for start in range(0, len(data), PAGE_BYTES):
            page = data[start : start + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
            if page != _ZERO_PAGE:
                image.pages[start // PAGE_BYTES] = page
        return image

    def _runs(self) -> Iterator[tuple[int, list[bytes]]]:
        first, run = 0, list[bytes]()
        for number in sorted(self.pages):
            if run and (number != first + len(run) or len(run) == _MOST_PIECES):
                yield first, run
                run = []
            if not run:
                first = number
            run.append(self.pages[number])
        if run:
            yield first, run


# -- what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes were written to a file."""

    file: int
    offset: int
    data: bytes

    def __str__(self) -> str:
        return f"write {len(self.data)} bytes at {self.offset} of file {self.file}"


@dataclass(frozen=True, slots=True)
class Resized:
    """A file was cut or extended; one that was allocated only grows."""

    file: int
    nbytes: int
    only_grows: bool

    def __str__(self) -> str:
        return f"{'allocate' if self.only_grows else 'resize to'} {self.nbytes} bytes of file {self.file}"

    def apply(self, image: Image) -> None:
        if not self.only_grows or self.nbytes > image.size:
            image.resize(self.nbytes)


@dataclass(frozen=True, slots=True)
class Punched:
    """Whole pages of a file were given back."""

    file: int
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"punch {self.nbytes} bytes at {self.offset} of file {self.file}"

    @property
    def pages(self) -> range:
        return range(self.offset // PAGE_BYTES, (self.offset + self.nbytes) // PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Flushed:
    """A file's bytes and size are on the device."""

    file: int

    def __str__(self) -> str:
        return f"flush file {self.file}"


class Change(enum.StrEnum):
    """What can happen to a name."""

    FILE = "make file"
    FOLDER = "make folder"
    RENAME = "rename"
    UNLINK = "unlink"
    REMOVE_FOLDER = "remove folder"


@dataclass(frozen=True, slots=True)
class Renamed:
    """A name was made, moved or removed; ``file`` is -1 for folders, ``source`` is where a rename began."""

    change: Change
    path: str
    file: int = -1
    source: str = ""

    def __str__(self) -> str:
        origin = f"{self.source} -> " if self.source else ""
        return f"{self.change} {origin}{self.path}" + (f" (file {self.file})" if self.file >= 0 else "")


@dataclass(frozen=True, slots=True)
class FolderFlushed:
    """The names in a folder are on the device."""

    folder: str

    def __str__(self) -> str:
        return f"flush folder {self.folder or '.'}"


DataEvent: TypeAlias = Written | Resized | Punched
Event: TypeAlias = DataEvent | Flushed | Renamed | FolderFlushed

_NOT_FLUSHED = 1 << 62


@dataclass(slots=True)
class _NameEvent:
    position: int
    event: Renamed
    kept_from: int = _NOT_FLUSHED


@dataclass(slots=True)
class _History:
    """One file: its bytes at each flush, and the positions of what changed it."""

    positions: list[int]
    images: list[Image]
    data: list[int] = field(default_factory=list)


# -- what may be left ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskState:
    """What the disk holds when the power comes back; ``story`` says which chances led to it."""

    folders: Sequence[str]
    files: dict[str, Image]
    index_lost: bool
    story: str

    def save(self, root: Path) -> None:
        """Make it real in an empty folder."""
        for folder in self.folders:
            os.mkdir(f"{root}/{folder}", 0o700)  # noqa: PTH102 - ten thousand times
        for path, image in self.files.items():
            image.save(f"{root}/{path}")


class _Names(enum.StrEnum):
    FLUSHED = "only flushed"
    ALL = "all"
    ORDERED = "up to a moment"
    ANY = "any"


class _Bytes(enum.StrEnum):
    FLUSHED = "only flushed"
    ALL = "all"
    ORDERED = "up to a moment, the last one torn"
    TORN = "any, in any sectors"


class _Index(enum.StrEnum):
    KEPT = "as the bytes say"
    GONE = "gone"
    GARBAGE = "garbage"
    CUT_SHORT = "cut short"
    WITHOUT_LOG = "without its log"


class Journal:
    """Everything that was done to the files under one folder, in order.

    What lies there when it begins is taken to be on the device.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.events: list[Event] = []
        self._numbers = itertools.count()
        self._names: dict[str, int] = {}
        self._images: dict[int, Image] = {}
        self._histories: dict[int, _History] = {}
        self._folders: list[str] = []
        self._name_events: list[_NameEvent] = []
        self._unflushed: dict[str, list[_NameEvent]] = {}
        self._compared: dict[int, bytes] = {}
        self._written: list[int] = []
        for path in sorted(base.rglob("*")):
            if path.is_dir():
                self._folders.append(self.name_of(path))
            elif not path.name.endswith("-shm"):
                self._names[self.name_of(path)] = self._new_file(Image.load(path))
                self._compared[self._names[self.name_of(path)]] = path.read_bytes()
        self._first_names = dict(self._names)

    @property
    def position(self) -> int:
        """How much has happened: what is noted next gets this number."""
        return len(self.events)

    def name_of(self, path: Path) -> str:
        """A path below the base."""
        return "" if path == self.base else str(path.relative_to(self.base))

    def number_of(self, name: str) -> int | None:
        """The file that has this name now."""
        return self._names.get(name)

    # -- noting ----------------------------------------------------------------------------------------------

    def made(self, name: str) -> int:
        number = self._new_file(Image())
        self._names[name] = number
        self._note_name(Renamed(Change.FILE, name, number), _folder(name))
        return number

    def folder_made(self, name: str) -> None:
        self._note_name(Renamed(Change.FOLDER, name), _folder(name))

    def folder_removed(self, name: str) -> None:
        self._note_name(Renamed(Change.REMOVE_FOLDER, name), _folder(name))

    def renamed(self, source: str, target: str) -> None:
        number = self._names.pop(source)
        self._names[target] = number
        self._note_name(Renamed(Change.RENAME, target, number, source), _folder(target))

    def unlinked(self, name: str) -> None:
        number = self._names.pop(name, None)
        if number is not None:
            self._note_name(Renamed(Change.UNLINK, name, number), _folder(name))

    def folder_flushed(self, folder: str) -> None:
        self.events.append(FolderFlushed(folder))
        for noted in self._unflushed.pop(folder, ()):
            noted.kept_from = self.position

    def written(self, number: int, offset: int, data: bytes) -> None:
        self._written.append(self.position)
        self._note_data(number, Written(number, offset, data))
        self._images[number].write(offset, data)

    def resized(self, number: int, nbytes: int, *, only_grows: bool = False) -> None:
        event = Resized(number, nbytes, only_grows)
        self._note_data(number, event)
        event.apply(self._images[number])

    def punched(self, number: int, offset: int, nbytes: int) -> None:
        event = Punched(number, offset, nbytes)
        self._note_data(number, event)
        for page in event.pages:
            self._images[number].punch(page)

    def flushed(self, number: int) -> None:
        self.events.append(Flushed(number))
        history = self._histories[number]
        if history.data and history.data[-1] >= history.positions[-1]:
            history.positions.append(self.position)
            history.images.append(self._images[number].copy())

    def index_changed(self, path: Path, *, log_flushed: bool) -> None:
        """Compare SQLite's files with what is known of them; the flushes are those that it promises."""
        database, log = self.name_of(path), f"{self.name_of(path)}-wal"
        now, log_now = _bytes_of(path), _bytes_of(path.with_name(f"{path.name}-wal"))
        known = self._names.get(database)
        copied = known is not None and self._compared.get(known, b"") != now
        self._log_changed(log, log_now, flushed=log_flushed or copied)
        if now is not None:
            number = self.made(database) if known is None else known
            if self._compare(number, now, first=0):
                self.flushed(number)
        if log_now is None:
            self.unlinked(log)

    def _log_changed(self, name: str, now: bytes | None, *, flushed: bool) -> None:
        number = self._names.get(name)
        if now is None:
            if number is not None:
                self.flushed(number)
            return
        if number is None:
            number = self.made(name)
        header, before = now[:LOG_HEADER_BYTES], self._compared.get(number, b"")
        if header != before[:LOG_HEADER_BYTES]:
            self.written(number, 0, header)
            self._compared[number] = header + before[LOG_HEADER_BYTES:]
            self.flushed(number)
            if not before:
                self.folder_flushed(_folder(name))
        self._compare(number, now, first=len(header))
        if flushed:
            self.flushed(number)

    def _compare(self, number: int, now: bytes, *, first: int) -> bool:
        before = self._compared.get(number, b"")
        self._compared[number] = now
        if before == now:
            return False
        for start in range(first, len(now), PAGE_BYTES):
            piece = now[start : start + PAGE_BYTES]
            if before[start : start + PAGE_BYTES] != piece:
                self.written(number, start, piece)
        if len(now) < len(before):
            self.resized(number, len(now))
        return True

    def _new_file(self, image: Image) -> int:
        number = next(self._numbers)
        self._images[number] = image
        self._histories[number] = _History([self.position], [image.copy()])
        return number

    def _note_name(self, event: Renamed, folder: str) -> None:
        noted = _NameEvent(self.position, event)
        self._name_events.append(noted)
        self._unflushed.setdefault(folder, []).append(noted)
        self.events.append(event)

    def _note_data(self, number: int, event: DataEvent) -> None:
        self._histories[number].data.append(self.position)
        self.events.append(event)

    # -- making up -------------------------------------------------------------------------------------------

    def state_at(self, cut: int, chance: random.Random) -> DiskState:
        """One of the states that are possible when the power goes after ``cut`` events."""
        how_names, how_bytes = chance.choice(list(_Names)), chance.choice(list(_Bytes))
        story = [f"power cut before event {cut} of {len(self.events)}", f"names: {how_names}", f"bytes: {how_bytes}"]
        folders, names = self._names_at(cut, how_names, chance, story)
        filler = self._filler(cut, chance)
        tear = _Tear(how_bytes, chance, filler)
        files: dict[str, Image] = {}
        for name, number in names.items():
            image = self._image_at(number, cut, tear)
            if image is not None:
                files[name] = image
        story.append(f"missing sectors: {'as before' if filler is None else 'bytes of another file'}")
        story += tear.story
        how_index = _Index.KEPT
        if chance.random() < INDEX_LOST_SHARE:
            how_index = chance.choice(list(_Index)[1:])
            _lose_index(files, how_index, chance)
        story.append(f"index: {how_index}")
        return DiskState(folders, files, how_index is not _Index.KEPT, "; ".join(story))

    def describe(self, cut: int, *, before: int = 25, after: int = 3) -> str:
        """The events around a cut."""
        first = max(0, cut - before)
        lines = [f"{n:6} {event}" for n, event in enumerate(self.events[first : cut + after], first)]
        lines.insert(cut - first, "       --- the power goes here ---")
        return "\n".join(lines)

    def _names_at(
        self, cut: int, how: _Names, chance: random.Random, story: list[str]
    ) -> tuple[list[str], dict[str, int]]:
        noted = self._name_events[: bisect_left(self._name_events, cut, key=lambda one: one.position)]
        kept = _keep_names([one.kept_from <= cut for one in noted], how, chance)
        lost = [str(one.event) for one, keep in zip(noted, kept, strict=True) if not keep]
        story.append(f"names not kept: {lost}")
        folders, names = set(self._folders), dict(self._first_names)
        for one, keep in zip(noted, kept, strict=True):
            if keep:
                _apply_name(one.event, folders, names)
        reached = {"": None}
        for folder in sorted(folders):
            if _folder(folder) in reached:
                reached[folder] = None
        return list(reached)[1:], {name: number for name, number in names.items() if _folder(name) in reached}

    def _image_at(self, number: int, cut: int, tear: _Tear) -> Image:
        history = self._histories[number]
        at = max(0, bisect_right(history.positions, cut) - 1)
        since = bisect_left(history.data, history.positions[at])
        pending = history.data[since : bisect_left(history.data, cut)]
        if not pending:
            return history.images[at]
        image = history.images[at].copy()
        tear.apply(image, [self.events[n] for n in pending])
        return image

    def _filler(self, cut: int, chance: random.Random) -> bytes | None:
        """Bytes of something that was written before, as a device holds them in sectors that are free again."""
        count = bisect_left(self._written, cut)
        if not count or chance.random() < 0.7:
            return None
        event = self.events[self._written[chance.randrange(count)]]
        assert isinstance(event, Written)
        sectors = max(1, len(event.data) // SECTOR_BYTES)
        start = chance.randrange(sectors) * SECTOR_BYTES
        return event.data[start : start + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0")


class _Tear:
    """Which of the unflushed changes of all files survive."""

    def __init__(self, how: _Bytes, chance: random.Random, filler: bytes | None) -> None:
        self._how = how
        self._chance = chance
        self._filler = filler
        self.story: list[str] = []

    def apply(self, image: Image, events: Sequence[Event]) -> None:
        chance = self._chance
        whole = {_Bytes.FLUSHED: 0, _Bytes.ALL: len(events), _Bytes.ORDERED: chance.randint(0, len(events))}
        for n, event in enumerate(events):
            keep = self._kept_share(n, whole.get(self._how))
            if keep < 1.0 or self._how is _Bytes.TORN:
                self.story.append(f"{event}: {keep:.0%} kept")
            if isinstance(event, Written):
                self._write(image, event, keep)
            elif isinstance(event, Resized) and chance.random() < keep:
                event.apply(image)
            elif isinstance(event, Punched):
                for page in event.pages:
                    if chance.random() < keep:
                        image.punch(page)

    def _kept_share(self, number: int, whole: int | None) -> float:
        if whole is None:
            return self._chance.choice((0.0, 1.0, 0.1, 0.5, 0.9))
        if self._how is _Bytes.ORDERED and number == whole:
            return 0.5
        return 1.0 if number < whole else 0.0

    def _write(self, image: Image, event: Written, keep: float) -> None:
        if keep >= 1.0:
            image.write(event.offset, event.data)
            return
        size, end = image.size, event.offset + len(event.data)
        for start in range(event.offset - event.offset % SECTOR_BYTES, end, SECTOR_BYTES):
            first, last = max(start, event.offset), min(start + SECTOR_BYTES, end)
            if self._chance.random() < keep:
                image.write(first, event.data[first - event.offset : last - event.offset])
            elif self._filler is not None and first // PAGE_BYTES not in image.pages:
                image.write(first, self._filler[: last - first])
        if keep > 0.0 and self._chance.random() < 0.5:
            image.size = max(image.size, end)
        elif keep <= 0.0 and self._chance.random() < 0.7:
            image.resize(size)


def _keep_names(flushed: list[bool], how: _Names, chance: random.Random) -> list[bool]:
    if how is _Names.FLUSHED:
        return flushed
    if how is _Names.ALL:
        return [True] * len(flushed)
    if how is _Names.ORDERED:
        # A journal keeps everything before what it kept.
        last = max((n + 1 for n, keep in enumerate(flushed) if keep), default=0)
        moment = chance.randint(last, len(flushed))
        return [n < moment for n in range(len(flushed))]
    share = chance.choice((0.2, 0.5, 0.8))
    return [keep or chance.random() < share for keep in flushed]


def _apply_name(event: Renamed, folders: set[str], names: dict[str, int]) -> None:
    if event.change is Change.FILE:
        names[event.path] = event.file
    elif event.change is Change.FOLDER:
        folders.add(event.path)
    elif event.change is Change.RENAME:
        if names.get(event.source) == event.file:
            del names[event.source]
        names[event.path] = event.file
    elif event.change is Change.UNLINK:
        if names.get(event.path) == event.file:
            del names[event.path]
    elif not any(name.startswith(f"{event.path}/") for name in (*folders, *names)):
        folders.discard(event.path)


def _lose_index(files: dict[str, Image], how: _Index, chance: random.Random) -> None:
    for name in [name for name in files if name.endswith(f"/{INDEX_NAME}")]:
        log = f"{name}-wal"
        if how is _Index.GONE:
            del files[name]
            if chance.random() < 0.5:
                files.pop(log, None)
        elif how is _Index.WITHOUT_LOG:
            files.pop(log, None)
        elif how is _Index.CUT_SHORT:
            image = files[name] = files[name].copy()
            image.resize(chance.randint(0, image.size))
        else:
            image = files[name] = files[name].copy()
            for start in range(0, image.size, SECTOR_BYTES):
                if chance.random() < 0.5:
                    image.write(start, chance.randbytes(min(SECTOR_BYTES, image.size - start)))


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


# -- recording -----------------------------------------------------------------------------------------------


class RecordingFileSystem(FileSystem):
    """The real file system for one process's life, everything it changes noted.

    ``skips`` names operations that are not done at all, as by code that forgot them. ``die_in`` operations from when it
    is set the process is gone, as by SIGKILL; ``bury`` then closes what it had open.
    """

    def __init__(self, journal: Journal, *, skips: frozenset[str] = frozenset(), log_pages: int = 1000) -> None:
        self._journal = journal
        self._skips = skips
        self._log_pages = log_pages
        self._fds: dict[int, int] = {}
        self._connections: list[tuple[Path, sqlite3.Connection]] = []
        self._keepers: list[sqlite3.Connection] = []
        self.die_in: int | None = None
        self.dead = False

    def _step(self) -> None:
        if self.die_in is not None:
            self.die_in -= 1
            self.dead |= self.die_in <= 0
        if self.dead:
            raise SimulatedCrash("killed")

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._step()
        name = self._journal.name_of(path)
        fd = super().open(path, flags, mode)
        number = self._journal.number_of(name)
        self._fds[fd] = self._journal.made(name) if number is None else number
        return fd

    def close(self, fd: int) -> None:
        self._step()
        self._fds.pop(fd, None)
        super().close(fd)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._step()
        written = super().pwritev(fd, views, offset)
        self._journal.written(self._fds[fd], offset, b"".join(views)[:written])
        return written

    def flush(self, fd: int) -> None:
        self._step()
        if "flush" not in self._skips:
            super().flush(fd)
            self._journal.flushed(self._fds[fd])

    def flush_folder(self, path: Path) -> None:
        self._step()
        if "flush_folder" not in self._skips:
            super().flush_folder(path)
            if path == self._journal.base or self._journal.base in path.parents:
                self._journal.folder_flushed(self._journal.name_of(path))

    def truncate(self, fd: int, nbytes: int) -> None:
        self._step()
        super().truncate(fd, nbytes)
        self._journal.resized(self._fds[fd], nbytes)

    def allocate(self, fd: int, nbytes: int) -> bool:
        self._step()
        done = super().allocate(fd, nbytes)
        if done:
            self._journal.resized(self._fds[fd], nbytes, only_grows=True)
        return done

    def punch_hole(self, fd: int, offset: int, nbytes: int) -> bool:
        self._step()
        done = super().punch_hole(fd, offset, nbytes)
        if done:
            self._journal.punched(self._fds[fd], offset, nbytes)
        return done

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)
        self._journal.renamed(self._journal.name_of(source), self._journal.name_of(target))

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)
        self._journal.unlinked(self._journal.name_of(path))

    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)
        self._journal.folder_made(self._journal.name_of(path))

    def remove_folder(self, path: Path) -> None:
        self._step()
        super().remove_folder(path)
        self._journal.folder_removed(self._journal.name_of(path))

    def connect(self, path: Path) -> sqlite3.Connection:
        """A connection whose commits are noted; killed inside one, it is written but not flushed."""
        self._step()
        life = self

        class Connection(sqlite3.Connection):
            synchronous = "FULL"

            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                words = statement.strip(" ;\n").upper().split()
                life._step_index()
                done = super().execute(statement, *values)
                if words[:2] == ["PRAGMA", "SYNCHRONOUS"]:
                    self.synchronous = words[-1]
                elif words[:1] == ["COMMIT"]:
                    life._committed(path, flushed=self.synchronous == "FULL")
                elif words[:1] == ["PRAGMA"]:
                    life._journal.index_changed(path, log_flushed=False)
                return done

            def executemany(self, statement: str, *values: Any) -> sqlite3.Cursor:
                life._step_index()
                return super().executemany(statement, *values)

            def close(self) -> None:
                life._step_index()
                life._close(path, self)

        connection = sqlite3.connect(
            path, timeout=0.1, isolation_level=None, check_same_thread=False, factory=Connection
        )
        self._connections.append((path, connection))
        sqlite3.Connection.execute(connection, f"PRAGMA wal_autocheckpoint = {self._log_pages}")
        return connection

    def bury(self) -> list[sqlite3.Connection]:
        """Close what the dead process had open.

        The connections that come back keep SQLite from tidying up its log, which a dead process does not do; give them
        to the next one with ``keep_until_close``.
        """
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        keepers = []
        for path, connection in self._connections:
            sqlite3.Connection.rollback(connection)
            if _bytes_of(path.with_name(f"{path.name}-wal")):
                keepers.append(sqlite3.connect(path, timeout=0.1, isolation_level=None))
                keepers[-1].execute("SELECT count(*) FROM sqlite_master").fetchall()
            sqlite3.Connection.close(connection)
            self._journal.index_changed(path, log_flushed=False)
        return keepers

    def keep_until_close(self, keepers: Sequence[sqlite3.Connection]) -> None:
        """Connections that are closed before this process closes its index."""
        self._keepers += keepers

    def _close(self, path: Path, connection: sqlite3.Connection) -> None:
        while self._keepers:
            self._keepers.pop().close()
        self._connections.remove((path, connection))
        sqlite3.Connection.close(connection)
        self._journal.index_changed(path, log_flushed=False)

    def _step_index(self) -> None:
        if self.dead:
            raise SimulatedCrash("killed")

    def _committed(self, path: Path, *, flushed: bool) -> None:
        if self.die_in is not None and self.die_in <= 1:
            self.dead = True
            self._journal.index_changed(path, log_flushed=False)
            raise SimulatedCrash("killed while it committed")
        if self.die_in is not None:
            self.die_in -= 1
        self._journal.index_changed(path, log_flushed=flushed)
