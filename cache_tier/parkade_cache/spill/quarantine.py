"""Damaged packs, kept for a person to look at, few and small, and the first to go when space is needed (D4)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from parkade_cache.errors import UnsafePathError
from parkade_cache.spill import layout
from parkade_cache.spill.files import FileSystem

MAX_QUARANTINED_FILES = 8
MAX_CAPACITY_PERCENT = 5


class Quarantine:
    """The quarantine folder of a spill directory, all identities together."""

    def __init__(self, fs: FileSystem, root: Path, *, capacity_bytes: int) -> None:
        """At most 8 files and 5 % of the capacity."""
        self._fs = fs
        self._folder = layout.quarantine_folder(root)
        self._most_bytes = capacity_bytes * MAX_CAPACITY_PERCENT // 100
        self._files: dict[str, int] = {}
        self.taken_total = 0

    def set_capacity(self, capacity_bytes: int) -> None:
        """Another capacity of the directory from now on; what is over its share goes with the next that comes."""
        self._most_bytes = capacity_bytes * MAX_CAPACITY_PERCENT // 100

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(self._files.values())

    @property
    def files(self) -> int:
        """How many are kept."""
        return len(self._files)

    def scan(self) -> None:
        """See what is there, and keep to the bounds."""
        layout.ensure_folder(self._fs, self._folder)
        names = self._fs.names(self._folder)
        self._files = {name: layout.tree_bytes(self._fs, self._folder / name) for name in names}
        self._trim()

    def take(self, paths: Iterable[Path], *, fingerprint: str) -> None:
        """Move the damaged files of one pack here; what is gone or unsafe stays where it is."""
        layout.ensure_folder(self._fs, self._folder)
        for path in paths:
            self._take_file(path, f"{path.stem}-{path.parents[2].name}-{fingerprint}{path.suffix}")
        self.taken_total += 1
        self._trim()

    def clear(self, nbytes: int) -> int:
        """Remove the oldest until ``nbytes`` are gone; what went."""
        gone = 0
        for name in sorted(self._files):
            if gone >= nbytes:
                break
            gone += self._remove(name)
        return gone

    def _take_file(self, path: Path, name: str) -> None:
        try:
            found = self._fs.lstat(path)
            layout.check_file(found, path)
        except (FileNotFoundError, UnsafePathError):
            return
        self._fs.rename(path, self._folder / name)
        self._files[name] = layout.disk_bytes(found)

    def _trim(self) -> None:
        # Names begin with the pack's, which is ordered by time.
        for name in sorted(self._files):
            if self.files <= MAX_QUARANTINED_FILES and self.nbytes <= self._most_bytes:
                return
            self._remove(name)

    def _remove(self, name: str) -> int:
        nbytes = self._files.pop(name)
        try:
            layout.remove_file(self._fs, self._folder / name)
        except UnsafePathError:
            return 0
        return nbytes
