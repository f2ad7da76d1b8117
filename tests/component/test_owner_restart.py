"""Ends and starts: what a drain writes, what a SIGKILL leaves, and what the next life serves."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.pod import BLOCK_BYTES, BLOCK_TOKENS, EIGHT_EXTENTS, Pod, prompt

from parkade_cache.ids import ConversationId
from parkade_cache.mover import SlotBlock, WrittenEntry
from parkade_cache.recall import Recall
from parkade_cache.receipts import ReceiptKind
from parkade_cache.spill import PackWriter, RecoveredPack

MORE = list(range(9 * BLOCK_TOKENS))


Life = Callable[..., Pod]


@pytest.fixture
def life(tmp_path: Path):
    """Starts one life of the pod after the other over the same folder."""
    lives: list[Pod] = []

    def begin(**settings: Any) -> Pod:
        lives.append(Pod(folder=tmp_path / "spill", **{"parked_max": EIGHT_EXTENTS} | settings))
        return lives[-1]

    yield begin
    for pod in lives:
        pod.__exit__()


def test_s1_a_drain_writes_everything_newest_first_and_the_next_life_serves_it(life: Life) -> None:
    pod = life()
    for name in "abc":
        pod.turn(name, prompt(name, 15, shared=4))
    pod.settle()
    result = pod.owner.drain(grace_s=10)
    assert (result["outcomes"], result["dropped"]) == ({"written": 3}, 0)
    spilled = [receipt.conversation for receipt in pod.all_receipts(ReceiptKind.SPILL)]
    assert spilled == ["c", "b", "a"]
    (receipt,) = pod.all_receipts(ReceiptKind.DRAIN)
    assert (receipt.outcome, receipt.written_out, receipt.dropped) == ("done", 3, 0)
    assert not pod.owner.ready
    pod.stop()
    pod = life()
    for name in "abc":
        turned = pod.turn(name, [*prompt(name, 15, shared=4), *MORE])
        assert turned.reused == 15 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_s1_what_the_grace_is_too_short_for_is_counted_once_each(life: Life) -> None:
    pod = life()
    for name in "ab":
        pod.turn(name, prompt(name, 15))
    pod.settle()
    result = pod.owner.drain(grace_s=0.0)
    assert (result["outcomes"], result["dropped"]) == ({"deadline": 2}, 2)
    again = pod.owner.drain(grace_s=0.0)
    assert again["dropped"] == 2
    assert pod.outcomes(ReceiptKind.DROP) == [("dropped", "deadline")] * 2
    assert pod.all_receipts(ReceiptKind.DRAIN)[0].outcome == "incomplete"


def test_s1_a_running_turn_may_end_and_is_written_too(life: Life) -> None:
    pod = life()
    running = pod.begin("a", prompt("a", 15))
    running.match()
    finisher = threading.Timer(0.2, lambda: (running.compute(), running.finish()))
    finisher.start()
    result = pod.owner.drain(grace_s=10)
    finisher.join()
    assert result["outcomes"] == {"written": 1}


def test_s1_a_turn_that_does_not_end_leaves_time_to_write_the_others(life: Life) -> None:
    pod = life()
    pod.turn("a", prompt("a", 15))
    hanging = pod.begin("b", prompt("b", 15))
    hanging.match()
    result = pod.owner.drain(grace_s=1.0)
    assert result["outcomes"]["written"] == 1
    assert pod.described("a")["disk_blocks"] == 15
    hanging.finish()


def test_s1_without_a_disk_tier_a_drain_says_what_is_lost() -> None:
    with Pod(folder=None, parked_max=EIGHT_EXTENTS) as pod:
        pod.turn("a", prompt("a", 15))
        pod.settle()
        result = pod.owner.drain(grace_s=1.0)
        assert (result["outcomes"], result["dropped"]) == ({"tier_off": 1}, 1)
        assert pod.outcomes(ReceiptKind.DROP) == [("dropped", "tier_off")]


def test_trap_1_a_mover_that_leaves_gets_its_ram_written_out(life: Life) -> None:
    pod = life()
    pod.turn("a", prompt("a", 15))
    pod.settle()
    pod.owner.leaving(5.0)
    assert pod.described("a")["disk_blocks"] == 15


def test_s2_after_a_kill_what_was_published_is_served_and_nothing_else(life: Life) -> None:
    pod = life()
    pod.turn("a", prompt("a", 15))
    pod.settle()
    pod.evict("a")
    pod.turn("b", prompt("b", 15))
    pod.settle()
    pod.kill()
    pod = life()
    assert pod.turn("a", [*prompt("a", 15), *MORE]).reused == 15 * BLOCK_TOKENS
    assert pod.turn("b", prompt("b", 15)).reused == 0
    pod.settle()
    pod.check()


@pytest.mark.parametrize("seed", range(6))
def test_s2_a_kill_at_any_moment_loses_nothing_published_and_serves_nothing_wrong(life: Life, seed: int) -> None:
    """Streams, write-outs and evictions run while the files stop changing; every served block's bytes are checked."""
    chance = random.Random(seed)
    spill = {"writeBehindIdleSeconds": 0}
    pod = life(mode="WriteBehind", spill=spill, size=200 * BLOCK_BYTES)
    tokens = {name: prompt(name, 6, shared=3) for name in "abcd"}
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            name = chance.choice("abcd")
            if len(tokens[name]) > 60 * BLOCK_TOKENS:
                tokens[name] = prompt(f"{name} {chance.random()}", 6, shared=3)
            tokens[name] = [*pod.turn(name, tokens[name]).tokens, *prompt(str(chance.random()), chance.randint(1, 12))]

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.1 + 0.3 * chance.random())
    # From here on no file changes; what the dead process still believes does not matter.
    with pod.state.lock:
        ledger = pod.state.ledger
        published = {key for key, row in ledger.rows.items() if ledger.disk[row] == 2}
        pod.fs.dead = True
    stop.set()
    worker.join(20)
    pod.kill()
    pod = life(mode="OnEvict", size=200 * BLOCK_BYTES)
    ledger = pod.state.ledger
    missing = [key for key in published if ledger.find(key) < 0 or ledger.disk[ledger.find(key)] != 2]
    assert not missing, f"{len(missing)} of {len(published)} published blocks are gone"
    for name, known in tokens.items():
        pod.turn(name, known)  # Checks the bytes of every block it loads.
    pod.settle()
    pod.check()


