"""The seam between host memory and the engine's own KV memory.

Why it exists: the mover copies whole blocks in and out of the engine without knowing what the engine's
memory is. What must stay true: both copies return only when the bytes have arrived, and they spend their
time in calls that release the interpreter lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

HostBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """One block of the engine: KV group and block number within it."""

    group: int
    block: int


class Device(ABC):
    """Copies whole blocks between the engine's memory and host memory."""

    batch_blocks = 1
    """Blocks worth handing over in one call; a cancelled transfer waits for at most one such call."""

    @abstractmethod
    def payload_bytes(self, group: int) -> int:
        """Bytes of one block of ``group`` on this rank."""

    def fence(self) -> Any:
        """Mark, on the engine's thread, what has been computed so far; later copies wait for the mark."""
        return None

    @abstractmethod
    def copy_out(self, blocks: Sequence[DeviceBlock], targets: Sequence[HostBytes], after: Any) -> None:
        """Engine to host; returns when every target holds its block's bytes."""

    @abstractmethod
    def copy_in(self, sources: Sequence[HostBytes], blocks: Sequence[DeviceBlock], after: Any) -> None:
        """Host to engine; returns when every block holds its source's bytes."""

    def pin(self, address: int, nbytes: int) -> None:  # noqa: B027 - ordinary memory needs no pinning
        """Host memory was committed: make it fast to copy from and to."""

    def unpin(self, address: int, nbytes: int) -> None:  # noqa: B027 - as for pin
        """Host memory is about to be released."""


class HostDevice(Device):
    """Blocks in ordinary arrays: for engines on the CPU without plane layouts, and for tests.

    ``planes[group]`` is an array of shape (blocks, payload bytes).
    """

    def __init__(self, planes: Sequence[HostBytes]) -> None:
        self.planes = list(planes)

    def payload_bytes(self, group: int) -> int:
        """Bytes of one block of ``group``."""
        return int(self.planes[group].shape[1])

    def copy_out(self, blocks: Sequence[DeviceBlock], targets: Sequence[HostBytes], after: Any) -> None:  # noqa: ARG002
        """Copy blocks into host memory."""
        for block, target in zip(blocks, targets, strict=True):
            np.copyto(target, self.planes[block.group][block.block])

    def copy_in(self, sources: Sequence[HostBytes], blocks: Sequence[DeviceBlock], after: Any) -> None:  # noqa: ARG002
        """Copy host memory into blocks."""
        for source, block in zip(sources, blocks, strict=True):
            np.copyto(self.planes[block.group][block.block], source)
