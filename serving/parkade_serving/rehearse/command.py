"""The command line of ``parkade rehearse``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from parkade_cache.errors import ParkadeError
from parkade_cache.memory.reading import MemorySampler
from parkade_cache.quantity import format_bytes
from parkade_serving.command_line import ExitCode, Parser
from parkade_serving.demo.accounts import receipts_folder
from parkade_serving.demo.command import terminated_like_interrupted, working_folder
from parkade_serving.demo.console import Console
from parkade_serving.demo.plan import EngineChoice, choose_cores, choose_dtype
from parkade_serving.demo.script import cutter_for
from parkade_serving.machine import cpu_flags, machine_facts, parkade_version, usable_cores
from parkade_serving.model import MODEL_NAME, prepare_model
from parkade_serving.rehearse.disk import SmallDisk, made_disk
from parkade_serving.rehearse.enclosure import Enclosure, InGroup, PolicyOnly
from parkade_serving.rehearse.ending import undisturbed
from parkade_serving.rehearse.figures import Measured
from parkade_serving.rehearse.group import NoGroupError, made_group
from parkade_serving.rehearse.inside import own_mounts
from parkade_serving.rehearse.plan import DISK_BYTES, LEAST_DISK_BYTES, LEAST_MEMORY_BYTES, Rounds, choose_rounds
from parkade_serving.rehearse.runner import Rehearsal, Setting
from parkade_serving.rehearse.texts import Texts
from parkade_serving.rehearse.verdict import document, judge, table

_EPILOG: Final = """\
exit codes: 0 passed, 1 failed, 2 it could not be run, 130 interrupted

