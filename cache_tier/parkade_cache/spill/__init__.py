"""The disk tier: pack files, their index, and the store that admits, publishes, drops and finds again."""

from __future__ import annotations

from parkade_cache.spill.aligned import PAGE_BYTES, align_up, aligned_buffer
from parkade_cache.spill.clock import Clock
from parkade_cache.spill.eviction import PlannedDrop, plan_eviction
from parkade_cache.spill.files import FileSystem, Space
from parkade_cache.spill.generation import GenerationLife
from parkade_cache.spill.identity import Identity
from parkade_cache.spill.outcome import Refusal, Reservation, WriteOutcome
from parkade_cache.spill.pack import PACK_VERSION, PackAddress, PackEntry, PackHeader, PackInfo, pack_file_bytes
from parkade_cache.spill.pack_reader import PackReader
from parkade_cache.spill.pack_writer import PackBlock, PackWriter
from parkade_cache.spill.recovery import RecoveredPack, RecoveryReport
from parkade_cache.spill.store import SpillConfig, SpillStore, SpillUsage

__all__ = [
    "PACK_VERSION",
    "PAGE_BYTES",
    "Clock",
    "FileSystem",
    "GenerationLife",
    "Identity",
    "PackAddress",
    "PackBlock",
    "PackEntry",
    "PackHeader",
    "PackInfo",
    "PackReader",
    "PackWriter",
    "PlannedDrop",
    "RecoveredPack",
    "RecoveryReport",
    "Refusal",
    "Reservation",
    "Space",
    "SpillConfig",
    "SpillStore",
    "SpillUsage",
    "WriteOutcome",
    "align_up",
    "aligned_buffer",
    "pack_file_bytes",
    "plan_eviction",
]
