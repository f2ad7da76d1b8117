"""Pressure, changed limits and policies over a real ledger, mover and files: nothing is lost, and it counts at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.pod import BLOCK_BYTES, BLOCK_TOKENS, EIGHT_EXTENTS, EXTENT_BLOCKS, Pod, prompt

from parkade_cache.errors import PolicyError
from parkade_cache.heaps import OwnHeap
from parkade_cache.ids import ConversationId
from parkade_cache.live_policy import RETRY_S, PolicyFile
from parkade_cache.memory.pressure import Pressure, PressureLevel, PressureSampler, PressureScope, Stall
from parkade_cache.receipts import Receipt, ReceiptKind

EXTENT_BYTES = EXTENT_BLOCKS * BLOCK_BYTES
FLOOR = 4 * EXTENT_BYTES


@dataclass
class Host:
    """A host whose memory the pod's parked extents take, beside a neighbour that a test lets grow."""

    pod: Pod
    limit: int
    neighbour: int = 0

    def __post_init__(self) -> None:
        self.pod.sampler.on_sample = self.measure

    def measure(self) -> None:
        used = self.neighbour + sum(mover.arena.committed_bytes for mover in self.pod.movers)
        self.pod.sampler.limits = (self.limit,)
        self.pod.sampler.used_bytes = used
        self.pod.sampler.available_bytes = max(0, self.limit - used)

    @property
    def available(self) -> int:
        self.measure()
        found = self.pod.sampler.available_bytes
        assert found is not None
        return found


