"""``parkade bench spill``: are packs written and read at the disk's own speed, without memory of their own?

Why it exists: a write-out stands between a conversation and the memory it must give back, so it has to run at the
device's sequential bandwidth; and page cache that grows while parked memory is written out is memory not given back.

What must stay true: the disk's own speed is fio's in the same minutes, runs of both taking turns, each as often as the
other, and both keep their best run of a round. A shared disk is never quiet: the ratio is the median over the rounds,
and every single figure is in the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from parkade_cache.errors import SettingsError
from parkade_cache.ids import NO_KEY, BlockKey
from parkade_cache.spill import (
    FileSystem,
    PackAddress,
    PackBlock,
    PackHeader,
    PackInfo,
    PackReader,
    PackWriter,
    align_up,
    aligned_buffer,
    pack_file_bytes,
)
from parkade_cache.spill.layout import pack_path
from parkade_cache.spill.pack import require_pack_id

FIO_BLOCK_SIZES: Final = ("1M", "4M", "8M")
ROUNDS: Final = 3
FILES_OF_TOTAL: Final = 4
"""One file holds a quarter of the total; nine files are written and read by each side."""

_ARENA_BYTES: Final = 256 << 20
"""Parked memory that is written again and again, so that the total need not fit in memory."""

_PACK_ID: Final = require_pack_id("0" * 31 + "1")
_IDENTITY: Final = "0" * 16
_TIMEOUT_S: Final = 600


def run(*, folder: Path, total_bytes: int = 2 << 30, block_bytes: int = 2949120) -> dict[str, object]:
    """Measure packs against fio in ``folder``; ``SettingsError`` without fio, ``OSError`` where the disk fails."""
    if shutil.which("fio") is None:
        raise SettingsError("fio is missing: install it (Debian: apt-get install fio) to measure the disk's own speed")
    file_bytes = max(block_bytes, total_bytes // FILES_OF_TOTAL)
    work = folder / f"bench-{os.getpid()}"
    work.mkdir(mode=0o700)
    try:
        rounds = [_round(work, file_bytes, block_bytes) for _ in range(ROUNDS)]
    finally:
        shutil.rmtree(work)
    return {
        "sizes": {
            "total_bytes": total_bytes,
            "file_bytes": file_bytes,
            "block_bytes": block_bytes,
            "rounds": ROUNDS,
            "runs_per_round": len(FIO_BLOCK_SIZES),
        },
        "figures": _figures(rounds),
        "ratios": {
            "write_to_fio": statistics.median(_best_ratio(one, "write") for one in rounds),
            "read_to_fio": statistics.median(_best_ratio(one, "read") for one in rounds),
        },
    }


Round = Mapping[str, Sequence[float]]


def _round(work: Path, file_bytes: int, block_bytes: int) -> Round:
    found: dict[str, list[float]] = {}
    for size in FIO_BLOCK_SIZES:
        for name, value in {**_fio(work, size, file_bytes), **_packs(work, file_bytes, block_bytes)}.items():
            found.setdefault(name, []).append(value)
    return found


def _best_ratio(one: Round, direction: str) -> float:
    return max(one[f"pack_{direction}_bytes_per_second"]) / max(one[f"fio_{direction}_bytes_per_second"])


def _figures(rounds: Sequence[Round]) -> dict[str, object]:
    figures: dict[str, object] = {name: [list(one[name]) for one in rounds] for name in rounds[0]}
    for worst in ("extra_memory_bytes", "page_cache_growth_bytes"):
        figures[worst] = max(value for one in rounds for value in one[worst])
    return figures


def _fio(work: Path, size: str, file_bytes: int) -> dict[str, float]:
    path = work / "fio"
    speeds = {f"fio_{way}_bytes_per_second": _fio_speed(path, way, size, file_bytes) for way in ("write", "read")}
    path.unlink()
    return speeds


def _fio_speed(path: Path, way: str, size: str, file_bytes: int) -> float:
    options = {"name": way, "filename": path, "rw": way, "bs": size, "size": file_bytes, "direct": 1, "end_fsync": 1}
    engine = {"ioengine": "psync", "iodepth": 1, "output-format": "json"}
    command = ["fio", *(f"--{name}={value}" for name, value in (options | engine).items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"])


def _packs(work: Path, file_bytes: int, block_bytes: int) -> dict[str, float]:
    """In a process of its own, so that no other memory moves."""
    command = [sys.executable, "-m", __name__, str(work), str(file_bytes), str(block_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise OSError(f"the measured process failed: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    return {str(name): float(value) for name, value in found.items()}


def measure_packs(work: Path, *, file_bytes: int, block_bytes: int) -> dict[str, float]:
    """Write and read one pack; to be run in a process of its own."""
    stride = align_up(block_bytes)
    slots = _parked_slots(block_bytes, stride, min(_ARENA_BYTES, file_bytes))
    for part in ("", "tmp", "packs"):
        (work / "rank-0" / part).mkdir(mode=0o700, exist_ok=True)
    fs, direct = FileSystem(), FileSystem().supports_direct(work / "rank-0" / "tmp")
    blocks = max(1, file_bytes // stride)
    with _own_cache() as cached_bytes:
        resident_bytes, cache_bytes = _reset_peak(), cached_bytes()
        write_s, info = _timed_write(fs, work / "rank-0", slots, blocks, direct=direct)
        extra_memory_bytes = _status_bytes("VmHWM") - resident_bytes
        read_s = _timed_read(fs, work / "rank-0", slots, info, direct=direct)
        growth_bytes = cached_bytes() - cache_bytes
    pack_path(work / "rank-0", _PACK_ID).unlink()
    return {
        "pack_write_bytes_per_second": blocks * stride / write_s,
        "pack_read_bytes_per_second": blocks * stride / read_s,
        "extra_memory_bytes": max(0, extra_memory_bytes),
        "page_cache_growth_bytes": max(0, growth_bytes),
    }


def _parked_slots(block_bytes: int, stride: int, arena_bytes: int) -> list[memoryview]:
    arena = aligned_buffer(max(stride, arena_bytes // stride * stride))
    np.frombuffer(arena, dtype=np.uint64)[:] = np.random.default_rng(1).integers(1 << 63, size=len(arena) // 8)
    return [arena[start : start + stride] for start in range(0, len(arena) - block_bytes + 1, stride)]


def _timed_write(
    fs: FileSystem, rank_folder: Path, slots: Sequence[memoryview], blocks: int, *, direct: bool
) -> tuple[float, PackInfo]:
    header = PackHeader(_PACK_ID, "bench", _IDENTITY, 0, 1, time.time())
    expected_bytes = pack_file_bytes([len(slots[0])] * blocks, tips=0)
    begin_s = time.perf_counter()
    with PackWriter(fs, rank_folder, header, direct=direct, expected_bytes=expected_bytes) as writer:
        for batch in _batches(slots, blocks):
            writer.append_many([PackBlock(_key(n), NO_KEY, 0, 0, slot) for n, slot in batch])
        info = writer.finish([])
    return time.perf_counter() - begin_s, info


def _timed_read(
    fs: FileSystem, rank_folder: Path, slots: Sequence[memoryview], info: PackInfo, *, direct: bool
) -> float:
    path, expected = pack_path(rank_folder, _PACK_ID), PackAddress(_PACK_ID, _IDENTITY, 0)
    begin_s = time.perf_counter()
    with PackReader(fs, path, expected=expected, direct=direct) as reader:
        for batch in _batches(slots, len(info.entries)):
            if not all(reader.read_into([info.entries[n] for n, _ in batch], [slot for _, slot in batch])):
                raise OSError("a block that was just written did not verify")
    return time.perf_counter() - begin_s


def _batches(slots: Sequence[memoryview], blocks: int) -> Iterator[list[tuple[int, memoryview]]]:
    for start in range(0, blocks, len(slots)):
        yield [(start + n, slot) for n, slot in enumerate(slots[: blocks - start])]


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(36, "big"))


def _reset_peak() -> int:
    """Resident bytes now, from where the peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


