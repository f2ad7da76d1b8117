"""Orders and reports between owner and movers, as bytes on a Unix socket.

Why it exists: the engine core sleeps without requests, so owner and movers talk without it. What must stay
true: a frame is a length and one msgpack value; what arrives is decoded into the very types of
``parkade_cache.mover`` or refused.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from parkade_cache.errors import FormatError
from parkade_cache.ids import ConversationId, PackId
from parkade_cache.mover import (
    ExtentsCommitted,
    ExtentsReleased,
    HeapReleased,
    JobId,
    JobOutcome,
    PackOrder,
    PackWritten,
    Report,
    SlotBlock,
    heap_kept,
    no_pack,
    not_committed,
    not_released,
)

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
"""Larger frames are nobody's: a million-block order is about 150 MB."""


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of the ``Mover`` interface."""

    call: str
    job: int = -1
    extents: tuple[int, ...] = ()
    order: PackOrder | None = None
    blocks: tuple[SlotBlock, ...] = ()
    urgent: bool = False
    expected_bytes: int = 0
    pack: str = ""
    reason: str = ""
    folder: str = ""
    identity: str = ""
    direct: bool = False

    @property
    def job_id(self) -> JobId:
        """The job this order names."""
        return JobId(self.job)

    @property
    def pack_id(self) -> PackId:
        """The pack this order names."""
        return PackId(self.pack)


class Hello(msgspec.Struct, frozen=True):
    """First frame of a mover: which rank it is, and its block sizes."""

    rank: int
    slot_bytes: int
    pid: int


class Leaving(msgspec.Struct, frozen=True):
    """A mover's last frame: its process ends in ``grace_s`` seconds, whatever has been written until then."""

    grace_s: float


ANSWERED_CALLS = frozenset({"commit", "release", "release_heap", "write", "finish_stream", "abort_stream"})
"""Calls that name a job and are answered by one report of each rank."""


def answer_to(order: Order, rank: int, outcome: JobOutcome, *, reason: str) -> Report | None:
    """What a rank that cannot carry ``order`` out answers; None where no answer is due."""
    match order.call:
        case "commit":
            return not_committed(order.job_id, rank, order.extents, outcome, reason=reason)
        case "release":
            return not_released(order.job_id, rank, order.extents, outcome, reason=reason)
        case "release_heap":
            return heap_kept(order.job_id, rank, outcome, reason=reason)
        case "write" | "finish_stream" | "abort_stream":
            pack = order.order or PackOrder(pack=order.pack_id, conversation=ConversationId(""), created_at=0.0)
            return no_pack(order.job_id, rank, pack, outcome, reason=reason)
        case _:
            return None


_order_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(Order)
_hello_decoder = msgspec.msgpack.Decoder(Hello)


_REPORTS: dict[str, type] = {
    cls.__name__: cls for cls in (ExtentsCommitted, ExtentsReleased, HeapReleased, PackWritten, Leaving)
}


def encode_order(order: Order) -> bytes:
    """The order's frame, without its length."""
    return _order_encoder.encode(order)


def decode_order(payload: bytes) -> Order:
    """Inverse of ``encode_order``; ``FormatError`` for anything else."""
    try:
        return _order_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise FormatError(f"not an order: {error}") from error


def encode_hello(hello: Hello) -> bytes:
    """The hello's frame, without its length."""
    return _order_encoder.encode(hello)


def decode_hello(payload: bytes) -> Hello:
    """Inverse of ``encode_hello``; ``FormatError`` for anything else."""
    try:
        return _hello_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise FormatError(f"not a mover's hello: {error}") from error


def encode_leaving(leaving: Leaving) -> bytes:
    """The leaving's frame, without its length."""
    return _order_encoder.encode((Leaving.__name__, leaving))


def encode_report(report: Report) -> bytes:
    """The report's frame, without its length."""
    return _order_encoder.encode((type(report).__name__, report))


def decode_report(payload: bytes) -> Report | Leaving:
    """Inverse of ``encode_report`` and ``encode_leaving``; ``FormatError`` for anything else."""
    try:
        name, body = msgspec.msgpack.decode(payload)
        found: Report | Leaving = msgspec.convert(body, _REPORTS[name])
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"not a mover's report: {error}") from error
    return found


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Send one frame; blocks while the peer's buffer is full."""
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next frame, or None when the peer has closed; ``FormatError`` for an impossible length."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise FormatError(f"a frame of {length} bytes is larger than this protocol allows")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
