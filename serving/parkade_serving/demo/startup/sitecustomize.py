"""Lets the demo's engines start faster: Python runs this first in every process of an engine.

An engine is three processes that each import the same five thousand modules. Python's cycle collector, which finds
nothing to free there, takes a sixth of that time. Here it runs rarely until a process is old enough to have started;
from then on everything is as Python has it.
"""
# ruff: noqa: INP001 - a folder for Python's search path, not a package

from __future__ import annotations

import gc
import time

_STARTED_AFTER_S = 45.0
_usual = gc.get_threshold()
_begun = time.monotonic()


def _back_to_usual(phase: str, _info: dict[str, int]) -> None:
    if phase == "stop" and time.monotonic() - _begun > _STARTED_AFTER_S:
        gc.callbacks.remove(_back_to_usual)
        # What importing made stays: a full pass over it takes half a second, in the middle of a step.
        gc.freeze()
        gc.set_threshold(*_usual)


gc.set_threshold(100_000, 20, 50)
gc.callbacks.append(_back_to_usual)
