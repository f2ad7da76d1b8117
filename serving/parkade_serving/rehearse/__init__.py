"""``parkade rehearse``: try the cache on this machine before it is trusted with anybody's conversations.

The real server with a real model runs in a real memory control group while conversations take turns. A neighbour eats
its memory, its limit is lowered and raised, its disk is filled, it is killed. What is printed at the end was counted by
the kernel, by the clients and by the pod's receipts, and is judged against what Parkade promises.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run ``parkade rehearse``; the exit code is the verdict."""
    # Not above: the neighbour and what starts the pod are modules of this package, and need none of it.
    from parkade_serving.rehearse.command import main as command  # noqa: PLC0415

    return command(argv)
