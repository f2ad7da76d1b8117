"""The owner's socket with a real server and real clients."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import zmq

from parkade_cache.errors import DirectoryInUseError, SettingsError, UnsafePathError
from parkade_serving.rpc import CallFailure, OwnerCallError, OwnerClient, OwnerServer, OwnerUnavailableError


def not_found(params: dict[str, Any]) -> object:
    raise KeyError(f"no conversation {params['id']}")


def invalid(_: dict[str, Any]) -> object:
    raise ValueError("floor:\n must be below the limit")


def broken(_: dict[str, Any]) -> object:
    raise OSError(5, "Input/output error")


HANDLERS = {
    "echo": lambda params: params,
    "proxy": lambda _: MappingProxyType({"a": (1, 2)}),
    "unsendable": lambda _: object(),
    "conversation": not_found,
    "set_policy": invalid,
    "broken": broken,
    "big": lambda params: ["x" * 1000] * params["thousands"],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pod" / "owner.sock"


@pytest.fixture
def server(path: Path) -> Iterator[OwnerServer]:
    with OwnerServer(path, HANDLERS) as server:
        yield server


@pytest.fixture
def client(path: Path) -> OwnerClient:
    return OwnerClient(path)


def failure_of(client: OwnerClient, name: str, params: dict[str, Any] | None = None) -> tuple[CallFailure, str]:
    with pytest.raises(OwnerCallError) as caught:
        client.call(name, params)
    return caught.value.failure, str(caught.value)


def test_a_call_is_answered(server: OwnerServer, client: OwnerClient) -> None:
    assert client.call("echo", {"a": [1, 2.5, None, "ä", {"b": True}]}) == {"a": [1, 2.5, None, "ä", {"b": True}]}


def test_an_event_loop_can_call_too(server: OwnerServer, client: OwnerClient) -> None:
    async def ask() -> list[object]:
        return list(await asyncio.gather(*(client.acall("echo", {"n": number}) for number in range(20))))

    assert asyncio.run(ask()) == [{"n": number} for number in range(20)]
    assert asyncio.run(ask()) == [{"n": number} for number in range(20)]


def test_an_answer_of_many_megabytes_arrives_whole(server: OwnerServer, client: OwnerClient) -> None:
    answer = client.call("big", {"thousands": 20_000}, timeout_s=30)
    assert isinstance(answer, list)
    assert len(answer) == 20_000


def test_failures_say_what_kind_they_are(server: OwnerServer, client: OwnerClient) -> None:
    assert failure_of(client, "conversation", {"id": "c1"}) == (CallFailure.NOT_FOUND, "no conversation c1")
    assert failure_of(client, "set_policy") == (CallFailure.INVALID, "floor: must be below the limit")
    assert failure_of(client, "nonsense")[0] is CallFailure.UNKNOWN_CALL
    assert failure_of(client, "broken") == (CallFailure.FAILED, "OSError: [Errno 5] Input/output error")
    assert failure_of(client, "unsendable")[0] is CallFailure.FAILED
    assert client.call("proxy") == {"a": [1, 2]}


def test_a_failure_in_an_event_loop_is_the_same(server: OwnerServer, client: OwnerClient) -> None:
    with pytest.raises(OwnerCallError) as caught:
        asyncio.run(client.acall("conversation", {"id": "c1"}))
    assert caught.value.failure is CallFailure.NOT_FOUND


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x92\xa3abc\x01", b"\x92\xa1\xff\x80", os.urandom(300)])
def test_rubbish_is_answered_and_does_not_end_the_server(
    server: OwnerServer, client: OwnerClient, path: Path, payload: bytes
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{path}")
        dealer.send(payload)
        assert dealer.poll(5000)
    assert client.call("echo") == {}


def test_a_client_that_speaks_no_zmq_does_not_end_the_server(
    server: OwnerServer, client: OwnerClient, path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")
    assert client.call("echo") == {}


def test_no_owner_is_said_at_once(client: OwnerClient) -> None:
    with pytest.raises(OwnerUnavailableError, match="no cache owner at"):
        client.call("echo", timeout_s=60)
    with pytest.raises(OwnerUnavailableError, match="no cache owner at"):
        asyncio.run(client.acall("echo", timeout_s=60))


def test_an_owner_that_does_not_answer_is_given_up(path: Path, client: OwnerClient) -> None:
    release = threading.Event()
    with OwnerServer(path, {"slow": lambda _: release.wait(30)}):
        with pytest.raises(OwnerUnavailableError, match=r"did not answer 'slow' within 0\.05 s"):
            client.call("slow", timeout_s=0.05)
        with pytest.raises(OwnerUnavailableError, match="did not answer"):
            asyncio.run(client.acall("slow", timeout_s=0.05))
        release.set()


def test_a_socket_that_a_killed_owner_left_is_taken_over(path: Path, client: OwnerClient) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(OwnerUnavailableError):
        client.call("echo", timeout_s=0.05)
    with OwnerServer(path, HANDLERS):
        assert client.call("echo", {"a": 1}) == {"a": 1}


def test_a_client_finds_an_owner_that_was_restarted(path: Path, client: OwnerClient) -> None:
    for life in range(3):
        with OwnerServer(path, {"life": lambda _, life=life: life}):
            assert client.call("life") == life
        assert not path.exists()


def test_a_living_owner_keeps_its_socket(server: OwnerServer, client: OwnerClient, path: Path) -> None:
    with pytest.raises(DirectoryInUseError, match="--socket-dir"):
        OwnerServer(path, HANDLERS).start()
    assert client.call("echo") == {}


def test_a_long_call_does_not_keep_others_waiting(path: Path, client: OwnerClient) -> None:
    begun, release = threading.Event(), threading.Event()

    def drain(_: dict[str, Any]) -> str:
        begun.set()
        release.wait(30)
        return "drained"

    with OwnerServer(path, {"drain": drain, "echo": lambda params: params}):
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(client.call("drain", timeout_s=30)))
        waiting.start()
        assert begun.wait(10)
        assert client.call("echo", {"a": 1}) == {"a": 1}
        release.set()
        waiting.join(10)
        assert answers == ["drained"]


def test_more_calls_than_the_owner_can_hold_are_refused_and_not_queued_for_ever(
    path: Path, client: OwnerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parkade_serving.rpc_server._MAX_WAITING", 0)
    with OwnerServer(path, HANDLERS):
        assert failure_of(client, "echo")[0] is CallFailure.BUSY


def test_the_socket_and_its_folder_are_private(server: OwnerServer, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UnsafePathError, match="chmod 700"):
        OwnerServer(folder / "owner.sock", {}).start()


def test_a_symlink_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafePathError, match="link"):
        OwnerServer(tmp_path / "link" / "owner.sock", {}).start()


def test_a_path_too_long_for_a_socket_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--socket-dir"):
        OwnerServer(tmp_path / ("x" * 120) / "owner.sock", {}).start()


def test_closing_twice_and_closing_unstarted_is_harmless(path: Path) -> None:
    OwnerServer(path, {}).close()
    server = OwnerServer(path, {}).start()
    server.close()
    server.close()
