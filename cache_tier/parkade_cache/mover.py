"""What the owner may ask of a mover, and what a mover reports.

Why it exists: the owner decides and never touches a payload; a mover (one per rank, beside the engine's
worker) moves bytes and decides nothing. Between them are the values on this page, so that a mover can live
in the same process, behind a socket, or in a test, and one conformance suite covers them all.

What must stay true: every order returns at once; every order that names a job is answered by exactly one
report for that job; a report is sent when the work is over, never before.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType

from parkade_cache.ids import BlockKey, ConversationId, PackId

JobId = NewType("JobId", int)
"""Names one order to the movers, or one transfer of the engine; unique for the owner's life."""


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a pack records about a block besides its bytes."""

    key: BlockKey
    parent: BlockKey
    end_token: int
    group: int


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """A parked block: its metadata and the slot its bytes are in."""

    meta: BlockMeta
    slot: int


@dataclass(frozen=True, slots=True)
class PackOrder:
    """A pack to be written: its name, whose it is, and where its chains end."""

    pack: PackId
    conversation: ConversationId
    created_at: float
    tips: tuple[tuple[BlockKey, int], ...] = ()


class JobOutcome(enum.StrEnum):
    """How an order to a mover ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WrittenEntry:
    """One block of a pack as this rank wrote it."""

    meta: BlockMeta
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ExtentsCommitted:
    """Answer to ``commit``: all extents are resident; or (failed) not all are, and the owner releases them all."""

    job: JobId
    rank: int
    outcome: JobOutcome
    extents: tuple[int, ...]
    nbytes: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ExtentsReleased:
    """Answer to ``release``: the kernel has the memory back; resident sizes are this process's."""

    job: JobId
    rank: int
    outcome: JobOutcome
    extents: tuple[int, ...]
    nbytes: int
    seconds: float
    resident_before_bytes: int
    resident_after_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HeapReleased:
    """Answer to ``release_heap`` (section 7: per process, statistics read outside the timed call)."""

    job: JobId
    rank: int
    outcome: JobOutcome
    process: str
    allocator: str
    seconds: float
    resident_before_bytes: int
    resident_after_bytes: int
    heap_bytes: int | None
    heap_free_bytes: int | None
    returned: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PackWritten:
    """Answer to ``write`` or ``finish_stream``: the file is flushed and in place, or nothing of it is."""

    job: JobId
    rank: int
    outcome: JobOutcome
    pack: PackId
    conversation: ConversationId
    created_at: float
    entries: tuple[WrittenEntry, ...]
    tips: tuple[tuple[BlockKey, int], ...]
    file_bytes: int
    seconds: float
    reason: str = ""


def no_pack(job: JobId, rank: int, order: PackOrder, outcome: JobOutcome, *, reason: str) -> PackWritten:
    """The answer to a pack's order when there is no such pack on this rank."""
    return PackWritten(
        job=job,
        rank=rank,
        outcome=outcome,
        pack=order.pack,
        conversation=order.conversation,
        created_at=order.created_at,
        entries=(),
        tips=order.tips,
        file_bytes=0,
        seconds=0.0,
        reason=reason,
    )


def not_committed(
    job: JobId, rank: int, extents: Sequence[int], outcome: JobOutcome, *, reason: str
) -> ExtentsCommitted:
    """The answer to ``commit`` when not all extents are resident on this rank."""
    return ExtentsCommitted(
        job=job, rank=rank, outcome=outcome, extents=tuple(extents), nbytes=0, seconds=0.0, reason=reason
    )


def not_released(job: JobId, rank: int, extents: Sequence[int], outcome: JobOutcome, *, reason: str) -> ExtentsReleased:
    """The answer to ``release`` when this rank cannot say what it gave back."""
    return ExtentsReleased(
        job=job,
        rank=rank,
        outcome=outcome,
        extents=tuple(extents),
        nbytes=0,
        seconds=0.0,
        resident_before_bytes=0,
        resident_after_bytes=0,
        reason=reason,
    )


def heap_kept(job: JobId, rank: int, outcome: JobOutcome, *, reason: str) -> HeapReleased:
    """The answer to ``release_heap`` when this rank's heap was not asked."""
    return HeapReleased(
        job=job,
        rank=rank,
        outcome=outcome,
        process=f"worker-{rank}",
        allocator="",
        seconds=0.0,
        resident_before_bytes=0,
        resident_after_bytes=0,
        heap_bytes=None,
        heap_free_bytes=None,
        returned=False,
        reason=reason,
    )


Report = ExtentsCommitted | ExtentsReleased | HeapReleased | PackWritten
ReportSink = Callable[[Report], None]


class Mover(ABC):
    """Orders to the movers of all ranks. Every method returns at once."""

    @abstractmethod
    def attach(self, identity_folder: str, identity: str, *, direct: bool) -> None:
        """Where packs are from now on, and whether the file system takes direct I/O; comes before any other order."""

    @abstractmethod
    def commit(self, job: JobId, extents: Sequence[int]) -> None:
        """Make extents resident ahead of use; answered by ``ExtentsCommitted``."""

    @abstractmethod
    def release(self, job: JobId, extents: Sequence[int]) -> None:
        """Give extents back to the kernel; answered by ``ExtentsReleased``. No slot of them is in use."""

    @abstractmethod
    def release_heap(self, job: JobId) -> None:
        """Give the process's free heap back; answered by ``HeapReleased``."""

    @abstractmethod
    def write(self, job: JobId, order: PackOrder, blocks: Sequence[SlotBlock], *, urgent: bool) -> None:
        """Write parked blocks into a pack; answered by ``PackWritten``. Urgent orders overtake the others (W1)."""

    @abstractmethod
    def cancel(self, job: JobId) -> None:
        """Give up a write that is queued or running; it still answers, ``cancelled`` unless it was done."""

    @abstractmethod
    def open_stream(self, order: PackOrder, expected_bytes: int) -> None:
        """Space for the pack is reserved: blocks streamed to it may be written from now on."""

    @abstractmethod
    def finish_stream(self, job: JobId, order: PackOrder) -> None:
        """No further block comes for the pack; answered by ``PackWritten``."""

    @abstractmethod
    def abort_stream(self, job: JobId, pack: PackId, reason: str) -> None:
        """Drop the pack and what waits for it; answered by ``PackWritten`` (cancelled)."""

    @abstractmethod
    def forget_pack(self, pack: PackId) -> None:
        """The pack is gone from disk: close what is open of it."""

    @abstractmethod
    def close(self) -> None:
        """Stop, within bounds of time; what was ordered before is completed, what comes later answered as cancelled."""
