"""What the routes under ``/parkade/v1`` accept: parameters and small JSON bodies, checked here.

FastAPI's own checks would answer in vLLM's error format, so values are read by hand and refused as problems.
"""

from __future__ import annotations

import functools
import json
import math
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request

from parkade_serving.id_key import load_id_key
from parkade_serving.identity import NO_TENANT, Hasher, Tenant
from parkade_serving.problems import ProblemError

_MAX_BODY_BYTES: Final = 1024 * 1024
_MAX_LIMIT: Final = 10_000
_MAX_ID_CHARACTERS: Final = 512
_DEFAULT_LIMIT: Final = 100
_DEFAULT_DRAIN_SECONDS: Final = 110.0
# Receipt ids are microseconds since 1970; a whole number below this is a time in seconds.
_SMALLEST_ID: Final = 10**14


def limit_query(request: Request) -> int:
    text = request.query_params.get("limit", str(_DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 10) or not 1 <= int(text) <= _MAX_LIMIT:
        raise _bad(f"limit must be a whole number from 1 to {_MAX_LIMIT}")
    return int(text)


def seconds_query(request: Request) -> float:
    return _number(request, "seconds", _DEFAULT_DRAIN_SECONDS, 3600.0)


def since_query(request: Request) -> int | float | None:
    """A receipt's id (int) or a time in unix seconds (float)."""
    text = request.query_params.get("since")
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= _SMALLEST_ID:
        return int(text)
    return _number(request, "since", 0.0, float(_SMALLEST_ID))


def conversation_query(request: Request) -> str:
    return _stored_id(request, request.path_params["conversation"])


def receipts_query(request: Request) -> dict[str, Any]:
    query = request.query_params
    conversation = query.get("conversation")
    return {
        "since": since_query(request),
        "conversation": None if conversation is None else _stored_id(request, conversation),
        "request": query.get("request"),
        "kind": query.get("kind"),
        "limit": limit_query(request),
    }


def pinned_of(body: dict[str, Any]) -> bool:
    pinned = body.get("pinned", True)
    if not isinstance(pinned, bool):
        raise _bad('the body must be {"pinned": true} or {"pinned": false}')
    return pinned


async def json_object(request: Request, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The body as a JSON object; ``default`` where there is none."""
    payload = b""
    async for chunk in request.stream():
        payload += chunk
        if len(payload) > _MAX_BODY_BYTES:
            raise ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {_MAX_BODY_BYTES} bytes")
    if not payload and default is not None:
        return default
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _bad("the body must be a JSON object")
    return document


def _stored_id(request: Request, given: str) -> str:
    """The id under which the owner knows a conversation; a client's own id is hashed as the middleware does it."""
    if not 0 < len(given) <= _MAX_ID_CHARACTERS or not given.isprintable():
        raise ProblemError(HTTPStatus.NOT_FOUND, "there is no conversation of that name")
    by = request.query_params.get("by", "id")
    if by not in {"id", "client"}:
        raise _bad("by must be id or client")
    return _hasher().conversation(_tenant(request), given) if by == "client" else given


def _tenant(request: Request) -> Tenant:
    for space, name in ((b"header", "tenant"), (b"salt", "salt")):
        if value := request.query_params.get(name):
            return Tenant(space, value.encode("utf-8", "surrogatepass"))
    return NO_TENANT


@functools.cache
def _hasher() -> Hasher:
    return Hasher(load_id_key())


def _number(request: Request, name: str, default: float, largest: float) -> float:
    text = request.query_params.get(name)
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < largest:
        raise _bad(f"{name} must be a number of seconds from 0 to {largest:g}")
    return number


def _bad(detail: str) -> ProblemError:
    return ProblemError(HTTPStatus.BAD_REQUEST, detail)
