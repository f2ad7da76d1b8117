"""The conversation cache, independent of any engine.

Why it exists: between turns a conversation's KV blocks leave the engine; this package keeps them in RAM
that can really be given back, on local disk before they are let go, and accounts for every decision.

What must stay true: nothing here imports an engine, a web framework or Kubernetes; the ledger has one
owner; nothing is findable before it is complete; nothing is freed before its copy is published or its
loss is decided and counted.
"""

from __future__ import annotations

__version__ = "0.1.0"
