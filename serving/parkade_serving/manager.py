"""The engine scheduler's side: vLLM's offloading manager in terms of the conversation cache.

Why it exists: vLLM asks per block and per request; this translates, and nothing else. What must stay true:
every call takes the cache's lock for its own length only and returns without waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from parkade_cache.cache import ConversationCache, Found, OfferedBlock, StorePlan
from parkade_cache.ids import NO_KEY, BlockKey, PackId
from parkade_cache.owner import Owner
from parkade_cache.transfers import LoadSource
from parkade_cache.turns import ChainKeys, Turn
from parkade_serving.owner_runtime import OwnerRuntime
from parkade_serving.worker import LoadSpec, StoreSpec

_log = logging.getLogger(__name__)

_ANSWERS = {
    Found.HIT: LookupResult.HIT,
    Found.MISS: LookupResult.MISS,
    Found.PENDING: LookupResult.HIT_PENDING,
}


@dataclass(slots=True)
class RequestHandle:
    """What the connector knows of a request and the manager's calls need: kept in the request's context."""

    turn: Turn
    keys: ChainKeys
    load_keys: list[BlockKey] = field(default_factory=list)
    failed_positions: set[int] = field(default_factory=set)
    bad_packs: set[PackId] = field(default_factory=set)
    disk_bytes: int = 0
    disk_seconds: float = 0.0
    matched: tuple[tuple[int, int], int] | None = None
    """The last match: the ledger's version and the engine's own tokens it was made at, and what it found."""
    reoffers: int = 0


class ParkadeManager(OffloadingManager):
    """Answers vLLM's scheduler out of the ledger."""

    def __init__(self, runtime: OwnerRuntime) -> None:
        self.runtime = runtime
        self.owner: Owner = runtime.owner
        self.cache: ConversationCache = runtime.owner.cache
        self._lock = runtime.owner.state.lock
        self._tokens_per_block = runtime.block_tokens
        self._group_rank = runtime.group_rank

    @contextmanager
    def _survived(self, doing: str) -> Iterator[None]:
        """An error of the cache costs this request its cache; left to itself it would end the engine."""
        try:
            yield
        except Exception:  # noqa: BLE001 - whatever it is, the engine must live
            _log.exception("the conversation cache failed in %s; the request goes on without it", doing)
            self.owner.state.metrics.hook_errors.labels(hook=doing).inc()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See ``ConversationCache.lookup``; the connector holds the lock across a whole match."""
        handle = req_context.get_state(RequestHandle)
        if handle is None:
            return LookupResult.MISS
        return _ANSWERS[self.cache.lookup(BlockKey(key), handle.turn)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Which tier served a block: host memory or storage."""
        ledger = self.owner.state.ledger
        row = ledger.rows.get(BlockKey(key), -1)
        handle = req_context.get_state(RequestHandle)
        from_ram = row >= 0 and ledger.ram[row] == 2 and (handle is None or handle.turn.load_rows.get(row, -1) < 0)
        return _RAM_SOURCE if from_ram else _DISK_SOURCE

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadSpec:
        """Pin the blocks and say where they come from."""
        handle = _handle(req_context)
        ordered = [BlockKey(key) for key in keys]
        handle.load_keys = ordered
        # A plan that fails names no source: the load then fails, and the engine reads these blocks anew.
        sources = [LoadSource(slot=-1)] * len(ordered)
        with self._survived("plan_load"), self._lock:
            sources = self.cache.plan_load(handle.turn, ordered)
        return LoadSpec(tuple(sources), self.runtime.read_deadline_s())

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take what neither tier has; never refuses a whole offer (trap 2)."""
        handle = req_context.get_state(RequestHandle)
        offered = list(keys)
        if handle is None:
            return PrepareStoreOutput([], StoreSpec(()), [])
        plan = StorePlan((), ())
        with self._survived("plan_store"), self.owner.hooks.timed("prepare_store"), self._lock:
            plan = self.cache.plan_store(handle.turn, self._offered(offered, handle, req_context))
        accepted = [offered[position] for position in plan.accepted]
        return PrepareStoreOutput(accepted, StoreSpec(plan.targets, tuple(BlockKey(key) for key in accepted)), [])

    def _offered(
        self, keys: Sequence[OffloadKey], handle: RequestHandle, req_context: ReqContext
    ) -> list[OfferedBlock]:
        chains = handle.keys()
        offered: list[OfferedBlock] = []
        for key in keys:
            group = self._group_rank[get_offload_group_idx(key)]
            end_token = req_context.get_offload_key_position(key) or 0
            # Rounded up: the tail of a recurrent group may end inside a block.
            index = -(-end_token // self._tokens_per_block[group]) - 1
            chain = chains[group]
            parent = chain[index - 1] if 0 < index <= len(chain) else NO_KEY
            offered.append(OfferedBlock(key=BlockKey(key), parent=parent, end_token=end_token, group=group))
        return offered

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """A store has ended on every rank; the connector says beforehand which blocks were not captured."""
        handle = req_context.get_state(RequestHandle)
        with self._survived("store_done"), self.owner.hooks.timed("complete_store"), self._lock:
            ordered = [BlockKey(key) for key in keys]
            failed = self.runtime.take_uncaptured(ordered)
            if not success:
                failed = frozenset(ordered)
            self.cache.store_done(handle.turn if handle else None, ordered, failed)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A load has ended on every rank; the connector has noted in the handle what of it failed (trap 7)."""
        handle = req_context.get_state(RequestHandle)
        if handle is None:
            return
        with self._survived("load_done"), self.owner.hooks.timed("complete_load"), self._lock:
            self.cache.load_done(
                handle.turn,
                keys=handle.load_keys,
                failed=sorted(handle.failed_positions),
                disk_bytes=handle.disk_bytes,
                disk_seconds=handle.disk_seconds,
                bad_packs=sorted(handle.bad_packs),
            )
        handle.load_keys = []
        handle.failed_positions = set()
        handle.bad_packs = set()
        handle.disk_bytes, handle.disk_seconds = 0, 0.0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The connector attaches the request's handle right after this call."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No more transfers will be ordered for the request."""
        handle = req_context.get_state(RequestHandle)
        if handle is None:
            return
        with self._survived("close"), self.owner.hooks.timed("request_closed"), self._lock:
            self.cache.close(handle.turn, outcome=handle.turn.outcome)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Nothing is deferred to the end of a step."""

    def has_pending_work(self) -> bool:
        """Never: the owner has threads of its own and must not make the engine spin."""
        return False

    def reset_cache(self) -> None:
        """New weights: nothing cached before may ever be served again (trap 14)."""
        self.runtime.reset()

    def get_stats(self) -> Any:
        """Metrics are asked of the owner at scrape time instead (trap 12)."""
        return None

    def shutdown(self) -> None:
        """Write out what is left and stop."""
        self.runtime.stop()


def _handle(req_context: ReqContext) -> RequestHandle:
    handle: RequestHandle | None = req_context.get_state(RequestHandle)
    if handle is None:
        raise RuntimeError(
            f"request {req_context.req_id} is unknown to the conversation cache; "
            "use kv_connector ParkadeConnector from parkade_serving.connector"
        )
    return handle


_RAM_SOURCE = CacheHitSource.HOST
_DISK_SOURCE = CacheHitSource.DISK
