"""``parkade bench allocator``: what a heap release costs the prompts after it, and what allocator settings buy.

Why it exists: the gate asks every process of the pod for its heap before it lets a conversation go. That is only
free if prompts read as fast afterwards. glibc's tunables promise the same memory without asking, at a price.

What must stay true: prompts are read by a real engine that keeps nothing (``--parked-max 0``), each another one of
the same length, and prompts after a release take turns with prompts that have none before them, so that a machine
that slows down slows both.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from parkade_serving.bench.release import measure_in_child
from parkade_serving.demo.engine import Engine, free_port
from parkade_serving.demo.plan import EngineChoice, choose_cores, choose_dtype, engine_environment
from parkade_serving.machine import cpu_flags, usable_cores
from parkade_serving.model import prepare_model
from parkade_serving.rpc import OwnerClient
from parkade_serving.sockets import OWNER_SOCKET

SETTINGS: Final[Mapping[str, str]] = {
    "default": "",
    "two_arenas": "glibc.malloc.arena_max=2",
    "low_thresholds": (
        "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=1048576:glibc.malloc.trim_threshold=1048576"
    ),
}
"""``GLIBC_TUNABLES`` by name. Fixed thresholds switch glibc's own adaptation of them off."""

_GIB: Final = 1 << 30
_FIRST_TOKEN_ID: Final = 1000
_LAST_TOKEN_ID: Final = 40_000
_EXTENT_TOTAL_BYTES: Final = 1 << 30


@dataclass(slots=True)
class Measured:
    """One engine's figures."""

    plain_seconds: list[float] = field(default_factory=list)
    after_release_seconds: list[float] = field(default_factory=list)
    release_seconds: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    resident_after_release_bytes: list[int] = field(default_factory=list)
    trims: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    def figures(self) -> dict[str, object]:
        """Medians, and what each process's trims took and gave back."""
        return {
            "prompt_seconds": statistics.median(self.plain_seconds),
            "prompt_after_release_seconds": statistics.median(self.after_release_seconds),
            "release_seconds": statistics.median(self.release_seconds),
            "resident_bytes": max(self.resident_bytes),
            "resident_after_release_bytes": max(self.resident_after_release_bytes),
            "trims": {process: _trims(records) for process, records in self.trims.items()},
        }

    def trim_seconds_per_gib(self) -> float | None:
        """What giving back a GiB of heap cost; None where nothing came back."""
        records = [record for records in self.trims.values() for record in records]
        released_bytes = sum(_released(record) for record in records)
        seconds = sum(float(record["trim_seconds"]) for record in records)
        return seconds * _GIB / released_bytes if released_bytes else None


def run(*, prompt_tokens: int = 4096, pairs: int = 3, settings: Sequence[str] = tuple(SETTINGS)) -> dict[str, object]:
    """Measure each of ``settings`` with an engine of its own; ``pairs`` prompts with and without a release before."""
    model = prepare_model()
    found = {name: _measure(model, SETTINGS[name], prompt_tokens, pairs) for name in settings}
    extents = measure_in_child("extents", _EXTENT_TOTAL_BYTES)
    extent_per_gib = float(str(extents["seconds"])) * _GIB / float(str(extents["released_bytes"]))
    first = next(iter(found.values()))
    ratios: dict[str, object] = {}
    for name, measured in found.items():
        trim = measured.trim_seconds_per_gib()
        ratios[name] = {
            "prompt_after_release_to_before": _ratio(measured.after_release_seconds, measured.plain_seconds),
            "prompt_to_first_setting": _ratio(measured.plain_seconds, first.plain_seconds),
            **({} if trim is None else {"trim_per_gib_to_extent_release_per_gib": trim / extent_per_gib}),
        }
    return {
        "sizes": {"prompt_tokens": prompt_tokens, "pairs": pairs, "settings": {n: SETTINGS[n] for n in settings}},
        "figures": {name: measured.figures() for name, measured in found.items()}
        | {"extent_release_seconds_per_gib": extent_per_gib},
        "ratios": ratios,
    }


def _measure(model: Path, tunables: str, prompt_tokens: int, pairs: int) -> Measured:
    chance = random.Random(prompt_tokens)  # noqa: S311 - prompts that differ, not secrets
    measured = Measured()
    with _engine(model, tunables, prompt_tokens) as (engine, owner):
        _read(engine, chance, prompt_tokens)
        for pair in range(pairs):
            for released in (False, True) if pair % 2 else (True, False):
                if released:
                    _release(engine, owner, measured)
                seconds = _read(engine, chance, prompt_tokens)
                (measured.after_release_seconds if released else measured.plain_seconds).append(seconds)
    return measured


@contextlib.contextmanager
def _engine(model: Path, tunables: str, prompt_tokens: int) -> Iterator[tuple[Engine, OwnerClient]]:
    choice = EngineChoice(
        python=sys.executable,
        model=str(model),
        dtype=choose_dtype(cpu_flags()),
        cores=choose_cores(usable_cores()),
    )
    with tempfile.TemporaryDirectory(prefix="parkade-bench-") as text:
        folder = Path(text)
        port = free_port()
        # Three processes, as with several GPUs: each has a heap of its own.
        env = engine_environment(os.environ, choice) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        if tunables:
            env["GLIBC_TUNABLES"] = tunables
        engine = Engine(_command(choice, port, folder, prompt_tokens), env, port=port, log=folder / "engine.log")
        try:
            engine.wait_ready(lambda _: None)
            yield engine, OwnerClient(folder / OWNER_SOCKET)
        finally:
            engine.kill()


def _command(choice: EngineChoice, port: int, folder: Path, prompt_tokens: int) -> tuple[str, ...]:
    return (
        *(choice.python, "-m", "parkade_serving.cli", "serve", choice.model, "--parked-max=0"),
        *(f"--socket-dir={folder}", "--host=127.0.0.1", f"--port={port}", "--served-model-name=bench"),
        *(f"--max-model-len={prompt_tokens + 128}", "--enforce-eager", f"--dtype={choice.dtype}", "--max-num-seqs=2"),
        *("--kv-cache-memory-bytes=1G", "--seed=0"),
    )


def _read(engine: Engine, chance: random.Random, prompt_tokens: int) -> float:
    """Seconds until a fresh prompt's first token is there."""
    tokens = [chance.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(prompt_tokens)]
    body = json.dumps({"model": "bench", "prompt": tokens, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(  # noqa: S310 - our own engine on loopback
        f"{engine.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        answer.read()
    return time.perf_counter() - started


def _release(engine: Engine, owner: OwnerClient, measured: Measured) -> None:
    measured.resident_bytes.append(_resident_bytes(engine))
    started = time.perf_counter()
    records = owner.call("release_heaps", {}, 60.0)
    measured.release_seconds.append(time.perf_counter() - started)
    measured.resident_after_release_bytes.append(_resident_bytes(engine))
    for record in records if isinstance(records, list) else ():
        measured.trims.setdefault(str(record["process"]), []).append(record)


def _resident_bytes(engine: Engine) -> int:
    root = psutil.Process(engine.pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))


def _trims(records: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    return {
        "allocator": records[0]["allocator"],
        "median_seconds": statistics.median(float(record["trim_seconds"]) for record in records),
        "released_bytes": sum(_released(record) for record in records),
    }


def _released(record: Mapping[str, Any]) -> int:
    return max(0, int(record["resident_before_bytes"]) - int(record["resident_after_bytes"]))


def _ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(some) / statistics.median(others)
