"""What every command shares: one-line errors, exit codes that mean something, options for reaching a pod."""

from __future__ import annotations

import argparse
import enum
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from parkade_cache.errors import ParkadeError
from parkade_cache.quantity import parse_quantity
from parkade_serving.environment import TOKEN_FILE_ENV, URL_ENV
from parkade_serving.pod_client import PodClient, PodRefusedError, PodUnreachableError

DEFAULT_URL: Final = "http://127.0.0.1:8000"


class ExitCode(enum.IntEnum):
    """What a command's exit code says; listed in ``parkade --help``."""

    OK = 0
    NO = 1
    """It worked, and the answer is no: nothing found, not everything written out."""
    USAGE = 2
    """Wrong arguments or settings."""
    UNREACHABLE = 3
    REFUSED = 4
    """The pod answered with an error."""
    INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, whole option names only, and text kept as it was written."""

    def __init__(self, *, prog: str, description: str, epilog: str, usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"{self.prog}: {' '.join(message.split())}; see: {self.prog} --help\n")


def add_pod_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that asks a pod."""
    group = parser.add_argument_group("pod")
    group.add_argument("--url", default=os.environ.get(URL_ENV, DEFAULT_URL), help=f"default {DEFAULT_URL}")
    group.add_argument(
        "--token-file", type=Path, default=os.environ.get(TOKEN_FILE_ENV), metavar="FILE", help="a file with the token"
    )
    group.add_argument("--json", action="store_true", help="print JSON")


def pod_of(parsed: argparse.Namespace) -> PodClient:
    return PodClient(parsed.url, token_file=Path(parsed.token_file) if parsed.token_file else None)


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def size(text: str) -> int:
    """An argparse type for sizes."""
    try:
        return parse_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s parkade: %(message)s", stream=sys.stderr)


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command; its errors become one line on standard error and an exit code."""
    try:
        return command()
    except PodUnreachableError as error:
        return _fail(name, error, ExitCode.UNREACHABLE)
    except PodRefusedError as error:
        return _fail(name, error, ExitCode.REFUSED)
    except ParkadeError as error:
        return _fail(name, error, ExitCode.USAGE)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


def _fail(name: str, error: Exception, code: ExitCode) -> int:
    sys.stderr.write(f"parkade {name}: {' '.join(str(error).split())}\n")
    return code
