"""W2, W7: a write-out that finds its blocks being written by somebody else waits for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.pod import Pod, prompt

from parkade_cache.conversations import Conversation
from parkade_cache.spill import WriteOutcome

BLOCKS = 15


def test_w7_a_write_ordered_in_the_background_meanwhile_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate let nothing go then, and refused a request that had room: real vLLM, write-behind, 1 turn in 70."""
    with Pod(folder=tmp_path / "spill") as pod:
        pod.turn("a", prompt("a", BLOCKS))
        pod.settle()
        disk, conversation = pod.owner.disk, pod.conversation("a")
        assert disk is not None
        join, let_go = disk._join_writes, threading.Event()
        joined = iter((True, False))

        def overtaken(of: Conversation, deadline: float) -> bool:
            in_time = join(of, deadline)
            if next(joined, False):
                disk.order_write(of, urgent=False)
                threading.Timer(0.05, let_go.set).start()
            return in_time

        monkeypatch.setattr(disk, "_join_writes", overtaken)

        def stuck() -> None:
            let_go.wait(20)

        pod.mover._write_lane.submit(stuck)
        outcome = disk.write_out(conversation, deadline=pod.state.clock.monotonic() + 10)
        assert outcome in {WriteOutcome.WRITTEN, WriteOutcome.ALREADY_ON_DISK}
        with pod.state.lock:
            assert pod.state.unpublished_blocks(conversation) == 0
        pod.settle()
        pod.check()


def test_w2_a_write_that_is_just_being_published_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same refusal, where the index takes its time: what is not in it is not on disk yet."""
    with Pod(folder=tmp_path / "spill") as pod:
        pod.turn("a", prompt("a", BLOCKS))
        pod.settle()
        disk, conversation, store = pod.owner.disk, pod.conversation("a"), pod.store
        assert disk is not None
        assert store is not None
        publish, publishing, let_go = store.publish, threading.Event(), threading.Event()

        def slow(*args: Any) -> None:
            publishing.set()
            let_go.wait(20)
            publish(*args)

        monkeypatch.setattr(store, "publish", slow)
        disk.order_write(conversation, urgent=False)
        assert publishing.wait(20)
        threading.Timer(0.1, let_go.set).start()
        outcome = disk.write_out(conversation, deadline=pod.state.clock.monotonic() + 10)
        assert outcome in {WriteOutcome.WRITTEN, WriteOutcome.ALREADY_ON_DISK}
        with pod.state.lock:
            assert pod.state.unpublished_blocks(conversation) == 0
        pod.settle()
        pod.check()
