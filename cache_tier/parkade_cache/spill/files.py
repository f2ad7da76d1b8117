"""The seam between the spill store and the kernel: every operation on files goes through one object.

Tests put a file system here that fails or dies after the n-th operation, so each method is one operation, in the order
the code asks for it. Nothing here decides anything; errors are the kernel's own ``OSError``. Also the SQLite connection
is opened here, since its commits are steps of the same publish order (D3).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parkade_cache.spill.aligned import PAGE_BYTES, aligned_buffer

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
SYNC_WAIT_BEFORE_WRITE_WAIT_AFTER = 0x07
UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
INDEX_BUSY_SECONDS = 5.0
INDEX_LOG_PAGES = 200
INDEX_LOG_BYTES = 1 << 20
"""More than the log takes before its pages move into the database, those of the commit that moves them included."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


@dataclass(frozen=True, slots=True)
class Space:
    """What a file system has, and what an unprivileged writer may still take."""

    total_bytes: int
    free_bytes: int


class FileSystem:
    """The real file system. All calls that may block release the interpreter lock."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Descriptor of ``path``; never inherited across exec."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Status of an open file."""
        return os.fstat(fd)

    def lstat(self, path: Path) -> os.stat_result:
        """Status of a name, links not followed."""
        return os.lstat(path)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read once into several pieces of memory; may be short."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Write once from several pieces of memory; may be short."""
        return os.pwritev(fd, views, offset)

    def flush(self, fd: int) -> None:
        """Data, and what of the metadata is needed to read it, is on the device."""
        os.fdatasync(fd)

    def flush_folder(self, path: Path) -> None:
        """Names made, renamed and removed in this folder are on the device."""
        fd = os.open(path, FOLDER_FLAGS)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cut or extend the file."""
        os.ftruncate(fd, nbytes)

    def allocate(self, fd: int, nbytes: int) -> bool:
        """Take the space of the whole file at once; False where the file system cannot."""
        return _fallocate(fd, 0, 0, nbytes)

    def set_aside(self, path: Path, nbytes: int) -> bool:
        """Take the space of a file's first ``nbytes``, its size and content unchanged; False where that cannot be."""
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return _fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, nbytes)
        finally:
            os.close(fd)

    def punch_hole(self, fd: int, offset: int, nbytes: int) -> bool:
        """Give the range's space back, the file's size unchanged; False where the file system cannot."""
        return _fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes)

    def first_data(self, fd: int, offset: int) -> int | None:
        """Where the first byte that is not in a hole lies, at or after ``offset``; None when there is none."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def write_back(self, fd: int, offset: int, nbytes: int) -> None:
        """Push a range of dirty page cache out and wait, without flushing the device."""
        if _libc.sync_file_range(fd, offset, nbytes, SYNC_WAIT_BEFORE_WRITE_WAIT_AFTER) == 0:
            return
        code = ctypes.get_errno()
        if code not in UNSUPPORTED:
            raise OSError(code, os.strerror(code))
        os.fdatasync(fd)

    def drop_cache(self, fd: int, offset: int, nbytes: int) -> None:
        """Take a clean range out of the page cache."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def rename(self, source: Path, target: Path) -> None:
        """Move a name atomically, replacing the target."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """One private folder; FileExistsError when something is there."""
        path.mkdir(0o700)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(path.name for path in folder.iterdir())

    def space(self, path: Path) -> Space:
        """Size and room of the file system that holds ``path``."""
        found = os.statvfs(path)
        return Space(total_bytes=found.f_frsize * found.f_blocks, free_bytes=found.f_frsize * found.f_bavail)

    def try_lock(self, fd: int) -> bool:
        """Take the file's exclusive lock; False when another open file has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def connect(self, path: Path) -> sqlite3.Connection:
        """A SQLite connection in autocommit mode: transactions are explicit. Its log stays below INDEX_LOG_BYTES."""
        connection = sqlite3.connect(path, timeout=INDEX_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA wal_autocheckpoint = {INDEX_LOG_PAGES}")
        return connection

    def supports_direct(self, folder: Path) -> bool:
        """Whether files in ``folder`` can be written around the page cache; tried, since no call tells."""
        path = folder / ".direct"  # one name for all: the next start removes what a killed one left
        with contextlib.suppress(FileNotFoundError):
            self.unlink(path)
        try:
            fd = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT)
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                self.unlink(path)
            if error.errno in UNSUPPORTED:
                return False
            raise
        try:
            return _accepts_page(self, fd)
        finally:
            self.close(fd)
            self.unlink(path)


def _accepts_page(fs: FileSystem, fd: int) -> bool:
    try:
        return fs.pwritev(fd, [aligned_buffer(PAGE_BYTES)], 0) == PAGE_BYTES
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True  # a full disk still reads, and its open took the flag
        if error.errno in UNSUPPORTED:
            return False
        raise


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> bool:
    # libc's posix_fallocate writes zeros where the file system cannot allocate; the plain call says so instead.
    while _libc.fallocate(fd, mode, offset, nbytes) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in {errno.EOPNOTSUPP, errno.ENOSYS}:
            return False
        raise OSError(code, os.strerror(code))
    return True