def test_s2_a_pack_of_a_write_that_was_killed_is_cleaned_up(life: Life) -> None:
    pod = life(parked_max=0)
    running = pod.begin("a", prompt("a", 20))
    running.match()
    running.store_computed(0, 10)
    pod.until(lambda: bool(pod.temporaries()), "the pack is being written")
    pod.kill()
    pod = life(parked_max=0)
    pod.until(lambda: not pod.temporaries(), "it is removed")
    assert pod.packs() == []
    assert pod.turn("a", prompt("a", 20)).reused == 0


def test_s3_a_request_during_recovery_finds_what_is_indexed_and_does_not_wait(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = life()
    for name in "abc":
        pod.turn(name, prompt(name, 15))
        pod.settle()
        pod.evict(name)
    pod.stop()
    go = threading.Event()
    enter = Recall._enter_pack

    def slowly(self: Recall, recovered: RecoveredPack) -> int:
        entered = enter(self, recovered)
        go.wait(20)
        return entered

    monkeypatch.setattr(Recall, "_enter_pack", slowly)
    monkeypatch.setattr(Pod, "settle_recovery", lambda self: None)
    pod = life()
    pod.until(lambda: pod.state.ledger.disk_blocks == 15, "the newest pack is indexed")
    newest = pod.turn("c", [*prompt("c", 15), *MORE])
    assert newest.reused == 15 * BLOCK_TOKENS
    assert pod.turn("a", prompt("a", 15)).reused == 0
    go.set()
    pod.until(lambda: not pod.state.recovering, "recovery ended")
    pod.settle()
    assert pod.turn("b", prompt("b", 15)).reused == 15 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_s3_no_block_goes_because_its_conversation_is_not_known_yet(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that a short request held and let go during recovery was taken for one that nobody needs."""
    pod = life()
    pod.turn("a", prompt("a", 15))
    pod.settle()
    pod.evict("a")
    pod.stop()
    go = threading.Event()
    give = Recall._give_conversations
    monkeypatch.setattr(Recall, "_give_conversations", lambda self: (go.wait(20), give(self))[1])
    monkeypatch.setattr(Pod, "settle_recovery", lambda self: None)
    pod = life()
    pod.until(lambda: pod.state.ledger.disk_blocks == 15, "the pack is indexed")
    running = pod.begin("side", prompt("a", 15))
    running.match()
    running.finish()
    pod.owner.forget(ConversationId("side"))
    pod.owner.tick()
    go.set()
    pod.until(lambda: not pod.state.recovering, "recovery ended")
    assert pod.turn("a", prompt("a", 15)).reused == 15 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_case_72_a_conversation_first_seen_after_a_restart_gets_the_shared_prefix_from_disk(life: Life) -> None:
    pod = life()
    pod.turn("a", prompt("a", 15, shared=8))
    pod.settle()
    pod.stop()
    pod = life()
    new = pod.turn("new", prompt("new", 15, shared=8))
    assert new.receipt.reused_disk_tokens == 8 * BLOCK_TOKENS


def test_tips_and_branches_come_back_as_they_were(life: Life) -> None:
    pod = life()
    main = pod.turn("a", prompt("a", 20, shared=5))
    pod.turn("a", prompt("title", 8, shared=5))
    pod.settle()
    tips = sorted(tip.tokens for tip in pod.conversation("a").tips)
    pod.stop()
    pod = life()
    assert sorted(tip.tokens for tip in pod.conversation("a").tips) == tips
    assert pod.turn("a", [*main.tokens, *MORE]).reused == len(main.tokens)
    pod.settle()
    pod.check()


def test_d6_the_order_of_last_use_survives_a_restart(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = life()
    for name in "abc":
        pod.turn(name, prompt(name, 15))
        pod.settle()
        pod.evict(name)
    pod.turn("a", [*prompt("a", 15), *MORE])
    pod.settle()
    pod.stop()
    pod = life()
    order = [str(conversation.id) for conversation in pod.state.conversations]
    assert order == ["b", "c", "a"]


def test_a_crash_forgets_at_most_a_few_seconds_of_that_order(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parkade_cache.owner.TOUCH_INTERVAL_S", 0.0)
    pod = life()
    for name in "ab":
        pod.turn(name, prompt(name, 15))
        pod.settle()
        pod.evict(name)
    pod.turn("a", prompt("a", 15))
    pod.until(lambda: not pod.state.touched, "the use is noted")
    pod.owner.tick()
    pod.kill()
    pod = life()
    assert [str(conversation.id) for conversation in pod.state.conversations] == ["b", "a"]


def test_case_45_and_46_a_smaller_capacity_lets_the_oldest_go_at_the_start_and_the_shared_prefix_stays(
    life: Life,
) -> None:
    pod = life()
    for name in "ab":
        pod.turn(name, prompt(name, 20, shared=8))
        pod.settle()
        pod.evict(name)
    pod.stop()
    pod = life(size=33 * BLOCK_BYTES)
    pod.until(lambda: bool(pod.all_receipts(ReceiptKind.RECOVER)), "the start is over")
    assert [str(r.conversation) for r in pod.all_receipts(ReceiptKind.EVICT)] == ["a"]
    assert pod.turn("b", prompt("b", 20, shared=8)).reused == 20 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_another_model_s_packs_are_never_found(life: Life) -> None:
    pod = life()
    pod.turn("a", prompt("a", 15))
    pod.settle()
    pod.stop()
    pod = life(model="another")
    assert pod.turn("a", prompt("a", 15)).reused == 0


def test_a_recovered_conversation_can_be_forgotten(life: Life) -> None:
    pod = life()
    pod.turn("a", prompt("a", 15))
    pod.settle()
    pod.stop()
    pod = life()
    pod.owner.forget(ConversationId("a"))
    assert pod.packs() == []
    pod.check()


def test_two_ranks_keep_a_share_of_every_block_and_one_index(life: Life) -> None:
    """The ranks' answers were published in the order in which they came, which the store refuses."""
    pod = life(ranks=2)
    parked = pod.turn("parked", prompt("parked", 15, shared=4))
    streamed = pod.turn("streamed", prompt("streamed", 170, shared=4))
    pod.settle()
    assert streamed.receipt.detail is not None
    assert streamed.receipt.detail["park_refusal"] == "over_budget"
    pod.evict("parked")
    assert len(pod.packs()) == 4
    assert pod.turn("parked", [*parked.tokens, *MORE]).reused == 15 * BLOCK_TOKENS
    pod.settle()
    pod.check()
    pod.stop()
    pod = life(ranks=2)
    assert pod.turn("streamed", streamed.tokens).reused == 170 * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_a_pack_that_one_rank_could_not_write_is_no_pack(life: Life) -> None:
    pod = life(ranks=2)
    pod.turn("a", prompt("a", 15))
    pod.settle()
    append = pod.movers[1]._append_slots

    def fails(writer: PackWriter, unit: Sequence[SlotBlock]) -> list[WrittenEntry]:
        append(writer, unit)
        raise OSError(5, "simulated")

    pod.movers[1]._append_slots = fails  # type: ignore[method-assign]
    pod.evict("a")
    assert pod.outcomes(ReceiptKind.EVICT) == [("failed", "gate")]
    assert pod.outcomes(ReceiptKind.DROP) == [("dropped", "failed")]
    assert pod.packs() == []
    pod.check()
