"""The connector vLLM loads by module path: stock offloading, plus what a conversation cache needs.

Why it exists: the stock connector asserts that no transfer ever fails, frees a request's blocks before they
are copied, and tells the manager nothing about requests. This subclass reports failed loads so that the
engine recomputes (trap 7), holds blocks until they are captured (trap 2), gives the manager each request's
conversation and chain, makes a retried match O(1), and times every hook.

What must stay true: no hook waits; each request whose blocks are held is reported ``finished_sending``
exactly once; failed blocks are poisoned before the engine asks for them again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from parkade_cache.ids import BlockKey, ConversationId, PackId, RequestId
from parkade_cache.transfers import TransferDone
from parkade_serving.identity import IDENTITY_ENV
from parkade_serving.manager import ParkadeManager, RequestHandle
from parkade_serving.owner_runtime import OwnerRuntime
from parkade_serving.spec import engine_config
from parkade_serving.worker import ParkadeWorker, StoreSpec

_log = logging.getLogger(__name__)

_HASHED_ID = re.compile(r"[0-9a-f]{32}")

HOLD_LIMIT_S = 30.0
"""How long a finished request's blocks are held for a disk that does not take them; then they are given up."""

MOST_REOFFERS = 3
"""How often one request's blocks are offered again after a failed capture: a copy that always fails must not loop."""


@dataclass
class ParkadeConnectorMetadata(OffloadingConnectorMetadata):
    """Adds the finished requests whose blocks are held until their store jobs have ended."""

    release_after: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class ParkadeWorkerMetadata(OffloadingWorkerMetadata):
    """Adds what failed, what was read, and the longest hook of each kind since the last report."""

    failed_stores: dict[int, set[int]] = field(default_factory=dict)
    failed_loads: dict[int, set[int]] = field(default_factory=dict)
    disk_reads: dict[int, tuple[int, float]] = field(default_factory=dict)
    bad_packs: dict[int, set[str]] = field(default_factory=dict)
    hooks: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ParkadeWorkerMetadata:
        """Both ranks' news: a block that failed on one rank has failed."""
        assert isinstance(other, ParkadeWorkerMetadata)
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata)
        return ParkadeWorkerMetadata(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            failed_stores=_union(self.failed_stores, other.failed_stores),
            failed_loads=_union(self.failed_loads, other.failed_loads),
            disk_reads={
                job: _slower(self.disk_reads.get(job), other.disk_reads.get(job))
                for job in self.disk_reads.keys() | other.disk_reads.keys()
            },
            bad_packs={
                job: self.bad_packs.get(job, set()) | other.bad_packs.get(job, set())
                for job in self.bad_packs.keys() | other.bad_packs.keys()
            },
            hooks={
                name: _longer(self.hooks.get(name), other.hooks.get(name))
                for name in self.hooks.keys() | other.hooks.keys()
            },
        )


def _union(mine: dict[int, set[int]], theirs: dict[int, set[int]]) -> dict[int, set[int]]:
    return {job: mine.get(job, set()) | theirs.get(job, set()) for job in mine.keys() | theirs.keys()}


def _slower(mine: tuple[int, float] | None, theirs: tuple[int, float] | None) -> tuple[int, float]:
    a, b = mine or (0, 0.0), theirs or (0, 0.0)
    return a[0] + b[0], max(a[1], b[1])


def _longer(mine: tuple[int, float, float] | None, theirs: tuple[int, float, float] | None) -> tuple[int, float, float]:
    a, b = mine or (0, 0.0, 0.0), theirs or (0, 0.0, 0.0)
    return a[0] + b[0], a[1] + b[1], max(a[2], b[2])


