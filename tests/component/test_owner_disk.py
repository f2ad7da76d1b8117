"""The owner's disk tier over real files: what is written, what is published, what gives way, what is given up."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.pod import BLOCK_BYTES, BLOCK_TOKENS, EIGHT_EXTENTS, Pod, block_keys, prompt

from parkade_cache.cache import Found
from parkade_cache.disk_tier import WriteTicket
from parkade_cache.ids import ConversationId
from parkade_cache.mover import SlotBlock, WrittenEntry
from parkade_cache.receipts import ReceiptKind
from parkade_cache.spill import PackWriter, WriteOutcome

MORE = list(range(9 * BLOCK_TOKENS))


@pytest.fixture
def pod(tmp_path: Path):
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS) as pod:
        yield pod


@pytest.fixture
def streaming_pod(tmp_path: Path):
    with Pod(folder=tmp_path / "spill", parked_max=0) as pod:
        yield pod


def order(pod: Pod, name: str, *, urgent: bool = False) -> WriteTicket:
    assert pod.owner.disk is not None
    ticket = pod.owner.disk.order_write(pod.conversation(name), urgent=urgent)
    assert isinstance(ticket, WriteTicket), ticket
    return ticket


def hold_writes(pod: Pod) -> threading.Event:
    """Writers wait until the event is set."""
    go = threading.Event()
    for lane in (pod.mover._write_lane, pod.mover._urgent_lane, pod.mover._stream_lane):
        lane.submit(lambda: go.wait(20))  # type: ignore[arg-type,return-value]
    return go


def written_blocks(pod: Pod) -> int:
    return sum(receipt.blocks or 0 for receipt in pod.all_receipts(ReceiptKind.SPILL) if receipt.outcome == "written")


# -- streaming ---------------------------------------------------------------------------------------------


def test_case_29_a_conversation_larger_than_ram_is_streamed_out_and_in(pod: Pod) -> None:
    turned = pod.turn("A", prompt("a", 200))
    pod.turn("B", prompt("b", 200))
    again = pod.turn("A", [*turned.tokens, *MORE])
    assert again.reused == 200 * BLOCK_TOKENS
    assert again.receipt.outcome == "resumed_disk"
    pod.settle()
    assert pod.state.ledger.ram_blocks == 0
    assert pod.state.totals.dropped_conversations == 0
    pod.check()


def test_a_stream_needs_no_more_memory_than_its_buffers(streaming_pod: Pod) -> None:
    pod = streaming_pod
    pod.mover._bounce._free = type(pod.mover._bounce._free)(list(pod.mover._bounce._free)[:3])
    turned = pod.turn("A", prompt("a", 40))
    pod.settle()
    assert pod.turn("A", turned.tokens).reused == 40 * BLOCK_TOKENS
    assert len(pod.mover._bounce._free) == 3, "a buffer was lost"


def test_case_34_a_stream_that_fails_half_way_leaves_no_file_and_the_older_state(streaming_pod: Pod) -> None:
    pod = streaming_pod
    first = pod.turn("A", prompt("a", 20))
    pod.settle()
    packs = pod.packs()
    running = pod.begin("A", [*first.tokens, *prompt("more", 40)])
    running.match()
    running.load()
    running.store_computed(20, 30)
    pod.until(lambda: not any(s.queue for s in pod.mover._streams.values()), "the first half is written")
    pod.fs.fail["pwritev"] = OSError(errno.EIO, "simulated")
    running.store_computed(30, 60)
    running.finish()
    pod.settle()
    pod.fs.fail.clear()
    assert pod.packs() == packs
    assert pod.temporaries() == []
    drops = pod.all_receipts(ReceiptKind.DROP, "A")
    assert [drop.tier for drop in drops] == ["stream"]
    pod.check()
    pod.until(lambda: pod.state.spill_healthy, "the disk is tried again")
    assert pod.turn("A", first.tokens).reused == 20 * BLOCK_TOKENS


def test_blocks_offered_after_a_stream_was_refused_keep_no_buffer(tmp_path: Path) -> None:
    """A block captured for a stream that had been given up was kept in its bounce buffer for ever."""
    with Pod(folder=tmp_path / "spill", parked_max=0, size=60 * BLOCK_BYTES) as pod:
        buffers = len(pod.mover._bounce._free)
        for number in range(3):
            pod.turn(f"big {number}", prompt(f"big {number}", 100))
            pod.settle()
        assert len(pod.mover._bounce._free) == buffers
        reasons = [reason for _, reason in pod.outcomes(ReceiptKind.DROP)]
        assert reasons == ["refused_size"] * 3
        small = pod.turn("small", prompt("small", 20))
        pod.settle()
        assert pod.turn("small", small.tokens).reused == 20 * BLOCK_TOKENS
        pod.check()


def test_case_36_a_write_in_flight_is_never_read_from(pod: Pod) -> None:
    pod.turn("A", prompt("a", 15))
    pod.settle()
    go = hold_writes(pod)
    ticket = order(pod, "A")
    probe = pod.begin("A", prompt("a", 15))
    with pod.state.lock:
        sources = pod.cache.plan_load(probe.turn, probe.chain)
        assert all(source.slot >= 0 for source in sources)
        pod.cache.load_done(probe.turn, keys=probe.chain, failed=(), disk_bytes=0, disk_seconds=0)
    probe.finish()
    go.set()
    assert ticket.done.wait(10)
    pod.evict("A")
    again = pod.turn("A", prompt("a", 15))
    assert again.receipt.outcome == "resumed_disk"


def test_case_36_a_streamed_block_is_pending_until_it_is_published(streaming_pod: Pod) -> None:
    pod = streaming_pod
    go = hold_writes(pod)
    pod.turn("A", prompt("a", 5))
    probe = pod.begin("B", prompt("a", 5))
    with pod.state.lock:
        assert pod.cache.lookup(probe.chain[0], probe.turn) is Found.PENDING
    go.set()
    assert probe.match() == 5
    probe.load()
    probe.finish()


# -- write-behind ------------------------------------------------------------------------------------------


def test_w8_a_conversation_is_written_once_it_is_idle(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", mode="WriteBehind", spill={"writeBehindIdleSeconds": 3}) as pod:
        pod.turn("A", prompt("a", 15))
        pod.turn("B", prompt("b", 15))
        pod.settle()
        pod.idle("A", 10)
        pod.until(lambda: pod.state.ledger.disk_blocks == 15, "the idle one is written")
        assert pod.outcomes(ReceiptKind.SPILL) == [("written", "write_behind")]
        assert pod.described("B")["disk_blocks"] == 0


def test_w8_above_the_watermark_nothing_is_waited_for(tmp_path: Path) -> None:
    spill = {"writeBehindIdleSeconds": 3600}
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, mode="WriteBehind", spill=spill) as pod:
        pod.turn("A", prompt("a", 15))
        pod.settle()
        assert pod.state.ledger.disk_blocks == 0
        pod.turn("B", prompt("b", 15))
        pod.until(lambda: pod.state.ledger.disk_blocks >= 15, "the oldest is written")
        pod.settle()
        assert pod.described("A")["disk_blocks"] == 15


def test_w7_a_growing_conversation_costs_its_growth(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", mode="WriteBehind", spill={"writeBehindIdleSeconds": 0}) as pod:
        tokens = prompt("a", 10)
        for turn in range(5):
            tokens = [*pod.turn("A", tokens).tokens, *prompt(f"turn {turn}", 3)]
            pod.until(lambda: pod.state.ledger.dirty_blocks == 0, "it is written")
            pod.settle()
        assert written_blocks(pod) == 10 + 4 * 3
        pod.check()


def test_case_32_turns_of_another_conversation_cost_no_second_copy(pod: Pod) -> None:
    main = pod.turn("MAIN", prompt("main", 15, shared=4))
    tokens = prompt("sub", 5, shared=4)
    for turn in range(9):
        tokens = [*pod.turn("SUB", tokens).tokens, *prompt(f"sub {turn}", 6)]
        pod.settle()
    sub_blocks = len(tokens) // BLOCK_TOKENS
    back = pod.turn("MAIN", [*main.tokens, *MORE])
    assert back.reused == 15 * BLOCK_TOKENS
    pod.settle()
    assert written_blocks(pod) <= 15 + sub_blocks + 9
    pod.check()


def test_case_33_evicting_one_leaves_the_other_and_the_shared_prefix(pod: Pod) -> None:
    pod.turn("A", prompt("a", 15, shared=6))
    pod.turn("B", prompt("b", 15, shared=6))
    pod.settle()
    pod.evict("A")
    assert pod.described("B")["ram_blocks"] == 15
    assert pod.turn("B", prompt("b", 15, shared=6)).receipt.reused_ram_tokens == 15 * BLOCK_TOKENS
    pod.settle()
    pod.evict("B")
    assert written_blocks(pod) == 15 + 9, "the shared prefix was written twice"
    pod.check()


def test_a_block_that_is_being_loaded_is_written_out_all_the_same(pod: Pod) -> None:
    """A dirty block pinned by another conversation's load was skipped by the write-out, and then lost with its RAM."""
    pod.turn("A", prompt("a", 15))
    pod.settle()
    reader = pod.begin("B", prompt("a", 15))
    reader.match()
    with pod.state.lock:
        pod.cache.plan_load(reader.turn, reader.chain)
    assert pod.evict("A")
    assert pod.state.ledger.disk_blocks == 15
    with pod.state.lock:
        pod.cache.load_done(reader.turn, keys=reader.chain, failed=(), disk_bytes=0, disk_seconds=0)
    reader.finish()
    pod.settle()
    pod.check()


