"""A pod without an engine: real owner, real mover, real files, and blocks whose bytes are known.

``Pod.turn`` does what the engine's scheduler and worker do for one request, in the same order, against the
same interfaces, so that tests can drive conversations in milliseconds.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from parkade_cache.arena import Arena
from parkade_cache.buffers import BOUNCE_BYTES
from parkade_cache.cache import Found, OfferedBlock
from parkade_cache.conversations import Conversation
from parkade_cache.device import DeviceBlock, HostDevice
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, PackId, RequestId
from parkade_cache.ledger import DiskState, Ledger, RamState
from parkade_cache.local_mover import LocalMover
from parkade_cache.memory.reading import MemorySampler, Reading, ReadingSource
from parkade_cache.metrics import CacheMetrics
from parkade_cache.mover import JobId, Mover, PackOrder, SlotBlock
from parkade_cache.owner import IdentityFacts, Owner
from parkade_cache.policy import PolicyBox, parse_policy
from parkade_cache.receipts import Receipt, ReceiptKind, ReceiptLog
from parkade_cache.slots import Geometry
from parkade_cache.spill import PACK_VERSION, Identity, SpillConfig, SpillStore
from parkade_cache.spill.testing import FaultyFileSystem
from parkade_cache.state import CacheState
from parkade_cache.transfers import LoadJob, StoreJob, TransferDone
from parkade_cache.turns import Turn

BLOCK_TOKENS = 4
BLOCK_BYTES = 12_288
MIB = 1 << 20
EXTENT_BLOCKS = 10
EIGHT_EXTENTS = 8 * EXTENT_BLOCKS * BLOCK_BYTES
"""A RAM budget of eight extents of ten blocks each; a conversation of 15 blocks takes two of them."""


class SettableSampler(MemorySampler):
    """Readings that a test sets; unknown when ``available_bytes`` is None."""

    def __init__(self, available_bytes: int | None = 64 << 30) -> None:
        super().__init__()
        self.available_bytes = available_bytes
        self.on_sample: Callable[[], None] | None = None

    used_bytes = 0
    """What counts as used under a configured cap."""
    limits: tuple[int, ...] = ()

    def limits_bytes(self) -> tuple[int, ...]:
        return self.limits if self.cap_bytes is None else (*self.limits, self.cap_bytes)

    def hard_limit_bytes(self) -> int | None:
        return min(self.limits, default=64 << 30)

    def sample_under(self, cap_bytes: int | None) -> Reading:
        if self.on_sample is not None:
            self.on_sample()
        known = self.available_bytes is not None
        available = self.available_bytes
        if available is not None and cap_bytes is not None:
            available = min(available, max(0, cap_bytes - self.used_bytes))
        return Reading(
            available_bytes=available,
            source=ReadingSource.CGROUP if known else None,
            limit_bytes=None,
            current_bytes=None,
            credit_bytes=0,
            unknown_reason="" if known else "set by the test",
        )


class Fan(Mover):
    """The movers of several ranks in this process; the last rank is told first, so that answers come out of order."""

    def __init__(self, movers: Sequence[LocalMover]) -> None:
        self._movers = movers[::-1]

    def attach(self, identity_folder: str, identity: str, *, direct: bool) -> None:
        for mover in self._movers:
            mover.attach(identity_folder, identity, direct=direct)

    def commit(self, job: JobId, extents: Sequence[int]) -> None:
        for mover in self._movers:
            mover.commit(job, extents)

    def release(self, job: JobId, extents: Sequence[int]) -> None:
        for mover in self._movers:
            mover.release(job, extents)

    def release_heap(self, job: JobId) -> None:
        for mover in self._movers:
            mover.release_heap(job)

    def write(self, job: JobId, order: PackOrder, blocks: Sequence[SlotBlock], *, urgent: bool) -> None:
        for mover in self._movers:
            mover.write(job, order, blocks, urgent=urgent)

    def cancel(self, job: JobId) -> None:
        for mover in self._movers:
            mover.cancel(job)

    def open_stream(self, order: PackOrder, expected_bytes: int) -> None:
        for mover in self._movers:
            mover.open_stream(order, expected_bytes)

    def finish_stream(self, job: JobId, order: PackOrder) -> None:
        for mover in self._movers:
            mover.finish_stream(job, order)

    def abort_stream(self, job: JobId, pack: PackId, reason: str) -> None:
        for mover in self._movers:
            mover.abort_stream(job, pack, reason)

    def forget_pack(self, pack: PackId) -> None:
        for mover in self._movers:
            mover.forget_pack(pack)

    def close(self) -> None:
        for mover in self._movers:
            mover.close()


class MortalFileSystem(FaultyFileSystem):
    """The real file system until ``dead`` or ``broken`` is set: then nothing is done any more, and callers are told.

    ``hold`` makes reads wait; ``fail`` names operations that fail with that error.
    """

    def __init__(self) -> None:
        self.dead = False
        self.fail: dict[str, OSError] = {}
        self.held = threading.Event()
        self.held.set()
        super().__init__(rule=self._error)

    def _error(self, name: str, _number: int) -> OSError | None:
        if self.dead and name not in {"close", "connect"}:
            return OSError(errno.EIO, "the process is dead")
        if name == "preadv":
            self.held.wait(20)
        return self.fail.get(name)


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
    fs: MortalFileSystem = field(default_factory=MortalFileSystem)
    model: str = "test"
    groups: int = 1
    ranks: int = 1
    recurrent_groups: frozenset[int] = frozenset()
    read_deadline_s: float = 10.0
    admission_patience_s: float = 10.0
    measures_prompts: bool = False
    """Computing takes no time here: once its speed is known, no restore is worth it (R3)."""
    readings: MemorySampler | None = None
    """Where readings come from instead of ``sampler``: the kernel's own."""
    watch: bool = False
    """Whether the owner looks at memory and stalls between requests."""
    bounce_bytes: int = BOUNCE_BYTES
    block_bytes: int = BLOCK_BYTES

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
        self.document = document
        self.policy = PolicyBox(parse_policy(document))
        self.geometry = Geometry.plan(
            block_bytes=self.block_bytes, parked_max_bytes=self.parked_max * self.ranks, ranks=self.ranks
        )
        # Every rank has the same bytes: what a block must hold does not depend on who holds it.
        self.devices = [
            HostDevice([np.zeros((self.device_blocks, self.block_bytes), dtype=np.uint8) for _ in range(self.groups)])
            for _ in range(self.ranks)
        ]
        self.device = self.devices[0]
        self.receipts = ReceiptLog(folder=None)
        self.store = self._open_store()
        self.state = CacheState(
            geometry=self.geometry,
            policy=self.policy,
            receipts=self.receipts,
            metrics=CacheMetrics(),
            spill_on=self.store is not None,
        )
        self.state.recurrent_groups = self.recurrent_groups
        self.sampler = SettableSampler(self.available_bytes)
        self.owner = Owner(
            self.state,
            sampler=self.readings or self.sampler,
            store=self.store,
            identity=IdentityFacts("test", "0" * 16, BLOCK_TOKENS, self.block_bytes),
        )
        self.movers = [self._new_mover(rank) for rank in range(self.ranks)]
        self.mover, self.arena = self.movers[0], self.movers[0].arena
        self.cache = self.owner.cache
        self._requests = itertools.count(1)
        self._jobs = itertools.count(1)
        self._next_block = 0
        self.ended = False
        self.owner.start(self.mover if self.ranks == 1 else Fan(self.movers), watch=self.watch)
        self.settle_recovery()

    def _new_mover(self, rank: int) -> LocalMover:
        arena = Arena(
            extent_bytes=self.geometry.extent_bytes,
            max_extents=max(1, 4 * self.parked_max // self.geometry.extent_bytes),
        )
        return LocalMover(
            geometry=self.geometry,
            arena=arena,
            device=self.devices[rank],
            sink=self.owner.report,
            rank=rank,
            fs=self.fs,
            bounce_bytes=self.bounce_bytes,
        )

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
            block_bytes=self.block_bytes,
            ranks=self.ranks,
        )
        return SpillStore.open(config, identity, fs=self.fs)

    # -- one request ---------------------------------------------------------------------------------------

    def begin(self, conversation: str | None, tokens: Sequence[int], *, salt: str = "") -> Running:
        chain = block_keys(tokens, salt=salt)
        with self.state.lock:
            turn = self.cache.begin(
                self.next_request(),
                conversation=ConversationId(conversation) if conversation is not None else None,
                keys=lambda: [chain],
                prompt_tokens=len(tokens),
                block_tokens=BLOCK_TOKENS,
            )
            # A slow machine must not decide what a test sees; the real wait has a test of its own.
            turn.admission_deadline += self.admission_patience_s
        return Running(self, turn, list(tokens), chain, salt)

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

    def idle(self, conversation: str, seconds: float) -> None:
        """Make the conversation look unused for this long."""
        with self.state.lock:
            found = self.state.conversations.get(ConversationId(conversation))
            assert found is not None
            found.last_used -= seconds

    def conversation(self, conversation: str) -> Conversation:
        found = self.state.conversations.get(ConversationId(conversation))
        assert found is not None, f"{conversation} is not known"
        return found

    def described(self, conversation: str) -> dict[str, Any]:
        found = self.owner.describe(ConversationId(conversation))
        assert found is not None, f"{conversation} is not known"
        return found

    def evict(self, conversation: str) -> bool:
        """Let a conversation's RAM go, as the gate does."""
        self.owner.admission._begin_tally()
        return self.owner.admission.let_go(ConversationId(conversation), reason="gate")

    def packs(self) -> list[Path]:
        """Pack files in place."""
        return sorted(self.folder.rglob("*.pack")) if self.folder is not None else []

    def temporaries(self) -> list[Path]:
        """Files of writes that have not ended."""
        return [path for path in self.folder.rglob("tmp/*") if path.is_file()] if self.folder is not None else []

    def take_blocks(self, count: int) -> list[int]:
        blocks = [(self._next_block + n) % self.device_blocks for n in range(count)]
        self._next_block = (self._next_block + count) % self.device_blocks
        return blocks

    def next_request(self) -> RequestId:
        return RequestId(f"r{next(self._requests)}")

    def next_job(self) -> JobId:
        return JobId(next(self._jobs))

    def await_transfer(self, job: JobId) -> TransferDone:
        """The end of a transfer on every rank: a block that failed on one has failed."""
        done = [self._await_transfer(mover, job) for mover in self.movers]
        return replace(done[0], failed=tuple(sorted({position for one in done for position in one.failed})))

    def _await_transfer(self, mover: LocalMover, job: JobId) -> TransferDone:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for done in mover.take_finished():
                if done.job == job:
                    return done
            time.sleep(0.0005)
        raise AssertionError(f"transfer {job} did not end")

    def fill(self, group: int, block: int, key: BlockKey) -> None:
        """The engine computes a block, every rank its share."""
        for device in self.devices:
            device.planes[group][block] = block_bytes(key, self.block_bytes)

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
        """All turns, decisions, streams and ordered writes have ended."""
        state = self.state
        self.until(
            lambda: (
                not (state.turns or state.finished_streams or state.wishes or state.captured)
                and not self.owner.deciding
                and not any(c.writing for c in state.conversations)
                and (self.owner.disk is None or not self.owner.disk.backlog_bytes)
            ),
            "nothing is under way",
        )

    def check(self) -> None:
        """The ledger's counters, holds and slots are what a count from scratch gives."""
        check_state(self.state)

    def all_receipts(self, kind: ReceiptKind | None = None, conversation: str | None = None) -> list[Receipt]:
        return self.receipts.query(conversation=conversation, kind=kind, limit=100_000)

    def outcomes(self, kind: ReceiptKind, conversation: str | None = None) -> list[tuple[str, str]]:
        """Outcome and reason of every receipt of a kind."""
        return [(receipt.outcome, receipt.reason) for receipt in self.all_receipts(kind, conversation)]

    def stop(self) -> None:
        self.ended = True
        self.owner.stop(grace_s=10.0)

    def kill(self) -> None:
        """End this life as SIGKILL would: from this moment no file changes any more."""
        self.ended = True
        self.fs.dead = True
        self.fs.held.set()
        self.owner.end_threads()
        for mover in self.movers:
            mover.close()
        self.fs.bury()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self.kill()


