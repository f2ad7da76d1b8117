"""vLLM's routes whose requests use the prefix cache: the ones that carry a conversation and a tenant's salt.

A contract test compares this list with the routes of the installed engine: a new route that takes a salt and is
missing here would let a client leave its tenant's space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

GENERATION_ROUTES: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/messages",
        "/v1/messages/render",
        "/v1/systemone",
        "/inference/v1/generate",
        "/generative_scoring",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/invocations",
        "/classify",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/embeddings",
        "/v2/embed",
    }
)
RESPONSES_ROUTE: Final = "/v1/responses"


def route_path(scope: Mapping[str, Any]) -> str:
    """The path as routes see it: without the ``--root-path`` that a proxy serves the pod under."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] == "/":
        return path[len(root) :]
    return path