def test_w10_case_41_a_conversation_shorter_than_min_tokens_is_not_written_and_counted(tmp_path: Path) -> None:
    spill = {"minTokens": 15 * BLOCK_TOKENS}
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, spill=spill) as pod:
        pod.turn("short", prompt("short", 14))
        pod.turn("long", prompt("long", 15))
        pod.settle()
        pod.evict("short")
        pod.evict("long")
        assert pod.outcomes(ReceiptKind.EVICT, "short") == [("refused_min_tokens", "gate")]
        assert pod.outcomes(ReceiptKind.DROP, "short") == [("dropped", "refused_min_tokens")]
        assert pod.outcomes(ReceiptKind.EVICT, "long") == [("written", "gate")]
        counted = pod.state.metrics.write_out.labels(outcome="refused_min_tokens")._value.get()
        assert counted == 1
        assert pod.turn("long", prompt("long", 15)).receipt.outcome == "resumed_disk"


# -- published, superseded, refused --------------------------------------------------------------------------


def test_case_35_a_longer_state_takes_the_place_of_the_older_and_shares_its_blocks(pod: Pod) -> None:
    first = pod.turn("A", prompt("a", 15))
    pod.settle()
    pod.evict("A")
    second = pod.turn("A", [*first.tokens, *prompt("more", 5)])
    pod.settle()
    pod.evict("A")
    assert len(pod.conversation("A").tips) == 1
    assert pod.state.ledger.disk_blocks == 20
    assert pod.turn("A", second.tokens).reused == 20 * BLOCK_TOKENS


