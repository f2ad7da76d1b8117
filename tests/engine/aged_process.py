"""An aged server under a limit that kills: ``aged_process.py FOLDER GROUP``, in the control group that GROUP shows.

Run by ``test_aged_server.py``. One conversation grows up a ladder of prompts and alternates with two sub-agents that
return, while the heap is churned in pieces of 16 MiB: what is freed lies in the middle, where only a release gets it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from support.live_engine import BLOCK_TOKENS, LiveEngine, words
from support.tiny_model import TinyShape

from parkade_cache.memory.gate import GateDecision, Refuse

FOLDER, GROUP = Path(sys.argv[1]), Path(sys.argv[2])
MIB = 1 << 20

SHAPE = TinyShape(heads=16, head_dim=64)
BLOCK_BYTES = SHAPE.token_bytes * BLOCK_TOKENS
FIRST_RUNG, RUNG, RUNGS = 32, 16, 7
SUB_BLOCKS = 32
REPLY = 8
TOP_BLOCKS = FIRST_RUNG + RUNG * (RUNGS - 1) + 4
FLOOR_MIB = 48
PARKED_MIB = 96
ROOM_MIB = 72
"""Above floor and engine: enough for the whole ladder and a little, not for all three conversations."""
PIECE_BYTES, PIECES, KEEPER_BYTES = 16 * MIB, 2, 64 << 10


class Heap:
    """Requests' working memory: a generation is taken, and the one before it is freed."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = (ctypes.c_size_t,)
        libc.free.argtypes = (ctypes.c_void_p,)
        # As in a server whose heap has served large pieces: they are not mapped one by one, nor trimmed at every free.
        assert libc.mallopt(-3, 32 * MIB)
        libc.mallopt(-1, (1 << 31) - 1)
        self._libc = libc
        self._old: list[int] = []

    def churn(self) -> None:
        fresh = []
        for _ in range(PIECES):
            piece = self._libc.malloc(PIECE_BYTES)
            ctypes.memset(piece, 1, PIECE_BYTES)
            fresh.append(piece)
            # Stays for good between two pieces: what is freed never grows together, nor lies at the heap's end.
            ctypes.memset(self._libc.malloc(KEEPER_BYTES), 1, KEEPER_BYTES)
        for piece in self._old:
            self._libc.free(piece)
        self._old = fresh


def policy() -> dict[str, Any]:
    return {
        "memory": {"floor": f"{FLOOR_MIB}Mi", "parked": {"max": f"{PARKED_MIB}Mi"}},
        "spill": {"size": "1Gi", "minFree": "1Mi", "writeBehindIdleSeconds": 0},
    }


class Aged:
    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.heap = Heap()
        self.texts: dict[str, list[int]] = {}
        self.turns: list[dict[str, Any]] = []
        self.refusals: list[dict[str, Any]] = []
        self._watch()

    def _watch(self) -> None:
        """Receipts do not say what could still have gone: note it for every decision."""
        admission = self.engine.owner.admission
        decide = admission._decide

        def deciding(*args: Any, **kwargs: Any) -> GateDecision:
            decision = decide(*args, **kwargs)
            if isinstance(decision.outcome, Refuse):
                self.refusals.append(
                    {
                        "kind": decision.request.kind.value,
                        "reason": decision.outcome.reason.value,
                        "missing": decision.outcome.missing_bytes,
                        "evictable": decision.outcome.evictable_bytes,
                        "available": decision.after.available_bytes,
                        "need": decision.request.need_bytes,
                    }
                )
            return decision

        admission._decide = deciding

    def turn(self, name: str, blocks: int) -> None:
        """The conversation comes back with so many blocks more."""
        self.heap.churn()
        text = self.texts.get(name, [])
        prompt = text + words((name, len(text)), blocks * BLOCK_TOKENS - REPLY)
        # Others have used the engine meanwhile: its own cache has nothing of this one.
        assert self.engine.llm.reset_prefix_cache()
        started = time.monotonic()
        asked = self.engine.turn(prompt, conversation=name, reply=REPLY)
        self.texts[name] = asked.text
        receipt = self.engine.receipt(asked)
        self.turns.append(
            {
                "name": name,
                "seconds": round(time.monotonic() - started, 3),
                # The last sampled token was never computed: its block was not complete.
                "known": max(0, len(text) - 1) // BLOCK_TOKENS,
                "reused": {
                    tier: receipt[f"reused_{tier}_tokens"] // BLOCK_TOKENS for tier in ("engine", "ram", "disk")
                },
                "outcome": receipt["outcome"],
                "reason": receipt["reason"],
                "park_refusal": receipt["detail"]["park_refusal"],
                "usage_mib": _number("memory.usage_in_bytes") // MIB,
            }
        )

    def climb(self) -> None:
        for sub in ("sub-a", "sub-b"):
            self.turn(sub, SUB_BLOCKS)
        for rung in range(RUNGS):
            self.turn("main", FIRST_RUNG if rung == 0 else RUNG)
            self.turn(("sub-a", "sub-b")[rung % 2], 1)


def _number(file: str) -> int:
    return int((GROUP / file).read_text())


def main() -> None:
    engine = LiveEngine(
        FOLDER,
        policy=policy(),
        blocks=TOP_BLOCKS + 1,
        context=TOP_BLOCKS * BLOCK_TOKENS,
        shape=SHAPE,
        requests=1,
        step_tokens=16 * BLOCK_TOKENS,
    )
    aged = Aged(engine)
    # Warm: the first request loads what the engine loads late. Both generations of the heap are there from then on.
    engine.turn(words("warm", 600))
    for _ in range(3):
        aged.heap.churn()
    limit = _number("memory.usage_in_bytes") + (FLOOR_MIB + ROOM_MIB) * MIB
    (GROUP / "memory.limit_in_bytes").write_text(str(limit))
    reading = engine.owner.sampler.sample()
    aged.climb()
    dirty = engine.state.conversations.dirty
    engine.until(lambda: engine.is_idle() and not any(dirty()), "all of it is written")
    kills = dict(line.split() for line in (GROUP / "memory.oom_control").read_text().splitlines())
    heaps = [heap for receipt in engine.receipts() for heap in receipt.get("heaps") or ()]
    facts = {
        "reading": {"source": str(reading.source), "limit": reading.limit_bytes, "available": reading.available_bytes},
        "limit": limit,
        "block_bytes": BLOCK_BYTES,
        "turns": aged.turns,
        "refusals": aged.refusals,
        "refuse_receipts": engine.receipts("refuse"),
        "oom_kills": int(kills.get("oom_kill", 0)),
        "evictions": [[r["outcome"], r["reason"]] for r in engine.receipts("evict")],
        "heap_releases": len(heaps),
        "heap_given_back": sum(max(0, one["resident_before_bytes"] - one["resident_after_bytes"]) for one in heaps),
        "failcnt": _number("memory.failcnt"),
        "dropped": engine.owner.summary()["dropped_conversations_total"],
        "leaks": engine.leaks(),
    }
    (FOLDER / "facts.json").write_text(json.dumps(facts, indent=1))
    engine.close()


if __name__ == "__main__":
    main()
