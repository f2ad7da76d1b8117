"""``parkade top``: a pod at a glance, as plain text that is drawn again every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from parkade_cache.quantity import format_bytes
from parkade_serving.command_line import ExitCode, Parser, add_pod_options, pod_of, print_json
from parkade_serving.receipts_command import table

_EXAMPLE: Final = """\
example:
  parkade top
  parkade top --url http://10.0.0.7:8000 --token-file /run/secrets/parkade --once --json
"""
_CLEAR: Final = "\x1b[H\x1b[2J"
_BAR_WIDTH: Final = 40
_SHOWN: Final = 10


def main(argv: Sequence[str]) -> int:
    """Run ``parkade top`` with these arguments."""
    parser = Parser(prog="parkade top", description="Memory, conversations, turns, last receipts.", epilog=_EXAMPLE)
    parser.add_argument("--once", action="store_true", help="show once and end")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="default 2")
    add_pod_options(parser)
    parsed = parser.parse_args(argv)
    pod = pod_of(parsed)
    while True:
        summary = pod.get("/summary")
        conversations = pod.get("/conversations", {"limit": _SHOWN}).get("conversations", [])
        receipts = pod.get("/receipts", {"limit": _SHOWN}).get("receipts", [])
        if parsed.json:
            print_json({"summary": summary, "conversations": conversations, "receipts": receipts})
        else:
            clear = _CLEAR if sys.stdout.isatty() and not parsed.once else ""
            sys.stdout.write(clear + "\n".join(render(summary, conversations, receipts)) + "\n")
        sys.stdout.flush()
        if parsed.once:
            return ExitCode.OK
        time.sleep(max(0.2, parsed.interval))


def render(
    summary: Mapping[str, Any], conversations: Sequence[Mapping[str, Any]], receipts: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The whole picture as lines."""
    return [
        _title(summary),
        "",
        *_memory(summary.get("memory") or {}),
        *_tiers(summary),
        _turns(summary),
        *_conditions(summary),
        "",
        *_conversations(conversations),
        "",
        *table(receipts),
    ]


def _title(summary: Mapping[str, Any]) -> str:
    model = (summary.get("identity") or {}).get("model", "?")
    state = "draining" if summary.get("draining") else "ready" if summary.get("ready") else "not ready"
    return f"parkade {summary.get('version', '?')}  {model}  {state}  up {summary.get('uptime_seconds', 0):.0f} s"


def _memory(memory: Mapping[str, Any]) -> list[str]:
    limit, available = memory.get("limit_bytes"), memory.get("available_bytes")
    shown = "unknown" if available is None else f"{format_bytes(available)} ({memory.get('source')})"
    lines = [f"memory   available {shown}  limit {_size(limit)}  floor {_size(memory.get('floor_bytes'))}"]
    parked, most = memory.get("parked_bytes") or 0, memory.get("parked_max_bytes") or 0
    if most:
        filled = round(min(1.0, parked / most) * _BAR_WIDTH)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        lines.append(f"parked   [{bar}] {format_bytes(parked)} of {format_bytes(most)}")
    return lines


def _tiers(summary: Mapping[str, Any]) -> list[str]:
    ram, disk = summary.get("ram") or {}, summary.get("disk") or {}
    lines = [f"RAM      {ram.get('conversations', 0)} conversations  {_size(ram.get('bytes'))}"]
    if disk.get("enabled", bool(disk)):
        room = f"{_size(disk.get('bytes'))} of {_size(disk.get('capacity_bytes'))}"
        dirty = _size(summary.get("dirty_bytes"))
        lines.append(f"disk     {disk.get('conversations', 0)} conversations  {room}  unwritten {dirty}")
    return lines


def _turns(summary: Mapping[str, Any]) -> str:
    turns = "  ".join(f"{name} {count}" for name, count in (summary.get("turns") or {}).items())
    return f"turns    {turns or 'none yet'}  dropped conversations {summary.get('dropped_conversations_total', 0)}"


def _conditions(summary: Mapping[str, Any]) -> list[str]:
    bad = [item for item in summary.get("conditions") or [] if str(item.get("status")) != "True"]
    return [f"!        {item.get('type')}: {item.get('reason')} {item.get('message', '')}".rstrip() for item in bad]


def _conversations(conversations: Sequence[Mapping[str, Any]]) -> list[str]:
    heading = f"{'CONVERSATION':<34}{'TOKENS':>9}{'TURNS':>7}{'IDLE s':>9}{'RAM':>12}{'DISK':>12}"
    return [heading, *(_conversation(item) for item in conversations)]


def _conversation(item: Mapping[str, Any]) -> str:
    mark = "*" if item.get("in_flight") else "p" if item.get("pinned") else ""
    return (
        f"{str(item.get('id', ''))[:32] + mark:<34}{item.get('tokens', 0):>9}{item.get('turns', 0):>7}"
        f"{item.get('idle_seconds', 0):>9.0f}{_size(item.get('ram_bytes')):>12}{_size(item.get('disk_bytes')):>12}"
    )


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
