"""Verifying a spill directory without changing it: pages, index against packs, and where asked every block (D4).

What must stay true: what is reported as damage is damage, also beside a living pod that publishes and drops while this
looks. So everything found beside one is looked at again, with the index as it is by then, before it counts.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parkade_cache.errors import FormatError, SpillError, UnsafePathError
from parkade_cache.ids import PackId
from parkade_cache.spill import layout
from parkade_cache.spill.aligned import aligned_buffer
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.generation import stored_generation
from parkade_cache.spill.holdings import PackView
from parkade_cache.spill.index import IndexedPack
from parkade_cache.spill.inspection import (
    Holder,
    IdentityView,
    IndexState,
    LostPack,
    PackFate,
    ReadOnlyFileSystem,
    describe_identity,
    fingerprints_in,
    holder_of,
    quarantined,
    require_spill_directory,
)
from parkade_cache.spill.layout import IdentityFolder
from parkade_cache.spill.pack import PackAddress, PackEntry, PackInfo
from parkade_cache.spill.pack_reader import PackReader

BATCH_BYTES = 16 << 20
"""Read at once, a larger block by itself: this may run in a pod that is short of memory."""

Progress = Callable[[int, int], None]
"""Told how many of how many bytes are done; files where no block is read."""

NO_START = "no pod starts while it is there: remove it"
READ_ANEW = "the pack goes to quarantine, and what it held is read anew"
UNREADABLE = "not served while it cannot be read"
ON_READ = "served until such a block is read: then it is read anew, and the pack goes to quarantine"

_NEXT_START = {
    PackFate.INCOMPLETE: "removed: it was never published",
    PackFate.MISSING: "forgotten, the rest of it is removed, and what it held is read anew",
    PackFate.DAMAGED: READ_ANEW,
    PackFate.EMPTY: "removed",
    PackFate.UNSAFE: "left alone and not served, and what it held is read anew",
    PackFate.UNREADABLE: "not served; tried again at every start",
}
_LEFTOVERS = frozenset({PackFate.INCOMPLETE, PackFate.EMPTY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found, and what the next start makes of it. What is no damage was left by a crash."""

    what: str
    next_start: str
    damage: bool = True
    identity: str = ""
    pack: str = ""
    path: Path | None = None
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a check saw."""

    root: Path
    holder: Holder | None
    packs: int
    blocks: int
    read_bytes: int
    findings: tuple[Finding, ...]

    @property
    def damage(self) -> tuple[Finding, ...]:
        """What a conversation may lose blocks by, or a pod its start."""
        return tuple(finding for finding in self.findings if finding.damage)

    @property
    def leftovers(self) -> tuple[Finding, ...]:
        """What a crash left; harmless."""
        return tuple(finding for finding in self.findings if not finding.damage)


def check_directory(
    root: Path, *, read_data: bool, progress: Progress = lambda _done, _total: None, fs: FileSystem | None = None
) -> CheckReport:
    """Verify every pack's header and footer and the index, with ``read_data`` also every living block's checksum.

    SpillError when it is no spill directory, belongs to another user or cannot be read.
    """
    fs = fs or ReadOnlyFileSystem()
    require_spill_directory(fs, root)
    try:
        return _Check(fs, root, read_data=read_data, progress=progress).run()
    except OSError as error:
        layout.raise_spill_error(error, f"reading spill directory {root}")


class _Check:
    """One pass over a directory."""

    def __init__(self, fs: FileSystem, root: Path, *, read_data: bool, progress: Progress) -> None:
        self._fs = fs
        self._root = root
        self._progress = progress
        self._holder = holder_of(fs, root)
        self._names = fingerprints_in(fs, root)
        self._data = _DataReader(fs) if read_data else None
        self._total = sum(map(self._size_of, self._names))
        self._done = 0
        self._packs = 0
        self._blocks = 0

    def run(self) -> CheckReport:
        """Look at everything."""
        findings = [finding for name in self._names for finding in self._check_identity(name)]
        findings += [
            Finding(what="in quarantine", next_start="kept, within bounds", damage=False, path=file.path)
            for file in quarantined(self._fs, self._root)
        ]
        self._progress(self._total, self._total)
        return CheckReport(
            root=self._root,
            holder=self._holder,
            packs=self._packs,
            blocks=self._blocks,
            read_bytes=self._data.read_bytes if self._data is not None else 0,
            findings=tuple(findings),
        )

    def _size_of(self, fingerprint: str) -> int:
        paths = IdentityFolder(self._root, fingerprint).path.glob("rank-*/packs/*/*.pack")
        return sum(layout.tree_bytes(self._fs, path) if self._data is not None else 1 for path in paths)

    def _advance(self, amount: int) -> None:
        self._done = min(self._total, self._done + amount)
        self._progress(self._done, self._total)

    # -- one identity --------------------------------------------------------------------------------------------

    def _check_identity(self, fingerprint: str) -> Iterator[Finding]:
        doubtful: list[PackId] = []
        with IdentityView(self._fs, self._root, fingerprint) as view:
            view.prove_index()
            yield from self._check_index(view)
            yield from self._check_description(view)
            for pack_id in view.all_pack_ids():
                found = list(self._check_pack(view, pack_id, again=False))
                if found and self._holder is not None:
                    doubtful.append(pack_id)
                else:
                    yield from found
            temporaries = view.temporaries()
        if doubtful:
            # What a living pod published or dropped meanwhile looks like damage until the index is read again.
            with IdentityView(self._fs, self._root, fingerprint) as view:
                view.prove_index()
                for pack_id in doubtful:
                    yield from self._check_pack(view, pack_id, again=True)
        for file in temporaries:
            what = "unfinished" if self._holder is None else "unfinished, or being written"
            yield Finding(what=what, next_start="removed", damage=False, identity=fingerprint, path=file.path)

    def _check_index(self, view: IdentityView) -> Iterator[Finding]:
        state, path = view.index.state, view.folder.index
        if state is IndexState.NOT_COPIED:
            raise SpillError(errno.EIO, f"the index {path} cannot be checked: {view.index.reason}")
        if state is IndexState.READ or (state is IndexState.MISSING and not view.shelf.pack_ids()):
            return
        yield Finding(
            what="the index is missing" if state is IndexState.MISSING else view.index.reason,
            next_start=(
                NO_START
                if state is IndexState.REFUSED
                else "rebuilt from the packs; when conversations were last used is lost"
            ),
            identity=view.folder.fingerprint,
            path=path,
        )

    def _check_description(self, view: IdentityView) -> Iterator[Finding]:
        """``identity.json``, and the count of generations that belongs to it."""
        found = Finding(what="", next_start=NO_START, identity=view.folder.fingerprint)
        try:
            identity = describe_identity(self._fs, view.folder)
        except UnsafePathError as error:
            yield replace(found, what=str(error))
            return
        except FormatError as error:
            yield replace(found, what=str(error), next_start="written anew")
            return
        try:
            if identity is not None:
                stored_generation(self._fs, self._root, identity)
        except (FormatError, UnsafePathError) as error:
            yield replace(found, what=str(error), next_start="a new generation begins: nothing of this one is found")

    # -- one pack ------------------------------------------------------------------------------------------------

    def _check_pack(self, view: IdentityView, pack_id: PackId, *, again: bool) -> Iterator[Finding]:
        """What is wrong with a pack; nothing when there is nothing of it any more."""
        found = Finding(what="", next_start="", identity=view.folder.fingerprint, pack=pack_id)
        try:
            row = view.index.load(pack_id)
        except FormatError as error:
            row = None
            yield replace(found, what=str(error), next_start="the row is made again from the pack")
        seen = view.look_at(pack_id, row)
        if isinstance(seen, LostPack):
            damage = seen.fate not in _LEFTOVERS
            yield replace(found, what=seen.reason, next_start=_NEXT_START[seen.fate], damage=damage)
        elif seen is not None:
            if not seen.indexed and view.index.state is IndexState.READ:
                yield replace(found, what="complete, and not in the index", next_start="adopted", damage=False)
            if not again:
                self._packs += 1
                self._blocks += sum(1 for _ in seen.living())
            yield from self._check_files(view, seen, row, found, again=again)
        if not again and self._data is None:
            self._advance(view.ranks)

    def _check_files(
        self, view: IdentityView, seen: PackView, row: IndexedPack | None, found: Finding, *, again: bool
    ) -> Iterator[Finding]:
        try:
            # Without a row they were read, and compared with each other, a moment ago.
            infos = row.infos if row is not None else view.shelf.read_infos(seen.pack_id)
            holes = view.shelf.holes(infos) - seen.dead
        except (OSError, FormatError) as error:
            yield replace(found, what=str(error), next_start=READ_ANEW)
            return
        if holes:
            what = f"blocks that are holes, and not dead by the index: {len(holes)}"
            yield replace(found, what=what, next_start=ON_READ, blocks=len(holes))
        living = [n for n, _ in seen.living() if n not in holes]
        for info, path in zip(infos, view.shelf.paths(seen.pack_id), strict=True):
            at = replace(found, path=path)
            if row is not None:
                yield from self._check_pages(info, path, at)
            if self._data is not None:
                file = _RankFile(path, info, [info.entries[n] for n in living])
                yield from _check_data(self._data, file, at, on_read=_nothing if again else self._advance)

    def _check_pages(self, info: PackInfo, path: Path, at: Finding) -> Iterator[Finding]:
        """A published file's own pages; the index has a copy of them, so a start does not need them."""
        try:
            with _reader(self._fs, path, info, depth=0) as reader:
                if not _is_same(reader.read_info(), info):
                    next_start = "the index is believed; blocks that do not fit are read anew"
                    yield replace(at, what="its header, footer or trailer is not the index's", next_start=next_start)
        except FormatError as error:
            yield replace(at, what=str(error), next_start="served by the index's copy; if that is lost, quarantined")
        except OSError as error:
            yield replace(at, what=error.strerror or str(error), next_start=UNREADABLE)


