"""The rehearsed pod by its HTTP routes: what it says, its policy, and every receipt it writes.

What must stay true: nothing here reads the pod's files or memory; what it cannot say while it is being killed is asked
again later.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from parkade_cache.errors import ParkadeError
from parkade_serving.pod_client import PodClient, PodRefusedError, PodUnreachableError

Receipt = Mapping[str, Any]

_POLICY_TIMEOUT_S: Final = 200.0
_TEXT_TIMEOUT_S: Final = 30.0
_TRIES: Final = 4
_AGAIN_AFTER_S: Final = 0.5
_MOST_RECEIPTS: Final = 10_000
_MOST_CONVERSATIONS: Final = 10_000


class PolicyRefusedError(ParkadeError, RuntimeError):
    """The pod cannot meet a lowered limit now (409); it may later."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the pod has of one conversation; tokens in whole blocks."""

    id: str
    on_disk_tokens: int
    dirty_bytes: int
    ram_bytes: int
    in_flight: int
    idle_seconds: float


class Pod:
    """One life of the pod."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = PodClient(url)

    def summary(self) -> dict[str, Any]:
        return self._get("/summary")

    @property
    def client(self) -> PodClient:
        return self._client

    def set_policy(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Put a policy in force; returns once it counts.

        Raises:
            PolicyRefusedError: a lowered limit cannot be met now.
            PodRefusedError: the policy is wrong.

        """
        import httpx  # noqa: PLC0415 - comes with the serving extra, not for --help

        try:
            answer = httpx.put(
                f"{self.url}/parkade/v1/policy", json=dict(document), timeout=_POLICY_TIMEOUT_S, trust_env=False
            )
        except httpx.HTTPError as error:
            raise PodUnreachableError(f"the pod does not answer: {error}") from None
        if answer.status_code == HTTPStatus.CONFLICT:
            raise PolicyRefusedError(str(answer.json().get("detail", answer.text)))
        if answer.status_code != HTTPStatus.OK:
            raise PodRefusedError(answer.status_code, answer.text[:500])
        found: dict[str, Any] = answer.json()
        return found

    def forget(self, session: str) -> None:
        """Delete a client's conversation from every tier; nothing happens where the pod knows none."""
        import httpx  # noqa: PLC0415

        address = f"{self.url}/parkade/v1/conversations/{session}"
        try:
            answer = httpx.delete(address, params={"by": "client"}, timeout=_TEXT_TIMEOUT_S, trust_env=False)
        except httpx.HTTPError as error:
            raise PodUnreachableError(f"the pod does not answer: {error}") from None
        if answer.status_code not in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}:
            raise PodRefusedError(answer.status_code, answer.text[:500])

    def id_of(self, session: str) -> str:
        """The pod's name for a client's conversation; empty where it knows none."""
        try:
            return str(self._client.get(f"/conversations/{session}", {"by": "client"})["id"])
        except PodRefusedError:
            return ""

    def conversations(self, *, block_tokens: int) -> dict[str, Kept]:
        """Every conversation by the pod's name, at one moment."""
        page = self._get("/conversations", {"limit": _MOST_CONVERSATIONS})
        return {
            str(one["id"]): Kept(
                id=str(one["id"]),
                on_disk_tokens=int(one["disk_blocks"]) * block_tokens,
                dirty_bytes=int(one["dirty_bytes"]),
                ram_bytes=int(one["ram_bytes"]),
                in_flight=int(one["in_flight"]),
                idle_seconds=float(one["idle_seconds"]),
            )
            for one in page.get("conversations", ())
        }

    def _get(self, path: str, query: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Asked a few times: on a machine with too little of everything an answer may come late."""
        for _ in range(_TRIES - 1):
            try:
                return self._client.get(path, query)
            except (PodUnreachableError, PodRefusedError):
                time.sleep(_AGAIN_AFTER_S)
        return self._client.get(path, query)

    def counter(self, name: str, **labels: str) -> float:
        """The value of one sample of ``/metrics``; 0 where there is none yet."""
        wanted = name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "} " if labels else " ")
        for line in self._metrics().splitlines():
            if line.startswith(wanted):
                return float(line.removeprefix(wanted))
        return 0.0

    def _metrics(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=_TEXT_TIMEOUT_S) as answer:  # noqa: S310
                text: bytes = answer.read()
        except (OSError, urllib.error.URLError) as error:
            raise PodUnreachableError(f"the pod does not answer: {error}") from None
        return text.decode()


@dataclass(slots=True)
class Receipts:
    """Every receipt of a pod and of those that came after it, oldest first."""

    found: list[Receipt] = field(default_factory=list)
    _last_id: int | None = None

    def catch_up(self, pod: Pod) -> None:
        """Fetch what is new; a pod that does not answer is asked again at the next call."""
        query: dict[str, Any] = {"limit": _MOST_RECEIPTS}
        if self._last_id is not None:
            query["since"] = self._last_id
        try:
            new = pod.client.get("/receipts", query).get("receipts", [])
        except (PodUnreachableError, PodRefusedError):
            return
        self.found.extend(new)
        if new:
            self._last_id = int(new[-1]["id"])

    def since(self, moment: float, kind: str, outcome: str) -> Iterator[Receipt]:
        """Receipts of that kind and outcome, no older than ``moment`` (unix seconds)."""
        for receipt in self.found:
            if receipt["kind"] == kind and receipt.get("outcome") == outcome and float(receipt["time"]) >= moment:
                yield receipt
