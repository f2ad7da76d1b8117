"""``parkade cache``: look into a spill directory, verify it, delete from it, clean it; beside a pod or after it.

What must stay true: ``ls`` and ``check`` change nothing, whatever state the directory is in; ``rm`` and ``gc`` show
what they will do before they do it, do exactly that, and only where no living pod has the directory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from parkade_cache.errors import DirectoryInUseError, SettingsError, SpillError
from parkade_cache.quantity import format_bytes
from parkade_serving.command_line import ExitCode, Parser, print_json
from parkade_serving.receipts_command import clock_text

if TYPE_CHECKING:
    import argparse

    from parkade_cache.spill.check import CheckReport, Finding
    from parkade_cache.spill.inspection import IdentitySurvey, Survey
    from parkade_cache.spill.upkeep import Outcome, Plan, Step

_HELP: Final = """\
usage: parkade cache ls|check|rm|gc DIR [options]

  ls     what is in a spill directory: identities, conversations, sizes
  check  whether all of it is good; with --read-data every block
  rm     delete conversations, an identity, or all
  gc     remove what no start will serve, and other identities

DIR is what a pod has as --spill-dir. ls and check change nothing, and work beside a living pod; rm and gc show a plan
first, and are refused while a pod has the directory.

example:
  parkade cache ls /var/lib/parkade
  parkade cache check /var/lib/parkade --read-data
  parkade cache rm /var/lib/parkade 3f2a9c0d1e4b5a69788796a5b4c3d2e1
  parkade cache gc /var/lib/parkade --yes

See also: parkade cache ls --help, and so on.
"""
_LS_EXAMPLE: Final = """\
example:
  parkade cache ls /var/lib/parkade
  parkade cache ls /var/lib/parkade --identity 12ab34cd56ef7890 --json

Changes nothing. BYTES is everything a conversation needs, SHARED what other conversations need as well.
Exit code 1: nothing is there with that identity.
"""
_CHECK_EXAMPLE: Final = """\
example:
  parkade cache check /var/lib/parkade
  parkade cache check /var/lib/parkade --read-data --json

Changes nothing. Verifies headers, footers and the index against the packs; --read-data reads every block and verifies
its checksum. Exit code 1: damage was found.
"""
_RM_EXAMPLE: Final = """\
example:
  parkade cache rm /var/lib/parkade 3f2a9c0d1e4b5a69788796a5b4c3d2e1
  parkade cache rm /var/lib/parkade --identity 12ab34cd56ef7890 --yes
  parkade cache rm /var/lib/parkade --all --yes --json

CONVERSATION is an id as `parkade cache ls` shows it. Blocks that another conversation needs stay. Receipts stay.
Without --yes the plan is shown, and carried out only when it is confirmed on a terminal.
Exit codes: 1 nothing was done, or not all of it could be, 4 a living pod has the directory: ask that pod with
DELETE /parkade/v1/conversations/ID.
"""
_GC_EXAMPLE: Final = """\
example:
  parkade cache gc /var/lib/parkade
  parkade cache gc /var/lib/parkade --keep 12ab34cd56ef7890 --yes

