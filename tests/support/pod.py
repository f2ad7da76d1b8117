"""A pod without an engine: real owner, real mover, real files, and blocks whose bytes are known.

``Pod.turn`` does what the engine's scheduler and worker do for one request, in the same order, against the
same interfaces, so that tests can drive conversations in milliseconds.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from parkade_cache.arena import Arena
from parkade_cache.cache import Found, OfferedBlock
from parkade_cache.device import DeviceBlock, HostDevice
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, RequestId
from parkade_cache.local_mover import LocalMover
from parkade_cache.memory.reading import MemorySampler, Reading, ReadingSource
from parkade_cache.metrics import CacheMetrics
from parkade_cache.mover import JobId
from parkade_cache.owner import IdentityFacts, Owner
from parkade_cache.policy import PolicyBox, parse_policy
from parkade_cache.receipts import Receipt, ReceiptKind, ReceiptLog
from parkade_cache.slots import Geometry
from parkade_cache.spill import PACK_VERSION, FileSystem, Identity, SpillConfig, SpillStore
from parkade_cache.state import CacheState
from parkade_cache.transfers import LoadJob, StoreJob, TransferDone

BLOCK_TOKENS = 4
BLOCK_BYTES = 12_288
MIB = 1 << 20


class SettableSampler(MemorySampler):
    """Readings that a test sets; unknown when ``available_bytes`` is None."""

    def __init__(self, available_bytes: int | None = 64 << 30) -> None:
        super().__init__()
        self.available_bytes = available_bytes
        self.on_sample: Callable[[], None] | None = None

    def sample(self) -> Reading:
        if self.on_sample is not None:
            self.on_sample()
        known = self.available_bytes is not None
        return Reading(
            available_bytes=self.available_bytes,
            source=ReadingSource.CGROUP if known else None,
            limit_bytes=None,
            current_bytes=None,
            credit_bytes=0,
            unknown_reason="" if known else "set by the test",
        )


@dataclass
class Pod:
    """One life of a pod over a folder that may outlive it."""

    folder: Path | None
    parked_max: int = 64 * MIB
    floor: int = 0
    size: int = 256 * MIB
    mode: str = "OnEvict"
    spill: dict[str, object] = field(default_factory=dict)
    parked: dict[str, object] = field(default_factory=dict)
    available_bytes: int | None = 64 << 30
    device_blocks: int = 4096
    fs: FileSystem | None = None
    model: str = "test"
    start: bool = True

    def __post_init__(self) -> None:
        document: dict[str, object] = {
            "memory": {"floor": self.floor, "parked": {"max": self.parked_max, **self.parked}},
        }
        if self.folder is not None:
            document["spill"] = {
                "size": self.size,
                "minFree": 0,
                "mode": self.mode,
                "writeOutSeconds": 10,
                **self.spill,
            }
        self.policy = PolicyBox(parse_policy(document))
        self.geometry = Geometry.plan(block_bytes=BLOCK_BYTES, parked_max_bytes=self.parked_max)
        self.device = HostDevice([np.zeros((self.device_blocks, BLOCK_BYTES), dtype=np.uint8)])
        self.receipts = ReceiptLog(folder=None)
        self.store = self._open_store()
        self.state = CacheState(
            geometry=self.geometry,
            policy=self.policy,
            receipts=self.receipts,
            metrics=CacheMetrics(),
            spill_on=self.store is not None,
        )
        self.sampler = SettableSampler(self.available_bytes)
        self.owner = Owner(
            self.state,
            sampler=self.sampler,
            store=self.store,
            identity=IdentityFacts("test", "0" * 16, BLOCK_TOKENS, BLOCK_BYTES),
        )
        self.arena = Arena(
            extent_bytes=self.geometry.extent_bytes,
            max_extents=max(1, 4 * self.parked_max // self.geometry.extent_bytes),
        )
        self.mover = LocalMover(
            geometry=self.geometry,
            arena=self.arena,
            device=self.device,
            sink=self.owner.report,
            fs=self.fs,
        )
        self.cache = self.owner.cache
        self._requests = itertools.count(1)
        self._jobs = itertools.count(1)
        self._next_block = 0
        self.owner.start(self.mover)
        self.settle_recovery()

    def _open_store(self) -> SpillStore | None:
        if self.folder is None:
            return None
        identity = Identity(
            model=self.model,
            revision="",
            dtype="bfloat16",
            kv_cache_dtype="auto",
            drafter="",
            layout="test",
            block_tokens=BLOCK_TOKENS,
            parallel="tp1",
            hash_algorithm="sha256",
            hash_seed="",
            format_version=PACK_VERSION,
        )
        spill = self.policy.current.spill
        assert spill is not None
        config = SpillConfig(
            root=self.folder,
            capacity_bytes=spill.size,
            min_free_bytes=spill.min_free,
            write_budget_bytes_per_hour=spill.write_budget_per_hour,
            block_bytes=BLOCK_BYTES,
            ranks=1,
        )
        return SpillStore.open(config, identity, fs=self.fs)

    # -- one request ---------------------------------------------------------------------------------------

    def begin(self, conversation: str | None, tokens: Sequence[int], *, salt: str = "") -> Running:
        chain = block_keys(tokens, salt=salt)
        with self.state.lock:
            turn = self.cache.begin(
                RequestId(f"r{next(self._requests)}"),
                conversation=ConversationId(conversation) if conversation is not None else None,
                keys=lambda: [chain],
                prompt_tokens=len(tokens),
                block_tokens=BLOCK_TOKENS,
            )
        return Running(self, turn, list(tokens), chain)

    def turn(
        self, conversation: str | None, tokens: Sequence[int], *, salt: str = "", reply: Sequence[int] = ()
    ) -> Turned:
        """Serve one request from arrival to end; the engine's own cache holds nothing."""
        running = self.begin(conversation, tokens, salt=salt)
        running.match()
        running.load()
        running.compute()
        running.reply(reply)
        return running.finish()

    def take_blocks(self, count: int) -> list[int]:
        blocks = [(self._next_block + n) % self.device_blocks for n in range(count)]
        self._next_block = (self._next_block + count) % self.device_blocks
        return blocks

    def next_job(self) -> JobId:
        return JobId(next(self._jobs))

    def await_transfer(self, job: JobId, timeout_s: float = 20.0) -> TransferDone:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for done in self.mover.take_finished():
                if done.job == job:
                    return done
            time.sleep(0.0005)
        raise AssertionError(f"transfer {job} did not end")

    # -- settling -------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self.state.lock:
                if condition():
                    return
            time.sleep(0.002)
        raise AssertionError(f"never came true: {what}")

    def settle_recovery(self) -> None:
        self.until(lambda: not self.state.recovering, "recovery ended")

    def settle(self) -> None:
        """All turns, streams and ordered writes have ended."""
        self.until(
            lambda: not self.state.turns
            and not self.state.finished_streams
            and not any(c.writing for c in self.state.conversations),
            "nothing is under way",
        )

    def all_receipts(self, kind: ReceiptKind | None = None) -> list[Receipt]:
        return self.receipts.query(since=None, conversation=None, request=None, kind=kind, limit=100_000)

    def stop(self) -> None:
        self.owner.stop(grace_s=10.0)

    def kill(self) -> None:
        """End this life as SIGKILL would: nothing is written out, only the directory's lock is let go."""
        self.owner._stopping.set()
        with self.state.lock:
            self.state.wake.notify_all()
        self.owner._reports.put(None)
        self.mover.close()
        if self.store is not None:
            self.store.close()


