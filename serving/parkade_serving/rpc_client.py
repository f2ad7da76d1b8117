"""Calls to the owner from another process of the pod.

Every call has its own socket, so a late answer to a call that was given up can never be taken for the answer to the
next one, and an owner that was restarted is found again without any state here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from parkade_serving.rpc_wire import OwnerUnavailableError, Request, encode, result_of


class OwnerClient:
    """Thread-safe; usable from any number of event loops; costs nothing to make and holds nothing open."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def call(self, name: str, params: Mapping[str, Any] | None = None, timeout_s: float = 5.0) -> object:
        """Ask the owner and wait for its answer.

        Raises:
            OwnerUnavailableError: no owner there, or no answer within ``timeout_s``.
            OwnerCallError: the owner answered with a failure.

        """
        self._require_socket()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        with context.socket(zmq.DEALER) as dealer:
            self._connect(dealer)
            dealer.send(encode(Request(name, dict(params or {}))))
            if not dealer.poll(max(0, round(timeout_s * 1000))):
                raise self._no_answer(name, timeout_s)
            payload = dealer.recv()
        return result_of(payload)

    async def acall(self, name: str, params: Mapping[str, Any] | None = None, timeout_s: float = 5.0) -> object:
        """`call` for an event loop; cancelling it gives the call up."""
        self._require_socket()
        context: zmq.asyncio.Context = zmq.asyncio.Context.instance()
        dealer = context.socket(zmq.DEALER)
        try:
            self._connect(dealer)
            async with asyncio.timeout(timeout_s):
                await dealer.send(encode(Request(name, dict(params or {}))))
                payload = await dealer.recv()
        except TimeoutError:
            raise self._no_answer(name, timeout_s) from None
        finally:
            dealer.close(linger=0)
        return result_of(payload)

    def _connect(self, dealer: zmq.Socket[Any]) -> None:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 20)
        dealer.connect(f"ipc://{self._path}")

    def _require_socket(self) -> None:
        if not self._path.exists():
            raise OwnerUnavailableError(f"no cache owner at {self._path}: the engine is not up or runs without it")

    def _no_answer(self, name: str, timeout_s: float) -> OwnerUnavailableError:
        return OwnerUnavailableError(f"the cache owner at {self._path} did not answer {name!r} within {timeout_s:g} s")