Removes every identity but the own one, which is the one used last, and those to keep; unfinished and quarantined files;
packs that no start can serve; and gives the space of dead blocks back.
Without --yes the plan is shown, and carried out only when it is confirmed on a terminal.
Exit codes: 1 nothing was done, or not all of it could be, 4 a living pod has the directory.
"""
_COLUMNS: Final = ("CONVERSATION", "TOKENS", "BLOCKS", "BYTES", "SHARED", "PACKS", "LAST USED")
_PROGRESS_AFTER_S: Final = 2.0
_PROGRESS_EVERY_S: Final = 0.2
_BAR_WIDTH: Final = 30


def main(argv: Sequence[str]) -> int:
    """Run ``parkade cache`` with these arguments."""
    name = argv[0] if argv else ""
    if name in {"-h", "--help", "help"}:
        sys.stdout.write(_HELP)
        return ExitCode.OK
    if name not in _ACTIONS:
        said = f"{name!r} is no action" if name else "say what to do"
        sys.stderr.write(f"parkade cache: {said}: {', '.join(_ACTIONS)}; see: parkade cache --help\n")
        return ExitCode.USAGE
    try:
        return _ACTIONS[name](argv[1:])
    except SpillError as error:
        # Without the error's number: the text says what to do.
        raise SettingsError(error.strerror or str(error)) from error


def _parser(name: str, description: str, epilog: str, usage: str | None = None) -> Parser:
    parser = Parser(prog=f"parkade cache {name}", description=description, epilog=epilog, usage=usage)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the spill directory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


# -- ls ----------------------------------------------------------------------------------------------------------------


def _ls(argv: Sequence[str]) -> int:
    parser = _parser("ls", "What is in a spill directory.", _LS_EXAMPLE)
    parser.add_argument("--identity", metavar="FP", help="of this identity only")
    parsed = parser.parse_args(argv)

    from parkade_cache.spill.inspection import survey_directory  # noqa: PLC0415 - not for --help

    survey = survey_directory(parsed.directory)
    shown = [one for one in survey.identities if parsed.identity in {None, one.fingerprint}]
    if parsed.identity is not None and not shown:
        sys.stderr.write(f"parkade cache ls: no identity {_safe(parsed.identity)} in {survey.root}\n")
        return ExitCode.NO
    if parsed.json:
        print_json(survey_json(survey, shown))
    else:
        _print(survey_lines(survey, shown))
    return ExitCode.OK


def survey_lines(survey: Survey, shown: Sequence[IdentitySurvey]) -> list[str]:
    """A survey for people."""
    use = f"in use by {survey.holder}" if survey.holder is not None else "no pod has it"
    lines = [f"{survey.root}: {format_bytes(survey.disk_bytes)} on disk, {use}"]
    for one in sorted(shown, key=lambda one: (one.standing.value != "own", -one.last_used)):
        lines += ["", *_identity_lines(one)]
    rest = [
        _amount("in quarantine", len(survey.quarantine), sum(file.nbytes for file in survey.quarantine)),
        f"receipts {format_bytes(survey.receipts_bytes)}" if survey.receipts_bytes else "",
        f"other files {format_bytes(survey.other_bytes)}" if survey.other_bytes else "",
    ]
    said = [text for text in rest if text]
    return [*lines, *(["", ", ".join(said)] if said else [])]


def _identity_lines(one: IdentitySurvey) -> list[str]:
    model = one.identity.model if one.identity is not None else "not described"
    live = len(one.holdings.places)
    summary = (
        f"  {_counted(len(one.holdings.conversations), 'conversation')}, {_counted(live, 'block')} "
        f"in {_counted(len(one.packs), 'pack')}, "
        f"{format_bytes(one.disk_bytes)} on disk, last used {clock_text(one.last_used)}"
    )
    loose = [pack for pack in one.packs if not pack.indexed]
    notes = [
        "" if one.index.value == "read" else f"index not used: {one.index_reason}; read from the packs",
        _amount("not in the index", len(loose), sum(pack.disk_bytes for pack in loose), what="pack"),
        *(f"pack {pack.pack_id} is not served: {pack.reason}" for pack in one.lost),
        f"dead space not given back: {format_bytes(one.owed_bytes)}" if one.owed_bytes else "",
        _amount("unfinished", len(one.temporaries), sum(file.nbytes for file in one.temporaries)),
        "some chains have a gap (marked -): only what lies before it is restored" if _has_gap(one) else "",
    ]
    heading = f"identity {one.fingerprint}  {one.standing}  {_safe(model)}"
    return [heading, summary, *(f"  {note}" for note in notes if note), *_conversation_lines(one)]


def _has_gap(one: IdentitySurvey) -> bool:
    return not all(holding.complete for holding in one.holdings.conversations.values())


def _conversation_lines(one: IdentitySurvey) -> list[str]:
    if not one.holdings.conversations:
        return []
    rows = [_COLUMNS, *map(_conversation_row, conversations_json(one))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  " + "  ".join(_aligned(row, widths)) for row in rows]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return [row[0].ljust(widths[0]), *numbers]


def _conversation_row(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        _safe(found["id"]) + ("" if found["complete"] else " -"),
        str(found["tokens"]),
        str(found["blocks"]),
        format_bytes(found["bytes"]),
        format_bytes(found["shared_bytes"]),
        str(found["packs"]),
        clock_text(found["last_used"]),
    )


def conversations_json(one: IdentitySurvey) -> list[dict[str, Any]]:
    """Conversations of one identity, most recently used first."""
    sharers = one.holdings.sharers()
    return [
        {
            "id": holding.conversation,
            "tokens": holding.tokens,
            "blocks": len(holding.keys),
            "bytes": one.holdings.bytes_of(holding.keys),
            "shared_bytes": one.holdings.bytes_of(key for key in holding.keys if sharers[key] > 1),
            "packs": len(one.holdings.packs_of(holding.keys)),
            "last_used": holding.last_used,
            "complete": holding.complete,
        }
        for holding in one.holdings.conversations.values()
    ]


def survey_json(survey: Survey, shown: Sequence[IdentitySurvey]) -> dict[str, Any]:
    """A survey for machines."""
    return {
        "directory": str(survey.root),
        "in_use_by": _holder_json(survey.holder),
        "bytes": survey.disk_bytes,
        "identities": [_identity_json(one) for one in shown],
        "quarantine": [{"file": file.path.name, "bytes": file.nbytes} for file in survey.quarantine],
        "receipts_bytes": survey.receipts_bytes,
        "other_bytes": survey.other_bytes,
    }


def _holder_json(holder: Any) -> dict[str, Any] | None:
    return None if holder is None else {"pid": holder.pid, "host": holder.host}


def _identity_json(one: IdentitySurvey) -> dict[str, Any]:
    from dataclasses import asdict  # noqa: PLC0415 - not for --help

    return {
        "fingerprint": one.fingerprint,
        "standing": one.standing.value,
        "model": one.identity.model if one.identity is not None else None,
        "identity": asdict(one.identity) if one.identity is not None else None,
        "ranks": one.ranks,
        "last_used": one.last_used,
        "bytes": one.disk_bytes,
        "blocks": len(one.holdings.places),
        "dead_bytes": one.owed_bytes,
        "index": {"state": one.index.value, "reason": one.index_reason},
        "packs": len(one.packs),
        "loose_packs": [pack.pack_id for pack in one.packs if not pack.indexed],
        "lost_packs": [
            {"pack": pack.pack_id, "state": pack.fate.value, "reason": pack.reason, "bytes": pack.disk_bytes}
            for pack in one.lost
        ],
        "temporaries": [{"file": file.path.name, "bytes": file.nbytes} for file in one.temporaries],
        "conversations": conversations_json(one),
    }


# -- check -------------------------------------------------------------------------------------------------------------


def _check(argv: Sequence[str]) -> int:
    parser = _parser("check", "Whether everything in a spill directory is good.", _CHECK_EXAMPLE)
    parser.add_argument("--read-data", action="store_true", help="read every block and verify its checksum")
    parsed = parser.parse_args(argv)

    from parkade_cache.spill.check import check_directory  # noqa: PLC0415 - not for --help

    bar = ProgressBar(in_bytes=parsed.read_data)
    try:
        report = check_directory(parsed.directory, read_data=parsed.read_data, progress=bar.show)
    finally:
        bar.clear()
    if parsed.json:
        print_json(_report_json(report))
    else:
        _print(report_lines(report))
    return ExitCode.NO if report.damage else ExitCode.OK


class ProgressBar:
    """A line on standard error that is drawn over; only on a terminal, and only for what takes a while."""

    def __init__(self, *, in_bytes: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_bytes = in_bytes
        self._clock = clock
        self._on = sys.stderr.isatty()
        self._due_s = clock() + _PROGRESS_AFTER_S
        self._drawn = False

    def show(self, done: int, total: int) -> None:
        """Draw it, if it is time."""
        if not self._on or not total or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + _PROGRESS_EVERY_S
        self._drawn = True
        filled = done * _BAR_WIDTH // total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        amount = f"{format_bytes(done)} of {format_bytes(total)}" if self._in_bytes else f"{done} of {total} files"
        sys.stderr.write(f"\r[{bar}] {done * 100 // total} %  {amount}\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take it away."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def report_lines(report: CheckReport) -> list[str]:
    """A report for people: damage first."""
    read = f", {format_bytes(report.read_bytes)} read" if report.read_bytes else ""
    verdict = f"{len(report.damage)} damaged" if report.damage else "all good"
    use = f", in use by {report.holder}" if report.holder is not None else ""
    checked = f"{_counted(report.packs, 'pack')}, {_counted(report.blocks, 'block')}"
    lines = [f"{report.root}: {checked}{read}: {verdict}{use}"]
    for title, findings in (("damage", report.damage), ("left over, harmless", report.leftovers)):
        if findings:
            lines += ["", f"{title}:", *(line for finding in findings for line in _finding_lines(report, finding))]
    return lines


def _finding_lines(report: CheckReport, finding: Finding) -> list[str]:
    where = _relative(report.root, finding.path) or finding.pack or f"identity {finding.identity}"
    return [f"  {where}", f"    {_safe(finding.what)}", f"    next start: {finding.next_start}"]


def _relative(root: Path, path: Path | None) -> str:
    if path is None:
        return ""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _report_json(report: CheckReport) -> dict[str, Any]:
    return {
        "directory": str(report.root),
        "in_use_by": _holder_json(report.holder),
        "packs": report.packs,
        "blocks": report.blocks,
        "read_bytes": report.read_bytes,
        "damage": [_finding_json(report, finding) for finding in report.damage],
        "leftovers": [_finding_json(report, finding) for finding in report.leftovers],
    }


def _finding_json(report: CheckReport, finding: Finding) -> dict[str, Any]:
    return {
        "identity": finding.identity or None,
        "pack": finding.pack or None,
        "file": _relative(report.root, finding.path) or None,
        "what": finding.what,
        "blocks": finding.blocks,
        "next_start": finding.next_start,
    }


# -- rm and gc ---------------------------------------------------------------------------------------------------------


def _rm(argv: Sequence[str]) -> int:
    usage = "parkade cache rm DIR (CONVERSATION... | --identity FP | --all) [--yes] [--json]"
    parser = _parser("rm", "Delete from a spill directory that no pod has.", _RM_EXAMPLE, usage)
    parser.add_argument("conversations", metavar="CONVERSATION", nargs="*", help="a conversation's id")
    parser.add_argument("--identity", metavar="FP", help="everything of this identity")
    parser.add_argument("--all", action="store_true", help="everything of every identity")
    parser.add_argument("--yes", action="store_true", help="do it")
    parsed = parser.parse_intermixed_args(argv)
    if [bool(parsed.conversations), parsed.identity is not None, parsed.all].count(True) != 1:
        parser.error("name conversations, or give --identity, or --all")

    from parkade_cache.spill import upkeep  # noqa: PLC0415 - not for --help

    def plan(survey: Survey) -> Plan:
        if parsed.conversations:
            return upkeep.plan_conversations(survey, parsed.conversations)
        return upkeep.plan_all(survey) if parsed.all else upkeep.plan_identity(survey, parsed.identity)

    return _plan_and_do("rm", parsed, plan)


def _gc(argv: Sequence[str]) -> int:
    parser = _parser("gc", "Clean a spill directory that no pod has.", _GC_EXAMPLE)
    parser.add_argument(
        "--keep", metavar="FP", action="append", default=[], help="an identity to keep; may be repeated"
    )
    parser.add_argument("--yes", action="store_true", help="do it")
    parsed = parser.parse_args(argv)

    from parkade_cache.spill import upkeep  # noqa: PLC0415 - not for --help

    return _plan_and_do("gc", parsed, lambda survey: upkeep.plan_cleaning(survey, keep=parsed.keep))


def _plan_and_do(name: str, parsed: argparse.Namespace, make_plan: Callable[[Survey], Plan]) -> int:
    from parkade_cache.spill.inspection import survey_directory  # noqa: PLC0415 - not for --help
    from parkade_cache.spill.upkeep import carry_out, locked  # noqa: PLC0415 - not for --help

    root: Path = parsed.directory
    shown: Plan | None = None
    try:
        if not parsed.yes:
            # Asking may take long, so the directory is not kept from a pod meanwhile: the plan is made again after it.
            survey = survey_directory(root)
            if survey.holder is not None:
                return _in_use(name, root)
            shown = make_plan(survey)
            if (code := _show(name, parsed, shown)) is not None:
                return code
            if not _confirmed(name, parsed, shown):
                return ExitCode.NO
        with locked(root):
            survey = survey_directory(root, locked=True)
            plan = make_plan(survey)
            if shown is None and (code := _show(name, parsed, plan)) is not None:
                return code
            if shown is not None and plan != shown:
                sys.stderr.write(f"parkade cache {name}: {root} changed meanwhile; nothing was done, so try again\n")
                return ExitCode.NO
            return _say_done(parsed, plan, carry_out(plan, survey))
    except DirectoryInUseError:
        return _in_use(name, root)


def _in_use(name: str, root: Path) -> int:
    from parkade_cache.spill.inspection import ReadOnlyFileSystem, holder_of  # noqa: PLC0415 - not for --help

    holder = holder_of(ReadOnlyFileSystem(), root) or "another process"
    instead = "ask that pod, with DELETE /parkade/v1/conversations/ID, or stop it" if name == "rm" else "stop that pod"
    sys.stderr.write(f"parkade cache {name}: {root} is in use by {holder}: {instead} first\n")
    return ExitCode.REFUSED


def _show(name: str, parsed: argparse.Namespace, plan: Plan) -> int | None:
    """Print the plan; an exit code where there is nothing to do."""
    if plan.unknown:
        sys.stderr.write(
            f"parkade cache {name}: not in {plan.root}: {_safe(', '.join(plan.unknown))}; nothing was done\n"
        )
        return ExitCode.NO
    if not plan.steps:
        if parsed.json:
            print_json(plan_json(plan, done=True) | {"freed_bytes": 0, "left_alone": []})
        else:
            _print([f"{plan.root}: nothing to do"])
        return ExitCode.OK
    if not parsed.json:
        _print(plan_lines(plan))
        sys.stdout.flush()
    return None


def _confirmed(name: str, parsed: argparse.Namespace, plan: Plan) -> bool:
    if parsed.json:
        print_json(plan_json(plan, done=False))
    elif sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write("Do this? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in {"y", "yes"}:
            return True
    sys.stderr.write(f"parkade cache {name}: nothing was done; add --yes to do it\n")
    return False


def _say_done(parsed: argparse.Namespace, plan: Plan, outcome: Outcome) -> int:
    if parsed.json:
        freed = {"freed_bytes": outcome.nbytes, "left_alone": list(outcome.left_alone)}
        print_json(plan_json(plan, done=True) | freed)
    else:
        left = [f"left alone: {_safe(reason)}" for reason in outcome.left_alone]
        _print([f"done: {format_bytes(outcome.nbytes)} came back", *left])
    return ExitCode.NO if outcome.left_alone else ExitCode.OK


def plan_lines(plan: Plan) -> list[str]:
    """A plan for people."""
    return [f"{plan.root}: this goes:", *map(_step_line, plan.steps), f"together {format_bytes(plan.nbytes)}"]


def _step_line(step: Step) -> str:
    what = {"dead_space": "dead space of", "temporary": "unfinished file", "quarantined": "quarantined file"}
    blocks = f"{_counted(step.blocks, 'block')}, " if step.blocks else ""
    kept = f"; {_counted(step.kept_blocks, 'block')} that others need: kept" if step.kept_blocks else ""
    kind = what.get(step.kind.value, step.kind.value)
    why = f" ({_safe(step.why)})" if step.why else ""
    under = f" of identity {step.identity}" if step.identity not in {"", step.name} else ""
    return f"  {kind} {_safe(step.name)}{under}{why}: {blocks}{format_bytes(step.nbytes)}{kept}"


def plan_json(plan: Plan, *, done: bool) -> dict[str, Any]:
    """A plan for machines."""
    return {
        "directory": str(plan.root),
        "plan": [
            {
                "kind": step.kind.value,
                "name": step.name,
                "why": step.why,
                "identity": step.identity or None,
                "conversation": step.conversation,
                "blocks": step.blocks,
                "kept_blocks": step.kept_blocks,
                "bytes": step.nbytes,
            }
            for step in plan.steps
        ],
        "bytes": plan.nbytes,
        "done": done,
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _amount(title: str, count: int, nbytes: int, *, what: str = "file") -> str:
    return f"{title}: {_counted(count, what)}, {format_bytes(nbytes)}" if count else ""


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _safe(text: str) -> str:
    """Names that were found on a disk must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_ACTIONS: Final = {"ls": _ls, "check": _check, "rm": _rm, "gc": _gc}
