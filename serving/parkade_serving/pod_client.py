"""Asks a pod's ``/parkade/v1`` routes from the command line; standard library only, so that starting stays fast."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from parkade_cache.errors import ParkadeError, SettingsError

_PREFIX: Final = "/parkade/v1"
_MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024


class PodUnreachableError(ParkadeError, ConnectionError):
    """No pod answers at that URL."""


class PodRefusedError(ParkadeError, RuntimeError):
    """The pod answered with an error."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class PodClient:
    """One pod by its URL."""

    def __init__(self, url: str, *, token_file: Path | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise SettingsError(f"{url!r} is not a pod's URL; write something like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._token_file = token_file
        # A pod is never behind a web proxy, whatever the environment says.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, query: Mapping[str, object] | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
        return self._ask("GET", path, query, timeout_s)

    def post(self, path: str, query: Mapping[str, object] | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
        return self._ask("POST", path, query, timeout_s)

    def _ask(self, method: str, path: str, query: Mapping[str, object] | None, timeout_s: float) -> dict[str, Any]:
        """The JSON object a route answers with.

        Raises:
            PodUnreachableError: nothing usable answers there.
            PodRefusedError: an error answer; its message is the pod's.

        """
        given = {name: value for name, value in (query or {}).items() if value is not None}
        address = f"{self.url}{_PREFIX}{path}" + (f"?{urllib.parse.urlencode(given)}" if given else "")
        request = urllib.request.Request(address, method=method, headers=self._headers())  # noqa: S310 - checked above
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                answer = json.loads(response.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise PodRefusedError(error.code, f"{self.url}: {_detail(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise PodUnreachableError(f"no pod answers at {self.url} ({reason}); is it up? set --url") from None
        except ValueError:
            raise PodUnreachableError(f"what answers at {self.url} is no Parkade pod; set --url") from None
        return answer if isinstance(answer, dict) else {"value": answer}

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            lines = self._token_file.read_text().split()
        except (OSError, ValueError) as error:
            raise SettingsError(f"--token-file {self._token_file} cannot be read: {error}") from None
        if not lines:
            raise SettingsError(f"--token-file {self._token_file} is empty")
        return {"Authorization": f"Bearer {lines[0]}"}


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        document = json.loads(error.read(65_536))
        return str(document["detail"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code} {error.reason}"
