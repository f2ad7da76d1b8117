"""Calls to a disk that may hang: given up in time, one at a time, and never lost when they end after all (D8, W3)."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from parkade_cache.errors import SpillError
from parkade_cache.spill.patience import HeardFileSystem, Patience
from parkade_cache.spill.testing import FaultyFileSystem


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """The disk answers once it is set."""
    event = threading.Event()
    yield event
    event.set()


def hang(patience: Patience, answer: threading.Event, late: list[str]) -> None:
    def work() -> str:
        answer.wait(20)
        return "read"

    with pytest.raises(SpillError) as caught:
        patience.call(work, too_late=late.append)
    assert caught.value.errno == errno.ETIMEDOUT


def settle(patience: Patience) -> None:
    while patience.lost:
        threading.Event().wait(0.001)


def test_without_a_limit_a_call_is_made_by_its_caller() -> None:
    assert Patience().call(threading.current_thread) is threading.current_thread()


def test_a_call_that_ends_in_time_gives_its_result_or_its_error() -> None:
    patience = Patience(20.0)
    assert patience.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        patience.call(lambda: 1 // 0)
    assert not patience.lost


def test_a_call_made_by_a_call_does_not_wait_for_it() -> None:
    patience = Patience(20.0)
    assert patience.call(lambda: patience.call(lambda: 7)) == 7


def test_while_a_call_hangs_the_next_is_refused_at_once(answer: threading.Event) -> None:
    patience = Patience(0.01)
    hang(patience, answer, [])
    made: list[str] = []
    with pytest.raises(SpillError, match="does not answer"):
        patience.call(lambda: made.append("made"))
    assert made == []
    assert patience.lost


def test_a_call_of_many_steps_may_take_long() -> None:
    """Removing another identity's hundreds of files is slow; it is no disk that hangs."""
    patience = Patience(0.05)

    def work() -> int:
        for _ in range(10):
            threading.Event().wait(0.02)
            patience.heard()
        return 7

    assert patience.call(work) == 7


def test_every_operation_of_a_file_system_is_heard(tmp_path: Path) -> None:
    heard: list[int] = []
    fs = HeardFileSystem(FaultyFileSystem(), lambda: heard.append(1))
    fs.make_folder(tmp_path / "new")
    with pytest.raises(FileExistsError):
        fs.make_folder(tmp_path / "new")
    assert fs.names(tmp_path) == ["new"]
    assert len(heard) == 3


def test_what_a_call_brings_too_late_is_dealt_with_before_the_next_one(answer: threading.Event) -> None:
    patience = Patience(0.01)
    late: list[str] = []
    hang(patience, answer, late)
    assert late == []
    answer.set()
    settle(patience)
    patience.seconds = 20.0
    assert patience.call(lambda: list(late)) == ["read"]


def test_an_error_that_comes_too_late_is_nobodys(answer: threading.Event) -> None:
    patience = Patience(0.01)
    late: list[None] = []

    def fail() -> None:
        answer.wait(20)
        raise OSError(errno.EIO, "simulated")

    with pytest.raises(SpillError):
        patience.call(fail, too_late=late.append)
    answer.set()
    settle(patience)
    assert late == []
    assert Patience(20.0).call(lambda: 7) == 7


def test_an_answer_that_cannot_be_dealt_with_does_not_keep_the_next_call(
    answer: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    patience = Patience(0.01)

    def confused(_: object) -> None:
        raise ValueError("confused")

    with pytest.raises(SpillError):
        patience.call(lambda: answer.wait(20), too_late=confused)
    answer.set()
    settle(patience)
    patience.seconds = 20.0
    assert patience.call(lambda: 7) == 7
    assert "could not be undone" in caplog.text
