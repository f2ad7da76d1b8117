"""The pack files of one identity, all ranks together: list, check, read, give back, remove. No decisions, no index."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import xxhash

from parkade_cache.errors import FormatError, UnsafePathError
from parkade_cache.ids import PackId
from parkade_cache.spill import layout
from parkade_cache.spill.aligned import PAGE_BYTES
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.layout import IdentityFolder
from parkade_cache.spill.pack import PackAddress, PackInfo, same_shape
from parkade_cache.spill.pack_reader import PackReader


class PackHealth(enum.StrEnum):
    """What a look at names and sizes says about a pack, all ranks."""

    WHOLE = "whole"
    MISSING = "missing"
    DAMAGED = "damaged"
    UNSAFE = "unsafe"


class PackShelf:
    """Pack files of one identity on this node."""

    def __init__(self, fs: FileSystem, folder: IdentityFolder, *, ranks: int) -> None:
        """``ranks`` files make one pack."""
        self._fs = fs
        self._folder = folder
        self._ranks = range(ranks)

    @property
    def fingerprint(self) -> str:
        """The identity whose files these are."""
        return self._folder.fingerprint

    def prepare(self) -> None:
        """Make the folders that writers need."""
        for rank in self._ranks:
            for path in (self._folder.rank(rank), *self._parts(rank)):
                layout.ensure_folder(self._fs, path)
            self._fs.flush_folder(self._folder.rank(rank))
        self._fs.flush_folder(self._folder.path)

    def paths(self, pack_id: PackId) -> list[Path]:
        """Where the complete files lie, by rank."""
        return [layout.pack_path(self._folder.rank(rank), pack_id) for rank in self._ranks]

    def pack_ids(self) -> list[PackId]:
        """Every pack of which a rank has a file, newest first."""
        found = {pack_id for rank in self._ranks for pack_id in self._rank_pack_ids(rank)}
        return sorted(found, reverse=True)

    def unfinished(self) -> list[Path]:
        """Files in the temporary folders, whosever they are."""
        folders = [self._folder.rank(rank) / "tmp" for rank in self._ranks]
        return [folder / name for folder in folders for name in self._fs.names(folder)]

    def remove_unfinished(self, path: Path) -> None:
        """Remove one of them."""
        layout.remove_file(self._fs, path)

    def check(self, infos: tuple[PackInfo, ...]) -> PackHealth:
        """Compare names and sizes with what the index says, without opening a file."""
        for path, info in zip(self.paths(infos[0].header.pack_id), infos, strict=True):
            try:
                found = self._fs.lstat(path)
                layout.check_file(found, path)
            except FileNotFoundError:
                return PackHealth.MISSING
            except UnsafePathError:
                return PackHealth.UNSAFE
            if found.st_size != info.file_bytes:
                return PackHealth.DAMAGED
        return PackHealth.WHOLE

    def is_complete(self, pack_id: PackId) -> bool:
        """Whether every rank's file has its final name."""
        return all(self._lstat(path) is not None for path in self.paths(pack_id))

    def flush_names(self, pack_id: PackId) -> None:
        """What is seen of a pack's names, there or gone, is so on the device too."""
        for path in self.paths(pack_id):
            with contextlib.suppress(FileNotFoundError):
                self._fs.flush_folder(path.parent)

    def disk_bytes(self, pack_id: PackId) -> int:
        """What a pack takes now, finished or not."""
        temporaries = [layout.temporary_path(self._folder.rank(rank), pack_id) for rank in self._ranks]
        stats = [self._lstat(path) for path in (*self.paths(pack_id), *temporaries)]
        return sum(layout.disk_bytes(found) for found in stats if found is not None)

    def read_infos(self, pack_id: PackId) -> tuple[PackInfo, ...]:
        """Read every rank's pages; FormatError when a file is damaged or the ranks do not belong together."""
        infos = tuple(self._read_info(pack_id, rank) for rank in self._ranks)
        if any(not same_shape(infos[0], info) or info.header.ranks != len(infos) for info in infos):
            raise FormatError(f"the ranks' files of pack {pack_id} do not hold the same blocks")
        return infos

    def holes(self, infos: tuple[PackInfo, ...]) -> frozenset[int]:
        """Blocks whose first page is a hole on some rank: their space was given back, so they are dead."""
        return frozenset(n for rank, info in enumerate(infos) for n in self._rank_holes(info, rank))

    def punch(self, infos: tuple[PackInfo, ...], entries: Iterable[int]) -> int:
        """Give the space of dead blocks back, all ranks; the bytes, 0 where the file system cannot."""
        runs = list(_runs(infos[0], sorted(entries)))
        return sum(self._punch_file(path, runs) for path in self.paths(infos[0].header.pack_id))

    def remove(self, pack_id: PackId) -> None:
        """Remove all of a pack, finished and unfinished, and see to it that the names stay gone."""
        for rank, path in zip(self._ranks, self.paths(pack_id), strict=True):
            layout.remove_file(self._fs, layout.temporary_path(self._folder.rank(rank), pack_id))
            if self._lstat(path) is not None:
                layout.remove_file(self._fs, path)
                self._fs.flush_folder(path.parent)

    def _parts(self, rank: int) -> tuple[Path, Path]:
        return self._folder.rank(rank) / "tmp", self._folder.rank(rank) / "packs"

    def _rank_pack_ids(self, rank: int) -> Iterator[PackId]:
        packs = self._folder.rank(rank) / "packs"
        for shard in self._fs.names(packs):
            with contextlib.suppress(NotADirectoryError, UnsafePathError):
                layout.check_folder(self._fs, packs / shard)
                yield from self._shard_pack_ids(packs / shard)

    def _shard_pack_ids(self, shard: Path) -> Iterator[PackId]:
        for name in self._fs.names(shard):
            pack_id = layout.pack_id_of(name, suffix=layout.PACK_SUFFIX)
            if pack_id is not None and pack_id.endswith(shard.name):
                yield pack_id

    def _lstat(self, path: Path) -> os.stat_result | None:
        try:
            return self._fs.lstat(path)
        except FileNotFoundError:
            return None

    def _read_info(self, pack_id: PackId, rank: int) -> PackInfo:
        path = layout.pack_path(self._folder.rank(rank), pack_id)
        # Three small reads: not worth a probe for direct I/O, and dropped from the page cache at once.
        expected = PackAddress(pack_id, self.fingerprint, rank)
        with PackReader(self._fs, path, expected=expected, direct=False, depth=0) as reader:
            return reader.read_info()

    def _rank_holes(self, info: PackInfo, rank: int) -> Iterator[int]:
        path = layout.pack_path(self._folder.rank(rank), info.header.pack_id)
        fd = layout.open_checked(self._fs, path, os.O_RDONLY)
        try:
            for n, entry in enumerate(info.entries):
                data = self._fs.first_data(fd, entry.offset)
                is_hole = data is None or data >= entry.offset + PAGE_BYTES
                # Some file systems keep zeros as holes, so a block of nothing but zeros is good as it is.
                if is_hole and entry.checksum != _checksum_of_zeros(entry.nbytes):
                    yield n
        finally:
            self._fs.close(fd)

    def _punch_file(self, path: Path, runs: list[tuple[int, int]]) -> int:
        fd = layout.open_checked(self._fs, path, os.O_WRONLY)
        try:
            return sum(nbytes for offset, nbytes in runs if self._fs.punch_hole(fd, offset, nbytes))
        finally:
            self._fs.close(fd)


@lru_cache(maxsize=64)
def _checksum_of_zeros(nbytes: int) -> int:
    digest = xxhash.xxh3_64()
    zeros = bytes(1 << 20)
    for start in range(0, nbytes, len(zeros)):
        digest.update(zeros[: nbytes - start])
    return digest.intdigest()


def _runs(info: PackInfo, entries: list[int]) -> Iterator[tuple[int, int]]:
    """Adjacent blocks as one range each."""
    start = end = 0
    for n in entries:
        entry = info.entries[n]
        if entry.offset != end:
            if end > start:
                yield start, end - start
            start = entry.offset
        end = entry.offset + entry.padded_bytes
    if end > start:
        yield start, end - start
