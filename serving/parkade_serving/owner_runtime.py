"""Builds a pod's owner out of the engine's configuration, and keeps it running beside the scheduler.

Why it exists: the spec is created once on the scheduler's side and once per worker, from the same
configuration; both must arrive at the same sizes, sockets and identity. What must stay true: settings that
cannot hold together stop the start with one line; a directory is used by one live pod.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from parkade_cache.errors import SettingsError
from parkade_cache.ids import BlockKey
from parkade_cache.live_policy import PolicyFile
from parkade_cache.memory.reading import MemorySampler
from parkade_cache.metrics import CacheMetrics
from parkade_cache.owner import IdentityFacts, Owner
from parkade_cache.policy import Policy, PolicyBox, parse_policy
from parkade_cache.receipts import Receipt, ReceiptLog
from parkade_cache.slots import Geometry
from parkade_cache.spill import PACK_VERSION, Identity, SpillConfig, SpillStore
from parkade_cache.state import CacheState
from parkade_cache.watcher import Surroundings
from parkade_serving.heap_agent import AgentHeaps
from parkade_serving.mover_socket import MoverHub
from parkade_serving.rpc import OwnerServer
from parkade_serving.sockets import OVERLOADED_MARK, OWNER_SOCKET, make_private_folder, socket_folder
from parkade_serving.worker import leave_garbage_to_the_kernel

_log = logging.getLogger(__name__)

_WEIGHT_FILES = frozenset({".safetensors", ".bin", ".gguf", ".pt"})

LOCK_WAIT_S = 15.0
"""How long a new pod waits for the directory of one that is just ending."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """``kv_connector_extra_config["parkade"]``, checked, plus what the engine's configuration says."""

    policy: Policy
    spill_dir: Path | None
    socket_dir: Path
    geometry: Geometry
    identity: Identity
    movers_socket: Path
    rank: int
    block_tokens: tuple[int, ...]
    group_ids: tuple[int, ...]
    policy_file: Path | None = None
    policy_over: Mapping[str, object] = field(default_factory=dict)

    @property
    def group_rank(self) -> dict[int, int]:
        """Position of a KV group among those the cache keeps, by the engine's group number."""
        return {group_id: position for position, group_id in enumerate(self.group_ids)}


def read_settings(config: OffloadingConfig, vllm_config: VllmConfig) -> PodSettings:
    """Settings of this process; raises ``SettingsError`` or ``PolicyError`` in one line."""
    extra = config.extra_config.get("parkade")
    if not isinstance(extra, Mapping):
        raise SettingsError('kv_connector_extra_config needs a "parkade" object; see: parkade serve --print-command')
    _refuse_unsupported(config, vllm_config, spill=bool(extra.get("spill_dir")))
    sampler = MemorySampler()
    reading = sampler.sample()
    policy = parse_policy(extra.get("policy") or {}, limit_bytes=reading.limit_bytes)
    spill_dir = Path(extra["spill_dir"]) if extra.get("spill_dir") else None
    if spill_dir is not None and policy.spill is None:
        raise SettingsError("a spill directory needs a capacity; set --spill-size")
    if spill_dir is None and policy.spill is not None:
        raise SettingsError("a spill capacity needs a directory; set --spill-dir")
    geometry = Geometry.plan(
        block_bytes=config.worker_kv_bytes_per_block,
        parked_max_bytes=policy.memory.parked.max,
        ranks=config.parallel.world_size,
    )
    policy.check_block(geometry.pod_slot_bytes)
    socket_dir = Path(extra["socket_dir"]) if extra.get("socket_dir") else socket_folder()
    make_private_folder(socket_dir)
    short_id = hashlib.sha256(config.engine_id.encode()).hexdigest()[:8]
    return PodSettings(
        policy=policy,
        spill_dir=spill_dir,
        socket_dir=socket_dir,
        geometry=geometry,
        identity=identity_of(config, vllm_config, revision=str(extra.get("revision") or "")),
        movers_socket=socket_dir / f"movers-{short_id}.sock",
        rank=config.parallel.rank,
        block_tokens=tuple(group.tokens_per_block for group in config.groups),
        group_ids=tuple(group.group_id for group in config.groups),
        policy_file=Path(extra["policy_file"]) if extra.get("policy_file") else None,
        policy_over=dict(extra.get("policy_over") or {}),
    )


