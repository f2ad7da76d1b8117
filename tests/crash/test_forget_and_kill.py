"""A conversation is deleted while its blocks are being written, and then the pod is killed (case 69, S2)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pod import EIGHT_EXTENTS, MortalFileSystem, Pod, prompt

from parkade_cache.ids import ConversationId


class SlowFileSystem(MortalFileSystem):
    """Once ``slow``, a flush of a folder waits until it is told to go on."""

    def __init__(self) -> None:
        self.slow = False
        self.arrived = threading.Event()
        self.go_on = threading.Event()
        super().__init__()

    def step(self, name: str) -> None:
        if name == "flush_folder" and self.slow:
            self.arrived.set()
            self.go_on.wait(20)
        super().step(name)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Any]:
    lives: list[Pod] = []

    def begin(**settings: Any) -> Pod:
        lives.append(Pod(folder=tmp_path / "spill", parked_max=EIGHT_EXTENTS, **settings))
        return lives[-1]

    yield begin
    for pod in lives:
        pod.__exit__()


def test_case_69_a_conversation_deleted_while_its_pack_gets_its_name_does_not_come_back_after_a_kill(pods: Any) -> None:
    """The pack was complete and without a row when the pod was killed, so the next start adopted it."""
    fs = SlowFileSystem()
    pod = pods(fs=fs)
    pod.turn("a", prompt("a", 15))
    pod.settle()
    # The folder of the pack's name is there already, so that the first flush of a folder is the one after the rename.
    for n in range(256):
        folder = pod.owner.store.rank_folder(0) / "packs" / f"{n:02x}"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "not a pack").touch()
    fs.slow = True
    pod.owner.disk.order_write(pod.conversation("a"), urgent=True)
    assert fs.arrived.wait(20)
    deleting = threading.Thread(target=pod.owner.forget, args=(ConversationId("a"),))
    deleting.start()
    deleting.join(2.0)
    if deleting.is_alive():
        # It waits for the write to end, which is as good.
        fs.go_on.set()
        deleting.join(20)
    fs.dead = True
    fs.go_on.set()
    pod.kill()
    pod = pods()
    assert pod.turn("a", prompt("a", 15)).reused == 0
