"""What travels over the owner's socket, and what can go wrong on the way.

One request, one reply, MessagePack. Values are plain: dictionaries, lists, text, numbers.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from parkade_cache.errors import ParkadeError


class CallFailure(enum.StrEnum):
    """Why the owner did not do what it was asked to."""

    UNKNOWN_CALL = "unknown_call"
    NOT_FOUND = "not_found"
    INVALID = "invalid"
    BUSY = "busy"
    FAILED = "failed"


class OwnerUnavailableError(ParkadeError, ConnectionError):
    """The owner could not be reached, or did not answer in time."""


class OwnerCallError(ParkadeError, RuntimeError):
    """The owner answered that it could not or would not."""

    def __init__(self, message: str, failure: CallFailure = CallFailure.FAILED) -> None:
        super().__init__(message)
        self.failure = failure


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A call by name."""

    name: str
    params: dict[str, Any]


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The result, or a failure with its one-line message."""

    result: Any = None
    failure: str = ""
    message: str = ""


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"a {type(value).__name__} cannot travel to another process")


_FAILURES: Final = {failure.value: failure for failure in CallFailure}
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_REPLIES: Final = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_request(payload: bytes) -> Request:
    """The request in ``payload``; raises `msgspec.MsgspecError` for anything else."""
    return _REQUESTS.decode(payload)


def result_of(payload: bytes) -> object:
    """The result in a reply.

    Raises:
        OwnerCallError: the reply is a failure, or no reply at all.

    """
    try:
        reply = _REPLIES.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OwnerCallError(f"the owner's answer is damaged: {error}") from error
    if reply.failure:
        raise OwnerCallError(reply.message, _FAILURES.get(reply.failure, CallFailure.FAILED))
    return reply.result
