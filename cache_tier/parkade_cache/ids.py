"""Identifiers that every part of the cache shares."""

from __future__ import annotations

from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Chained content hash of a block plus its KV group (4 bytes, big endian); the tenant's salt is inside the hash."""

ConversationId = NewType("ConversationId", str)
"""Keyed hash of tenant and client-given id; safe to store, list and log."""

RequestId = NewType("RequestId", str)

PackId = NewType("PackId", str)
"""Name of one pack file, the same on every rank: 32 lower-case hex digits, ordered by creation time."""

NO_KEY = BlockKey(b"")
"""Parent of the first block of a chain."""