@dataclass
class Turned:
    """What one request got."""

    receipt: Receipt
    reused: int
    tokens: list[int]


class Running:
    """A request in flight, driven step by step."""

    def __init__(self, pod: Pod, turn: Turn, tokens: list[int], chain: list[BlockKey], salt: str) -> None:
        self.pod = pod
        self.turn = turn
        self.tokens = tokens
        self.chain = chain
        self.salt = salt
        self.matched_blocks = 0
        self.blocks: list[int] = pod.take_blocks(len(chain))
        self.stored = 0
        self.outcome = "finished"
        self.offer_all = False

    def await_gate(self) -> None:
        while self.pod.cache.still_waiting(self.turn):
            time.sleep(0.0005)

    def match(self, engine_blocks: int = 0) -> int:
        pod = self.pod
        deadline = time.monotonic() + 5
        self.await_gate()
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
            self.await_gate()

    def load(self, first: int = 0) -> TransferDone | None:
        pod = self.pod
        keys = self.chain[first : self.matched_blocks]
        if not keys:
            return None
        with pod.state.lock:
            sources = pod.cache.plan_load(self.turn, keys)
        job = pod.next_job()
        blocks = tuple(DeviceBlock(0, block) for block in self.blocks[first : self.matched_blocks])
        for mover in pod.movers:
            mover.load(LoadJob(job, blocks, tuple(sources), pod.read_deadline_s))
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
        if lost:
            # As the connector does: what the engine has and computes is offered again.
            self.stored, self.offer_all = 0, True
        self.check_loaded(first)
        return done

    def check_loaded(self, first: int = 0) -> None:
        for index in range(first, self.matched_blocks):
            for device in self.pod.devices:
                actual = device.planes[0][self.blocks[index]]
                expected = block_bytes(self.chain[index], self.pod.block_bytes)
                assert np.array_equal(actual, expected), f"block {index} has wrong bytes"

    def compute(self) -> None:
        """The engine computes what was not matched, and offers every block it has not offered yet."""
        for index in range(self.matched_blocks, len(self.chain)):
            self.pod.fill(0, self.blocks[index], self.chain[index])
        self.stored = 0 if self.offer_all else max(self.stored, self.matched_blocks)
        self.store(self.stored, len(self.chain))
        if self.pod.measures_prompts:
            with self.pod.state.lock:
                self.pod.cache.prompt_read(self.turn)

    def reply(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self.tokens.extend(tokens)
        longer = block_keys(self.tokens, salt=self.salt)
        fresh = longer[len(self.chain) :]
        self.chain.extend(fresh)
        self.blocks.extend(self.pod.take_blocks(len(fresh)))
        for index in range(len(self.chain) - len(fresh), len(self.chain)):
            self.pod.fill(0, self.blocks[index], self.chain[index])
        self.store(self.stored, len(self.chain))

    def offers(self, first: int, last: int) -> list[OfferedBlock]:
        return [
            OfferedBlock(
                key=self.chain[index],
                parent=self.chain[index - 1] if index else NO_KEY,
                end_token=(index + 1) * BLOCK_TOKENS,
                group=0,
            )
            for index in range(first, last)
        ]

    def store_computed(self, first: int, last: int) -> TransferDone | None:
        """Compute these blocks and store them."""
        for index in range(first, last):
            self.pod.fill(0, self.blocks[index], self.chain[index])
        return self.store(first, last)

    def store(self, first: int, last: int, *, cancel: bool = False) -> TransferDone | None:
        pod = self.pod
        self.stored = max(self.stored, last)
        offered = self.offers(first, last)
        if not offered:
            return None
        with pod.state.lock:
            plan = pod.cache.plan_store(self.turn, offered)
        if not plan.accepted:
            return None
        job = pod.next_job()
        blocks = tuple(DeviceBlock(0, self.blocks[first + position]) for position in plan.accepted)
        for mover in pod.movers:
            mover.store(StoreJob(job, blocks, plan.targets))
            if cancel:
                mover.cancel_transfers([job])
        done = pod.await_transfer(job)
        keys = [offered[position].key for position in plan.accepted]
        with pod.state.lock:
            pod.cache.store_done(self.turn, keys, frozenset(keys[position] for position in done.failed))
        return done

    def finish(self) -> Turned:
        pod = self.pod
        with pod.state.lock:
            pod.cache.close(self.turn, outcome=self.outcome)
        receipt = pod.receipts.query(request=self.turn.request, kind=ReceiptKind.TURN)[-1]
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


def block_bytes(key: BlockKey, nbytes: int = BLOCK_BYTES) -> np.ndarray:
    """The one payload a block with this key can have; a larger one repeats itself."""
    seed = int.from_bytes(key[:8], "big")
    payload = np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    return payload if nbytes == BLOCK_BYTES else np.resize(payload, nbytes)


def prompt(name: str, blocks: int, *, shared: int = 0) -> list[int]:
    """A prompt of ``blocks`` whole blocks, the first ``shared`` of them the same for every name."""
    base = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100_000 + 1_000
    tokens = list(range(shared * BLOCK_TOKENS))
    return tokens + [base + n for n in range((blocks - shared) * BLOCK_TOKENS)]


def check_state(state: CacheState) -> None:
    """Every count the cache keeps along the way must be what counting from scratch gives."""
    with state.lock:
        ledger = state.ledger
        rows = list(ledger.rows.values())
        in_ram = [row for row in rows if ledger.ram[row]]
        on_disk = [row for row in rows if ledger.disk[row] == DiskState.PUBLISHED]
        dirty = [row for row in rows if ledger.ram[row] == RamState.READY and ledger.disk[row] != DiskState.PUBLISHED]
        assert (ledger.ram_blocks, ledger.disk_blocks, ledger.dirty_blocks) == (len(in_ram), len(on_disk), len(dirty))
        assert state.slots.used_slots == len(in_ram)
        assert len({ledger.slot[row] for row in in_ram}) == len(in_ram), "two blocks share a slot"
        assert Counter(ledger.pack[row] for row in on_disk) == Counter(
            {number: pack.live for number, pack in enumerate(state.packs) if pack.live}
        )
        _check_tree(state, rows)


def _check_tree(state: CacheState, rows: list[int]) -> None:
    ledger = state.ledger
    children = Counter(ledger.parent[row] for row in rows if ledger.parent[row] >= 0)
    tips = Counter(row for c in state.conversations for row in c.rows())
    for turn in state.turns.values():
        tips.update([*turn.tips.values(), *turn.arrival])
    ram_hold, disk_hold = Counter[int](), Counter[int]()
    for conversation in state.conversations:
        parked = [tip for tip in conversation.tips if conversation.in_ram and tip.in_ram]
        ram_hold.update(row for tip in parked for row in tip.rows)
        disk_hold.update(conversation.rows() if conversation.on_disk else ())
    for turn in state.turns.values():
        held = [*turn.tips.values(), *turn.arrival]
        ram_hold.update(held)
        disk_hold.update(held)
    for row in sorted(rows, key=lambda row: -_depth(ledger, row)):
        parent = ledger.parent[row]
        assert ledger.children[row] == children[row]
        assert ledger.tips[row] == tips[row]
        assert ledger.ram_hold[row] == ram_hold[row], f"RAM hold of row {row}"
        assert ledger.disk_hold[row] == disk_hold[row], f"disk hold of row {row}"
        if parent >= 0:
            ram_hold[parent] += ram_hold[row] > 0
            disk_hold[parent] += disk_hold[row] > 0
        if not state.turns and not any(c.writing for c in state.conversations):
            assert ledger.pins[row] == 0, "a pin leaked"
            assert ledger.ram[row] != RamState.FILLING
            assert ledger.disk[row] != DiskState.WRITING
            assert ledger.ram_hold[row] or not ledger.ram[row], "RAM holds a block nobody keeps"


def _depth(ledger: Ledger, row: int) -> int:
    return sum(1 for _ in ledger.ancestors(row))


def hybrid_begin(pod: Pod, name: str, tokens: Sequence[int], states: list[BlockKey]) -> Running:
    """A request of a model whose second KV group holds recurrent state."""
    chain = block_keys(tokens)
    with pod.state.lock:
        turn = pod.cache.begin(
            pod.next_request(),
            conversation=ConversationId(name),
            keys=lambda: [chain, states],
            prompt_tokens=len(tokens),
            block_tokens=BLOCK_TOKENS,
        )
    return Running(pod, turn, list(tokens), chain, "")


def hybrid_store(pod: Pod, running: Running, keys: list[BlockKey], states: Sequence[int]) -> None:
    """Offer every attention block, and the state after these numbers of blocks."""
    offered = running.offers(0, len(running.chain))
    offered += [
        OfferedBlock(key=keys[n - 1], parent=keys[n - 2] if n > 1 else NO_KEY, end_token=n * BLOCK_TOKENS, group=1)
        for n in states
    ]
    with pod.state.lock:
        plan = pod.cache.plan_store(running.turn, offered)
    blocks = tuple(DeviceBlock(offered[n].group, n) for n in plan.accepted)
    for n in plan.accepted:
        pod.fill(offered[n].group, n, offered[n].key)
    job = pod.next_job()
    pod.mover.store(StoreJob(job, blocks, plan.targets))
    done = pod.await_transfer(job)
    with pod.state.lock:
        pod.cache.store_done(
            running.turn,
            [offered[n].key for n in plan.accepted],
            frozenset(offered[plan.accepted[position]].key for position in done.failed),
        )
