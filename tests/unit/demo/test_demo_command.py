"""The command line of the demo, without an engine."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest

from parkade_cache.errors import ParkadeError
from parkade_serving.command_line import ExitCode
from parkade_serving.demo import command
from parkade_serving.demo.console import Console
from parkade_serving.demo.engine import EngineFailedError


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parkade"


def fail_with(error: BaseException):
    def run(*_: object) -> int:
        raise error

    return run


def test_help_shows_an_example_and_needs_no_engine(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    assert caught.value.code == 0
    assert "example: parkade demo" in capsys.readouterr().out


def test_runs_are_made_in_their_order_however_they_are_named():
    options = command.parser().parse_args(["--runs", "tiny,no-cache"])
    assert [plan.name for plan in options.runs] == ["no-cache", "tiny"]


@pytest.mark.parametrize("names", ["", "huge", "tiny,huge"])
def test_an_unknown_run_is_refused_in_one_line(names: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        command.main(["--runs", names])
    assert caught.value.code == ExitCode.USAGE
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_interrupted_demo_removes_its_folder(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_run", fail_with(KeyboardInterrupt()))
    assert command.main([]) == ExitCode.INTERRUPTED
    assert list(base.iterdir()) == []


def test_a_termination_signal_cleans_up_too(base: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return signal.pause() or 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "_run", run)
    assert command.main([]) == ExitCode.INTERRUPTED
    assert list(base.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_engine_that_fails_is_shown_with_its_log(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "_run", fail_with(EngineFailedError("it ended\nValueError: no room")))
    assert command.main([]) == ExitCode.USAGE
    assert "ValueError: no room" in capsys.readouterr().err


def test_a_folder_is_kept_when_that_was_asked_for(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_run", lambda *_: 0)
    assert command.main(["--keep"]) == 0
    assert len(list(base.iterdir())) == 1


def test_a_disk_without_room_is_refused_with_what_to_do(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_NEEDED_DISK_BYTES", 1 << 60)
    base.mkdir()
    with pytest.raises(ParkadeError, match="--dir"):
        command._check_disk(base)


def test_a_file_in_place_of_the_folder_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ParkadeError, match="--dir"):
        command.main(["--dir", str(file)])


def test_waiting_is_shown_on_a_terminal_only():
    console = Console(out=io.StringIO())
    console.status("waiting")
    console.line("done")
    assert console.out.getvalue().endswith("done\n")
    assert "waiting" not in console.out.getvalue()