class SetPressure(PressureSampler):
    """Stalls that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Pressure | None = None

    def sample(self) -> Pressure | None:
        return self.now


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, floor=FLOOR) as pod:
        yield pod


@pytest.fixture
def host(pod: Pod) -> Host:
    return Host(pod, limit=FLOOR + EIGHT_EXTENTS)


def park(pod: Pod, *names: str, blocks: int = 15) -> None:
    for name in names:
        pod.turn(name, prompt(name, blocks))
    pod.settle()


def resumes(pod: Pod, *names: str, blocks: int = 15) -> None:
    for name in names:
        assert pod.turn(name, prompt(name, blocks)).reused == blocks * BLOCK_TOKENS, name


def watch(pod: Pod) -> None:
    """One look, and what it made the gate do."""
    pod.owner.watcher.watch()
    pod.until(lambda: pod.owner.watcher._strain is None, "the gate has taken it up")
    pod.settle()


def document(pod: Pod, **memory: Any) -> dict[str, Any]:
    found = pod.policy.current.to_json()
    parked = memory.pop("parked_max", None)
    found["memory"] |= memory
    if parked is not None:
        found["memory"]["parked"]["max"] = parked
    return found


def await_idle_release(pod: Pod) -> None:
    pod.until(
        lambda: any(receipt.reason == "idle" for receipt in pod.all_receipts(ReceiptKind.RELEASE)),
        "the heaps were released while nothing ran",
    )


def the_last(pod: Pod, kind: ReceiptKind, outcome: str) -> Receipt:
    return [receipt for receipt in pod.all_receipts(kind) if receipt.outcome == outcome][-1]


def evicted(pod: Pod) -> list[str | None]:
    return [receipt.conversation for receipt in pod.all_receipts(ReceiptKind.EVICT)]


# -- pressure -----------------------------------------------------------------------------------------------


def test_case_60_at_warning_level_the_unwritten_are_written_out_then_released(pod: Pod, host: Host) -> None:
    park(pod, "a", "b")
    host.neighbour = host.limit - FLOOR - 4 * EXTENT_BYTES + EXTENT_BYTES // 2
    assert FLOOR // 2 < host.available < FLOOR
    watch(pod)
    assert host.available >= FLOOR
    assert evicted(pod) == ["a"]
    relieved = the_last(pod, ReceiptKind.RELEASE, "relieved")
    assert (relieved.reason, relieved.written_out, relieved.dropped) == ("warning", 1, 0)
    assert pod.state.pressure is PressureLevel.WARNING
    host.neighbour = 0
    resumes(pod, "a", "b")


def test_case_60_at_critical_level_the_deadline_is_shorter_and_losses_are_counted(pod: Pod, host: Host) -> None:
    park(pod, "a", "b")
    deadlines: list[float] = []
    disk = pod.owner.disk
    assert disk is not None
    write_out = disk.write_out

    def hung(conversation: Any, *, deadline: float) -> Any:
        deadlines.append(deadline - pod.state.clock.monotonic())
        return write_out(conversation, deadline=0.0)

    disk.write_out = hung  # type: ignore[method-assign]
    host.neighbour = host.limit - 4 * EXTENT_BYTES - FLOOR // 4
    watch(pod)
    assert all(seconds <= 5.0 for seconds in deadlines)
    assert sorted(map(str, evicted(pod))) == ["a", "b"]
    assert pod.outcomes(ReceiptKind.DROP, "a") == [("dropped", "deadline")]
    assert pod.state.totals.dropped_conversations == 2


def test_under_pressure_published_conversations_go_before_older_unwritten_ones(pod: Pod, host: Host) -> None:
    park(pod, "old", "written")
    disk = pod.owner.disk
    assert disk is not None
    disk.write_out(pod.conversation("written"), deadline=pod.state.clock.monotonic() + 10)
    pod.idle("old", 1000)
    host.neighbour = host.limit - FLOOR - 4 * EXTENT_BYTES + EXTENT_BYTES // 2
    watch(pod)
    assert evicted(pod) == ["written"]


def test_pressure_that_the_heaps_relieve_costs_no_conversation(pod: Pod, host: Host) -> None:
    """G3: a release precedes the reading that decides."""
    park(pod, "a", "b")
    host.neighbour = host.limit - FLOOR - 4 * EXTENT_BYTES + EXTENT_BYTES // 2
    ask = pod.mover.release_heap

    def release_heap(job: Any) -> None:
        host.neighbour = 0
        ask(job)

    pod.mover.release_heap = release_heap  # type: ignore[method-assign]
    watch(pod)
    assert evicted(pod) == []
    assert the_last(pod, ReceiptKind.RELEASE, "relieved").heaps


def test_one_relief_at_warning_level_takes_a_share_not_the_whole_cache(pod: Pod, host: Host) -> None:
    park(pod, "a", "b", "c", "d")
    host.limit = FLOOR + EIGHT_EXTENTS - 2 * EXTENT_BYTES  # never enough, whatever goes
    host.neighbour = 3 * EXTENT_BYTES
    host.limit = 8 * EXTENT_BYTES + host.neighbour + 3 * EXTENT_BYTES
    watch(pod)
    assert evicted(pod) == ["a"]
    assert pod.state.parked_conversations() == 3


def test_nothing_is_let_go_on_an_unknown_reading(pod: Pod) -> None:
    """G2, G7."""
    park(pod, "a")
    pod.sampler.available_bytes = 0
    pod.owner.watcher.watch()
    pod.settle()
    pod.sampler.available_bytes = None
    before = evicted(pod)
    watch(pod)
    assert evicted(pod) == before


def test_stalls_elsewhere_on_the_machine_release_heaps_and_nothing_else(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS) as pod:
        stalled = SetPressure()
        pod.owner.watcher._surroundings = type(pod.owner.watcher._surroundings)(pressure=stalled)
        park(pod, "a")
        await_idle_release(pod)
        pod.owner.admission._last_heap_release = float("-inf")
        stalled.now = Pressure(PressureScope.MACHINE, Stall(80.0, 0, 0, 0), Stall(80.0, 0, 0, 0))
        watch(pod)
        assert evicted(pod) == []
        assert the_last(pod, ReceiptKind.RELEASE, "released").reason == "stalls_elsewhere"


def test_the_groups_own_stalls_free_a_step_although_nothing_is_missing(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, floor=EXTENT_BYTES) as pod:
        host = Host(pod, limit=64 * EXTENT_BYTES)
        stalled = SetPressure()
        pod.owner.watcher._surroundings = type(pod.owner.watcher._surroundings)(pressure=stalled)
        park(pod, "a", "b", "c", "d")
        stalled.now = Pressure(PressureScope.GROUP, Stall(80.0, 0, 0, 0), Stall(80.0, 0, 0, 0))
        before = host.available
        watch(pod)
        assert host.available > before
        assert evicted(pod) == ["a"]


def test_a_limit_lowered_by_anybody_is_noticed_and_obeyed(pod: Pod, host: Host) -> None:
    """M11, W4: the kernel's limit, without a word to the pod."""
    park(pod, "a", "b", "c")
    pod.owner.watcher.watch()
    host.limit -= 5 * EXTENT_BYTES
    watch(pod)
    noticed = the_last(pod, ReceiptKind.RESIZE, "noticed")
    assert noticed.detail == {"old": [FLOOR + EIGHT_EXTENTS], "new": [FLOOR + EIGHT_EXTENTS - 5 * EXTENT_BYTES]}
    while host.available < FLOOR:
        pod.owner.watcher._relieved_at = float("-inf")
        watch(pod)
    assert pod.state.totals.dropped_conversations == 0
    host.limit += 5 * EXTENT_BYTES
    watch(pod)
    resumes(pod, "a", "b", "c")
    pod.settle()
    pod.check()


