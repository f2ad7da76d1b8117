"""What ``parkade serve`` refuses, in one line each, and what it lets through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parkade_cache.errors import ParkadeError, PolicyError, SettingsError
from parkade_cache.policy import SpillMode
from parkade_serving.engine_arguments import EngineArguments
from parkade_serving.settings import ServeOptions, ServeSettings, check_settings

GIB = 1024**3
LIMIT = 96 * GIB
SPILL = {"spill_dir": Path("/spill"), "spill_size": 100 * GIB}


def settings_for(
    *engine: str, env: dict[str, str] | None = None, limit_bytes: int | None = LIMIT, **options: Any
) -> ServeSettings:
    return check_settings(
        ServeOptions(socket_dir=Path("/run/parkade"), **options),
        EngineArguments(["m", *engine]),
        env or {},
        limit_bytes=limit_bytes,
    )


def refusal_of(*engine: str, **options: Any) -> str:
    with pytest.raises(ParkadeError) as refusal:
        settings_for(*engine, **options)
    assert isinstance(refusal.value, SettingsError | PolicyError)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_model_alone_is_enough() -> None:
    settings = settings_for()
    assert settings.policy.spill is None
    assert settings.policy.memory.floor == LIMIT // 20
    assert 0 < settings.policy.memory.parked.max < LIMIT


def test_flags_become_the_policy() -> None:
    policy = settings_for(
        parked_max=8 * GIB,
        parked_conversations=3,
        memory_floor=2 * GIB,
        headroom=GIB,
        min_tokens=64,
        spill_min_free=GIB,
        spill_mode="OnEvict",
        write_budget=7 * GIB,
        **SPILL,
    ).policy
    assert (policy.memory.parked.max, policy.memory.parked.max_conversations) == (8 * GIB, 3)
    assert (policy.memory.floor, policy.memory.headroom, policy.memory.parked.min_tokens) == (2 * GIB, GIB, 64)
    assert policy.spill is not None
    assert (policy.spill.size, policy.spill.min_free, policy.spill.min_tokens) == (100 * GIB, GIB, 64)
    assert (policy.spill.mode, policy.spill.write_budget_per_hour) == (SpillMode.ON_EVICT, 7 * GIB)


def test_flags_count_over_the_policy_file() -> None:
    document = {"memory": {"floor": "1Gi", "parked": {"max": "4Gi", "minTokens": 9}}, "spill": {"size": "5Gi"}}
    policy = settings_for(policy=document, parked_max=6 * GIB, spill_dir=Path("/spill")).policy
    assert (policy.memory.parked.max, policy.memory.parked.min_tokens, policy.memory.floor) == (6 * GIB, 9, GIB)
    assert policy.spill is not None
    assert policy.spill.size == 5 * GIB


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spill_dir": Path("/spill")}, "--spill-size"),
        ({"spill_size": GIB}, "--spill-dir"),
        ({"write_budget": GIB}, "--spill-dir"),
        ({"policy": {"spill": {"size": "1Gi"}}}, "--spill-dir"),
        ({"spill_dir": Path("/spill"), "spill_size": 0}, "spill"),
        ({"memory_floor": LIMIT}, "floor"),
        ({"memory_floor": LIMIT - GIB, "headroom": GIB}, "headroom"),
        ({"memory_limit": 4 * GIB, "memory_floor": 4 * GIB}, "floor"),
        ({"parked_max": LIMIT}, "parked.max"),
        ({"policy": {"memory": {"flor": 1}}}, "memory.flor"),
        ({"id_key_file": Path("/nowhere/key")}, "--id-key-file"),
        ({"token_file": Path("/nowhere/token")}, "--token-file"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused(options: dict[str, Any], said: str) -> None:
    assert said in refusal_of(**options)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (["--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config"),
        (["--kv-offloading-size", "4"], "--parked-max"),
        (["--no-enable-prefix-caching"], "prefix caching"),
        (["--data-parallel-size", "2"], "data parallel"),
        (["-dp", "4"], "data parallel"),
        (["-dpl", "2"], "data parallel"),
        (["--data-parallel-rank", "0"], "data parallel"),
        (["--data-parallel-hybrid-lb"], "data parallel"),
        (["--prefill-context-parallel-size", "2"], "prefill context parallel"),
        (["-dcp", "2"], "decode context parallel"),
        (["--nnodes", "2"], "nodes"),
        (["--api-server-count", "2"], "--api-server-count 1"),
        (["--headless"], "--headless"),
        (["--grpc"], "--grpc"),
    ],
)
def test_flags_of_the_engine_that_break_a_promise_are_refused(engine: list[str], said: str) -> None:
    assert said in refusal_of(*engine)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_block_keys_that_change_with_every_start_are_refused_with_a_spill_directory(algorithm: str) -> None:
    flags = ["--prefix-caching-hash-algo", algorithm]
    assert "sha256_cbor" in refusal_of(*flags, **SPILL)
    settings_for(*flags)
    settings_for(*flags, env={"PYTHONHASHSEED": "0"}, **SPILL)


def test_an_engine_that_dies_at_once_is_refused_with_a_spill_directory() -> None:
    assert "--shutdown-timeout" in refusal_of("--shutdown-timeout", "0", **SPILL)
    settings_for("--shutdown-timeout", "0")
    settings_for("--shutdown-timeout", "60", **SPILL)


@pytest.mark.parametrize("env", [{"VLLM_USE_RUST_FRONTEND": "1"}, {"PROMETHEUS_MULTIPROC_DIR": "/tmp/x"}])
def test_an_environment_that_takes_the_middleware_or_the_metrics_away_is_refused(env: dict[str, str]) -> None:
    assert next(iter(env)) in refusal_of(env=env)


def test_without_a_model_the_advice_is_to_name_it_first() -> None:
    with pytest.raises(SettingsError, match="parkade serve Qwen"):
        check_settings(ServeOptions(socket_dir=Path("/run/p")), EngineArguments(["--port", "1"]), {}, limit_bytes=LIMIT)


@pytest.mark.parametrize(
    "engine",
    [
        ["--data-parallel-size", "1"],
        ["-asc", "1"],
        ["--tensor-parallel-size", "8"],
        ["--prefix-caching-hash-algo=sha256"],
        ["--enable-prefix-caching"],
        ["--seed", "-1"],
        ["--some-new-flag", "x"],
    ],
)
def test_every_other_flag_passes_through(engine: list[str]) -> None:
    assert settings_for(*engine, **SPILL).engine.arguments == ("m", *engine)
