"""Whose turn is this: from a request's headers and body to a conversation id and a tenant's salt. Pure.

Why it exists: clients name their conversations in many ways, none of them secret or unique across tenants. What the
owner, the receipts and the API see is a keyed hash, so that ids can be stored, listed and logged, and one tenant's id
can never equal another's.

What must stay true: ``user`` is never an id; the tenant is part of the hash; nothing a client sends can name another
tenant's conversation or salt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from parkade_cache.errors import ParkadeError, SettingsError
from parkade_cache.ids import ConversationId

IDENTITY_ENV: Final = "PARKADE_IDENTITY"
"""JSON: ``{"headers": [...], "tenant_header": "..."}``; the middleware has no other way to be configured."""
DEFAULT_HEADERS: Final = (
    "x-session-id",
    "x-conversation-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "session_id",
)
MAX_ID_BYTES: Final = 512
# In this order, after the headers. `session_id` is vLLM's own field. `user` names a person, not a conversation.
_BODY_FIELDS: Final = ("session_id", "prompt_cache_key", "conversation")
_ID_HEX_DIGITS: Final = 32
_SALT_HEX_DIGITS: Final = 40
_MIB: Final = 1024 * 1024
_TOKEN: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")

RawHeaders = Iterable[tuple[bytes, bytes]]


class IdentityError(ParkadeError, ValueError):
    """A request whose id or tenant cannot be used; the message tells the client what to send instead."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdentitySettings:
    """Where ids and tenants are looked for, and how large a body may be to be looked into."""

    headers: tuple[str, ...] = DEFAULT_HEADERS
    tenant_header: str | None = None
    """Set by a proxy that clients cannot go around; None takes the tenant from the body's ``cache_salt`` alone."""
    max_body_bytes: int = 128 * _MIB
    max_buffered_bytes: int = 512 * _MIB
    """All bodies together that are being received at one time."""

    def __post_init__(self) -> None:
        named = (*self.headers, *([self.tenant_header] if self.tenant_header is not None else []))
        for name in named:
            if not _TOKEN.fullmatch(name):
                raise SettingsError(f"{name!r} is not a header name in lower case, such as x-session-id")
        if self.tenant_header in self.headers:
            raise SettingsError(f"{self.tenant_header} cannot name both the tenant and the conversation")

    @classmethod
    def from_env_value(cls, text: str) -> IdentitySettings:
        """The settings in ``PARKADE_IDENTITY``; empty text means the defaults.

        Raises:
            SettingsError: not JSON, an unknown key or a bad value.

        """
        try:
            data = json.loads(text) if text.strip() else {}
            headers = tuple(name.lower() for name in _listed(data.pop("headers", list(DEFAULT_HEADERS))))
            tenant = data.pop("tenant_header", None)
            return cls(headers=headers, tenant_header=tenant.lower() if tenant else None, **data)
        except SettingsError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingsError(f"{IDENTITY_ENV} cannot be used: {error}") from None

    def to_env_value(self) -> str:
        return json.dumps({"headers": list(self.headers), "tenant_header": self.tenant_header or ""})


def _listed(names: object) -> list[Any]:
    if not isinstance(names, list):
        raise SettingsError(f"{IDENTITY_ENV}: headers must be a list of header names")
    return names


@dataclasses.dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks; header tenants and body salts live in separate spaces and can never meet."""

    space: bytes = b""
    name: bytes = b""

    @property
    def trusted(self) -> bool:
        return self.space == b"header"


NO_TENANT: Final = Tenant()


class Hasher:
    """Turns tenants and clients' ids into what may be stored and shown; HMAC-SHA256 under the pod's key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def conversation(self, tenant: Tenant, client_id: str) -> ConversationId:
        """The id of a conversation; 32 hexadecimal digits."""
        return ConversationId(self._digest(b"conversation", tenant, client_id.encode())[:_ID_HEX_DIGITS])

    def salt(self, tenant: Tenant) -> str:
        """The salt that keeps a tenant's blocks its own; within what vLLM accepts as ``cache_salt``."""
        return self._digest(b"salt", tenant, b"")[:_SALT_HEX_DIGITS]

    def _digest(self, purpose: bytes, tenant: Tenant, value: bytes) -> str:
        # Length-prefixed, so that no two different tuples have the same bytes.
        parts = (purpose, tenant.space, tenant.name, value)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def client_id_of(headers: RawHeaders, body: Mapping[str, Any], settings: IdentitySettings) -> str | None:
    """The id the client gave, the first that is present; None when it gave none.

    Raises:
        IdentityError: the first that is present cannot be used.

    """
    headers = list(headers)
    for name in settings.headers:
        if value := header_value(headers, name):
            return value
    for field in _BODY_FIELDS:
        if value := _body_value(body, field):
            return value
    return None


def tenant_of(headers: RawHeaders, body: Mapping[str, Any], settings: IdentitySettings) -> Tenant:
    """The tenant: the trusted header where one is configured and present, else the body's salt.

    Raises:
        IdentityError: the tenant header cannot be used.

    """
    if settings.tenant_header is not None and (name := header_value(headers, settings.tenant_header)):
        return Tenant(b"header", name.encode())
    salt = body.get("cache_salt")
    if isinstance(salt, str) and salt:
        return Tenant(b"salt", salt.encode("utf-8", "surrogatepass"))
    return NO_TENANT


def header_value(headers: RawHeaders, name: str) -> str | None:
    """The one value of a header, without the space around it; None when it is absent or empty.

    Raises:
        IdentityError: several different values, or one that is no usable id.

    """
    wanted = name.encode("ascii")
    values = {value.strip() for key, value in headers if key.lower() == wanted} - {b""}
    if len(values) > 1:
        raise IdentityError(f"header {name} was sent with {len(values)} different values; send it once", name)
    for value in values:
        _check_length(len(value), f"header {name}", name)
        try:
            return _checked(value.decode("utf-8"), f"header {name}", name)
        except UnicodeDecodeError:
            raise IdentityError(f"header {name} is not UTF-8; send printable text, such as a UUID", name) from None
    return None


def _body_value(body: Mapping[str, Any], field: str) -> str | None:
    value = body.get(field)
    if field == "conversation" and isinstance(value, Mapping):
        value = value.get("id")
    if not isinstance(value, str) or not value.strip():
        return None
    _check_length(len(value), f"{field!r}", field)
    return _checked(value.strip(), f"{field!r}", field)


def _check_length(length: int, what: str, param: str) -> None:
    if length > MAX_ID_BYTES:
        raise IdentityError(f"{what} is longer than {MAX_ID_BYTES} bytes; send a short id, such as a UUID", param)


def _checked(text: str, what: str, param: str) -> str:
    try:
        _check_length(len(text.encode()), what, param)
    except UnicodeEncodeError:
        raise IdentityError(f"{what} is not valid Unicode; send printable text, such as a UUID", param) from None
    if _CONTROL.search(text):
        raise IdentityError(f"{what} contains control characters; send printable text, such as a UUID", param)
    return text
