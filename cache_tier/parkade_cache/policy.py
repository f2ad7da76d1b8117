"""Limits, floors and budgets in force: the part of the custom resource that the cache itself obeys.

Why it exists: the operator, the command line and the live HTTP route must mean the same by the same key. The models
carry the custom resource's camelCase names; sizes are whole bytes once parsed.

What must stay true: a policy that was accepted holds together (floor + headroom < limit, parked.max < limit), a
refusal is one line that names the field, and a change is seen whole or not at all.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from parkade_cache.errors import PolicyError
from parkade_cache.quantity import format_bytes, parse_quantity

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
_SMALLEST_FLOOR_BYTES: Final = 512 * MIB
_MAX_COUNT: Final = 2**31 - 1

Bytes = Annotated[int, BeforeValidator(parse_quantity)]
"""A size: a Kubernetes quantity string or a whole number of bytes; bytes once parsed."""
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)]
Seconds = Annotated[int, Field(ge=0, le=86_400, strict=True)]


class SpillMode(enum.StrEnum):
    """When a conversation is written to disk (W8)."""

    WRITE_BEHIND = "WriteBehind"
    ON_EVICT = "OnEvict"


class _Model(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, validate_default=True
    )


class ParkedPolicy(_Model):
    """What may be kept in RAM for conversations that are idle."""

    max: Bytes
    """Bytes of parked blocks, all ranks together; 0 parks nothing and streams everything to disk (G14)."""
    max_conversations: Count = 0
    """Conversations parked at most; 0 is no limit."""
    min_tokens: Count = 0
    """Shorter conversations are neither parked nor evicted for (W11)."""


class MemoryPolicy(_Model):
    """The pod's memory."""

    limit: Bytes | None = None
    """A cap in bytes besides the cgroup's own limit (M8); None obeys the cgroup and the host alone."""
    floor: Bytes = _SMALLEST_FLOOR_BYTES
    """Bytes that must stay available under the limit (M10)."""
    parked: ParkedPolicy
    headroom: Bytes = 0
    """Bytes above the floor that a resize leaves free for the engine itself."""


class SpillPolicy(_Model):
    """The disk tier. There is none without this section."""

    size: Bytes
    """Capacity in bytes, all ranks together; must be set (D2)."""
    min_free: Bytes | None = None
    """Bytes of the file system that stay free; None is max(10 GiB, 5 %) of it (D2)."""
    min_tokens: Count = 0
    """Shorter conversations are not written (W10)."""
    mode: SpillMode = SpillMode.WRITE_BEHIND
    write_budget_per_hour: Bytes = 128 * GIB
    """Physical bytes written in any hour (D2)."""
    write_out_seconds: Seconds = 30
    """Deadline of the write-outs of one release (W3)."""
    write_behind_idle_seconds: Seconds = 3
    """A conversation is written once it has been idle this long (W8)."""
    write_behind_per_second: Bytes = 0
    """Bytes per second that background writes take on average at most; 0 is no limit. Write-outs are not bound (W1)."""
    read_deadline_seconds: Seconds = 10
    """A restore that takes longer is given up and recomputed (R4)."""

    @model_validator(mode="after")
    def _capacity_is_set(self) -> Self:
        if self.size == 0:
            raise ValueError("size must be greater than 0; leave the whole section out to run without a disk tier")
        return self


class Policy(_Model):
    """Everything that can be changed while the pod runs."""

    memory: MemoryPolicy
    spill: SpillPolicy | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if self.memory.limit is not None:
            _check_against_limit(self.memory, self.memory.limit)
        return self

    def check_limit(self, limit_bytes: int) -> None:
        """Check the rules between fields against a limit that was found out, such as the cgroup's.

        Raises:
            PolicyError: floor, headroom or parked.max leave no room under it.

        """
        try:
            _check_against_limit(self.memory, limit_bytes)
        except ValueError as error:
            raise PolicyError(f"memory: {error}") from None

    def check_block(self, block_bytes: int) -> None:
        """Check the sizes that make no sense below one block (all ranks' shards of it).

        Raises:
            PolicyError: a tier that could never hold anything.

        """
        size = format_bytes(block_bytes)
        if self.spill is not None and self.spill.size < block_bytes:
            raise PolicyError(f"spill.size: {format_bytes(self.spill.size)} is below one block ({size}); raise it")
        if 0 < self.memory.parked.max < block_bytes:
            shown = format_bytes(self.memory.parked.max)
            raise PolicyError(f"memory.parked.max: {shown} is below one block ({size}); raise it or set 0")

    def to_json(self) -> dict[str, Any]:
        """The document under the custom resource's keys, sizes in bytes."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def default_floor_bytes(limit_bytes: int) -> int:
    """The floor where none is given: at least 512 MiB, 5 % of the limit."""
    return max(_SMALLEST_FLOOR_BYTES, limit_bytes // 20)


def default_parked_max_bytes(limit_bytes: int, reserved_bytes: int) -> int:
    """The RAM budget where none is given: half of what floor and headroom leave; the gate keeps it honest."""
    return max(0, (limit_bytes - reserved_bytes) // 2)


def parse_policy(source: str | bytes | Mapping[str, object], *, limit_bytes: int | None = None) -> Policy:
    """A policy from JSON text or a document; floor and parked.max are filled in where they are left out.

    ``limit_bytes`` is the pod's limit as it was found out, for the defaults and the checks; a document's own
    ``memory.limit`` counts where it is lower.

    Raises:
        PolicyError: one line that names the field.

    """
    document = _document(source)
    try:
        policy = Policy.model_validate(_with_defaults(document, limit_bytes))
    except ValidationError as error:
        raise PolicyError(_one_line(error)) from None
    if limit_bytes is not None:
        policy.check_limit(limit_bytes)
    return policy


def merge_documents(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """``over`` on top of ``base``, section by section; null takes a key away."""
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            merged[name] = merge_documents(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One replacement of the policy in force."""

    old: Policy
    new: Policy


