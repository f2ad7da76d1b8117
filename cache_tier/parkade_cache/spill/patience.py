"""Waiting for a disk only so long (D8, W3).

A call into a file system that hangs cannot be interrupted: its thread stays in the kernel until the device answers.
Whoever must not hang with it lets another thread make the call, and gives it up after a while. What must stay true: one
call is under way at a time, given up or not; while one hangs, the next is refused at once; whoever gave a call up says
what becomes of it when it ends after all.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from parkade_cache.errors import SpillError

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class _Call(Generic[_Result]):
    """One call on a thread of its own."""

    def __init__(self, work: Callable[[], _Result], too_late: Callable[[_Result], None]) -> None:
        self._work = work
        self._too_late = too_late
        self._lock = threading.Lock()
        self._given_up = False
        self._result: _Result
        self._error: BaseException | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="parkade-spill", daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
            self._error = error
        with self._lock:
            given_up = self._given_up
            if not given_up:
                self.done.set()
                return
        try:
            if self._error is None:
                self._too_late(self._result)
        except Exception:  # noqa: BLE001 - nobody waits any more, and the next call must be made
            _log.exception("what a late answer of the disk brought could not be undone")
        self.done.set()

    def give_up(self) -> bool:
        """False when it has just ended."""
        with self._lock:
            self._given_up = not self.done.is_set()
            return self._given_up

    def result(self) -> _Result:
        """What the call returned or raised."""
        if self._error is not None:
            raise self._error
        return self._result


class Patience:
    """Makes calls one after the other, each for at most ``seconds``; None waits for ever, in the caller's thread."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._under_way: _Call[Any] | None = None

    @property
    def lost(self) -> bool:
        """Whether a call hangs."""
        call = self._under_way
        return call is not None and not call.done.is_set()

    def call(self, work: Callable[[], _Result], *, too_late: Callable[[_Result], None] = lambda _: None) -> _Result:
        """What ``work`` returns or raises.

        SpillError when it takes too long, and while an earlier one still does; ``too_late`` is then told the result,
        whenever it comes, before the next call is made.
        """
        under_way = self._under_way
        if self.seconds is None or (under_way is not None and under_way.thread is threading.current_thread()):
            return work()
        if under_way is not None and not under_way.done.is_set():
            raise SpillError(errno.ETIMEDOUT, "the disk does not answer")
        call = _Call(work, too_late)
        self._under_way = call
        call.thread.start()
        if not call.done.wait(self.seconds) and call.give_up():
            raise SpillError(errno.ETIMEDOUT, f"the disk has not answered for {self.seconds:g} s")
        return call.result()
