"""W6: a request under a conversation's own id that does not extend it, where no disk takes what would have to go."""

from __future__ import annotations

from pathlib import Path

from support.pod import BLOCK_BYTES, BLOCK_TOKENS, EXTENT_BLOCKS, Pod, prompt

from parkade_cache.receipts import ReceiptKind

EXTENT_BYTES = EXTENT_BLOCKS * BLOCK_BYTES
NEWEST, SIDE = 15, 25
"""Two extents and three; RAM has four."""


def side_call(pod: Pod) -> None:
    pod.turn("a", prompt("a", NEWEST))
    pod.settle()
    pod.turn("a", prompt("what is this about", SIDE))
    pod.settle()


def keeps_its_newest_state(pod: Pod) -> None:
    assert pod.outcomes(ReceiptKind.DROP) == []
    assert pod.turn("a", prompt("a", NEWEST)).reused == NEWEST * BLOCK_TOKENS
    pod.settle()
    pod.check()


def test_w6_without_a_disk_a_side_call_is_not_parked_rather_than_cost_the_newest_state() -> None:
    with Pod(folder=None, parked_max=4 * EXTENT_BYTES) as pod:
        side_call(pod)
        keeps_its_newest_state(pod)


def test_w6_on_a_disk_that_takes_nothing_a_side_call_does_not_cost_the_newest_state(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=4 * EXTENT_BYTES, spill={"writeBudgetPerHour": 0}) as pod:
        side_call(pod)
        assert pod.turn("a", prompt("a", NEWEST)).reused == NEWEST * BLOCK_TOKENS
        pod.settle()
        pod.check()


def test_w6_with_a_disk_a_side_call_sends_the_newest_state_there(tmp_path: Path) -> None:
    with Pod(folder=tmp_path / "spill", parked_max=4 * EXTENT_BYTES) as pod:
        side_call(pod)
        keeps_its_newest_state(pod)
