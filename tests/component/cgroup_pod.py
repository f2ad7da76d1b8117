"""A whole pod, without an engine, in a real memory control group whose limit and neighbours move; run as a program.

``python cgroup_pod.py v1|v2 MIB [LIFE...]`` makes a group for each life of a pod, runs owner, mover and files in a
child process inside it through that life's scenarios, and prints one JSON object: what each scenario saw, or
``{"skip": reason}``. Readings, stalls and the watching thread are the real ones. Like ``cgroup_checks.py`` it only
observes; ``kernel_conformance.py`` says what must be true. MIB is the limit at the start; ``Sizes`` says what follows.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from component.cgroup_checks import MIB, Group, in_child, made_group, parent_for, seen
from support.pod import BLOCK_TOKENS, Pod, prompt

from parkade_cache.memory.cgroup import CgroupVersion
from parkade_cache.memory.heap import resident_bytes
from parkade_cache.memory.reading import MemorySampler, Reading
from parkade_cache.policy import merge_documents
from parkade_cache.receipts import Receipt, ReceiptKind
from parkade_cache.watcher import WATCH_INTERVAL_S

GROWTH_BLOCKS = 2
"""What a turn adds to its conversation."""


@dataclass(frozen=True)
class Sizes:
    """Everything follows from the limit at the start; in RAM there is room for some of the conversations."""

    limit: int
    floor_divisor: int
    parked_percent: int
    conversations: int

    @property
    def floor(self) -> int:
        return self.limit // self.floor_divisor

    @property
    def lowered(self) -> int:
        return whole_pages(self.limit * 6 // 10)

    @property
    def parked_max(self) -> int:
        return self.limit * self.parked_percent // 100

    @property
    def block_bytes(self) -> int:
        """Few and large: the time of these checks is for the kernel, not for Python."""
        return max(16 * 1024, self.limit // 1024)

    @property
    def blocks(self) -> int:
        """Of one conversation, which with some growth fills an extent: an eighth of what may be parked."""
        return self.parked_max // 8 // self.block_bytes * 3 // 4

    @property
    def bounce(self) -> int:
        """Buffers for reads and streams, besides what is parked."""
        return min(32 * MIB, self.limit // 20)


def whole_pages(nbytes: int) -> int:
    """As the kernel rounds a limit."""
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE


class Witness(MemorySampler):
    """The kernel's readings under the limit in force, each kept with its time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[tuple[float, int]] = deque(maxlen=200_000)

    def sample_under(self, cap_bytes: int | None) -> Reading:
        reading = super().sample_under(cap_bytes)
        if cap_bytes == self.cap_bytes and reading.available_bytes is not None:
            self.seen.append((time.monotonic(), reading.available_bytes))
        return reading

    def longest_below(self, nbytes: int) -> float:
        """Seconds from the first reading below ``nbytes`` to the next that is not, the longest such time."""
        longest, since = 0.0, None
        for at, available in list(self.seen):
            if available >= nbytes:
                longest, since = max(longest, at - since if since is not None else 0.0), None
            elif since is None:
                since = at
        return longest if since is None else max(longest, self.seen[-1][0] - since)

    def lowest(self) -> int:
        return min((available for _, available in list(self.seen)), default=-1)


class Neighbour:
    """Another process of the group, which holds as much memory as it is told to."""

    def __init__(self, group: Group) -> None:
        commands, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            group.join()
            self._live(commands, answers)
        os.close(commands)
        os.close(answers)
        self.held = 0

    def hold(self, nbytes: int) -> None:
        """Returns when it does; ChildProcessError where the kernel has killed it."""
        try:
            os.write(self._orders, f"{nbytes // MIB}\n".encode())
            alive = os.read(self._answers, 1)
        except BrokenPipeError:
            alive = b""
        if not alive:
            raise ChildProcessError("the neighbour was killed")
        self.held = nbytes // MIB * MIB

    def grow(self, nbytes: int, per_second: int) -> None:
        """To ``nbytes`` in steps of a MiB."""
        while self.held < nbytes:
            due = time.monotonic() + MIB / per_second
            self.hold(self.held + MIB)
            time.sleep(max(0.0, due - time.monotonic()))

    def end(self) -> None:
        os.close(self._orders)
        os.waitpid(self.pid, 0)

    @staticmethod
    def _live(commands: int, answers: int) -> None:
        pieces: list[mmap.mmap] = []
        filler = b"\x01" * MIB
        with os.fdopen(commands) as orders:
            for order in orders:
                while len(pieces) > int(order):
                    pieces.pop().close()
                while len(pieces) < int(order):
                    pieces.append(mmap.mmap(-1, MIB))
                    pieces[-1].write(filler)
                os.write(answers, b"y")
        os._exit(0)


