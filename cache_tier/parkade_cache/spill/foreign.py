"""Files in the spill directory that are not this identity's (D1).

Other identities' folders are never matched, count against the capacity and are the first to go. Files that Parkade did
not make count too, and are never touched.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from parkade_cache.errors import UnsafePathError
from parkade_cache.spill import layout
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.pack import require_fingerprint

OWN_NAMES = frozenset({"lock", "identities", "quarantine"})


@dataclass(frozen=True, slots=True)
class ForeignIdentity:
    """Another identity's folder."""

    path: Path
    nbytes: int
    last_used: float


class ForeignFiles:
    """What else is in the directory, as of the last scan."""

    def __init__(self, fs: FileSystem, root: Path) -> None:
        """Nothing is read before ``scan``."""
        self._fs = fs
        self._root = root
        self._identities: list[ForeignIdentity] = []
        self._unknown_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk that are not this identity's."""
        return self._unknown_bytes + self.removable_bytes

    @property
    def removable_bytes(self) -> int:
        """Those of other identities."""
        return sum(identity.nbytes for identity in self._identities)

    def scan(self, *, own_fingerprint: str) -> None:
        """Count everything; listing and stat only."""
        self._identities, self._unknown_bytes = [], 0
        for name in self._fs.names(self._root):
            if name not in OWN_NAMES and not name.endswith(".generation"):
                self._unknown_bytes += layout.tree_bytes(self._fs, self._root / name)
        folder = layout.identities_folder(self._root)
        for name in self._fs.names(folder):
            if name != own_fingerprint:
                self._count(folder / name)
        self._identities.sort(key=lambda identity: identity.last_used)

    def clear(self, nbytes: int) -> int:
        """Remove whole identities, the longest unused first, until ``nbytes`` are gone; what went."""
        gone = 0
        while self._identities and gone < nbytes:
            identity = self._identities.pop(0)
            layout.remove_tree(self._fs, identity.path)
            left = layout.tree_bytes(self._fs, identity.path)
            self._unknown_bytes += left
            gone += identity.nbytes - left
        return gone

    def _count(self, path: Path) -> None:
        nbytes = layout.tree_bytes(self._fs, path)
        try:
            require_fingerprint(path.name)
            layout.check_folder(self._fs, path)
        except UnsafePathError:
            self._unknown_bytes += nbytes
            return
        self._identities.append(ForeignIdentity(path, nbytes, self._last_used(path)))

    def _last_used(self, path: Path) -> float:
        times = [0.0]
        for name in ("index.sqlite", "index.sqlite-wal", "."):
            with contextlib.suppress(OSError):
                times.append(self._fs.lstat(path / name).st_mtime)
        return max(times)
