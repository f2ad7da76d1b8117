"""The owner: the threads that keep a pod's conversations while the engine works or sleeps.

Why it exists: the engine core sleeps without requests, so admission, write-behind, publishing, recovery and
draining must not depend on an engine step. One thread answers the movers and keeps the disk up to date, one
runs the gate, one brings back what an earlier life left on disk.

What must stay true: only these threads and the step hooks change the ledger, always under ``state.lock``;
whoever asks (HTTP, operator, launcher) goes through the handlers at the end. Rules: W7, W8, S1-S3.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parkade_cache import __version__
from parkade_cache.admission import Admission
from parkade_cache.cache import ConversationCache
from parkade_cache.conversations import Conversation, Tip
from parkade_cache.disk_tier import DiskTier, WriteTicket
from parkade_cache.errors import ParkadeError
from parkade_cache.hooks import HookTimes
from parkade_cache.ids import NO_KEY, ConversationId
from parkade_cache.ledger import NO_BLOCK, BlockIndex, DiskState
from parkade_cache.memory.reading import MemorySampler
from parkade_cache.mover import (
    ExtentsCommitted,
    ExtentsReleased,
    HeapReleased,
    JobId,
    JobOutcome,
    Mover,
    PackWritten,
    Report,
)
from parkade_cache.receipts import ReceiptKind
from parkade_cache.spill import RecoveredPack, SpillStore, WriteOutcome
from parkade_cache.state import CacheState

_log = logging.getLogger(__name__)

TICK_S = 0.25
"""How often the owner looks for conversations that have become idle."""

DIRTY_WATERMARK = 0.25
"""W8: unwritten share of ``parked.max`` above which writing does not wait for a conversation to be idle."""

_RECOVER_SLICE = 256
"""Blocks entered under one hold of the lock while old packs are brought back (S3)."""


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """What summaries say about whose blocks these are."""

    model: str
    fingerprint: str
    block_tokens: int
    block_bytes: int


class Owner:
    """Owns one pod's cache; ``mover`` must deliver its reports to ``report``."""

    def __init__(
        self,
        state: CacheState,
        *,
        sampler: MemorySampler,
        store: SpillStore | None,
        identity: IdentityFacts,
    ) -> None:
        self.state = state
        self.cache = ConversationCache(state)
        self.hooks = HookTimes()
        self.sampler = sampler
        self.store = store
        self.identity = identity
        self._mover: Mover | None = None
        self.disk: DiskTier | None = None
        self._admission: Admission | None = None
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._partial: dict[JobId, list[Report]] = {}
        self._background: WriteTicket | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._open_orders: dict[JobId, str] = {}

    @property
    def admission(self) -> Admission:
        """The gate's thread; there once the mover is attached."""
        assert self._admission is not None
        return self._admission

    @property
    def mover(self) -> Mover:
        """The movers of all ranks."""
        assert self._mover is not None
        return self._mover

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, mover: Mover) -> None:
        """Attach the movers and start the threads."""
        self._mover = mover
        if self.store is not None:
            self.disk = DiskTier(self.state, self.store, mover)
        self._admission = Admission(
            self.state, sampler=self.sampler, mover=mover, disk=self.disk, stop=self._stopping.is_set
        )
        for name, body in (("reports", self._run_reports), ("gate", self._run_gate), ("tick", self._run_ticks)):
            self._spawn(name, body)
        if self.store is not None:
            self._spawn("recover", self._recover)
        else:
            self.state.recovering = False

    def _spawn(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name=f"parkade-owner-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self, *, grace_s: float = 30.0) -> None:
        """Write out what is left within ``grace_s``, then stop the threads and close the store."""
        if self._stopping.is_set():
            return
        self.drain(grace_s=grace_s)
        self._stopping.set()
        with self.state.lock:
            self.state.wake.notify_all()
        self._reports.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        self.mover.close()
        if self.store is not None:
            self.store.close()
        self.state.receipts.flush()
        self.state.receipts.close()

    # -- reports of the movers ---------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Called by the movers, from any thread."""
        self._reports.put(report)

    def _run_reports(self) -> None:
        while True:
            report = self._reports.get()
            if report is None:
                return
            try:
                self._handle(report)
            except Exception:
                _log.exception("a mover's report could not be handled: %s", type(report).__name__)

    def _handle(self, report: Report) -> None:
        if isinstance(report, ExtentsReleased | HeapReleased):
            self.admission.answered(report)
            return
        parts = self._partial.setdefault(report.job, [])
        parts.append(report)
        if len(parts) < self.state.geometry.ranks:
            return
        del self._partial[report.job]
        if isinstance(report, ExtentsCommitted):
            done = all(isinstance(p, ExtentsCommitted) and p.outcome is JobOutcome.DONE for p in parts)
            self.admission.committed(report.job, done=done)
        elif self.disk is not None:
            self.disk.pack_written([part for part in parts if isinstance(part, PackWritten)])

    # -- the gate's thread ---------------------------------------------------------------------------------------

    def _run_gate(self) -> None:
        state = self.state
        while not self._stopping.is_set():
            with state.lock:
                while not state.wishes and not self._stopping.is_set():
                    state.wake.wait()
                turn = state.wishes.popleft() if state.wishes else None
            if turn is None:
                continue
            try:
                self.admission.serve(turn)
            except Exception:
                _log.exception("the gate could not decide for request %s; its blocks go to disk", turn.request)

    # -- the ticking thread: streams, write-behind, empty extents ---------------------------------------------------

    def _run_ticks(self) -> None:
        state = self.state
        while not self._stopping.is_set():
            with state.lock:
                if not state.finished_streams and not self._streams_wanting():
                    state.wake.wait(TICK_S)
            try:
                self.tick()
            except Exception:
                _log.exception("the owner's tick failed; the next one tries again")

    def _streams_wanting(self) -> bool:
        return any(
            turn.stream is not None and not turn.stream.failed and turn.stream.planned_bytes > turn.stream.reserved_bytes
            for turn in self.state.turns.values()
        )

    def tick(self) -> None:
        """One round of what needs no engine step."""
        if self.disk is not None:
            self.disk.open_streams()
            self._finish_streams(self.disk)
            self._write_behind(self.disk)
            self.disk.collect_dead()
        with self.state.lock:
            idle = not self.state.turns and not self.state.wishes
        if idle:
            self.admission.release_empty(wait=False)

    def _finish_streams(self, disk: DiskTier) -> None:
        while True:
            with self.state.lock:
                if not self.state.finished_streams:
                    return
                turn = self.state.finished_streams.popleft()
            disk.finish_stream(turn)

    def _write_behind(self, disk: DiskTier) -> None:
        """W7, W8: one background write at a time, of the conversation that has been idle longest."""
        state = self.state
        if self._background is not None and not self._background.done.is_set():
            return
        self._background = None
        spill = state.policy.spill
        if spill is None or spill.mode.value != "WriteBehind" or state.draining:
            return
        with state.lock:
            conversation = self._next_to_write(float(spill.write_behind_idle_seconds))
        if conversation is None:
            return
        ticket = disk.order_write(conversation, urgent=False)
        if isinstance(ticket, WriteTicket):
            self._background = ticket
        elif ticket is not WriteOutcome.ALREADY_ON_DISK:
            with state.lock:
                conversation.retry_write_at = state.clock.monotonic() + 5.0

    def _next_to_write(self, idle_seconds: float) -> Conversation | None:
        state = self.state
        now, monotonic = state.clock.wall(), state.clock.monotonic()
        over = self._over_watermark()
        for conversation in state.conversations:
            if not conversation.dirty or conversation.writing or conversation.retry_write_at > monotonic:
                continue
            if conversation.busy:
                continue
            if over or now - conversation.last_used >= idle_seconds:
                return conversation
        return None

    def _over_watermark(self) -> bool:
        state = self.state
        dirty = state.ledger.dirty_blocks * state.geometry.pod_slot_bytes
        return dirty > DIRTY_WATERMARK * state.policy.memory.parked.max

    # -- recovery ----------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Bring back what an earlier life published, newest first, without delaying anybody (S2, S3)."""
        disk = self.disk
        assert disk is not None
        state = self.state
        started = state.clock.monotonic()
        packs = blocks = 0
        older_tips: dict[ConversationId, list[tuple[bytes, int]]] = {}
        try:
            for recovered in disk.recover():
                if self._stopping.is_set():
                    return
                packs += 1
                blocks += self._enter_pack(recovered, older_tips)
        except (ParkadeError, OSError) as error:
            _log.error("old packs could not all be brought back: %s", error)
        with state.lock:
            self._prune_tips()
            self._adopt_orphans()
            state.recovering = False
            state.changed()
        if self.disk is not None:
            self.disk.collect_dead()
        state.receipts.add(
            kind=ReceiptKind.RECOVER,
            outcome="recovered",
            tier="disk",
            blocks=blocks,
            bytes=blocks * state.geometry.pod_slot_bytes,
            duration_seconds=state.clock.monotonic() - started,
            detail={"packs": packs, "conversations": len(state.conversations)},
        )

    def _enter_pack(self, recovered: RecoveredPack, seen: dict[ConversationId, list[tuple[bytes, int]]]) -> int:
        state = self.state
        ledger = state.ledger
        info = recovered.info
        owner = ConversationId(info.header.conversation)
        entered = 0
        with state.lock:
            number = state.pack_number(info.header.pack_id, owner)
        living = [(n, e) for n, e in enumerate(info.entries) if n not in recovered.dead]
        duplicates: list[int] = []
        for start in range(0, len(living), _RECOVER_SLICE):
            with state.lock:
                for entry_number, entry in living[start : start + _RECOVER_SLICE]:
                    parent = NO_BLOCK
                    if entry.parent != NO_KEY:
                        parent = ledger.intern(entry.parent, parent=NO_BLOCK, end_token=max(0, entry.end_token - 1))
                    row = ledger.intern(entry.key, parent=BlockIndex(parent), end_token=entry.end_token)
                    if ledger.disk[row] == DiskState.ABSENT:
                        ledger.disk_published(row, number, entry_number)
                        state.packs[number].live += 1
                        entered += 1
                    else:
                        duplicates.append(entry_number)
        with state.lock:
            self._enter_conversation(owner, info.tips, recovered.last_used, seen)
            state.changed()
        if duplicates and self.disk is not None:
            self.disk.drop_entries(number, duplicates)
        return entered

    def _enter_conversation(
        self,
        owner: ConversationId,
        tips: Sequence[tuple[bytes, int]],
        created_at: float,
        seen: dict[ConversationId, list[tuple[bytes, int]]],
    ) -> None:
        state = self.state
        conversation = state.conversations.get(owner)
        if conversation is None:
            conversation = Conversation(id=owner, last_used=created_at)
            state.conversations.insert_old(conversation)
        known = seen.setdefault(owner, [])
        for key, tokens in tips:
            row = state.ledger.rows.get(key, -1)  # type: ignore[call-overload]
            if row < 0 or (key, tokens) in known:
                continue
            known.append((key, tokens))
            if any(row in tip.rows for tip in conversation.tips):
                continue
            state.add_tip(conversation, Tip(rows=(row,), tokens=tokens, last_used=created_at))

    def _prune_tips(self) -> None:
        """Tips of older packs that a newer tip of the same conversation extends are no tips any more."""
        state = self.state
        for conversation in state.conversations:
            by_depth = sorted(conversation.tips, key=lambda tip: -tip.tokens)
            kept: list[Tip] = []
            for tip in by_depth:
                if any(self._covers(other, tip) for other in kept):
                    state.remove_tip(conversation, tip)
                else:
                    kept.append(tip)

    def _adopt_orphans(self) -> None:
        """Published blocks that no recorded tip reaches belong to the conversation that wrote them."""
        state = self.state
        ledger = state.ledger
        orphans = [
            row
            for row in ledger.rows.values()
            if ledger.disk[row] == DiskState.PUBLISHED and not ledger.disk_hold[row]
        ]
        for row in sorted(orphans, key=lambda row: -ledger.end_token[row]):
            if ledger.disk_hold[row]:
                continue
            owner = state.packs[ledger.pack[row]].conversation
            conversation = state.conversations.open(owner, now=0.0)
            state.add_tip(conversation, Tip(rows=(row,), tokens=ledger.end_token[row], last_used=0.0))

    def _covers(self, longer: Tip, shorter: Tip) -> bool:
        ledger = self.state.ledger
        return any(ledger.descends(a, b) for a in longer.rows for b in shorter.rows)

    # -- drain -----------------------------------------------------------------------------------------------------------

    def drain(self, *, grace_s: float, newest_first: bool = True) -> dict[str, Any]:
        """S1: let running turns end, then write out everything, newest first; returns what was done."""
        state = self.state
        started = state.clock.monotonic()
        deadline = started + grace_s
        with state.lock:
            state.draining = True
        self._await_turns(deadline)
        counts: dict[str, int] = {}
        if self.disk is not None:
            self._settle_streams(deadline)
            with state.lock:
                waiting = deque(c for c in state.conversations if c.dirty or c.writing)
            while waiting:
                conversation = waiting.pop() if newest_first else waiting.popleft()
                outcome = self.disk.write_out(conversation, deadline=deadline)
                counts[outcome.value] = counts.get(outcome.value, 0) + 1
                _log.info("drain: %s %s, %d conversations left", conversation.id, outcome.value, len(waiting))
        seconds = state.clock.monotonic() - started
        dropped = sum(
            count
            for outcome, count in counts.items()
            if outcome not in (WriteOutcome.WRITTEN.value, WriteOutcome.ALREADY_ON_DISK.value)
        )
        state.metrics.drain_seconds.observe(seconds)
        state.receipts.add(
            kind=ReceiptKind.DRAIN,
            outcome="done" if not dropped else "incomplete",
            duration_seconds=seconds,
            written_out=counts.get(WriteOutcome.WRITTEN.value, 0),
            already_on_disk=counts.get(WriteOutcome.ALREADY_ON_DISK.value, 0),
            dropped=dropped,
            detail={"outcomes": counts},
        )
        state.receipts.flush()
        return {"seconds": seconds, "outcomes": counts, "dropped": dropped}

    def _await_turns(self, deadline: float) -> None:
        state = self.state
        with state.lock:
            while state.turns and state.clock.monotonic() < deadline:
                state.wake.wait(0.1)

    def _settle_streams(self, deadline: float) -> None:
        assert self.disk is not None
        self._finish_streams(self.disk)
        state = self.state
        while state.clock.monotonic() < deadline:
            with state.lock:
                if not any(conversation.writing for conversation in state.conversations):
                    return
                state.wake.wait(0.02)

    # -- handlers for whoever asks ---------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], object]]:
        """What the owner's socket answers."""
        return {
            "summary": lambda _: self.summary(),
            "conversations": lambda p: self.list_conversations(
                limit=int(p.get("limit") or 100), after=p.get("after")
            ),
            "conversation": lambda p: self.describe(ConversationId(str(p["id"]))),
            "forget": lambda p: self.forget(ConversationId(str(p["id"]))),
            "pin": lambda p: self.pin(ConversationId(str(p["id"])), pinned=bool(p.get("pinned", True))),
            "receipts": lambda p: self.list_receipts(p),
            "policy": lambda _: self.state.policy.to_json(),
            "ready": lambda _: {"ready": self.ready, "draining": self.state.draining},
            "live": lambda _: {"live": True},
            "drain": lambda p: self.drain(grace_s=float(p.get("grace_s") or 60.0)),
            "metrics": lambda _: self.export_metrics(),
        }

    @property
    def ready(self) -> bool:
        """Whether new requests are welcome."""
        return not self.state.draining and not self._stopping.is_set()

    def export_metrics(self) -> list[dict[str, Any]]:
        """All metric families, gauges brought up to date."""
        self.state.metrics.observe(self.summary())
        return self.state.metrics.export()

    def list_receipts(self, params: Mapping[str, Any]) -> list[dict[str, object]]:
        """Receipts, newest last."""
        found = self.state.receipts.query(
            since=params.get("since"),
            conversation=params.get("conversation"),
            request=params.get("request"),
            kind=params.get("kind"),
            limit=int(params.get("limit") or 100),
        )
        return [receipt.to_json() for receipt in found]

    def list_conversations(self, *, limit: int, after: str | None) -> dict[str, Any]:
        """A page of conversations, most recently used first."""
        with self.state.lock:
            everything = list(self.state.conversations)[::-1]
        start = 0
        if after is not None:
            start = next((n + 1 for n, c in enumerate(everything) if c.id == after), len(everything))
        page = everything[start : start + limit]
        more = start + limit < len(everything)
        return {
            "conversations": [self._entry(conversation) for conversation in page],
            "next": page[-1].id if more and page else None,
            "total": len(everything),
        }

    def describe(self, conversation: ConversationId) -> dict[str, Any] | None:
        """One conversation, or None."""
        with self.state.lock:
            found = self.state.conversations.get(conversation)
        return None if found is None else self._entry(found)

    def _entry(self, conversation: Conversation) -> dict[str, Any]:
        state = self.state
        ledger = state.ledger
        ram = disk = dirty = 0
        seen: set[int] = set()
        with state.lock:
            for top in conversation.rows():
                for row in ledger.ancestors(top):
                    if row in seen:
                        break
                    seen.add(row)
                    ram += ledger.ram[row] != 0
                    disk += ledger.disk[row] == DiskState.PUBLISHED
                    dirty += ledger.ram[row] == 2 and ledger.disk[row] != DiskState.PUBLISHED
        size = state.geometry.pod_slot_bytes
        return {
            "id": conversation.id,
            "tokens": conversation.tokens,
            "turns": conversation.turns,
            "idle_seconds": max(0.0, state.clock.wall() - conversation.last_used),
            "pinned": conversation.pinned,
            "in_flight": conversation.in_flight,
            "ram_blocks": ram,
            "disk_blocks": disk,
            "ram_bytes": ram * size,
            "disk_bytes": disk * size,
            "dirty_bytes": dirty * size,
        }

    def pin(self, conversation: ConversationId, *, pinned: bool) -> dict[str, Any] | None:
        """Keep the conversation from being let go, or stop doing so."""
        with self.state.lock:
            found = self.state.conversations.get(conversation)
            if found is None:
                return None
            found.pinned = pinned
        return self._entry(found)

    def forget(self, conversation: ConversationId) -> dict[str, Any] | None:
        """Delete the conversation from every tier; queued and running writes of it are never published."""
        state = self.state
        with state.lock:
            found = state.conversations.get(conversation)
        if found is None:
            return None
        if self.disk is not None:
            self.disk.forget_writes(found)
        with state.lock:
            found.forgotten = True
            state.drop_conversation(found)
            freed = state.free_unheld_ram()
            state.slots.abandon(conversation)
            state.changed()
        returned = self.disk.collect_dead() if self.disk is not None else 0
        state.receipts.add(
            kind=ReceiptKind.DROP,
            outcome="forgotten",
            reason="deleted",
            conversation=conversation,
            blocks=freed,
            bytes=freed * state.geometry.pod_slot_bytes + returned,
        )
        return {"id": conversation, "forgotten": True}

    def summary(self) -> dict[str, Any]:
        """The pod's cache in numbers: what the operator, ``parkade top`` and the demo read."""
        state = self.state
        reading = self.sampler.sample()
        slot = state.geometry.pod_slot_bytes
        with state.lock:
            in_ram = state.parked_conversations()
            on_disk = sum(1 for c in state.conversations if c.on_disk and c.tips) if state.spill_on else 0
            ledger = state.ledger
            summary: dict[str, Any] = {
                "version": __version__,
                "identity": {
                    "model": self.identity.model,
                    "fingerprint": self.identity.fingerprint,
                    "block_tokens": self.identity.block_tokens,
                    "block_bytes": self.identity.block_bytes,
                },
                "memory": {
                    "limit_bytes": reading.limit_bytes,
                    "floor_bytes": state.policy.memory.floor,
                    "available_bytes": reading.available_bytes,
                    "source": None if reading.source is None else reading.source.value,
                    "current_bytes": reading.current_bytes,
                    "credit_bytes": reading.credit_bytes,
                    "parked_bytes": ledger.ram_blocks * slot,
                    "parked_held_bytes": state.slots.held_bytes(),
                    "parked_max_bytes": state.policy.memory.parked.max,
                    "parked_peak_bytes": state.totals.parked_peak_bytes,
                    "reserved_bytes": state.slots.reserved_bytes(),
                },
                "ram": {
                    "conversations": in_ram,
                    "blocks": ledger.ram_blocks,
                    "bytes": ledger.ram_blocks * slot,
                    "extents": state.slots.held_extents,
                },
                "dirty_bytes": ledger.dirty_blocks * slot,
                "turns": dict(state.totals.turns),
                "turns_in_flight": len(state.turns),
                "dropped_conversations_total": state.totals.dropped_conversations,
                "not_captured_blocks_total": state.totals.not_captured_blocks,
                "draining": state.draining,
                "recovering": state.recovering,
                "ready": self.ready,
                "uptime_seconds": state.clock.wall() - state.started_at,
            }
            disk = {"conversations": on_disk, "blocks": ledger.disk_blocks}
        summary["disk"] = self._disk_summary(disk)
        summary["hooks"] = self.hooks.summary()
        summary["conditions"] = self._conditions(summary)
        return summary

    def _disk_summary(self, counts: dict[str, int]) -> dict[str, Any]:
        state = self.state
        disk = self.disk
        if disk is None:
            return {"enabled": False, "conversations": 0, "blocks": 0, "bytes": 0, "written_bytes_total": 0,
                    "read_bytes_total": 0, "errors_total": 0}
        usage = disk.usage()
        return {
            "enabled": True,
            **counts,
            "bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "free_bytes": usage.free_bytes,
            "budget_remaining_bytes": usage.budget_remaining_bytes,
            "backlog_bytes": 0 if self._background is None else self._background.nbytes,
            "written_bytes_total": state.totals.written_bytes,
            "read_bytes_total": state.totals.read_bytes,
            "errors_total": state.totals.disk_errors,
            "quarantined": usage.quarantined,
        }

    def _conditions(self, summary: Mapping[str, Any]) -> list[dict[str, str]]:
        memory = summary["memory"]
        known = memory["available_bytes"] is not None
        healthy = known and memory["available_bytes"] >= memory["floor_bytes"]
        conditions = [
            {
                "type": "MemoryHealthy",
                "status": "True" if healthy else "False" if known else "Unknown",
                "reason": "AboveFloor" if healthy else "BelowFloor" if known else "ReadingUnknown",
                "message": "",
            }
        ]
        if self.state.spill_on:
            ok = self.state.spill_healthy
            conditions.append(
                {
                    "type": "SpillHealthy",
                    "status": "True" if ok else "False",
                    "reason": "Writable" if ok else "Degraded",
                    "message": self.state.spill_reason,
                }
            )
        return conditions
