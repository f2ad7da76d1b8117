"""The movers of all ranks behind a socket: the owner's end and the worker's end.

Why it exists: with more than one rank the workers are processes of their own, and with one the owner must
still reach its mover while the engine sleeps. What must stay true: orders reach every rank in the order they
were given; a rank that is lost answers every open order as failed, so that no decision waits for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parkade_cache.errors import FormatError, SettingsError
from parkade_cache.ids import PackId
from parkade_cache.local_mover import LocalMover
from parkade_cache.mover import JobId, JobOutcome, Mover, PackOrder, Report, ReportSink, SlotBlock
from parkade_serving.mover_wire import (
    ANSWERED_CALLS,
    Hello,
    Leaving,
    Order,
    answer_to,
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


_CLOSED = "the owner has ended"


class _Peer:
    """The owner's connection to one rank: orders leave in order on a thread of its own, so that nobody waits here."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"parkade-mover-{rank}-orders", daemon=True).start()

    def send(self, payload: bytes) -> None:
        """Queue an order; one that cannot be sent any more is answered when the connection is found lost."""
        self._frames.put(payload)

    def close(self) -> None:
        """Send what is queued, then close."""
        self._frames.put(None)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while (payload := self._frames.get()) is not None:
                send_frame(self.connection, payload)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _OpenOrder:
    """An order that not every rank has answered."""

    order: Order
    ranks: set[int]


class MoverHub(Mover):
    """The owner's end: broadcasts orders to all ranks, hands their reports to ``sink``.

    A rank that was there and is gone, or that does not speak the protocol, stays lost: its memory is gone with it.
    Whatever it still owes an answer to, and whatever is ordered later, is answered for it as failed.
    """

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
        self._peers: dict[int, _Peer] = {}
        self._lost: set[int] = set()
        self._open: dict[JobId, _OpenOrder] = {}
        self._backlog: list[bytes] = []
        self._closed = False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(ranks)
        threading.Thread(target=self._accept, name="parkade-mover-hub", daemon=True).start()

    # -- ranks ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="parkade-mover-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        peer = self._welcome(connection)
        if peer is None:
            connection.close()
            return
        try:
            while (frame := receive_frame(connection)) is not None:
                self._heard(peer, decode_report(frame))
        except FormatError as error:
            _log.error("rank %d sent something that is no report: %s", peer.rank, error)
        self._gone(peer)
        connection.close()

    def _heard(self, peer: _Peer, report: Report | Leaving) -> None:
        if isinstance(report, Leaving):
            self._say_goodbye(report)
            return
        if report.rank != peer.rank:
            raise FormatError(f"it answers for rank {report.rank}")
        if self._settle(report.job, peer.rank):
            self._sink(report)
        else:
            _log.warning("rank %d answered job %d, which it was not asked", peer.rank, report.job)

    def _settle(self, job: JobId, rank: int) -> bool:
        """Whether this rank owed an answer to the job; now it does not."""
        with self._lock:
            found = self._open.get(job)
            if found is None or rank not in found.ranks:
                return False
            found.ranks.discard(rank)
            if not found.ranks:
                del self._open[job]
            return True

    def _gone(self, peer: _Peer) -> None:
        """Answer for a lost rank, so that no decision waits for it."""
        peer.close()
        with self._lock:
            self._lost.add(peer.rank)
            owed = [found.order for found in self._open.values() if peer.rank in found.ranks]
            closed = self._closed
        if not closed and not self._left.is_set():
            _log.error("the mover of rank %d is gone; its blocks can no longer be moved", peer.rank)
        for order in owed:
            self._answer_for(order, peer.rank)

    def _answer_for(self, order: Order, rank: int) -> None:
        if not self._settle(order.job_id, rank):
            return
        outcome = JobOutcome.CANCELLED if self._closed else JobOutcome.FAILED
        reason = _CLOSED if self._closed else f"the mover of rank {rank} is gone"
        report = answer_to(order, rank, outcome, reason=reason)
        if report is not None:
            self._sink(report)

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

    def _welcome(self, connection: socket.socket) -> _Peer | None:
        try:
            frame = receive_frame(connection)
            if frame is None:
                return None
            hello = decode_hello(frame)
        except FormatError as error:
            _log.warning("a peer that is no mover connected to %s: %s", self._path, error)
            return None
        with self._lock:
            refusal = self._refusal(hello)
            if refusal:
                _log.error("rank %d %s; it is not let in", hello.rank, refusal)
                return None
            peer = self._peers[hello.rank] = _Peer(hello.rank, connection)
            if len(self._peers) == self._ranks:
                backlog, self._backlog = self._backlog, []
                for payload in backlog:
                    self._broadcast(payload)
        return peer

    def _refusal(self, hello: Hello) -> str:
        if self._closed:
            return "comes after the end"
        if hello.slot_bytes != self._slot_bytes:
            return f"has slots of {hello.slot_bytes} bytes, the owner of {self._slot_bytes}"
        if not 0 <= hello.rank < self._ranks:
            return f"is none of {self._ranks}"
        if hello.rank in self._peers:
            return "is there already, or was and has lost its memory"
        return ""

    # -- orders --------------------------------------------------------------------------------------------

    def _send(self, order: Order) -> None:
        payload = encode_order(order)
        answered = order.call in ANSWERED_CALLS
        with self._lock:
            if answered:
                self._open[order.job_id] = _OpenOrder(order, set(range(self._ranks)))
            if len(self._peers) < self._ranks:
                self._backlog.append(payload)
            else:
                self._broadcast(payload)
            silent = range(self._ranks) if self._closed else tuple(self._lost)
        if answered:
            for rank in silent:
                self._answer_for(order, rank)

    def _broadcast(self, payload: bytes) -> None:
        for peer in self._peers.values():
            peer.send(payload)

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
        """Send what was ordered, then close; the workers' ends notice, and nobody waits for an answer any more."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            owed = [(found.order, rank) for found in self._open.values() for rank in found.ranks]
        with contextlib.suppress(OSError):
            # Closing alone does not wake the thread that waits for a peer.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in peers:
            peer.close()
        for order, rank in owed:
            self._answer_for(order, rank)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class MoverPeer:
    """The worker's end: carries out the owner's orders on this rank's mover."""

    def __init__(self, path: Path, *, rank: int, slot_bytes: int) -> None:
        self._path = path
        self._hello = Hello(rank=rank, slot_bytes=slot_bytes, pid=os.getpid())
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
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
        threading.Thread(target=self._run, args=(mover,), name="parkade-mover-orders", daemon=True).start()

    def _run(self, mover: LocalMover) -> None:
        connection = self._connect()
        if connection is None:
            return
        with self._lock, contextlib.suppress(OSError):
            self._connection = connection
            send_frame(connection, encode_hello(self._hello))
        try:
            while (frame := receive_frame(connection)) is not None:
                self._obey(mover, decode_order(frame))
        except FormatError as error:
            _log.error("the owner sent something that is no order: %s", error)
        self.close()
        with self._lock:
            self._connection = None
            connection.close()

    def _obey(self, mover: LocalMover, order: Order) -> None:
        """Carry an order out; one that cannot be is answered, so that no decision waits for it."""
        try:
            self._carry_out(mover, order)
        except Exception as error:  # noqa: BLE001 - whatever it was, the next order must be heard
            _log.exception("an order of the owner could not be carried out")
            report = answer_to(order, self._hello.rank, JobOutcome.FAILED, reason=str(error) or type(error).__name__)
            if report is not None:
                self.report(report)

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

    def _carry_out(self, mover: LocalMover, order: Order) -> None:
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
