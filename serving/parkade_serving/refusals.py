"""Combinations that would break a promise, refused before anything starts, each with one line that says what to do.

What must stay true: only what is known to be unsafe or unsupported is refused; every other flag is the engine's own
business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from parkade_cache.errors import SettingsError
from parkade_serving.engine_arguments import EngineArguments

# Their block keys start from a seed drawn anew by every process: nothing on disk would ever match (D1).
_SEEDED_HASHES: Final = frozenset({"xxhash", "xxhash_cbor", "builtin"})
_SCALE_REPLICAS: Final = "run one pod per replica instead and scale the replicas"

_NEVER: Final[Mapping[str, str]] = {
    "--kv-transfer-config": "Parkade sets --kv-transfer-config itself; remove yours",
    "--kv-offloading-size": "--kv-offloading-size turns on another cache in Parkade's place; use --parked-max",
    "--no-enable-prefix-caching": "Parkade needs the engine's prefix caching; remove --no-enable-prefix-caching",
    "--headless": "--headless starts no API server; Parkade serves one pod with one",
    "--grpc": "--grpc has no HTTP middleware, which Parkade needs to tell conversations apart; remove it",
    "--enable-elastic-ep": f"elastic expert parallel is not supported; {_SCALE_REPLICAS}",
    "--data-parallel-rank": f"data parallel is not supported; {_SCALE_REPLICAS}",
    "--data-parallel-start-rank": f"data parallel is not supported; {_SCALE_REPLICAS}",
    "--data-parallel-hybrid-lb": f"data parallel is not supported; {_SCALE_REPLICAS}",
    "--data-parallel-external-lb": f"data parallel is not supported; {_SCALE_REPLICAS}",
    "--data-parallel-multi-port-external-lb": f"data parallel is not supported; {_SCALE_REPLICAS}",
}
_ONLY_ONE: Final[Mapping[str, str]] = {
    "--data-parallel-size": f"data parallel is not supported; {_SCALE_REPLICAS}",
    "--data-parallel-size-local": f"data parallel is not supported; {_SCALE_REPLICAS}",
    "--prefill-context-parallel-size": "prefill context parallel is not supported; use --tensor-parallel-size",
    "--decode-context-parallel-size": "decode context parallel is not supported; use --tensor-parallel-size",
    "--nnodes": "an engine across several nodes is not supported; every rank must reach the pod's sockets",
    "--api-server-count": "Parkade needs --api-server-count 1; its metrics come from that one process",
}


def refuse_unsafe(engine: EngineArguments, env: Mapping[str, str], *, spill_on: bool) -> None:
    """Return when the engine's arguments and environment are safe to run with.

    Raises:
        SettingsError: one line.

    """
    _refuse_flags(engine)
    _refuse_environment(env)
    if spill_on:
        _refuse_for_spill(engine, env)


def _refuse_flags(engine: EngineArguments) -> None:
    for flag, message in _NEVER.items():
        if engine.has(flag):
            raise SettingsError(message)
    for flag, message in _ONLY_ONE.items():
        if engine.number(flag) not in {None, 1}:
            raise SettingsError(message)


def _refuse_environment(env: Mapping[str, str]) -> None:
    if env.get("VLLM_USE_RUST_FRONTEND", "0") not in {"", "0"}:
        raise SettingsError("VLLM_USE_RUST_FRONTEND has no Python middleware, which Parkade needs; unset it")
    if env.get("PROMETHEUS_MULTIPROC_DIR"):
        raise SettingsError("PROMETHEUS_MULTIPROC_DIR would hide Parkade's metrics; unset it")


def _refuse_for_spill(engine: EngineArguments, env: Mapping[str, str]) -> None:
    algorithm = engine.value("--prefix-caching-hash-algo")
    if algorithm in _SEEDED_HASHES and "PYTHONHASHSEED" not in env:
        raise SettingsError(
            f"block keys of --prefix-caching-hash-algo {algorithm} change with every start, so a spill directory"
            " would be useless; use sha256_cbor or set PYTHONHASHSEED"
        )
    if engine.number("--shutdown-timeout") == 0:
        raise SettingsError(
            "--shutdown-timeout 0 kills the engine before conversations are on disk; use 30 or run without --spill-dir"
        )
