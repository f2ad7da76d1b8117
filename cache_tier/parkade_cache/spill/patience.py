"""Waiting for a disk only so long (D8, W3).

A call into a file system that hangs cannot be interrupted: its thread stays in the kernel until the device answers.
Whoever must not hang with it lets another thread make the call, and gives it up once nothing has come from the disk for
a while; a call of many steps may take long. What must stay true: one call is under way at a time, given up or not;
while one hangs, the next is refused at once; whoever gave a call up says what becomes of it when it ends after all.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from parkade_cache.errors import SpillError
from parkade_cache.spill.files import FileSystem

IDLE_S = 5.0
"""A thread that nobody needs for this long ends; the next call starts another."""

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class _Call(Generic[_Result]):
    """One call on its way."""

    def __init__(self, work: Callable[[], _Result], too_late: Callable[[_Result], None]) -> None:
        self._work = work
        self._too_late = too_late
        self._lock = threading.Lock()
        self._given_up = False
        self._result: _Result
        self._error: BaseException | None = None
        self.over = False
        self._ended = threading.Lock()  # Held until the call is over: cheaper to wait for than an event.
        self._ended.acquire()

    def run(self) -> None:
        """Make the call; by the thread that may hang."""
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
            self._error = error
        with self._lock:
            self.over = not self._given_up
        if not self.over:
            self._end_late()
        self._ended.release()

    def _end_late(self) -> None:
        try:
            if self._error is None:
                self._too_late(self._result)
        except Exception:  # noqa: BLE001 - nobody waits any more, and the next call must be made
            _log.exception("what a late answer of the disk brought could not be undone")
        self.over = True

    def wait(self, seconds: float, steps: Callable[[], int]) -> bool:
        """Whether the call has ended; it is given up when for ``seconds`` none of its ``steps`` has."""
        seen = steps()
        while not self._ended.acquire(timeout=seconds):
            if seen == steps():
                break
            seen = steps()
        else:
            return True
        with self._lock:
            self._given_up = not self.over
            return self.over

    def result(self) -> _Result:
        """What the call returned or raised."""
        if self._error is not None:
            raise self._error
        return self._result


class Patience:
    """Makes calls one after the other; ``seconds`` without any progress are too long.

    None waits for ever, in the caller's thread.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._guard = threading.Lock()
        self._calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Call[Any] | None = None
        self._steps = 0

    def heard(self) -> None:
        """The disk has done a step of the call under way."""
        self._steps += 1

    @property
    def lost(self) -> bool:
        """Whether a call hangs."""
        last = self._last
        return last is not None and not last.over

    def call(self, work: Callable[[], _Result], *, too_late: Callable[[_Result], None] = lambda _: None) -> _Result:
        """What ``work`` returns or raises.

        SpillError when it takes too long, and while an earlier one still does; ``too_late`` is then told the result,
        whenever it comes, before the next call is made.
        """
        if self.seconds is None or self._thread is threading.current_thread():
            return work()
        call = _Call(work, too_late)
        self._send(call)
        if not call.wait(self.seconds, lambda: self._steps):
            raise SpillError(errno.ETIMEDOUT, f"the disk has not answered for {self.seconds:g} s")
        return call.result()

    def _send(self, call: _Call[Any]) -> None:
        with self._guard:
            if self.lost:
                raise SpillError(errno.ETIMEDOUT, "the disk does not answer")
            self._last = call
            self._calls.put(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="parkade-spill", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._calls.get(timeout=IDLE_S).run()
            except queue.Empty:
                with self._guard:
                    if self._calls.empty():
                        self._thread = None
                        return


class HeardFileSystem(FileSystem):
    """Another file system, of which somebody is told whenever one of its operations ends."""

    def __init__(self, fs: FileSystem, heard: Callable[[], None]) -> None:
        self._fs = fs
        self._heard = heard

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name not in vars(FileSystem):
            return super().__getattribute__(name)
        operation, heard = getattr(self._fs, name), self._heard

        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return operation(*args, **kwargs)
            finally:
                heard()

        return step
