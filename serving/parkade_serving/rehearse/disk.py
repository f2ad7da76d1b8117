"""A small disk of its own for the rehearsed pod, so that it can be filled to the last block.

Why it exists: a full disk is found out by the file system, not by a setting. It is ext4 on a loop device: a file
system in memory would be charged to the very group whose limit is tried.

What must stay true: nobody else's disk is ever filled; it is mounted in a mount namespace of the rehearsal's own, so
that it goes with it, whatever ends it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.errors import ParkadeError

_SMALLEST_FILE_BYTES: Final = 4096
_UNMOUNT_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.2


class NoDiskError(ParkadeError, OSError):
    """No disk of its own can be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A file system that nobody else uses."""

    mount: Path

    @property
    def _filler(self) -> Path:
        return self.mount / "filler"

    def fill(self) -> None:
        """Another program's file takes all that is free, to the last block."""
        descriptor = os.open(self._filler, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size, step = 0, self._free_bytes()
            while step >= _SMALLEST_FILE_BYTES:
                try:
                    os.posix_fallocate(descriptor, size, step)
                    size += step
                    step = max(step, self._free_bytes())
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 2
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_space(self) -> None:
        """The other program's file goes."""
        self._filler.unlink(missing_ok=True)

    def _free_bytes(self) -> int:
        found = os.statvfs(self.mount)
        return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def made_disk(folder: Path, *, nbytes: int) -> Iterator[SmallDisk]:
    """A disk of ``nbytes`` mounted below ``folder``, gone afterwards; the caller has a mount namespace of its own.

    Raises:
        NoDiskError: none can be made; the message says why in one line.

    """
    if shutil.which("mkfs.ext4") is None:
        raise NoDiskError(errno.ENOENT, "there is no mkfs.ext4; install e2fsprogs")
    image, mount = folder / "disk.img", folder / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard", str(image))
    _mount(image, mount)
    try:
        yield SmallDisk(mount)
    finally:
        _unmount(mount)
        image.unlink(missing_ok=True)


def _mount(image: Path, mount: Path) -> None:
    # Around the page cache, where the device below lets it: what is written must not count as the pod's memory twice.
    try:
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
    except NoDiskError:
        device = _run("losetup", "--find", "--show", str(image))
    try:
        _run("mount", "-t", "ext4", device, str(mount))
    finally:
        # In use it stays until it is unmounted, and then goes by itself.
        _run("losetup", "--detach", device)


def _unmount(mount: Path) -> None:
    """The pod's last process may need a moment to let go of it."""
    deadline = time.monotonic() + _UNMOUNT_TIMEOUT_S
    while True:
        try:
            _run("umount", str(mount))
        except NoDiskError:
            if time.monotonic() > deadline:
                with contextlib.suppress(NoDiskError):
                    _run("umount", "--lazy", str(mount))
                return
            time.sleep(_POLL_S)
        else:
            return


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoDiskError(error.errno, f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no message"]
        raise NoDiskError(errno.EIO, f"{command[0]}: {said[0]}")
    return done.stdout.strip()
