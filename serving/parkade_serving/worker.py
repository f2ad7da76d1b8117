"""The engine worker's side: hands the step's transfers to the mover and reports what ended.

What must stay true: no call here waits for a disk; ``wait`` cancels what is not yet copied instead of waiting
for it (trap 3).
"""

from __future__ import annotations

import gc
import multiprocessing
import os

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from parkade_cache.device import DeviceBlock
from parkade_cache.ids import BlockKey
from parkade_cache.local_mover import LocalMover
from parkade_cache.mover import JobId
from parkade_cache.transfers import LoadJob, LoadSource, StoreJob, StoreTarget, TransferDone
from parkade_serving.mover_socket import MoverPeer


class StoreSpec(LoadStoreSpec):
    """Where a store job's blocks go, in the order of its engine blocks."""

    def __init__(self, targets: tuple[StoreTarget, ...], keys: tuple[BlockKey, ...] = ()) -> None:
        self.targets = targets
        self.keys = keys

    def __getstate__(self) -> dict[str, object]:
        """What travels to the workers: the keys are the scheduler's own note and stay behind."""
        return {"targets": self.targets, "keys": ()}


class LoadSpec(LoadStoreSpec):
    """Where a load job's blocks come from, in the order of its engine blocks."""

    def __init__(self, sources: tuple[LoadSource, ...], deadline_s: float) -> None:
        self.sources = sources
        self.deadline_s = deadline_s


class ParkadeWorker(OffloadingWorker):
    """One rank's worker."""

    def __init__(self, mover: LocalMover, peer: MoverPeer) -> None:
        self.mover = mover
        self._peer = peer
        self.ended: list[TransferDone] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Engine to cache; returns at once."""
        assert isinstance(dst_spec, StoreSpec)
        job = StoreJob(JobId(job_id), _blocks(src_spec), dst_spec.targets)
        self.mover.store(job, self.mover.device.fence())
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Cache to engine; returns at once. ``expedited`` is 0.33's; every load here already has lanes of its own."""
        assert isinstance(src_spec, LoadSpec)
        job = LoadJob(JobId(job_id), _blocks(dst_spec), src_spec.sources, src_spec.deadline_s)
        self.mover.load(job, self.mover.device.fence())
        return True

    def get_finished(self) -> list[TransferResult]:
        """Ended transfers. Failures are kept in ``ended`` for the connector; the engine is told of an end only."""
        results: list[TransferResult] = []
        for done in self.mover.take_finished():
            self.ended.append(done)
            results.append(
                TransferResult(
                    job_id=int(done.job),
                    success=True,
                    transfer_size=done.ram_bytes + done.disk_bytes,
                    transfer_time=done.seconds,
                )
            )
        return results

    def take_ended(self) -> list[TransferDone]:
        """What ended since the last call, with its failures."""
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """The engine takes these jobs' blocks away now: what was not copied is given up, not waited for."""
        self.mover.cancel_transfers([JobId(job_id) for job_id in job_ids])

    def shutdown(self) -> None:
        """Let the owner write out what only RAM has, within the time the engine gives its workers; then stop."""
        self._peer.leave(leave_seconds())
        self.mover.close()
        self._peer.close()
        leave_garbage_to_the_kernel()


def keep_imports_out_of_collections() -> None:
    """A worker has started: take what importing and loading made out of Python's collections.

    A full pass over it takes most of a second, in the middle of a step. vLLM does this in its own processes and GPU
    workers, not in its CPU workers. An engine inside somebody's own process leaves the collector as it is.
    """
    if multiprocessing.parent_process() is not None:
        gc.collect()
        gc.freeze()


def leave_garbage_to_the_kernel() -> None:
    """A process of the engine ends: spare it the last collections, which take seconds over the engine's modules.

    An engine inside somebody's own process leaves the collector as it is.
    """
    if multiprocessing.parent_process() is None:
        return
    gc.disable()
    gc.freeze()


def leave_seconds() -> float:
    """What vLLM gives a worker to end, less a second to do so; five seconds unless it is told otherwise."""
    return max(1.0, float(os.environ.get("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS") or 5) - 1.0)


def _blocks(spec: GPULoadStoreSpec) -> tuple[DeviceBlock, ...]:
    numbers = iter(spec.block_ids.tolist())
    return tuple(
        DeviceBlock(group=group, block=next(numbers))
        for group, size in enumerate(spec.group_sizes)
        for _ in range(size)
    )