def test_case_35_a_branch_that_is_given_up_gives_its_space_back_and_keeps_what_is_shared(pod: Pod) -> None:
    pod.turn("A", prompt("main", 20, shared=5))
    for number in range(5):
        pod.turn("A", prompt(f"branch {number}", 10, shared=5))
        pod.settle()
        pod.evict("A")
    assert len(pod.conversation("A").tips) == 4
    pod.until(lambda: pod.state.ledger.disk_blocks == 5 + 15 + 3 * 5, "the oldest branches are gone")
    pod.settle()
    pod.check()
    assert pod.turn("A", prompt("main", 20, shared=5)).reused == 20 * BLOCK_TOKENS


def test_case_38_a_write_refused_by_the_free_space_floor_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, spill={"minFree": "1Pi"}) as pod:
        pod.turn("A", prompt("a", 15))
        pod.settle()
        pod.evict("A")
        assert pod.outcomes(ReceiptKind.EVICT) == [("refused_free_space", "gate")]
        assert pod.outcomes(ReceiptKind.DROP) == [("dropped", "refused_free_space")]
        assert pod.packs() == []
        assert pod.state.ledger.disk_blocks == 0


def test_d6_a_full_disk_lets_the_oldest_conversations_go_and_keeps_what_is_shared(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=0, size=70 * BLOCK_BYTES) as pod:
        for name in ("A", "B", "C", "D"):
            pod.turn(name, prompt(name, 20, shared=8))
            pod.settle()
        gone = [str(r.conversation) for r in pod.all_receipts(ReceiptKind.EVICT) if r.reason == "disk_capacity"]
        assert gone
        assert gone == ["A", "B", "C"][: len(gone)]
        assert pod.turn("D", prompt("D", 20, shared=8)).reused == 20 * BLOCK_TOKENS
        assert pod.turn("A", prompt("A", 20, shared=8)).reused == 8 * BLOCK_TOKENS
        pod.settle()
        pod.check()
        used = pod.owner.summary()["disk"]["bytes"]
        assert used <= 70 * BLOCK_BYTES


