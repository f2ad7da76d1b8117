"""A spill directory, a clock and a file system for each test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.store import SpillConfig, SpillStore
from parkade_cache.spill.testing import FakeClock, some_identity


@pytest.fixture
def fs() -> FileSystem:
    return FileSystem()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class SpillDirectory:
    """Opens stores on one directory, and closes what a test left open."""

    def __init__(self, root: Path, clock: FakeClock) -> None:
        self.root = root
        self._clock = clock
        self._open: list[SpillStore] = []

    def config(self, **fields: Any) -> SpillConfig:
        defaults: dict[str, Any] = {
            "root": self.root,
            "capacity_bytes": 1 << 30,
            "min_free_bytes": 0,
            "write_budget_bytes_per_hour": None,
            "block_bytes": 5000,
            "ranks": 1,
        }
        return SpillConfig(**(defaults | fields))

    def open(
        self, *, fs: FileSystem | None = None, identity: Any = None, wait_s: float = 0.0, **fields: Any
    ) -> SpillStore:
        config = self.config(**fields)
        store = SpillStore.open(config, identity or some_identity(), fs=fs, clock=self._clock)
        self._open.append(store)
        return store

    def close(self) -> None:
        for store in self._open:
            store.close()


@pytest.fixture
def memory_spill(tmp_path: Path, clock: FakeClock) -> Iterator[SpillDirectory]:
    """In memory where the machine has such a place: for tests that start a store hundreds of times.

    What a real disk does is tested on one, in the component tests.
    """
    shared = Path("/dev/shm")
    parent = Path(tempfile.mkdtemp(dir=shared)) if os.access(shared, os.W_OK) else tmp_path
    directory = SpillDirectory(parent / "spill", clock)
    yield directory
    directory.close()
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def spill(tmp_path: Path, clock: FakeClock) -> Iterator[SpillDirectory]:
    directory = SpillDirectory(tmp_path / "spill", clock)
    yield directory
    directory.close()
