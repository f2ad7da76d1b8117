"""The explanation of a turn, from receipts alone."""

from __future__ import annotations

from typing import Any

from parkade_serving.explain import explain


def receipt(kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": 0.0, "kind": kind, **fields}


def turn(prompt: int, anew: int, **fields: Any) -> dict[str, Any]:
    return receipt("turn", outcome="x", prompt_tokens=prompt, read_anew_tokens=anew, **fields)


def test_what_happened_between_the_last_two_turns_is_told_in_order() -> None:
    found = explain(
        "c",
        None,
        [
            turn(10, 10),
            receipt("evict", outcome="before"),
            turn(20, 0),
            receipt("write_out", outcome="written", bytes=2048),
            receipt("evict", outcome="evicted", reason="admission"),
            receipt("spill", outcome="written"),
            turn(30, 10, reason="disk_error"),
            receipt("drop", outcome="later"),
        ],
    )
    assert "read 10 anew, because: disk_error" in found.headline
    assert [detail.split("Z ")[1] for detail in found.details[:2]] == [
        "write_out written (2.0 KiB)",
        "evict evicted (admission)",
    ]
    assert len(found.details) == 3


def test_a_turn_that_read_nothing_anew_has_no_reason_even_if_one_is_noted() -> None:
    assert "because" not in explain("c", None, [turn(10, 0, reason="x")]).headline


def test_without_a_turn_on_record_the_events_are_told() -> None:
    found = explain("c", {"ram_bytes": 0, "disk_bytes": 1024}, [receipt("recover", outcome="found")])
    assert found.known
    assert "No turn" in found.headline
    assert found.details[-1] == "now: 0 B in RAM, 1.0 KiB on disk"


def test_nothing_known_is_said() -> None:
    assert not explain("c", None, []).known


def test_a_turn_receipt_with_holes_is_not_guessed_at() -> None:
    assert explain("c", None, [receipt("turn", outcome="aborted")]).headline.endswith("ended as aborted.")
