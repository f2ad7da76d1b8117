"""Jobs between the engine's blocks and the cache's tiers, as values.

Why it exists: what the scheduler side plans travels to every rank inside the engine's step metadata, so it is
plain data; what comes back is plain data too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parkade_cache.device import DeviceBlock
from parkade_cache.ids import PackId
from parkade_cache.mover import BlockMeta, JobId


class StoreTarget(NamedTuple):
    """Where a block the engine has computed goes: a slot in RAM, or (``slot`` < 0) the stream of a pack.

    A tuple, like ``LoadSource``: one is made for every block inside a step, in a third of a dataclass's time.
    """

    slot: int
    pack: PackId | None = None
    meta: BlockMeta | None = None


class LoadSource(NamedTuple):
    """Where a block the engine wants comes from.

    In RAM: ``slot`` >= 0. On disk: ``pack`` and ``entry``, and ``park_slot`` >= 0 when the block is to be
    parked in RAM on its way.
    """

    slot: int
    pack: PackId | None = None
    entry: int = -1
    park_slot: int = -1


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Engine to cache."""

    job: JobId
    blocks: tuple[DeviceBlock, ...]
    targets: tuple[StoreTarget, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Cache to engine. ``deadline_s`` bounds the whole job (R4)."""

    job: JobId
    blocks: tuple[DeviceBlock, ...]
    sources: tuple[LoadSource, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The end of a store or load job on one rank.

    ``failed`` holds the positions that did not arrive: not captured in a store, to be recomputed in a load.
    ``bad_packs`` names packs whose bytes were not what had been written (D4).
    """

    job: JobId
    is_load: bool
    failed: tuple[int, ...]
    ram_bytes: int
    disk_bytes: int
    seconds: float
    disk_seconds: float = 0.0
    bad_packs: tuple[PackId, ...] = ()
