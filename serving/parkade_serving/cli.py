"""The ``parkade`` command: finds the subcommand and nothing else, so that every one starts fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from parkade_cache import __version__


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module with its ``main(argv)``, and what it does."""

    module: str
    does: str


COMMANDS: Final = {
    "serve": Command("parkade_serving.serve_command", "one serving pod's process: stock vllm serve plus Parkade"),
    "demo": Command("parkade_serving.demo", "the whole story on this machine, without GPU or cluster"),
    "rehearse": Command("parkade_serving.rehearse", "try the cache here: little memory, a full disk, a kill"),
    "top": Command("parkade_serving.top", "live view of a pod"),
    "receipts": Command("parkade_serving.receipts_command", "the cache's decisions, filtered"),
    "explain": Command("parkade_serving.explain", "why a conversation's last turn was or was not re-read"),
    "drain": Command("parkade_serving.drain_command", "finish, write out; what preStop calls"),
    "cache": Command("parkade_serving.cache_command", "look into a spill directory, check, delete, clean"),
    "bench": Command("parkade_serving.bench", "the benchmarks"),
}
_USAGE: Final = 2
_EPILOG: Final = """
exit codes: 0 done, 1 done and the answer is no, 2 wrong arguments or settings, 3 no pod answers,
            4 the pod refused; of serve: the engine's

example: parkade serve Qwen/Qwen3-8B --parked-max 64Gi --spill-dir /var/lib/parkade --spill-size 400Gi
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the entry point ``parkade``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in {"-h", "--help", "help"}:
        sys.stdout.write(help_text())
        return 0
    if name in {"-V", "--version", "version"}:
        sys.stdout.write(f"parkade {__version__}\n")
        return 0
    if name not in COMMANDS:
        said = f"{name!r} is no command" if name else "say what to do"
        sys.stderr.write(f"parkade: {said}: {', '.join(COMMANDS)}; see: parkade --help\n")
        return _USAGE
    return _run(name, arguments[1:])


def help_text() -> str:
    lines = [f"  {name:<10} {command.does}" for name, command in COMMANDS.items()]
    return "usage: parkade COMMAND [options]\n\n" + "\n".join(lines) + "\n" + _EPILOG


def _run(name: str, arguments: list[str]) -> int:
    from parkade_serving.command_line import run_command  # noqa: PLC0415 - not for --help

    try:
        module = importlib.import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"parkade {name}: needs the module {error.name}; install parkade[serving]\n")
        return _USAGE
    return run_command(name, lambda: int(module.main(arguments) or 0))


if __name__ == "__main__":
    raise SystemExit(main())
