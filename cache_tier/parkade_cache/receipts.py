"""Receipts: the record of every decision (behaviour, section 7).

Why it exists: "why was this turn a miss" and "what was lost" must have an answer. A conversation's loss without a
receipt is a bug, so adding one must never fail, never block and never touch a disk on the caller's thread.

What must stay true: ids only grow, also across restarts, whether or not the disk kept the older ones; newest last;
a broken disk costs durability, which is counted, and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypedDict, Unpack

from parkade_cache.errors import FormatError
from parkade_cache.receipt_journal import ReceiptJournal

_MICROSECONDS: Final = 1_000_000


class ReceiptKind(enum.StrEnum):
    """What was decided; the closed set of section 7."""

    TURN = "turn"
    PARK = "park"
    ADMIT = "admit"
    REFUSE = "refuse"
    EVICT = "evict"
    RELEASE = "release"
    WRITE_OUT = "write_out"
    SPILL = "spill"
    RESTORE = "restore"
    RESTORE_SKIPPED = "restore_skipped"
    DROP = "drop"
    RESIZE = "resize"
    POLICY = "policy"
    DRAIN = "drain"
    ARCHIVE = "archive"
    ADOPT = "adopt"
    RECOVER = "recover"


class ReadingLike(Protocol):
    """What a receipt keeps of a memory reading; the sampler's readings have these."""

    @property
    def available_bytes(self) -> int | None: ...
    @property
    def source(self) -> str | None: ...
    @property
    def limit_bytes(self) -> int | None: ...
    @property
    def current_bytes(self) -> int | None: ...
    @property
    def credit_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingRecord:
    """A reading as a receipt remembers it; ``available_bytes`` None means unknown, never zero (M1)."""

    available_bytes: int | None
    source: str | None = None
    limit_bytes: int | None = None
    current_bytes: int | None = None
    credit_bytes: int = 0

    @classmethod
    def of(cls, reading: ReadingLike) -> ReadingRecord:
        source = reading.source
        return cls(
            reading.available_bytes,
            None if source is None else str(source),
            reading.limit_bytes,
            reading.current_bytes,
            reading.credit_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeapRecord:
    """What one process's heap gave back in a release; statistics were read outside the timed call."""

    process: str
    allocator: str
    trim_seconds: float
    resident_before_bytes: int
    resident_after_bytes: int
    heap_bytes_before: int | None = None
    heap_free_before_bytes: int | None = None
    returned: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """One decision. Seconds and bytes; what does not apply to the kind is None.

    Without slots on purpose: most fields of a receipt keep their default, and `of` then stores only the others,
    which is what makes adding one cheap enough for the engine's step path.
    """

    id: int
    time: float
    """Unix seconds."""
    kind: ReceiptKind
    outcome: str = ""
    reason: str = ""
    conversation: str | None = None
    request: str | None = None
    tier: str | None = None
    tokens: int | None = None
    blocks: int | None = None
    bytes: int | None = None
    duration_seconds: float | None = None

    need_bytes: int | None = None
    floor_bytes: int | None = None
    estimate_bytes: int | None = None
    actual_bytes: int | None = None
    reading_before: ReadingRecord | None = None
    reading_after: ReadingRecord | None = None
    evicted: tuple[str, ...] | None = None
    """Conversations that went for this decision, in the order they went."""
    released_bytes: int | None = None
    still_parked_bytes: int | None = None

    heaps: tuple[HeapRecord, ...] | None = None
    written_out: int | None = None
    own_conversation_written_out: int | None = None
    already_on_disk: int | None = None
    dropped: int | None = None
    skipped_busy: tuple[str, ...] | None = None
    """Conversations passed over because they were in use (W5)."""
    write_out_seconds: float | None = None

    prompt_tokens: int | None = None
    reused_engine_tokens: int | None = None
    reused_ram_tokens: int | None = None
    reused_disk_tokens: int | None = None
    reused_archive_tokens: int | None = None
    read_anew_tokens: int | None = None
    prompt_read_seconds: float | None = None
    waited_restore_seconds: float | None = None
    waited_write_out_seconds: float | None = None

    detail: Mapping[str, object] | None = None
    """What only this kind has to say; JSON-able."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Receipt:
        """The receipt with these fields, several times faster than the constructor."""
        if not _FIELD_SET.issuperset(fields):
            raise TypeError(f"a receipt has no field {sorted(fields.keys() - _FIELD_SET)}")
        receipt = object.__new__(cls)
        receipt.__dict__.update(fields)
        return receipt

    def to_json(self) -> dict[str, object]:
        """Plain, JSON-able values; fields without a value are left out."""
        return {name: _plain(value) for name, value in self.__dict__.items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Receipt:
        """Inverse of `to_json`; fields of a newer version are ignored.

        Raises:
            FormatError: no receipt.

        """
        known = {name: value for name, value in data.items() if name in _FIELD_SET}
        try:
            return cls(**_typed(known))
        except (TypeError, ValueError, KeyError) as error:
            raise FormatError(f"not a receipt: {error}") from error


_FIELD_SET: Final = frozenset(field.name for field in dataclasses.fields(Receipt))


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str | int | float | bool | None):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple | list | frozenset | set):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return str(value)


def _typed(data: dict[str, Any]) -> dict[str, Any]:
    typed = data | {"kind": ReceiptKind(data["kind"]), "id": int(data["id"]), "time": float(data["time"])}
    for name in ("reading_before", "reading_after"):
        if name in typed:
            typed[name] = ReadingRecord(**typed[name])
    for name in ("evicted", "skipped_busy"):
        if name in typed:
            typed[name] = tuple(typed[name])
    if "heaps" in typed:
        typed["heaps"] = tuple(HeapRecord(**heap) for heap in typed["heaps"])
    return typed


class ReceiptFields(TypedDict, total=False):
    """What a caller of `ReceiptLog.add` may say besides the kind; the fields of `Receipt`."""

    outcome: str
    reason: str
    conversation: str | None
    request: str | None
    tier: str | None
    tokens: int | None
    blocks: int | None
    bytes: int | None
    duration_seconds: float | None
    need_bytes: int | None
    floor_bytes: int | None
    estimate_bytes: int | None
    actual_bytes: int | None
    evicted: tuple[str, ...] | None
    released_bytes: int | None
    still_parked_bytes: int | None
    heaps: tuple[HeapRecord, ...] | None
    written_out: int | None
    own_conversation_written_out: int | None
    already_on_disk: int | None
    dropped: int | None
    skipped_busy: tuple[str, ...] | None
    write_out_seconds: float | None
    prompt_tokens: int | None
    reused_engine_tokens: int | None
    reused_ram_tokens: int | None
    reused_disk_tokens: int | None
    reused_archive_tokens: int | None
    read_anew_tokens: int | None
    prompt_read_seconds: float | None
    waited_restore_seconds: float | None
    waited_write_out_seconds: float | None
    detail: Mapping[str, object] | None


class GivenBack(TypedDict, total=False):
    """What receipts of limits, floors and pressure have in common."""

    tier: str | None
    need_bytes: int | None
    floor_bytes: int | None
    reading_before: ReadingLike | None
    reading_after: ReadingLike | None
    evicted: tuple[str, ...] | None
    released_bytes: int | None
    still_parked_bytes: int | None
    heaps: tuple[HeapRecord, ...] | None
    written_out: int | None
    already_on_disk: int | None
    dropped: int | None
    skipped_busy: tuple[str, ...] | None
    write_out_seconds: float | None


class ReceiptLog:
    """The newest receipts in memory, all of them in a bounded set of files behind them.

    Thread-safe. ``folder`` None keeps receipts in memory only. ``on_add`` is called for each receipt on the
    caller's thread (a metric, not work).
    """

    def __init__(
        self,
        *,
        capacity: int = 10_000,
        folder: Path | None = None,
        max_file_bytes: int = 16 * 1024 * 1024,
        files: int = 4,
        clock: Callable[[], float] = time.time,
        on_add: Callable[[Receipt], None] | None = None,
    ) -> None:
        self._clock = clock
        self._on_add = on_add
        self._lock = threading.Lock()
        self._recent: deque[Receipt] = deque(maxlen=capacity)
        self._counts: dict[tuple[str, str], int] = {}
        self._last_id = 0
        self._journal: ReceiptJournal[Receipt] | None = None
        if folder is not None:
            self._journal = ReceiptJournal(folder, max_file_bytes=max_file_bytes, files=files, encode=_encode)
            self._restore(self._journal.tail(capacity))
            self._journal.start()

    def add(
        self,
        kind: ReceiptKind,
        *,
        reading_before: ReadingLike | None = None,
        reading_after: ReadingLike | None = None,
        **fields: Unpack[ReceiptFields],
    ) -> Receipt:
        """Record one decision; returns at once, whatever the disk does."""
        values: dict[str, Any] = {"id": 0, "time": self._clock(), "kind": kind, **fields}
        if reading_before is not None:
            values["reading_before"] = ReadingRecord.of(reading_before)
        if reading_after is not None:
            values["reading_after"] = ReadingRecord.of(reading_after)
        with self._lock:
            # Microseconds since 1970 where the clock allows it: greater than every id of an earlier life of this
            # pod, also of receipts that a crash took before they were written.
            values["id"] = self._last_id = max(self._last_id + 1, int(values["time"] * _MICROSECONDS))
            receipt = Receipt.of(values)
            self._recent.append(receipt)
            key = (kind.value, receipt.outcome)
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._journal is not None:
                self._journal.put(receipt)
        if self._on_add is not None:
            self._on_add(receipt)
        return receipt

    def query(
        self,
        *,
        since: float | None = None,
        conversation: str | None = None,
        request: str | None = None,
        kind: str | None = None,
        limit: int = 100,
    ) -> list[Receipt]:
        """The newest receipts that match, newest last.

        ``since`` as a whole number (int) is an id: only later ones; as a float it is a time in unix seconds.
        """
        if limit <= 0:
            return []
        with self._lock:
            snapshot = list(self._recent)
        newest_first: list[Receipt] = []
        for receipt in reversed(snapshot):
            if since is not None and not _later(receipt, since):
                break
            if (
                (conversation is None or receipt.conversation == conversation)
                and (request is None or receipt.request == request)
                and (kind is None or receipt.kind == kind)
            ):
                newest_first.append(receipt)
                if len(newest_first) == limit:
                    break
        return newest_first[::-1]

    def counts(self) -> dict[tuple[str, str], int]:
        """How many receipts of each (kind, outcome) this process has added."""
        with self._lock:
            return dict(self._counts)

    @property
    def unwritten_total(self) -> int:
        """Receipts the disk did not take; they were still kept in memory."""
        return 0 if self._journal is None else self._journal.unwritten_total

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what was added so far has been handed to the file system; False when it took too long."""
        return True if self._journal is None else self._journal.flush(timeout_s)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _restore(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                receipt = Receipt.from_json(json.loads(line))
            except (FormatError, ValueError, AttributeError):
                continue  # A torn last line of a crash, or a line of a newer version.
            if receipt.id > self._last_id:
                self._last_id = receipt.id
                self._recent.append(receipt)


def _later(receipt: Receipt, since: float) -> bool:
    return receipt.id > since if isinstance(since, int) else receipt.time > since


def _encode(receipt: Receipt) -> bytes:
    return json.dumps(receipt.to_json(), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
