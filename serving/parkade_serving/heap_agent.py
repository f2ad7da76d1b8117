"""The API server's part in a heap release, and the owner's way to ask for it.

Why it exists: the owner lives in the engine core and cannot reach another process's allocator. Each API server
serves a socket of its own beside the owner's; the owner asks all that it finds.

What must stay true: asking never blocks longer than its time-out; the trim runs on the agent's thread with the
interpreter lock released, off the event loop; a socket left by a process that is gone costs nothing.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from parkade_cache.errors import ParkadeError
from parkade_cache.heaps import OwnHeap
from parkade_cache.receipts import HeapRecord
from parkade_serving.rpc import OwnerClient, OwnerServer, is_served
from parkade_serving.sockets import check_socket_path

_log = logging.getLogger(__name__)

_PREFIX: Final = "heap-"
_CALL: Final = "release_heap"
_MOST_AGENTS: Final = 32
"""Asked at the same time; API servers of one pod are fewer."""


def start_agent(folder: Path, *, process: str = "api-server") -> OwnerServer | None:
    """Serve heap releases of this process; None, with a warning, where its socket cannot be had."""
    path = folder / f"{_PREFIX}{os.getpid()}.sock"
    heap = OwnHeap(process)

    def release(params: dict[str, Any]) -> object:
        return list(heap.release(float(params.get("timeout_s") or 0.0)))

    try:
        check_socket_path(path)
        return OwnerServer(path, {_CALL: release}, workers=1).start()
    except (ParkadeError, OSError) as error:
        _log.warning("this process's heap cannot be released on demand: %s", error)
        return None


class AgentHeaps:
    """The owner's process and every process with an agent in ``folder``; implements ``PodHeaps``."""

    def __init__(self, folder: Path, own: OwnHeap | None = None) -> None:
        self._folder = folder
        self._own = own or OwnHeap()
        self._pool = concurrent.futures.ThreadPoolExecutor(_MOST_AGENTS, thread_name_prefix="parkade-heaps")

    def release(self, timeout_s: float) -> Sequence[HeapRecord]:
        """Ask the agents at once, release this process's own heap meanwhile."""
        calls = [self._pool.submit(_ask, path, timeout_s) for path in self._agents()]
        records = list(self._own.release(timeout_s))
        for call in calls:
            records += call.result()
        return records

    def close(self) -> None:
        """Ask nobody any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _agents(self) -> list[Path]:
        try:
            return sorted(self._folder.glob(f"{_PREFIX}*.sock"))
        except OSError:
            return []


def _ask(path: Path, timeout_s: float) -> list[HeapRecord]:
    if not is_served(path):
        path.unlink(missing_ok=True)
        return []
    try:
        answer = OwnerClient(path).call(_CALL, {"timeout_s": timeout_s}, timeout_s)
        return [_record(found) for found in answer] if isinstance(answer, list) else []
    except (ParkadeError, TypeError, OSError) as error:
        _log.warning("a process of the pod did not release its heap: %s", error)
        return []


def _record(found: Mapping[str, Any]) -> HeapRecord:
    return HeapRecord(**found)
