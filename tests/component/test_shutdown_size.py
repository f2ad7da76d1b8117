"""S1 with a pod's worth of memory: 2 GiB that only RAM has, and a grace period that is enough, or is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pod import BLOCK_TOKENS, Pod, prompt

from parkade_cache.receipts import ReceiptKind

BLOCK_BYTES = 2 << 20
CONVERSATIONS = 16
NAMES = tuple("abcdefghijklmnop")
BLOCKS = 64
GIB = 1 << 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def a_pod(folder: Path) -> Pod:
    return Pod(
        folder=folder,
        parked_max=4 * GIB,
        size=8 * GIB,
        block_bytes=BLOCK_BYTES,
        device_blocks=2 * BLOCKS,
        admission_patience_s=60.0,
    )


def full_pod(folder: Path) -> Pod:
    pod = a_pod(folder)
    for name in NAMES:
        pod.turn(name, prompt(name, BLOCKS))
    pod.settle()
    assert pod.state.ledger.dirty_blocks == CONVERSATIONS * BLOCKS
    return pod


def test_s1_two_gib_unwritten_are_on_disk_within_the_grace_period(tmp_path: Path) -> None:
    with full_pod(tmp_path / "spill") as pod:
        done = pod.owner.drain(grace_s=120.0)
        assert (done["dropped"], done["outcomes"]) == (0, {"written": CONVERSATIONS})
        assert done["seconds"] < 120.0
        print(f"2 GiB written out in {done['seconds']:.1f} s")
    with a_pod(tmp_path / "spill") as again:
        for name in (NAMES[0], NAMES[-1]):
            assert again.turn(name, prompt(name, BLOCKS)).reused == BLOCKS * BLOCK_TOKENS


def test_s1_with_too_little_time_the_newest_are_written_and_the_rest_is_counted(tmp_path: Path) -> None:
    with full_pod(tmp_path / "spill") as pod:
        slow = pod.fs.pwritev

        def pwritev(*args: object) -> int:
            written.append(1)
            if len(written) > 24:
                pod.fs.held.clear()
                pod.fs.held.wait(20)
            return slow(*args)  # type: ignore[arg-type]

        written: list[int] = []
        pod.fs.pwritev = pwritev  # type: ignore[method-assign]
        done = pod.owner.drain(grace_s=8.0)
        pod.fs.held.set()
        saved = done["outcomes"].get("written", 0)
        assert 0 < saved < CONVERSATIONS
        assert done["dropped"] == CONVERSATIONS - saved == len(pod.outcomes(ReceiptKind.DROP))
        on_disk = [name for name in NAMES if pod.described(name)["disk_blocks"] == BLOCKS]
        assert on_disk == list(NAMES[-saved:]), "the newest first"
