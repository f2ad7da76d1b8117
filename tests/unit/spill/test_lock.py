"""One live process for one directory (bad input: directory used by another live pod)."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from parkade_cache.errors import DirectoryInUseError, SpillError
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.lock import DirectoryLock
from parkade_cache.spill.testing import FakeClock


def test_a_second_process_is_told_who_has_the_directory(fs: FileSystem, clock: FakeClock, tmp_path: Path) -> None:
    """flock belongs to the open file, so a second open in this process is refused like another process's."""
    DirectoryLock.acquire(fs, clock, tmp_path)
    with pytest.raises(DirectoryInUseError) as caught:
        DirectoryLock.acquire(fs, clock, tmp_path)
    message = str(caught.value)
    assert f"process {os.getpid()} on host {socket.gethostname()}" in message
    assert str(tmp_path) in message
    assert "\n" not in message


def test_a_released_lock_is_free_and_its_file_stays(fs: FileSystem, clock: FakeClock, tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(fs, clock, tmp_path)
    lock.release()
    lock.release()
    assert (tmp_path / "lock").exists()
    DirectoryLock.acquire(fs, clock, tmp_path).release()


def test_a_pod_that_replaces_another_waits_for_it(fs: FileSystem, tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(fs, FakeClock(), tmp_path)

    class OtherPodEnds(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.monotonic_s > 1001.0:
                lock.release()

    DirectoryLock.acquire(fs, OtherPodEnds(), tmp_path, wait_s=5.0).release()


def test_the_wait_for_the_lock_ends(fs: FileSystem, clock: FakeClock, tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(fs, clock, tmp_path)
    with pytest.raises(DirectoryInUseError):
        DirectoryLock.acquire(fs, clock, tmp_path, wait_s=5.0)
    assert clock.monotonic_s == pytest.approx(1005.0, abs=0.2)
    lock.release()


@pytest.mark.parametrize("text", [b"", b"not json", b"[]", b'{"pid": "x", "host": 1}', b"x" * 100_000])
def test_a_damaged_lock_file_still_locks(fs: FileSystem, clock: FakeClock, tmp_path: Path, text: bytes) -> None:
    lock = DirectoryLock.acquire(fs, clock, tmp_path)
    (tmp_path / "lock").write_bytes(text)
    with pytest.raises(DirectoryInUseError, match="in use by"):
        DirectoryLock.acquire(fs, clock, tmp_path)
    lock.release()
    DirectoryLock.acquire(fs, clock, tmp_path).release()
    assert json.loads((tmp_path / "lock").read_bytes())["pid"] == os.getpid()


def test_a_link_in_the_locks_place_is_refused(fs: FileSystem, clock: FakeClock, tmp_path: Path) -> None:
    """D5."""
    (tmp_path / "target").write_text("untouched")
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(SpillError):
        DirectoryLock.acquire(fs, clock, tmp_path)
    assert (tmp_path / "target").read_text() == "untouched"
