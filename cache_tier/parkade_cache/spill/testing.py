"""Support for tests of this package and of what stands on it: a clock that is set, a file system that fails or dies.

A dying file system stands for SIGKILL between two operations: from the chosen operation on nothing is done any more,
clean-up included. ``bury`` then closes what the kernel would have closed.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkade_cache.ids import NO_KEY, BlockKey, PackId
from parkade_cache.spill.clock import Clock
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.identity import Identity
from parkade_cache.spill.outcome import Reservation
from parkade_cache.spill.pack import PackAddress, PackHeader, PackInfo, pack_file_bytes
from parkade_cache.spill.pack_reader import PackReader
from parkade_cache.spill.pack_writer import PackBlock, PackWriter
from parkade_cache.spill.store import SpillStore

Rule = Callable[[str, int], OSError | None]
"""What the operation of this name, the n-th of all, fails with; None to let it be done."""


class FakeClock(Clock):
    """Time that passes only when told; sleeping makes it pass."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s
        self.monotonic_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.monotonic_s += seconds


class SimulatedCrash(BaseException):
    """The process is gone; not an Exception, so that no handler takes it for an error."""


class FaultyFileSystem(FileSystem):
    """The real file system, but for the operations that a rule fails and for all after the one it dies at."""

    def __init__(self, *, die_at: int | None = None, rule: Rule = lambda _name, _n: None) -> None:
        self.operations: list[str] = []
        self._die_at = die_at
        self._rule = rule
        self._fds: set[int] = set()
        self._connections: list[sqlite3.Connection] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in vars(FileSystem) or name.startswith("_"):
            return found

        def operation(*args: Any, **kwargs: Any) -> Any:
            self.step(name)
            done = found(*args, **kwargs)
            self._track(name, done, args)
            return done

        return operation

    def step(self, name: str) -> None:
        """Count one operation; die or fail where told."""
        self.operations.append(name)
        if self._die_at is not None and len(self.operations) >= self._die_at:
            raise SimulatedCrash(f"{name} is operation {len(self.operations)}")
        error = self._rule(name, len(self.operations))
        if error is not None:
            raise error

    def connect(self, path: Path) -> sqlite3.Connection:
        """A connection whose statements are operations too."""
        step = self.step

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                step(f"sql {statement.strip().partition(' ')[0]}")
                return super().execute(statement, *values)

        connection = sqlite3.connect(
            path, timeout=0.1, isolation_level=None, check_same_thread=False, factory=Connection
        )
        self._connections.append(connection)
        return connection

    def bury(self) -> None:
        """Close what a dead process had open."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        for connection in self._connections:
            sqlite3.Connection.close(connection)

    def _track(self, name: str, done: Any, args: Sequence[Any]) -> None:
        if name == "open":
            self._fds.add(done)
        elif name == "close":
            self._fds.discard(args[0])


def some_identity(**fields: Any) -> Identity:
    """An identity; a test names only what matters to it."""
    defaults: dict[str, Any] = {
        "model": "org/model",
        "revision": "main",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "drafter": "",
        "layout": "nhd",
        "block_tokens": 16,
        "parallel": "tp1pp1",
        "hash_algorithm": "sha256_cbor",
        "hash_seed": "",
        "format_version": 1,
    }
    return Identity(**(defaults | fields))


def some_key(name: str) -> BlockKey:
    """A block key that a reader of a failing test can recognise."""
    return BlockKey(name.encode().ljust(32, b".") + bytes(4))


def some_payload(name: str, *, rank: int = 0, nbytes: int = 5000) -> bytes:
    """Bytes that only this block on this rank has."""
    seed = f"{name}/{rank}/".encode()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def chain_blocks(names: Sequence[str], *, rank: int = 0, nbytes: int = 5000, parent: str = "") -> list[PackBlock]:
    """Blocks that follow each other."""
    parents = [some_key(parent) if parent else NO_KEY, *map(some_key, names)]
    return [
        PackBlock(some_key(name), parents[n], 16 * (n + 1), 0, some_payload(name, rank=rank, nbytes=nbytes))
        for n, name in enumerate(names)
    ]


def chain_bytes(count: int, *, ranks: int = 1, nbytes: int = 5000) -> int:
    """What a pack of so many blocks takes, all ranks."""
    return pack_file_bytes([nbytes] * count) * ranks


@dataclass(frozen=True, slots=True)
class Chain:
    """What one pack holds: blocks that follow each other, of one conversation."""

    names: Sequence[str]
    conversation: str = "conversation"
    parent: str = ""
    created_at: float = 1_700_000_000.0

    def header(self, store: SpillStore, pack_id: PackId, rank: int) -> PackHeader:
        """The header of one rank's file."""
        return PackHeader(pack_id, self.conversation, store.fingerprint, rank, store.ranks, self.created_at)


def write_ranks(
    fs: FileSystem,
    store: SpillStore,
    reservation: Reservation,
    chain: Chain,
    *,
    on_rank: Callable[[int], None] = lambda _rank: None,
) -> list[PackInfo]:
    """What the movers of all ranks do for one pack."""
    infos = []
    for rank in range(store.ranks):
        header = chain.header(store, reservation.pack_id, rank)
        with PackWriter(fs, store.rank_folder(rank), header, direct=store.direct, depth=0) as writer:
            writer.append_many(chain_blocks(chain.names, rank=rank, parent=chain.parent))
            infos.append(writer.finish([(some_key(chain.names[-1]), 16 * len(chain.names))]))
        on_rank(rank)
    return infos


def reserve_chain(store: SpillStore, chain: Chain) -> Reservation:
    """Room for one pack; an AssertionError that says why where there is none."""
    reservation = store.reserve(chain_bytes(len(chain.names), ranks=store.ranks))
    assert isinstance(reservation, Reservation), reservation  # noqa: S101
    return reservation


def publish_chain(fs: FileSystem, store: SpillStore, names: Sequence[str], **fields: Any) -> list[PackInfo]:
    """Reserve, write and publish one pack of a conversation."""
    chain = Chain(names, **fields)
    reservation = reserve_chain(store, chain)
    infos = write_ranks(fs, store, reservation, chain)
    store.publish(infos, reservation)
    return infos


def read_back(
    fs: FileSystem, store: SpillStore, infos: Sequence[PackInfo]
) -> Iterator[Mapping[BlockKey, bytes | None]]:
    """For each rank, every block's bytes as verified from the disk; None for a bad one."""
    for rank, info in enumerate(infos):
        expected = PackAddress(info.header.pack_id, store.fingerprint, rank)
        path = store.path_of(expected.pack_id, rank)
        buffers = [bytearray(entry.nbytes) for entry in info.entries]
        with PackReader(fs, path, expected=expected, direct=store.direct, depth=0) as reader:
            good = reader.read_into(info.entries, buffers)
        found = zip(info.entries, buffers, good, strict=True)
        yield {entry.key: bytes(buffer) if whole else None for entry, buffer, whole in found}
