"""Turns against a real owner, a real mover and real files: what is found, what is read, what is stored."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
from support.pod import BLOCK_BYTES, BLOCK_TOKENS, EIGHT_EXTENTS, Pod, prompt

from parkade_cache.cache import Found
from parkade_cache.receipts import ReceiptKind

MORE = list(range(9 * BLOCK_TOKENS))


@pytest.fixture
def pod(tmp_path: Path):
    with Pod(folder=tmp_path / "spill") as pod:
        yield pod


@pytest.fixture
def streaming_pod(tmp_path: Path):
    """Parking is off: everything is streamed to disk (G14)."""
    with Pod(folder=tmp_path / "spill", parked_max=0) as pod:
        yield pod


def test_r1_a_turn_finds_prompt_and_reply_of_the_turn_before(pod: Pod) -> None:
    first = pod.turn("A", prompt("a", 30), reply=[1] * 8)
    second = pod.turn("A", [*first.tokens, *MORE])
    assert second.receipt.outcome == "resumed_ram"
    assert second.reused == 32 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_r1_a_lookup_reads_no_file(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 20))
    pod.settle()
    pod.fs.operations.clear()
    running = pod.begin("A", [*turned.tokens, *MORE])
    assert running.match() == 20
    assert "preadv" not in pod.fs.operations
    running.finish()


def test_r2_a_conversation_partly_in_ram_is_restored_in_one_pass(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS) as pod:
        running = pod.begin("A", prompt("a", 30))
        running.match()
        running.store_computed(0, 20)
        pod.owner.admission._refused(running.turn, "low_memory")
        running.store_computed(20, 30)
        first = running.finish()
        pod.settle()
        assert pod.described("A")["ram_blocks"] == 20
        assert pod.described("A")["disk_blocks"] == 10
        second = pod.turn("A", [*first.tokens, *MORE])
    assert second.receipt.reused_ram_tokens == 20 * BLOCK_TOKENS
    assert second.receipt.reused_disk_tokens == 10 * BLOCK_TOKENS
    restores = pod.all_receipts(ReceiptKind.RESTORE)
    assert [restore.detail for restore in restores] == [{"ram_blocks": 20, "disk_blocks": 10, "failed_blocks": 0}]
    assert pod.state.totals.read_bytes == 10 * BLOCK_BYTES, "what RAM has was read from disk"


def test_r3_a_restore_slower_than_reading_is_skipped_with_a_receipt(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 20))
    pod.settle()
    pod.state.rates.disk_read_bytes.per_second = 1.0
    pod.state.rates.prompt_tokens.per_second = 1e9
    again = pod.turn("A", [*turned.tokens, *MORE])
    assert again.reused == 0
    assert again.receipt.reason == "restore_slower"
    (skipped,) = pod.all_receipts(ReceiptKind.RESTORE_SKIPPED)
    assert (skipped.tokens, skipped.blocks, skipped.request) == (20 * BLOCK_TOKENS, 20, again.receipt.request)


def test_r3_what_ram_has_is_served_even_when_the_disk_part_is_skipped(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS) as pod:
        running = pod.begin("A", prompt("a", 30))
        running.match()
        running.store_computed(0, 20)
        pod.owner.admission._refused(running.turn, "low_memory")
        running.store_computed(20, 30)
        first = running.finish()
        pod.settle()
        pod.state.rates.disk_read_bytes.per_second = 1.0
        pod.state.rates.prompt_tokens.per_second = 1e9
        second = pod.turn("A", [*first.tokens, *MORE])
    assert (second.receipt.reused_ram_tokens, second.receipt.reused_disk_tokens) == (20 * BLOCK_TOKENS, 0)


def test_r4_a_read_that_hangs_is_given_up_and_writes_into_no_engine_block_afterwards(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 6))
    pod.settle()
    pod.read_deadline_s = 0.2
    running = pod.begin("A", [*turned.tokens, *MORE])
    assert running.match() == 6
    pod.fs.held.clear()
    done = running.load()
    assert done is not None
    assert done.failed == (-1,)
    planes = pod.device.planes[0]
    for block in running.blocks:
        planes[block] = 7
    pod.fs.held.set()
    pod.mover._read_lane.close()
    assert all(np.all(planes[block] == 7) for block in running.blocks), "a late read reached the engine"
    running.compute()
    finished = running.finish()
    assert finished.reused == 0
    assert finished.receipt.reason == "read_deadline"


def test_r5_the_same_blocks_are_restored_by_one_request_at_a_time(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 6))
    pod.settle()
    first = pod.begin("A", [*turned.tokens, *MORE])
    assert first.match() == 6
    with pod.state.lock:
        pod.cache.plan_load(first.turn, first.chain[:6])
    second = pod.begin("B", [*turned.tokens, 1, 2, 3, 4])
    with pod.state.lock:
        assert pod.cache.lookup(second.chain[0], second.turn) is Found.PENDING
        pod.cache.load_done(first.turn, keys=first.chain[:6], failed=(), disk_bytes=0, disk_seconds=0.0)
        assert pod.cache.lookup(second.chain[0], second.turn) is Found.HIT
    first.finish()
    second.finish()


def test_r5_who_has_waited_long_enough_recomputes(streaming_pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 6))
    pod.settle()
    first = pod.begin("A", turned.tokens)
    first.match()
    with pod.state.lock:
        pod.cache.plan_load(first.turn, first.chain[:6])
    second = pod.begin("B", turned.tokens)
    monkeypatch.setattr("parkade_cache.cache.PENDING_DEADLINE_S", 0.05)
    assert second.match() == 0
    with pod.state.lock:
        pod.cache.load_done(first.turn, keys=first.chain[:6], failed=(), disk_bytes=0, disk_seconds=0.0)
    first.finish()
    second.finish()


def test_a_retry_while_nothing_has_changed_looks_nothing_up(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 6))
    pod.settle()
    first = pod.begin("A", turned.tokens)
    first.match()
    with pod.state.lock:
        pod.cache.plan_load(first.turn, first.chain[:6])
        second = pod.begin("B", turned.tokens)
        pod.cache.lookup(second.chain[0], second.turn)
        pod.cache.waiting(second.turn)
        assert pod.cache.still_waiting(second.turn)
        pod.state.changed()
        assert not pod.cache.still_waiting(second.turn)
        pod.cache.load_done(first.turn, keys=first.chain[:6], failed=(), disk_bytes=0, disk_seconds=0.0)
    first.finish()
    second.finish()


def test_d4_a_damaged_block_costs_it_and_what_follows_and_the_next_turn_is_whole_again(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 20))
    pod.settle()
    (pack,) = pod.packs()
    flip_byte(pack, needle=first_bytes(pod, turned.tokens, block=12))
    second = pod.turn("A", [*turned.tokens, *MORE])
    assert second.reused == 12 * BLOCK_TOKENS
    assert second.receipt.reason == "damaged"
    pod.settle()
    pod.until(lambda: ("quarantined", "damaged") in pod.outcomes(ReceiptKind.DROP), "the pack is set aside")
    assert not pack.exists()
    third = pod.turn("A", second.tokens)
    assert third.reused == len(second.tokens)
    pod.settle()
    pod.check()


def test_d4_a_pack_that_was_truncated_is_a_miss_and_the_pod_lives(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 8))
    pod.settle()
    (pack,) = pod.packs()
    with pack.open("r+b") as file:
        file.truncate(5000)
    second = pod.turn("A", turned.tokens)
    assert second.reused == 0
    pod.settle()
    assert pod.turn("A", turned.tokens).reused == len(turned.tokens)


def test_d8_a_disk_that_fails_to_read_damages_nothing(streaming_pod: Pod) -> None:
    pod = streaming_pod
    turned = pod.turn("A", prompt("a", 8))
    pod.settle()
    pod.fs.fail["preadv"] = OSError(5, "simulated")
    failed = pod.turn("A", turned.tokens)
    assert failed.reused == 0
    assert failed.receipt.reason == "read_failed"
    pod.fs.fail.clear()
    pod.settle()
    assert pod.turn("A", turned.tokens).reused == len(turned.tokens)


def test_w6_a_side_call_under_the_same_id_costs_the_conversation_nothing(pod: Pod) -> None:
    main = pod.turn("A", prompt("a", 30, shared=4))
    for number in range(9):
        pod.turn("A", prompt(f"title {number}", 10, shared=4))
    again = pod.turn("A", [*main.tokens, *MORE])
    assert again.reused == len(main.tokens)
    pod.settle()
    pod.check()


def test_the_same_prompt_under_two_ids_is_kept_once(pod: Pod) -> None:
    first = pod.turn("A", prompt("a", 20))
    second = pod.turn("B", first.tokens)
    assert second.reused == len(first.tokens)
    assert pod.state.ledger.ram_blocks == 20


def test_two_tenants_with_the_same_prompt_share_nothing(pod: Pod) -> None:
    first = pod.turn("A", prompt("a", 20), salt="one")
    second = pod.turn("B", first.tokens, salt="two")
    assert second.reused == 0
    assert pod.state.ledger.ram_blocks == 40


def test_a_request_without_an_id_continues_the_conversation_whose_chain_it_extends(pod: Pod) -> None:
    first = pod.turn(None, prompt("a", 20), reply=[5] * 4)
    second = pod.turn(None, [*first.tokens, *MORE])
    assert second.receipt.conversation == first.receipt.conversation
    assert second.reused == 21 * BLOCK_TOKENS
    other = pod.turn(None, prompt("b", 20))
    assert other.receipt.conversation != first.receipt.conversation


def test_a_block_the_engine_took_back_is_counted_and_never_served(pod: Pod) -> None:
    running = pod.begin("A", prompt("a", 10))
    running.match()
    running.store_computed(0, 5)
    pod.mover._capture_lane.submit(lambda: time.sleep(0.1))
    running.store(5, 10, cancel=True)
    finished = running.finish()
    assert finished.receipt.detail is not None
    assert finished.receipt.detail["not_captured_blocks"] == 5
    assert pod.owner.summary()["not_captured_blocks_total"] == 5
    again = pod.turn("A", finished.tokens)
    assert again.reused == 5 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_a_streamed_block_the_engine_took_back_is_not_in_the_pack(streaming_pod: Pod) -> None:
    pod = streaming_pod
    running = pod.begin("A", prompt("a", 10))
    running.match()
    running.store_computed(0, 5)
    pod.mover._capture_lane.submit(lambda: time.sleep(0.1))
    running.store(5, 10, cancel=True)
    finished = running.finish()
    pod.settle()
    assert pod.turn("A", finished.tokens).reused == 5 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_a_turn_none_of_whose_blocks_was_captured_leaves_no_pack_and_no_error(streaming_pod: Pod) -> None:
    pod = streaming_pod
    running = pod.begin("A", prompt("a", 4))
    running.match()
    pod.mover._capture_lane.submit(lambda: time.sleep(0.1))
    running.store(0, 4, cancel=True)
    running.finish()
    pod.settle()
    assert pod.packs() == []
    assert pod.state.totals.disk_errors == 0
    assert pod.state.spill_healthy
    pod.check()


def test_two_turns_that_compute_the_same_block_do_not_make_each_other_s_copy_findable_early(pod: Pod) -> None:
    """A store that ended marked the block ready although another request's copy into RAM was still under way."""
    pod.state.spill_healthy = True
    first, second = pod.begin("A", prompt("a", 4)), pod.begin("B", prompt("a", 4))
    first.match()
    second.match()
    with pod.state.lock:
        first.turn.ram_refused = "low_memory"
        streamed = pod.cache.plan_store(first.turn, first.offers(0, 4))
        parked = pod.cache.plan_store(second.turn, second.offers(0, 4))
        assert all(target.slot < 0 for target in streamed.targets)
        assert all(target.slot >= 0 for target in parked.targets)
        pod.cache.store_done(first.turn, first.chain, frozenset())
        assert pod.cache.lookup(first.chain[0], first.turn) is not Found.HIT
        pod.cache.store_done(second.turn, second.chain, frozenset())
        assert pod.cache.lookup(first.chain[0], first.turn) is Found.HIT
    first.finish()
    second.finish()


