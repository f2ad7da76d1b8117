"""How long the engine's step hooks take: the proof that no step waits for the cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(slots=True)
class HookTime:
    """Calls of one hook since the start."""

    count: int = 0
    total_seconds: float = 0.0
    max_seconds: float = 0.0


class HookTimes:
    """Times by hook name; scheduler and worker side may run on different threads."""

    def __init__(self) -> None:
        self._times: dict[str, HookTime] = {}
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the body as one call of ``name``."""
        started = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Record one call."""
        with self._lock:
            time = self._times.setdefault(name, HookTime())
            time.count += 1
            time.total_seconds += seconds
            time.max_seconds = max(time.max_seconds, seconds)

    def merge(self, name: str, *, count: int, total_seconds: float, max_seconds: float) -> None:
        """Add calls that another process has timed."""
        with self._lock:
            time = self._times.setdefault(name, HookTime())
            time.count += count
            time.total_seconds += total_seconds
            time.max_seconds = max(time.max_seconds, max_seconds)

    def summary(self) -> dict[str, object]:
        """Per hook, and the longest single call of all of them."""
        with self._lock:
            found: dict[str, object] = {
                name: {"count": t.count, "total_seconds": t.total_seconds, "max_seconds": t.max_seconds}
                for name, t in self._times.items()
            }
            found["longest_seconds"] = max((t.max_seconds for t in self._times.values()), default=0.0)
        return found
