"""Asking every process of the pod to give its freed heap back.

Why it exists: parked blocks are given back by the extent, but the API server, the engine core and the workers
keep what they have freed in their allocators. The gate counts on freed memory only once every process it asked has
answered or timed out (G3), so asking is one call.

What must stay true: a process that does not answer costs the time-out and nothing else; workers answer through their
movers and are not asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from parkade_cache.memory.heap import Heap, HeapRelease
from parkade_cache.receipts import HeapRecord


@dataclass(frozen=True, slots=True)
class HeapAnswer:
    """What one process gave back."""

    process: str
    release: HeapRelease

    def to_record(self) -> HeapRecord:
        """As a receipt keeps it."""
        release = self.release
        return HeapRecord(
            process=self.process,
            allocator=release.allocator.value,
            trim_seconds=release.seconds,
            resident_before_bytes=release.resident_before_bytes,
            resident_after_bytes=release.resident_after_bytes,
            heap_bytes_before=release.heap_before_bytes,
            heap_free_before_bytes=release.heap_free_before_bytes,
            returned=release.returned,
        )


class PodHeaps(Protocol):
    """The heaps of the pod's processes besides the workers'."""

    def release(self, timeout_s: float) -> Sequence[HeapRecord]:
        """Ask all of them and wait for their answers, at most ``timeout_s``; never raises."""


class OwnHeap:
    """The heap of the owner's process."""

    def __init__(self, process: str = "engine-core") -> None:
        self._process = process
        self._heap = Heap()

    def release(self, timeout_s: float) -> Sequence[HeapRecord]:
        """See ``PodHeaps``; the call blocks for as long as the allocator takes."""
        del timeout_s
        return (HeapAnswer(self._process, self._heap.release()).to_record(),)
