"""Disks that fail under a whole pod without an engine: full, read-only, gone, hung, failing (D8; cases 34, 38, 47, 51).

The faults are the kernel's where it has them: small file systems that are filled, frozen, made read-only or taken away,
and libfiu for errors of single calls. What must stay true in all of them: no conversation that was published is lost,
what RAM has is served, the pod says what is wrong, and it goes back to the disk by itself.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import faulty_pod
from support.disks import KINDS, MIB, Disk, Ext4, must, run
from support.pod import BLOCK_BYTES, BLOCK_TOKENS, Pod, prompt

from parkade_cache.device import DeviceBlock
from parkade_cache.disk_tier import WriteTicket
from parkade_cache.errors import SpillError
from parkade_cache.ids import ConversationId
from parkade_cache.ledger import DiskState
from parkade_cache.receipts import ReceiptKind, ReceiptLog
from parkade_cache.spill import FileSystem, WriteOutcome
from parkade_cache.transfers import StoreJob, TransferDone
from parkade_cache.turns import Turn

MORE = list(range(9 * BLOCK_TOKENS))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod looks at a failed disk again after a moment, not after seconds."""
    monkeypatch.setattr("parkade_cache.owner.TICK_S", 0.02)
    monkeypatch.setattr("parkade_cache.disk_tier.PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("parkade_cache.disk_tier.RETRY_AFTER_FAILURE_S", 0.1)


@pytest.fixture(params=sorted(KINDS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    disk = KINDS[request.param](tmp_path)
    yield disk
    disk.close()


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Ext4]:
    disk = Ext4(tmp_path)
    yield disk
    disk.close()


Start = Callable[..., Pod]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts pods, and ends those that a test left running."""
    pods: list[Pod] = []

    def begin(folder: Path, **settings: Any) -> Pod:
        pods.append(Pod(folder=folder, **settings))
        return pods[-1]

    yield begin
    for pod in pods:
        pod.__exit__()


# -- what a pod says -----------------------------------------------------------------------------------------------


def condition(pod: Pod) -> tuple[str, str]:
    """Status and message of SpillHealthy."""
    found = {one["type"]: one for one in pod.owner.summary()["conditions"]}["SpillHealthy"]
    return found["status"], found["message"]


def errors(pod: Pod) -> float:
    """The metric ``spill_errors``, all operations together."""
    families = {family["name"]: family for family in pod.owner.export_metrics()}
    return sum(value for _, _, value in families["parkade_spill_errors"]["samples"])


def await_degraded(pod: Pod, *words: str) -> None:
    """The disk counts as failed, and the pod says so in its three places (D8)."""
    pod.until(lambda: not pod.state.spill_healthy, "the disk counts as failed")
    status, message = condition(pod)
    assert status == "False"
    assert any(word in message for word in words), message
    assert errors(pod) > 0
    said = [receipt for receipt in pod.all_receipts(ReceiptKind.SPILL) if receipt.outcome == "degraded"]
    assert said
    assert all(receipt.reason for receipt in said)


def await_healthy(pod: Pod) -> None:
    """The pod has gone back to the disk by itself, and says so."""
    pod.until(lambda: pod.state.spill_healthy and not pod.state.recovering, "the disk is used again")
    assert condition(pod) == ("True", "")
    assert ("disk_healthy", "") in pod.outcomes(ReceiptKind.RECOVER)


def settle(pod: Pod) -> None:
    """Nothing is under way, nor about to be: a stream that has ended is for a moment in nobody's list."""
    pod.settle()
    ledger = pod.state.ledger
    pod.until(lambda: all(ledger.disk[row] != DiskState.WRITING for row in ledger.rows.values()), "streams have ended")
    pod.settle()


def publish(pod: Pod, name: str, blocks: int = 15) -> list[int]:
    """A conversation that is on disk only; its tokens."""
    tokens = pod.turn(name, prompt(name, blocks)).tokens
    settle(pod)
    assert pod.evict(name)
    assert pod.outcomes(ReceiptKind.EVICT, name)[-1][0] in {"written", "already_on_disk"}
    return tokens


def park(pod: Pod, name: str, blocks: int = 15) -> list[int]:
    """A conversation that is in RAM only; its tokens."""
    tokens = pod.turn(name, prompt(name, blocks)).tokens
    settle(pod)
    return tokens


def order(pod: Pod, name: str, *, urgent: bool = False) -> WriteTicket:
    assert pod.owner.disk is not None
    ticket = pod.owner.disk.order_write(pod.conversation(name), urgent=urgent)
    assert isinstance(ticket, WriteTicket), ticket
    return ticket


def comes_from(pod: Pod, name: str, tokens: list[int]) -> str:
    """How the conversation's next turn has its prompt; bytes that came back are checked block by block."""
    turned = pod.turn(name, [*tokens, *MORE])
    settle(pod)
    return turned.receipt.outcome if turned.reused >= len(tokens) else f"{turned.reused} of {len(tokens)} tokens"


def evict(pod: Pod, name: str) -> str:
    """Let its RAM go; the outcome of its write-out."""
    assert pod.evict(name)
    return pod.outcomes(ReceiptKind.EVICT, name)[-1][0]


def hold(pod: Pod) -> threading.Event:
    """Writers of the pod wait until the event is set."""
    go = threading.Event()
    for lane in (pod.mover._write_lane, pod.mover._urgent_lane, pod.mover._stream_lane):
        lane.submit(lambda: go.wait(20))  # type: ignore[arg-type,return-value]
    return go


# -- no space ------------------------------------------------------------------------------------------------------


def test_d8_a_foreign_file_that_fills_the_disk_stops_write_behind_and_loses_nothing(disk: Disk, start: Start) -> None:
    """D8, case 38: nothing is evicted where it would not help, and what waits is written once there is space."""
    pod = start(disk.root, mode="WriteBehind", spill={"writeBehindIdleSeconds": 0})
    a = park(pod, "A")
    pod.until(lambda: pod.state.ledger.dirty_blocks == 0, "A is written")
    settle(pod)
    disk.fill()
    b = park(pod, "B", 30)
    counted = pod.state.metrics.write_out.labels(outcome="refused_free_space")._value
    pod.until(lambda: counted.get() > 0, "B is refused")
    pod.until(lambda: "no space" in pod.state.spill_reason, "the pod says so")
    assert comes_from(pod, "B", b) == "resumed_ram"
    assert comes_from(pod, "A", a) == "resumed_ram"
    assert pod.described("A")["disk_blocks"] == 15
    disk.make_space()
    for name in "AB":
        pod.conversation(name).retry_write_at = 0.0
    pod.until(lambda: pod.state.ledger.dirty_blocks == 0 and not pod.state.spill_reason, "all of it is written")
    settle(pod)
    assert {evict(pod, "A"), evict(pod, "B")} == {"already_on_disk"}
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert comes_from(pod, "B", b) == "resumed_disk"
    assert pod.state.totals.dropped_conversations == 0
    pod.check()


def test_d8_a_disk_that_fills_up_during_a_write_out(disk: Disk, start: Start) -> None:
    """Another process takes the space between the reservation and the write: case 34, case 38."""
    pod = start(disk.root)
    a = publish(pod, "A")
    b = park(pod, "B")
    c = park(pod, "C")
    go = hold(pod)
    ticket = order(pod, "B", urgent=True)
    disk.fill()
    go.set()
    assert ticket.done.wait(10)
    assert ticket.outcome is WriteOutcome.FAILED
    await_degraded(pod, "No space left", "full")
    assert pod.temporaries() == []
    assert comes_from(pod, "C", c) == "resumed_ram"
    assert evict(pod, "C") == "tier_off"
    disk.make_space()
    await_healthy(pod)
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert comes_from(pod, "B", b) == "resumed_ram"
    assert evict(pod, "B") == "written"
    assert comes_from(pod, "B", b) == "resumed_disk"
    pod.check()


def test_d8_a_disk_that_fills_up_during_a_stream(disk: Disk, start: Start) -> None:
    """Case 34: nothing of the stream is restorable, all that was published before is."""
    pod = start(disk.root, parked_max=0)
    a = park(pod, "A")
    running = pod.begin("A", [*a, *prompt("more", 60)])
    running.match()
    running.load()
    running.store_computed(15, 30)
    pod.until(lambda: not any(s.queue for s in pod.mover._streams.values()), "the first part is written")
    disk.fill()
    running.store_computed(30, 75)
    running.finish()
    settle(pod)
    await_degraded(pod, "No space left", "full")
    assert [drop.tier for drop in pod.all_receipts(ReceiptKind.DROP, "A")] == ["stream"]
    assert pod.temporaries() == []
    disk.make_space()
    await_healthy(pod)
    assert comes_from(pod, "A", a) == "resumed_disk"
    pod.check()


@pytest.mark.parametrize("room", [True, False], ids=["with room set aside", "without"])
def test_d8_a_disk_that_fills_up_before_the_index_commit(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Case 47: where the index cannot say that the complete pack is published, it is found without a restart."""
    if not room:
        monkeypatch.setattr("parkade_cache.spill.index.SpillIndex.keep_room", lambda _: None)
    pod = start(disk.root)
    a = publish(pod, "A")
    b = park(pod, "B")
    assert pod.owner.store is not None
    index = pod.owner.store._index
    commit = index.publish

    def full(*args: Any, **fields: Any) -> None:
        disk.fill()
        commit(*args, **fields)

    index.publish = full  # type: ignore[method-assign]
    ticket = order(pod, "B")
    assert ticket.done.wait(10)
    del index.publish
    if room:
        assert ticket.outcome is WriteOutcome.WRITTEN
    else:
        assert ticket.outcome is WriteOutcome.FAILED
        await_degraded(pod, "full", "disk I/O error")
        assert comes_from(pod, "B", b) == "resumed_ram"
    disk.make_space()
    pod.until(lambda: pod.state.spill_healthy and pod.described("B")["disk_blocks"] == 15, "B is found")
    settle(pod)
    assert len(pod.packs()) == 2
    assert evict(pod, "B") in {"written", "already_on_disk"}
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert comes_from(pod, "B", b) == "resumed_disk"
    pod.check()


def test_d6_on_a_full_disk_the_oldest_conversations_give_way_and_no_more_than_needed(disk: Disk, start: Start) -> None:
    """Marking blocks dead needed space in the index: none came back, and with every try further conversations went."""
    pod = start(disk.root)
    known = {name: publish(pod, name) for name in "ABCDEF"}
    disk.fill()
    known["G"] = park(pod, "G", 20)
    assert evict(pod, "G") == "written"
    gone = [receipt for receipt in pod.all_receipts(ReceiptKind.EVICT) if receipt.reason == "disk_capacity"]
    assert [receipt.conversation for receipt in gone] == ["A", "B"]
    assert all((receipt.bytes or 0) >= 15 * BLOCK_BYTES for receipt in gone)
    assert condition(pod)[0] == "True"
    disk.make_space()
    assert {comes_from(pod, name, known[name]) for name in "CDEFG"} == {"resumed_disk"}
    pod.check()


def test_d6_a_cache_that_fills_its_disk_itself_never_fails(disk: Disk, start: Start) -> None:
    """D2, D6: a capacity larger than the file system, and no floor."""
    pod = start(disk.root, parked_max=0)
    known = {f"turn {n}": park(pod, f"turn {n}", 120) for n in range(14)}
    evicted = [receipt.conversation for receipt in pod.all_receipts(ReceiptKind.EVICT)]
    assert evicted == list(known)[: len(evicted)]
    assert 0 < len(evicted) < 14
    assert errors(pod) == 0
    for name in list(known)[-3:]:
        assert comes_from(pod, name, known[name]) == "resumed_disk"
    pod.check()


def test_case_38_a_write_below_the_floor_is_refused_and_said_and_the_disk_still_read(disk: Disk, start: Start) -> None:
    """Another process takes the space down to the floor: no failure, so what is on disk is served (D8)."""
    pod = start(disk.root, spill={"minFree": "4Mi"})
    a = publish(pod, "A")
    packs = pod.packs()
    disk.fill(leave_bytes=3 * MIB)
    park(pod, "B", 30)
    assert evict(pod, "B") == "refused_free_space"
    assert pod.outcomes(ReceiptKind.DROP, "B") == [("dropped", "refused_free_space")]
    assert (pod.packs(), pod.temporaries()) == (packs, [])
    pod.until(lambda: "no space" in pod.state.spill_reason, "the pod says that there is no room")
    assert "free-space floor" in condition(pod)[1]
    assert errors(pod) == 1
    assert [outcome for outcome, _ in pod.outcomes(ReceiptKind.SPILL)] == ["written", "no_space"]
    assert comes_from(pod, "A", a) == "resumed_disk"
    disk.make_space()
    pod.until(lambda: not pod.state.spill_reason, "the pod says that there is room again")
    assert pod.outcomes(ReceiptKind.RECOVER)[-1] == ("space_again", "")
    c = publish(pod, "C", 30)
    assert comes_from(pod, "C", c) == "resumed_disk"
    pod.check()


def test_case_38_the_condition_is_false_while_writes_are_refused_for_space(tmp_path: Path, start: Start) -> None:
    """D8: a full disk shows in the condition, also while what is on it can be read."""
    pod = start(tmp_path / "spill", spill={"minFree": "1Pi"})
    park(pod, "A")
    assert evict(pod, "A") == "refused_free_space"
    pod.until(lambda: "no space" in pod.state.spill_reason, "the pod says that there is no room")
    assert condition(pod)[0] == "False"


# -- receipts ------------------------------------------------------------------------------------------------------


def keep_receipts(pod: Pod, folder: Path) -> ReceiptLog:
    """From now on the pod's receipts go to files as well."""
    pod.receipts = pod.state.receipts = ReceiptLog(folder=folder)
    return pod.receipts


def test_receipts_that_find_no_space_are_kept_in_memory_and_cost_no_turn(disk: Disk, start: Start) -> None:
    """Section 7: a broken disk costs the receipts' durability, which is counted, and nothing else."""
    pod = start(disk.root)
    log = keep_receipts(pod, disk.root / "receipts")
    disk.fill()
    names = [f"turn {n}" for n in range(40)]
    for name in names:
        assert pod.turn(name, prompt(name, 2)).receipt.outcome == "reread"
        assert pod.turn(name, prompt(name, 2)).receipt.outcome == "resumed_ram"
    assert log.flush(60.0)
    assert log.unwritten_total > 0
    assert {receipt.conversation for receipt in pod.all_receipts(ReceiptKind.TURN)} == set(names)
    disk.make_space()
    assert log.flush(60.0)
    unwritten = log.unwritten_total
    pod.turn("after", prompt("after", 2))
    assert log.flush(60.0)
    assert log.unwritten_total == unwritten
    log.close()
    lines = (disk.root / "receipts" / "receipts.jsonl").read_text().splitlines()
    assert "after" in {json.loads(line).get("conversation") for line in lines}


def test_receipts_that_the_disk_did_not_take_show_in_the_gauge(tmp_path: Path, start: Start) -> None:
    (tmp_path / "file").write_text("in the way")
    pod = start(tmp_path / "spill")
    log = keep_receipts(pod, tmp_path / "file" / "receipts")
    pod.turn("A", prompt("a", 2))
    assert log.flush(60.0)
    families = {family["name"]: family for family in pod.owner.export_metrics()}
    assert families["parkade_receipts_unwritten"]["samples"][0][2] == log.unwritten_total > 0


# -- a mount that vanishes -----------------------------------------------------------------------------------------


@pytest.fixture(params=["spill", "."], ids=["folder of the mount", "the mount itself"])
def place(request: pytest.FixtureRequest) -> str:
    """Where in the mount the spill directory is."""
    return str(request.param)


def files_below(mount: Path) -> list[Path]:
    """What lies under the mount point."""
    return sorted(mount.rglob("*"))


def test_d8_a_vanished_mount_is_noticed_and_nothing_is_written_below_it(disk: Disk, start: Start, place: str) -> None:
    """Under the mount point lies the node's own disk: what is written there fills it and is hidden later on."""
    pod = start(disk.mount / place)
    log = keep_receipts(pod, disk.mount / place / "receipts")
    a = publish(pod, "A")
    b = park(pod, "B")
    c = publish(pod, "C")
    disk.vanish()
    assert pod.turn("A", [*a, *MORE]).reused == 0
    await_degraded(pod, "gone or was replaced")
    assert comes_from(pod, "B", b) == "resumed_ram"
    assert pod.owner.disk is not None
    assert pod.owner.disk.order_write(pod.conversation("B"), urgent=False) is WriteOutcome.FAILED
    settle(pod)
    assert log.flush(60.0)
    assert files_below(disk.mount) == []
    disk.attach()
    await_healthy(pod)
    assert comes_from(pod, "C", c) == "resumed_disk"
    pod.evict("A")
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert evict(pod, "B") == "written"
    assert comes_from(pod, "B", b) == "resumed_disk"
    pod.check()
    pod.stop()
    assert log.flush(60.0)
    pod = start(disk.mount / place)
    assert {comes_from(pod, name, tokens) for name, tokens in (("A", a), ("B", b), ("C", c))} == {"resumed_disk"}


def test_d8_what_an_earlier_pod_left_below_the_mount_is_not_taken_for_the_cache(disk: Disk, start: Start) -> None:
    """A pod that once ran without the mount has left a whole spill directory under its mount point."""
    disk.vanish()
    before = start(disk.root)
    publish(before, "old")
    before.stop()
    below = files_below(disk.mount)
    disk.attach()
    pod = start(disk.root)
    a = publish(pod, "A")
    b = park(pod, "B")
    disk.vanish()
    assert pod.turn("A", [*a, *MORE]).reused == 0
    await_degraded(pod, "gone or was replaced")
    assert pod.owner.disk is not None
    assert pod.owner.disk.order_write(pod.conversation("B"), urgent=True) is WriteOutcome.FAILED
    assert files_below(disk.mount) == below
    disk.attach()
    await_healthy(pod)
    settle(pod)
    pod.evict("A")
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert evict(pod, "B") == "written"
    assert comes_from(pod, "B", b) == "resumed_disk"
    pod.check()


def test_d8_a_mount_that_vanishes_during_a_stream_and_during_a_write_out(disk: Disk, start: Start) -> None:
    """Case 34: the writer's file is still open when its name is gone."""
    pod = start(disk.root, parked_max=0)
    a = park(pod, "A")
    running = pod.begin("B", prompt("b", 60))
    running.match()
    running.store_computed(0, 30)
    disk.vanish()
    running.store_computed(30, 60)
    running.finish()
    settle(pod)
    await_degraded(pod, "gone or was replaced", "No such file")
    assert [drop.tier for drop in pod.all_receipts(ReceiptKind.DROP, "B")] == ["stream"]
    assert files_below(disk.mount) == []
    disk.attach()
    await_healthy(pod)
    assert comes_from(pod, "A", a) == "resumed_disk"
    pod.check()


def test_d8_new_weights_while_the_mount_is_gone_are_never_served_the_old_ones_blocks(disk: Disk, start: Start) -> None:
    """Trap 14: a generation that could not be begun was forgotten, and the next blocks went among the old weights'."""
    pod = start(disk.root)
    a = publish(pod, "A")
    served = pod.owner.store.fingerprint if pod.owner.store is not None else ""
    disk.vanish()
    with pytest.raises(SpillError, match="gone or was replaced"):
        pod.owner.reset()
    assert files_below(disk.mount) == []
    disk.attach()
    pod.until(lambda: pod.state.spill_healthy, "the disk is used again")
    assert pod.owner.store is not None
    assert pod.owner.store.fingerprint != served
    assert comes_from(pod, "A", a) == f"0 of {len(a)} tokens"
    assert evict(pod, "A") == "written"
    assert comes_from(pod, "A", a) == "resumed_disk"
    pod.check()


@pytest.mark.parametrize("what", ["moved away", "emptied"])
def test_d8_a_directory_that_is_taken_away_is_not_made_again_until_it_is_back(
    tmp_path: Path, start: Start, what: str
) -> None:
    root, away = tmp_path / "spill", tmp_path / "away"
    pod = start(root)
    log = keep_receipts(pod, root / "receipts")
    a = publish(pod, "A")
    b = park(pod, "B")
    if what == "moved away":
        root.rename(away)
    else:
        away.mkdir()
        for path in list(root.iterdir()):
            path.rename(away / path.name)
    assert pod.turn("A", [*a, *MORE]).reused == 0
    await_degraded(pod, "gone or was replaced", "was removed")
    assert comes_from(pod, "B", b) == "resumed_ram"
    settle(pod)
    assert log.flush(60.0)
    assert not root.exists() if what == "moved away" else {path.name for path in root.iterdir()} <= {"receipts"}
    if what == "moved away":
        away.rename(root)
    else:
        shutil.rmtree(root / "receipts", ignore_errors=True)
        for path in list(away.iterdir()):
            path.rename(root / path.name)
    await_healthy(pod)
    pod.evict("A")
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert evict(pod, "B") == "written"
    pod.check()


def test_d4_a_pack_that_alone_is_removed_costs_one_conversation_once(tmp_path: Path, start: Start) -> None:
    """Its blocks counted as on disk for ever: each turn tried to read them, and none was written again."""
    pod = start(tmp_path / "spill", parked_max=0)
    a = park(pod, "A")
    (pack,) = pod.packs()
    b = park(pod, "B")
    pack.unlink()
    assert pod.turn("A", [*a, *MORE]).reused == 0
    settle(pod)
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert comes_from(pod, "B", b) == "resumed_disk"
    assert pod.state.spill_healthy
    pod.check()


# -- read-only -----------------------------------------------------------------------------------------------------


def test_d8_a_mount_that_turns_read_only_is_used_again_when_it_is_writable(disk: Disk, start: Start) -> None:
    """The kernel refuses ``mount -o remount,ro`` while the pod has its index open, but not what covers the mount."""
    pod = start(disk.root)
    a = publish(pod, "A")
    b = park(pod, "B")
    c = park(pod, "C")
    if disk.kind == "ext4":
        assert not disk.remount("ro")
    go = hold(pod)
    ticket = order(pod, "B", urgent=True)
    disk.cover_read_only()
    go.set()
    assert ticket.done.wait(10)
    assert ticket.outcome is WriteOutcome.FAILED
    await_degraded(pod, "Read-only file system")
    assert comes_from(pod, "B", b) == "resumed_ram"
    assert evict(pod, "C") == "tier_off"
    assert comes_from(pod, "C", c) == f"0 of {len(c)} tokens"
    disk.uncover()
    await_healthy(pod)
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert evict(pod, "B") == "written"
    assert comes_from(pod, "B", b) == "resumed_disk"
    pod.check()


def test_d8_a_file_system_that_finds_itself_damaged_loses_nothing_that_was_published(ext4: Ext4, start: Start) -> None:
    """ext4 turns read-only under the open files, and stays so until it is unmounted: this one needs a restart."""
    pod = start(ext4.root)
    a = publish(pod, "A")
    b = park(pod, "B")
    ext4.find_damage()
    ticket = order(pod, "B")
    assert ticket.done.wait(10)
    assert ticket.outcome is WriteOutcome.FAILED
    await_degraded(pod, "Read-only file system", "Input/output error")
    assert comes_from(pod, "B", b) == "resumed_ram"
    pod.stop()
    ext4.vanish()
    ext4.repair()
    ext4.attach()
    pod = start(ext4.root)
    assert comes_from(pod, "A", a) == "resumed_disk"
    pod.check()


# -- the start -----------------------------------------------------------------------------------------------------


def refusal_at_start(root: Path) -> str:
    """What a pod that cannot use its directory says."""
    with pytest.raises(SpillError) as caught:
        Pod(folder=root)
    return str(caught.value)


def test_a_disk_that_is_full_at_the_start_is_said_in_one_line(disk: Disk, start: Start) -> None:
    """Bad input: full directory. Nothing that was published before is lost by it."""
    pod = start(disk.root)
    a = publish(pod, "A")
    pod.stop()
    disk.fill()
    line = refusal_at_start(disk.mount / "new")
    assert str(disk.mount / "new") in line
    assert "No space left on device" in line
    assert "\n" not in line
    try:
        pod = start(disk.root)
    except SpillError as error:
        assert str(disk.root) in str(error)  # noqa: PT017
        assert "No space left on device; free some there" in str(error)  # noqa: PT017
        disk.make_space()
        pod = start(disk.root)
    assert comes_from(pod, "A", a) == "resumed_disk"
    pod.check()


def test_a_file_system_that_is_read_only_at_the_start_is_said_in_one_line(disk: Disk, start: Start) -> None:
    """Bad input: unwritable directory; one that exists and one that does not."""
    start(disk.root).stop()
    disk.cover_read_only()
    for root in (disk.root, disk.mount / "new"):
        line = refusal_at_start(root)
        assert str(root) in line
        assert "Read-only file system" in line
        assert "\n" not in line


def test_a_directory_of_somebody_else_is_said_in_one_line(ext4: Ext4) -> None:
    """Bad input: a directory that may not be written to, not even by root."""
    ext4.root.mkdir()
    run("chattr", "+i", str(ext4.root))
    try:
        line = refusal_at_start(ext4.root)
    finally:
        must("chattr", "-i", str(ext4.root))
    assert str(ext4.root) in line
    assert "Operation not permitted" in line
    assert "\n" not in line


# -- errors of single operations -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fiu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each case of ``support/faulty_pod.py`` ended, all run in one process under libfiu."""
    if shutil.which("fiu-run") is None:
        pytest.skip("no fiu-run here: install fiu-utils")
    folder = tmp_path_factory.mktemp("faulty")
    program = Path(faulty_pod.__file__)
    done = subprocess.run(
        ["fiu-run", "-x", "-f", "", sys.executable, str(program), str(folder)],
        env=os.environ | {"PYTHONPATH": str(program.parents[1])},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", sorted(faulty_pod.CASES))
def test_d8_a_system_call_that_fails_loses_nothing_and_is_got_over(fiu: dict[str, str], case: str) -> None:
    """D8, case 47, with the errors of libfiu: flush, rename, open, the index's own reads and writes, and by chance."""
    assert fiu[case] == "ok", fiu[case]


OPERATIONS = [
    *sorted(name for name in vars(FileSystem) if not name.startswith("_")),
    *(f"sql {word}" for word in ("BEGIN", "COMMIT", "DELETE", "INSERT", "PRAGMA", "SELECT", "UPDATE")),
]


def test_d8_whatever_operation_fails_nothing_published_is_lost(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that libfiu cannot reach: it knows no ``pwritev2``, ``preadv2`` and ``fallocate``."""
    monkeypatch.setattr("parkade_cache.disk_tier.LONGEST_PROBE_INTERVAL_S", 0.05)
    pod = start(tmp_path / "spill")
    known: dict[str, list[int]] = {}
    for operation in OPERATIONS:
        try:
            known |= fail_one(pod, operation)
        except AssertionError as error:
            error.add_note(f"while {operation} failed")
            raise
    assert pod.outcomes(ReceiptKind.DROP) == []
    pod.check()
    pod.stop()
    pod = start(tmp_path / "spill")
    assert {comes_from(pod, name, tokens) for name, tokens in known.items()} == {"resumed_disk"}


def fail_one(pod: Pod, operation: str) -> dict[str, list[int]]:
    """Read, write and look while one operation fails, then go on without it; the conversations that must be on disk."""
    a, b = f"{operation} read", f"{operation} written"
    known = {a: publish(pod, a, 5), b: park(pod, b, 5)}
    pod.fs.fail[operation] = OSError(errno.EIO, "simulated")
    assert pod.turn(a, known[a]).reused in {0, len(known[a])}
    assert pod.owner.disk is not None
    ticket = pod.owner.disk.order_write(pod.conversation(b), urgent=True)
    if isinstance(ticket, WriteTicket):
        assert ticket.done.wait(10)
    assert comes_from(pod, b, known[b]) == "resumed_ram"
    pod.owner.summary()
    pod.fs.fail.clear()
    pod.until(lambda: pod.state.spill_healthy and not pod.state.probe_due, "the disk is used")
    settle(pod)
    for name, tokens in known.items():
        assert evict(pod, name) in {"written", "already_on_disk"}
        assert comes_from(pod, name, tokens) == "resumed_disk"
        assert evict(pod, name) in {"written", "already_on_disk"}
    return known


def test_case_69_a_conversation_deleted_while_the_index_fails_stays_deleted(tmp_path: Path, start: Start) -> None:
    """Its dead marks failed and were forgotten: the next start found it again."""
    pod = start(tmp_path / "spill")
    a, b = publish(pod, "A"), publish(pod, "B")
    pod.fs.fail["sql BEGIN"] = OSError(errno.EIO, "simulated")
    assert pod.owner.forget(ConversationId("A"))
    await_degraded(pod, "simulated")
    assert len(pod.packs()) == 2
    pod.fs.fail.clear()
    await_healthy(pod)
    pod.until(lambda: len(pod.packs()) == 1, "its space has come back")
    pod.stop()
    pod = start(tmp_path / "spill")
    assert comes_from(pod, "A", a) == f"0 of {len(a)} tokens"
    assert comes_from(pod, "B", b) == "resumed_disk"


def test_d8_a_disk_that_fails_again_and_again_is_tried_less_and_less_often(tmp_path: Path, start: Start) -> None:
    """Small writes work and large ones do not, as under a quota: each try would cost a write-out."""
    pod = start(tmp_path / "spill")
    park(pod, "A")
    assert pod.owner.disk is not None
    waits = []
    for _ in range(3):
        pod.fs.fail["allocate"] = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        assert order(pod, "A").done.wait(10)
        await_degraded(pod, "quota")
        waits.append(pod.owner.disk._probe_interval_s)
        pod.fs.fail.clear()
        await_healthy(pod)
    assert waits == [0.05, 0.1, 0.2]


def test_d4_a_bad_sector_costs_its_block_and_what_follows_once(tmp_path: Path, start: Start) -> None:
    """D4: the rest of the device reads, so it is the pack that is damaged, and what is recomputed is written anew."""
    pod = start(tmp_path / "spill", parked_max=0)
    a = park(pod, "A")
    assert comes_from(pod, "A", a) == "resumed_disk"
    pack = min(pod.packs(), key=lambda path: path.name).stat()
    bad = 4096 + 10 * BLOCK_BYTES
    read = pod.fs.preadv

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if os.path.samestat(os.fstat(fd), pack) and offset <= bad < offset + sum(map(len, views)):
            raise OSError(errno.EIO, "medium error")
        return read(fd, views, offset)

    pod.fs.preadv = preadv  # type: ignore[method-assign]
    assert pod.turn("A", a).reused == 10 * BLOCK_TOKENS
    settle(pod)
    assert pod.outcomes(ReceiptKind.DROP) == [("quarantined", "damaged")]
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert pod.state.spill_healthy
    pod.check()


def test_d8_a_device_that_is_pulled_has_damaged_nothing(ext4: Ext4, start: Start) -> None:
    """Every call is an I/O error, those of packs that were open too; after the repair everything published is there."""
    pod = start(ext4.root)
    a, c = publish(pod, "A"), publish(pod, "C")
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert evict(pod, "A") == "written"
    b = park(pod, "B")
    ext4.shut_down()
    assert pod.turn("A", [*a, *MORE]).reused == 0
    await_degraded(pod, "Input/output error", "disk I/O error")
    assert comes_from(pod, "B", b) == "resumed_ram"
    assert pod.outcomes(ReceiptKind.DROP) == []
    pod.stop()
    ext4.vanish()
    ext4.attach()
    pod = start(ext4.root)
    assert {comes_from(pod, name, tokens) for name, tokens in (("A", a), ("C", c))} == {"resumed_disk"}
    pod.check()


# -- a disk that hangs ---------------------------------------------------------------------------------------------


def test_r4_a_restore_from_a_disk_that_hangs_is_given_up_and_recomputed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parkade_cache.disk_tier.DISK_PATIENCE_S", 0.2)
    pod = start(tmp_path / "spill", read_deadline_s=0.2)
    a = publish(pod, "A")
    b = park(pod, "B")
    pod.fs.held.clear()
    turned = pod.turn("A", [*a, *MORE])
    assert (turned.reused, turned.receipt.reason) == (0, "read_deadline")
    await_degraded(pod, "not answer")
    assert comes_from(pod, "B", b) == "resumed_ram"
    assert pod.owner.summary()["disk"]["enabled"]
    pod.fs.held.set()
    await_healthy(pod)
    pod.evict("A")
    assert comes_from(pod, "A", a) == "resumed_disk"
    pod.check()


def test_case_51_a_write_out_to_a_disk_that_hangs_ends_at_its_deadline(
    ext4: Ext4, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W3: the conversation is dropped as a decision, nothing of it is restorable, and the pod lives on in RAM."""
    monkeypatch.setattr("parkade_cache.disk_tier.DISK_PATIENCE_S", 0.3)
    monkeypatch.setattr("parkade_cache.disk_tier.STUCK_AFTER_S", 0.1)
    monkeypatch.setattr("parkade_cache.disk_tier.CANCEL_WAIT_S", 0.1)
    pod = start(ext4.root, spill={"writeOutSeconds": 1})
    a = publish(pod, "A")
    park(pod, "B")
    c = park(pod, "C")
    with ext4.frozen():
        assert evict(pod, "B") in {"deadline", "failed"}
        (drop,) = pod.all_receipts(ReceiptKind.DROP, "B")
        assert drop.reason in {"deadline", "failed"}
        await_degraded(pod, "not answer", "have not ended")
        assert comes_from(pod, "C", c) == "resumed_ram"
        assert pod.turn("B", prompt("b", 15)).reused == 0
        assert pod.turn("A", a).reused == 0
    await_healthy(pod)
    settle(pod)
    assert pod.temporaries() == []
    pod.evict("A")
    assert comes_from(pod, "A", a) == "resumed_disk"
    assert evict(pod, "C") == "written"
    assert comes_from(pod, "C", c) == "resumed_disk"
    pod.check()


def test_d8_what_waits_to_be_streamed_to_a_disk_that_hangs_is_given_back_to_the_engine(
    ext4: Ext4, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that waits for a buffer keeps the engine's own block, and the engine takes no new request without it."""
    monkeypatch.setattr("parkade_cache.disk_tier.DISK_PATIENCE_S", 0.2)
    pod = start(ext4.root, parked_max=0)
    buffers = pod.mover._bounce
    buffers._free = type(buffers._free)(list(buffers._free)[:3])
    running = pod.begin("A", prompt("a", 20))
    running.match()
    with ext4.frozen():
        with pod.state.lock:
            plan = pod.cache.plan_store(running.turn, running.offers(0, 20))
        job = pod.next_job()
        pod.mover.store(StoreJob(job, tuple(DeviceBlock(0, n) for n in plan.accepted), plan.targets))
        await_degraded(pod, "not answer")
        ended = [done.job for done in poll(pod.mover.take_finished, 3.0)]
    assert ended == [job]


def poll(take: Callable[[], list[TransferDone]], seconds: float) -> list[TransferDone]:
    """What comes first within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done := take():
            return done
        time.sleep(0.01)
    return []


def test_d8_a_commit_that_hangs_and_ends_after_all_is_found_by_itself(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W2: the owner has counted the write as failed when the index says that it is published."""
    monkeypatch.setattr("parkade_cache.disk_tier.DISK_PATIENCE_S", 0.2)
    pod = start(tmp_path / "spill")
    b = park(pod, "B")
    assert pod.owner.store is not None
    index = pod.owner.store._index
    commit, go = index.publish, threading.Event()

    def late(*args: Any, **fields: Any) -> None:
        assert go.wait(20)
        commit(*args, **fields)

    index.publish = late  # type: ignore[method-assign]
    ticket = order(pod, "B")
    assert ticket.done.wait(10)
    assert ticket.outcome is WriteOutcome.FAILED
    await_degraded(pod, "not answer")
    assert pod.owner.summary()["disk"]["enabled"]
    assert comes_from(pod, "B", b) == "resumed_ram"
    del index.publish
    go.set()
    await_healthy(pod)
    pod.until(lambda: pod.described("B")["disk_blocks"] == 15, "the pack that was committed late is found")
    settle(pod)
    usage = pod.owner.store.usage()
    assert (usage.reserved_bytes, usage.packs) == (0, 1)
    assert evict(pod, "B") == "written"
    assert comes_from(pod, "B", b) == "resumed_disk"
    pod.check()


def test_s1_a_drain_waits_for_a_stream_that_is_just_being_finished(tmp_path: Path, start: Start) -> None:
    """On a slow disk the owner's tick has the turn in hand while the drain sees nothing left to do."""
    pod = start(tmp_path / "spill", parked_max=0)
    disk = pod.owner.disk
    assert disk is not None
    finish, taken, go = disk.finish_stream, threading.Event(), threading.Event()

    def slow(turn: Turn) -> None:
        taken.set()
        go.wait(20)
        finish(turn)

    disk.finish_stream = slow  # type: ignore[method-assign]
    pod.turn("A", prompt("a", 15))
    assert taken.wait(10)
    drain = threading.Thread(target=lambda: pod.owner.drain(grace_s=10.0))
    drain.start()
    drain.join(0.5)
    waits = drain.is_alive()
    go.set()
    drain.join(20)
    assert waits
