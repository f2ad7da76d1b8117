"""Cleaning up that nobody interrupts.

Why it exists: whoever presses Ctrl-C twice, or sends SIGTERM to hurry, must not leave a control group, a mount or a
pod behind. What must stay true: the signals count again once everything is gone.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Final

_ENDING: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def undisturbed() -> Iterator[contextlib.ExitStack]:
    """A stack of things to undo; while they are undone, SIGINT and SIGTERM are ignored. Main thread only."""
    before = {signum: signal.getsignal(signum) for signum in _ENDING}
    try:
        with contextlib.ExitStack() as stack:
            try:
                yield stack
            finally:
                for signum in _ENDING:
                    signal.signal(signum, signal.SIG_IGN)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