class Load:
    """Conversations taking turns, one after the other, as fast as they can; every byte that comes back is looked at."""

    def __init__(self, pod: Pod, sizes: Sizes) -> None:
        self.pod = pod
        self.tokens = {f"c{n}": prompt(f"c{n}", sizes.blocks) for n in range(sizes.conversations)}
        self.turns = 0
        self.short: list[str] = []
        self.failed = ""
        self.longest_seconds = 0.0
        self._names = itertools.cycle(self.tokens)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take_turn(self, name: str, *, first: bool = False) -> None:
        had = [] if first else self.tokens[name]
        started = time.monotonic()
        fresh = prompt(f"{name} {self.turns}", GROWTH_BLOCKS)
        turned = self.pod.turn(name, self.tokens[name] + fresh[:BLOCK_TOKENS], reply=fresh[BLOCK_TOKENS:])
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - started)
        self.tokens[name] = turned.tokens
        self.turns += 1
        expected = len(had) // BLOCK_TOKENS * BLOCK_TOKENS
        if turned.reused < expected:
            self.short.append(f"{name}: {turned.reused} of {expected} tokens came back, {turned.receipt.to_json()}")

    def fill(self) -> None:
        """Every conversation's first turn."""
        for name in self.tokens:
            self.take_turn(name, first=True)

    def all_once(self) -> None:
        for name in self.tokens:
            if not self.failed:
                self.take_turn(name)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.take_turn(next(self._names))
        except BaseException as error:  # noqa: BLE001 - whatever ends the turns is what the check wants to know
            self.failed = f"{type(error).__name__}: {error}"

    def more_turns(self, count: int) -> None:
        """Wait until as many have ended."""
        wanted = self.turns + count
        while self.turns < wanted and not self.failed:
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


