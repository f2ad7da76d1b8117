"""Errors of Parkade's own routes as RFC 9457 problem documents.

vLLM's exception handlers would turn a raised error into OpenAI's format, so these routes return their errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi.responses import JSONResponse

from parkade_cache.errors import ParkadeError
from parkade_serving.rpc import CallFailure, OwnerCallError, OwnerUnavailableError

_STATUS = {
    CallFailure.NOT_FOUND: HTTPStatus.NOT_FOUND,
    CallFailure.INVALID: HTTPStatus.UNPROCESSABLE_ENTITY,
    CallFailure.BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    CallFailure.UNKNOWN_CALL: HTTPStatus.NOT_IMPLEMENTED,
    CallFailure.FAILED: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class ProblemError(ParkadeError):
    """An answer that is a problem; ends a handler."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        members: Mapping[str, object] | None = None,
    ) -> None:
        """``members`` are more keys of the document (RFC 9457, section 3.2)."""
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.members = members


class ProblemResponse(JSONResponse):
    """`application/problem+json`."""

    media_type = "application/problem+json"

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, object] | None = None,
    ) -> None:
        content = {"type": "about:blank", "title": status.phrase, "status": int(status), "detail": detail}
        super().__init__({**(members or {}), **content}, status_code=int(status), headers=headers)


def response_for(error: ProblemError | OwnerUnavailableError | OwnerCallError) -> ProblemResponse:
    if isinstance(error, ProblemError):
        return ProblemResponse(error.status, error.detail, error.headers, error.members)
    if isinstance(error, OwnerCallError):
        status = _STATUS[error.failure]
        later = {"Retry-After": "5"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
        return ProblemResponse(status, str(error), later)
    return ProblemResponse(HTTPStatus.SERVICE_UNAVAILABLE, str(error), {"Retry-After": "5"})
