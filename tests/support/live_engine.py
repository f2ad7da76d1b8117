"""Real vLLM in this process, driven step by step, with the conversation cache inside it.

Scheduler, owner and mover share the process (the ``uni`` executor), so that a test can stop one of them between two
steps and look at the others. Import it in a process of its own: it sets the environment that vLLM reads at import.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="parkade",
    # A second thread costs this small a model more in barriers than it computes.
    OMP_NUM_THREADS="1",
)

from support.pod import check_state
from support.tiny_model import TinyShape, prepare_tiny_model
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from parkade_cache.lanes import Lane
from parkade_cache.ledger import DiskState, RamState

BLOCK_TOKENS = 32
"""The smallest block the CPU backend takes."""

_VOCABULARY = (3, 49_000)
PATIENCE_S = 60.0


def words(seed: object, count: int) -> list[int]:
    """A prompt that is always the same for its seed, and shares nothing with another's."""
    source = random.Random(repr(seed))
    return [source.randrange(*_VOCABULARY) for _ in range(count)]


def id_of(name: str) -> str:
    """The id under which the cache knows the conversation ``name``, salt included."""
    return hashlib.sha256(f"\0{name}".encode()).hexdigest()[:32]


@dataclass
class Asked:
    """A request that the engine has taken."""

    id: str
    prompt: list[int]
    reply: list[int] = field(default_factory=list)
    cached: int = 0
    done: bool = False
    started: float = 0.0
    seconds: float = 0.0

    @property
    def text(self) -> list[int]:
        """Prompt and reply: what the next turn's prompt begins with."""
        return self.prompt + self.reply


