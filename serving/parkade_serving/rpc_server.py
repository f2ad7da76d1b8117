"""The owner's side of its socket: takes requests, runs handlers, sends answers.

Why it exists: the engine core sleeps when it has no request, so probes, scrapes, policy changes and drains must reach
the owner without an engine step.

What must stay true: one thread owns the zmq socket; handlers run on other threads, several at once, so a drain of two
minutes does not keep a scrape from its answer; nothing a client sends ends the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import zmq

from parkade_cache.errors import DirectoryInUseError
from parkade_serving.rpc_wire import CallFailure, Reply, Request, decode_request, encode
from parkade_serving.sockets import check_socket_path, make_private_folder

logger = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], object]

_MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
_MAX_WAITING: Final = 256
_CLOSE_LINGER_MS: Final = 200


class OwnerServer:
    """Serves ``handlers`` by name at ``path``.

    A handler gets the call's parameters and returns plain values. `LookupError` means not found, `ValueError` means
    the parameters are wrong; both messages reach the caller, as does the text of any other error. Handlers run on
    ``workers`` threads at once and must be safe for that.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler], *, workers: int = 8) -> None:
        self._path = path
        self._handlers = dict(handlers)
        self._workers = workers
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._work: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._wake = -1
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> Self:
        """Bind and serve; returns once the socket can be reached.

        Raises:
            DirectoryInUseError: another live owner serves there.
            UnsafePathError: the folder is not private.

        """
        self._claim_path()
        self._context = zmq.Context()
        router = self._bind(self._context)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._serve, args=(self._context, router), name="parkade-rpc", daemon=True),
            *(
                threading.Thread(target=self._run_handlers, name=f"parkade-rpc-{number}", daemon=True)
                for number in range(self._workers)
            ),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Stop serving and remove the socket; a handler that still runs is left to end by itself."""
        if self._closing.is_set() or not self._threads:
            return
        self._closing.set()
        self._signal()
        self._threads[0].join(timeout=5.0)
        for _ in range(self._workers):
            self._work.put(None)
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim_path(self) -> None:
        check_socket_path(self._path)
        make_private_folder(self._path.parent)
        if is_served(self._path):
            raise DirectoryInUseError(f"another cache owner serves {self._path}; give each pod its own --socket-dir")
        self._path.unlink(missing_ok=True)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, _CLOSE_LINGER_MS)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        router.bind(f"ipc://{self._path}")
        self._path.chmod(0o600)
        return router

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            if router in ready:
                self._take_requests(router)
            self._send_answers(router)
        router.close()
        context.term()

    def _take_requests(self, router: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = router.recv_multipart(zmq.NOBLOCK)
                client, payload = frames[0], frames[-1]
                if self._work.qsize() < _MAX_WAITING:
                    self._work.put((client, payload))
                else:
                    busy = Reply(failure=CallFailure.BUSY, message="the cache owner has too many calls waiting")
                    self._done.put((client, encode(busy)))

    def _send_answers(self, router: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._done.get_nowait()
                with contextlib.suppress(zmq.ZMQError):  # The caller may be gone; that is its own affair.
                    router.send_multipart(answer, zmq.NOBLOCK)

    def _run_handlers(self) -> None:
        while (work := self._work.get()) is not None:
            client, payload = work
            self._done.put((client, self._answer(payload)))
            self._signal()

    def _signal(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _answer(self, payload: bytes) -> bytes:
        try:
            request = decode_request(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return encode(Reply(failure=CallFailure.INVALID, message=f"not a request: {error}"))
        try:
            return encode(Reply(result=self._call(request)))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is the caller's answer, not our end
            return encode(_failure(request.name, error))

    def _call(self, request: Request) -> object:
        handler = self._handlers.get(request.name)
        if handler is None:
            raise _UnknownCallError(f"the cache owner knows no call {request.name!r}")
        return handler(request.params)


class _UnknownCallError(Exception):
    pass


def _failure(name: str, error: Exception) -> Reply:
    text = " ".join(str(error.args[0] if len(error.args) == 1 else error).split())
    if isinstance(error, _UnknownCallError):
        return Reply(failure=CallFailure.UNKNOWN_CALL, message=text)
    if isinstance(error, LookupError):
        return Reply(failure=CallFailure.NOT_FOUND, message=text)
    if isinstance(error, ValueError):
        return Reply(failure=CallFailure.INVALID, message=text)
    if isinstance(error, TimeoutError):
        return Reply(failure=CallFailure.BUSY, message=text)
    logger.error("the call %r of the cache owner failed", name, exc_info=error)
    return Reply(failure=CallFailure.FAILED, message=f"{type(error).__name__}: {text}")


def is_served(path: Path) -> bool:
    """Whether somebody listens at the socket; asked without a word to them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return True  # A full backlog: somebody listens.
        except OSError:
            return False
    return True
