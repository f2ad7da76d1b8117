"""Small real file systems that a test may fill, freeze, make read-only or take away under a live pod.

Why it exists: what the kernel does when a disk is full, read-only or gone is not what a fake would do. What must stay
true: nothing outside the test's own folder is mounted, and nothing stays mounted or frozen after it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
_SHUTDOWN, _WITHOUT_FLUSH = 0x8004587D, 2
DISK_BYTES = 16 * MIB

FROZEN_S = 20.0
"""A frozen disk thaws by itself after this long: no test may leave a thread in the kernel for ever."""


class Disk:
    """A file system of its own at ``mount``; subclasses say which."""

    kind = ""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can mount a file system")
        self.folder = folder
        self.mount = folder / "disk"
        self.mount.mkdir()
        self._filler = self.mount / "filler"
        self._make()
        self.attach()

    @property
    def root(self) -> Path:
        """A spill directory on it."""
        return self.mount / "spill"

    def _make(self) -> None:
        """What must be there before it can be mounted."""

    def attach(self) -> None:
        """Mount it, with what it held before."""
        raise NotImplementedError

    def vanish(self) -> None:
        """Take the mount away under whoever uses it: the mount point of the file system below is what is left."""
        must("umount", "-l", str(self.mount))

    # -- space ---------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        found = os.statvfs(self.mount)
        return found.f_bavail * found.f_frsize

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Another process's file takes the space, down to the last block unless some is to be left."""
        with self._filler.open("ab", buffering=0) as file, contextlib.ExitStack() as stack:
            stack.callback(os.fsync, file.fileno())
            for nbytes in (256 << 10, 4096):
                while self.free_bytes() >= leave_bytes + nbytes or not leave_bytes:
                    try:
                        if file.write(bytes(nbytes)) < nbytes:
                            break
                    except OSError as error:
                        assert error.errno == errno.ENOSPC  # noqa: PT017
                        break

    def make_space(self) -> None:
        """The other file goes."""
        self._filler.unlink()

    # -- read-only -----------------------------------------------------------------------------------------------

    def remount(self, how: str) -> bool:
        """``mount -o remount,<how>``; False where the kernel refuses, as it does while files are open for writing."""
        command = ["mount", "-o", f"remount,{how}", str(self.mount)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def cover_read_only(self) -> None:
        """From now on every path leads to a read-only view of the same file system; what is open stays writable."""
        run("mount", "--bind", str(self.mount), str(self.mount))
        run("mount", "-o", "remount,ro,bind", str(self.mount))

    def uncover(self) -> None:
        """Paths lead to the writable mount again."""
        must("umount", "-l", str(self.mount))

    def close(self) -> None:
        """Nothing of it stays mounted."""
        while self.mount.is_mount():
            must("umount", "-l", str(self.mount))


class Tmpfs(Disk):
    """In memory; a second mount keeps its content while the first one is away."""

    kind = "tmpfs"

    def _make(self) -> None:
        self._keeper = self.folder / "keeper"
        self._keeper.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._keeper))

    def attach(self) -> None:
        run("mount", "--bind", str(self._keeper), str(self.mount))

    def close(self) -> None:
        super().close()
        must("umount", "-l", str(self._keeper))


class Ext4(Disk):
    """ext4 in a file, on a loop device."""

    kind = "ext4"

    def _make(self) -> None:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 here: install e2fsprogs")
        self.image = self.folder / "image"
        with self.image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", "-m", "0", "-J", "size=1", str(self.image))

    def attach(self) -> None:
        run("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.mount))

    def find_damage(self) -> None:
        """Make ext4 believe that it is damaged: it turns read-only under the files that are open, and stays so."""
        found = subprocess.run(
            ["findmnt", "-n", "-o", "SOURCE", str(self.mount)], capture_output=True, text=True, check=True
        )
        trigger = Path("/sys/fs/ext4") / Path(found.stdout.strip()).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel cannot be told to find a damaged file system")
        os.sync()
        trigger.write_text("x")

    def shut_down(self) -> None:
        """Stop the file system at once, as when its device is pulled: whatever is asked of it is an I/O error."""
        fd = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(fd)

    def repair(self) -> None:
        """Check the image, which is not mounted, and mend it."""
        subprocess.run(["fsck.ext4", "-y", "-f", str(self.image)], capture_output=True, check=False)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Whatever writes waits in the kernel, as on a device that does not answer; reads go on."""
        if shutil.which("fsfreeze") is None:
            pytest.skip("no fsfreeze here")
        run("fsfreeze", "-f", str(self.mount))
        late = threading.Timer(FROZEN_S, self._thaw)
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            self._thaw()

    def _thaw(self) -> None:
        subprocess.run(["fsfreeze", "-u", str(self.mount)], capture_output=True, check=False)


KINDS: dict[str, type[Disk]] = {kind.kind: kind for kind in (Tmpfs, Ext4)}


def run(*command: str) -> None:
    """Run what a test cannot do without; skipped with the command's own words where this machine refuses it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command[:2])}: {done.stderr.strip() or done.stdout.strip()}")


def must(*command: str) -> None:
    """Run what must work where the machine allowed the rest."""
    subprocess.run(command, capture_output=True, check=True)
