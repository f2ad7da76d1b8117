"""``parkade bench NAME``: measures on this machine what Parkade promises, next to what it is measured against.

Each benchmark is a module with ``run(...)`` that returns plain ``sizes``, ``figures`` and ``ratios``; it is imported
only when it is asked for. Here the result gets its name, version and machine, and becomes a table or a JSON file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from parkade_cache.quantity import format_bytes
from parkade_serving.command_line import ExitCode, Parser, size
from parkade_serving.machine import machine_facts, parkade_version
from parkade_serving.model import default_cache_dir

_SECTIONS: Final = ("sizes", "figures", "ratios")
_MICROSECONDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: what it measures, and how it is run with the command's options."""

    does: str
    run: Callable[[Any, argparse.Namespace], Mapping[str, object]]


def _run_step(module: Any, _: argparse.Namespace) -> Mapping[str, object]:
    found: Mapping[str, object] = module.run()
    return found


def _run_spill(module: Any, options: argparse.Namespace) -> Mapping[str, object]:
    # Not the system's temporary folder, which may be memory.
    base: Path = options.dir or default_cache_dir().parent
    base.mkdir(parents=True, exist_ok=True)
    chosen = {} if options.total is None else {"total_bytes": options.total}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base) as folder:
        found: Mapping[str, object] = module.run(folder=Path(folder), **chosen)
        return found


def _run_release(module: Any, options: argparse.Namespace) -> Mapping[str, object]:
    chosen = {} if options.total is None else {"total_bytes": options.total}
    found: Mapping[str, object] = module.run(**chosen)
    return found


def _run_allocator(module: Any, options: argparse.Namespace) -> Mapping[str, object]:
    chosen = {} if options.pairs is None else {"pairs": options.pairs}
    found: Mapping[str, object] = module.run(**chosen)
    return found


BENCHMARKS: Final = {
    "step": Benchmark("what the engine's step pays per block, at 1,000 to 1,000,000 blocks", _run_step),
    "spill": Benchmark("packs written and read, against fio's direct sequential bandwidth", _run_spill),
    "release": Benchmark("giving parked memory back, against malloc_trim", _run_release),
    "allocator": Benchmark("prompts after a heap release, and with glibc's tunables; real engines", _run_allocator),
}


def main(argv: Sequence[str]) -> int:
    """Run ``parkade bench``."""
    options = parser().parse_args(argv)
    module = importlib.import_module(f"{__name__}.{options.name}")
    if sys.stderr.isatty():
        sys.stderr.write(f"parkade bench: {BENCHMARKS[options.name].does}; this may take minutes\n")
    result = document(options.name, BENCHMARKS[options.name].run(module, options))
    sys.stdout.write("\n".join(_table(result)) + "\n")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return ExitCode.OK


def parser() -> argparse.ArgumentParser:
    """The options of ``parkade bench``."""
    names = "\n".join(f"  {name:<10} {benchmark.does}" for name, benchmark in BENCHMARKS.items())
    made = Parser(
        prog="parkade bench",
        description="Measure on this machine what Parkade promises.",
        epilog=f"benchmarks:\n{names}\n\nexample: parkade bench spill --dir /var/lib/parkade --json spill.json",
    )
    made.add_argument("name", choices=tuple(BENCHMARKS), metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    made.add_argument("--dir", type=Path, metavar="DIR", help="spill: a folder on the disk that is measured")
    made.add_argument("--total", type=size, metavar="SIZE", help="spill, release: how much is written or parked")
    made.add_argument("--pairs", type=int, metavar="N", help="allocator: prompts with and without a release each")
    return made


def document(name: str, measured: Mapping[str, object]) -> dict[str, object]:
    """The JSON file of one benchmark."""
    sections = {section: measured.get(section, {}) for section in _SECTIONS}
    return {"bench": name, "version": parkade_version(), "machine": machine_facts(), **sections}


def _table(result: Mapping[str, object]) -> Iterator[str]:
    machine = result["machine"]
    yield f"parkade {result['version']}, bench {result['bench']}"
    if isinstance(machine, Mapping):
        memory = format_bytes(machine["memory_bytes"])
        yield f"{machine['cpu']}, {machine['cores']} cores, {memory}, {machine['system']}, Python {machine['python']}"
    for section in _SECTIONS:
        rows = list(_rows(result[section]))
        if rows:
            width = max(len(name) for name, _ in rows)
            yield f"\n{section}"
            yield from (f"  {name.ljust(width)}  {value}" for name, value in rows)


def _rows(values: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and value, with objects inside spread over rows of their own; long lists only as their length."""
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _rows(value, f"{name} ")
        elif isinstance(value, list | tuple):
            yield name, f"{len(value)} values"
        else:
            yield name, _shown(name, value)


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "_bytes" in name and "per_second" not in name:
        return format_bytes(value)
    if "_seconds" in name and abs(value) < 1:
        return f"{value * _MICROSECONDS:,.2f} µs" if abs(value) < 0.001 else f"{value * 1000:,.2f} ms"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
