"""Limits that cannot be met or are raised again; conversations that give way on disk while RAM has a part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.pod import BLOCK_BYTES, EIGHT_EXTENTS, EXTENT_BLOCKS, Pod, prompt

from parkade_cache.memory.reading import Reading, ReadingSource
from parkade_cache.receipts import ReceiptKind

EXTENT_BYTES = EXTENT_BLOCKS * BLOCK_BYTES
FLOOR = 4 * EXTENT_BYTES


def evicted(pod: Pod) -> list[str | None]:
    return [receipt.conversation for receipt in pod.all_receipts(ReceiptKind.EVICT)]


def test_case_66_a_limit_far_below_what_is_in_use_is_refused_before_anything_goes(tmp_path: Path) -> None:
    """G5: what is missing is compared with everything evictable; a refusal lets go of nothing in vain."""
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, floor=FLOOR) as pod:

        def sample_under(cap_bytes: int | None) -> Reading:
            used = sum(mover.arena.committed_bytes for mover in pod.movers)
            limit = FLOOR + EIGHT_EXTENTS if cap_bytes is None else cap_bytes
            return Reading(max(0, limit - used), ReadingSource.FLAG, limit_bytes=limit, current_bytes=used)

        sampler: Any = pod.sampler
        sampler.sample_under = sample_under
        for name in "abcd":
            pod.turn(name, prompt(name, 15))
        pod.settle()
        running = pod.begin("d", prompt("d", 15))
        running.match()
        document = pod.policy.current.to_json()
        # 8 extents are in use, 6 of them can go; with the floor, 7 would have to.
        document["memory"]["limit"] = FLOOR + EXTENT_BYTES
        document["memory"]["parked"]["max"] = FLOOR
        answer = pod.owner.set_policy(document)
        assert not answer["applied"]
        assert evicted(pod) == []
        running.load()
        running.finish()


def test_d6_a_conversation_that_gives_way_on_disk_keeps_no_ram_that_nothing_can_use(tmp_path: Path) -> None:
    """Its first blocks were found in the engine's own cache, so RAM has only the later ones."""
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS) as pod:
        tokens = prompt("a", 15)
        pod.turn("a", tokens)
        pod.settle()
        pod.evict("a")
        running = pod.begin("a", [*tokens, *prompt("more", 5)])
        running.match(engine_blocks=15)
        running.compute()
        running.finish()
        pod.settle()
        disk = pod.owner.disk
        assert disk is not None
        disk.write_out(pod.conversation("a"), deadline=pod.state.clock.monotonic() + 10)
        assert disk.evict_oldest(BLOCK_BYTES, None)
        pod.settle()
        found = pod.owner.describe(pod.conversation("a").id) if pod.state.ledger.ram_blocks else None
        assert found is None or found["ram_blocks"] in {0, 20}, "a part without its beginning"


def test_a_limit_that_is_raised_again_costs_nobody_anything(tmp_path: Path) -> None:
    """Memory is there again before the level has fallen: an eighth of what was parked went for nothing."""
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, floor=FLOOR) as pod:
        limit = FLOOR + EIGHT_EXTENTS

        def measure() -> None:
            used = sum(mover.arena.committed_bytes for mover in pod.movers)
            pod.sampler.limits, pod.sampler.used_bytes = (limit,), used
            pod.sampler.available_bytes = max(0, limit - used)

        def watch() -> None:
            pod.owner.watcher.watch()
            pod.until(lambda: pod.owner.watcher._strain is None, "the gate has taken it up")
            pod.settle()

        pod.sampler.on_sample = measure
        for name in "abcd":
            pod.turn(name, prompt(name, 15))
        pod.settle()
        watch()
        limit -= EXTENT_BYTES
        watch()
        gone = evicted(pod)
        limit += 100 * EXTENT_BYTES
        watch()
        assert evicted(pod) == gone
