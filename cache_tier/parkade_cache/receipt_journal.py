"""The files behind the receipt log: JSON lines, appended by one thread, rotated, bounded.

Why it exists: whoever decides must not wait for a disk, and a disk that fails must not stop decisions.

What must stay true: `put` only appends to a bounded queue; lines are written whole and in order; at most ``files``
files of about ``max_file_bytes`` exist; every failure is counted and none is raised; where the folder's disk is gone,
nothing is written to the one below it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

_Item = TypeVar("_Item")

# How long the writer lets lines gather: long enough that a busy moment costs one wake-up, short enough that a
# killed process loses next to nothing.
_GATHER_SECONDS: Final = 0.05
_MAX_QUEUED: Final = 50_000
_NAME: Final = "receipts.jsonl"


class ReceiptJournal(Generic[_Item]):
    """Appends items to ``receipts.jsonl`` in a folder; the older files are ``receipts.1.jsonl`` and so on."""

    def __init__(self, folder: Path, *, max_file_bytes: int, files: int, encode: Callable[[_Item], bytes]) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._files = max(1, files)
        self._encode = encode
        self._queue: deque[_Item] = deque()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._progress = threading.Condition()
        self._put_total = 0
        self._done_total = 0
        self._lost_total = 0
        self._file: int | None = None
        self._file_bytes = 0
        self._device: int | None = None
        self._thread = threading.Thread(target=self._run, name="parkade-receipts", daemon=True)

    def tail(self, count: int) -> list[bytes]:
        """The newest complete-looking lines of an earlier life, oldest first; empty when there are none."""
        lines: list[bytes] = []
        for path in (self._path(age) for age in range(self._files)):
            lines = _lines_of(path, self._max_file_bytes) + lines
            if len(lines) >= count:
                break
        return lines[-count:]

    def start(self) -> None:
        """Make the folder, so that it is known which disk it is on, and begin to write."""
        with contextlib.suppress(OSError):
            self._make_folder()
        self._thread.start()

    def put(self, item: _Item) -> None:
        """Queue one item; the caller makes sure that only one thread is here at a time."""
        if len(self._queue) >= _MAX_QUEUED:
            self._lost_total += 1  # The disk has stalled: keep what is queued, count what is not.
            return
        self._queue.append(item)
        self._put_total += 1
        if not self._wake.is_set():
            self._wake.set()

    @property
    def unwritten_total(self) -> int:
        return self._lost_total

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far was written or counted as lost."""
        target = self._put_total
        self._hurry.set()
        self._wake.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._done_total >= target, timeout_s)

    def close(self) -> None:
        """Write what is queued and end the thread; safe to call twice."""
        self._closing = True
        self._hurry.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _path(self, age: int) -> Path:
        return self._folder / (_NAME if age == 0 else f"receipts.{age}.jsonl")

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._hurry.wait(_GATHER_SECONDS)
            self._wake.clear()
            self._hurry.clear()
            closing = self._closing
            self._write_queued()
            if closing:
                self._close_file()
                return

    def _write_queued(self) -> None:
        count = len(self._queue)
        batch = b"".join(self._line(self._queue.popleft()) for _ in range(count))
        if batch:
            try:
                self._append(batch)
            except OSError:
                self._lost_total += count
                self._close_file()  # The next batch opens anew: the mount may be back by then.
        with self._progress:
            self._done_total += count
            self._progress.notify_all()

    def _line(self, item: _Item) -> bytes:
        try:
            return self._encode(item) + b"\n"
        except (TypeError, ValueError, RecursionError):
            self._lost_total += 1
            return b""

    def _append(self, batch: bytes) -> None:
        if self._file is not None and not self._is_in_place():
            self._close_file()
        if self._file is None:
            self._open_file()
        if self._file_bytes and self._file_bytes + len(batch) > self._max_file_bytes:
            self._rotate()
        assert self._file is not None  # noqa: S101 - for the type checker: both branches above open it
        view = memoryview(batch)
        while view:
            written = os.write(self._file, view)
            self._file_bytes += written
            view = view[written:]

    def _is_in_place(self) -> bool:
        """Whether the open file is the one that its name leads to."""
        if self._file is None:
            return False
        try:
            return os.path.samestat(self._path(0).lstat(), os.fstat(self._file))
        except OSError:
            return False

    def _open_file(self) -> None:
        self._make_folder()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path(0), flags, 0o600)
        self._file_bytes = os.fstat(self._file).st_size
        if self._file_bytes and os.pread(self._file, 1, self._file_bytes - 1) != b"\n":
            os.write(self._file, b"\n")  # A crash tore the last line: keep the next one whole.

    def _make_folder(self) -> None:
        """Make the folder if it is missing; OSError where the disk that it was on has gone from there."""
        if self._device is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._device = self._folder.lstat().st_dev
            return
        with contextlib.suppress(FileExistsError):
            if self._folder.parent.stat().st_dev == self._device:
                self._folder.mkdir(mode=0o700)
        if self._folder.lstat().st_dev != self._device:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self._folder))

    def _rotate(self) -> None:
        self._close_file()
        for age in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._path(age - 1).replace(self._path(age))
        if self._files == 1:
            self._path(0).unlink(missing_ok=True)
        self._open_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None


def _lines_of(path: Path, max_bytes: int) -> list[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        try:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * max_bytes))
            return file.read(2 * max_bytes).splitlines()
        except OSError:
            return []
