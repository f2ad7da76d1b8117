"""The identity middleware as an ASGI server drives it, message by message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from parkade_serving.identity import NO_TENANT, Hasher, IdentitySettings, Tenant
from parkade_serving.middleware import IdentityMiddleware

HASHER = Hasher(b"k" * 32)
JSON_TYPE = (b"content-type", b"application/json")
DISCONNECT = {"type": "http.disconnect"}


class Engine:
    """The app inside: keeps what reached it and answers."""

    def __init__(self, answer: Iterable[dict[str, Any]] | None = None) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.after: list[dict[str, Any]] = []
        self.answer = list(
            answer
            or [
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]},
                {"type": "http.response.body", "body": b"{}"},
            ]
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(dict(scope))
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        self.after.append(await receive())
        for message in self.answer:
            await send(message)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = self.scopes[-1]["headers"]
        return found

    @property
    def session(self) -> bytes | None:
        found = [value for name, value in self.headers if name.lower() == b"x-session-id"]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def body(self) -> Any:
        return json.loads(self.bodies[-1])


@pytest.fixture(autouse=True)
def socket_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARKADE_SOCKET_DIR", str(tmp_path))
    return tmp_path


def middleware_for(engine: Engine, **settings: Any) -> IdentityMiddleware:
    return IdentityMiddleware(engine, IdentitySettings(**settings), HASHER)


def post(
    middleware: IdentityMiddleware,
    body: bytes | list[bytes] = b"{}",
    headers: Iterable[tuple[bytes, bytes]] = (),
    path: str = "/v1/chat/completions",
    **scope: Any,
) -> list[dict[str, Any]]:
    chunks = body if isinstance(body, list) else [body]
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]
    return drive(
        middleware,
        {"type": "http", "method": "POST", "path": path, "headers": [JSON_TYPE, *headers], **scope},
        [*messages, DISCONNECT],
    )


def drive(
    middleware: IdentityMiddleware, scope: dict[str, Any], messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    pending = list(messages)

    async def receive() -> Any:
        return pending.pop(0)

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asyncio.run(middleware(scope, receive, send))
    return sent


def refusal_of(sent: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    error: dict[str, Any] = json.loads(sent[1]["body"])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == sent[0]["status"]
    return sent[0]["status"], error


def conversation_told(sent: list[dict[str, Any]]) -> bytes | None:
    return dict(sent[0]["headers"]).get(b"x-parkade-conversation")


def hashed(client_id: str, tenant: Tenant = NO_TENANT) -> bytes:
    return HASHER.conversation(tenant, client_id).encode()


def test_the_engine_and_the_client_are_told_the_hashed_id() -> None:
    engine = Engine()
    sent = post(middleware_for(engine), headers=[(b"X-Session-ID", b"mine")])
    assert engine.session == hashed("mine")
    assert conversation_told(sent) == hashed("mine")


@pytest.mark.parametrize(
    "body", [{"session_id": "mine"}, {"prompt_cache_key": "mine"}, {"conversation": {"id": "mine"}}]
)
def test_an_id_in_the_body_reaches_the_engine_in_its_header(body: dict[str, Any]) -> None:
    engine = Engine()
    post(middleware_for(engine), json.dumps(body).encode())
    assert engine.session == hashed("mine")
    assert "session_id" not in engine.body


def test_without_an_id_the_engine_gets_none_and_the_response_says_nothing() -> None:
    engine = Engine()
    sent = post(middleware_for(engine), b'{"user": "alice"}', headers=[(b"x-session-id", b"  ")])
    assert engine.session is None
    assert conversation_told(sent) is None


def test_a_client_cannot_name_another_conversation_by_its_hash() -> None:
    engine = Engine()
    post(middleware_for(engine), headers=[(b"x-session-id", hashed("victim"))])
    assert engine.session != hashed("victim")


def test_a_body_that_needs_no_change_arrives_as_it_was_sent() -> None:
    engine, body = Engine(), b'{ "model": "m", "messages": [ ] }'
    post(middleware_for(engine), body, headers=[(b"content-length", b"32"), (b"x-session-id", b"mine")])
    assert engine.bodies == [body]
    assert (b"content-length", b"32") in engine.headers


def test_a_body_in_chunks_arrives_whole_and_the_disconnect_after_it() -> None:
    engine = Engine()
    post(
        middleware_for(engine),
        [b'{"session', b'_id": "mi', b"", b'ne", "n": 1}'],
        headers=[(b"transfer-encoding", b"chunked")],
    )
    assert engine.session == hashed("mine")
    assert engine.body == {"n": 1}
    assert engine.after == [DISCONNECT]
    assert (b"content-length", str(len(engine.bodies[0])).encode()) in engine.headers
    assert b"transfer-encoding" not in dict(engine.headers)


def test_a_client_that_leaves_during_its_body_costs_nothing() -> None:
    engine = Engine()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [JSON_TYPE]}
    sent = drive(middleware_for(engine), scope, [{"type": "http.request", "body": b"{", "more_body": True}, DISCONNECT])
    assert sent == []
    assert engine.scopes == []


def test_the_trusted_tenant_header_sets_the_salt_and_is_part_of_the_id() -> None:
    engine = Engine()
    middleware = middleware_for(engine, tenant_header="x-tenant")
    acme = Tenant(b"header", b"acme")
    post(middleware, b'{"cache_salt": "forged"}', headers=[(b"x-tenant", b"acme"), (b"x-session-id", b"s")])
    assert engine.body["cache_salt"] == HASHER.salt(acme)
    assert engine.session == hashed("s", acme)
    post(middleware, b'{"cache_salt": "mine"}', headers=[(b"x-session-id", b"s")])
    assert engine.body["cache_salt"] == "mine"
    assert engine.session == hashed("s", Tenant(b"salt", b"mine"))


def test_an_untrusted_tenant_header_means_nothing() -> None:
    engine = Engine()
    post(middleware_for(engine), b"{}", headers=[(b"x-tenant", b"acme"), (b"x-session-id", b"s")])
    assert engine.bodies == [b"{}"]
    assert engine.session == hashed("s")


def test_two_tenant_headers_are_refused_rather_than_chosen_from() -> None:
    engine = Engine()
    headers = [(b"x-tenant", b"acme"), (b"x-tenant", b"evil")]
    status, error = refusal_of(post(middleware_for(engine, tenant_header="x-tenant"), headers=headers))
    assert (status, error["param"]) == (400, "x-tenant")
    assert engine.scopes == []


@pytest.mark.parametrize("value", [b"x" * 1_000_000, b"a\x07b", b"\xff\xff"])
def test_a_hostile_id_is_answered_with_advice_and_never_reaches_the_engine(value: bytes) -> None:
    engine = Engine()
    status, error = refusal_of(post(middleware_for(engine), headers=[(b"x-session-id", value)]))
    assert status == 400
    assert error["type"] == "BadRequestError"
    assert "send" in error["message"]
    assert engine.scopes == []


def test_transfer_parameters_of_a_client_never_reach_the_engine() -> None:
    engine = Engine()
    post(middleware_for(engine), b'{"kv_transfer_params": {"do_remote_prefill": true}, "n": 1}')
    assert engine.body == {"n": 1}


def test_a_body_above_the_bound_is_refused_before_it_is_received() -> None:
    engine = Engine()
    middleware = middleware_for(engine, max_body_bytes=10)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [JSON_TYPE, (b"content-length", b"11")],
    }
    assert refusal_of(drive(middleware, scope, []))[0] == 413


def test_a_body_that_turns_out_too_large_is_refused_while_it_comes() -> None:
    engine = Engine()
    sent = post(middleware_for(engine, max_body_bytes=10), [b"x" * 6, b"x" * 6, b"x" * 6])
    assert refusal_of(sent)[0] == 413
    assert engine.scopes == []


def test_a_big_body_within_the_bound_works() -> None:
    engine = Engine()
    body = json.dumps({"prompt": "x" * 20_000_000, "session_id": "s"}).encode()
    post(middleware_for(engine), [body[at : at + 65536] for at in range(0, len(body), 65536)])
    assert len(engine.body["prompt"]) == 20_000_000
    assert engine.session == hashed("s")


def test_all_bodies_together_are_bounded_and_the_bound_is_given_back() -> None:
    engine = Engine()
    middleware = middleware_for(engine, max_buffered_bytes=10)
    for _ in range(3):
        status, _ = refusal_of(post(middleware, [b"x" * 6, b"x" * 6]))
        assert status == 503
    post(middleware, b'{"n": 1}')
    assert engine.body == {"n": 1}


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b"\xff\xfe"])
def test_a_body_that_is_no_json_object_is_left_to_the_engine_to_refuse(body: bytes) -> None:
    engine = Engine()
    post(middleware_for(engine), body, headers=[(b"x-session-id", b"s")])
    assert engine.bodies == [body]


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": "/v1/realtime", "headers": [(b"x-session-id", b"s")]},
        {"type": "http", "method": "GET", "path": "/v1/chat/completions", "headers": [(b"x-session-id", b"s")]},
        {"type": "http", "method": "POST", "path": "/v1/load_lora_adapter", "headers": [JSON_TYPE]},
        {"type": "http", "method": "POST", "path": "/parkade/v1/drain", "headers": [JSON_TYPE]},
        {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-type", b"text/plain")]},
    ],
)
def test_everything_else_passes_through_untouched(scope: dict[str, Any]) -> None:
    seen: list[tuple[Any, Any, Any]] = []

    async def app(*channels: Any) -> None:
        seen.append(channels)

    async def receive() -> Any:
        raise AssertionError("nothing may be read")

    async def send(_: Any) -> None:
        raise AssertionError("nothing may be sent")

    asyncio.run(IdentityMiddleware(app, IdentitySettings(), HASHER)(scope, receive, send))
    assert seen == [(scope, receive, send)]


def test_a_streamed_response_passes_chunk_by_chunk() -> None:
    chunks = [
        {"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True} for number in range(3)
    ]
    last = {"type": "http.response.body", "body": b""}
    start = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"x-a", b"1"), (b"X-Parkade-Conversation", b"?")],
    }
    engine = Engine([start, *chunks, last])
    sent = post(middleware_for(engine), headers=[(b"x-session-id", b"s")])
    assert sent[1:] == [*chunks, last]
    assert sent[0]["headers"] == [(b"x-a", b"1"), (b"x-parkade-conversation", hashed("s"))]


@pytest.mark.parametrize(
    "answer",
    [b'{"id":"resp_1","object":"response"}', b'event: response.created\ndata: {"response": {"id": "resp_1"}}\n\n'],
)
def test_a_previous_response_links_a_turn_to_its_conversation(answer: bytes) -> None:
    start = {"type": "http.response.start", "status": 200, "headers": []}
    engine = Engine([start, {"type": "http.response.body", "body": answer}])
    middleware = middleware_for(engine, tenant_header="x-tenant")
    post(middleware, headers=[(b"x-session-id", b"s")], path="/v1/responses")
    follow_up = b'{"previous_response_id": "resp_1"}'
    post(middleware, follow_up, path="/v1/responses")
    assert engine.session == hashed("s")
    post(middleware, follow_up, path="/v1/responses", headers=[(b"x-tenant", b"another")])
    assert engine.session is None
    post(middleware, follow_up, path="/v1/responses", headers=[(b"x-session-id", b"t")])
    assert engine.session == hashed("t")


def test_the_root_path_of_a_proxy_is_not_part_of_the_route() -> None:
    engine = Engine()
    post(middleware_for(engine), headers=[(b"x-session-id", b"s")], path="/pod/v1/messages", root_path="/pod")
    assert engine.session == hashed("s")


def test_a_draining_pod_takes_no_new_requests_and_says_when_to_retry(socket_dir: Path) -> None:
    """S1: stop taking requests."""
    engine = Engine()
    middleware = middleware_for(engine)
    (socket_dir / "draining").touch()
    sent = post(middleware)
    assert refusal_of(sent)[0] == 503
    assert b"retry-after" in dict(sent[0]["headers"])
    assert engine.scopes == []


def test_the_middleware_can_be_made_as_the_engine_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARKADE_IDENTITY", '{"headers": ["x-chat"]}')
    engine = Engine()
    middleware = IdentityMiddleware(engine)
    sent = post(middleware, headers=[(b"x-chat", b"s"), (b"x-session-id", b"ignored")])
    assert conversation_told(sent) == engine.session
    assert engine.session is not None
