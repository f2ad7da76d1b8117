"""Receipts (section 7): cheap to add, findable, still there after a restart, never in the way of a decision."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_cache.errors import FormatError
from parkade_cache.receipts import HeapRecord, ReadingRecord, Receipt, ReceiptKind, ReceiptLog


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_ids_grow_even_when_the_clock_stands_still_or_steps_back(clock: Clock) -> None:
    log = ReceiptLog(clock=clock)
    first = log.add(ReceiptKind.PARK)
    second = log.add(ReceiptKind.PARK)
    clock.now = 10.0
    third = log.add(ReceiptKind.PARK)
    assert first.id < second.id < third.id


def test_every_kind_of_section_seven_exists() -> None:
    named = (
        "turn park admit refuse evict release write_out spill restore restore_skipped drop resize policy drain "
        "archive adopt recover"
    )
    assert {kind.value for kind in ReceiptKind} == set(named.split())


def test_a_receipt_survives_json() -> None:
    log = ReceiptLog(clock=Clock(5.5))
    added = log.add(
        ReceiptKind.RELEASE,
        outcome="done",
        conversation="c",
        reading_before=ReadingRecord(None, None),
        reading_after=ReadingRecord(7, "cgroup", 8, 9, 1),
        evicted=("a", "b"),
        heaps=(
            HeapRecord(
                process="engine",
                allocator="glibc",
                trim_seconds=0.1,
                resident_before_bytes=2,
                resident_after_bytes=1,
                returned=True,
            ),
        ),
        detail={"old": {"floor": 1}},
    )
    assert Receipt.from_json(json.loads(json.dumps(added.to_json()))) == added


def test_an_unknown_reading_stays_unknown_in_json_and_does_not_become_zero() -> None:
    added = ReceiptLog().add(ReceiptKind.REFUSE, reading_before=ReadingRecord(None))
    reading = added.to_json()["reading_before"]
    assert isinstance(reading, dict)
    assert reading["available_bytes"] is None


def test_a_field_that_does_not_exist_is_an_error_of_the_caller() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        ReceiptLog().add(ReceiptKind.TURN, nonsense=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"id": 1},
        {"id": "x", "time": 1, "kind": "turn"},
        {"id": 1, "time": 1, "kind": "?"},
        {"id": 1, "time": 1, "kind": "turn", "reading_before": 5},
    ],
)
def test_what_is_no_receipt_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        Receipt.from_json(data)


def test_a_newer_versions_extra_field_is_ignored() -> None:
    assert Receipt.from_json({"id": 1, "time": 2, "kind": "turn", "mood": "good"}).kind is ReceiptKind.TURN


def test_queries_filter_and_give_the_newest_last(clock: Clock) -> None:
    log = ReceiptLog(clock=clock)
    for number in range(6):
        clock.now += 1
        log.add(
            ReceiptKind.TURN if number % 2 else ReceiptKind.PARK, conversation="ab"[number % 2], request=str(number)
        )
    turns = log.query(kind="turn")
    assert [receipt.request for receipt in turns] == ["1", "3", "5"]
    assert [receipt.request for receipt in log.query(kind="turn", limit=2)] == ["3", "5"]
    assert [receipt.request for receipt in log.query(conversation="a")] == ["0", "2", "4"]
    assert [receipt.request for receipt in log.query(request="4")] == ["4"]
    assert [receipt.request for receipt in log.query(since=turns[1].id)] == ["4", "5"]
    assert [receipt.request for receipt in log.query(since=1005.0)] == ["5"]
    assert log.query(limit=0) == []


def test_only_the_newest_are_kept_in_memory() -> None:
    log = ReceiptLog(capacity=3)
    added = [log.add(ReceiptKind.TURN) for _ in range(5)]
    assert log.query(limit=10) == added[2:]
    assert log.counts() == {("turn", ""): 5}


def test_whoever_counts_receipts_is_told_of_each() -> None:
    heard: list[Receipt] = []
    log = ReceiptLog(on_add=heard.append)
    assert heard == [log.add(ReceiptKind.DROP, outcome="deadline")]


def test_receipts_and_ids_survive_a_restart(tmp_path: Path, clock: Clock) -> None:
    first = ReceiptLog(folder=tmp_path, clock=clock)
    added = [first.add(ReceiptKind.TURN, request=str(number)) for number in range(3)]
    first.close()
    clock.now = 1.0
    second = ReceiptLog(folder=tmp_path, clock=clock)
    later = second.add(ReceiptKind.TURN)
    second.close()
    assert second.query() == [*added, later]
    assert later.id > added[-1].id
    assert second.counts() == {("turn", ""): 1}


def test_ids_go_on_growing_when_a_crash_took_receipts_before_they_were_written(tmp_path: Path, clock: Clock) -> None:
    first = ReceiptLog(clock=clock)
    lost = first.add(ReceiptKind.TURN)
    clock.now += 0.5
    second = ReceiptLog(folder=tmp_path, clock=clock)
    assert second.add(ReceiptKind.TURN).id > lost.id
    second.close()


def test_a_line_that_a_crash_tore_costs_only_itself(tmp_path: Path, clock: Clock) -> None:
    first = ReceiptLog(folder=tmp_path, clock=clock)
    whole = first.add(ReceiptKind.TURN)
    first.close()
    with (tmp_path / "receipts.jsonl").open("ab") as file:
        file.write(b'{"id": 99, "ki')
    second = ReceiptLog(folder=tmp_path, clock=clock)
    later = second.add(ReceiptKind.PARK)
    second.close()
    third = ReceiptLog(folder=tmp_path, clock=clock)
    third.close()
    assert third.query() == [whole, later]


@pytest.mark.parametrize("junk", [b"", b"\x00\xff\n", b"null\n[]\n5\n", b'{"id": 1}\n', b"\n\n\n"])
def test_a_damaged_file_does_not_keep_the_log_from_opening(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "receipts.jsonl").write_bytes(junk)
    log = ReceiptLog(folder=tmp_path)
    log.add(ReceiptKind.TURN)
    log.close()
    assert len(log.query()) == 1


def test_files_are_rotated_and_bounded(tmp_path: Path) -> None:
    log = ReceiptLog(folder=tmp_path, max_file_bytes=2000, files=3)
    for _ in range(40):
        log.add(ReceiptKind.TURN, reason="x" * 200)
        assert log.flush()
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["receipts.1.jsonl", "receipts.2.jsonl", "receipts.jsonl"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())


def test_the_tail_is_read_back_across_rotated_files(tmp_path: Path, clock: Clock) -> None:
    log = ReceiptLog(folder=tmp_path, max_file_bytes=600, files=4, clock=clock)
    for number in range(8):
        log.add(ReceiptKind.TURN, request=str(number), reason="x" * 150)
        assert log.flush()
    log.close()
    again = ReceiptLog(folder=tmp_path, max_file_bytes=600, files=4, clock=clock)
    again.close()
    assert [receipt.request for receipt in again.query()] == ["0", "1", "2", "3", "4", "5", "6", "7"]


def test_a_broken_disk_is_counted_and_never_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    log = ReceiptLog(folder=tmp_path / "file" / "folder")
    added = log.add(ReceiptKind.TURN)
    assert log.flush()
    log.close()
    assert log.unwritten_total == 1
    assert log.query() == [added]


def test_the_file_is_private_and_a_symlink_in_its_place_is_not_followed(tmp_path: Path) -> None:
    folder, target = tmp_path / "receipts", tmp_path / "precious"
    folder.mkdir()
    target.write_text("keep")
    (folder / "receipts.jsonl").symlink_to(target)
    log = ReceiptLog(folder=folder)
    log.add(ReceiptKind.TURN)
    log.flush()
    log.close()
    assert target.read_text() == "keep"
    assert log.unwritten_total == 1
    private = ReceiptLog(folder=tmp_path / "new")
    private.add(ReceiptKind.TURN)
    private.close()
    assert (tmp_path / "new" / "receipts.jsonl").stat().st_mode & 0o777 == 0o600


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    log = ReceiptLog(folder=tmp_path)
    log.close()
    log.close()


def test_many_threads_add_without_losing_or_repeating_an_id(tmp_path: Path) -> None:
    log = ReceiptLog(folder=tmp_path)

    def add() -> None:
        for _ in range(200):
            log.add(ReceiptKind.TURN)

    threads = [threading.Thread(target=add) for _ in range(4)]
    _each(threads, threading.Thread.start)
    _each(threads, threading.Thread.join)
    log.close()
    ids = [json.loads(line)["id"] for line in (tmp_path / "receipts.jsonl").read_text().splitlines()]
    assert len(ids) == 800
    assert ids == sorted(set(ids))


def _each(threads: list[threading.Thread], call: Callable[[threading.Thread], None]) -> None:
    for thread in threads:
        call(thread)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.none(), max_size=4))
def test_any_document_is_a_receipt_or_a_format_error(data: dict[str, object]) -> None:
    with contextlib.suppress(FormatError):
        Receipt.from_json(data)
