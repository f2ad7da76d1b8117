"""What the demo says while it runs: one plain line per event, and on a terminal a line that moves while it waits."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(slots=True)
class Console:
    """Writes to ``out``; every line starts with the minutes and seconds since the start."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    started: float = field(default_factory=time.monotonic)
    _status_shown: bool = False

    def line(self, text: str) -> None:
        """Something happened."""
        self._clear()
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        self._write(f"[{minutes:2d}:{seconds:02d}] {text}\n")

    def plain(self, text: str) -> None:
        """Text as it is."""
        self._clear()
        self._write(f"{text}\n")

    def status(self, text: str) -> None:
        """Something is awaited; shown on a terminal only, and gone with the next line."""
        if self.out.isatty():
            self._write(f"\r\x1b[K        {text}")
            self._status_shown = True

    def _clear(self) -> None:
        if self._status_shown:
            self._write("\r\x1b[K")
            self._status_shown = False

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
