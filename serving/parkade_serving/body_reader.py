"""Receives a request's body within bounds and plays it again for whoever reads it next.

Why it exists: the middleware looks into bodies before anybody has authenticated, in a process whose memory is limited.
One body is bounded, and so are all that are being received at one time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from parkade_cache.errors import ParkadeError
from parkade_cache.quantity import format_bytes

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class BodyError(ParkadeError, ValueError):
    """A request that goes no further; carries the status that says why, and when it may come again."""

    def __init__(self, message: str, status: HTTPStatus, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class BodyReader:
    """Used from one event loop."""

    def __init__(self, *, max_body_bytes: int, max_buffered_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_buffered_bytes = max_buffered_bytes
        self._buffered_bytes = 0

    async def read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes | None:
        """The whole body; None when the client went away before it was complete.

        Raises:
            BodyError: this body, or all that are being received, are too large.

        """
        self._check_size(_declared_bytes(headers))
        chunks: list[bytes] = []
        size = 0
        try:
            while (message := await receive())["type"] == "http.request":
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                self._buffered_bytes += len(chunk)
                self._check_size(size)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
            return None
        finally:
            self._buffered_bytes -= size

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            limit = format_bytes(self._max_body_bytes)
            raise BodyError(f"the body is larger than {limit}; send less at once", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if self._buffered_bytes > self._max_buffered_bytes:
            message = "too many large bodies are being received; retry in a moment"
            raise BodyError(message, HTTPStatus.SERVICE_UNAVAILABLE)


def replay(payload: bytes, receive: Receive) -> Receive:
    """A receive channel that gives ``payload`` as the whole body, then what comes after it, such as a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": payload, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _declared_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
