"""Reads and changes the few top-level fields of a JSON body that concern identity, and nothing else.

Why it exists: a body may hold megabytes of messages. Their bytes are passed on as they came; only the fields named
here are decoded, and a body in which none of them changes is not written anew.

What must stay true: what is found here is what vLLM will find, also with duplicate keys, escaped key names, other
encodings of Unicode and numbers that are no JSON: else a client could smuggle past us what must be taken out.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

# Where vLLM reads transfer parameters and session ids from, besides the header that the middleware sets.
_FORBIDDEN: Final = ("kv_transfer_params", "session_id")
_NESTED: Final = (("vllm_xargs",), ("sampling_params", "extra_args"))
_READ: Final = ("session_id", "prompt_cache_key", "conversation", "previous_response_id", "cache_salt")
_RAW_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonBody:
    """A JSON object that was sent as a request's body."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._values, self._is_raw = _decode(payload)
        self._changed = False

    @property
    def is_object(self) -> bool:
        """False when vLLM will refuse the body anyway, in its own words."""
        return self._values is not None

    def fields(self) -> dict[str, Any]:
        """The decoded values of the fields that say who asks."""
        values = self._values or {}
        return {name: self._decoded(values[name]) for name in _READ if name in values}

    def set_salt(self, salt: str) -> None:
        if self._values is not None:
            self._values["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt)) if self._is_raw else salt
            self._changed = True

    def take_out_forbidden(self) -> None:
        """Remove clients' own transfer parameters and session ids, wherever vLLM would find them."""
        if self._values is None:
            return
        for path in _NESTED:
            self._clean(self._values, path)
        self._changed |= _remove(self._values)

    def payload(self) -> bytes:
        """The body to pass on: the very bytes that came where nothing was changed."""
        if not self._changed or self._values is None:
            return self._payload
        if self._is_raw:
            return msgspec.json.encode(self._values)
        return json.dumps(self._values).encode("ascii")

    @property
    def changed(self) -> bool:
        return self._changed

    def _decoded(self, value: Any) -> Any:
        if not isinstance(value, msgspec.Raw):
            return value
        try:
            return json.loads(bytes(value))
        except (ValueError, RecursionError):
            return None

    def _clean(self, values: dict[str, Any], path: tuple[str, ...]) -> None:
        document = holder = self._decoded(values.get(path[0]))
        for name in path[1:]:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and _remove(holder):
            values[path[0]] = msgspec.Raw(json.dumps(document).encode("ascii")) if self._is_raw else document
            self._changed = True


def _remove(values: dict[str, Any]) -> bool:
    found = [name for name in _FORBIDDEN if values.pop(name, None) is not None]
    return bool(found)


def _decode(payload: bytes) -> tuple[dict[str, Any] | None, bool]:
    try:
        return dict(_RAW_OBJECT.decode(payload)), True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    # Python's parser is what vLLM uses; it takes more than JSON: NaN, UTF-16, a byte-order mark.
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError):
        return None, False
    return (values, False) if isinstance(values, dict) else (None, False)
