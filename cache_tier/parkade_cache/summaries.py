"""What others see of a pod's cache: its summary, its conversations, its conditions.

What must stay true: nothing here changes anything, and no ids or bytes of a prompt leave through it; the lock is
held for counts and for one conversation at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parkade_cache import __version__
from parkade_cache.conversations import Conversation
from parkade_cache.disk_tier import DiskTier
from parkade_cache.ids import ConversationId
from parkade_cache.ledger import DiskState, RamState
from parkade_cache.memory.reading import Reading
from parkade_cache.state import CacheState


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """What summaries say about whose blocks these are."""

    model: str
    fingerprint: str
    block_tokens: int
    block_bytes: int


# -- conversations ---------------------------------------------------------------------------------------


def list_conversations(state: CacheState, *, limit: int, after: str | None) -> dict[str, Any]:
    """A page of conversations, most recently used first."""
    with state.lock:
        everything = list(state.conversations)[::-1]
    start = 0
    if after is not None:
        start = next((n + 1 for n, c in enumerate(everything) if c.id == after), len(everything))
    page = everything[start : start + limit]
    more = start + limit < len(everything)
    return {
        "conversations": [describe(state, conversation) for conversation in page],
        "next": page[-1].id if more and page else None,
        "total": len(everything),
    }


def find(state: CacheState, conversation: ConversationId) -> dict[str, Any] | None:
    """One conversation, or None."""
    with state.lock:
        found = state.conversations.get(conversation)
    return None if found is None else describe(state, found)


def describe(state: CacheState, conversation: Conversation) -> dict[str, Any]:
    """One conversation: its length, its use, and what each tier has of it."""
    ledger = state.ledger
    ram = disk = dirty = 0
    with state.lock:
        for row in {row for top in conversation.rows() for row in ledger.ancestors(top)}:
            ram += ledger.ram[row] != RamState.ABSENT
            disk += ledger.disk[row] == DiskState.PUBLISHED
            dirty += ledger.ram[row] == RamState.READY and ledger.disk[row] != DiskState.PUBLISHED
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


# -- the pod ---------------------------------------------------------------------------------------------


def summarise(state: CacheState, disk: DiskTier | None, identity: IdentityFacts, reading: Reading) -> dict[str, Any]:
    """The pod's cache in numbers; what only the owner knows (hooks, readiness) is its to add."""
    slot = state.geometry.pod_slot_bytes
    with state.lock:
        known = list(state.conversations) if state.spill_on else []
    on_disk = sum(1 for conversation in known if conversation.on_disk and conversation.tips)
    with state.lock:
        ledger = state.ledger
        counts = {"conversations": on_disk, "blocks": ledger.disk_blocks}
        summary: dict[str, Any] = {
            "version": __version__,
            "identity": {
                "model": identity.model,
                "fingerprint": identity.fingerprint,
                "block_tokens": identity.block_tokens,
                "block_bytes": identity.block_bytes,
            },
            "memory": _memory(state, reading),
            "ram": {
                "conversations": state.parked_conversations(),
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
            "uptime_seconds": state.clock.wall() - state.started_at,
        }
    summary["disk"] = _disk(state, disk, counts)
    summary["conditions"] = _conditions(state, summary["memory"])
    return summary


def _memory(state: CacheState, reading: Reading) -> dict[str, Any]:
    return {
        "limit_bytes": reading.limit_bytes,
        "floor_bytes": state.policy.memory.floor,
        "available_bytes": reading.available_bytes,
        "source": None if reading.source is None else reading.source.value,
        "current_bytes": reading.current_bytes,
        "credit_bytes": reading.credit_bytes,
        "parked_bytes": state.ledger.ram_blocks * state.geometry.pod_slot_bytes,
        "parked_held_bytes": state.slots.held_bytes(),
        "parked_max_bytes": state.policy.memory.parked.max,
        "parked_peak_bytes": state.totals.parked_peak_bytes,
        "reserved_bytes": state.slots.reserved_bytes(),
        "pressure": state.pressure.value,
    }


def _disk(state: CacheState, disk: DiskTier | None, counts: dict[str, int]) -> dict[str, Any]:
    totals = state.totals
    summary: dict[str, Any] = {
        "enabled": disk is not None,
        **counts,
        "bytes": 0,
        "written_bytes_total": totals.written_bytes,
        "read_bytes_total": totals.read_bytes,
        "errors_total": totals.disk_errors,
    }
    usage = disk.usage() if disk is not None else None
    if disk is not None and usage is not None:
        summary |= {
            "bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "free_bytes": usage.free_bytes,
            "budget_remaining_bytes": usage.budget_remaining_bytes,
            "backlog_bytes": disk.backlog_bytes,
            "quarantined": usage.quarantined,
        }
    return summary


def _spill_reason(state: CacheState) -> str:
    if not state.spill_healthy:
        return "Degraded"
    return "NoSpace" if state.spill_reason else "Writable"


def _conditions(state: CacheState, memory: Mapping[str, Any]) -> list[dict[str, str]]:
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
    if state.spill_on:
        conditions.append(
            {
                "type": "SpillHealthy",
                "status": "False" if state.spill_reason or not state.spill_healthy else "True",
                "reason": _spill_reason(state),
                "message": state.spill_reason,
            }
        )
    return conditions