def test_a_block_offered_again_while_it_is_stored_is_stored_once(pod: Pod) -> None:
    running = pod.begin("A", prompt("a", 4))
    running.match()
    with pod.state.lock:
        running.turn.ram_refused = "low_memory"
        assert pod.cache.plan_store(running.turn, running.offers(0, 4)).accepted == (0, 1, 2, 3)
        running.turn.ram_refused = ""
        assert pod.cache.plan_store(running.turn, running.offers(0, 4)).accepted == ()
        pod.cache.store_done(running.turn, running.chain, frozenset(running.chain))
    running.finish()
    pod.settle()
    pod.check()


def test_an_aborted_request_that_matched_nothing_leaves_no_conversation(pod: Pod) -> None:
    pod.turn("A", prompt("a", 10))
    running = pod.begin("B", prompt("a", 10))
    running.outcome = "aborted"
    running.finish()
    assert pod.owner.describe(running.turn.conversation.id) is None
    pod.settle()
    pod.check()


def test_w11_a_short_conversation_is_neither_parked_nor_evicted_for(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, parked={"minTokens": 11 * BLOCK_TOKENS}) as pod:
        for name in "abcd":
            pod.turn(name, prompt(name, 15))
        short = pod.turn("title", prompt("title", 10))
        assert short.receipt.detail is not None
        assert short.receipt.detail["park_refusal"] == "min_tokens"
        assert pod.outcomes(ReceiptKind.EVICT) == []
        pod.settle()
        assert pod.described("title")["ram_blocks"] == 0
        assert pod.turn("title", short.tokens).receipt.outcome == "resumed_disk"


def test_every_request_is_closed_by_one_turn_receipt_that_adds_up(pod: Pod) -> None:
    first = pod.turn("A", prompt("a", 30), reply=[1] * 8)
    second = pod.turn("A", [*first.tokens, *MORE, 1])
    receipt = dataclasses.replace(second.receipt)
    assert receipt.prompt_tokens == len(second.tokens)
    assert receipt.prompt_tokens == (receipt.reused_ram_tokens or 0) + (receipt.read_anew_tokens or 0)
    assert len(pod.all_receipts(ReceiptKind.TURN)) == 2


def first_bytes(pod: Pod, tokens: list[int], *, block: int) -> bytes:
    from support.pod import block_bytes, block_keys

    return bytes(block_bytes(block_keys(tokens)[block])[:64])


def flip_byte(path: Path, *, needle: bytes) -> None:
    """Damage one byte of the block that begins with ``needle``."""
    data = path.read_bytes()
    at = data.index(needle) + 10
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 0xFF]))
