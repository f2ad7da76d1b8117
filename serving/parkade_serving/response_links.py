"""Which conversation a response belonged to, so that ``previous_response_id`` links a turn to its predecessor.

A response id changes with every turn and is no conversation id. The links are bounded, kept per tenant and in memory
only: a link that was forgotten costs the explicit id, not the cache, since the owner then derives the conversation
from the longest known prefix.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

from parkade_cache.ids import ConversationId
from parkade_serving.identity import MAX_ID_BYTES, Tenant

_MAX_LINKS: Final = 10_000
# The id stands near the start of a response, streamed or not; what follows is the answer's text.
_SEARCHED_BYTES: Final = 2048
_RESPONSE_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


class ResponseLinks:
    """The newest links; used from one event loop."""

    def __init__(self, capacity: int = _MAX_LINKS) -> None:
        self._capacity = capacity
        self._links: OrderedDict[tuple[Tenant, str], ConversationId] = OrderedDict()

    def learn(self, tenant: Tenant, conversation: ConversationId, first_bytes: bytes) -> None:
        """Remember the response that starts with these bytes, where they hold its id."""
        found = _RESPONSE_ID.search(first_bytes[:_SEARCHED_BYTES])
        if found is None:
            return
        key = (tenant, found.group(1).decode("ascii"))
        self._links[key] = conversation
        self._links.move_to_end(key)
        if len(self._links) > self._capacity:
            self._links.popitem(last=False)

    def find(self, tenant: Tenant, response_id: object) -> ConversationId | None:
        if not isinstance(response_id, str) or len(response_id) > MAX_ID_BYTES:
            return None
        return self._links.get((tenant, response_id))
