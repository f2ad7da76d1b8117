"""A few threads that move bytes while the caller's thread computes checksums.

What must stay true: when ``drain`` returns or raises, no thread uses the caller's memory any more. A bounded number of
transfers is under way, so the memory held for them is bounded too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

DEFAULT_DEPTH = 2
"""Two transfers: the device always has the next one when it ends one. 0 runs each in the caller's thread."""


class Lanes:
    """At most ``depth`` transfers at a time, waited for in the order in which they were given."""

    def __init__(self, *, depth: int = DEFAULT_DEPTH) -> None:
        self._depth = depth
        self._executor: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[None]] = deque()

    @property
    def full(self) -> bool:
        """Whether another transfer would have to wait."""
        return 0 < self._depth <= len(self._under_way)

    def submit(self, transfer: Callable[[], None]) -> None:
        """Start a transfer, first waiting for the oldest when all lanes are taken; raises what that one raised."""
        if self._depth == 0:
            transfer()
            return
        while self.full:
            self.wait_oldest()
        self._under_way.append(self._threads().submit(transfer))

    def wait_oldest(self) -> None:
        """Wait for the oldest transfer under way, if any; raises what it raised."""
        if self._under_way:
            self._under_way.popleft().result()

    def drain(self) -> None:
        """Wait for all transfers; raises the first error, after the last of them has ended."""
        first: BaseException | None = None
        while self._under_way:
            error = self._under_way.popleft().exception()
            first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """End the threads; transfers that are under way are waited for. Safe to call twice."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        self._under_way.clear()

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._depth, thread_name_prefix="parkade-pack")
        return self._executor