def test_d6_where_no_eviction_makes_room_none_is_made(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=0, size=50 * BLOCK_BYTES) as pod:
        pod.turn("A", prompt("a", 20))
        pod.settle()
        pod.owner.pin(ConversationId("A"), pinned=True)
        pod.turn("B", prompt("b", 40))
        pod.settle()
        assert pod.outcomes(ReceiptKind.EVICT) == []
        assert ("dropped", "refused_capacity") in pod.outcomes(ReceiptKind.DROP, "B")
        assert pod.turn("A", prompt("a", 20)).reused == 20 * BLOCK_TOKENS


def test_what_was_evicted_from_disk_while_it_is_in_ram_can_be_written_again(tmp_path: Path) -> None:
    """A conversation that had left the disk was never kept there again: each write of it was thrown away at once."""
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, size=50 * BLOCK_BYTES) as pod:
        pod.turn("A", prompt("a", 15))
        pod.settle()
        assert order(pod, "A").done.wait(10)
        assert pod.owner.disk is not None
        pod.owner.disk.evict_oldest(15 * BLOCK_BYTES, None)
        assert pod.described("A")["ram_blocks"] == 15
        assert pod.described("A")["disk_blocks"] == 0
        pod.check()
        pod.evict("A")
        assert pod.described("A")["disk_blocks"] == 15
        assert pod.turn("A", prompt("a", 15)).receipt.outcome == "resumed_disk"
        pod.settle()
        pod.check()


def test_numbers_of_packs_that_are_gone_are_used_again(pod: Pod) -> None:
    for number in range(12):
        pod.turn("A", prompt(f"a{number}", 3))
        pod.settle()
        pod.evict("A")
        pod.owner.forget(ConversationId("A"))
    assert len(pod.state.packs) <= 2
    assert pod.packs() == []
    pod.check()


# -- deleting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "running"])
def test_case_69_a_conversation_deleted_while_it_is_written_is_never_published(pod: Pod, when: str) -> None:
    pod.turn("A", prompt("a", 15))
    pod.settle()
    go = threading.Event()
    if when == "queued":
        pod.mover._write_lane.submit(lambda: go.wait(20))  # type: ignore[arg-type,return-value]
    else:
        append = pod.mover._append_slots

        def slow(writer: PackWriter, unit: Sequence[SlotBlock]) -> list[WrittenEntry]:
            written = append(writer, unit)
            go.wait(20)
            return written

        pod.mover._append_slots = slow  # type: ignore[method-assign]
    ticket = order(pod, "A")
    if when == "running":
        pod.until(lambda: ticket.job in pod.mover._running_writes, "the write runs")
    pod.owner.forget(ConversationId("A"))
    go.set()
    assert ticket.done.wait(10)
    pod.settle()
    assert pod.packs() == []
    assert pod.temporaries() == []
    assert pod.turn("A", prompt("a", 15)).reused == 0
    assert pod.outcomes(ReceiptKind.DROP, "A") == [("forgotten", "deleted")]
    pod.settle()
    pod.check()


def test_case_69_a_conversation_deleted_while_it_is_streamed_is_never_published(streaming_pod: Pod) -> None:
    pod = streaming_pod
    running = pod.begin("A", prompt("a", 20))
    running.match()
    running.store_computed(0, 10)
    pod.owner.forget(ConversationId("A"))
    running.store_computed(10, 20)
    running.finish()
    pod.settle()
    assert pod.packs() == []
    assert pod.temporaries() == []
    assert pod.turn("A", prompt("a", 20)).reused == 0
    pod.settle()
    pod.check()


