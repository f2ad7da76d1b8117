"""Two long conversations take turns in real vLLM while two small clients keep it busy: ``soak_process.py FOLDER MODE``.

Run by ``test_soak.py``. RAM holds one of the two besides the small clients, the engine's own cache little more than
one, so that every turn sends the other conversation to disk and brings its own back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.live_engine import BLOCK_TOKENS, Asked, LiveEngine, id_of, words

from parkade_cache import cache
from parkade_cache.hooks import HookTimes
from parkade_serving.connector import _WorkerSide

FOLDER = Path(sys.argv[1])
MODE = sys.argv[2]
RELEASES = int(os.environ.get("PARKADE_SOAK_RELEASES", "40"))

LONG_BLOCKS = 36
TURNS = 10
"""Turns of one pair of conversations; each adds a block. Then another pair begins: a longer one would outgrow RAM."""
NEW_WORDS, REPLY = BLOCK_TOKENS - 8, 8
SMALL_WORDS, SMALL_REPLY = 2 * BLOCK_TOKENS + 10, 6
SMALL_CLIENTS = 2
SMALL_BETWEEN = 4
"""Small requests between two long turns: what is left of a long one in the engine's own cache goes for them."""
SMALL_BLOCKS = 5 * (SMALL_WORDS // BLOCK_TOKENS)
"""A small client's blocks in RAM: it keeps four chains, and one is in flight."""
MOST_BLOCKS = LONG_BLOCKS + TURNS + 2
ENGINE_BLOCKS = MOST_BLOCKS + SMALL_CLIENTS * 3 + 4
ROOM_BLOCKS = MOST_BLOCKS + SMALL_CLIENTS * SMALL_BLOCKS + 16
BLOCK_KIB = 32


def policy(parked_kib: int) -> dict[str, Any]:
    return {
        "memory": {"floor": "64Mi", "parked": {"max": f"{parked_kib}Ki"}},
        "spill": {"size": "2Gi", "minFree": "1Mi", "mode": MODE, "writeBehindIdleSeconds": 0},
    }


class ProcessorTimes:
    """Processor time of the step hooks. Their wall time includes waiting for a processor on a busy machine."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self._wrap(HookTimes, "timed")
        self._wrap(_WorkerSide, "timed")

    def _wrap(self, owner: type, method: str) -> None:
        timed, longest = getattr(owner, method), self.longest

        @contextmanager
        def watched(of: Any, name: str) -> Iterator[None]:
            with timed(of, name):
                started = time.thread_time()
                try:
                    yield
                finally:
                    longest[name] = max(longest.get(name, 0.0), time.thread_time() - started)

        setattr(owner, method, watched)


@dataclass
class SmallClient:
    """Asks something new all the time, under one id."""

    name: str
    asked: Asked | None = None
    requests: int = 0

    def keep_busy(self, engine: LiveEngine) -> None:
        if self.asked is not None and not self.asked.done:
            return
        self.requests += 1
        prompt = words((self.name, self.requests), SMALL_WORDS)
        self.asked = engine.send(prompt, conversation=self.name, reply=SMALL_REPLY)


class Soak:
    def __init__(self, engine: LiveEngine, times: ProcessorTimes) -> None:
        self.engine = engine
        self.times = times
        self.clients = [SmallClient(f"small-{number}") for number in range(SMALL_CLIENTS)]
        self.long: set[str] = set()
        self.turns: list[dict[str, Any]] = []
        self.receipts: list[dict[str, Any]] = []
        self._seen = 0

    def run(self) -> None:
        generation = 0
        while self.releases() < RELEASES:
            generation += 1
            texts: dict[str, list[int]] = {f"long-{generation}-{side}": [] for side in "ab"}
            self.long |= {id_of(name) for name in texts}
            for turn in range(TURNS):
                for name, text in texts.items():
                    texts[name] = self.turn(name, text, turn)

    def releases(self) -> int:
        self._collect()
        return len(self.evictions())

    def evictions(self) -> list[dict[str, Any]]:
        return [
            receipt
            for receipt in self.receipts
            if receipt["kind"] == "evict" and receipt["tier"] == "ram" and receipt["conversation"] in self.long
        ]

    def turn(self, name: str, text: list[int], turn: int) -> list[int]:
        new = words((name, turn), NEW_WORDS if text else LONG_BLOCKS * BLOCK_TOKENS)
        asked = self.engine.send(text + new, conversation=name, reply=REPLY)
        self._work(lambda: asked.done)
        # People answer later than that: the turn is closed, its last blocks are copied.
        self._work(lambda: not any(turn.conversation.id in self.long for turn in self.engine.state.turns.values()))
        before = sum(client.requests for client in self.clients)
        self._work(lambda: sum(client.requests for client in self.clients) >= before + SMALL_BETWEEN)
        self.turns.append({"conversation": id_of(name), "request": asked.id, "prompt": len(asked.prompt), "turn": turn})
        return asked.text

    def _work(self, over: Any) -> None:
        deadline = time.monotonic() + 60
        while not over():
            for client in self.clients:
                client.keep_busy(self.engine)
            self.engine.step()
            assert time.monotonic() < deadline, "a turn did not end"

    def _collect(self) -> None:
        """The log keeps the newest only: take them along as they come."""
        fresh = self.engine.owner.list_receipts({"since": self._seen, "limit": 100_000})
        self.receipts += fresh
        self._seen = max((receipt["id"] for receipt in fresh), default=self._seen)

    def facts(self) -> dict[str, Any]:
        dirty = self.engine.state.conversations.dirty
        self.engine.until(
            lambda: self.engine.is_idle() and not (MODE == "WriteBehind" and any(dirty())), "all of it is written"
        )
        self._collect()
        closed = {receipt["request"]: receipt for receipt in self.receipts if receipt["kind"] == "turn"}
        returns = [turn | {"receipt": closed[turn["request"]]} for turn in self.turns if turn["turn"]]
        small = [one for one in closed.values() if one["conversation"] not in self.long]
        summary = self.engine.owner.summary()
        return {
            "mode": MODE,
            "releases": [receipt["outcome"] for receipt in self.evictions()],
            "release_reasons": sorted({receipt["reason"] for receipt in self.evictions()}),
            "returns": [_short(one) for one in returns],
            "small_requests": len(small),
            "small_outcomes": sorted(
                {r["outcome"] for r in self.receipts if r["kind"] == "evict" and r["conversation"] not in self.long}
            ),
            "refusals": [[r["conversation"] in self.long, r["reason"]] for r in self.receipts if r["kind"] == "refuse"],
            "waited_write_out_ms": {
                "long": _spread([one["receipt"]["waited_write_out_seconds"] for one in returns]),
                "small": _spread([one["waited_write_out_seconds"] for one in small]),
            },
            "waited_restore_ms": _spread([one["receipt"]["waited_restore_seconds"] for one in returns]),
            "write_ms": {
                reason: _spread(
                    [r["duration_seconds"] for r in self.receipts if r["kind"] == "spill" and r["reason"] == reason]
                )
                for reason in ("stream", "write_out", "write_behind")
            },
            "step_ms": _spread(self.engine.step_seconds),
            "hooks": summary["hooks"],
            "hook_processor_ms": {name: round(seconds * 1e3, 2) for name, seconds in self.times.longest.items()},
            "dropped": summary["dropped_conversations_total"],
            "not_captured": summary["not_captured_blocks_total"],
            "disk": summary["disk"],
            "leaks": self.engine.leaks(),
        }


def _short(one: dict[str, Any]) -> dict[str, Any]:
    receipt = one["receipt"]
    return {
        "blocks": (one["prompt"] - 1) // BLOCK_TOKENS,
        "disk": receipt["reused_disk_tokens"] // BLOCK_TOKENS,
        "ram": receipt["reused_ram_tokens"] // BLOCK_TOKENS,
        "engine": receipt["reused_engine_tokens"] // BLOCK_TOKENS,
        "reason": receipt["reason"],
        "detail": receipt["detail"],
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: how many, the middle one, one in a hundred, the longest."""
    ordered = sorted(seconds)
    if not ordered:
        return {"count": 0}
    picked = {"median": len(ordered) // 2, "p99": int(len(ordered) * 0.99), "max": len(ordered) - 1}
    return {"count": len(ordered)} | {name: round(ordered[n] * 1e3, 2) for name, n in picked.items()}


def main() -> None:
    times = ProcessorTimes()
    # A slow machine must not decide which tier a block goes to; what requests wait is in the facts.
    cache.ADMISSION_WAIT_S = 10.0
    # Extents take their size from the first budget: one that is small makes them small.
    engine = LiveEngine(
        FOLDER,
        policy=policy(16 * BLOCK_KIB),
        blocks=ENGINE_BLOCKS + 1,
        context=MOST_BLOCKS * BLOCK_TOKENS,
        requests=1 + SMALL_CLIENTS,
        step_tokens=16 * BLOCK_TOKENS,
    )
    engine.set_policy(policy(ROOM_BLOCKS * BLOCK_KIB))
    soak = Soak(engine, times)
    started = time.monotonic()
    soak.run()
    seconds = time.monotonic() - started
    facts = soak.facts() | {"seconds": seconds}
    (FOLDER / f"{MODE}.json").write_text(json.dumps(facts, indent=1))
    engine.close()


if __name__ == "__main__":
    main()
