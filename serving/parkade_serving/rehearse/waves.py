"""What happens to the pod: a neighbour eats, the limit falls and rises, the disk is full.

What must stay true: every wave undoes itself, so that the next one finds the pod as it was; nothing that cannot be
given back is asked for; what is measured is seen from outside, by the kernel's numbers and the receipts' times.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final

from parkade_cache.quantity import format_bytes
from parkade_serving.rehearse.disk import SmallDisk
from parkade_serving.rehearse.figures import Change, ChangeOutcome, FullDisk, Gulp, Manner
from parkade_serving.rehearse.group import LimitRefusedError
from parkade_serving.rehearse.neighbour import Neighbour
from parkade_serving.rehearse.plan import (
    FLOOR_BYTES,
    IN_USE_BLOCKS,
    MIB,
    ROOMY_PARKED_BLOCKS,
    deficit_bytes,
    unannounced_limit,
    upper_limit,
)
from parkade_serving.rehearse.pod import PolicyRefusedError
from parkade_serving.rehearse.stage import Stage

_NEAR_BYTES: Final = 96 * MIB
"""How close to the floor the neighbour comes before its last helping, which is then eaten at once."""
_LEFT_BEHIND: Final = 2
"""Conversations whose users have just gone, so that there is something to give back whoever is talking."""
_LEAST_IDLE_BYTES: Final = 64 * MIB
_IDLE_TIMEOUT_S: Final = 45.0
_SAMPLE_S: Final = 0.05
_GIVE_BACK_TIMEOUT_S: Final = 15.0
_HOLD_S: Final = 1.5
_TURN_TIMEOUT_S: Final = 60.0
_HELPINGS: Final = 4
_RETRY_S: Final = 5.0
_CONFIRM_TIMEOUT_S: Final = 40.0
_NOTICE_TIMEOUT_S: Final = 10.0
_SAY_TIMEOUT_S: Final = 40.0
_FULL_S: Final = 6.0
_RECOVER_TIMEOUT_S: Final = 60.0
_SECONDS_A_POLL: Final = 0.5
_WRITTEN_AFTER_S: Final = 10.0
"""A conversation is written once it has been idle for some seconds, one after the other."""


# -- the neighbour ----------------------------------------------------------------------------------------------------


def gulp(stage: Stage, neighbour: Neighbour, *, floor_share: float) -> Gulp:
    """The neighbour eats down to below the floor, holds on, and gives it back."""
    stage.crowd.leave_behind(stage.pod.url, _LEFT_BEHIND)
    wanted_bytes = FLOOR_BYTES - deficit_bytes(_await_idle(stage), floor_share)
    answered = stage.crowd.tally.answered
    eaten_bytes = max(0, stage.available_bytes() - FLOOR_BYTES - _NEAR_BYTES)
    lowest_bytes = FLOOR_BYTES
    moment, begun = time.time(), time.monotonic()
    try:
        neighbour.hold(eaten_bytes)
        for _ in range(_HELPINGS):
            moment, begun = time.time(), time.monotonic()
            eaten_bytes += max(0, stage.available_bytes() - wanted_bytes)
            neighbour.hold(eaten_bytes)
            lowest_bytes = min(lowest_bytes, stage.available_bytes())
            if lowest_bytes < FLOOR_BYTES:
                break
        seconds = _until_floor_is_free(stage, begun)
        stage.pause(_HOLD_S)
        stage.wait(lambda: stage.crowd.tally.answered > answered, timeout_s=_TURN_TIMEOUT_S)
    finally:
        neighbour.hold(0)
    stage.fetch()
    found = Gulp(
        eaten_bytes=eaten_bytes,
        below_floor_bytes=FLOOR_BYTES - lowest_bytes,
        give_back_seconds=seconds,
        released=stage.released_since(moment),
        turns=stage.crowd.tally.answered - answered,
    )
    back = "not given back" if seconds is None else f"given back after {seconds:.2f} s"
    stage.console.line(
        f"neighbour ate {format_bytes(eaten_bytes)}, {format_bytes(found.below_floor_bytes)} below the floor:"
        f" {back}, {found.released} conversations left memory, {found.turns} turns meanwhile"
    )
    return found


def _await_idle(stage: Stage) -> int:
    """Wait until there is something to give back; what is parked for nobody at the moment."""
    stage.wait(lambda: stage.idle_parked_bytes() >= _LEAST_IDLE_BYTES, timeout_s=_IDLE_TIMEOUT_S, every_s=1.0)
    return stage.idle_parked_bytes()


def _until_floor_is_free(stage: Stage, begun: float) -> float | None:
    """Seconds from ``begun`` (monotonic) until the floor is free; None where that does not come in time."""
    while stage.available_bytes() < FLOOR_BYTES:
        if time.monotonic() - begun > _GIVE_BACK_TIMEOUT_S:
            return None
        time.sleep(_SAMPLE_S)
    return time.monotonic() - begun


# -- the limit --------------------------------------------------------------------------------------------------------


def change_announced(stage: Stage, *, given_share: float) -> Change:
    """Lowered to 60 % as an operator does it: the policy first, the kernel's limit once the pod has confirmed.

    It can only be met when ``given_share`` of what is parked for nobody at the moment is given back.
    """
    stage.crowd.leave_behind(stage.pod.url, 1)
    given_bytes = int(_await_idle(stage) * given_share)
    in_use_bytes = IN_USE_BLOCKS * stage.block_bytes
    lowered_bytes = stage.need().lowered_limit(given_bytes, in_use_bytes=in_use_bytes)
    upper_bytes = upper_limit(lowered_bytes)
    stage.raise_limit(upper_bytes)
    moment = time.time()
    outcome, seconds, detail = _announce_until_met(stage, lowered_bytes)
    if outcome is ChangeOutcome.CONFIRMED:
        stage.limit_bytes = lowered_bytes
        try:
            stage.enclosure.set_limit(lowered_bytes)
        except LimitRefusedError as error:
            outcome, detail = ChangeOutcome.KERNEL_REFUSED, str(error.strerror)
        stage.pause(_HOLD_S)
        stage.await_turns(1, timeout_s=_TURN_TIMEOUT_S)
    stage.fetch()
    released = stage.released_since(moment)
    stage.raise_limit(upper_bytes)
    change = Change(
        manner=Manner.ANNOUNCED,
        from_bytes=upper_bytes,
        to_bytes=lowered_bytes,
        outcome=outcome,
        seconds=seconds,
        released=released,
        detail=detail,
    )
    _tell(stage, change)
    return change


def _announce_until_met(stage: Stage, limit_bytes: int) -> tuple[ChangeOutcome, float | None, str]:
    """A pod that cannot meet it now is asked again, as an operator would: conversations in use keep their memory."""
    begun = time.monotonic()
    while True:
        try:
            stage.announce(limit_bytes)
        except PolicyRefusedError as error:
            if time.monotonic() - begun > _CONFIRM_TIMEOUT_S:
                return ChangeOutcome.POD_REFUSED, None, str(error)
            stage.pause(_RETRY_S)
        else:
            return ChangeOutcome.CONFIRMED, time.monotonic() - begun, ""


def change_unannounced(stage: Stage, *, floor_share: float, deep: bool) -> Change:
    """Lowered in the kernel's file only, so far that the floor is not free any more.

    ``deep`` asks for as little as the pod could live in, while it holds more: a kernel that can refuse that must.
    """
    upper_bytes = stage.limit_bytes
    stage.crowd.leave_behind(stage.pod.url, 1)
    _await_idle(stage)
    need = stage.need()
    net_bytes = stage.enclosure.net_bytes()
    lowered_bytes = need.lowered_limit(need.parked_bytes) if deep else unannounced_limit(net_bytes, floor_share)
    moment, begun = time.time(), time.monotonic()
    seconds = give_back_seconds = None
    try:
        stage.enclosure.set_limit(lowered_bytes)
    except LimitRefusedError as error:
        outcome, detail = ChangeOutcome.KERNEL_REFUSED, str(error.strerror)
    else:
        detail = ""
        stage.limit_bytes = lowered_bytes
        short = stage.available_bytes() < FLOOR_BYTES
        give_back_seconds = _until_floor_is_free(stage, begun) if short else None
        seconds = _noticed_after(stage, moment, lowered_bytes)
        outcome = ChangeOutcome.UNNOTICED if seconds is None else ChangeOutcome.NOTICED
        stage.pause(_HOLD_S)
        stage.await_turns(1, timeout_s=_TURN_TIMEOUT_S)
    stage.fetch()
    released = stage.released_since(moment)
    stage.enclosure.set_limit(upper_bytes)
    stage.limit_bytes = upper_bytes
    change = Change(
        manner=Manner.UNANNOUNCED,
        from_bytes=upper_bytes,
        to_bytes=lowered_bytes,
        outcome=outcome,
        seconds=seconds,
        give_back_seconds=give_back_seconds,
        released=released,
        detail=detail,
    )
    _tell(stage, change)
    return change


def _noticed_after(stage: Stage, moment: float, limit_bytes: int) -> float | None:
    """Seconds from ``moment`` to the pod's receipt that it has seen the new limit."""

    def seen() -> float | None:
        stage.fetch()
        for receipt in stage.receipts.since(moment, "resize", "noticed"):
            if limit_bytes in receipt.get("detail", {}).get("new", ()):
                return float(receipt["time"]) - moment
        return None

    stage.wait(lambda: seen() is not None, timeout_s=_NOTICE_TIMEOUT_S, every_s=0.2)
    return seen()


