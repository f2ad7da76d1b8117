"""Trap 14: new weights while a job still uses blocks of the old ones. Nobody may find those, then or later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.pod import BLOCK_TOKENS, Pod, Running, prompt

from parkade_cache.lanes import Lane

BLOCKS = 15


@contextmanager
def held(lane: Lane) -> Iterator[None]:
    """A lane whose device is stuck until the end of the block."""
    let_go = threading.Event()

    def task() -> None:
        let_go.wait(20)

    lane.submit(task)
    try:
        yield
    finally:
        let_go.set()


def wear_old_bytes(pod: Pod) -> None:
    """What is in RAM is what other weights have computed: whoever is served it notices."""
    with pod.state.lock:
        for row in pod.state.ledger.rows.values():
            pod.mover._slot_view(pod.state.ledger.slot[row])[:] = 0xEE


def begin_load(pod: Pod, running: Running) -> None:
    """The engine has room: the blocks are pinned, and nothing is copied yet."""
    assert running.match() == BLOCKS
    with pod.state.lock:
        pod.cache.plan_load(running.turn, running.chain)


def end_load(pod: Pod, running: Running) -> None:
    """As the connector ends a job from before a reset."""
    with pod.state.lock:
        pod.cache.load_done(running.turn, keys=running.chain, failed=[-1], disk_bytes=0, disk_seconds=0.0)
    running.finish()


def finds_nothing(pod: Pod, other: Running) -> None:
    """A request for the same words computes them; what is served afterwards has the bytes that it computed."""
    assert other.match() == 0
    other.compute()
    other.finish()


def test_trap_14_blocks_that_a_write_uses_at_a_reset_serve_nobody(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", mode="WriteBehind", spill={"writeBehindIdleSeconds": 0}) as pod:
        with held(pod.mover._write_lane):
            pod.turn("a", prompt("a", BLOCKS))
            pod.until(lambda: any(one.writing for one in pod.state.conversations), "a write is ordered")
            wear_old_bytes(pod)
            pod.owner.reset()
            finds_nothing(pod, pod.begin("b", prompt("a", BLOCKS)))
        pod.settle()
        pod.check()
        pod.turn("c", prompt("a", BLOCKS))


def test_trap_14_blocks_that_are_being_loaded_from_ram_at_a_reset_serve_nobody(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill") as pod:
        pod.turn("a", prompt("a", BLOCKS))
        pod.settle()
        wear_old_bytes(pod)
        first = pod.begin("a", prompt("a", BLOCKS))
        begin_load(pod, first)
        pod.owner.reset()
        finds_nothing(pod, pod.begin("b", prompt("a", BLOCKS)))
        end_load(pod, first)
        pod.settle()
        pod.check()
        pod.turn("c", prompt("a", BLOCKS))


def test_trap_14_blocks_that_are_being_restored_from_disk_at_a_reset_do_not_keep_new_ones_out(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=0) as pod:
        pod.turn("a", prompt("a", BLOCKS))
        pod.settle()
        first = pod.begin("a", prompt("a", BLOCKS))
        begin_load(pod, first)
        pod.owner.reset()
        finds_nothing(pod, pod.begin("b", prompt("a", BLOCKS)))
        end_load(pod, first)
        pod.settle()
        pod.check()
        assert pod.turn("b", prompt("a", BLOCKS)).reused == BLOCKS * BLOCK_TOKENS
