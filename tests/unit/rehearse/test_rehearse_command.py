"""The command line of a rehearsal, without an engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from parkade_serving.cli import COMMANDS, help_text
from parkade_serving.command_line import ExitCode
from parkade_serving.demo.engine import EngineFailedError
from parkade_serving.rehearse import command
from parkade_serving.rehearse.group import NoGroupError


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parkade"


def fail_with(error: BaseException):
    def run(*_: object) -> int:
        raise error

    return run


def test_it_is_one_of_the_commands_and_help_needs_no_engine(capsys: pytest.CaptureFixture[str]):
    assert COMMANDS["rehearse"].module == "parkade_serving.rehearse"
    assert "rehearse" in help_text()
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    assert caught.value.code == 0
    assert "parkade rehearse --changes 20" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--changes", "-1"], ["--changes", "few"], ["--minutes", "x"], ["--what"]])
def test_a_wrong_option_is_refused_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == ExitCode.USAGE
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_without_root_it_says_so_in_one_line(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.main(["--quick"]) == ExitCode.USAGE
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert "needs root" in said
    assert "--no-cgroup" in said
    assert list(base.iterdir()) == []


def test_a_machine_with_too_little_memory_is_refused_with_what_it_needs(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "LEAST_MEMORY_BYTES", 1 << 60)
    assert command.main(["--no-cgroup"]) == ExitCode.USAGE
    assert "the rehearsal needs" in capsys.readouterr().err


def test_a_disk_without_room_is_refused_with_what_to_do(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "LEAST_MEMORY_BYTES", 0)
    monkeypatch.setattr(command, "LEAST_DISK_BYTES", 1 << 60)
    assert command.main(["--no-cgroup"]) == ExitCode.USAGE
    assert "--dir" in capsys.readouterr().err


@pytest.mark.parametrize("error", [EngineFailedError("it ended\nValueError: no room"), NoGroupError(1, "no room")])
def test_what_keeps_it_from_being_carried_out_is_said(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
):
    monkeypatch.setattr(command, "_run", fail_with(error))
    assert command.main([]) == ExitCode.USAGE
    assert "no room" in capsys.readouterr().err
    assert list(base.iterdir()) == []


def test_a_termination_signal_cleans_up(base: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return signal.pause() or 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "_run", run)
    assert command.main([]) == ExitCode.INTERRUPTED
    assert list(base.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
