"""The pod's HTTP routes under ``/parkade/v1``: a vLLM endpoint plug-in.

Loaded through the entry-point group ``vllm.endpoint_plugins`` when ``VLLM_PLUGINS`` names ``parkade``. Everything here
asks the owner over its socket; nothing opens a path of its own into the engine.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from parkade_serving.admin_access import AdminAccess
from parkade_serving.collector import OwnerCollector, Registration
from parkade_serving.heap_agent import start_agent
from parkade_serving.problems import ProblemError, response_for
from parkade_serving.route_input import (
    conversation_query,
    json_object,
    limit_query,
    pinned_of,
    receipts_query,
    seconds_query,
)
from parkade_serving.rpc import (
    OwnerCallError,
    OwnerClient,
    OwnerServer,
    OwnerUnavailableError,
    owner_socket_path,
    socket_folder,
)
from parkade_serving.sockets import SOCKET_DIR_ENV, draining_mark, mark_draining

PREFIX: Final = "/parkade/v1"
Handler = Callable[[Request], Awaitable[Response]]

_READ_S: Final = 5.0
_PROBE_S: Final = 2.0
_FORGET_S: Final = 30.0
# A lowered limit is in force once enough was written out and released (case 66).
_POLICY_S: Final = 180.0
_POLICY_RETRY_S: Final = 5
_DRAIN_SLACK_S: Final = 5.0
_registration: Final = Registration()


class ParkadeEndpoints:
    """What vLLM's `EndpointPlugin` protocol asks for."""

    name = "parkade"
    required_tasks = None

    def __init__(self, client: OwnerClient | None = None, access: AdminAccess | None = None) -> None:
        self._client = client or OwnerClient(owner_socket_path())
        self._access = access or AdminAccess.from_env()
        self._agent: OwnerServer | None = None

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter(prefix=PREFIX, tags=["parkade"])
        for method, path, handler in self._admin_routes():
            router.add_api_route(path, self._guarded(handler), methods=[method], name=handler.__name__)
        for path, handler in (("/ready", self.ready), ("/live", self.live)):
            router.add_api_route(path, _answering(handler), methods=["GET"], name=handler.__name__)
        app.include_router(router)

    async def init_state(self, engine_client: object, state: object, args: Namespace) -> None:
        """Join vLLM's ``/metrics``, and let the owner ask for this process's heap; the routes need no state."""
        del engine_client, state, args
        _registration.replace(OwnerCollector(self._client))
        if self._agent is None and SOCKET_DIR_ENV in os.environ:
            self._agent = start_agent(socket_folder())

    async def summary(self, _: Request) -> Response:
        """Memory, tiers, counts and conditions."""
        return await self._ask("summary", {}, _READ_S)

    async def conversations(self, request: Request) -> Response:
        """Known conversations, a page at a time: `limit`, and `after` from the answer's `next`."""
        limit = limit_query(request)
        page = await self._client.acall(
            "conversations", {"limit": limit, "after": request.query_params.get("after")}, _READ_S
        )
        if isinstance(page, list):
            following = page[-1]["id"] if len(page) == limit else None
            page = {"conversations": page, "next": following}
        return _json(page)

    async def conversation(self, request: Request) -> Response:
        """One conversation; with `by=client` the id is the client's own, within `tenant` or `salt`."""
        return await self._ask_about("conversation", {"id": conversation_query(request)}, _READ_S)

    async def forget(self, request: Request) -> Response:
        """Forget a conversation on every tier."""
        return await self._ask_about("forget", {"id": conversation_query(request)}, _FORGET_S)

    async def pin(self, request: Request) -> Response:
        """Keep a conversation from being let go, or no longer: `{"pinned": false}`."""
        pinned = pinned_of(await json_object(request, default={}))
        return await self._ask_about("pin", {"id": conversation_query(request), "pinned": pinned}, _READ_S)

    async def receipts(self, request: Request) -> Response:
        """Receipts, newest last: `since` (an id or unix seconds), `conversation`, `request`, `kind`, `limit`."""
        found = await self._client.acall("receipts", receipts_query(request), _READ_S)
        return _json({"receipts": found} if isinstance(found, list) else found)

    async def policy(self, _: Request) -> Response:
        """Limits, floors and budgets in force."""
        return await self._ask("policy", {}, _READ_S)

    async def set_policy(self, request: Request) -> Response:
        """Put a whole policy in force; answers once it counts, or 409 where a lowered limit cannot be met now."""
        answer = await self._client.acall("set_policy", {"policy": await json_object(request)}, _POLICY_S)
        if isinstance(answer, Mapping) and not answer.get("applied"):
            detail = f"the policy before stays in force: {answer.get('reason')}"
            members = {name: answer[name] for name in ("missing_bytes", "evicted", "reading") if name in answer}
            raise ProblemError(HTTPStatus.CONFLICT, detail, {"Retry-After": str(_POLICY_RETRY_S)}, members=members)
        return _json(answer)

    async def drain(self, request: Request) -> Response:
        """Take no new turns, finish those running, write everything out; answers when that is done."""
        seconds = seconds_query(request)
        mark_draining()
        return await self._ask("drain", {"grace_s": seconds}, seconds + _DRAIN_SLACK_S)

    async def ready(self, _: Request) -> Response:
        """200 while this pod should be sent turns; knows about draining."""
        if draining_mark().exists():
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        return await self._probe("ready")

    async def live(self, _: Request) -> Response:
        """200 while the cache owner works, also while it drains."""
        return await self._probe("live")

    def _admin_routes(self) -> tuple[tuple[str, str, Handler], ...]:
        return (
            ("GET", "/summary", self.summary),
            ("GET", "/conversations", self.conversations),
            ("GET", "/conversations/{conversation}", self.conversation),
            ("DELETE", "/conversations/{conversation}", self.forget),
            ("PUT", "/conversations/{conversation}/pin", self.pin),
            ("GET", "/receipts", self.receipts),
            ("GET", "/policy", self.policy),
            ("PUT", "/policy", self.set_policy),
            ("POST", "/drain", self.drain),
        )

    async def _ask(self, name: str, params: Mapping[str, Any], timeout_s: float) -> Response:
        return _json(await self._client.acall(name, params, timeout_s))

    async def _ask_about(self, name: str, params: Mapping[str, Any], timeout_s: float) -> Response:
        answer = await self._client.acall(name, params, timeout_s)
        if answer is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, f"no conversation {params['id']} is known here")
        return _json(answer)

    async def _probe(self, name: str) -> Response:
        answer = await self._client.acall(name, {}, _PROBE_S)
        good, reason = (answer.get(name), answer.get("reason")) if isinstance(answer, Mapping) else (answer, None)
        if not good:
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, str(reason or f"not {name}"))
        return _json(answer if isinstance(answer, Mapping) else {name: True})

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            self._access.check(request.headers, request.client.host if request.client else None)
            return await handler(request)

        guarded.__doc__ = handler.__doc__
        return _answering(guarded)


def create() -> ParkadeEndpoints:
    """The entry point's factory."""
    return ParkadeEndpoints()


def _answering(handler: Handler) -> Handler:
    async def answering(request: Request) -> Response:
        try:
            return await handler(request)
        except (ProblemError, OwnerUnavailableError, OwnerCallError) as error:
            return response_for(error)

    answering.__doc__ = handler.__doc__
    return answering


def _json(value: object) -> Response:
    return JSONResponse(value, headers={"Cache-Control": "no-store"})
