"""Which runs there are, and the command that starts each one's engine. Pure.

What must stay true: the runs differ in the cache and in nothing else.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.quantity import format_bytes

BLOCK_TOKENS: Final = 128
MAX_MODEL_TOKENS: Final = 4096
ENGINE_BLOCKS: Final = 34
"""The engine's own cache: one conversation of the longest length it takes, and hardly more."""
SERVED_NAME: Final = "demo"

LARGE_BUDGET: Final = "1Gi"
TINY_BUDGET: Final = "24Mi"
_SPILL_SIZE: Final = "4Gi"
_SPILL_MIN_FREE: Final = "256Mi"
_KV_MEMORY: Final = "1G"
"""Only an upper bound, which also keeps the engine from asking for most of the machine's memory."""

_SMALL_MACHINE_CORES: Final = 4
_STARTUP: Final = Path(__file__).parent / "startup"
_FAST_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class RunName(enum.StrEnum):
    """The demo's runs, by the names that its JSON file uses."""

    NO_CACHE = "no-cache"
    LARGE = "large"
    TINY = "tiny"
    TINY_KILLED = "tiny-killed"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run: what it keeps in RAM, and how its engine ends in the middle."""

    name: RunName
    budget: str | None
    """RAM for parked conversations as a quantity; None runs the engine without Parkade."""
    killed: bool = False


RUNS: Final = (
    RunPlan(RunName.NO_CACHE, None),
    RunPlan(RunName.LARGE, LARGE_BUDGET),
    RunPlan(RunName.TINY, TINY_BUDGET),
    RunPlan(RunName.TINY_KILLED, TINY_BUDGET, killed=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What all runs have in common."""

    python: str
    model: str
    dtype: str
    cores: str | None
    """Cores for the engine's computing threads, as vLLM's CPU build takes them; None leaves it to vLLM."""


def choose_dtype(cpu_flags: frozenset[str]) -> str:
    """The model's own bfloat16 where the processor computes it, else float32, which is four times faster there."""
    return "bfloat16" if cpu_flags & _FAST_BFLOAT16 else "float32"


def engine_command(choice: EngineChoice, plan: RunPlan, *, port: int, folder: Path, sockets: Path) -> tuple[str, ...]:
    """The command line of a run's engine, the same before and after its restart."""
    if plan.budget is None:
        start = (choice.python, "-m", "parkade_serving.vllm_command", "serve", choice.model)
        return (*start, *_engine_flags(choice, port))
    start = (choice.python, "-m", "parkade_serving.cli", "serve", choice.model)
    return (*start, *_cache_flags(plan.budget, folder, sockets), *_engine_flags(choice, port))


def _cache_flags(budget: str, folder: Path, sockets: Path) -> tuple[str, ...]:
    return (
        f"--parked-max={budget}",
        f"--spill-dir={spill_folder(folder)}",
        f"--spill-size={_SPILL_SIZE}",
        f"--spill-min-free={_SPILL_MIN_FREE}",
        f"--socket-dir={sockets}",
    )


def spill_folder(folder: Path) -> Path:
    """Where a run's engine spills to."""
    return folder / "spill"


def _engine_flags(choice: EngineChoice, port: int) -> tuple[str, ...]:
    return (
        "--host=127.0.0.1",
        f"--port={port}",
        f"--served-model-name={SERVED_NAME}",
        f"--max-model-len={MAX_MODEL_TOKENS}",
        f"--block-size={BLOCK_TOKENS}",
        f"--num-gpu-blocks-override={ENGINE_BLOCKS}",
        f"--kv-cache-memory-bytes={_KV_MEMORY}",
        "--max-num-seqs=4",
        "--enforce-eager",
        f"--dtype={choice.dtype}",
        "--seed=0",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    )


def choose_cores(usable: Sequence[int]) -> str | None:
    """Every core on a small machine, where vLLM would leave one of two idle; vLLM's own choice on a larger one."""
    return ",".join(str(core) for core in usable) if len(usable) <= _SMALL_MACHINE_CORES else None


def engine_environment(base: Mapping[str, str], choice: EngineChoice) -> dict[str, str]:
    """Variables for the engine: no model hub, no usage reports, a faster start, and the cores that were chosen.

    Computing threads that spin while they wait would take their cores from the engine's own scheduler: they sleep.
    """
    changed = (
        {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
        | dict(base)
        | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
            # The worker lives in the engine core's process, as on one GPU: a third less to import at each start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_STARTUP), base.get("PYTHONPATH")])),
        }
    )
    if choice.cores is not None:
        changed["VLLM_CPU_OMP_THREADS_BIND"] = choice.cores
    return changed


def describe(plan: RunPlan) -> str:
    """A run in a few words."""
    if plan.budget is None:
        return "stock vLLM, no Parkade"
    from_quantity = {LARGE_BUDGET: "holds every conversation", TINY_BUDGET: "holds no single conversation"}
    ending = "killed in the middle" if plan.killed else "restarted in the middle"
    return f"RAM budget {plan.budget} ({from_quantity[plan.budget]}), {ending}"


def shown_size(nbytes: int | None) -> str:
    """A size for the table; a dash where there is none."""
    return "-" if nbytes is None else format_bytes(nbytes)
