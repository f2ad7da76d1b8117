"""``parkade explain CONVERSATION``: why its last turn was, or was not, read anew.

The explanation is made from receipts alone, by a pure function: what a receipt does not say is not guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from parkade_cache.quantity import format_bytes
from parkade_serving.command_line import ExitCode, Parser, add_pod_options, pod_of, print_json
from parkade_serving.pod_client import PodClient, PodRefusedError
from parkade_serving.receipts_command import clock_text

_EXAMPLE: Final = """\
example:
  parkade explain my-session
  parkade explain 3f2a9c0d1e4b5a69788796a5b4c3d2e1 --json

CONVERSATION is the id that the pod shows (header x-parkade-conversation), or the client's own id.
Exit code 1: nothing is known of it.
"""
_NOT_FOUND: Final = 404
_LIMIT: Final = 1000
_TIERS: Final = (
    ("engine", "reused_engine_tokens"),
    ("RAM", "reused_ram_tokens"),
    ("disk", "reused_disk_tokens"),
    ("archive", "reused_archive_tokens"),
)
# What can cost a conversation its blocks, or keep them from coming back.
_CAUSES: Final = frozenset({"evict", "drop", "refuse", "restore", "restore_skipped", "write_out", "recover", "release"})


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer: one sentence on the last turn, then what happened since the one before it."""

    known: bool
    conversation: str
    headline: str
    details: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Run ``parkade explain`` with these arguments."""
    parser = Parser(
        prog="parkade explain", description="Why a conversation's last turn was or was not re-read.", epilog=_EXAMPLE
    )
    parser.add_argument("conversation", metavar="CONVERSATION")
    parser.add_argument("--tenant", metavar="NAME", help="the trusted header's tenant, for a client's own id")
    add_pod_options(parser)
    parsed = parser.parse_args(argv)
    found = find(pod_of(parsed), parsed.conversation, parsed.tenant)
    if parsed.json:
        print_json(asdict(found))
    else:
        lines = [found.headline, *(f"  {detail}" for detail in found.details)]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return ExitCode.OK if found.known else ExitCode.NO


def find(pod: PodClient, conversation: str, tenant: str | None = None) -> Explanation:
    """Ask the pod, first for a stored id, then for the client's own."""
    nothing = explain(conversation, None, [])
    for query in ({}, {"by": "client", "tenant": tenant}):
        state = _state(pod, conversation, query)
        answer = pod.get("/receipts", {"conversation": conversation, "limit": _LIMIT, **query})
        receipts = answer.get("receipts", [])
        if state is not None or receipts:
            return explain(conversation, state, receipts)
    return nothing


def explain(conversation: str, state: Mapping[str, Any] | None, receipts: Sequence[Mapping[str, Any]]) -> Explanation:
    """The explanation from a conversation's state and its receipts, oldest first."""
    turns = [position for position, receipt in enumerate(receipts) if receipt.get("kind") == "turn"]
    where = _where(state)
    if not turns:
        if state is None and not receipts:
            return Explanation(False, conversation, f"Nothing is known of {conversation}; check the id and the pod.")
        events = [_event(receipt) for receipt in receipts if receipt.get("kind") in _CAUSES]
        headline = f"No turn of {conversation} is on record any more, or none has finished yet."
        return Explanation(True, conversation, headline, (*events, *where))
    before = turns[-2] if len(turns) > 1 else -1
    between = [receipt for receipt in receipts[before + 1 : turns[-1]] if receipt.get("kind") in _CAUSES]
    details = (*_reuse(receipts[turns[-1]]), *map(_event, between), *where)
    return Explanation(True, conversation, _headline(receipts[turns[-1]]), details)


def _headline(turn: Mapping[str, Any]) -> str:
    prompt, anew = turn.get("prompt_tokens"), turn.get("read_anew_tokens")
    when = clock_text(turn.get("time", 0.0))
    if prompt is None or anew is None:
        return f"The last turn ({when}) ended as {turn.get('outcome') or 'unknown'}."
    because = f", because: {turn['reason']}" if turn.get("reason") and anew else ""
    return f"The last turn ({when}) reused {prompt - anew} of {prompt} prompt tokens and read {anew} anew{because}."


def _reuse(turn: Mapping[str, Any]) -> list[str]:
    parts = [f"{turn[name]} from {tier}" for tier, name in _TIERS if turn.get(name)]
    waits = [
        f"{turn[name]:.3f} s for {what}"
        for what, name in (("restores", "waited_restore_seconds"), ("write-outs", "waited_write_out_seconds"))
        if turn.get(name)
    ]
    lines = [f"reused: {', '.join(parts)}"] if parts else []
    return [*lines, *([f"waited: {', '.join(waits)}"] if waits else [])]


def _event(receipt: Mapping[str, Any]) -> str:
    what = " ".join(str(receipt[name]) for name in ("kind", "outcome") if receipt.get(name))
    notes = [str(receipt["reason"])] if receipt.get("reason") else []
    if receipt.get("bytes"):
        notes.append(format_bytes(receipt["bytes"]))
    return f"{clock_text(receipt.get('time', 0.0))} {what}" + (f" ({', '.join(notes)})" if notes else "")


def _where(state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return ["now: it has no blocks on this pod"]
    ram, disk = format_bytes(state.get("ram_bytes") or 0), format_bytes(state.get("disk_bytes") or 0)
    return [f"now: {ram} in RAM, {disk} on disk" + (", pinned" if state.get("pinned") else "")]


def _state(pod: PodClient, conversation: str, query: Mapping[str, object]) -> dict[str, Any] | None:
    from urllib.parse import quote  # noqa: PLC0415 - only here

    try:
        return pod.get(f"/conversations/{quote(conversation, safe='')}", query)
    except PodRefusedError as error:
        if error.status == _NOT_FOUND:
            return None
        raise
