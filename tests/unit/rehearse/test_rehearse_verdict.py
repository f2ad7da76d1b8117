"""The verdict: every broken promise is a line, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parkade_serving.demo.figures import TurnFigures
from parkade_serving.rehearse.figures import (
    Change,
    ChangeOutcome,
    FullDisk,
    Gulp,
    Killing,
    LongestHook,
    Manner,
    Measured,
    resumed,
    spread,
    trims,
)
from parkade_serving.rehearse.verdict import document, figures, judge, table

MIB = 1 << 20
GIB = 1 << 30


def turn(
    conversation: str = "long-1", number: int = 2, *, cached: int = 1024, resumable: int = 1024, after: bool = False
) -> TurnFigures:
    return TurnFigures(
        conversation=conversation,
        turn=number,
        after_restart=after,
        prompt_tokens=resumable + 200,
        cached_tokens=cached,
        resumable_tokens=resumable,
        first_token_seconds=1.0,
    )


def evict(outcome: str = "written", tier: str = "ram") -> dict[str, Any]:
    return {"kind": "evict", "outcome": outcome, "tier": tier, "time": 1.0}


def change(outcome: ChangeOutcome = ChangeOutcome.CONFIRMED, **fields: Any) -> Change:
    manner = Manner.ANNOUNCED if outcome is ChangeOutcome.CONFIRMED else Manner.UNANNOUNCED
    given = {"manner": manner, "from_bytes": 4 * GIB, "to_bytes": 2 * GIB, "outcome": outcome, "seconds": 0.3}
    return Change(**(given | fields))


def gulp(seconds: float | None = 0.5, turns: int = 2) -> Gulp:
    return Gulp(eaten_bytes=GIB, below_floor_bytes=40 * MIB, give_back_seconds=seconds, released=1, turns=turns)


def full_disk(**fields: Any) -> FullDisk:
    given = {"degraded_seconds": 1.0, "condition": True, "recovered_seconds": 3.0, "turns": 4}
    return FullDisk(**(given | fields))


def killing(**fields: Any) -> Killing:
    given = {"published": 3, "resumed": 3, "lost": (), "not_judged": 1, "start_seconds": 60.0}
    return Killing(**(given | fields))


def passed(**fields: Any) -> Measured:
    given: dict[str, Any] = {
        "oom_kills": 0,
        "turns": (turn(number=1), turn()),
        "gulps": [gulp()],
        "changes": [change(), change(ChangeOutcome.NOTICED), change(ChangeOutcome.KERNEL_REFUSED, seconds=None)],
        "full_disk": full_disk(),
        "killing": killing(),
        "hook": LongestHook(name="build_connector_meta", seconds=0.004),
        "receipts": (evict(), evict("already_on_disk"), evict("evicted", tier="disk"), {"kind": "turn", "time": 2.0}),
    }
    return Measured(**(given | fields))


def test_a_rehearsal_that_kept_every_promise_has_nothing_to_say():
    assert judge(passed()) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"oom_kills": 2}, "the kernel killed 2"),
        ({"conversations_dropped": 1}, "1 conversations were dropped (no receipt)"),
        ({"receipts": (evict(), evict("deadline"))}, "1 of 2 conversations left memory before"),
        ({"failures": ("long-1: it said no",)}, "1 requests failed: long-1: it said no"),
        ({"turns": (turn(cached=900),)}, "87.9% of what could be resumed was cached"),
        ({"hook": LongestHook(name="start_load_kv", seconds=0.0214)}, "21.4 ms (start_load_kv)"),
        ({"gulps": [gulp(None)]}, "did not give enough back"),
        ({"gulps": [gulp(2.4)]}, "took 2.4 s"),
        ({"gulps": [gulp(turns=0)]}, "answered nobody"),
        ({"changes": [change(ChangeOutcome.POD_REFUSED, detail="no room")]}, "was refused by the pod: no room"),
        ({"changes": [change(ChangeOutcome.UNNOTICED, seconds=None)]}, "was not noticed"),
        ({"changes": [change(ChangeOutcome.NOTICED, seconds=1.5)]}, "noticed after 1.5 s"),
        ({"full_disk": full_disk(degraded_seconds=None)}, "did not say so"),
        ({"full_disk": full_disk(recovered_seconds=None)}, "did not go back to it"),
        ({"full_disk": full_disk(turns=0)}, "while the disk was full the pod answered nobody"),
        ({"killing": killing(resumed=2, lost=("long-1",))}, "1 of 3 conversations on disk did not survive"),
        ({"killing": killing(published=0, resumed=0)}, "no conversation was on disk"),
        ({"broken": "the engine ended"}, "could not be carried out to its end: the engine ended"),
    ],
)
def test_every_broken_promise_is_one_line(fields: dict[str, Any], said: str):
    (line,) = judge(passed(**fields))
    assert said in line


def test_a_kernel_that_refuses_has_refused_rightly():
    """EBUSY."""
    refused = change(ChangeOutcome.KERNEL_REFUSED, seconds=None)
    assert judge(passed(changes=[refused])) == []
    assert figures(passed(changes=[refused]))["limit_changes_refused_by_kernel"] == 1


def test_what_was_left_out_is_judged_by_nobody():
    measured = passed(oom_kills=None, gulps=[], changes=[], full_disk=None, killing=None)
    assert judge(measured) == []
    assert "nobody counts" in table(measured)


def test_a_turn_that_a_kill_had_the_right_to_cost_is_no_revisit():
    """S2: what was not published when the pod was killed may be gone."""
    cost = turn("small-4", 3, cached=0, after=True)
    assert judge(passed(turns=(turn(), cost), unpublished=frozenset({"small-4"}))) == []
    assert judge(passed(turns=(turn(), cost))) != []


def test_a_conversation_that_was_in_part_on_disk_goes_on_from_there():
    assert resumed(turn(cached=512), on_disk_tokens=512)
    assert not resumed(turn(cached=384), on_disk_tokens=512)
    assert resumed(turn(cached=1024), on_disk_tokens=4096)


def test_a_conversation_that_its_client_deleted_was_not_dropped():
    drops = ({"kind": "drop", "outcome": "forgotten"}, {"kind": "drop", "outcome": "dropped", "reason": "deadline"})
    assert [drop["reason"] for drop in passed(receipts=drops).drops] == ["deadline"]


def test_the_json_file_has_exactly_its_keys_and_can_be_written():
    written = document(passed(), version="1.2.3", machine={"cores": 2})
    assert list(written) == ["verdict", "figures", "failures", "version", "machine", "receipts"]
    assert written["verdict"] == "pass"
    assert written["receipts"] == {
        "evict": {"written": 1, "already_on_disk": 1, "evicted": 1},
        "turn": {"": 1},
    }
    found = json.loads(json.dumps(written))["figures"]
    assert (found["oom_kills"], found["releases"], found["written_first"], found["limit_changes"]) == (0, 2, 2, 3)
    assert found["limit_confirm_seconds"] == {"median": 0.3, "max": 0.3}
    assert found["conversations_dropped"] == 0
    assert found["longest_hook_seconds"] == 0.004
    assert document(passed(oom_kills=1), version="", machine={})["verdict"] == "fail"


def test_the_table_names_what_people_look_at_first():
    shown = table(passed())
    assert "3 times, 1 rightly refused by the kernel" in shown
    assert "100.0% over 1 revisits" in shown


def test_heap_releases_are_told_by_process_and_allocator():
    heap = {"process": "worker-0", "allocator": "glibc", "resident_before_bytes": 90, "resident_after_bytes": 40}
    receipts = [{"kind": "release", "heaps": [heap | {"trim_seconds": seconds}]} for seconds in (0.1, 0.2, 0.6)]
    (found,) = trims([*receipts, {"kind": "turn"}])
    assert (found["count"], found["median_seconds"], found["max_seconds"]) == (3, 0.2, 0.6)
    assert found["released_bytes"] == 150


def test_times_that_nobody_measured_have_no_spread():
    assert spread([None]) == {}
    assert spread([None, 2.0, 4.0, 3.0]) == {"median": 3.0, "max": 4.0}
