"""A machine made of files, and a host made of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from parkade_cache.ids import ConversationId
from parkade_cache.memory.gate import (
    AwaitWrites,
    Budget,
    Candidate,
    Release,
    Reservations,
    Victim,
    victims_of,
)
from parkade_cache.memory.reading import MemorySampler, Reading, ReadingSource, unknown

GIB = 1 << 30
MIB = 1 << 20


class FakeMachine:
    """``/proc`` and control groups below a temporary folder, in the kernel's own formats."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.meminfo(available_bytes=80 * GIB, total_bytes=128 * GIB)

    def sampler(self, *, cap_bytes: int | None = None) -> MemorySampler:
        return MemorySampler(cap_bytes=cap_bytes, root=self.root)

    def sample(self, *, cap_bytes: int | None = None) -> Reading:
        return self.sampler(cap_bytes=cap_bytes).sample()

    def meminfo(self, *, available_bytes: int, total_bytes: int = 128 * GIB) -> None:
        self.meminfo_text(
            f"MemTotal:       {total_bytes // 1024} kB\nMemFree:        1 kB\n"
            f"MemAvailable:   {available_bytes // 1024} kB\nBuffers: 0 kB\n"
        )

    def meminfo_text(self, text: str) -> None:
        (self.root / "proc/meminfo").write_text(text)

    def joins(self, *, v2: str | None = None, v1: str | None = None) -> None:
        lines = ["9:name=systemd:/somewhere"]
        lines += [] if v1 is None else [f"4:memory:{v1}"]
        lines += [] if v2 is None else [f"0::{v2}"]
        (self.root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")

    def mounts(self, *, v2: str | None = None, v1: str | None = None, v2_root: str = "/", v1_root: str = "/") -> None:
        """Mount points as the kernel names them; ``*_root`` is the group a mount shows at its top."""
        lines = ["22 27 0:21 / /proc rw,relatime - proc proc rw"]
        if v1 is not None:
            lines.append("32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu")
            lines.append(f"35 31 0:32 {v1_root} {v1} rw,relatime shared:9 - cgroup cgroup rw,memory")
        if v2 is not None:
            lines.append(f"41 31 0:38 {v2_root} {v2} rw,relatime shared:4 master:1 - cgroup2 cgroup2 rw")
        (self.root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")

    def v2_group(self, path: str, *, point: str = "/sys/fs/cgroup", **files: int | str | Mapping[str, int]) -> None:
        """``max=…, high=…, current=…, stat={…}`` become ``memory.max`` and so on."""
        self._group(point + path, {f"memory.{name}": value for name, value in files.items()})

    def v1_group(
        self, path: str, *, limit: int | str, usage: int | str | None, stat: Mapping[str, int] | str | None = None
    ) -> None:
        files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}
        self._group("/sys/fs/cgroup/memory" + path, {name: value for name, value in files.items() if value is not None})

    def _group(self, path: str, files: Mapping[str, int | str | Mapping[str, int]]) -> None:
        folder = self.root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            text = "".join(f"{key} {n}\n" for key, n in value.items()) if isinstance(value, Mapping) else f"{value}\n"
            (folder / name).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """A machine without control groups, 80 of 128 GiB available."""
    return FakeMachine(tmp_path)


@pytest.fixture
def pod(machine: FakeMachine) -> FakeMachine:
    """A v2 pod: the container's own limits sit at the mount root. No limit set yet."""
    machine.joins(v2="/")
    machine.mounts(v2="/sys/fs/cgroup")
    machine.v2_group("", max="max", high="max", current=0, stat={})
    return machine


@dataclass
class SimulatedHost:
    """A host that returns all, half, a fifth or none of what was freed, and on which others live too.

    ``available_bytes`` is what a reading shows. Freed memory first lies in ``held_bytes`` (an allocator, an empty
    extent) and is returned by a release, ``returns`` of it. ``taken_by_others`` is what another process takes
    before each reading, ``unknown_from`` the reading from which telemetry is gone.
    """

    available_bytes: int
    parked: list[Candidate] = field(default_factory=list)
    extent_bytes: int = MIB
    held_bytes: int = 0
    returns: float = 1.0
    taken_by_others: Callable[[int], int] | None = None
    unknown_from: int | None = None
    limits: Budget | None = None
    in_flight_bytes: int = 0
    wait_lets_go_bytes: int = 0
    busy_at_eviction: frozenset[ConversationId] = frozenset()
    reservations: Reservations = field(default_factory=Reservations)
    evicted: list[ConversationId] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    readings: int = 0
    victims_asked: int = 0
    _still_to_take: Iterator[int] | None = None

    def sample(self) -> Reading:
        self.readings += 1
        self.log.append("read")
        if self.unknown_from is not None and self.readings >= self.unknown_from:
            return unknown("telemetry is gone")
        if self.taken_by_others is not None:
            self.available_bytes = max(0, self.available_bytes - self.taken_by_others(self.available_bytes))
        return Reading(self.available_bytes, ReadingSource.CGROUP, limit_bytes=1 << 40, current_bytes=0)

    def read(self) -> tuple[Reading, int]:
        return self.reservations.read(self.sample)

    def budget(self) -> Budget:
        if self.limits is None:
            return Budget(parked_bytes=0, parked_max_bytes=1 << 60)
        extents = {extent for one in self.parked for extent in one.extents}
        return Budget(
            parked_bytes=len(extents) * self.extent_bytes,
            parked_max_bytes=self.limits.parked_max_bytes,
            conversations=len(self.parked),
            max_conversations=self.limits.max_conversations,
        )

    def victims(self) -> Sequence[Victim]:
        self.victims_asked += 1
        return victims_of(self.parked, extent_bytes=self.extent_bytes)

    def release(self, step: Release) -> int:
        self.log.append("release")
        returned = int(self.held_bytes * self.returns)
        self.held_bytes -= returned
        self.available_bytes += returned
        return returned

    def evict(self, conversation: ConversationId) -> bool:
        self.log.append(f"evict {conversation}")
        if conversation in self.busy_at_eviction:
            return False
        gone = next(one for one in self.parked if one.conversation == conversation)
        self.parked.remove(gone)
        kept = {extent for one in self.parked for extent in one.extents}
        self.held_bytes += len(gone.extents - kept) * self.extent_bytes
        self.evicted.append(conversation)
        return True

    def await_writes(self, step: AwaitWrites) -> None:
        self.log.append("wait")
        let_go = min(self.in_flight_bytes, self.wait_lets_go_bytes)
        self.in_flight_bytes -= let_go
        self.held_bytes += let_go

    def writes_in_flight_bytes(self) -> int:
        return self.in_flight_bytes

    @property
    def releases(self) -> int:
        return self.log.count("release")


@pytest.fixture(scope="session")
def simulated_host() -> Callable[..., SimulatedHost]:
    return SimulatedHost


@pytest.fixture(scope="session")
def conversations() -> Callable[..., list[Candidate]]:
    """``conversations(3, extents=2)``: c0 is the oldest; each has extents of its own."""

    def build(count: int, *, extents: int = 1, pinned: int = 0, unwritten: Sequence[int] = ()) -> list[Candidate]:
        return [
            Candidate(
                conversation=ConversationId(f"c{index}"),
                extents=frozenset(range(index * extents, (index + 1) * extents)),
                idle_seconds=float(1000 - index),
                published=index not in unwritten,
                pinned=index < pinned,
            )
            for index in range(count)
        ]

    return build