example: sudo parkade rehearse --changes 20 --json rehearse.json
"""


class RehearsalUnavailableError(ParkadeError, OSError):
    """The rehearsal cannot be run here; the message says what is missing."""


def main(argv: Sequence[str]) -> int:
    """Run ``parkade rehearse``; the exit code is the verdict."""
    options = parser().parse_args(argv)
    console = Console()
    with terminated_like_interrupted(), working_folder(options.dir, prefix="rehearse-", keep=options.keep) as folder:
        try:
            return _run(options, folder, console)
        except KeyboardInterrupt:
            console.plain("\ninterrupted; the pod is ended, its group and its disk are removed")
            return ExitCode.INTERRUPTED
        except NoGroupError as error:
            said = " ".join(str(error.strerror or error).split())
            sys.stderr.write(f"parkade rehearse: {said}; run it as root, or with --no-cgroup to try the policy alone\n")
            return ExitCode.USAGE
        except ParkadeError as error:
            # Not in one line: the end of an engine's log is what helps.
            sys.stderr.write(f"parkade rehearse: {error}\n")
            return ExitCode.USAGE


def parser() -> argparse.ArgumentParser:
    """The options of ``parkade rehearse``."""
    made = Parser(
        prog="parkade rehearse",
        description="Try the cache on this machine: little memory, a greedy neighbour, a full disk, a kill.",
        epilog=_EPILOG,
    )
    made.add_argument("--quick", action="store_true", help="fewer rounds")
    made.add_argument("--changes", type=_count, metavar="N", help="lower the limit N times each way; default 5")
    made.add_argument("--minutes", type=float, metavar="M", help="leave out what would take longer; default 10")
    made.add_argument("--seed", type=int, metavar="N", help="repeat the moments and depths of an earlier run")
    made.add_argument("--no-cgroup", action="store_true", help="no control group: the policy's limit only")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    made.add_argument("--dir", type=Path, metavar="DIR", help="where the pod's disk and its log go")
    made.add_argument("--keep", action="store_true", help="leave receipts and log there")
    made.add_argument("--model", metavar="MODEL", help=f"default {MODEL_NAME}, prepared once and kept")
    made.add_argument(
        "--cores", metavar="LIST", help="for the engine's computing threads, such as 0-3; default all of a small one"
    )
    return made


def _run(options: argparse.Namespace, folder: Path, console: Console) -> int:
    begun = time.monotonic()
    rounds = choose_rounds(quick=options.quick, changes=options.changes, minutes=options.minutes)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    with undisturbed() as places:
        enclosure = _enclosure(options, places)
        _check_machine(folder)
        disk = _disk(folder, places, console)
        console.line(f"seed {seed}; {_shown(rounds)}")
        if options.model is None:
            console.line(f"preparing {MODEL_NAME} (half a minute the first time)")
        model = options.model or str(prepare_model())
        cores = options.cores or choose_cores(usable_cores())
        setting = Setting(
            choice=EngineChoice(python=sys.executable, model=model, dtype=choose_dtype(cpu_flags()), cores=cores),
            rounds=rounds,
            seed=seed,
            enclosure=enclosure,
            disk=disk,
            folder=folder,
            console=console,
            deadline=begun + rounds.minutes * 60.0,
        )
        rehearsal = Rehearsal(setting, Texts(cutter_for(model), seed=seed))
        if not enclosure.has_kernel_limit:
            rehearsal.measured.skipped.append("the kernel's limit and its counter: --no-cgroup")
        if disk is None:
            rehearsal.measured.skipped.append("the full disk: no disk of its own can be made here")
        measured = rehearsal.run()
        if options.keep:
            _keep(setting, folder)
    return _report(measured, options, folder, console)


def _enclosure(options: argparse.Namespace, places: contextlib.ExitStack) -> Enclosure:
    if options.no_cgroup:
        return PolicyOnly()
    return InGroup(places.enter_context(made_group()))


def _check_machine(folder: Path) -> None:
    available_bytes = MemorySampler().sample().available_bytes
    if available_bytes is not None and available_bytes < LEAST_MEMORY_BYTES:
        needed = format_bytes(LEAST_MEMORY_BYTES)
        raise RehearsalUnavailableError(
            errno.ENOMEM, f"{format_bytes(available_bytes)} of memory are free here and the rehearsal needs {needed}"
        )
    free = shutil.disk_usage(folder).free
    if free < LEAST_DISK_BYTES:
        raise RehearsalUnavailableError(
            errno.ENOSPC,
            f"{folder} has {format_bytes(free)} free and the rehearsal needs {format_bytes(LEAST_DISK_BYTES)};"
            " name another folder with --dir",
        )


def _disk(folder: Path, places: contextlib.ExitStack, console: Console) -> SmallDisk | None:
    try:
        own_mounts()
        return places.enter_context(made_disk(folder, nbytes=DISK_BYTES))
    except OSError as error:
        console.line(f"the disk will not be filled: {error.strerror or error}")
        return None


def _keep(setting: Setting, folder: Path) -> None:
    """Receipts lie on a disk that goes away."""
    source = receipts_folder(setting.spill_parent)
    if setting.disk is not None and source.is_dir():
        shutil.copytree(source, receipts_folder(folder))


def _report(measured: Measured, options: argparse.Namespace, folder: Path, console: Console) -> int:
    failures = judge(measured)
    console.plain(f"\n{table(measured)}\n")
    for what in measured.skipped:
        console.plain(f"left out: {what}")
    for failure in failures:
        console.plain(f"FAIL {failure}")
    console.plain("verdict: fail" if failures else "verdict: pass")
    if options.json is not None:
        written = document(measured, version=parkade_version(), machine=machine_facts())
        options.json.write_text(json.dumps(written, indent=2) + "\n")
        console.plain(f"every figure: {options.json}")
    console.plain(_where_next(options, folder))
    return ExitCode.NO if failures else ExitCode.OK


def _where_next(options: argparse.Namespace, folder: Path) -> str:
    if options.keep:
        return f"kept in {folder}: the pod's log (engine.log) and its receipts ({receipts_folder(folder)})"
    return (
        "why something was released, refused or dropped is in the receipts: run it again with --keep and the same"
        " --seed, or ask a running pod with parkade receipts and parkade explain CONVERSATION"
    )


def _shown(rounds: Rounds) -> str:
    return (
        f"the neighbour eats {rounds.gulps} times, the limit falls {rounds.changes} times each way,"
        f" at most about {rounds.minutes:.0f} minutes"
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