def test_forgetting_one_conversation_leaves_what_another_shares(pod: Pod) -> None:
    pod.turn("A", prompt("a", 15, shared=6))
    pod.turn("B", prompt("b", 15, shared=6))
    pod.settle()
    pod.evict("A")
    assert pod.owner.forget(ConversationId("A")) == {"id": "A", "forgotten": True}
    assert pod.owner.forget(ConversationId("A")) is None
    assert pod.turn("B", prompt("b", 15, shared=6)).reused == 15 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_an_id_that_was_deleted_during_a_turn_can_be_used_again(pod: Pod) -> None:
    """The end of the old turn removed the new conversation of the same id."""
    old = pod.begin("A", prompt("a", 15))
    old.match()
    old.compute()
    pod.owner.forget(ConversationId("A"))
    new = pod.turn("A", prompt("new", 15))
    old.finish()
    assert pod.turn("A", new.tokens).reused == 15 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_new_weights_find_nothing_of_the_old_ones(pod: Pod) -> None:
    pod.turn("A", prompt("a", 15))
    pod.settle()
    pod.evict("A")
    pod.owner.reset()
    assert pod.turn("A", prompt("a", 15)).reused == 0
    pod.settle()
    pod.evict("A")
    assert pod.turn("A", prompt("a", 15)).receipt.outcome == "resumed_disk"


# -- a disk that fails ---------------------------------------------------------------------------------------