class _Cache:
    """Reads the page cache that is charged to this process's group, or to the machine."""

    def __init__(self, statistics_file: Path, name: str, unit_bytes: int) -> None:
        self._file = statistics_file
        self._name = name
        self._unit_bytes = unit_bytes

    def __call__(self) -> int:
        for line in self._file.read_text().splitlines():
            words = line.replace(":", " ").split()
            if words[0] == self._name:
                return int(words[1]) * self._unit_bytes
        raise OSError(f"{self._file} has no {self._name}")


@contextlib.contextmanager
def _own_cache() -> Iterator[_Cache]:
    """A memory group of this process alone where one can be made; the whole machine's cache elsewhere."""
    parent = _version_1_group()
    group = None if parent is None else parent / f"parkade-bench-{os.getpid()}"
    try:
        if group is not None:
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        group = None
    if group is None or parent is None:
        yield _Cache(Path("/proc/meminfo"), "Cached", 1024)
        return
    try:
        yield _Cache(group / "memory.stat", "cache", 1)
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            group.rmdir()


def _version_1_group() -> Path | None:
    """Where this process's version 1 memory group lies. Version 2 gives a child group no controller of its own."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            found = Path("/sys/fs/cgroup/memory") / name.lstrip("/")
            return found if found.is_dir() else None
    return None


if __name__ == "__main__":
    _work, _file_bytes, _block_bytes = sys.argv[1:]
    sys.stdout.write(json.dumps(measure_packs(Path(_work), file_bytes=int(_file_bytes), block_bytes=int(_block_bytes))))
