"""A process in the pod's control group that takes as much memory as it is told to.

Why it exists: in a pod the cache is not alone; a sidecar, a tokenizer's pool or a log shipper takes memory that the
cache must give back. What must stay true: it holds exactly what it was told when it answers, touched page by page, and
it ends with whoever started it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from parkade_cache.errors import ParkadeError
from parkade_serving.process import die_with_parent

_PIECE_BYTES: Final = 1 << 20
_NO_GROUP: Final = "-"


class NeighbourGoneError(ParkadeError, RuntimeError):
    """The neighbour has ended by itself; the kernel may have killed it."""


class Neighbour:
    """The process, as seen by whoever started it."""

    def __init__(self, processes_file: Path | None) -> None:
        """``processes_file`` of the control group that it joins; None leaves it in its starter's."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(processes_file or _NO_GROUP)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.hold(0)

    def hold(self, nbytes: int) -> None:
        """Hold ``nbytes`` from now on, in whole MiB, no more and no less.

        Raises:
            NeighbourGoneError: it does not live any more.

        """
        if self._child.stdin is None or self._child.stdout is None:
            raise AssertionError("the neighbour has no pipes")
        try:
            self._child.stdin.write(f"{nbytes}\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise NeighbourGoneError(f"the neighbour ended with status {self._child.wait()}")

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _held(pieces: list[mmap.mmap], nbytes: int) -> None:
    wanted = nbytes // _PIECE_BYTES
    while len(pieces) > wanted:
        pieces.pop().close()
    while len(pieces) < wanted:
        piece = mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, _PIECE_BYTES, mmap.PAGESIZE):
            piece[page] = 1
        pieces.append(piece)


def main(arguments: Sequence[str]) -> None:
    """``PROCESSES_FILE``; sizes in bytes come in on standard input, one a line, and each is answered when it holds."""
    die_with_parent()
    if arguments[0] != _NO_GROUP:
        Path(arguments[0]).write_text(str(os.getpid()))
    pieces: list[mmap.mmap] = []
    for line in sys.stdin:
        _held(pieces, int(line))
        sys.stdout.write("held\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