@dataclass
class Turned:
    """What one request got."""

    receipt: Receipt
    reused: int
    tokens: list[int]


class Running:
    """A request in flight, driven step by step."""

    def __init__(self, pod: Pod, turn: object, tokens: list[int], chain: list[BlockKey]) -> None:
        self.pod = pod
        self.turn = turn
        self.tokens = tokens
        self.chain = chain
        self.matched_blocks = 0
        self.loaded_blocks = 0
        self.blocks: list[int] = pod.take_blocks(len(chain))
        self.stored = 0
        self.outcome = "finished"

    def match(self, engine_blocks: int = 0) -> int:
        pod = self.pod
        deadline = time.monotonic() + 5
        while pod.cache.still_waiting(self.turn):
            time.sleep(0.0005)
        while True:
            with pod.state.lock:
                found, retry = engine_blocks, False
                for key in self.chain[engine_blocks:]:
                    answer = pod.cache.lookup(key, self.turn)
                    if answer is Found.MISS:
                        break
                    retry |= answer is not Found.HIT
                    found += 1
                if not retry:
                    cached = (found - engine_blocks) * BLOCK_TOKENS
                    cached = pod.cache.matched(
                        self.turn, engine_tokens=engine_blocks * BLOCK_TOKENS, cached_tokens=cached
                    )
                    self.matched_blocks = engine_blocks + cached // BLOCK_TOKENS
                    return self.matched_blocks
                pod.cache.waiting(self.turn)
            assert time.monotonic() < deadline, "the match never became final"
            while pod.cache.still_waiting(self.turn):
                time.sleep(0.0005)

    def load(self, first: int = 0) -> TransferDone | None:
        pod = self.pod
        keys = self.chain[first : self.matched_blocks]
        if not keys:
            return None
        with pod.state.lock:
            sources = pod.cache.plan_load(self.turn, keys)
        job = pod.next_job()
        blocks = tuple(DeviceBlock(0, block) for block in self.blocks[first : self.matched_blocks])
        pod.mover.load(LoadJob(job, blocks, tuple(sources), 10.0))
        done = pod.await_transfer(job)
        with pod.state.lock:
            pod.cache.load_done(
                self.turn,
                keys=keys,
                failed=done.failed,
                disk_bytes=done.disk_bytes,
                disk_seconds=done.disk_seconds,
                bad_packs=done.bad_packs,
            )
        lost = len(keys) if -1 in done.failed else len(keys) - min(done.failed, default=len(keys))
        self.matched_blocks -= lost
        self.check_loaded(first)
        return done

    def check_loaded(self, first: int = 0) -> None:
        for index in range(first, self.matched_blocks):
            actual = self.pod.device.planes[0][self.blocks[index]]
            assert np.array_equal(actual, block_bytes(self.chain[index])), f"block {index} has wrong bytes"

    def compute(self) -> None:
        """The engine computes what was not matched, and offers every block it has not offered yet."""
        for index in range(self.matched_blocks, len(self.chain)):
            self.pod.device.planes[0][self.blocks[index]] = block_bytes(self.chain[index])
        self.stored = max(self.stored, self.matched_blocks)
        self.store(self.stored, len(self.chain))
        with self.pod.state.lock:
            self.pod.cache.prompt_read(self.turn)

    def reply(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self.tokens.extend(tokens)
        longer = block_keys(self.tokens, salt="")
        fresh = longer[len(self.chain) :]
        self.chain.extend(fresh)
        self.blocks.extend(self.pod.take_blocks(len(fresh)))
        for index in range(len(self.chain) - len(fresh), len(self.chain)):
            self.pod.device.planes[0][self.blocks[index]] = block_bytes(self.chain[index])
        self.store(self.stored, len(self.chain))

    def store(self, first: int, last: int, *, cancel: bool = False) -> TransferDone | None:
        pod = self.pod
        self.stored = max(self.stored, last)
        offered = [
            OfferedBlock(
                key=self.chain[index],
                parent=self.chain[index - 1] if index else NO_KEY,
                end_token=(index + 1) * BLOCK_TOKENS,
                group=0,
            )
            for index in range(first, last)
        ]
        if not offered:
            return None
        with pod.state.lock:
            plan = pod.cache.plan_store(self.turn, offered)
        if not plan.accepted:
            return None
        job = pod.next_job()
        blocks = tuple(DeviceBlock(0, self.blocks[first + position]) for position in plan.accepted)
        pod.mover.store(StoreJob(job, blocks, plan.targets))
        if cancel:
            pod.mover.cancel_transfers([job])
        done = pod.await_transfer(job)
        keys = [offered[position].key for position in plan.accepted]
        with pod.state.lock:
            pod.cache.store_done(self.turn, keys, frozenset(keys[position] for position in done.failed))
        return done

    def finish(self) -> Turned:
        pod = self.pod
        with pod.state.lock:
            pod.cache.close(self.turn, outcome=self.outcome)
        receipt = pod.all_receipts(ReceiptKind.TURN)[-1]
        reused = (receipt.reused_ram_tokens or 0) + (receipt.reused_disk_tokens or 0)
        return Turned(receipt=receipt, reused=reused, tokens=list(self.tokens))


def block_keys(tokens: Sequence[int], *, salt: str = "") -> list[BlockKey]:
    """Chained content hashes, the salt in the first block, as the engine makes them."""
    keys: list[BlockKey] = []
    parent = salt.encode()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = ",".join(map(str, tokens[start : start + BLOCK_TOKENS])).encode()
        parent = hashlib.sha256(parent + b"|" + block).digest()
        keys.append(BlockKey(parent + bytes(4)))
    return keys


def block_bytes(key: BlockKey) -> np.ndarray:
    """The one payload a block with this key can have."""
    seed = int.from_bytes(key[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def prompt(name: str, blocks: int, *, shared: int = 0) -> list[int]:
    """A prompt of ``blocks`` whole blocks, the first ``shared`` of them the same for every name."""
    base = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100_000 + 1_000
    tokens = list(range(shared * BLOCK_TOKENS))
    return tokens + [base + n for n in range((blocks - shared) * BLOCK_TOKENS)]
