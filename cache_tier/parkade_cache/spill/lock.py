"""One live process for one spill directory.

The lock is the kernel's (``flock`` on ``<root>/lock``), so it is gone with the process, whatever killed it; the file's
text only tells the next one who to ask. The file is never removed: removing a lock file lets two processes hold two.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from typing import NoReturn

from parkade_cache.errors import DirectoryInUseError, ParkadeError
from parkade_cache.spill import layout
from parkade_cache.spill.clock import Clock
from parkade_cache.spill.files import FileSystem

POLL_SECONDS = 0.1
"""A pod that replaces another waits for it to let go; no call waits for a lock with a deadline."""


class DirectoryLock:
    """The held lock."""

    def __init__(self, fs: FileSystem, fd: int) -> None:
        """Use ``acquire``."""
        self._fs = fs
        self._fd = fd

    @classmethod
    def acquire(cls, fs: FileSystem, clock: Clock, root: Path, *, wait_s: float = 0.0) -> DirectoryLock:
        """Lock the directory; DirectoryInUseError, naming pid and host, when another keeps it past ``wait_s``."""
        path = root / "lock"
        fd = _open_lock(fs, path)
        try:
            if not _locked_within(fs, clock, fd, wait_s):
                _refuse(fs, path)
            _sign(fs, fd, clock)
        except BaseException:
            fs.close(fd)
            raise
        return cls(fs, fd)

    def release(self) -> None:
        """Let go; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Whatever close says, the kernel has taken the descriptor, and with it the lock.
            with contextlib.suppress(OSError):
                self._fs.close(fd)


def _open_lock(fs: FileSystem, path: Path) -> int:
    with contextlib.suppress(FileExistsError):
        return fs.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    return layout.open_checked_file(fs, path, os.O_RDWR)


def _locked_within(fs: FileSystem, clock: Clock, fd: int, wait_s: float) -> bool:
    deadline_s = clock.monotonic() + wait_s
    while not fs.try_lock(fd):
        if clock.monotonic() >= deadline_s:
            return False
        clock.sleep(POLL_SECONDS)
    return True


def _sign(fs: FileSystem, fd: int, clock: Clock) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": clock.now()}).encode()
    # On a full disk the lock holds without its text.
    with contextlib.suppress(OSError):
        fs.truncate(fd, 0)
        fs.pwritev(fd, [memoryview(text)], 0)


def _refuse(fs: FileSystem, path: Path) -> NoReturn:
    holder = "another process"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, ParkadeError):
        found = json.loads(layout.read_small_file(fs, path))
        holder = f"process {int(found['pid'])} on host {str(found['host'])[:253]}"
    raise DirectoryInUseError(
        errno.EBUSY, f"spill directory {path.parent} is in use by {holder}; give each pod its own, or stop that process"
    )