def test_relief_is_not_tried_again_at_once(pod: Pod, host: Host) -> None:
    park(pod, "a")
    host.neighbour = host.limit
    watch(pod)
    watch(pod)
    assert len([r for r in pod.all_receipts(ReceiptKind.RELEASE) if r.outcome in {"short", "relieved"}]) == 1


# -- limits that are announced ---------------------------------------------------------------------------------


def test_case_66_a_lowered_limit_is_met_before_it_counts(pod: Pod, host: Host) -> None:
    park(pod, "a", "b", "c")
    new_limit = FLOOR + 3 * EXTENT_BYTES
    answer = pod.owner.set_policy(document(pod, limit=new_limit, parked_max=4 * EXTENT_BYTES))
    assert (answer["applied"], answer["outcome"], answer["evicted"]) == (True, "applied", 2)
    assert answer["policy"]["memory"]["limit"] == new_limit
    assert host.available - (host.limit - new_limit) >= FLOOR
    confirmed = the_last(pod, ReceiptKind.RESIZE, "confirmed")
    assert (confirmed.written_out, confirmed.dropped, confirmed.floor_bytes) == (2, 0, FLOOR)
    assert pod.state.totals.dropped_conversations == 0
    resumes(pod, "c")
    pod.owner.set_policy(document(pod, limit=None, parked_max=EIGHT_EXTENTS))
    resumes(pod, "a", "b")


def test_case_66_a_limit_that_cannot_be_met_is_refused_and_lets_go_of_nothing(pod: Pod, host: Host) -> None:
    park(pod, "a", "b")
    running = pod.begin("a", prompt("a", 15))
    running.match()
    answer = pod.owner.set_policy(document(pod, limit=FLOOR + EXTENT_BYTES, parked_max=FLOOR))
    assert (answer["applied"], answer["outcome"]) == (False, "refused")
    assert "cannot be met now" in answer["reason"]
    assert answer["missing_bytes"] > 0
    assert answer["policy"]["memory"].get("limit") is None
    assert evicted(pod) == []
    assert pod.sampler.cap_bytes is None
    running.load()
    running.finish()
    pod.settle()
    assert pod.owner.set_policy(document(pod, limit=FLOOR + EXTENT_BYTES, parked_max=FLOOR))["applied"]
    del host


def test_a_lowered_limit_is_refused_while_memory_cannot_be_read(pod: Pod) -> None:
    park(pod, "a")
    pod.sampler.available_bytes = None
    answer = pod.owner.set_policy(document(pod, limit=FLOOR + EXTENT_BYTES, parked_max=FLOOR))
    assert not answer["applied"]
    assert "memory cannot be read" in answer["reason"]
    assert evicted(pod) == []


def test_case_67_a_raised_floor_is_met_at_once(pod: Pod, host: Host) -> None:
    park(pod, "a", "b", "c", "d")
    answer = pod.owner.set_policy(document(pod, floor=FLOOR + 2 * EXTENT_BYTES))
    assert (answer["outcome"], answer["evicted"]) == ("applied", 1)
    assert host.available >= FLOOR + 2 * EXTENT_BYTES
    applied = the_last(pod, ReceiptKind.POLICY, "applied")
    assert applied.detail is not None
    assert (applied.detail["old"]["floor"], applied.detail["new"]["floor"]) == (FLOOR, FLOOR + 2 * EXTENT_BYTES)
    resumes(pod, "b", "c", "d")


