"""The command line of ``parkade demo``."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import psutil

from parkade_cache.errors import ParkadeError
from parkade_cache.quantity import format_bytes, parse_quantity
from parkade_serving.command_line import ExitCode, Parser
from parkade_serving.demo.accounts import receipts_folder
from parkade_serving.demo.console import Console
from parkade_serving.demo.figures import RunFigures
from parkade_serving.demo.plan import RUNS, EngineChoice, RunName, RunPlan, choose_cores, choose_dtype
from parkade_serving.demo.report import document, table, verdict_lines
from parkade_serving.demo.runner import Runner
from parkade_serving.demo.script import cutter_for, make_script
from parkade_serving.demo.verdicts import judge
from parkade_serving.machine import cpu_flags, engine_facts, machine_facts, parkade_version, usable_cores
from parkade_serving.model import MODEL_NAME, default_cache_dir, prepare_model

_EPILOG: Final = """\
exit codes: 0 every promise was kept, 1 one was not, 2 it could not be run, 130 interrupted

example: parkade demo --runs large,tiny --json demo.json
"""
_NEEDED_DISK_BYTES: Final = 2 << 30
_BYTES_PER_ENGINE: Final = 4 << 30
_MOST_TOGETHER: Final = 4


class DemoUnavailableError(ParkadeError, OSError):
    """The demo cannot be run here; the message says what is missing."""


def main(argv: Sequence[str]) -> int:
    """Run ``parkade demo``; the exit code says whether every promise was kept."""
    options = parser().parse_args(argv)
    console = Console()
    with terminated_like_interrupted(), working_folder(options.dir, prefix="demo-", keep=options.keep) as folder:
        try:
            return _run(options, folder, console)
        except KeyboardInterrupt:
            console.plain("\ninterrupted; engines ended and files removed")
            return ExitCode.INTERRUPTED
        except ParkadeError as error:
            # Not in one line: the end of an engine's log is what helps.
            sys.stderr.write(f"parkade demo: {error}\n")
            return ExitCode.USAGE


def parser() -> argparse.ArgumentParser:
    """The options of ``parkade demo``."""
    made = Parser(
        prog="parkade demo",
        description="Conversations take turns on a real engine with little memory, through a restart and a kill.",
        epilog=_EPILOG,
    )
    names = ",".join(plan.name for plan in RUNS)
    made.add_argument("--runs", type=_runs, default=RUNS, metavar="NAMES", help=f"which of {names}; default all")
    made.add_argument("--model", metavar="MODEL", help=f"default {MODEL_NAME}, prepared once and kept")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    made.add_argument("--dir", type=Path, metavar="DIR", help="where spilled conversations and logs go")
    made.add_argument("--keep", action="store_true", help="leave the spilled conversations, receipts and logs there")
    made.add_argument("--port", type=int, metavar="N", help="first port to use; default any that is free")
    made.add_argument(
        "--cores", metavar="LIST", help="for the engine's computing threads, such as 0-3; default all of a small one"
    )
    made.add_argument("--together", type=int, metavar="N", help="engines that start side by side; default by memory")
    return made


def _run(options: argparse.Namespace, folder: Path, console: Console) -> int:
    _check_disk(folder)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        console.line(f"preparing {MODEL_NAME} (half a minute the first time)")
    model = options.model or str(prepare_model())
    script = make_script(cutter_for(model))
    cores = options.cores or choose_cores(usable_cores())
    choice = EngineChoice(python=sys.executable, model=model, dtype=choose_dtype(cpu_flags()), cores=cores)
    ports = itertools.count(options.port) if options.port is not None else None
    pick = {} if ports is None else {"pick_port": ports.__next__}
    runner = Runner(choice, script, folder=folder, console=console, **pick)
    together = options.together or _engines_together()
    runs: list[RunFigures] = []
    for group in _batched(options.runs, together):
        runs.extend(runner.run_together([(plan, _budget_bytes(plan)) for plan in group]))
    return _report(runs, options, folder, console)


def _report(runs: Sequence[RunFigures], options: argparse.Namespace, folder: Path, console: Console) -> int:
    verdicts = judge({run.name: run for run in runs})
    console.plain(f"\n{table(runs)}\n")
    if verdicts:
        console.plain(f"{verdict_lines(verdicts)}\n")
    if options.json is not None:
        engine = engine_facts(options.model or MODEL_NAME)
        written = document(runs, version=parkade_version(), machine=machine_facts(), engine=engine)
        options.json.write_text(json.dumps(written, indent=2) + "\n")
        console.plain(f"every turn: {options.json}")
    console.plain(_where_next(options, folder))
    return ExitCode.OK if all(verdict.kept for verdict in verdicts) else ExitCode.NO


def _where_next(options: argparse.Namespace, folder: Path) -> str:
    if options.keep:
        shown = receipts_folder(folder / RunName.TINY)
        return f"kept in {folder}: logs (engine.log) and receipts, such as {shown}"
    return (
        "why a turn was or was not re-read: parkade explain CONVERSATION, while a pod runs;"
        " receipts and logs of this demo: run it again with --keep"
    )


def _batched(plans: Sequence[RunPlan], size: int) -> Iterator[Sequence[RunPlan]]:
    for start in range(0, len(plans), size):
        yield plans[start : start + size]


def _engines_together() -> int:
    """As many engines as memory and cores allow to start side by side.

    A start is mostly one thread that imports: two a core keep every core busy until the last one is up.
    """
    by_memory = psutil.virtual_memory().available // _BYTES_PER_ENGINE
    return max(1, min(_MOST_TOGETHER, 2 * len(usable_cores()), int(by_memory)))


def _budget_bytes(plan: RunPlan) -> int | None:
    return None if plan.budget is None else parse_quantity(plan.budget)


def _runs(text: str) -> tuple[RunPlan, ...]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    by_name: dict[str, RunPlan] = {plan.name: plan for plan in RUNS}
    if not wanted or any(name not in by_name for name in wanted):
        raise argparse.ArgumentTypeError(f"{text!r}: name some of {', '.join(by_name)}, separated by commas")
    return tuple(plan for plan in RUNS if plan.name in wanted)


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_DISK_BYTES:
        raise DemoUnavailableError(
            f"{folder} has {format_bytes(free)} free and the demo needs {format_bytes(_NEEDED_DISK_BYTES)};"
            " name another folder with --dir"
        )


@contextlib.contextmanager
def working_folder(parent: Path | None, *, prefix: str, keep: bool) -> Iterator[Path]:
    """A new folder, removed afterwards unless it is to be kept."""
    # Not the system's temporary folder, which may be memory: what is spilled must reach a disk.
    base = parent if parent is not None else default_cache_dir().parent
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    except OSError as error:
        reason = f"{base} cannot be used ({error.strerror}); name another folder with --dir"
        raise DemoUnavailableError(reason) from None
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that it cleans up."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
