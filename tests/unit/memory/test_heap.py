"""G3, section 7 and case 23 for the heap: freed memory is given back, by whichever allocator serves this process.

Each measurement runs in a child process, because only a fresh heap is known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from parkade_cache.memory.heap import Allocator, Heap, HeapRelease, detect_allocator, resident_bytes

MIB = 1 << 20

GLIBC_ONLY = pytest.mark.skipif(
    Heap().allocator is not Allocator.GLIBC, reason="this process does not allocate with glibc"
)

ROUNDS_IN_THE_MIDDLE_OF_THE_HEAP = """
import ctypes, json
from parkade_cache.memory.heap import Heap, resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
assert libc.mallopt(-3, 32 << 20), "pieces of 16 MiB must come from the heap"
libc.mallopt(-1, (1 << 31) - 1)
PIECE, PIECES = 16 << 20, 4

def generation():
    pieces = []
    for _ in range(PIECES):
        piece = libc.malloc(PIECE)
        ctypes.memset(piece, 1, PIECE)
        pieces.append(piece)
    keeper = libc.malloc(64 << 10)
    return pieces

heap, parked, rounds = Heap(), [], []
parked.append(generation())
for _ in range(12):
    parked.append(generation())
    before = resident_bytes()
    for piece in parked.pop(0):
        libc.free(piece)
    freed = resident_bytes()
    released = heap.release()
    rounds.append([before, freed, resident_bytes(), released.returned, released.heap_free_before_bytes])
print(json.dumps(rounds))
"""

FREE_64_MIB_AND_RELEASE = """
import ctypes, dataclasses, json, os
from parkade_cache.memory.heap import Heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
pieces = []
for _ in range(1024):
    piece = libc.malloc(64 << 10)
    ctypes.memset(piece, 1, 64 << 10)
    pieces.append(piece)
heap = Heap()
in_use = heap.size()
keep = [*pieces[::128], pieces[-1]] if os.environ["SOME_ARE_KEPT"] == "yes" else []
for piece in pieces:
    if piece not in keep:
        libc.free(piece)
print(json.dumps([dataclasses.asdict(heap.release()), None if in_use is None else dataclasses.asdict(in_use)]))
"""


def in_child(program: str, **environment: str) -> Any:
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@GLIBC_ONLY
def test_case_23_twelve_rounds_of_freed_pieces_in_the_middle_of_the_heap_leave_only_with_the_release():
    for before, freed, after, returned, heap_free in in_child(ROUNDS_IN_THE_MIDDLE_OF_THE_HEAP):
        assert abs(freed - before) < 4 * MIB, "resident size is unchanged before the release"
        assert freed - after >= 48 * MIB
        assert returned
        assert heap_free >= 60 * MIB


@GLIBC_ONLY
def test_a_release_is_timed_and_says_what_the_heap_held_before_it():
    released, in_use = in_child(FREE_64_MIB_AND_RELEASE, SOME_ARE_KEPT="yes")

    assert released["allocator"] == "glibc"
    assert released["seconds"] > 0
    assert released["resident_before_bytes"] - released["resident_after_bytes"] >= 48 * MIB
    assert released["heap_before_bytes"] >= 60 * MIB
    assert released["heap_free_before_bytes"] - in_use["free_bytes"] >= 60 * MIB


PRELOADS = {
    Allocator.JEMALLOC: ("libjemalloc.so.2", "libjemalloc2", "yes", 40),
    Allocator.TCMALLOC: ("libtcmalloc_minimal.so.4", "libtcmalloc-minimal4", "yes", 40),
    Allocator.MIMALLOC: ("libmimalloc.so.2.0", "libmimalloc2.0", "no", 24),
}
"""Library, Debian package, whether some pieces stay in use, and the MiB that must leave with the call.

mimalloc gives back only what is wholly empty when asked, and the rest when its own delay is over.
"""


@pytest.mark.parametrize("allocator", PRELOADS)
def test_section_7_a_preloaded_allocator_is_recognised_and_gives_back_what_is_free(allocator: Allocator):
    library, package, some_are_kept, least_mib = PRELOADS[allocator]
    path = next((found for found in Path("/usr/lib").glob(f"*/{library}")), None)
    if path is None:
        pytest.skip(f"{library} is not installed (Debian package {package})")
    # Two of them give memory back by themselves after a while; told not to, the release is what does it.
    quiet = {
        "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,background_thread:false",
        "TCMALLOC_RELEASE_RATE": "0",
        "SOME_ARE_KEPT": some_are_kept,
    }

    released, _ = in_child(FREE_64_MIB_AND_RELEASE, LD_PRELOAD=str(path), **quiet)

    assert released["allocator"] == allocator
    assert released["resident_before_bytes"] - released["resident_after_bytes"] >= least_mib * MIB
    assert released["returned"]


def test_an_allocator_without_a_known_release_returns_nothing_and_says_so():
    nothing = types.SimpleNamespace()

    released = Heap(nothing).release()  # type: ignore[arg-type]

    assert detect_allocator(nothing) is Allocator.OTHER  # type: ignore[arg-type]
    assert (released.allocator, released.returned) == (Allocator.OTHER, False)
    assert (released.heap_before_bytes, released.heap_free_before_bytes) == (None, None)


def test_other_threads_that_grow_meanwhile_never_make_a_release_negative():
    grown = HeapRelease(
        allocator=Allocator.GLIBC,
        seconds=0.1,
        resident_before_bytes=10,
        resident_after_bytes=30,
        heap_before_bytes=None,
        heap_free_before_bytes=None,
        returned=True,
    )

    assert grown.released_bytes == 0


def test_resident_size_follows_what_is_touched():
    before = resident_bytes()
    held = bytearray(b"x") * (64 * MIB)

    assert resident_bytes() - before > 56 * MIB
    del held
