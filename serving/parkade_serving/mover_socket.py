"""The movers of all ranks behind a socket: the owner's end and the worker's end.

Why it exists: with more than one rank the workers are processes of their own, and with one the owner must
still reach its mover while the engine sleeps. What must stay true: orders reach every rank in the order they
were given; a rank that is lost answers every open order as failed, so that no decision waits for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from parkade_cache.errors import FormatError, SettingsError
from parkade_cache.ids import PackId
from parkade_cache.local_mover import LocalMover
from parkade_cache.mover import JobId, Mover, PackOrder, Report, ReportSink, SlotBlock
from parkade_serving.mover_wire import (
    Hello,
    Leaving,
    Order,
    decode_hello,
    decode_order,
    decode_report,
    encode_hello,
    encode_leaving,
    encode_order,
    encode_report,
    receive_frame,
    send_frame,
)

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 600.0
"""How long a worker waits for the owner: the scheduler starts after the workers have loaded the model."""


class MoverHub(Mover):
    """The owner's end: broadcasts orders to all ranks, hands their reports to ``sink``."""

    def __init__(
        self,
        path: Path,
        *,
        ranks: int,
        slot_bytes: int,
        sink: ReportSink,
        leaving: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._leaving = leaving
        self._left = threading.Event()
        self._ranks = ranks
        self._slot_bytes = slot_bytes
        self._sink = sink
        self._lock = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        self._backlog: list[bytes] = []
        self._closed = False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(ranks)
        threading.Thread(target=self._accept, name="parkade-mover-hub", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="parkade-mover-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        hello = self._welcome(connection)
        if hello is None:
            connection.close()
            return
        while (frame := receive_frame(connection)) is not None:
            try:
                report = decode_report(frame)
                if isinstance(report, Leaving):
                    self._say_goodbye(report)
                else:
                    self._sink(report)
            except FormatError:
                _log.exception("rank %d sent something that is no report", hello.rank)
        with self._lock:
            if self._peers.get(hello.rank) is connection:
                del self._peers[hello.rank]
            closed = self._closed
        if not closed and not self._left.is_set():
            _log.error("the mover of rank %d is gone; its blocks can no longer be moved", hello.rank)

    def _say_goodbye(self, leaving: Leaving) -> None:
        """Let the owner use the time that is left, once for all ranks, then let the movers go."""
        if self._left.is_set():
            return
        self._left.set()

        def drain() -> None:
            try:
                self._leaving(leaving.grace_s)
            finally:
                self._send(Order("goodbye"))

        threading.Thread(target=drain, name="parkade-last-drain", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> Hello | None:
        frame = receive_frame(connection)
        if frame is None:
            return None
        try:
            hello = decode_hello(frame)
        except FormatError:
            _log.exception("a peer that is no mover connected to %s", self._path)
            return None
        if hello.slot_bytes != self._slot_bytes:
            _log.error(
                "rank %d has slots of %d bytes, the owner of %d; blocks cannot be moved",
                hello.rank,
                hello.slot_bytes,
                self._slot_bytes,
            )
            return None
        with self._lock:
            self._peers[hello.rank] = connection
            if len(self._peers) == self._ranks:
                backlog, self._backlog = self._backlog, []
                for payload in backlog:
                    self._broadcast(payload)
        return hello

    def _send(self, order: Order) -> None:
        payload = encode_order(order)
        with self._lock:
            if len(self._peers) < self._ranks and not self._closed:
                self._backlog.append(payload)
            else:
                self._broadcast(payload)

    def _broadcast(self, payload: bytes) -> None:
        for rank, peer in self._peers.items():
            try:
                send_frame(peer, payload)
            except OSError as error:
                _log.error("an order could not reach the mover of rank %d: %s", rank, error)

    def attach(self, identity_folder: str, identity: str, *, direct: bool) -> None:
        """See ``Mover.attach``."""
        self._send(Order("attach", folder=identity_folder, identity=identity, direct=direct))

    def commit(self, job: JobId, extents: Sequence[int]) -> None:
        """See ``Mover.commit``."""
        self._send(Order("commit", job=job, extents=tuple(extents)))

    def release(self, job: JobId, extents: Sequence[int]) -> None:
        """See ``Mover.release``."""
        self._send(Order("release", job=job, extents=tuple(extents)))

    def release_heap(self, job: JobId) -> None:
        """See ``Mover.release_heap``."""
        self._send(Order("release_heap", job=job))

    def write(self, job: JobId, order: PackOrder, blocks: Sequence[SlotBlock], *, urgent: bool) -> None:
        """See ``Mover.write``."""
        self._send(Order("write", job=job, order=order, blocks=tuple(blocks), urgent=urgent))

    def cancel(self, job: JobId) -> None:
        """See ``Mover.cancel``."""
        self._send(Order("cancel", job=job))

    def open_stream(self, order: PackOrder, expected_bytes: int) -> None:
        """See ``Mover.open_stream``."""
        self._send(Order("open_stream", order=order, expected_bytes=expected_bytes))

    def finish_stream(self, job: JobId, order: PackOrder) -> None:
        """See ``Mover.finish_stream``."""
        self._send(Order("finish_stream", job=job, order=order))

    def abort_stream(self, job: JobId, pack: PackId, reason: str) -> None:
        """See ``Mover.abort_stream``."""
        self._send(Order("abort_stream", job=job, pack=pack, reason=reason))

    def forget_pack(self, pack: PackId) -> None:
        """See ``Mover.forget_pack``."""
        self._send(Order("forget_pack", pack=pack))

    def close(self) -> None:
        """Close the socket; the workers' ends notice and stop listening."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        self._listener.close()
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class MoverPeer:
    """The worker's end: carries out the owner's orders on this rank's mover."""

    def __init__(self, path: Path, *, rank: int, slot_bytes: int) -> None:
        self._path = path
        self._hello = Hello(rank=rank, slot_bytes=slot_bytes, pid=os.getpid())
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._mover: LocalMover | None = None
        self._closed = False
        self._goodbye = threading.Event()

    def report(self, report: Report) -> None:
        """Send a report to the owner; a report nobody can hear any more is not an error."""
        payload = encode_report(report)
        with self._lock:
            if self._connection is None:
                return
            with contextlib.suppress(OSError):
                send_frame(self._connection, payload)

    def start(self, mover: LocalMover) -> None:
        """Connect in the background and serve orders from then on."""
        self._mover = mover
        threading.Thread(target=self._run, name="parkade-mover-orders", daemon=True).start()

    def _run(self) -> None:
        connection = self._connect()
        if connection is None:
            return
        with self._lock:
            self._connection = connection
            send_frame(connection, encode_hello(self._hello))
        while (frame := receive_frame(connection)) is not None:
            try:
                self._carry_out(decode_order(frame))
            except Exception:
                _log.exception("an order of the owner could not be carried out")

    def _connect(self) -> socket.socket | None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._closed and time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._path))
            except OSError:
                connection.close()
                time.sleep(0.1)
            else:
                return connection
        if not self._closed:
            _log.error("the owner did not open %s; nothing can be parked", self._path)
        return None

    def _carry_out(self, order: Order) -> None:
        mover = self._mover
        assert mover is not None
        match order.call:
            case "goodbye":
                self._goodbye.set()
            case "attach":
                mover.attach(order.folder, order.identity, direct=order.direct)
            case "commit":
                mover.commit(order.job_id, order.extents)
            case "release":
                mover.release(order.job_id, order.extents)
            case "release_heap":
                mover.release_heap(order.job_id)
            case "cancel":
                mover.cancel(order.job_id)
            case "forget_pack":
                mover.forget_pack(order.pack_id)
            case "abort_stream":
                mover.abort_stream(order.job_id, order.pack_id, order.reason)
            case _:
                self._carry_out_pack(mover, order)

    def _carry_out_pack(self, mover: LocalMover, order: Order) -> None:
        if order.order is None:
            raise SettingsError(f"an order {order.call} without a pack")
        match order.call:
            case "write":
                mover.write(order.job_id, order.order, order.blocks, urgent=order.urgent)
            case "open_stream":
                mover.open_stream(order.order, order.expected_bytes)
            case "finish_stream":
                mover.finish_stream(order.job_id, order.order)
            case _:
                raise SettingsError(f"an unknown order: {order.call}")

    def leave(self, grace_s: float) -> None:
        """Tell the owner that this process ends, and give it up to ``grace_s`` to write out what only RAM has.

        After a drain there is nothing left to write and the answer comes at once (trap 1).
        """
        with self._lock:
            if self._connection is None:
                return
            try:
                send_frame(self._connection, encode_leaving(Leaving(grace_s)))
            except OSError:
                return
        self._goodbye.wait(grace_s)

    def close(self) -> None:
        """Stop serving; the mover itself is closed by its owner."""
        self._closed = True
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
