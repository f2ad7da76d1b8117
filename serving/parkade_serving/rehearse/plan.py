"""Sizes, limits and rounds of a rehearsal, and the command that starts its pod. Pure.

What must stay true: a limit is never set below what the pod cannot give back, so that whatever is lost or killed is
the cache's fault and not the script's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from parkade_serving.demo.plan import LARGE_BUDGET, EngineChoice, RunName, RunPlan, engine_command

MIB: Final = 1 << 20
GIB: Final = 1 << 30

FLOOR_BYTES: Final = 192 * MIB
"""Above what the engine takes and gives back within a step, so that a limit that is met stays met."""

LOWERED_SHARE: Final = 0.6
"""The issue's: a limit is lowered to 60 % and raised again."""

GENEROUS_LIMIT_BYTES: Final = 8 * GIB
"""While the engine starts, when nobody knows yet what it takes."""
LEAST_MEMORY_BYTES: Final = 6 * GIB
"""What must be free to begin: the pod takes half of it, its neighbour what its limit leaves free."""
LEAST_DISK_BYTES: Final = 5 * GIB

PARKED_BLOCKS: Final = 72
"""Two long conversations, two small ones and what little was left behind by earlier ones."""
IN_USE_BLOCKS: Final = 45
"""What the clients' turns in flight hold at most: one long conversation and two small ones, in whole extents."""
ROOMY_PARKED_BLOCKS: Final = 160
"""While the disk is full: nothing may have to go then."""

SPILL_BYTES: Final = 3 * GIB
SPILL_MIN_FREE_BYTES: Final = 5 * GIB // 2
"""More than is ever spilled here, so that a disk which others have filled is left to them: the pod could not free
enough by giving up what it has, and so gives up nothing."""
MOST_LEFT: Final = 20
"""Conversations that may still be continued; their clients delete the older ones, so that the disk keeps its room."""
DISK_BYTES: Final = 6 * GIB
"""The small disk; its image takes only what is written to it."""

_MODEL_TOKENS: Final = 3072
_ENGINE_BLOCKS: Final = 28
"""The engine's own cache: one long conversation and the small ones beside it."""
_BATCH_TOKENS: Final = 512
"""Short steps: a neighbour's turn and the pod's own routes never wait long."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often each wave comes."""

    gulps: int
    changes: int
    """Announced, and as many again unannounced."""
    minutes: float
    """Rounds that would not end before this are left out, and said."""


DEFAULT_ROUNDS: Final = Rounds(gulps=3, changes=5, minutes=10.0)
QUICK_ROUNDS: Final = Rounds(gulps=1, changes=2, minutes=5.0)

_SECONDS_PER_CHANGE: Final = 15.0
"""An announced and an unannounced one on a slow machine, reckoned generously."""


def choose_rounds(*, quick: bool, changes: int | None, minutes: float | None) -> Rounds:
    """The rounds that were asked for; more changes get more time unless the time was named too."""
    chosen = QUICK_ROUNDS if quick else DEFAULT_ROUNDS
    wanted = chosen.changes if changes is None else changes
    more = max(0, wanted - chosen.changes) * 2 * _SECONDS_PER_CHANGE / 60.0
    return Rounds(gulps=chosen.gulps, changes=wanted, minutes=minutes if minutes is not None else chosen.minutes + more)


@dataclass(frozen=True, slots=True)
class Need:
    """What a pod cannot give back, and what it has parked; bytes."""

    base_bytes: int
    parked_bytes: int

    @classmethod
    def of(cls, *, net_bytes: int, parked_bytes: int) -> Need:
        return cls(max(0, net_bytes - parked_bytes), parked_bytes)

    def lowered_limit(self, given_bytes: int, *, in_use_bytes: int = 0) -> int:
        """A limit that can only be met when ``given_bytes`` of what is parked are given back.

        ``in_use_bytes`` of it may be in use, and then cannot.
        """
        kept_bytes = max(self.parked_bytes - given_bytes, in_use_bytes, 0)
        return _whole_mib(self.base_bytes + FLOOR_BYTES + kept_bytes)


def upper_limit(lowered_bytes: int) -> int:
    """The limit of which ``lowered_bytes`` is 60 %."""
    return _whole_mib(int(lowered_bytes / LOWERED_SHARE))


def unannounced_limit(net_bytes: int, floor_share: float) -> int:
    """A limit that leaves ``floor_share`` of the floor: the kernel accepts it, and the pod must give something back."""
    return _whole_mib(net_bytes + int(FLOOR_BYTES * floor_share))


def deficit_bytes(idle_parked_bytes: int, share: float) -> int:
    """How far below its floor a neighbour pushes the pod: never further than idle conversations can make good."""
    return int(min(FLOOR_BYTES * share, idle_parked_bytes / 2))


def _whole_mib(nbytes: int) -> int:
    """Rounded up: the kernel rounds limits to pages, and what is read back must be what was set."""
    return -(-nbytes // MIB) * MIB


def pod_command(choice: EngineChoice, *, port: int, folder: Path, sockets: Path) -> tuple[str, ...]:
    """The pod's command line: the demo's with a smaller engine; of a flag that comes twice the later one counts."""
    demo = engine_command(choice, RunPlan(RunName.LARGE, LARGE_BUDGET), port=port, folder=folder, sockets=sockets)
    return (
        *demo,
        f"--memory-floor={FLOOR_BYTES}",
        f"--spill-size={SPILL_BYTES}",
        f"--spill-min-free={SPILL_MIN_FREE_BYTES}",
        f"--max-model-len={_MODEL_TOKENS}",
        f"--num-gpu-blocks-override={_ENGINE_BLOCKS}",
        f"--max-num-batched-tokens={_BATCH_TOKENS}",
    )


def policy_document(*, limit_bytes: int | None, parked_max_bytes: int) -> dict[str, Any]:
    """The whole policy, as ``PUT /parkade/v1/policy`` takes it."""
    memory: dict[str, Any] = {"floor": FLOOR_BYTES, "parked": {"max": parked_max_bytes}}
    if limit_bytes is not None:
        memory["limit"] = limit_bytes
    return {"memory": memory, "spill": {"size": SPILL_BYTES, "minFree": SPILL_MIN_FREE_BYTES}}