class PolicyBox:
    """The policy in force; replaced whole, subscribers told in order."""

    def __init__(self, policy: Policy) -> None:
        self._current = policy
        self._replacing = threading.RLock()
        self._subscribers: list[Callable[[PolicyChange], None]] = []

    @property
    def current(self) -> Policy:
        return self._current

    def replace(self, new: Policy) -> PolicyChange:
        """Put ``new`` in force and tell every subscriber, on this thread, before returning.

        A subscriber that fails does not keep the others from being told; its error is raised afterwards.
        """
        with self._replacing:
            change = PolicyChange(self._current, new)
            self._current = new
            with contextlib.ExitStack() as told:
                for subscriber in reversed(self._subscribers):
                    told.callback(subscriber, change)
            return change

    def subscribe(self, subscriber: Callable[[PolicyChange], None]) -> Callable[[], None]:
        """Call ``subscriber`` on every later change; the result ends that."""
        with self._replacing:
            self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            with self._replacing, contextlib.suppress(ValueError):
                self._subscribers.remove(subscriber)

        return unsubscribe


def _check_against_limit(memory: MemoryPolicy, limit_bytes: int) -> None:
    reserved = memory.floor + memory.headroom
    limit = format_bytes(limit_bytes)
    if reserved >= limit_bytes:
        shown = f"{format_bytes(memory.floor)} + headroom {format_bytes(memory.headroom)}"
        raise ValueError(f"floor {shown} must be below the limit {limit}; lower the floor or raise the limit")
    if memory.parked.max >= limit_bytes:
        shown = format_bytes(memory.parked.max)
        raise ValueError(f"parked.max {shown} must be below the limit {limit}; lower it or raise the limit")


def _document(source: str | bytes | Mapping[str, object]) -> dict[str, object]:
    if isinstance(source, Mapping):
        return dict(source)
    try:
        document = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"the policy is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise PolicyError('the policy must be a JSON object such as {"memory": {"parked": {"max": "4Gi"}}}')
    return document


def _with_defaults(document: dict[str, object], limit_bytes: int | None) -> dict[str, object]:
    memory = document.get("memory", {})
    parked = memory.get("parked", {}) if isinstance(memory, Mapping) else None
    if not isinstance(memory, Mapping) or not isinstance(parked, Mapping):
        return document  # Validation says what is wrong with it.
    try:
        return document | {"memory": _memory_defaults(memory, parked, limit_bytes)}
    except ValueError:
        return document


def _memory_defaults(
    memory: Mapping[str, Any], parked: Mapping[str, Any], limit_bytes: int | None
) -> dict[str, object]:
    limits = [limit for limit in (limit_bytes, _size_or_none(memory.get("limit"))) if limit is not None]
    filled: dict[str, object] = {**memory, "parked": parked}
    if not limits:
        return filled
    limit = min(limits)
    filled["floor"] = floor = memory.get("floor", default_floor_bytes(limit))
    if "max" not in parked:
        reserved = parse_quantity(floor) + parse_quantity(memory.get("headroom", 0))
        filled["parked"] = {**parked, "max": default_parked_max_bytes(limit, reserved)}
    return filled


def _size_or_none(value: Any) -> int | None:
    return None if value is None else parse_quantity(value)


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "policy"
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        what = "there is no such key; check its spelling"
    elif first["type"] == "missing":
        what = "must be set"
    return " ".join(f"{where}: {what}".split())
