"""The command line: fast help, one-line errors, exit codes that mean something."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parkade_serving import cli
from parkade_serving.cli import COMMANDS, main

TURN = {
    "id": 2,
    "time": 1_767_225_600.0,
    "kind": "turn",
    "outcome": "partial",
    "reason": "restore_deadline",
    "conversation": "c" * 32,
    "prompt_tokens": 1000,
    "read_anew_tokens": 100,
    "reused_ram_tokens": 900,
}
SUMMARY = {
    "version": "0.1.0",
    "identity": {"model": "m"},
    "ready": True,
    "draining": False,
    "uptime_seconds": 5,
    "memory": {
        "available_bytes": None,
        "source": None,
        "limit_bytes": 2**30,
        "floor_bytes": 2**20,
        "parked_bytes": 2**20,
        "parked_max_bytes": 2**21,
    },
    "ram": {"conversations": 1, "bytes": 2**20},
    "disk": {"enabled": True, "bytes": 1, "capacity_bytes": 2**31},
    "turns": {"resumed_ram": 3},
    "dropped_conversations_total": 0,
    "conditions": [{"type": "SpillHealthy", "status": "False", "reason": "ReadOnly", "message": "mount is read-only"}],
}


class Pod:
    """A real HTTP server with a pod's answers."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, object]] = {
            "/parkade/v1/summary": (200, SUMMARY),
            "/parkade/v1/conversations": (200, {"conversations": [{"id": "c" * 32, "tokens": 7, "in_flight": True}]}),
            "/parkade/v1/conversations/" + "c" * 32: (200, {"ram_bytes": 2**20, "disk_bytes": 0, "pinned": True}),
            "/parkade/v1/receipts": (200, {"receipts": [TURN]}),
            "/parkade/v1/drain": (200, {"seconds": 1.5, "outcomes": {"written": 2}, "dropped": 0}),
        }
        self.asked: list[tuple[str, str, str | None]] = []
        pod = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                pod.asked.append((self.command, self.path, self.headers.get("Authorization")))
                status, body = pod.answers.get(self.path.split("?")[0], (404, {"detail": "no conversation here"}))
                payload = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def pod() -> Iterator[Pod]:
    pod = Pod()
    thread = threading.Thread(target=pod.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield pod
    pod.server.shutdown()
    thread.join()
    pod.server.server_close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARKADE_URL", "PARKADE_TOKEN_FILE", "PARKADE_SOCKET_DIR", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert "exit codes" in text


@pytest.mark.parametrize("name", ["serve", "receipts", "explain", "top", "drain"])
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"example:\n  parkade {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["receipts", "--help"], ["serve", "--help=all"]]
)
def test_help_imports_no_engine_and_no_web_framework(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom parkade_serving.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'vllm', 'torch', 'fastapi', 'zmq', 'numpy', 'psutil'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [[], ["paint"]])
def test_an_unknown_command_is_one_line_and_exit_code_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("parkade ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "name the model first"),
        (["serve", "m", "--spill-dir", "/x"], "--spill-size"),
        (["serve", "m", "--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["serve", "m", "--tenant-header", "not a header"], "header name"),
        (["top", "--url", "localhost:8000"], "http://127.0.0.1:8000"),
    ],
)
def test_settings_errors_are_one_line_and_exit_code_two(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert error.startswith(f"parkade {arguments[0]}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "m", "--parked-max", "lots"],
        ["serve", "m", "--policy", "/nowhere"],
        ["serve", "m", "--spill-mode", "never"],
        ["serve", "m", "--min-tokens", "-1"],
        ["receipts", "--limit", "x"],
        ["explain"],
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_print_command_prints_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "pod"
    assert (
        main(["serve", "m", "--parked-max", "1Mi", "--socket-dir", str(folder), "--print-command", "--port", "9"]) == 0
    )
    text = capsys.readouterr().out
    assert "serve m --port 9 --kv-transfer-config" in text
    assert f"PARKADE_SOCKET_DIR={folder}" in text
    assert not folder.exists()


def test_no_pod_is_exit_code_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 3
    assert "set --url" in capsys.readouterr().err


def test_something_that_is_no_pod_is_exit_code_three(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.answers["/parkade/v1/receipts"] = (200, b"<html>")
    assert main(["receipts", "--url", pod.url]) == 3
    assert "no Parkade pod" in capsys.readouterr().err


def test_a_refusal_is_exit_code_four_with_the_pods_own_words(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.answers["/parkade/v1/receipts"] = (401, {"detail": "this route needs a token"})
    assert main(["receipts", "--url", pod.url]) == 4
    assert "this route needs a token" in capsys.readouterr().err


def test_the_token_is_sent(pod: Pod, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert main(["receipts", "--url", pod.url, "--token-file", str(tmp_path / "token")]) == 0
    assert pod.asked[0][2] == "Bearer secret"


def test_receipts_are_a_table_or_json_and_none_is_exit_code_one(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["receipts", "--url", pod.url, "--kind", "turn", "--conversation", "a b"]) == 0
    assert "2026-01-01 00:00:00Z  turn  partial" in capsys.readouterr().out
    assert pod.asked[0][1] == "/parkade/v1/receipts?conversation=a+b&kind=turn&limit=100"
    assert main(["receipts", "--url", pod.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"receipts": [TURN]}
    pod.answers["/parkade/v1/receipts"] = (200, {"receipts": []})
    assert main(["receipts", "--url", pod.url]) == 1


def test_explain_says_why_tokens_were_read_anew(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--url", pod.url, "c" * 32]) == 0
    text = capsys.readouterr().out
    assert "reused 900 of 1000 prompt tokens and read 100 anew, because: restore_deadline" in text
    assert "900 from RAM" in text
    assert "1.0 MiB in RAM" in text


def test_explain_tries_the_clients_own_id_and_says_when_nothing_is_known(
    pod: Pod, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.answers["/parkade/v1/receipts"] = (200, {"receipts": []})
    assert main(["explain", "--url", pod.url, "my/session", "--tenant", "acme", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["known"] is False
    assert any("my%2Fsession?by=client&tenant=acme" in path for _, path, _ in pod.asked)


def test_top_shows_the_pod_once(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", pod.url]) == 0
    text = capsys.readouterr().out
    for shown in (
        "available unknown",
        "limit 1.0 GiB",
        "[####################....",
        "SpillHealthy: ReadOnly",
        "resumed_ram 3",
    ):
        assert shown in text
    assert main(["top", "--once", "--url", pod.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"] == SUMMARY


def test_drain_says_what_was_written_and_a_loss_is_exit_code_one(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--url", pod.url, "--seconds", "9"]) == 0
    assert "drained in 1.5 s: written 2" in capsys.readouterr().out
    assert pod.asked[0][:2] == ("POST", "/parkade/v1/drain?seconds=9.0")
    pod.answers["/parkade/v1/drain"] = (200, {"seconds": 1, "outcomes": {"deadline": 1}, "dropped": 1})
    assert main(["drain", "--url", pod.url, "--json"]) == 1


def fake_module(run: Callable[[list[str]], Any]) -> ModuleType:
    module = ModuleType("fake")
    module.main = run  # type: ignore[attr-defined]
    return module


def test_other_peoples_commands_get_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(cli.importlib, "import_module", lambda _: fake_module(given.append))
    assert main(["bench", "step", "--json", "x"]) == 0
    assert given == [["step", "--json", "x"]]


def test_a_missing_module_is_said_and_not_traced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: str) -> ModuleType:
        raise ModuleNotFoundError("no", name="zmq")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    assert main(["demo"]) == 2
    assert "zmq" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", lambda _: fake_module(interrupted))
    assert main(["bench"]) == 130
    assert capsys.readouterr().err == ""