def test_d8_a_disk_that_fails_degrades_to_ram_and_recovers_by_itself(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parkade_cache.disk_tier.PROBE_INTERVAL_S", 0.05)
    pod.turn("A", prompt("a", 15))
    pod.settle()
    for name in ("pwritev", "open", "allocate"):
        pod.fs.fail[name] = OSError(errno.EROFS, "simulated")
    assert order(pod, "A").done.wait(10)
    assert not pod.state.spill_healthy
    conditions = {c["type"]: c for c in pod.owner.summary()["conditions"]}
    assert conditions["SpillHealthy"]["status"] == "False"
    assert "simulated" in conditions["SpillHealthy"]["message"]
    assert pod.turn("A", prompt("a", 15)).receipt.outcome == "resumed_ram"
    refused = pod.turn("huge", prompt("huge", 100))
    assert refused.receipt.detail is not None
    assert refused.receipt.detail["uncached_blocks"] == 100
    pod.fs.fail.clear()
    pod.until(lambda: pod.state.spill_healthy, "the disk is used again")
    assert ("degraded", pod.outcomes(ReceiptKind.SPILL)[0][1]) in pod.outcomes(ReceiptKind.SPILL)
    assert ("disk_healthy", "") in pod.outcomes(ReceiptKind.RECOVER)
    pod.evict("A")
    assert pod.turn("A", prompt("a", 15)).receipt.outcome == "resumed_disk"
    pod.settle()
    pod.check()


def test_d8_a_full_disk_loses_nothing_that_ram_has(pod: Pod) -> None:
    pod.turn("A", prompt("a", 15))
    pod.settle()
    pod.fs.fail["pwritev"] = OSError(errno.ENOSPC, "no space left")
    ticket = order(pod, "A")
    assert ticket.done.wait(10)
    assert ticket.outcome is WriteOutcome.FAILED
    assert pod.temporaries() == []
    pod.fs.fail.clear()
    assert pod.state.ledger.dirty_blocks == 15
    assert pod.turn("A", prompt("a", 15)).receipt.outcome == "resumed_ram"


def test_case_47_a_pack_that_is_written_but_not_published_is_adopted_without_a_restart(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parkade_cache.disk_tier.PROBE_INTERVAL_S", 0.05)
    pod.turn("A", prompt("a", 15))
    pod.settle()
    pod.fs.fail["sql INSERT"] = OSError(errno.EIO, "simulated")
    assert order(pod, "A").done.wait(10)
    pod.fs.fail.clear()
    assert pod.state.ledger.dirty_blocks == 15
    pod.until(lambda: pod.state.ledger.disk_blocks == 15, "the complete pack is adopted")
    pod.settle()
    pod.evict("A")
    assert len(pod.packs()) == 1
    assert pod.turn("A", prompt("a", 15)).receipt.outcome == "resumed_disk"
    pod.settle()
    pod.check()


def test_a_vanished_directory_is_a_degraded_disk_and_no_dead_pod(pod: Pod, tmp_path: Path) -> None:
    pod.turn("A", prompt("a", 15))
    pod.turn("B", prompt("b", 15))
    pod.settle()
    pod.evict("A")
    shutil.rmtree(tmp_path / "spill")
    assert pod.turn("A", prompt("a", 15)).reused == 0
    pod.until(lambda: not pod.state.spill_healthy, "the loss is noticed")
    assert pod.turn("B", prompt("b", 15)).receipt.outcome == "resumed_ram"
    assert pod.owner.summary()["disk"]["enabled"] is True


# -- recurrent state -----------------------------------------------------------------------------------------


def test_d7_case_39_of_recurrent_states_the_deepest_and_the_root_are_spilled(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", groups=2, recurrent_groups=frozenset({1})) as pod:
        hybrid_turn(pod, "A", prompt("a", 10), states=(1, 3, 5, 8))
        pod.settle()
        pod.evict("A")
        assert kept_states(pod, prompt("a", 10)) == [1, 8]
        assert pod.described("A")["disk_blocks"] == 10 + 2
        pod.check()
        branch = prompt("a", 2) + prompt("other", 5)
        assert deepest_resume(pod, "B", branch, attention=2) == 1


def test_d7_case_39_also_when_it_was_streamed(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=0, groups=2, recurrent_groups=frozenset({1})) as pod:
        hybrid_turn(pod, "A", prompt("a", 10), states=(1, 3, 5, 8))
        pod.settle()
        assert kept_states(pod, prompt("a", 10)) == [1, 8]
        hybrid_turn(pod, "A", prompt("a", 20), states=(15, 18), known=8)
        pod.settle()
        assert kept_states(pod, prompt("a", 20)) == [1, 18], "the state that was deepest before is superseded"
        pod.check()


def test_d7_a_restart_knows_the_same_states(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", groups=2, recurrent_groups=frozenset({1})) as pod:
        hybrid_turn(pod, "A", prompt("a", 10), states=(1, 3, 5, 8))
        pod.settle()
        pod.stop()
    with Pod(folder=tmp_path / "spill", groups=2, recurrent_groups=frozenset({1})) as pod:
        assert kept_states(pod, prompt("a", 10)) == [1, 8]
        assert len(pod.conversation("A").tips) == 1
        assert len(pod.conversation("A").tips[0].rows) == 2
        pod.check()


def state_keys(tokens: list[int]) -> list:
    """Keys of the recurrent group: the same hashes, another group."""
    return [type(key)(key[:-4] + (1).to_bytes(4, "big")) for key in block_keys(tokens)]


def hybrid_turn(pod: Pod, name: str, tokens: list[int], *, states: tuple[int, ...], known: int = 0) -> None:
    """A turn of a model with an attention group and a recurrent one that keeps its state after these blocks."""
    from support.pod import hybrid_begin, hybrid_store

    running = hybrid_begin(pod, name, tokens, state_keys(tokens))
    running.await_gate()
    with pod.state.lock:
        pod.cache.matched(running.turn, engine_tokens=0, cached_tokens=known * BLOCK_TOKENS)
    hybrid_store(pod, running, state_keys(tokens), states)
    running.finish()


def kept_states(pod: Pod, tokens: list[int]) -> list[int]:
    ledger = pod.state.ledger
    rows = [ledger.find(key) for key in state_keys(tokens)]
    return [n + 1 for n, row in enumerate(rows) if row >= 0 and ledger.disk[row] == 2]


def deepest_resume(pod: Pod, name: str, tokens: list[int], *, attention: int) -> int:
    """Where a hybrid model resumes: the deepest state at or before what the attention group has."""
    running = pod.begin(name, tokens)
    with pod.state.lock:
        hits = [pod.cache.lookup(key, running.turn) is Found.HIT for key in running.chain]
        assert hits[: attention + 1] == [True] * attention + [False]
        states = [pod.cache.lookup(key, running.turn) is Found.HIT for key in state_keys(tokens)[:attention]]
    running.finish()
    return max((n + 1 for n, hit in enumerate(states) if hit), default=0)