def test_a_lowered_parked_maximum_is_met_at_once(pod: Pod, host: Host) -> None:
    park(pod, "a", "b", "c", "d")
    assert pod.owner.set_policy(document(pod, parked_max=4 * EXTENT_BYTES))["outcome"] == "applied"
    assert pod.state.slots.held_bytes() <= 4 * EXTENT_BYTES
    assert evicted(pod) == ["a", "b"]
    pod.owner.set_policy(document(pod, parked_max=EIGHT_EXTENTS))
    resumes(pod, "a", "b", "c", "d")
    del host


def test_a_lowered_count_of_conversations_is_met_at_once(pod: Pod) -> None:
    park(pod, "a", "b", "c")
    changed = document(pod)
    changed["memory"]["parked"]["maxConversations"] = 1
    assert pod.owner.set_policy(changed)["outcome"] == "applied"
    assert evicted(pod) == ["a", "b"]


def test_what_is_in_use_stays_and_the_answer_says_so(pod: Pod) -> None:
    park(pod, "a")
    running = pod.begin("a", prompt("a", 15))
    running.match()
    answer = pod.owner.set_policy(document(pod, parked_max=EXTENT_BYTES))
    assert (answer["applied"], answer["outcome"], answer["reason"]) == (True, "applied_in_part", "budget")
    running.load()
    running.finish()
    pod.settle()
    watch(pod)
    assert pod.described("a")["ram_blocks"] == 0, "the next look makes the budget hold"
    assert the_last(pod, ReceiptKind.RELEASE, "relieved").reason == "budget"
    resumes(pod, "a")


def test_a_smaller_disk_gives_the_oldest_up_and_a_larger_one_counts_at_once(pod: Pod) -> None:
    park(pod, "a", "b", "c")
    disk = pod.owner.disk
    assert disk is not None
    for name in ("a", "b", "c"):
        pod.evict(name)
    usage = disk.usage()
    assert usage is not None
    changed = document(pod)
    changed["spill"]["size"] = usage.used_bytes * 3 // 4
    assert pod.owner.set_policy(changed)["applied"]
    pod.until(disk.fits, "what is over has gone")
    usage = disk.usage()
    assert usage is not None
    assert usage.used_bytes <= changed["spill"]["size"]
    assert pod.turn("a", prompt("a", 15)).reused == 0
    resumes(pod, "b", "c")


def test_an_hourly_write_budget_counts_at_once(pod: Pod) -> None:
    changed = document(pod)
    changed["spill"]["writeBudgetPerHour"] = 0
    pod.owner.set_policy(changed)
    park(pod, "a")
    pod.evict("a")
    assert pod.outcomes(ReceiptKind.EVICT, "a") == [("refused_budget", "gate")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": {"floor": "1x"}}, "memory.floor"),
        ({"memory": {"flor": 1}}, "there is no such key"),
        ({"memory": {"floor": "80Gi"}}, "must be below the limit"),
        ({"memory": {"parked": {"max": "80Gi"}}}, "must be below the limit"),
        ({"memory": {"parked": {"max": 5}}}, "below one block"),
        ({"spill": None}, "cannot be switched off"),
        ({"spill": {"size": 0}}, "greater than 0"),
    ],
)
def test_a_wrong_policy_is_refused_in_one_line_and_changes_nothing(pod: Pod, change: dict[str, Any], says: str) -> None:
    before = pod.policy.current
    wrong = document(pod)
    for section, values in change.items():
        wrong[section] = values if values is None else wrong[section] | values
    with pytest.raises(PolicyError, match=says) as refused:
        pod.owner.set_policy(wrong)
    assert "\n" not in str(refused.value)
    assert pod.policy.current is before
    assert the_last(pod, ReceiptKind.POLICY, "rejected").reason == str(refused.value)


