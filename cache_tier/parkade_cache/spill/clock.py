"""Time, injected, so that a test decides what time it is and never sleeps.

Wall time names and orders packs; monotonic time measures budgets and waits.
"""

from __future__ import annotations

import time


class Clock:
    """The real clock; tests subclass it."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait; only the lock's bounded wait uses it."""
        time.sleep(seconds)
