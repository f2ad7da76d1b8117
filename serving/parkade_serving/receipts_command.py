"""``parkade receipts``: the decisions, filtered."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from parkade_cache.quantity import format_bytes
from parkade_serving.command_line import ExitCode, Parser, add_pod_options, pod_of, print_json

_EXAMPLE: Final = """\
example:
  parkade receipts --kind drop --since 1767225600
  parkade receipts --conversation my-session --by client --json

Exit code 1: no receipt matches.
"""
_COLUMNS: Final = ("TIME", "KIND", "OUTCOME", "REASON", "CONVERSATION", "TOKENS", "BYTES", "SECONDS")


def main(argv: Sequence[str]) -> int:
    """Run ``parkade receipts`` with these arguments."""
    parser = Parser(prog="parkade receipts", description="The cache's decisions, newest last.", epilog=_EXAMPLE)
    parser.add_argument("--conversation", metavar="ID", help="of this conversation only")
    parser.add_argument("--by", choices=("id", "client"), help="client: ID is the client's own, not the stored one")
    parser.add_argument("--tenant", metavar="NAME", help="with --by client: the trusted header's tenant")
    parser.add_argument("--request", metavar="ID", help="of this request only")
    parser.add_argument("--kind", metavar="KIND", help="of this kind only, such as turn, drop or write_out")
    parser.add_argument("--since", metavar="ID|SECONDS", help="after this receipt, or this time in unix seconds")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="the newest N; default 100")
    add_pod_options(parser)
    parsed = parser.parse_args(argv)
    names = ("conversation", "by", "tenant", "request", "kind", "since", "limit")
    found = pod_of(parsed).get("/receipts", {name: getattr(parsed, name) for name in names})
    receipts: list[dict[str, Any]] = found.get("receipts", [])
    if parsed.json:
        print_json({"receipts": receipts})
    else:
        sys.stdout.write("".join(f"{line}\n" for line in table(receipts)))
    return ExitCode.OK if receipts else ExitCode.NO


def table(receipts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Receipts as aligned lines under a heading."""
    rows = [_COLUMNS, *(_row(receipt) for receipt in receipts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def clock_text(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _row(receipt: Mapping[str, Any]) -> tuple[str, ...]:
    nbytes, seconds = receipt.get("bytes"), receipt.get("duration_seconds")
    tokens = receipt.get("tokens", receipt.get("prompt_tokens"))
    return (
        clock_text(receipt.get("time", 0.0)),
        str(receipt.get("kind", "")),
        str(receipt.get("outcome", "")),
        str(receipt.get("reason", "")),
        str(receipt.get("conversation") or "")[:12],
        "" if tokens is None else str(tokens),
        "" if nbytes is None else format_bytes(nbytes),
        "" if seconds is None else f"{seconds:.3f}",
    )
