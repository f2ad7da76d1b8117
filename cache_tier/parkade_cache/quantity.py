"""Sizes as Kubernetes users write them: ``96Gi``, ``512Mi``, ``1G``, ``1.5Ti`` or a plain number of bytes.

One parser for the command line, the policy and the custom resources, so that a size never means two things.
Everything is a whole number of bytes; a quantity that is no whole number of bytes is refused, never rounded.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_BINARY: Final = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = ("k", "M", "G", "T", "P", "E")
_FACTORS: Final[dict[str, int]] = (
    {"": 1}
    | {suffix: 1024**power for power, suffix in enumerate(_BINARY, start=1)}
    | {suffix: 1000**power for power, suffix in enumerate(_DECIMAL, start=1)}
)
# Twenty digits hold every size up to the limit below; more would only be work for an attacker's benefit.
_QUANTITY: Final = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,20}))?([A-Za-z]{0,2})", re.ASCII)
_LIMIT_BYTES: Final = 2**63


def parse_quantity(value: str | int) -> int:
    """Bytes meant by a Kubernetes quantity string or a plain number.

    Raises:
        ValueError: one line that says what is wrong and shows an example.

    """
    nbytes = _checked_number(value) if isinstance(value, int) else _from_text(value)
    if nbytes >= _LIMIT_BYTES:
        raise ValueError(f"{value!r} is too large: a size must be below 8Ei")
    return nbytes


def _checked_number(value: int) -> int:
    if isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a size: write a whole number of bytes or a quantity such as 512Mi")
    return value


def _from_text(text: object) -> int:
    match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match.group(3) not in _FACTORS:
        shown = repr(text) if len(repr(text)) <= 40 else repr(text)[:40] + "…"
        raise ValueError(f"{shown} is not a size: write a whole number of bytes or a quantity such as 512Mi")
    number = Decimal(f"{match.group(1)}.{match.group(2) or 0}") * _FACTORS[match.group(3)]
    if number != number.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(number)


def format_bytes(nbytes: float) -> str:
    """A size for people, such as ``1.5 GiB``; for machines, use the number."""
    sign, size = ("-", -float(nbytes)) if nbytes < 0 else ("", float(nbytes))
    if size < 1024:
        return f"{sign}{size:.0f} B"
    power = next((p for p in range(1, len(_BINARY)) if size < 1024 ** (p + 1) * 0.99995), len(_BINARY))
    return f"{sign}{size / 1024**power:.1f} {_BINARY[power - 1]}B"
