"""The gate over a real ledger: who gets RAM, who goes, and that a refusal or an eviction loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pod import BLOCK_TOKENS, EIGHT_EXTENTS, EXTENT_BLOCKS, Pod, prompt

from parkade_cache.cache import Found
from parkade_cache.conversations import Conversation
from parkade_cache.ids import ConversationId
from parkade_cache.memory.gate import NeedKind
from parkade_cache.policy import parse_policy
from parkade_cache.receipts import ReceiptKind
from parkade_cache.spill import WriteOutcome


@pytest.fixture
def pod(tmp_path: Path):
    """Eight extents of RAM; a conversation of 15 blocks takes two."""
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS) as pod:
        yield pod


@pytest.fixture
def ram_only():
    with Pod(folder=None, parked_max=EIGHT_EXTENTS) as pod:
        yield pod


def park(pod: Pod, *names: str, blocks: int = 15) -> None:
    for name in names:
        pod.turn(name, prompt(name, blocks))
    pod.settle()


def evicted(pod: Pod) -> list[str]:
    return [str(receipt.conversation) for receipt in pod.all_receipts(ReceiptKind.EVICT)]


def resumes(pod: Pod, name: str, *, blocks: int = 15) -> str:
    turned = pod.turn(name, prompt(name, blocks))
    assert turned.reused == blocks * BLOCK_TOKENS, f"{name} came back with {turned.reused} tokens"
    return turned.receipt.outcome


def test_case_49_the_oldest_is_written_before_its_ram_is_let_go(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    park(pod, "e")
    assert evicted(pod) == ["a"]
    (admit,) = [r for r in pod.all_receipts(ReceiptKind.ADMIT) if r.evicted]
    assert (admit.written_out, admit.dropped, admit.evicted) == (1, 0, ("a",))
    assert pod.described("a")["ram_blocks"] == 0
    assert resumes(pod, "a") == "resumed_disk"
    pod.settle()
    pod.check()


def test_case_21_pinned_conversations_stay_and_the_oldest_other_goes(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    for name in "ab":
        pod.owner.pin(ConversationId(name), pinned=True)
    park(pod, "e")
    assert evicted(pod) == ["c"]


def test_case_21_with_only_pinned_ones_left_the_gate_refuses_and_evicts_nobody(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    for name in "abcd":
        pod.owner.pin(ConversationId(name), pinned=True)
    park(pod, "e")
    assert evicted(pod) == []
    assert ("refused", "budget") in pod.outcomes(ReceiptKind.REFUSE, "e")
    assert resumes(pod, "e") == "resumed_disk"


def test_case_22_under_the_floor_with_nothing_parked_the_gate_releases_and_refuses(pod: Pod) -> None:
    pod.sampler.available_bytes = 0
    park(pod, "a")
    (refusal,) = pod.all_receipts(ReceiptKind.REFUSE)
    assert (refusal.reason, refusal.evicted) == ("low_memory", ())
    assert refusal.heaps, "the heap was not asked before the refusal (G3)"
    assert resumes(pod, "a") == "resumed_disk"


def test_case_24_after_three_refusals_a_known_conversation_is_not_asked_for_and_a_new_one_is(pod: Pod) -> None:
    pod.sampler.available_bytes = 0
    for _ in range(5):
        pod.turn("a", prompt("a", 15))
    assert [reason for _, reason in pod.outcomes(ReceiptKind.REFUSE, "a")] == ["low_memory"] * 3 + ["back_off"] * 2
    pod.sampler.available_bytes = 64 << 30
    park(pod, "new")
    assert pod.described("new")["ram_blocks"] == 15
    assert pod.outcomes(ReceiptKind.ADMIT, "new") == [("admitted", "")]
    pod.turn("a", prompt("a", 15))
    assert pod.described("a")["ram_blocks"] == 15, "a success resets the back-off"


def test_case_28_a_conversation_over_the_whole_budget_evicts_nobody_and_is_streamed(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    park(pod, "huge", blocks=81)
    assert evicted(pod) == []
    assert pod.outcomes(ReceiptKind.REFUSE, "huge") == [("refused", "over_budget")]
    assert resumes(pod, "huge", blocks=81) == "resumed_disk"
    assert resumes(pod, "a") == "resumed_ram"


def test_case_50_a_write_still_queued_is_not_written_twice(pod: Pod) -> None:
    park(pod, "a")
    disk = pod.owner.disk
    assert disk is not None
    ticket = disk.order_write(pod.conversation("a"), urgent=False)
    assert not isinstance(ticket, WriteOutcome)
    assert pod.evict("a")
    pod.settle()
    assert len(pod.packs()) == 1
    assert resumes(pod, "a") == "resumed_disk"


@pytest.mark.parametrize("hang", [False, True], ids=["past", "inside the payload"])
def test_case_51_a_deadline_drops_the_conversation_and_leaves_nothing_of_it(pod: Pod, hang: bool) -> None:
    park(pod, "a")
    pod.owner.admission._begin_tally()
    tally = pod.owner.admission._tally
    if hang:
        tally.deadline = pod.state.clock.monotonic() + 0.2
        pod.fs.held.clear()
        pod.mover._urgent_lane.submit(lambda: pod.fs.held.wait(20))
    else:
        tally.deadline = 0.0
    assert pod.owner.admission.let_go(ConversationId("a"), reason="gate")
    pod.fs.held.set()
    pod.settle()
    assert tally.outcomes == {"deadline": 1}
    assert tally.dropped == 1
    assert pod.outcomes(ReceiptKind.DROP, "a") == [("dropped", "deadline")]
    assert pod.packs() == []
    assert pod.state.ledger.ram_blocks == 0
    assert pod.turn("a", prompt("a", 15)).reused == 0
    pod.settle()
    pod.check()


def test_case_51_a_write_that_ends_after_its_deadline_is_not_published(pod: Pod) -> None:
    park(pod, "a")
    admission = pod.owner.admission
    admission._begin_tally()
    admission._tally.deadline = pod.state.clock.monotonic() + 0.1
    pod.mover.cancel = lambda job: None  # type: ignore[method-assign]
    pod.fs.held.clear()
    pod.mover._urgent_lane.submit(lambda: pod.fs.held.wait(20))
    assert admission.let_go(ConversationId("a"), reason="gate")
    assert pod.outcomes(ReceiptKind.DROP, "a") == [("dropped", "deadline")]
    pod.fs.held.set()
    pod.settle()
    pod.until(lambda: pod.packs() == [], "its pack is removed again")
    assert pod.state.ledger.disk_blocks == 0
    pod.until(lambda: pod.state.ledger.ram_blocks == 0, "its RAM is free once the write has let it go")
    pod.check()


def test_case_53_what_is_published_is_not_written_again(pod: Pod) -> None:
    park(pod, "a")
    pod.evict("a")
    assert resumes(pod, "a") == "resumed_disk"
    pod.settle()
    pod.evict("a")
    assert pod.outcomes(ReceiptKind.EVICT, "a") == [("written", "gate"), ("already_on_disk", "gate")]
    assert len(pod.packs()) == 1


def test_case_54_without_a_disk_tier_the_oldest_goes_with_outcome_tier_off(ram_only: Pod) -> None:
    pod = ram_only
    park(pod, "a", "b", "c", "d")
    park(pod, "e")
    assert pod.outcomes(ReceiptKind.EVICT) == [("tier_off", "gate")]
    assert pod.outcomes(ReceiptKind.DROP, "a") == [("dropped", "tier_off")]
    assert pod.owner.describe(ConversationId("a")) is None
    assert resumes(pod, "e") == "resumed_ram"
    pod.check()


def test_case_55_a_conversation_in_use_is_skipped_whole_and_listed(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    running = pod.begin("a", prompt("a", 15))
    running.match()
    admission = pod.owner.admission
    admission._begin_tally()
    assert not admission.evict(ConversationId("a"))
    assert admission._tally.skipped_busy == ["a"]
    assert pod.described("a")["ram_blocks"] == 15
    running.finish()


def test_case_55_a_conversation_that_is_used_during_its_write_out_stays(pod: Pod) -> None:
    park(pod, "a")
    admission = pod.owner.admission
    write_out = admission._write_out

    def used_meanwhile(conversation: Conversation) -> WriteOutcome:
        outcome = write_out(conversation)
        pod.turn("a", prompt("a", 20))
        return outcome

    admission._write_out = used_meanwhile  # type: ignore[method-assign]
    assert not pod.evict("a")
    assert pod.described("a")["ram_blocks"] == 20
    assert pod.outcomes(ReceiptKind.DROP) == []
    assert resumes(pod, "a", blocks=20) == "resumed_ram"
    pod.settle()
    pod.check()


def test_case_58_the_chain_that_the_incoming_prompt_extends_is_never_taken(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    running = pod.begin("other id", [*prompt("a", 15), *prompt("more", 15)])
    running.match()
    assert evicted(pod) == ["b"]
    assert running.matched_blocks == 15
    running.load()
    running.compute()
    assert running.finish().receipt.outcome == "resumed_ram"
    pod.settle()
    pod.check()


def test_g4_a_prefix_the_incoming_prompt_shares_stays_in_ram_with_its_only_keeper_gone(pod: Pod) -> None:
    pod.turn("a", prompt("a", 15, shared=8))
    park(pod, "b", "c", "d")
    running = pod.begin("e", prompt("e", 15, shared=8))
    assert running.match() == 8
    assert all(pod.cache.lookup(key, running.turn) is Found.HIT for key in running.chain[:8])
    running.load()
    running.compute()
    assert running.finish().receipt.reused_ram_tokens == 8 * BLOCK_TOKENS


def test_g4_extents_that_the_incoming_prompt_needs_do_not_count_as_freeable(pod: Pod) -> None:
    pod.turn("a", prompt("a", 15, shared=8))
    park(pod, "b", "c", "d")
    for name in "bcd":
        pod.owner.pin(ConversationId(name), pinned=True)
    running = pod.begin("e", prompt("e", 22, shared=8))
    assert running.match() == 8
    assert running.turn.ram_refused == "budget", "two extents were wanted, and one can be had"
    assert evicted(pod) == []
    running.finish()


def test_g5_a_need_that_eviction_cannot_meet_evicts_nobody(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    busy = [pod.begin(name, prompt(name, 15)) for name in "bcd"]
    for running in busy:
        running.match()
    pod.turn("e", prompt("e", 35))
    assert evicted(pod) == []
    assert ("refused", "budget") in pod.outcomes(ReceiptKind.REFUSE, "e")
    for running in busy:
        running.finish()


def test_g8_the_budget_of_conversations_is_kept(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, parked={"maxConversations": 2}) as pod:
        park(pod, "a", "b", "c")
        assert evicted(pod) == ["a"]
        assert pod.owner.summary()["ram"]["conversations"] == 2


def test_g6_a_published_conversation_goes_before_an_unwritten_one_idle_up_to_twice_as_long(pod: Pod) -> None:
    park(pod, "a", "b", "c", "d")
    pod.idle("a", 100)
    pod.idle("b", 60)
    disk = pod.owner.disk
    assert disk is not None
    ticket = disk.order_write(pod.conversation("b"), urgent=False)
    assert not isinstance(ticket, WriteOutcome)
    assert ticket.done.wait(10)
    park(pod, "e")
    assert evicted(pod) == ["b"]


def test_g10_a_floor_broken_after_a_capture_sends_the_oldest_other_to_disk_first(pod: Pod) -> None:
    park(pod, "a", "b")
    running = pod.begin("c", prompt("c", 15))
    running.match()
    running.compute()
    # Another process has taken memory: two extents are missing, which one conversation brings back.
    base = pod.arena.committed_bytes - 2 * pod.geometry.pod_extent_bytes
    pod.sampler.on_sample = lambda: setattr(pod.sampler, "available_bytes", base - pod.arena.committed_bytes)
    running.finish()
    pod.settle()
    pod.sampler.on_sample = None
    pod.sampler.available_bytes = 64 << 30
    kept = pod.all_receipts(ReceiptKind.PARK)[-1]
    assert (kept.outcome, kept.evicted, kept.conversation) == ("kept", ("a",), "c")
    assert pod.outcomes(ReceiptKind.DROP) == []
    assert resumes(pod, "a") == "resumed_disk"
    assert resumes(pod, "c") == "resumed_ram"


def test_g10_where_the_others_do_not_suffice_the_fresh_one_goes_to_disk(pod: Pod) -> None:
    park(pod, "a", "b")
    running = pod.begin("c", prompt("c", 15))
    running.match()
    running.compute()
    pod.sampler.available_bytes = -1
    running.finish()
    pod.settle()
    pod.sampler.available_bytes = 64 << 30
    assert pod.all_receipts(ReceiptKind.PARK)[-1].outcome == "handed_to_disk"
    assert pod.outcomes(ReceiptKind.DROP) == []
    for name in "abc":
        assert resumes(pod, name) == "resumed_disk"


def test_case_27_an_unknown_reading_after_a_capture_evicts_nobody_and_hands_the_fresh_one_to_disk(pod: Pod) -> None:
    park(pod, "a")
    running = pod.begin("b", prompt("b", 15))
    running.match()
    pod.sampler.available_bytes = None
    running.compute()
    running.finish()
    pod.settle()
    assert pod.outcomes(ReceiptKind.EVICT) == [("written", "unknown_reading")]
    assert evicted(pod) == ["b"]
    assert pod.described("a")["ram_blocks"] == 15


def test_g11_a_grant_says_estimate_and_actual(pod: Pod) -> None:
    park(pod, "a")
    (admit,) = pod.all_receipts(ReceiptKind.ADMIT)
    (parked,) = pod.all_receipts(ReceiptKind.PARK)
    extents = 2 * pod.geometry.pod_extent_bytes
    assert (admit.need_bytes, admit.estimate_bytes) == (extents, extents)
    assert (parked.outcome, parked.estimate_bytes, parked.actual_bytes) == ("committed", extents, extents)
    assert admit.reading_before is not None


def test_g14_parking_off_streams_everything_and_asks_no_gate(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=0) as pod:
        park(pod, "a")
        assert pod.all_receipts(ReceiptKind.REFUSE) == []
        assert resumes(pod, "a") == "resumed_disk"


@pytest.mark.parametrize("reason", ["budget", "low_memory", "unknown_reading", "back_off"])
def test_case_68_whatever_refuses_ram_the_conversation_is_on_disk_and_resumes(pod: Pod, reason: str) -> None:
    park(pod, "a", "b", "c", "d")
    turned = pod.turn("x", prompt("x", 1))
    if reason == "budget":
        for name in "abcdx":
            if pod.owner.describe(ConversationId(name)) is not None:
                pod.owner.pin(ConversationId(name), pinned=True)
    elif reason == "low_memory":
        pod.sampler.available_bytes = 0
    elif reason == "unknown_reading":
        pod.sampler.available_bytes = None
    else:
        pod.owner.admission._back_off.limits_are(
            (pod.policy.current.memory.floor, pod.policy.current.memory.parked.max, pod.sampler.limits_bytes())
        )
        for _ in range(3):
            pod.owner.admission._back_off.refused(NeedKind.PARK)
    longer = pod.turn("x", [*turned.tokens, *prompt("x2", 30)])
    assert longer.receipt.detail is not None
    assert longer.receipt.detail["park_refusal"] == reason
    pod.settle()
    assert pod.described("x")["disk_blocks"] >= 30
    pod.owner.admission._back_off.succeeded(NeedKind.PARK)
    assert pod.turn("x", longer.tokens).reused == len(longer.tokens)
    assert pod.outcomes(ReceiptKind.DROP) == []
    pod.settle()
    pod.check()


def test_case_70_two_requests_at_the_same_reading_with_room_for_one(pod: Pod) -> None:
    room = 3 * pod.geometry.pod_extent_bytes
    pod.sampler.on_sample = lambda: setattr(pod.sampler, "available_bytes", room - pod.arena.committed_bytes)
    running = [pod.begin(name, prompt(name, 15)) for name in "ab"]
    for one in running:
        one.match()
        one.compute()
    assert [one.turn.ram_refused for one in running] == ["", "low_memory"]
    for one in running:
        one.finish()
    pod.settle()
    pod.sampler.on_sample = None
    pod.sampler.available_bytes = 64 << 30
    assert resumes(pod, "a") == "resumed_ram"
    assert resumes(pod, "b") == "resumed_disk"


def test_g15_bytes_admitted_and_not_yet_committed_come_off_the_next_reading(pod: Pod) -> None:
    pod.fs.held.clear()
    pod.mover._memory_lane.submit(lambda: pod.fs.held.wait(20))
    room = 3 * pod.geometry.pod_extent_bytes
    reserved: list[int] = []

    def sampled() -> None:
        reserved.append(pod.state.slots.reserved_bytes())
        pod.sampler.available_bytes = room - pod.arena.committed_bytes

    pod.sampler.on_sample = sampled
    running = [pod.begin(name, prompt(name, 15)) for name in "ab"]
    pod.until(lambda: not running[0].turn.admission_pending, "the first is decided")
    pod.until(lambda: len(pod.state.wishes) == 0, "the second is being decided")
    assert pod.state.slots.reserved_bytes() == 2 * pod.geometry.pod_extent_bytes
    pod.until(lambda: reserved[-1] > 0, "the second has read")
    pod.fs.held.set()
    for one in running:
        one.match()
        one.compute()
    assert [one.turn.ram_refused for one in running] == ["", "low_memory"]
    for one in running:
        one.finish()


def test_case_71_a_background_queue_does_not_delay_a_write_out(pod: Pod) -> None:
    park(pod, "a")
    pod.fs.held.clear()
    for _ in range(20):
        pod.mover._write_lane.submit(lambda: pod.fs.held.wait(20))
    assert pod.evict("a")
    assert pod.outcomes(ReceiptKind.EVICT, "a") == [("written", "gate")]
    pod.fs.held.set()


def test_case_67_a_new_floor_counts_from_the_next_reading_and_leaves_a_receipt(pod: Pod) -> None:
    park(pod, "a")
    pod.sampler.available_bytes = 100 << 20
    document = pod.policy.current.to_json()
    document["memory"]["floor"] = 200 << 20
    pod.policy.replace(parse_policy(document))
    pod.until(lambda: bool(pod.all_receipts(ReceiptKind.POLICY)), "the change is applied")
    (receipt,) = pod.all_receipts(ReceiptKind.POLICY)
    assert receipt.floor_bytes == 200 << 20
    assert receipt.detail is not None
    assert (receipt.detail["old"], receipt.detail["new"]) == (
        {"limit": None, "floor": 0, "parked_max": EIGHT_EXTENTS},
        {"limit": None, "floor": 200 << 20, "parked_max": EIGHT_EXTENTS},
    )
    assert receipt.released_bytes is not None
    assert pod.outcomes(ReceiptKind.EVICT, "a") == [("written", "pressure")]
    pod.turn("b", prompt("b", 15))
    assert ("refused", "low_memory") in pod.outcomes(ReceiptKind.REFUSE, "b")


def test_a_slow_gate_does_not_hold_up_a_request(pod: Pod) -> None:
    """Trap 4: the answer is awaited for a bounded time; what it is late for is streamed."""
    pod.admission_patience_s = 0.0
    pod.fs.held.clear()
    pod.sampler.on_sample = lambda: pod.fs.held.wait(20)
    running = pod.begin("a", prompt("a", 5))
    running.match()
    running.compute()
    pod.fs.held.set()
    pod.sampler.on_sample = None
    running.finish()
    pod.settle()
    assert pod.described("a")["disk_blocks"] == 5


def test_extents_that_could_not_be_committed_are_given_back_and_the_turn_goes_to_disk(pod: Pod) -> None:
    commit = pod.arena.commit

    def fails(extent: int) -> None:
        raise MemoryError("simulated")

    pod.arena.commit = fails  # type: ignore[method-assign]
    running = pod.begin("a", prompt("a", 15))
    pod.until(lambda: running.turn.ram_refused == "commit_failed", "the failed commit is known")
    running.match()
    running.compute()
    running.finish()
    pod.arena.commit = commit  # type: ignore[method-assign]
    pod.settle()
    assert pod.all_receipts(ReceiptKind.PARK)[0].outcome == "commit_failed"
    pod.until(lambda: pod.state.slots.held_extents == 0, "nothing is held for it")
    assert resumes(pod, "a") == "resumed_disk"
    pod.settle()
    pod.check()


def test_empty_extents_go_back_to_the_kernel_once_the_pod_is_idle(pod: Pod) -> None:
    park(pod, "a", "b")
    pod.evict("a")
    pod.evict("b")
    pod.until(lambda: pod.arena.committed_bytes == 0, "all memory is released")
    assert pod.state.slots.held_extents == 0
    assert pod.geometry.slots_per_extent == EXTENT_BLOCKS
