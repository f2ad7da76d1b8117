"""What must be equal for two processes to read each other's blocks (D1).

Everything that changes the meaning of a block's bytes or of its key is in here; a difference in any field gives another
fingerprint, and another fingerprint's files are never matched. A *generation* stands for new weights under an unchanged
name (``reset_cache``, sleep mode): generation 0 is the identity itself, every later one is an identity of its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

FINGERPRINT_HEX_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Model, KV layout and hashing that a block was made under."""

    model: str
    revision: str
    dtype: str
    kv_cache_dtype: str
    drafter: str
    layout: str
    block_tokens: int
    parallel: str
    hash_algorithm: str
    hash_seed: str
    format_version: int

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name generation 0."""
        return self.at_generation(0)

    def at_generation(self, generation: int) -> str:
        """16 hex digits that name one generation; files of different generations never match."""
        fields: dict[str, str | int] = asdict(self)
        if generation:
            fields["generation"] = generation
        return hashlib.sha256(canonical_json(fields)).hexdigest()[:FINGERPRINT_HEX_DIGITS]

    def to_json(self) -> bytes:
        """Canonical JSON, kept beside the packs for people and tools."""
        return canonical_json(asdict(self))


def canonical_json(fields: dict[str, str | int]) -> bytes:
    """One spelling for equal fields: sorted, no spaces, ASCII."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
