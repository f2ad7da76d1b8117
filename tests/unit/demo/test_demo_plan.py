"""The engines of all runs differ in the cache and in nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parkade_cache.quantity import parse_quantity
from parkade_serving.demo.plan import (
    BLOCK_TOKENS,
    ENGINE_BLOCKS,
    MAX_MODEL_TOKENS,
    RUNS,
    EngineChoice,
    choose_cores,
    choose_dtype,
    engine_command,
    engine_environment,
)

CHOICE = EngineChoice(python="/bin/python", model="/models/small", dtype="float32", cores="0,1")


def command(index: int) -> tuple[str, ...]:
    return engine_command(CHOICE, RUNS[index], port=8123, folder=Path("/demo/run"), sockets=Path("/tmp/s"))


def test_the_engines_own_cache_holds_one_conversation_and_hardly_more():
    assert MAX_MODEL_TOKENS // BLOCK_TOKENS < ENGINE_BLOCKS <= MAX_MODEL_TOKENS // BLOCK_TOKENS + 2


def test_every_run_starts_its_engine_with_the_same_flags():
    stock = set(command(0))
    for index in (1, 2, 3):
        added = set(command(index)) - stock
        kept = {"--parked-max", "--spill-dir", "--spill-size", "--spill-min-free", "--socket-dir"}
        assert {flag.partition("=")[0] for flag in added} - {"parkade_serving.cli"} == kept


def test_only_the_run_without_a_cache_starts_stock_vllm():
    assert [command(index)[2] for index in range(4)] == ["parkade_serving.vllm_command"] + ["parkade_serving.cli"] * 3


def test_the_tiny_budget_is_smaller_than_a_first_prompt_on_any_processor():
    bytes_per_token_bfloat16 = 30 * 3 * 64 * 2 * 2
    assert parse_quantity(RUNS[2].budget or "") < 1900 * bytes_per_token_bfloat16


def test_only_one_run_is_killed():
    assert [plan.name for plan in RUNS if plan.killed] == ["tiny-killed"]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [({"avx2"}, "float32"), ({"avx512f"}, "float32"), ({"avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16")],
)
def test_two_byte_weights_are_used_where_the_processor_computes_with_them(flags: set[str], dtype: str):
    assert choose_dtype(frozenset(flags)) == dtype


def test_a_small_machine_computes_on_every_core_and_a_large_one_as_the_engine_likes():
    assert choose_cores((0, 1)) == "0,1"
    assert choose_cores(tuple(range(64))) is None


def test_the_engine_reaches_no_hub_and_reports_to_nobody():
    env = engine_environment({"PATH": "/bin", "HF_HUB_OFFLINE": "0"}, CHOICE)
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["PATH"] == "/bin"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_every_process_of_an_engine_starts_with_the_collector_at_rest():
    env = engine_environment({"PYTHONPATH": "/mine"}, CHOICE)
    code = "import gc; print(gc.get_threshold()[0] > 10_000, len(gc.callbacks))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "1"]
    assert env["PYTHONPATH"].endswith(":/mine")


def test_a_wait_policy_that_the_user_chose_is_kept():
    assert engine_environment({"OMP_WAIT_POLICY": "ACTIVE"}, CHOICE)["OMP_WAIT_POLICY"] == "ACTIVE"
