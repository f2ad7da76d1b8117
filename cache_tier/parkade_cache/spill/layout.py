"""Where things lie in a spill directory, and what may be touched there.

``<root>/lock``, ``<root>/<identity>.generation``, ``<root>/quarantine/`` and, for each identity,
``<root>/identities/<fingerprint>/{identity.json,index.sqlite,rank-N/{tmp,packs/<xx>}}``. Every path is made from a
checked name here, and every file and folder is checked before it is used: no links, one name, own user (D5).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from parkade_cache.errors import FormatError, SpillError, UnsafePathError
from parkade_cache.ids import PackId
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.pack import require_fingerprint, require_pack_id

PACK_SUFFIX = ".pack"
TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class IdentityFolder:
    """The folder of one identity."""

    root: Path
    fingerprint: str

    @property
    def path(self) -> Path:
        """The folder itself."""
        return identities_folder(self.root) / require_fingerprint(self.fingerprint)

    @property
    def index(self) -> Path:
        """The SQLite index."""
        return self.path / "index.sqlite"

    def rank(self, rank: int) -> Path:
        """The folder of one rank's files."""
        return self.path / f"rank-{int(rank)}"


def identities_folder(root: Path) -> Path:
    """Holds one folder for each identity."""
    return root / "identities"


def quarantine_folder(root: Path) -> Path:
    """Holds damaged packs for a person to look at."""
    return root / "quarantine"


def temporary_path(rank_folder: Path, pack_id: PackId) -> Path:
    """Where a pack is written before it is complete."""
    return rank_folder / "tmp" / f"{require_pack_id(pack_id)}{TEMPORARY_SUFFIX}"


def pack_path(rank_folder: Path, pack_id: PackId) -> Path:
    """Where a complete pack lies; spread by the name's random end, since its beginning is the time."""
    return rank_folder / "packs" / require_pack_id(pack_id)[-2:] / f"{pack_id}{PACK_SUFFIX}"


def pack_id_of(name: str, *, suffix: str) -> PackId | None:
    """The pack that a file name stands for; None for any other file."""
    try:
        return require_pack_id(name.removesuffix(suffix)) if name.endswith(suffix) else None
    except UnsafePathError:
        return None


def raise_spill_error(error: OSError, doing: str) -> NoReturn:
    """The kernel's error as ours, its number kept; one that is ours already goes on as it is."""
    if isinstance(error, SpillError):
        raise error
    raise SpillError(error.errno or errno.EIO, f"{doing}: {error.strerror or error}") from error


def ensure_folder(fs: FileSystem, path: Path) -> bool:
    """Make a private folder, or check the one that is there; whether it was made."""
    try:
        fs.make_folder(path)
    except FileExistsError:
        check_folder(fs, path)
        return False
    return True


def check_folder(fs: FileSystem, path: Path) -> None:
    """A real folder of our own, or UnsafePathError."""
    found = fs.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UnsafePathError(f"not a folder of this user: {path}")


def check_file(found: os.stat_result, path: Path) -> None:
    """A regular file with one name, of our own, or UnsafePathError (D5)."""
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePathError(f"not a regular file: {path}")
    if found.st_nlink != 1:
        raise UnsafePathError(f"has {found.st_nlink} names, expected one: {path}")
    if found.st_uid != os.geteuid():
        raise UnsafePathError(f"belongs to user {found.st_uid}: {path}")


def open_checked(fs: FileSystem, path: Path, flags: int) -> int:
    """Open an existing file of ours in a folder of ours; a link, pipe or foreign file is refused (D5)."""
    check_folder(fs, path.parent)
    return open_checked_file(fs, path, flags)


def open_checked_file(fs: FileSystem, path: Path, flags: int) -> int:
    """The same in a folder that need not be ours: a mount's root belongs to whoever made the volume."""
    check_file(fs.lstat(path), path)
    try:
        # Without O_NONBLOCK a pipe in a file's place would hold the caller for ever.
        fd = fs.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise UnsafePathError(f"a link or pipe where a file was expected: {path}") from error
        raise
    try:
        check_file(fs.fstat(fd), path)
    except BaseException:
        fs.close(fd)
        raise
    return fd


def read_small_file(fs: FileSystem, path: Path, *, most_bytes: int = 4096, from_device: bool = False) -> bytes:
    """A file that must be small; FormatError when it is not. ``from_device`` passes by what memory has of it."""
    fd = open_checked_file(fs, path, os.O_RDONLY)
    try:
        if from_device:
            fs.drop_cache(fd, 0, 0)
        buffer = bytearray(most_bytes + 1)
        nbytes = fs.preadv(fd, [memoryview(buffer)], 0)
    finally:
        fs.close(fd)
    if nbytes > most_bytes:
        raise FormatError(f"larger than {most_bytes} bytes: {path}")
    return bytes(buffer[:nbytes])


def write_small_file(fs: FileSystem, path: Path, data: bytes) -> None:
    """Replace a small file; after a crash it is the old or the new one."""
    temporary = path.with_name(f"{path.name}{TEMPORARY_SUFFIX}")
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(temporary)
    fd = fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        try:
            if fs.pwritev(fd, [memoryview(data)], 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fs.flush(fd)
        finally:
            fs.close(fd)
        fs.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise
    fs.flush_folder(path.parent)


def remove_file(fs: FileSystem, path: Path) -> int:
    """Remove a file of ours; the bytes it held on disk, 0 when it is gone already."""
    try:
        check_folder(fs, path.parent)
        found = fs.lstat(path)
        check_file(found, path)
        fs.unlink(path)
    except FileNotFoundError:
        return 0
    return disk_bytes(found)


def remove_tree(fs: FileSystem, folder: Path) -> None:
    """Remove a folder of ours with what is in it; links and foreign files stay, and so do their folders."""
    check_folder(fs, folder)
    for name in fs.names(folder):
        path = folder / name
        with contextlib.suppress(UnsafePathError):
            if stat.S_ISDIR(fs.lstat(path).st_mode):
                remove_tree(fs, path)
            else:
                remove_file(fs, path)
    with contextlib.suppress(OSError):
        fs.remove_folder(folder)


def tree_bytes(fs: FileSystem, path: Path) -> int:
    """Bytes on disk under a path, links not followed; what cannot be read counts as nothing."""
    try:
        found = fs.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            return disk_bytes(found)
        return sum(tree_bytes(fs, path / name) for name in fs.names(path))
    except OSError:
        return 0


def disk_bytes(found: os.stat_result) -> int:
    """What a file takes on the device, holes not counted."""
    return found.st_blocks * 512