@dataclass
class Stage:
    """One pod in its group, as a container sees it."""

    group: Group
    sizes: Sizes
    pod: Pod
    readings: Witness
    load: Load
    neighbour: Neighbour

    @property
    def growth(self) -> int:
        """Bytes a second that the neighbour takes: the floor, or half of it where pages may be ten times as slow."""
        return self.sizes.floor if self.group.version is CgroupVersion.V1 else self.sizes.floor // 2

    def announce(self, limit: int) -> dict[str, Any]:
        """The policy first, as an operator sends it; its answer."""
        parked_max = min(self.sizes.parked_max, limit * 9 // 10)
        changed = {"memory": {"limit": limit, "parked": {"max": parked_max}}}
        return self.pod.owner.set_policy(merge_documents(self.pod.document, changed))

    def receipts(self, kind: ReceiptKind, since: float) -> list[Receipt]:
        return self.pod.receipts.query(kind=kind, since=since, limit=100_000)

    def await_floor(self) -> float | None:
        """Seconds until a reading has the floor free; None where it takes longer than anybody would wait."""
        started = time.monotonic()
        while time.monotonic() < started + GIVEN_UP_S:
            if (self.readings.sample().available_bytes or 0) >= self.sizes.floor:
                return time.monotonic() - started
            time.sleep(0.02)
        return None

    def await_more_than_fits(self, limit: int) -> None:
        """Until turns have parked so much that this limit cannot be met without giving something back."""
        deadline = time.monotonic() + GIVEN_UP_S
        while (self.readings.sample_under(limit).available_bytes or 0) >= self.sizes.floor * 3 // 4:
            if time.monotonic() > deadline or self.load.failed:
                return
            time.sleep(0.01)

    def noticed_after(self, changed_at: float, limit: int) -> float | None:
        """Seconds from a change of the kernel's file to the receipt that says so."""
        while time.time() < changed_at + GIVEN_UP_S:
            for receipt in self.receipts(ReceiptKind.RESIZE, changed_at):
                if receipt.outcome == "noticed" and limit in (receipt.detail or {})["new"]:
                    return receipt.time - changed_at
            time.sleep(0.02)
        return None

    def lower_in_steps(self, write: Callable[[int], None]) -> dict[str, Any]:
        """To 60 %, unannounced: each step to more than is in use, and less than what the floor needs."""
        self.load.more_turns(6)
        noticed: list[float | None] = []
        floor_back: list[float | None] = []
        limit = self.sizes.limit
        while limit > self.sizes.lowered and None not in floor_back:
            next_limit = min(limit - MIB, self.group.usage_bytes() + self.sizes.floor * 2 // 3)
            limit = max(self.sizes.lowered, whole_pages(next_limit))
            changed_at = time.time()
            write(limit)
            floor_back.append(self.await_floor())
            noticed.append(self.noticed_after(changed_at, limit))
        return {
            "limit": limit,
            "steps": len(noticed),
            "noticed_seconds": _spread(noticed),
            "floor_back_seconds": _spread(floor_back),
        }

    def play(self, scenario: Callable[[Stage], dict[str, Any]]) -> dict[str, Any]:
        """What it saw, with what every one is judged by: kills, losses, and turns that got their state back."""
        self.readings.seen.clear()
        self.load.longest_seconds = 0.0
        started, wall, turns = time.monotonic(), time.time(), self.load.turns
        events, counts = self.group.events(), self.pod.receipts.counts()
        found = scenario(self)
        reliefs = [r for r in self.receipts(ReceiptKind.RELEASE, wall) if r.outcome in {"relieved", "short"}]
        return found | {
            "seconds": round(time.monotonic() - started, 2),
            "turns": self.load.turns - turns,
            "longest_turn_seconds": round(self.load.longest_seconds, 3),
            "turns_failed": self.load.failed,
            "turns_short": self.load.short[:3],
            "events": {name: count - events[name] for name, count in self.group.events().items()},
            "receipts": {
                f"{kind} {outcome}": count - counts.get((kind, outcome), 0)
                for (kind, outcome), count in self.pod.receipts.counts().items()
                if kind in _TELLING and count > counts.get((kind, outcome), 0)
            },
            "reliefs": len(reliefs),
            "relief_seconds": _spread([receipt.duration_seconds for receipt in reliefs]),
            "lowest_available": self.readings.lowest(),
            "seconds_below_floor": round(self.readings.longest_below(self.sizes.floor), 3),
        }


GIVEN_UP_S = 15.0
_TELLING = frozenset(kind.value for kind in (ReceiptKind.EVICT, ReceiptKind.DROP, ReceiptKind.RESIZE))


@contextmanager
def on_stage(group: Group, sizes: Sizes, folder: Path) -> Iterator[Stage]:
    """A pod inside ``group``, with its conversations parked and a neighbour that holds nothing yet.

    They join when they have started: what Python and its libraries take is charged elsewhere, and sizes can be small.
    """
    group.set_limit(sizes.limit)
    group = group.as_in_a_container()
    neighbour = Neighbour(group)
    readings = Witness()
    pod = Pod(
        folder / "spill",
        readings=readings,
        watch=True,
        floor=sizes.floor,
        parked_max=sizes.parked_max,
        size=8 * sizes.limit,
        spill={"writeOutSeconds": 30},
        block_bytes=sizes.block_bytes,
        bounce_bytes=sizes.bounce,
        device_blocks=sizes.blocks + 64,
    )
    try:
        with pod:
            pod.device.planes[0].fill(0)
            gc.collect()
            group.join()
            stage = Stage(group, sizes, pod, readings, Load(pod, sizes), neighbour)
            stage.load.fill()
            yield stage
    finally:
        neighbour.end()


# -- scenarios ---------------------------------------------------------------------------------------------------------


def announced(stage: Stage, times: int = 20) -> dict[str, Any]:
    """Case 66: the limit lowered to 60 % once the pod has confirmed it, and raised again, under turns."""
    refused: list[str] = []
    since = time.time()
    with stage.load:
        for _ in range(times):
            stage.await_more_than_fits(stage.sizes.lowered)
            answer = stage.announce(stage.sizes.lowered)
            if not answer["applied"]:
                refused.append(answer["reason"])
                continue
            stage.group.set_limit(stage.sizes.lowered)
            stage.load.more_turns(1)
            stage.group.set_limit(stage.sizes.limit)
            stage.announce(stage.sizes.limit)
    confirmed = [r for r in stage.receipts(ReceiptKind.RESIZE, since) if r.outcome == "confirmed"]
    return {
        "times": len(confirmed),
        "refused": refused,
        "confirmed_seconds": _spread([receipt.duration_seconds for receipt in confirmed]),
        "given_back_mib": _spread([(receipt.released_bytes or 0) / MIB for receipt in confirmed]),
    }


def unannounced(stage: Stage) -> dict[str, Any]:
    """M11: only the kernel's file is lowered, under turns."""
    with stage.load:
        found = stage.lower_in_steps(stage.group.set_limit)
        stage.group.set_limit(stage.sizes.limit)
    return found


def high(stage: Stage) -> dict[str, Any]:
    """M3: v2's ``memory.high`` is lowered, under turns."""
    with stage.load:
        found = stage.lower_in_steps(stage.group.set_high)
        found["reading"] = seen(stage.readings.sample())
        stage.load.more_turns(3)
        stage.group.set_high(None)
    return found


def waves(stage: Stage) -> dict[str, Any]:
    """A neighbour takes a quarter of the limit, holds it, and lets go, again and again, while turns are served."""
    turns: list[int] = []
    with stage.load:
        for _ in range(3):
            before = stage.load.turns
            stage.neighbour.grow(stage.sizes.limit // 4, stage.growth)
            stage.load.more_turns(1)
            turns.append(stage.load.turns - before)
            stage.neighbour.hold(0)
            stage.load.more_turns(2)
    return {"turns_in_waves": turns}


def next_turns(stage: Stage) -> dict[str, Any]:
    """Every conversation's next turn, after all that."""
    stage.load.all_once()
    stage.pod.settle()
    stage.pod.check()
    return {}


def steady(stage: Stage) -> dict[str, Any]:
    """Nobody asks for anything, and a neighbour grows to 40 % of the limit."""
    parked = stage.pod.state.slots.held_bytes()
    stage.neighbour.grow(stage.sizes.limit * 4 // 10, stage.growth)
    return {"parked_share": round(parked / stage.sizes.limit, 2)}


def below_use(stage: Stage) -> dict[str, Any]:
    """Only the kernel's file, to half of what is in use: v1 refuses, v2 kills."""

    def state() -> dict[str, Any]:
        return {"limits": stage.readings.limits_bytes(), "parked": stage.pod.state.slots.held_bytes()}

    before, answer = state(), "accepted"
    try:
        stage.group.set_limit(stage.group.usage_bytes() // 2)
    except OSError as error:
        answer = errno.errorcode[error.errno or 0]
    time.sleep(2 * WATCH_INTERVAL_S)
    return {"answer": answer, "before": before, "after": state()}


def writing_out(stage: Stage) -> dict[str, Any]:
    """Everything that is parked is written out at once."""
    stage.pod.settle()
    unwritten = stage.pod.state.ledger.dirty_blocks * stage.sizes.block_bytes
    resident, cached = [resident_bytes()], [stage.group.page_cache_bytes()]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            resident.append(resident_bytes())
            cached.append(stage.group.page_cache_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    drained = stage.pod.owner.drain(grace_s=60)
    over.set()
    looking.join()
    return {
        "unwritten": unwritten,
        "drained": drained,
        "resident_growth": max(resident) - resident[0],
        "page_cache_growth": max(cached) - cached[0],
        "looks": len(resident),
    }


Scenario = Callable[[Stage], dict[str, Any]]


@dataclass(frozen=True)
class Life:
    """Scenarios that one pod goes through, one after the other."""

    scenarios: tuple[Scenario, ...]
    limit_factor: int = 1
    floor_divisor: int = 6
    parked_percent: int = 75
    """More than the floor leaves room for: the gate alone keeps it."""
    conversations: int = 10

    def live(self, group: Group, folder: Path) -> dict[str, Any]:
        sizes = Sizes(group.mib * MIB * self.limit_factor, self.floor_divisor, self.parked_percent, self.conversations)
        with on_stage(group, sizes, folder) as stage:
            found = {scenario.__name__: stage.play(scenario) for scenario in (*self.scenarios, next_turns)}
        return found | {"sizes": {"limit": sizes.limit, "lowered": sizes.lowered, "floor": sizes.floor}}


LIVES: dict[CgroupVersion, dict[str, Life]] = {
    CgroupVersion.V1: {
        "limits": Life((announced, unannounced, waves)),
        "neighbour": Life((steady,), floor_divisor=10, parked_percent=72),
        "refused": Life((below_use,), conversations=6),
        "written": Life((writing_out,), limit_factor=4),
    },
    CgroupVersion.V2: {
        "limits": Life((announced, unannounced, high, waves)),
        "neighbour": Life((steady,), floor_divisor=10, parked_percent=72),
        "killed": Life((below_use,), conversations=4),
    },
}


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Least, median and most of what was measured; None where something never came."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return {"least": None, "median": None, "most": None}
    found = {"least": min(known), "median": statistics.median(known), "most": max(known)}
    return {name: round(value, 3) for name, value in found.items()}


def main(version: CgroupVersion, mib: int, names: list[str]) -> dict[str, Any]:
    try:
        parent = parent_for(version)
    except LookupError as reason:
        return {"skip": str(reason)}
    found: dict[str, Any] = {"kernel": platform.release(), "stalls": Path("/proc/pressure/memory").exists()}
    for name in names or LIVES[version]:
        # Made here, because a pod that is killed cleans nothing up.
        with made_group(version, parent, name, mib) as group, tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            found[name] = in_child(partial(LIVES[version][name].live, folder=Path(folder)), group)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(CgroupVersion(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])) + "\n")
