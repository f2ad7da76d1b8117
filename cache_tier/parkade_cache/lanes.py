"""Threads that carry out a mover's work, one kind of work a lane.

Why it exists: a slow disk must not delay a memory copy, and a write-out must overtake background writes, so
each kind of work has its own queue and thread. What must stay true: a task that raises never ends the lane, and
what was accepted before a lane is closed is still run.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]

_log = logging.getLogger(__name__)


class Lane:
    """A queue of tasks and the threads that run them in order."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._name = name
        self._tasks: deque[Task] = deque()
        self._ready = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"parkade-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task; returns at once. Raises RuntimeError once the lane is closed."""
        if not self.try_submit(task):
            raise RuntimeError(f"lane {self._name} is closed")

    def try_submit(self, task: Task) -> bool:
        """Queue a task; False, and nothing is done, once the lane is closed."""
        with self._ready:
            if self._closed:
                return False
            self._tasks.append(task)
            self._ready.notify()
            return True

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Run what is queued, then stop; waits at most ``timeout_s`` for each thread."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._tasks and not self._closed:
                    self._ready.wait()
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            try:
                task()
            except Exception:  # noqa: BLE001 - the next task must still run
                _log.exception("a task of lane %s failed", self._name)