def _refuse_unsupported(config: OffloadingConfig, vllm_config: VllmConfig, *, spill: bool) -> None:
    if config.cache.blocks_per_chunk != 1:
        raise SettingsError("blocks_per_chunk and block_size are not supported; use the engine's --block-size")
    if config.parallel.data_parallel_size > 1:
        raise SettingsError("data parallel is not supported; run one pod per replica and scale the replicas")
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if spill and "xxhash" in algorithm and "PYTHONHASHSEED" not in os.environ:
        raise SettingsError(
            f"block keys of {algorithm} change with every start; use --prefix-caching-hash-algo sha256_cbor"
        )
    layers = int(getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", 0) or 0)
    if layers % config.parallel.pp_size:
        raise SettingsError("pipeline stages of unequal size are not supported; choose a size that divides the layers")
    if not config.worker_kv_bytes_per_block:
        raise SettingsError("the engine did not say how large a block is; this model cannot be parked")


def identity_of(config: OffloadingConfig, vllm_config: VllmConfig, *, revision: str) -> Identity:
    """Everything that decides whether a stored block fits this engine (D1)."""
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    drafter = str(getattr(speculative, "model", "") or "") if speculative is not None else ""
    parallel = config.parallel
    layers = hashlib.sha256(repr([group.layer_names for group in config.groups]).encode()).hexdigest()[:16]
    return Identity(
        model=f"{_model_name(model.model)}:{_model_content(model)}",
        revision=revision or str(model.revision or ""),
        dtype=str(model.dtype),
        kv_cache_dtype=config.model.dtype,
        drafter=drafter,
        layout=f"{config.kv_cache_layout}:{config.worker_kv_bytes_per_block}:{layers}",
        block_tokens=config.groups[0].tokens_per_block,
        parallel=f"tp{parallel.tp_size}-pp{parallel.pp_size}-pcp{parallel.pcp_size}-dcp{parallel.dcp_size}",
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        hash_seed=os.environ.get("PYTHONHASHSEED", ""),
        format_version=PACK_VERSION,
    )


def _model_name(model: str) -> str:
    """The name people know; a local path is its last folder, so that a moved cache still fits."""
    return Path(model).name if Path(model).is_dir() else model


def _model_content(model: Any) -> str:
    """A digest of the configuration, of a hub model's commit, and of local weight files' names, sizes and times.

    A fine-tune written over its base has the same names and sizes; its time tells them apart. Copying the weights
    therefore empties the cache, which is the safe side.
    """
    commit = getattr(model.hf_config, "_commit_hash", None) or ""
    digest = hashlib.sha256(repr((commit, sorted(model.hf_config.to_dict().items(), key=str))).encode())
    path = Path(model.model)
    for file in (path, *(sorted(path.iterdir()) if path.is_dir() else ())):
        if file.is_file() and file.suffix in _WEIGHT_FILES:
            found = file.stat()
            digest.update(f"{file.name}:{found.st_size}:{found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


@dataclass(slots=True)
class OwnerRuntime:
    """The owner, its sockets, and what the connector passes to the manager between two calls."""

    owner: Owner
    server: OwnerServer
    heaps: AgentHeaps
    block_tokens: tuple[int, ...]
    group_rank: dict[int, int]
    uncaptured: set[BlockKey] = field(default_factory=set)
    stopped: bool = False

    def read_deadline_s(self) -> float:
        """R4's deadline for one restore."""
        spill = self.owner.state.policy.spill
        return float(spill.read_deadline_seconds) if spill is not None else 10.0

    def take_uncaptured(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Which of ``keys`` were reported as not captured; each report is used once."""
        found = frozenset(key for key in keys if key in self.uncaptured)
        self.uncaptured -= found
        return found

    def reset(self) -> None:
        """Forget every conversation in every tier. Called inside an engine step: an error must not end the engine."""
        try:
            self.owner.reset()
        except Exception:  # noqa: BLE001 - whatever it is, the engine must live
            _log.exception("the cache could not be reset in full; the disk tier stays off until the next start")
            with self.owner.state.lock:
                self.owner.state.spill_healthy = False

    def stop(self) -> None:
        """Write out what is left, then stop."""
        if self.stopped:
            return
        self.stopped = True
        seconds = float(os.environ.get("PARKADE_SHUTDOWN_SECONDS", "20"))
        self.owner.stop(grace_s=seconds)
        self.server.close()
        self.heaps.close()
        leave_garbage_to_the_kernel()


def start_owner(settings: PodSettings) -> OwnerRuntime:
    """Open the disk, start the owner and its sockets."""
    metrics = CacheMetrics()

    def counted(receipt: Receipt) -> None:
        metrics.receipts.labels(kind=receipt.kind.value, outcome=receipt.outcome).inc()

    store = _open_store(settings)
    receipts_folder = settings.spill_dir / "receipts" if settings.spill_dir is not None else None
    state = CacheState(
        geometry=settings.geometry,
        policy=PolicyBox(settings.policy),
        receipts=ReceiptLog(folder=receipts_folder, on_add=counted),
        metrics=metrics,
        spill_on=store is not None,
    )
    state.group_positions = settings.group_rank
    heaps = AgentHeaps(settings.socket_dir)
    owner = Owner(
        state,
        sampler=MemorySampler(cap_bytes=settings.policy.memory.limit),
        store=store,
        identity=IdentityFacts(
            model=settings.identity.model.rpartition(":")[0],
            fingerprint=settings.identity.fingerprint,
            block_tokens=settings.block_tokens[0],
            block_bytes=settings.geometry.pod_slot_bytes,
        ),
        heaps=heaps,
        surroundings=Surroundings(
            policy_file=PolicyFile(settings.policy_file, over=settings.policy_over) if settings.policy_file else None,
            overloaded=lambda overloaded: _mark(settings.socket_dir / OVERLOADED_MARK, there=overloaded),
        ),
    )
    _mark(settings.socket_dir / OVERLOADED_MARK, there=False)
    hub = MoverHub(
        settings.movers_socket,
        ranks=settings.geometry.ranks,
        slot_bytes=settings.geometry.slot_bytes,
        sink=owner.report,
        leaving=owner.leaving,
    )
    owner.start(hub)
    server = OwnerServer(settings.socket_dir / OWNER_SOCKET, owner.handlers()).start()
    return OwnerRuntime(
        owner=owner,
        server=server,
        heaps=heaps,
        block_tokens=settings.block_tokens,
        group_rank=settings.group_rank,
    )


def _mark(path: Path, *, there: bool) -> None:
    """A file that the API processes look for at every request, which costs them less than asking."""
    try:
        if there:
            path.touch(mode=0o600)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s could not be changed: %s", path, error)


def _open_store(settings: PodSettings) -> SpillStore | None:
    spill = settings.policy.spill
    if settings.spill_dir is None or spill is None:
        return None
    config = SpillConfig(
        root=settings.spill_dir,
        capacity_bytes=spill.size,
        min_free_bytes=spill.min_free,
        write_budget_bytes_per_hour=spill.write_budget_per_hour,
        block_bytes=settings.geometry.pod_slot_bytes,
        ranks=settings.geometry.ranks,
    )
    return SpillStore.open(config, settings.identity, wait_s=LOCK_WAIT_S)
