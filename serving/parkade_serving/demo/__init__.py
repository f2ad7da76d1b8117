"""``parkade demo``: the whole story on this machine, on a real engine with a real model, in one command.

Three agent-style conversations take turns on an engine whose own cache holds little more than one of them; half way
the engine is restarted. The same script runs without Parkade, with RAM for everything, with RAM for nothing much, and
with a kill instead of a restart. What is printed at the end was measured, and is judged against what Parkade promises.
"""

from __future__ import annotations

from parkade_serving.demo.command import main

__all__ = ["main"]
