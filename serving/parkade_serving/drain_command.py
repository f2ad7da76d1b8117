"""``parkade drain``: finish, write out; what a pod's preStop hook calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from parkade_serving.command_line import ExitCode, Parser, add_pod_options, pod_of, print_json

_EXAMPLE: Final = """\
example:
  parkade drain --seconds 110

The pod takes no new turns from then on. Exit code 1: something could not be written out.
"""
_SLACK_S: Final = 15.0


def main(argv: Sequence[str]) -> int:
    """Run ``parkade drain`` with these arguments."""
    parser = Parser(prog="parkade drain", description="Finish running turns and write everything out.", epilog=_EXAMPLE)
    parser.add_argument("--seconds", type=float, default=110.0, metavar="N", help="time it may take; default 110")
    add_pod_options(parser)
    parsed = parser.parse_args(argv)
    result = pod_of(parsed).post("/drain", {"seconds": parsed.seconds}, timeout_s=parsed.seconds + _SLACK_S)
    dropped = result.get("dropped") or 0
    if parsed.json:
        print_json(result)
    else:
        outcomes = ", ".join(f"{name} {count}" for name, count in (result.get("outcomes") or {}).items())
        sys.stdout.write(f"drained in {result.get('seconds', 0):.1f} s: {outcomes or 'nothing to write'}\n")
    return ExitCode.NO if dropped else ExitCode.OK
