"""The offloading spec vLLM loads by module path: one for the scheduler, one for each worker.

What must stay true: both sides are built from the same settings; the worker's arena is reserved, not
committed, so a start costs no memory.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from parkade_cache.arena import Arena
from parkade_cache.errors import SettingsError
from parkade_cache.local_mover import LocalMover
from parkade_serving.device import make_device
from parkade_serving.manager import ParkadeManager
from parkade_serving.mover_socket import MoverPeer
from parkade_serving.owner_runtime import OwnerRuntime, PodSettings, read_settings, start_owner
from parkade_serving.worker import ParkadeWorker, keep_imports_out_of_collections

_log = logging.getLogger(__name__)

_engine_config: contextvars.ContextVar[VllmConfig | None] = contextvars.ContextVar("engine_config", default=None)

ARENA_RESERVE_FACTOR = 4
"""Address space reserved, in multiples of ``parked.max``, and never less than the machine has memory: the budget can
then be raised to whatever fits without a restart. What is reserved and not committed costs nothing.
"""


@contextmanager
def engine_config(config: VllmConfig) -> Iterator[None]:
    """Make the engine's whole configuration known to specs created inside."""
    token = _engine_config.set(config)
    try:
        yield
    finally:
        _engine_config.reset(token)


class ParkadeSpec(OffloadingSpec):
    """Creates the manager on the scheduler's side and the worker on the worker's."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        engine = _engine_config.get()
        if engine is None:
            raise SettingsError(
                "ParkadeSpec needs kv_connector ParkadeConnector with "
                "kv_connector_module_path parkade_serving.connector"
            )
        # Generated tokens are part of the next turn's prompt: keep them unless the user says otherwise.
        self.offload_prompt_only = bool(self.extra_config.get("offload_prompt_only", False))
        self.settings: PodSettings = read_settings(config, engine)
        self.runtime: OwnerRuntime | None = None
        self._manager: ParkadeManager | None = None
        self._worker: ParkadeWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side: starts the owner."""
        if self._manager is None:
            self.runtime = start_owner(self.settings)
            self._manager = ParkadeManager(self.runtime)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A worker's side: its device, arena and mover."""
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> ParkadeWorker:
        settings = self.settings
        geometry = settings.geometry
        device = make_device(kv_caches)
        largest = max(device.payload_bytes(group) for group in range(len(kv_caches.group_data_refs)))
        if largest > geometry.slot_bytes:
            raise SettingsError(
                f"a block of this model has {largest} bytes, more than the {geometry.slot_bytes} "
                "the engine announced; this KV layout cannot be parked"
            )
        machine_bytes = psutil.virtual_memory().total
        reserve_bytes = max(ARENA_RESERVE_FACTOR * settings.policy.memory.parked.max, machine_bytes)
        extents = max(1, reserve_bytes // geometry.pod_extent_bytes)
        arena = Arena(extent_bytes=geometry.extent_bytes, max_extents=extents, pin=device.pin, unpin=device.unpin)
        peer = MoverPeer(settings.movers_socket, rank=settings.rank, slot_bytes=geometry.slot_bytes)
        mover = LocalMover(
            geometry=geometry,
            arena=arena,
            device=device,
            sink=peer.report,
            rank=settings.rank,
            process=f"worker-{settings.rank}",
        )
        peer.start(mover)
        keep_imports_out_of_collections()
        return ParkadeWorker(mover, peer)