def test_a_disk_cannot_be_added_while_the_pod_runs() -> None:
    with Pod(folder=None, parked_max=EIGHT_EXTENTS) as pod, pytest.raises(PolicyError, match="--spill-dir"):
        pod.owner.set_policy(document(pod) | {"spill": {"size": "1Gi"}})


# -- a policy file ---------------------------------------------------------------------------------------------


def follow(pod: Pod, file: PolicyFile, now: float = 0.0) -> None:
    """One look at the file; the answer to what it sent is in afterwards."""
    file.follow(pod.owner, pod.policy.current, now)
    if file._order is not None:
        assert file._order.done.wait(20)


def replace_file(path: Path, text: str) -> None:
    """As a mounted ConfigMap changes: another file takes the name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_a_changed_file_counts_and_the_last_good_policy_stays_when_it_is_wrong(pod: Pod, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(document(pod)))
    file = PolicyFile(path, over={"memory": {"parked": {"max": EIGHT_EXTENTS}}})
    follow(pod, file)
    assert pod.all_receipts(ReceiptKind.POLICY) == []
    replace_file(path, json.dumps(document(pod, floor=2 * FLOOR, parked_max=EXTENT_BYTES)))
    follow(pod, file)
    memory = pod.policy.current.memory
    assert (memory.floor, memory.parked.max) == (2 * FLOOR, EIGHT_EXTENTS), "what the flags say stays"
    for wrong in ("{", "[]", json.dumps(document(pod) | {"colour": "blue"}), "[" * 100_000):
        replace_file(path, wrong)
        follow(pod, file)
        assert pod.policy.current.memory is memory
        assert the_last(pod, ReceiptKind.POLICY, "rejected").detail == {"origin": str(path)}
    rejected = len(pod.all_receipts(ReceiptKind.POLICY))
    path.unlink()
    follow(pod, file)
    assert len(pod.all_receipts(ReceiptKind.POLICY)) == rejected, "a file that is gone changes nothing"


def test_a_file_that_cannot_be_met_yet_is_tried_again(pod: Pod, host: Host, tmp_path: Path) -> None:
    park(pod, "a")
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(document(pod)))
    file = PolicyFile(path)
    running = pod.begin("a", prompt("a", 15))
    running.match()
    replace_file(path, json.dumps(document(pod, limit=FLOOR + EXTENT_BYTES, parked_max=FLOOR)))
    follow(pod, file, now=10.0)
    assert pod.policy.current.memory.limit is None
    running.load()
    running.finish()
    pod.settle()
    follow(pod, file, now=10.1)
    assert pod.policy.current.memory.limit is None
    follow(pod, file, now=10.2 + RETRY_S)
    assert pod.policy.current.memory.limit == FLOOR + EXTENT_BYTES
    del host


def test_an_unreadable_or_huge_file_is_reported(pod: Pod, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text("{}")
    file = PolicyFile(path)
    with path.open("r+b") as grown:
        os.truncate(grown.fileno(), 2 << 20)
    follow(pod, file)
    assert "is larger than" in the_last(pod, ReceiptKind.POLICY, "rejected").reason


# -- requests while nothing is left to give ------------------------------------------------------------------------


def test_case_61_a_request_whose_own_state_is_unwritten_is_asked_to_retry_and_then_admitted(
    pod: Pod, host: Host
) -> None:
    park(pod, "a", "b")
    told: list[bool] = []
    watcher = pod.owner.watcher
    watcher._surroundings = type(watcher._surroundings)(pressure=SetPressure(), overloaded=told.append)
    assert watcher.may_arrive(ConversationId("a")) == {"admit": True}
    pod.conversation("a").pinned = True
    host.neighbour = host.limit
    watch(pod)
    pod.owner.watcher.watch()
    assert told == [True]
    pod.fs.held.clear()
    pod.mover._urgent_lane.submit(lambda: pod.fs.held.wait(20))
    answer = watcher.may_arrive(ConversationId("a"))
    assert (answer["admit"], answer["retry_after_s"] > 0) == (False, True)
    assert not watcher.may_arrive(ConversationId("a"))["admit"], "its write is still under way"
    pod.fs.held.set()
    pod.until(lambda: watcher.may_arrive(ConversationId("a")) == {"admit": True}, "its write is done")
    assert watcher.may_arrive(ConversationId("never seen")) == {"admit": True}
    refused = the_last(pod, ReceiptKind.REFUSE, "retry_later")
    assert (refused.conversation, refused.reason) == ("a", "own_state_unwritten")


def test_case_61_a_disk_that_cannot_take_it_refuses_nobody(pod: Pod, host: Host) -> None:
    park(pod, "a")
    watcher = pod.owner.watcher
    pod.conversation("a").pinned = True
    host.neighbour = host.limit
    watch(pod)
    pod.owner.watcher.watch()
    changed = document(pod)
    changed["spill"]["writeBudgetPerHour"] = 0
    pod.owner.set_policy(changed)
    pod.until(
        lambda: watcher.may_arrive(ConversationId("a")) == {"admit": True}, "the write was refused, so it may come"
    )


# -- the asker's own conversation ------------------------------------------------------------------------------------


def test_w5_only_chains_that_the_request_has_no_use_for_may_go_of_its_own_conversation(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=4 * EXTENT_BYTES) as pod:
        park(pod, "a", blocks=15)
        pod.turn("a", prompt("another chain", 15))
        pod.settle()
        assert [tip.in_ram for tip in pod.conversation("a").tips] == [True, True]
        turned = pod.turn("a", prompt("another chain", 25))
        assert turned.reused == 15 * BLOCK_TOKENS
        pod.settle()
        (own,) = [r for r in pod.all_receipts(ReceiptKind.EVICT) if r.reason == "own_conversation"]
        assert (own.conversation, own.outcome, own.blocks) == ("a", "written", 15)
        (admit,) = [r for r in pod.all_receipts(ReceiptKind.ADMIT) if r.own_conversation_written_out]
        assert admit.dropped == 0
        assert pod.turn("a", prompt("a", 15)).reused == 15 * BLOCK_TOKENS, "it is on disk"
        pod.settle()
        pod.check()


def test_w5_nothing_of_a_conversation_with_another_request_in_flight_goes(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=4 * EXTENT_BYTES) as pod:
        park(pod, "a", blocks=15)
        pod.turn("a", prompt("another chain", 15))
        pod.settle()
        other = pod.begin("a", prompt("a", 15))
        other.match()
        pod.turn("a", prompt("another chain", 30))
        assert [r for r in pod.all_receipts(ReceiptKind.EVICT) if r.conversation == "a"] == []
        other.load()
        other.finish()
        pod.settle()
        resumes(pod, "a")


# -- heaps -----------------------------------------------------------------------------------------------------------


def test_every_processs_heap_release_is_in_the_receipt_and_the_metrics(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS) as pod:
        admission = pod.owner.admission
        admission._heaps = OwnHeap("engine-core")
        admission.release_heaps("idle")
        (receipt,) = [r for r in pod.all_receipts(ReceiptKind.RELEASE) if r.reason == "idle"]
        assert receipt.heaps is not None
        assert {heap.process for heap in receipt.heaps} == {"engine-core", "worker"}
        assert all(heap.allocator == "glibc" and heap.trim_seconds >= 0 for heap in receipt.heaps)
        for process in ("engine-core", "worker"):
            labels = {"process": process, "allocator": "glibc"}
            assert pod.state.metrics.registry.get_sample_value("parkade_trim_seconds_count", labels) == 1
        admission.release_heaps("idle")
        assert len([r for r in pod.all_receipts(ReceiptKind.RELEASE) if r.reason == "idle"]) == 1, "the rate limit"


def test_an_idle_pod_releases_its_heaps_off_the_request_path(pod: Pod) -> None:
    park(pod, "a")
    await_idle_release(pod)


def test_case_66_a_limit_is_refused_rather_than_met_by_losing_a_conversation(pod: Pod, host: Host) -> None:
    """ADR 7: the write-outs do not succeed in time, and the limit is not in force yet."""
    park(pod, "a", "b", "c")
    changed = document(pod)
    changed["spill"]["writeBudgetPerHour"] = 0
    pod.owner.set_policy(changed)
    answer = pod.owner.set_policy(document(pod, limit=FLOOR + 2 * EXTENT_BYTES, parked_max=FLOOR))
    assert (answer["applied"], pod.state.totals.dropped_conversations, evicted(pod)) == (False, 0, [])
    resumes(pod, "a", "b", "c")
    del host


def test_a_later_policy_takes_the_place_of_one_that_has_not_begun(pod: Pod) -> None:
    pod.fs.held.clear()
    pod.sampler.on_sample = lambda: pod.fs.held.wait(20)
    pod.begin("a", prompt("a", 5))
    first = pod.owner.send_policy(document(pod, floor=2 * FLOOR), "first")
    second = pod.owner.send_policy(document(pod, floor=3 * FLOOR), "second")
    assert first.result is not None
    assert not first.result.applied
    pod.fs.held.set()
    pod.sampler.on_sample = None
    assert second.done.wait(20)
    assert pod.policy.current.memory.floor == 3 * FLOOR


def test_a_file_that_was_refused_does_not_override_a_policy_that_came_later(
    pod: Pod, host: Host, tmp_path: Path
) -> None:
    park(pod, "a")
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(document(pod, limit=FLOOR + EXTENT_BYTES, parked_max=FLOOR)))
    file = PolicyFile(path)
    running = pod.begin("a", prompt("a", 15))
    running.match()
    follow(pod, file, now=10.0)
    running.load()
    running.finish()
    pod.settle()
    follow(pod, file, now=10.1)
    pod.owner.set_policy(document(pod, floor=2 * FLOOR))
    follow(pod, file, now=20.0)
    assert (pod.policy.current.memory.limit, pod.policy.current.memory.floor) == (None, 2 * FLOOR)
    del host


def test_w6_a_request_that_has_nothing_to_do_with_its_conversation_leaves_the_newest_state(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=4 * EXTENT_BYTES) as pod:
        park(pod, "a", blocks=30)
        pod.turn("a", prompt("write a title", 15))
        pod.settle()
        assert pod.described("a")["ram_blocks"] == 30
        assert pod.turn("a", prompt("a", 30)).receipt.outcome == "resumed_ram"


def test_extents_that_the_asker_is_going_to_use_are_not_given_back_for_it(pod: Pod, host: Host) -> None:
    """G15: its need has left them out already."""
    park(pod, "a")
    pod.owner.admission.release_empty = lambda **_: None  # type: ignore[method-assign]
    pod.evict("a")
    del pod.owner.admission.release_empty
    empty = pod.state.slots.empty_extents
    assert empty
    per = pod.geometry.slots_per_extent
    wanted = empty * per + per
    host.limit = FLOOR + empty * pod.geometry.pod_extent_bytes + pod.geometry.pod_extent_bytes // 2
    pod.turn("b", prompt("b", wanted - 1))
    pod.settle()
    assert host.available >= 0
    (decision,) = [
        r for r in pod.all_receipts() if r.conversation == "b" and r.kind in {ReceiptKind.ADMIT, ReceiptKind.REFUSE}
    ]
    assert decision.outcome == "refused", "half an extent is missing, and what it will use brings nothing"


def test_relief_that_brings_nothing_is_asked_for_less_and_less_often(pod: Pod, host: Host) -> None:
    park(pod, "a")
    pod.conversation("a").pinned = True
    host.neighbour = host.limit
    intervals = []
    for _ in range(7):
        pod.owner.watcher._relieved_at = float("-inf")
        watch(pod)
        intervals.append(pod.owner.watcher._interval_s)
    assert intervals[-1] == 30.0
    assert intervals == sorted(intervals)


def test_relief_whose_gain_is_taken_again_is_repeated_at_once(pod: Pod, host: Host) -> None:
    """W4: a neighbour that keeps growing must not reach the limit while relief waits for its interval."""
    park(pod, "a", "b", "c", "d")
    for _ in range(2):
        host.neighbour += host.available - FLOOR + EXTENT_BYTES
        watch(pod)
        assert host.available >= FLOOR
    assert len([r for r in pod.all_receipts(ReceiptKind.RELEASE) if r.outcome == "relieved"]) == 2
