"""What a turn's receipts say: how its prompt was had, and what each of its restores brought (section 7).

What must stay true: every request of a conversation is closed by exactly one ``turn`` receipt, which names the
reason for what was read anew and everything that no tier kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from parkade_cache.receipts import ReceiptKind
from parkade_cache.state import CacheState
from parkade_cache.turns import Turn


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Blocks a load served from each tier before its first failure, and those from there on."""

    ram_blocks: int
    disk_blocks: int
    failed_blocks: int

    @property
    def served_blocks(self) -> int:
        """Blocks that arrived and count."""
        return self.ram_blocks + self.disk_blocks

    @property
    def outcome(self) -> str:
        """``restored``, ``partial`` or ``failed``."""
        if not self.failed_blocks:
            return "restored"
        return "partial" if self.served_blocks else "failed"

    @property
    def tier(self) -> str:
        """The slowest tier the load had to ask."""
        return "disk" if self.disk_blocks or (self.failed_blocks and not self.ram_blocks) else "ram"


def add_restore_receipt(state: CacheState, turn: Turn, result: LoadResult, seconds: float) -> None:
    """Record one load of a turn."""
    slot_bytes = state.geometry.pod_slot_bytes
    state.receipts.add(
        kind=ReceiptKind.RESTORE,
        outcome=result.outcome,
        conversation=turn.conversation.id,
        request=turn.request,
        tier=result.tier,
        tokens=result.served_blocks * turn.block_tokens,
        blocks=result.served_blocks,
        bytes=result.served_blocks * slot_bytes,
        duration_seconds=seconds,
        detail={
            "ram_blocks": result.ram_blocks,
            "disk_blocks": result.disk_blocks,
            "failed_blocks": result.failed_blocks,
        },
    )
    for tier, blocks in (("ram", result.ram_blocks), ("disk", result.disk_blocks)):
        if blocks:
            state.metrics.restored_tokens.labels(tier=tier).inc(blocks * turn.block_tokens)
            state.metrics.restore_bytes.labels(tier=tier).inc(blocks * slot_bytes)
    state.metrics.restore_seconds.labels(tier=result.tier).observe(seconds)


def add_turn_receipt(state: CacheState, turn: Turn) -> None:
    """Close a turn."""
    reused = turn.engine_tokens + turn.ram_tokens + turn.disk_tokens
    anew = max(0, turn.prompt_tokens - reused)
    outcome = turn_outcome(turn)
    # The last, partial block of a prompt is always read anew: that is no miss.
    reason = turn.miss_reason if anew > turn.block_tokens else "tail"
    state.totals.turn(outcome)
    state.metrics.turns.labels(outcome=outcome).inc()
    state.metrics.reread_tokens.labels(reason=reason).inc(anew)
    for what, seconds in (
        ("restore", turn.restore_seconds),
        ("write_out", turn.gate_wait_seconds),
        ("blocks", turn.block_wait_seconds),
    ):
        state.metrics.turn_wait_seconds.labels(what).observe(seconds)
    state.receipts.add(
        kind=ReceiptKind.TURN,
        outcome=outcome,
        reason=reason,
        conversation=turn.conversation.id,
        request=turn.request,
        tokens=turn.prompt_tokens,
        duration_seconds=state.clock.monotonic() - turn.started,
        prompt_tokens=turn.prompt_tokens,
        reused_engine_tokens=turn.engine_tokens,
        reused_ram_tokens=turn.ram_tokens,
        reused_disk_tokens=turn.disk_tokens,
        reused_archive_tokens=0,
        read_anew_tokens=anew,
        prompt_read_seconds=turn.prompt_read_seconds,
        waited_restore_seconds=turn.restore_seconds,
        waited_write_out_seconds=turn.gate_wait_seconds,
        detail={
            "ended": turn.outcome,
            "parked": not turn.ram_refused,
            "park_refusal": turn.ram_refused,
            "not_captured_blocks": turn.not_captured,
            "uncached_blocks": turn.uncached,
            "waited_blocks_seconds": turn.block_wait_seconds,
        },
    )


def turn_outcome(turn: Turn) -> str:
    """How the turn's prompt was had, by the slowest tier that served it."""
    restored = turn.ram_tokens + turn.disk_tokens
    if turn.failed_load_tokens or turn.skipped_tokens:
        return "partial" if restored or turn.engine_tokens else "reread"
    if turn.disk_tokens:
        return "resumed_disk"
    if turn.ram_tokens:
        return "resumed_ram"
    return "resumed_engine" if turn.engine_tokens else "reread"
