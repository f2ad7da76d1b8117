"""The manager between vLLM's scheduler and the cache."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from parkade_cache.cache import ConversationCache
from parkade_cache.hooks import HookTimes
from parkade_cache.metrics import CacheMetrics

pytest.importorskip("vllm")


class BrokenCache:
    """A cache whose every call fails, as after a bug."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


def test_an_error_of_the_cache_costs_a_request_its_cache_and_never_the_engine() -> None:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

    from parkade_serving.manager import ParkadeManager, RequestHandle

    owner = SimpleNamespace(
        cache=cast("ConversationCache", BrokenCache()),
        state=SimpleNamespace(lock=threading.RLock(), metrics=CacheMetrics()),
        hooks=HookTimes(),
    )
    runtime = SimpleNamespace(
        owner=owner,
        block_tokens=(4,),
        group_rank={0: 0},
        read_deadline_s=lambda: 10.0,
        take_uncaptured=lambda keys: frozenset(),
    )
    manager = ParkadeManager(cast("Any", runtime))
    context = ReqContext(req_id="r")
    turn = cast("Any", SimpleNamespace(outcome="finished"))
    context.set_state(RequestHandle(turn=turn, keys=lambda: [[]]))
    key = OffloadKey(b"k" * 36)

    stored = manager.prepare_store([key], context)
    assert stored is not None
    assert stored.keys_to_store == []
    loaded = manager.prepare_load([key], context)
    assert [source.pack for source in loaded.sources] == [None]
    manager.complete_store([key], context)
    manager.complete_load([key], context)
    manager.on_request_finished(context)
    counted = {
        labels["hook"]
        for family in owner.state.metrics.export()
        if family["name"] == "parkade_hook_errors"
        for _, labels, value in family["samples"]
        if value
    }
    assert counted == {"plan_store", "plan_load", "store_done", "load_done", "close"}
