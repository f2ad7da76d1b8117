"""How much memory there is, who may have it, and how it is given back.

Why it exists: one wrong number here and the kernel kills the pod with every conversation in it. Readings, the gate
that decides on them and the release of the heap are separate, so that each can be tested without the others.

What must stay true: reading never decides, the gate never does I/O, and unknown is never zero.
"""

from __future__ import annotations

from parkade_cache.memory.gate import (
    NOTHING_DONE,
    UNBOUNDED,
    Admit,
    AwaitWrites,
    BackOff,
    Budget,
    Candidate,
    Capture,
    CaptureStep,
    Drop,
    Evict,
    GateDecision,
    GateHost,
    GateProgress,
    GateRequest,
    GateStep,
    HandToDisk,
    Margin,
    NeedKind,
    RefusalReason,
    Refuse,
    Release,
    ReleaseScope,
    ReservationId,
    Reservations,
    Victim,
    decide,
    order_victims,
    plan,
    plan_after_capture,
    victims_of,
)
from parkade_cache.memory.heap import Allocator, Heap, HeapRelease, HeapSize
from parkade_cache.memory.pressure import Pressure, PressureLevel, PressureSampler, PressureScope, pressure_level
from parkade_cache.memory.reading import MemorySampler, Reading, ReadingSource, admits

__all__ = [
    "NOTHING_DONE",
    "UNBOUNDED",
    "Admit",
    "Allocator",
    "AwaitWrites",
    "BackOff",
    "Budget",
    "Candidate",
    "Capture",
    "CaptureStep",
    "Drop",
    "Evict",
    "GateDecision",
    "GateHost",
    "GateProgress",
    "GateRequest",
    "GateStep",
    "HandToDisk",
    "Heap",
    "HeapRelease",
    "HeapSize",
    "Margin",
    "MemorySampler",
    "NeedKind",
    "Pressure",
    "PressureLevel",
    "PressureSampler",
    "PressureScope",
    "Reading",
    "ReadingSource",
    "RefusalReason",
    "Refuse",
    "Release",
    "ReleaseScope",
    "ReservationId",
    "Reservations",
    "Victim",
    "admits",
    "decide",
    "order_victims",
    "plan",
    "plan_after_capture",
    "pressure_level",
    "victims_of",
]
