"""A small, bounded set of aligned buffers for blocks on their way to or from disk.

Why it exists: what RAM has no room for is streamed, and streaming must not cost memory of its own beyond a
fixed bound. What must stay true: at most ``count`` buffers exist; a buffer is used by one holder at a time.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque

import numpy as np

from parkade_cache.device import HostBytes
from parkade_cache.slots import PAGE_BYTES

BOUNCE_BYTES = 32 << 20


class BufferPool:
    """``count`` page-aligned buffers of ``buffer_bytes`` each, in one anonymous mapping, resident on use."""

    def __init__(self, *, buffer_bytes: int, limit_bytes: int = BOUNCE_BYTES) -> None:
        self.buffer_bytes = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
        self.count = max(2, limit_bytes // self.buffer_bytes)
        self._map = mmap.mmap(-1, self.buffer_bytes * self.count)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self._free = deque(
            whole[number * self.buffer_bytes : (number + 1) * self.buffer_bytes] for number in range(self.count)
        )
        self._lock = threading.Condition()

    def try_take(self) -> HostBytes | None:
        """A free buffer, or None."""
        with self._lock:
            return self._free.popleft() if self._free else None

    def take_many(self, count: int) -> list[HostBytes]:
        """Wait for at least one free buffer; up to ``count`` of them."""
        with self._lock:
            while not self._free:
                self._lock.wait()
            return [self._free.popleft() for _ in range(min(count, len(self._free)))]

    def give(self, buffer: HostBytes) -> None:
        """The buffer is free again."""
        with self._lock:
            self._free.append(buffer)
            self._lock.notify()
