"""The outermost ASGI layer of the API process: it finds out whose turn a request is and tells the engine.

Why it exists: clients name conversations in headers and body fields of their own; the engine knows one header,
``x-session-id``, natively. What reaches the engine there is a keyed hash, whatever the client sent.

What must stay true: only JSON posts to generation routes are looked into; their bodies are buffered within a bound,
since this runs before authentication; responses and everything else pass through untouched; no client reaches the
engine with a session id, salt or transfer parameters that it chose for somebody else.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final

from parkade_cache.ids import ConversationId
from parkade_serving.bodies import JsonBody
from parkade_serving.body_reader import BodyError, BodyReader, replay
from parkade_serving.generation_routes import GENERATION_ROUTES, RESPONSES_ROUTE, route_path
from parkade_serving.id_key import load_id_key
from parkade_serving.identity import (
    IDENTITY_ENV,
    Hasher,
    IdentityError,
    IdentitySettings,
    RawHeaders,
    Tenant,
    client_id_of,
    tenant_of,
)
from parkade_serving.response_links import ResponseLinks
from parkade_serving.rpc import OwnerCallError, OwnerClient, OwnerUnavailableError
from parkade_serving.sockets import draining_mark, overloaded_mark, owner_socket_path

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ENGINE_HEADER: Final = b"x-session-id"
"""vLLM's own header; see `vllm/entrypoints/generate/base/serving.py`."""
RESPONSE_HEADER: Final = b"x-parkade-conversation"
_RETRY_SECONDS: Final = 5
_ARRIVING_S: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A request that may go on, as the engine is to see it."""

    scope: Scope
    payload: bytes
    tenant: Tenant
    conversation: ConversationId | None
    """None where the client gave no id: the owner derives one from the longest known prefix."""


class IdentityMiddleware:
    """Loaded with ``--middleware parkade_serving.middleware.IdentityMiddleware``; configured by the environment."""

    def __init__(
        self,
        app: App,
        settings: IdentitySettings | None = None,
        hasher: Hasher | None = None,
        owner: OwnerClient | None = None,
    ) -> None:
        self._app = app
        self._settings = settings or IdentitySettings.from_env_value(os.environ.get(IDENTITY_ENV, ""))
        self._hasher = hasher or Hasher(load_id_key())
        self._links = ResponseLinks()
        self._draining_mark = draining_mark()
        self._overloaded_mark = overloaded_mark()
        self._owner = owner or OwnerClient(owner_socket_path())
        self._bodies = BodyReader(
            max_body_bytes=self._settings.max_body_bytes, max_buffered_bytes=self._settings.max_buffered_bytes
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_generation_post(scope):
            await self._app(scope, receive, send)
            return
        try:
            turn = await self._examine(scope, receive)
        except BodyError as error:
            await _refuse(send, error.status, str(error), retry_after_s=error.retry_after_s)
        except IdentityError as error:
            await _refuse(send, HTTPStatus.BAD_REQUEST, str(error), error.param)
        else:
            if turn is not None:
                await self._app(turn.scope, replay(turn.payload, receive), self._telling(send, turn))

    async def _examine(self, scope: Scope, receive: Receive) -> Turn | None:
        if self._draining_mark.exists():
            raise BodyError("this pod is draining; retry, and another one will answer", HTTPStatus.SERVICE_UNAVAILABLE)
        payload = await self._bodies.read(scope["headers"], receive)
        if payload is None:
            return None
        turn = self._turn(scope, JsonBody(payload))
        if turn.conversation is not None and self._overloaded_mark.exists():
            await self._ask_owner(turn.conversation)
        return turn

    async def _ask_owner(self, conversation: ConversationId) -> None:
        """Case 61: refuse before any work what must wait for its own state to be written; in doubt it goes on."""
        try:
            answer = await self._owner.acall("arriving", {"conversation": conversation}, _ARRIVING_S)
        except (OwnerUnavailableError, OwnerCallError):
            return
        if isinstance(answer, dict) and not answer.get("admit", True):
            message = "the pod is out of memory and is writing this conversation to disk; retry, it will not be lost"
            retry_after_s = int(answer.get("retry_after_s") or _RETRY_SECONDS)
            raise BodyError(message, HTTPStatus.SERVICE_UNAVAILABLE, retry_after_s=retry_after_s)

    def _turn(self, scope: Scope, body: JsonBody) -> Turn:
        headers = list(scope["headers"])
        fields = body.fields()
        tenant = tenant_of(headers, fields, self._settings)
        conversation = self._conversation(headers, fields, tenant, route_path(scope))
        body.take_out_forbidden()
        if tenant.trusted:
            body.set_salt(self._hasher.salt(tenant))
        payload = body.payload()
        length = len(payload) if body.changed else None
        return Turn({**scope, "headers": _engine_headers(headers, conversation, length)}, payload, tenant, conversation)

    def _conversation(
        self, headers: RawHeaders, fields: dict[str, Any], tenant: Tenant, path: str
    ) -> ConversationId | None:
        client_id = client_id_of(headers, fields, self._settings)
        if client_id is not None:
            return self._hasher.conversation(tenant, client_id)
        if path == RESPONSES_ROUTE:
            return self._links.find(tenant, fields.get("previous_response_id"))
        return None

    def _telling(self, send: Send, turn: Turn) -> Send:
        """``send``, with the conversation in the response's headers; the body's bytes are only looked at."""
        conversation = turn.conversation
        if conversation is None:
            return send
        learning = route_path(turn.scope) == RESPONSES_ROUTE

        async def telling(message: Message) -> None:
            nonlocal learning
            if message["type"] == "http.response.start":
                others = [pair for pair in message.get("headers", ()) if pair[0].lower() != RESPONSE_HEADER]
                told = [*others, (RESPONSE_HEADER, conversation.encode("ascii"))]
                message = {**message, "headers": told}
            elif learning and message["type"] == "http.response.body":
                learning = False
                self._links.learn(turn.tenant, conversation, message.get("body", b""))
            await send(message)

        return telling


def _is_generation_post(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in GENERATION_ROUTES:
        return False
    kinds = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
    # Without a type the engine may still read JSON; with any other type it refuses by itself.
    return not kinds or any(b"json" in kind.lower() for kind in kinds)


def _engine_headers(
    headers: list[tuple[bytes, bytes]], conversation: ConversationId | None, new_length: int | None
) -> list[tuple[bytes, bytes]]:
    replaced = {ENGINE_HEADER} if new_length is None else {ENGINE_HEADER, b"content-length", b"transfer-encoding"}
    kept = [pair for pair in headers if pair[0].lower() not in replaced]
    if conversation is not None:
        kept.append((ENGINE_HEADER, conversation.encode("ascii")))
    if new_length is not None:
        kept.append((b"content-length", str(new_length).encode("ascii")))
    return kept


async def _refuse(
    send: Send,
    status: HTTPStatus,
    message: str,
    param: str | None = None,
    *,
    retry_after_s: int = _RETRY_SECONDS,
) -> None:
    """Answer in OpenAI's error format, which clients of these routes understand."""
    kind = "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "ServiceUnavailableError"
    error = {"message": message, "type": kind, "param": param, "code": int(status)}
    payload = json.dumps({"error": error}).encode("ascii")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode("ascii"))]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", str(retry_after_s).encode("ascii")))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": payload})