class LiveEngine:
    """``policy`` is the cache's; None runs the engine without it, and without its own prefix cache."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: Mapping[str, Any] | None,
        blocks: int,
        context: int,
        shape: TinyShape | None = None,
        block_tokens: int = BLOCK_TOKENS,
        requests: int = 4,
        step_tokens: int = 1024,
    ) -> None:
        # The offline engine steps without a pause while a request waits; a server sleeps a millisecond, which lets the
        # cache's threads run. Switching often does the same here.
        sys.setswitchinterval(0.0005)
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.step_seconds: list[float] = []
        self.asked: dict[str, Asked] = {}
        self._last = 0
        cache: dict[str, Any] = {"enable_prefix_caching": False}
        if policy is not None:
            cache = {"prefix_caching_hash_algo": "sha256_cbor", "kv_transfer_config": _connector(folder, policy)}
        self.llm = LLM(
            model=str(prepare_tiny_model(shape)),
            dtype="float32",
            block_size=block_tokens,
            max_model_len=context,
            num_gpu_blocks_override=blocks,
            max_num_seqs=requests,
            max_num_batched_tokens=step_tokens,
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=True,
            **cache,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        if policy is None:
            return
        self.side = self.scheduler.connector.at_scheduler
        self.owner = self.side.owner
        self.state = self.owner.state
        self.worker_side = get_kv_transfer_group().at_worker
        self.mover = self.worker_side.worker.mover

    # -- requests -------------------------------------------------------------------------------------------

    def send(
        self, tokens: Sequence[int], *, conversation: str | None = None, reply: int = 8, reads_cache: bool = True
    ) -> Asked:
        """Hand the engine a request; nothing is computed before ``step``."""
        self._last += 1
        params = SamplingParams(
            temperature=0, max_tokens=reply, ignore_eos=True, skip_reading_prefix_cache=not reads_cache
        )
        prompt = {"prompt_token_ids": list(tokens)}
        identifier = self.llm.llm_engine.add_request(str(self._last), prompt, params, session_id=conversation)
        asked = self.asked[str(self._last)] = Asked(identifier, list(tokens), started=time.monotonic())
        return asked

    def step(self) -> None:
        """One step of the engine, with or without work."""
        started = time.perf_counter()
        outputs = self.llm.llm_engine.step()
        self.step_seconds.append(time.perf_counter() - started)
        for output in outputs:
            asked = self.asked[output.request_id]
            asked.reply = list(output.outputs[0].token_ids)
            asked.cached = output.num_cached_tokens or 0
            if output.finished:
                asked.done = True
                asked.seconds = time.monotonic() - asked.started
                del self.asked[output.request_id]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Step until it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"never came true: {what}"
            self.step()
            if not any(asked.reply for asked in self.asked.values()):
                time.sleep(0.001)

    def finish(self, *asked: Asked) -> None:
        """Step until these requests have their replies."""
        self.until(lambda: all(one.done for one in asked), "the requests end")

    def abort(self, asked: Asked) -> None:
        """The client is gone."""
        self.llm.llm_engine.abort_request([asked.id], internal=True)
        self.asked = {number: one for number, one in self.asked.items() if one is not asked}

    def turn(self, tokens: Sequence[int], *, conversation: str | None = None, reply: int = 8) -> Asked:
        """A request by itself, from its arrival until nothing of it is under way."""
        asked = self.send(tokens, conversation=conversation, reply=reply)
        self.finish(asked)
        self.settle()
        return asked

    def receipt(self, asked: Asked) -> dict[str, Any]:
        """The one that closed the request."""
        (found,) = self.owner.list_receipts({"kind": "turn", "request": asked.id})
        assert isinstance(found, dict)
        return found

    def receipts(self, kind: str | None = None, conversation: str | None = None) -> list[dict[str, Any]]:
        """The newest last."""
        known = id_of(conversation) if conversation is not None else None
        return self.owner.list_receipts({"kind": kind, "conversation": known, "limit": 100_000})

    # -- rest -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Step until every request is closed and nothing is under way in any thread."""
        self.until(self.is_idle, "nothing is under way")

    def is_idle(self) -> bool:
        state = self.state
        with state.lock:
            return not (
                self.scheduler.has_requests()
                or state.turns
                or state.finished_streams
                or state.wishes
                or state.captured
                or self.owner.deciding
                or any(one.writing for one in state.conversations)
                or any(pack.writing for pack in state.packs)
                or (self.owner.disk is not None and self.owner.disk.backlog_bytes)
            )

    def leaks(self) -> dict[str, Any]:
        """What is left over although nothing is under way: each value must be empty. Checks the ledger first."""
        check_state(self.state)
        state, ledger = self.state, self.state.ledger
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        side, worker = self.side, self.worker_side
        with state.lock:
            rows = list(ledger.rows.values())
            left = {
                "turns": list(state.turns),
                "pinned": [row for row in rows if ledger.pins[row]],
                "filling": [row for row in rows if ledger.ram[row] == RamState.FILLING],
                "writing": [row for row in rows if ledger.disk[row] == DiskState.WRITING],
                "restoring": list(state.restoring),
                "in flight": [one.id for one in state.conversations if one.in_flight],
                "packs being written": [pack.pack for pack in state.packs if pack.writing],
                "slots": abs(state.slots.used_slots - ledger.ram_blocks),
                "engine blocks": self.blocks - 1 - free,
                "engine jobs": list(side.scheduler._jobs),
                "engine requests": list(side.scheduler._req_status),
                "handles": list(side.handles),
                "held": [*side.holding, *side.unsent],
                "jobs": [*side._jobs, *side._stale],
                "prompts": [*side._reading_prompt, *side._prompt_ready],
                "uncaptured": len(side.runtime.uncaptured),
                "worker stores": list(worker._active_stores),
                "worker holds": [*worker._release_after, *worker._held_since],
                "worker loads": [*worker._load_requests, *worker._load_blocks],
                "invalid blocks": list(worker._invalid_blocks),
                "transfers": [int(job) for job in self.mover._transfers],
            }
        return {name: found for name, found in left.items() if found}

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        """Put another policy in force, as the operator would."""
        result = self.owner.set_policy(policy, origin="test")
        assert result["outcome"] == "applied", result

    def close(self) -> None:
        """End the engine; another one may be started in this process afterwards."""
        self.core.shutdown()
        del self.llm, self.core, self.scheduler
        gc.collect()


@contextmanager
def held(lane: Lane, *, threads: int = 1) -> Iterator[None]:
    """A lane whose device is stuck: what is queued behind waits until the end of the block."""
    let_go = threading.Event()
    stuck = threading.Semaphore(0)

    def task() -> None:
        stuck.release()
        let_go.wait(PATIENCE_S)

    for _ in range(threads):
        lane.submit(task)
    for _ in range(threads):
        assert stuck.acquire(timeout=PATIENCE_S), "the lane did not come to it"
    try:
        yield
    finally:
        let_go.set()


def _connector(folder: Path, policy: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "ParkadeConnector",
        "kv_connector_module_path": "parkade_serving.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "ParkadeSpec",
            "spec_module_path": "parkade_serving.spec",
            "parkade": {
                "policy": policy,
                "spill_dir": str(folder / "spill"),
                "socket_dir": str(folder / "sockets"),
            },
        },
    }
