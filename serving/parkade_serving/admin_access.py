"""Who may use the admin routes: holders of the token, else only whoever is on this machine.

What must stay true: with a token file, nobody without the token, also not when the file is gone or empty; without
one, only direct requests from loopback. A request that a proxy or a web page passed on is not direct.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

from parkade_serving.environment import TOKEN_FILE_ENV
from parkade_serving.problems import ProblemError

_MAX_FILE_BYTES: Final = 64 * 1024
_PASSED_ON: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via", "origin")


class AdminAccess:
    """Reads the token file at every request, so that a rotated secret counts at once; one token a line."""

    def __init__(self, token_file: Path | None) -> None:
        self._token_file = token_file

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> AdminAccess:
        name = env.get(TOKEN_FILE_ENV)
        return cls(Path(name) if name else None)

    def check(self, headers: Mapping[str, str], client_host: str | None) -> None:
        """Return if the request may pass; ``headers`` are looked up by lower-case name.

        Raises:
            ProblemError: 401 or 403, saying what to do.

        """
        if self._token_file is None:
            _check_direct(headers, client_host)
        else:
            self._check_token(self._token_file, headers.get("authorization", ""))

    def _check_token(self, token_file: Path, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        presented = _digest(given.strip().encode("utf-8", "surrogateescape"))
        known = [hmac.compare_digest(presented, token) for token in _tokens(token_file)]
        if scheme.lower() != "bearer" or not any(known):
            detail = "this route needs the header 'Authorization: Bearer TOKEN' with a token of the pod's token file"
            raise ProblemError(HTTPStatus.UNAUTHORIZED, detail, {"WWW-Authenticate": "Bearer"})


def _tokens(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_FILE_BYTES).splitlines()
    except OSError:
        return []
    return [_digest(line.strip()) for line in lines if line.strip()]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _check_direct(headers: Mapping[str, str], client_host: str | None) -> None:
    direct = _is_loopback(client_host) and _is_local_name(headers.get("host", ""))
    if not direct or any(name in headers for name in _PASSED_ON):
        detail = f"without {TOKEN_FILE_ENV} this route answers only direct requests from this machine; set a token file"
        raise ProblemError(HTTPStatus.FORBIDDEN, detail)


def _is_loopback(host: str | None) -> bool:
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_local_name(host: str) -> bool:
    # A name that merely resolves to loopback may be a web page's (DNS rebinding).
    name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
    return name in {"", "localhost"} or _is_loopback(name.strip("[]"))