class ParkadeConnector(OffloadingConnector):
    """vLLM's offloading connector over the conversation cache."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        with engine_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
        self._single_group = len(kv_cache_config.kv_cache_groups) == 1
        self._scheduler_side: _SchedulerSide | None = None
        self._worker_side: _WorkerSide | None = None
        if self.connector_scheduler is not None:
            self._scheduler_side = _SchedulerSide(self)
            self._scheduler_side.state.recurrent_groups = self._recurrent_groups(kv_cache_config)
        else:
            self._worker_side = _WorkerSide(self)

    def _recurrent_groups(self, kv_cache_config: KVCacheConfig) -> frozenset[int]:
        """Positions of the KV groups that hold recurrent state, of which disk keeps the deepest and the root (D7)."""
        rank = self.at_scheduler.runtime.group_rank
        return frozenset(
            position
            for group_id, position in rank.items()
            if isinstance(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec, MambaSpec)
        )

    # -- scheduler side --------------------------------------------------------------------------------

    @property
    def at_scheduler(self) -> _SchedulerSide:
        """State of the scheduler's side."""
        assert self._scheduler_side is not None
        return self._scheduler_side

    def on_new_request(self, request: Request) -> None:
        """Give the manager the request's conversation and chain."""
        with self.at_scheduler.hooks.timed("on_new_request"):
            super().on_new_request(request)
            self.at_scheduler.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """One match under one lock; a retry that would answer the same costs nothing (R1)."""
        side = self.at_scheduler
        with side.hooks.timed("get_num_new_matched_tokens"), side.state.lock:
            handle = side.handles.get(request.request_id)
            if handle is None:
                return 0, False
            cache, turn = side.owner.cache, handle.turn
            # The scheduler heeds no "ask again" for requests that must not read the prefix cache.
            if not request.skip_reading_prefix_cache and cache.still_waiting(turn):
                return None, False
            asked = (side.state.version, num_computed_tokens)
            if handle.matched is not None and handle.matched[0] == asked and not side.scheduler._chunks_being_loaded:
                found = handle.matched[1]
                return found, found > 0
            answer, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
            if answer is None:
                cache.waiting(turn)
                return None, False
            found = cache.matched(turn, engine_tokens=num_computed_tokens, cached_tokens=answer)
            handle.matched = (asked, found)
            return found, found > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The engine has room: plan the load."""
        with self.at_scheduler.hooks.timed("update_state_after_alloc"):
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the step's stores, and say which finished requests' blocks wait for which of them."""
        side = self.at_scheduler
        with side.hooks.timed("build_connector_meta"):
            held = side.held_in(scheduler_output)
            meta = super().build_connector_meta(scheduler_output)
            assert isinstance(meta, OffloadingConnectorMetadata)
            side.remember_jobs(meta)
            side.note_prompts(scheduler_output)
            return ParkadeConnectorMetadata(
                load_jobs=meta.load_jobs,
                store_jobs=meta.store_jobs,
                jobs_to_flush=side.to_flush(meta.jobs_to_flush or (), scheduler_output),
                release_after={
                    request: sorted(status.transfer_jobs) if status is not None else []
                    for request, status in held.items()
                },
            )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn what ended; failures first, so that nothing failed is marked as arrived."""
        side = self.at_scheduler
        with side.hooks.timed("update_connector_output"):
            meta = connector_output.kv_connector_worker_meta
            if isinstance(meta, ParkadeWorkerMetadata):
                side.note_results(meta)
            super().update_connector_output(connector_output)
            side.unsent.difference_update(connector_output.finished_sending or ())
            if isinstance(meta, ParkadeWorkerMetadata):
                side.settle_stale_jobs()
                if meta.failed_stores:
                    side.offer_again()
            side.prompts_read()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the request's blocks until they are captured, instead of freeing them uncopied (trap 2)."""
        with self.at_scheduler.hooks.timed("request_finished"):
            _, params = super().request_finished_all_groups(request, block_ids)
            return self.at_scheduler.hold(request, block_ids), params

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of finished requests come free without preempting anybody."""
        return bool(self.at_scheduler.unsent)

    # -- worker side -----------------------------------------------------------------------------------

    @property
    def at_worker(self) -> _WorkerSide:
        """State of the worker's side."""
        assert self._worker_side is not None
        return self._worker_side

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks are taken away: give up what was not copied yet."""
        with self.at_worker.timed("handle_preemptions"):
            super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit the step's transfers."""
        with self.at_worker.timed("start_load_kv"):
            assert isinstance(self._connector_metadata, ParkadeConnectorMetadata)
            self.at_worker.note_loads(self._connector_metadata)
            super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Queue the step's stores; nothing is waited for."""
        with self.at_worker.timed("wait_for_save"):
            super().wait_for_save()
            assert isinstance(self._connector_metadata, ParkadeConnectorMetadata)
            self.at_worker.note_stores(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What ended, with failed loads named for the engine to recompute."""
        with self.at_worker.timed("get_finished"):
            _, received = super().get_finished(finished_req_ids)
            failed = self.at_worker.note_ended()
            return KVConnectorTransferResults(
                finished_sending=self.at_worker.take_released(),
                finished_recving=received,
                failed_recving=set() if self._single_group else failed,
            )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Engine blocks that a load did not fill; models with several KV groups report requests instead."""
        return self.at_worker.take_invalid_blocks() if self._single_group else set()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """News for the scheduler's side."""
        return self.at_worker.news(super().build_connector_worker_meta())


@dataclass(slots=True)
class _Job:
    """A transfer that some ranks have not ended yet; the engine forgets the order of its keys."""

    keys: tuple[BlockKey, ...]
    context: ReqContext
    pending: int
    is_store: bool


class _SchedulerSide:
    """What the connector keeps between the scheduler's hooks."""

    def __init__(self, connector: ParkadeConnector) -> None:
        scheduler = connector.connector_scheduler
        assert scheduler is not None
        manager = scheduler.manager
        assert isinstance(manager, ParkadeManager)
        self.scheduler = scheduler
        self.runtime: OwnerRuntime = manager.runtime
        self.owner = manager.owner
        self.state = manager.owner.state
        self.hooks = manager.owner.hooks
        self.handles: dict[str, RequestHandle] = {}
        self.holding: set[str] = set()
        self.unsent: set[str] = set()
        self._jobs: dict[int, _Job] = {}
        self._stale: list[_Job] = []
        self._reading_prompt: dict[str, int] = {}
        self._prompt_ready: list[str] = []

    def begin(self, request: Request) -> None:
        """Attach a turn to the request."""
        try:
            self._begin(request)
        except Exception:  # noqa: BLE001 - whatever it is, the engine must live: the request goes on uncached
            _log.exception("the conversation cache could not take up request %s", request.request_id)
            self.state.metrics.hook_errors.labels(hook="begin").inc()

    def _begin(self, request: Request) -> None:
        status = self.scheduler._req_status[request.request_id]
        status.update_offload_keys()

        def keys() -> Sequence[Sequence[BlockKey]]:
            return [group.offload_keys for group in status.group_states]

        with self.state.lock:
            turn = self.owner.cache.begin(
                RequestId(request.request_id),
                conversation=_conversation_of(request),
                keys=keys,
                prompt_tokens=request.num_prompt_tokens,
                block_tokens=self.runtime.block_tokens[0],
            )
        handle = RequestHandle(turn=turn, keys=keys)
        status.req_context.set_state(handle)
        self.handles[request.request_id] = handle
        self._reading_prompt[request.request_id] = request.num_prompt_tokens

    def held_in(self, output: SchedulerOutput) -> dict[str, Any]:
        """Held requests whose end the engine announces in this step; a reset may have taken their state."""
        held: dict[str, Any] = {}
        for request in output.finished_req_ids or ():
            self.handles.pop(request, None)
            self._reading_prompt.pop(request, None)
            if request in self.holding:
                self.holding.discard(request)
                held[request] = self.scheduler._req_status.get(request)
        return held

    def hold(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        """Whether the engine must keep the request's blocks until they are reported as sent."""
        status = self.scheduler._req_status.get(request.request_id)
        handle = self.handles.get(request.request_id)
        if status is None or handle is None:
            return False
        handle.turn.outcome = "aborted" if request.status is RequestStatus.FINISHED_ABORTED else "finished"
        loading = any(not self.scheduler._jobs[job].is_store for job in status.transfer_jobs)
        if loading or not any(block_ids):
            return False
        self.holding.add(request.request_id)
        self.unsent.add(request.request_id)
        return True

    def remember_jobs(self, meta: OffloadingConnectorMetadata) -> None:
        """Which ordered keys each new job moves, and that every rank has yet to end it."""
        ranks = self.scheduler.config.num_workers
        for job, transfer in meta.store_jobs.items():
            assert isinstance(transfer.dst_spec, StoreSpec)
            context = self.scheduler._req_status[transfer.req_id].req_context
            self._jobs[job] = _Job(transfer.dst_spec.keys, context, ranks, is_store=True)
        for job, transfer in meta.load_jobs.items():
            context = self.scheduler._req_status[transfer.req_id].req_context
            handle = context.get_state(RequestHandle)
            keys = tuple(handle.load_keys) if handle is not None else ()
            self._jobs[job] = _Job(keys, context, ranks, is_store=False)

    def to_flush(self, jobs: Iterable[int], output: SchedulerOutput) -> set[int]:
        """Of the jobs the engine wants flushed, those whose blocks can really be overwritten.

        The engine names every job that shares a block with a newly scheduled request, also where that request
        only reads the block out of the engine's own cache. Blocks of held requests are nobody else's yet.
        """
        preempted = output.preempted_req_ids or ()
        return {job for job in jobs if self._may_be_overwritten(job, preempted)}

    def _may_be_overwritten(self, job: int, preempted: Collection[str]) -> bool:
        status = self.scheduler._jobs.get(job)
        if status is None or status.fenced_block_ids:
            return True
        return status.req_id in preempted or status.req_id not in self.unsent

    def note_results(self, meta: ParkadeWorkerMetadata) -> None:
        """Pass failures and measurements on before the engine counts the jobs as done."""
        for name, (count, total, longest) in meta.hooks.items():
            self.hooks.merge(name, count=count, total_seconds=total, max_seconds=longest)
        for job, positions in meta.failed_stores.items():
            keys = self._jobs[job].keys if job in self._jobs else ()
            self.runtime.uncaptured.update(keys[position] for position in positions if position < len(keys))
        for job, positions in meta.failed_loads.items():
            self._load_failed(job, positions, meta.bad_packs.get(job, ()))
        for job, (nbytes, seconds) in meta.disk_reads.items():
            handle = self._handle_of(job)
            if handle is not None:
                handle.disk_bytes += nbytes
                handle.disk_seconds = max(handle.disk_seconds, seconds)
        for job, ranks in meta.completed_jobs.items():
            self._rank_ended(job, ranks)

    def _rank_ended(self, job: int, ranks: int) -> None:
        mine = self._jobs.get(job)
        if mine is None:
            return
        mine.pending -= ranks
        if mine.pending > 0:
            return
        del self._jobs[job]
        if job < self.scheduler._stale_job_threshold:
            self._stale.append(mine)

    def settle_stale_jobs(self) -> None:
        """Jobs from before a reset, which the engine has forgotten: let go of what they held, keep nothing."""
        stale, self._stale = self._stale, []
        for job in stale:
            handle = job.context.get_state(RequestHandle)
            if job.is_store:
                self.scheduler.manager.complete_store(job.keys, job.context, success=False)
            elif handle is not None:
                handle.failed_positions = {-1}
                self.scheduler.manager.complete_load(job.keys, job.context)

    def offer_again(self) -> None:
        """Some blocks were not captured: running requests offer theirs anew, or a hole would end every later match.

        Groups with windows are left alone: their older blocks may be somebody else's by now.
        """
        for status in self.scheduler._req_status.values():
            handle = status.req_context.get_state(RequestHandle)
            if handle is None or status.req.is_finished() or handle.reoffers >= MOST_REOFFERS:
                continue
            handle.reoffers += 1
            for group, kept in zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True):
                if group.sliding_window_size_in_chunks is None:
                    kept.next_stored_chunk_idx = 0

    def _handle_of(self, job: int) -> RequestHandle | None:
        status = self.scheduler._jobs.get(job)
        request = self.scheduler._req_status.get(status.req_id) if status is not None else None
        return request.req_context.get_state(RequestHandle) if request is not None else None

    def _load_failed(self, job: int, positions: Iterable[int], bad_packs: Iterable[str]) -> None:
        handle = self._handle_of(job)
        if handle is None:
            return
        handle.bad_packs.update(PackId(pack) for pack in bad_packs)
        handle.failed_positions.update(positions)
        status = self.scheduler._req_status[self.scheduler._jobs[job].req_id]
        for group in status.group_states:
            # The engine computes these blocks anew; offer them again.
            group.next_stored_chunk_idx = 0

    def note_prompts(self, output: SchedulerOutput) -> None:
        """Which prompts are read to their end by this step."""
        if not self._reading_prompt:
            return
        for request, scheduled in output.num_scheduled_tokens.items():
            prompt = self._reading_prompt.get(request)
            if prompt is None:
                continue
            status = self.scheduler._req_status.get(request)
            if status is not None and status.req.num_computed_tokens + scheduled >= prompt:
                self._prompt_ready.append(request)
                del self._reading_prompt[request]

    def prompts_read(self) -> None:
        """The step that read these prompts to their end is over."""
        if not self._prompt_ready:
            return
        waiting, self._prompt_ready = self._prompt_ready, []
        with self.state.lock:
            for request in waiting:
                handle = self.handles.get(request)
                status = self.scheduler._req_status.get(request)
                if handle is None or status is None:
                    continue
                if status.req.num_output_tokens > 0 or status.req.is_finished():
                    self.owner.cache.prompt_read(handle.turn)
                else:
                    # Steps overlap: this output belongs to one before the step that reads the prompt to its end.
                    self._prompt_ready.append(request)


def _conversation_of(request: Request) -> ConversationId | None:
    """The id the identity middleware set; a raw one, as without the middleware, is hashed with the salt."""
    session = request.session_id
    if not session:
        return None
    if IDENTITY_ENV in os.environ and _HASHED_ID.fullmatch(session):
        return ConversationId(session)
    raw = f"{request.cache_salt or ''}\0{session}".encode()
    return ConversationId(hashlib.sha256(raw).hexdigest()[:32])


class _WorkerSide:
    """What the connector keeps between the worker's hooks."""

    def __init__(self, connector: ParkadeConnector) -> None:
        self._connector = connector
        self._active_stores: set[int] = set()
        self._release_after: dict[str, set[int]] = {}
        self._held_since: dict[str, float] = {}
        self._load_requests: dict[int, str] = {}
        self._load_blocks: dict[int, list[int]] = {}
        self._invalid_blocks: set[int] = set()
        self._news = ParkadeWorkerMetadata()

    @property
    def worker(self) -> ParkadeWorker | None:
        """The worker of this rank, once the engine's memory exists."""
        side = self._connector.connector_worker
        worker = side.worker if side is not None else None
        assert worker is None or isinstance(worker, ParkadeWorker)
        return worker

    def timed(self, name: str) -> _Timed:
        """Time the body as one call of the hook ``name``."""
        return _Timed(self._news.hooks, name)

    def note_loads(self, meta: ParkadeConnectorMetadata) -> None:
        """Remember whose blocks each load fills, for the case that it fails."""
        for job, transfer in meta.load_jobs.items():
            self._load_requests[job] = transfer.req_id
            self._load_blocks[job] = transfer.dst_spec.block_ids.tolist()

    def note_stores(self, meta: ParkadeConnectorMetadata) -> None:
        """Remember which stores are under way, and who waits for them."""
        self._active_stores.update(meta.store_jobs)
        for request, jobs in meta.release_after.items():
            self._release_after[request] = self._active_stores.intersection(jobs)
            self._held_since[request] = time.monotonic()

    def note_ended(self) -> set[str]:
        """Work through what ended; returns requests with a failed load."""
        failed_requests: set[str] = set()
        worker = self.worker
        for done in worker.take_ended() if worker is not None else ():
            if done.is_load:
                self._load_ended(done, failed_requests)
            else:
                self._active_stores.discard(int(done.job))
                if done.failed:
                    self._news.failed_stores[int(done.job)] = set(done.failed)
        return failed_requests

    def _load_ended(self, done: TransferDone, failed_requests: set[str]) -> None:
        job = int(done.job)
        request = self._load_requests.pop(job, "")
        blocks = self._load_blocks.pop(job, [])
        if done.disk_bytes:
            self._news.disk_reads[job] = (done.disk_bytes, done.disk_seconds)
        if not done.failed:
            return
        failed_requests.add(request)
        self._news.failed_loads[job] = set(done.failed)
        self._news.bad_packs[job] = set(done.bad_packs)
        positions = range(len(blocks)) if -1 in done.failed else done.failed
        self._invalid_blocks.update(blocks[position] for position in positions)

    def take_released(self) -> set[str]:
        """Requests all of whose stores have ended on this rank: the engine may free their blocks."""
        over = {request for request, jobs in self._release_after.items() if self._active_stores.isdisjoint(jobs)}
        for request in over:
            del self._release_after[request]
            self._held_since.pop(request, None)
        self._give_up_late_holds()
        return over

    def _give_up_late_holds(self) -> None:
        """Blocks held for a disk that does not take them would stall the engine for good: give them up, once."""
        limit = time.monotonic() - HOLD_LIMIT_S
        worker = self.worker
        for request in [request for request, since in self._held_since.items() if since < limit]:
            del self._held_since[request]
            if worker is not None:
                worker.wait(self._release_after[request] & self._active_stores)

    def take_invalid_blocks(self) -> set[int]:
        """Engine blocks that loads did not fill, once."""
        found, self._invalid_blocks = self._invalid_blocks, set()
        return found

    def news(self, stock: OffloadingWorkerMetadata | None) -> ParkadeWorkerMetadata | None:
        """The stock news with ours, or None when there is nothing to tell."""
        if stock is None and not (self._news.failed_stores or self._news.failed_loads):
            return None
        news, self._news = self._news, ParkadeWorkerMetadata()
        if stock is not None:
            news.completed_jobs = stock.completed_jobs
            news.transfer_stats = stock.transfer_stats
        return news


class _Timed:
    """Adds one timed call to a hook's count, total and longest."""

    __slots__ = ("_hooks", "_name", "_started")

    def __init__(self, hooks: dict[str, tuple[int, float, float]], name: str) -> None:
        self._hooks = hooks
        self._name = name
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        count, total, longest = self._hooks.get(self._name, (0, 0.0, 0.0))
        self._hooks[self._name] = (count + 1, total + seconds, max(longest, seconds))