def _check_data(
    data: _DataReader, file: _RankFile, at: Finding, *, on_read: Callable[[int], None]
) -> Iterator[Finding]:
    try:
        bad = data.count_bad(file, on_read)
    except OSError as error:
        yield replace(at, what=error.strerror or str(error), next_start=UNREADABLE)
        return
    if bad:
        yield replace(at, what=f"blocks that are not what was written: {bad}", next_start=ON_READ, blocks=bad)


def _is_same(one: PackInfo, other: PackInfo) -> bool:
    """Whether two descriptions mean the same pack; when it was made decides nothing."""
    return replace(one, header=replace(one.header, created_at=other.header.created_at)) == other


def _nothing(_nbytes: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class _RankFile:
    path: Path
    info: PackInfo
    entries: Sequence[PackEntry]


class _DataReader:
    """Reads blocks to verify them, with one piece of memory for all."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._memory = aligned_buffer(BATCH_BYTES)
        self.read_bytes = 0

    def count_bad(self, file: _RankFile, on_read: Callable[[int], None]) -> int:
        """How many of its blocks cannot be read, or are not what was written; SpillError when it cannot be opened."""
        bad = 0
        with _reader(self._fs, file.path, file.info, depth=1) as reader:
            for batch in _batches(file.entries):
                nbytes = sum(entry.padded_bytes for entry in batch)
                if nbytes > len(self._memory):
                    self._memory = aligned_buffer(nbytes)
                bad += reader.read_into(batch, list(_slices(self._memory, batch))).count(False)
                self.read_bytes += nbytes
                on_read(nbytes)
        return bad


def _reader(fs: FileSystem, path: Path, info: PackInfo, *, depth: int) -> PackReader:
    header = info.header
    expected = PackAddress(header.pack_id, header.identity, header.rank)
    # Not direct: whether the file system can is found out by making a file. What is read leaves the page cache at once.
    return PackReader(fs, path, expected=expected, direct=False, depth=depth)


def _batches(entries: Sequence[PackEntry]) -> Iterator[list[PackEntry]]:
    batch: list[PackEntry] = []
    nbytes = 0
    for entry in entries:
        if batch and nbytes + entry.padded_bytes > BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(entry)
        nbytes += entry.padded_bytes
    if batch:
        yield batch


def _slices(memory: memoryview, batch: Sequence[PackEntry]) -> Iterator[memoryview]:
    start = 0
    for entry in batch:
        yield memory[start : start + entry.padded_bytes]
        start += entry.padded_bytes
