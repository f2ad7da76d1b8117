"""The engine's KV memory as a device the mover can copy to and from.

Why it exists: the engine hands the worker tensors; the cache wants whole blocks as bytes. What must stay
true: a block's bytes are its pages in the order of the group's layers, so that they are the same after a
restart; copies spend their time in calls that release the interpreter lock (trap 5).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.base import CanonicalKVCaches

from parkade_cache.device import Device, DeviceBlock, HostBytes

_log = logging.getLogger(__name__)

_Page = tuple[int, int, int]
"""Base address of a layer's tensor, its bytes from block to block, and the bytes of one page."""


def make_device(kv_caches: CanonicalKVCaches) -> Device:
    """The device for where the engine's tensors are."""
    tensors = [cache.tensor for cache in kv_caches.tensors]
    pages: list[list[_Page]] = [
        [
            (
                tensors[ref.tensor_idx].data_ptr(),
                tensors[ref.tensor_idx].stride(0) * tensors[ref.tensor_idx].element_size(),
                ref.page_size_bytes,
            )
            for ref in group
        ]
        for group in kv_caches.group_data_refs
    ]
    if tensors[0].device.type == "cpu":
        return CpuDevice(tensors, pages)
    return CudaDevice(tensors, pages)


class _PagedDevice(Device):
    """What both devices share: where the pages of a block are."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: list[list[_Page]]) -> None:
        self._tensors = list(tensors)  # Keeps the memory alive that the addresses point into.
        self._pages = pages
        self._payload = [sum(size for _, _, size in group) for group in pages]

    def payload_bytes(self, group: int) -> int:
        """Bytes of one block of ``group`` on this rank."""
        return self._payload[group]


class CpuDevice(_PagedDevice):
    """KV memory in host RAM, as in the CPU build of the engine.

    Layers that lie at equal distances in memory, as one allocation for all layers does, are copied with one
    strided copy per block, which releases the interpreter lock once; others page by page.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: list[list[_Page]]) -> None:
        super().__init__(tensors, pages)
        self._planes = [_equal_steps(group) for group in pages]

    def _views(self, block: DeviceBlock, host: HostBytes) -> list[tuple[HostBytes, HostBytes]]:
        """Pairs of (engine, host) arrays of the same shape that cover the block."""
        group = self._pages[block.group]
        step = self._planes[block.group]
        if step is not None:
            base, stride, size = group[0]
            engine = _view(base + block.block * stride, (len(group), size), (step, 1))
            return [(engine, host.reshape(len(group), size))]
        pairs: list[tuple[HostBytes, HostBytes]] = []
        offset = 0
        for base, stride, size in group:
            pairs.append((_view(base + block.block * stride, (size,), (1,)), host[offset : offset + size]))
            offset += size
        return pairs

    def copy_out(self, blocks: Sequence[DeviceBlock], targets: Sequence[HostBytes], after: Any) -> None:
        """Copy blocks into host memory; the engine's step has ended, so there is nothing to wait for."""
        for block, target in zip(blocks, targets, strict=True):
            for engine, host in self._views(block, target):
                np.copyto(host, engine)

    def copy_in(self, sources: Sequence[HostBytes], blocks: Sequence[DeviceBlock], after: Any) -> None:
        """Copy host memory into blocks."""
        for source, block in zip(sources, blocks, strict=True):
            for engine, host in self._views(block, source):
                np.copyto(engine, host)


def _equal_steps(group: Sequence[_Page]) -> int | None:
    """Distance from layer to layer when it is the same throughout, with equal strides and sizes, else None."""
    if len({(stride, size) for _, stride, size in group}) != 1:
        return None
    bases = [base for base, _, _ in group]
    steps = {after - before for before, after in itertools.pairwise(bases)}
    if not steps:
        return 1
    return steps.pop() if len(steps) == 1 else None


class _Memory:
    """An address range that numpy may look at; the tensors that own it are kept by the device."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> HostBytes:
    found: npt.NDArray[np.uint8] = np.asarray(_Memory(address, shape, strides))
    return found


class CudaDevice(_PagedDevice):
    """KV memory on a GPU: batched asynchronous copies on a stream of their own, one per direction.

    A copy waits for the event that ``fence`` recorded on the engine's stream, so it reads what has been
    computed and never overtakes a kernel that still uses a block. Extents are pinned when they are
    committed; where pinning fails the copies still work, more slowly.
    """

    batch_blocks = 32

    def __init__(self, tensors: Sequence[torch.Tensor], pages: list[list[_Page]]) -> None:
        super().__init__(tensors, pages)
        self._swap_blocks = ops.swap_blocks_batch
        self._device = tensors[0].device
        low, _ = torch.cuda.Stream.priority_range()
        self._out = torch.cuda.Stream(device=self._device, priority=low)
        self._in = torch.cuda.Stream(device=self._device)

    def fence(self) -> torch.cuda.Event:
        """An event on the engine's current stream; call on the engine's thread."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy_out(self, blocks: Sequence[DeviceBlock], targets: Sequence[HostBytes], after: Any) -> None:
        """GPU to host; returns when the bytes have arrived."""
        self._copy(blocks, targets, after, self._out, to_host=True)

    def copy_in(self, sources: Sequence[HostBytes], blocks: Sequence[DeviceBlock], after: Any) -> None:
        """Host to GPU; returns when the bytes have arrived."""
        self._copy(blocks, sources, after, self._in, to_host=False)

    def _copy(
        self,
        blocks: Sequence[DeviceBlock],
        host: Sequence[HostBytes],
        after: Any,
        stream: torch.cuda.Stream,
        *,
        to_host: bool,
    ) -> None:
        engine_addresses, host_addresses, sizes = self._descriptors(blocks, host)
        source, target = (engine_addresses, host_addresses) if to_host else (host_addresses, engine_addresses)
        done = torch.cuda.Event()
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            self._swap_blocks(source, target, sizes)
            done.record(stream)
        done.synchronize()

    def _descriptors(
        self, blocks: Sequence[DeviceBlock], host: Sequence[HostBytes]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        engine_addresses: list[int] = []
        host_addresses: list[int] = []
        sizes: list[int] = []
        for block, buffer in zip(blocks, host, strict=True):
            address = int(buffer.ctypes.data)
            for base, stride, size in self._pages[block.group]:
                engine_addresses.append(base + block.block * stride)
                host_addresses.append(address)
                sizes.append(size)
                address += size
        return (
            torch.tensor(engine_addresses, dtype=torch.int64),
            torch.tensor(host_addresses, dtype=torch.int64),
            torch.tensor(sizes, dtype=torch.int64),
        )

    def pin(self, address: int, nbytes: int) -> None:
        """Register committed memory with the driver, so that copies from and to it are asynchronous."""
        result = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(result) != 0:
            _log.warning("host memory could not be pinned (code %s); copies are slower", result)

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo ``pin`` before the memory is released."""
        torch.cuda.cudart().cudaHostUnregister(address)
