"""``parkade bench release``: does released memory leave the pod, and what does it cost next to ``malloc_trim``?

Why it exists: the whole design of the arena rests on two claims, that releasing an extent lowers what the kernel
charges by what was released, and that it does so much faster than an allocator gives back the same amount.

What must stay true: each measurement runs in a child process of its own, so that no other memory moves; the figure
that counts is the control group's usage where a group can be made, the resident size elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from parkade_cache.arena import EXTENT_TARGET_BYTES, Arena
from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import CgroupTree, Level
from parkade_cache.memory.heap import Allocator, Heap, resident_bytes

PIECE_BYTES: Final = 16 << 20
"""Large enough to be worth freeing, small enough for the heap: glibc maps nothing below 32 MiB if told so."""

_KEEPER_BYTES: Final = 64 << 10
"""Lies between two freed pieces and above the last, so that none is at the top of the heap or grows together."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20
_NEVER_BY_ITSELF: Final = (1 << 31) - 1

_CHILD_TIMEOUT_S: Final = 300


def run(*, total_bytes: int = 1 << 30, repeats: int = 3) -> dict[str, object]:
    """Measure both claims; ``total_bytes`` is what is parked, and freed in the heap, at each of ``repeats``.

    The fall of usage is the worst repeat's, times are medians. Raises ``OSError`` where a child cannot run.
    """
    extents = [measure_in_child("extents", total_bytes) for _ in range(repeats)]
    heaps = [measure_in_child("heap", total_bytes) for _ in range(repeats)]
    release_s = statistics.median(_number(one, "seconds") for one in extents)
    trim_s = statistics.median(_number(one, "seconds") for one in heaps)
    worst = min(extents, key=lambda one: _number(one, "usage_fall_bytes"))
    return {
        "sizes": {
            "total_bytes": total_bytes,
            "repeats": repeats,
            "extent_bytes": EXTENT_TARGET_BYTES,
            "piece_bytes": PIECE_BYTES,
        },
        "figures": {
            "released_bytes": worst["released_bytes"],
            "usage_fall_bytes": worst["usage_fall_bytes"],
            "usage_source": worst["usage_source"],
            "release_seconds": release_s,
            "malloc_trim_seconds": trim_s,
            "malloc_trim_released_bytes": statistics.median(_number(one, "released_bytes") for one in heaps),
            "transparent_huge_pages": _huge_page_mode(),
        },
        "ratios": {
            "usage_fall_to_released": _number(worst, "usage_fall_bytes") / _number(worst, "released_bytes"),
            "malloc_trim_seconds_to_release_seconds": trim_s / release_s,
        },
    }


def measure_extents(total_bytes: int) -> dict[str, object]:
    """Park ``total_bytes`` in extents and release them; to be run in a process of its own."""
    count = max(1, total_bytes // EXTENT_TARGET_BYTES)
    with _own_group() as group:
        arena = Arena(extent_bytes=EXTENT_TARGET_BYTES, max_extents=count)
        for extent in range(count):
            arena.commit(extent)
        before_bytes = _usage_bytes(group)
        released_bytes, seconds = _timed_release(arena, count)
        fall_bytes = before_bytes - _usage_bytes(group)
    return {
        "released_bytes": released_bytes,
        "usage_fall_bytes": fall_bytes,
        "usage_source": "resident" if group is None else f"cgroup {group.version}",
        "seconds": seconds,
    }


def measure_heap(total_bytes: int) -> dict[str, object]:
    """Free ``total_bytes`` in the middle of glibc's heap and trim it; to be run in a process of its own."""
    heap = Heap()
    if heap.allocator is not Allocator.GLIBC:
        raise OSError(f"malloc_trim is glibc's; this process allocates with {heap.allocator}")
    libc = ctypes.CDLL(None)
    _keep_pieces_in_the_heap(libc)
    pieces = [_piece(libc) for _ in range(max(1, total_bytes // PIECE_BYTES))]
    for piece in pieces:
        libc.free(ctypes.c_void_p(piece))
    released = heap.release()
    return {"seconds": released.seconds, "released_bytes": released.released_bytes}


def _timed_release(arena: Arena, count: int) -> tuple[int, float]:
    started = time.perf_counter()
    released_bytes = sum(arena.release(extent) for extent in range(count))
    return released_bytes, time.perf_counter() - started


def _keep_pieces_in_the_heap(libc: ctypes.CDLL) -> None:
    if not libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD):
        raise OSError("glibc refuses to keep pieces of this size in its heap")
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BY_ITSELF)


def _piece(libc: ctypes.CDLL) -> int:
    """One touched piece with a keeper above it."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    piece = libc.malloc(PIECE_BYTES)
    if not piece or not libc.malloc(_KEEPER_BYTES):
        raise MemoryError(f"cannot allocate {PIECE_BYTES} bytes")
    ctypes.memset(piece, 1, PIECE_BYTES)
    return int(piece)


@contextmanager
def _own_group() -> Iterator[Level | None]:
    """A memory control group that holds only this process; ``None`` where none can be made."""
    group = _make_group()
    if group is None:
        yield None
        return
    parent = Path(group.folder).parent
    (Path(group.folder) / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield group
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        Path(group.folder).rmdir()


def _make_group() -> Level | None:
    try:
        own = CgroupTree().levels()[-1]
        group = Level(own.version, f"{own.folder}/parkade-bench-{os.getpid()}")
        Path(group.folder).mkdir()
    except (IndexError, OSError, MalformedAccountError):
        return None
    if group.current_bytes() is None:
        Path(group.folder).rmdir()
        return None
    return group


def _usage_bytes(group: Level | None) -> int:
    return (None if group is None else group.current_bytes()) or resident_bytes()


def measure_in_child(what: str, total_bytes: int) -> Mapping[str, object]:
    """Measure ``extents`` or ``heap`` in a process in which nothing else moves; OSError where it cannot run."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "parkade_serving.bench.release", what, str(total_bytes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_CHILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"measuring {what} failed with status {done.returncode}: {last_line}")
    measured: dict[str, object] = json.loads(done.stdout)
    return measured


def _number(measured: Mapping[str, object], key: str) -> float:
    value = measured[key]
    if not isinstance(value, int | float):
        raise TypeError(f"{key} is not a number: {value!r}")
    return float(value)


def _huge_page_mode() -> str:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii").strip()
    except OSError:
        return "none"


def _child(what: str, total_bytes: int) -> None:
    measure = {"extents": measure_extents, "heap": measure_heap}[what]
    sys.stdout.write(json.dumps(measure(total_bytes)))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