_SAID: Final = {
    ChangeOutcome.CONFIRMED: "confirmed",
    ChangeOutcome.NOTICED: "noticed",
    ChangeOutcome.KERNEL_REFUSED: "rightly refused by the kernel",
    ChangeOutcome.POD_REFUSED: "refused by the pod",
    ChangeOutcome.UNNOTICED: "not noticed",
}


def _tell(stage: Stage, change: Change) -> None:
    after = "" if change.seconds is None else f" after {change.seconds:.2f} s"
    back = "" if change.give_back_seconds is None else f", floor free after {change.give_back_seconds:.2f} s"
    stage.console.line(
        f"limit {format_bytes(change.from_bytes)} to {format_bytes(change.to_bytes)} {change.manner}:"
        f" {_SAID[change.outcome]}{after}{back}, {change.released} conversations left memory; raised again"
    )


# -- the disk ---------------------------------------------------------------------------------------------------------


def fill_disk(stage: Stage, disk: SmallDisk) -> FullDisk:
    """The disk is full for a while; memory is made roomy meanwhile, so that nothing has to go."""
    roomy_bytes = ROOMY_PARKED_BLOCKS * stage.block_bytes
    limit_bytes = max(stage.limit_bytes, stage.need().base_bytes + FLOOR_BYTES + roomy_bytes + _NEAR_BYTES)
    stage.raise_limit(limit_bytes, parked_max_bytes=roomy_bytes)
    answered = stage.crowd.tally.answered
    try:
        disk.fill()
        stage.console.line("disk filled to the last block")
        degraded = stage.wait(lambda: _says_so(stage), timeout_s=_SAY_TIMEOUT_S, every_s=_SECONDS_A_POLL)
        stage.pause(_FULL_S)
        stage.await_turns(2, timeout_s=_TURN_TIMEOUT_S)
        condition = not _is_healthy(stage)
    finally:
        with contextlib.suppress(OSError):
            disk.make_space()
    moment = time.time()
    turns = stage.crowd.tally.answered - answered
    recovered = stage.wait(lambda: _has_recovered(stage, moment), timeout_s=_RECOVER_TIMEOUT_S, every_s=_SECONDS_A_POLL)
    stage.announce(stage.limit_bytes)
    found = FullDisk(degraded_seconds=degraded, condition=condition, recovered_seconds=recovered, turns=turns)
    said = "never said so" if degraded is None else f"said so after {degraded:.1f} s"
    back = "did not recover" if recovered is None else f"recovered {recovered:.1f} s after there was space"
    stage.console.line(f"disk full: the pod {said}, answered {turns} turns, {back}")
    return found


def _is_healthy(stage: Stage) -> bool:
    conditions = stage.pod.summary()["conditions"]
    return all(one["status"] == "True" for one in conditions if one["type"] == "SpillHealthy")


def _says_so(stage: Stage) -> bool:
    refused = stage.pod.counter("parkade_write_out_total", outcome="refused_free_space")
    return refused > 0 or not _is_healthy(stage)


def _has_recovered(stage: Stage, moment: float) -> bool:
    """Healthy, something was written since ``moment``, and nothing waits that has been left alone for a while."""
    stage.fetch()
    if not any(stage.receipts.since(moment, "spill", "written")):
        return False
    kept = stage.pod.conversations(block_tokens=stage.block_tokens).values()
    return _is_healthy(stage) and not any(one.dirty_bytes for one in kept if one.idle_seconds > _WRITTEN_AFTER_S)
