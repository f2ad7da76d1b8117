"""``parkade bench step``: what the cache costs inside an engine step, with up to a million blocks in the ledger.

Why it exists: matching and storing run on the scheduler's thread, between two steps of the model. What a block costs
there must not grow with what the cache holds.

What must stay true: the calls measured are the ones the connector makes, on a ledger filled through the same calls;
the time is the thread's own, best of several, because other processes share the machine.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from parkade_cache.cache import ConversationCache, Found, OfferedBlock
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, PackId, RequestId
from parkade_cache.metrics import CacheMetrics
from parkade_cache.policy import PolicyBox, parse_policy
from parkade_cache.receipts import ReceiptLog
from parkade_cache.slots import Geometry
from parkade_cache.state import CacheState
from parkade_cache.turns import Turn

BLOCK_TOKENS: Final = 128
PROMPT_TOKENS: Final = 100_000
CHAIN_BLOCKS: Final = PROMPT_TOKENS // BLOCK_TOKENS
STORE_BLOCKS: Final = 16
"""Blocks offered in one step: 2,048 tokens, a usual chunk of a prompt."""

_SLOT_BYTES: Final = 4096
_REPEATS: Final = 20
_RETRIES: Final = 10_000

LOOKUP_BUDGET_SECONDS: Final = 3e-6
STORE_BUDGET_SECONDS: Final = 8e-6
MATCH_BUDGET_SECONDS: Final = 5e-3


def run(*, sizes: Sequence[int] = (1000, 100_000, 1_000_000)) -> dict[str, object]:
    """Measure with each number of blocks in the ledger; figures are seconds, by that number."""
    lookup: dict[str, float] = {}
    store: dict[str, float] = {}
    match: dict[str, float] = {}
    retry: dict[str, float] = {}
    for size in sizes:
        bench = _Bench(size)
        with bench.state.lock:
            bench.fill(size)
            lookup[str(size)] = bench.lookup_seconds()
            store[str(size)] = bench.store_seconds()
            match[str(size)] = bench.match_seconds()
            retry[str(size)] = bench.retry_seconds()
    smallest, largest = str(sizes[0]), str(sizes[-1])
    return {
        "sizes": {"ledger_blocks": list(sizes), "prompt_tokens": PROMPT_TOKENS, "block_tokens": BLOCK_TOKENS},
        "figures": {
            "lookup_seconds_per_block": lookup,
            "store_seconds_per_block": store,
            "match_100k_tokens_seconds": max(match.values()),
            "match_retry_seconds": max(retry.values()),
            "match_100k_tokens_seconds_by_blocks": match,
            "match_retry_seconds_by_blocks": retry,
        },
        "ratios": {
            "lookup_largest_to_smallest_ledger": lookup[largest] / lookup[smallest],
            "store_largest_to_smallest_ledger": store[largest] / store[smallest],
            "lookup_to_budget": max(lookup.values()) / LOOKUP_BUDGET_SECONDS,
            "store_to_budget": max(store.values()) / STORE_BUDGET_SECONDS,
            "match_to_budget": max(match.values()) / MATCH_BUDGET_SECONDS,
        },
    }


class _Bench:
    """A cache with so many parked blocks, every second conversation of them on disk only."""

    def __init__(self, blocks: int) -> None:
        self._numbers = itertools.count()
        self._random = random.Random(blocks)  # noqa: S311 - keys only have to differ
        parked_bytes = 4 * (blocks + 100 * CHAIN_BLOCKS) * _SLOT_BYTES
        self.state = CacheState(
            geometry=Geometry.plan(block_bytes=_SLOT_BYTES, parked_max_bytes=parked_bytes),
            policy=PolicyBox(
                parse_policy(
                    {
                        "memory": {"floor": 0, "parked": {"max": parked_bytes}},
                        "spill": {"size": parked_bytes, "minFree": 0},
                    }
                )
            ),
            receipts=ReceiptLog(folder=None),
            metrics=CacheMetrics(),
            spill_on=True,
        )
        self.state.recovering = False
        self.cache = ConversationCache(self.state)
        self.in_ram: list[list[BlockKey]] = []
        self.on_disk: list[list[BlockKey]] = []

    # -- filling ---------------------------------------------------------------------------------------------

    def fill(self, blocks: int) -> None:
        """Bring the ledger to so many blocks; the caller holds the lock, as the connector does."""
        while len(self.state.ledger) < blocks:
            count = min(CHAIN_BLOCKS, blocks - len(self.state.ledger))
            (self.in_ram if len(self.in_ram) <= len(self.on_disk) else self.on_disk).append(self._fill(count))
        for chain in self.on_disk:
            self._spill(chain)

    def _chain(self, blocks: int) -> list[BlockKey]:
        return [BlockKey(self._random.randbytes(32) + bytes(4)) for _ in range(blocks)]

    def _begin(self, chain: list[BlockKey]) -> Turn:
        number = next(self._numbers)
        turn = self.cache.begin(
            RequestId(f"request-{number}"),
            conversation=ConversationId(f"{number:032x}"),
            keys=lambda: [chain],
            prompt_tokens=len(chain) * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
        )
        self.state.wishes.clear()
        turn.admission_pending = False
        return turn

    def _granted(self, chain: list[BlockKey]) -> Turn:
        """A turn whose whole prompt the gate has admitted."""
        turn = self._begin(chain)
        extents = -(-len(chain) // self.state.geometry.slots_per_extent) + 1
        self.state.slots.committed(self.state.slots.grant(turn.conversation.id, extents))
        self.state.enter_ram(turn.conversation)
        return turn

    def _fill(self, blocks: int) -> list[BlockKey]:
        chain = self._chain(blocks)
        turn = self._granted(chain)
        self.cache.matched(turn, engine_tokens=0, cached_tokens=0)
        self._store(turn, _offers(chain))
        self.cache.close(turn, outcome="finished")
        self.state.captured.clear()
        return chain

    def _spill(self, chain: list[BlockKey]) -> None:
        state = self.state
        ledger = state.ledger
        tip = ledger.rows[chain[-1]]
        conversation = state.conversations.at_tip(tip)
        if conversation is None:
            raise RuntimeError("a chain that was stored has no conversation")
        pack = state.pack_number(PackId(f"{next(self._numbers):032x}"), conversation.id)
        for entry, key in enumerate(chain):
            ledger.disk_published(ledger.rows[key], pack, entry)
        state.packs[pack].live = len(chain)
        state.leave_ram(conversation)
        state.free_unheld_ram()

    def _store(self, turn: Turn, offers: Sequence[OfferedBlock]) -> None:
        for start in range(0, len(offers), STORE_BLOCKS):
            step = offers[start : start + STORE_BLOCKS]
            plan = self.cache.plan_store(turn, step)
            self.cache.store_done(turn, [step[position].key for position in plan.accepted], frozenset())

    # -- measuring -------------------------------------------------------------------------------------------

    def lookup_seconds(self) -> float:
        """Seconds for one block that is found."""
        chains = self._random.sample(self.in_ram, min(len(self.in_ram), _REPEATS))
        turn = self._begin(chains[0])

        def once(chain: list[BlockKey]) -> None:
            lookup = self.cache.lookup
            for key in chain:
                lookup(key, turn)

        seconds = min(_timed(lambda chain=chain: once(chain)) / len(chain) for chain in chains * 2)  # type: ignore[misc]
        self.cache.close(turn, outcome="finished")
        return seconds

    def store_seconds(self) -> float:
        """Seconds for one new block, from its offer to its end in RAM."""
        best = float("inf")
        for _ in range(_REPEATS):
            chain = self._chain(CHAIN_BLOCKS)
            turn, offers = self._granted(chain), _offers(chain)
            self.cache.matched(turn, engine_tokens=0, cached_tokens=0)
            best = min(best, _timed(lambda turn=turn, offers=offers: self._store(turn, offers)))  # type: ignore[misc]
            self.cache.close(turn, outcome="finished")
        return best / CHAIN_BLOCKS

    def match_seconds(self) -> float:
        """Seconds to match a long prompt that is on disk, speeds measured: the most a match has to look at."""
        self.state.rates.disk_read_bytes.observe(1e12, 1.0)
        self.state.rates.prompt_tokens.observe(1e3, 1.0)
        best = float("inf")
        for chain in (self.on_disk or self.in_ram)[:_REPEATS]:
            # A ledger smaller than one prompt repeats what it has: lookups cost the same, the match is as long.
            prompt = list(itertools.islice(itertools.cycle(chain), CHAIN_BLOCKS))
            turn = self._begin(prompt)
            best = min(best, _timed(lambda turn=turn, prompt=prompt: self._match(turn, prompt)))  # type: ignore[misc]
            self.cache.close(turn, outcome="finished")
        return best

    def _match(self, turn: Turn, chain: list[BlockKey]) -> None:
        cache = self.cache
        if cache.still_waiting(turn):
            raise RuntimeError("the match must not wait for anything here")
        found = 0
        for key in chain:
            if cache.lookup(key, turn) is not Found.HIT:
                break
            found += 1
        cache.matched(turn, engine_tokens=0, cached_tokens=found * BLOCK_TOKENS)

    def retry_seconds(self) -> float:
        """Seconds for asking again while nothing has changed."""
        chain = self._chain(CHAIN_BLOCKS)
        turn = self._begin(chain)
        self.cache.waiting(turn)

        def ask() -> None:
            for _ in range(_RETRIES):
                self.cache.still_waiting(turn)

        seconds = min(_timed(ask) for _ in range(3)) / _RETRIES
        self.cache.close(turn, outcome="finished")
        return seconds


def _offers(chain: Sequence[BlockKey]) -> list[OfferedBlock]:
    parents = [NO_KEY, *chain]
    return [
        OfferedBlock(key=key, parent=parents[index], end_token=(index + 1) * BLOCK_TOKENS, group=0)
        for index, key in enumerate(chain)
    ]


def _timed(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
