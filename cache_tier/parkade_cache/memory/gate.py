"""Whether bytes may be committed now, and what has to go first if not.

Why it exists: parking one conversation too many gets the pod killed; letting go of one too many costs a user a
re-read. Both mistakes come from deciding on a number that is stale, unknown or already promised to somebody else.

What must stay true: ``plan`` and ``plan_after_capture`` are pure. They look at one reading and say the next step;
the caller carries it out, notes it in the progress, takes a *new* reading and asks again. Unknown admits nothing
and evicts nothing (G2, G7); freed memory counts only once a reading shows it (G3); nothing is evicted for a
request that is going to be refused (G5, G8); every run of steps ends (G8).

Decisions are made one after the other on one thread. What a release frees therefore belongs to the request it was
made for until that request has been decided, and from its admission on it is held in ``Reservations`` (G15).
"""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NewType, Protocol, TypeVar

from parkade_cache.ids import ConversationId
from parkade_cache.memory.reading import Reading

ReservationId = NewType("ReservationId", int)


class NeedKind(enum.StrEnum):
    """What the memory is for. Refusals and overshoot are remembered per kind (G11, G12)."""

    PARK = "park"
    RESTORE = "restore"
    STAGING = "staging"
    RESIZE = "resize"
    """A lowered limit that is not in force yet: all of it or nothing, so that it can still be refused."""
    PRESSURE = "pressure"
    """The floor is already broken: let go of as much as helps, also where that is not enough."""


class RefusalReason(enum.StrEnum):
    """Why a request was not admitted."""

    UNKNOWN_READING = "unknown_reading"
    PARKING_OFF = "parking_off"
    OVER_BUDGET = "over_budget"
    """Larger than the whole parked budget: no eviction could help."""
    BUDGET = "budget"
    LOW_MEMORY = "low_memory"
    BACK_OFF = "back_off"
    """Not asked at all (G12); never the outcome of ``plan``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRequest:
    """One request for memory. All bytes are per pod: a rank's need times the ranks.

    ``need_bytes`` is what will be newly committed, margin included (G11); for a restore its own bytes (G13).
    ``parked_need_bytes`` and ``parked_conversations`` are what it adds to the parked budget. ``new_conversation``
    lets it ask during a back-off (G12).
    """

    kind: NeedKind
    need_bytes: int
    floor_bytes: int
    parked_need_bytes: int = 0
    parked_conversations: int = 0
    new_conversation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What is parked, what may be. ``parked_max_bytes`` 0 parks nothing (G14), ``max_conversations`` 0 is no limit."""

    parked_bytes: int
    parked_max_bytes: int
    conversations: int = 0
    max_conversations: int = 0


_GIVE_BACK: Final = frozenset({NeedKind.PRESSURE})
"""It adds nothing: for it the parked budget itself must hold, as after it was lowered. A lowered limit looks at memory
only, because the budget that comes with it is not in force yet.
"""

UNBOUNDED: Final = Budget(parked_bytes=0, parked_max_bytes=1 << 62)
"""For requests that add nothing to the parked budget."""


class Idle(Protocol):
    """What the victim order looks at (G6)."""

    @property
    def idle_seconds(self) -> float: ...

    @property
    def published(self) -> bool: ...


IdleT = TypeVar("IdleT", bound=Idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A parked conversation as the ledger knows it, evictable or not.

    ``extents`` are all extents in which it has blocks, shared ones included: an extent is empty only when nobody
    is left in it. ``busy`` covers requests in flight, restores and write jobs; ``incoming`` is the chain that the
    request itself extends or restores (G4, W5).
    """

    conversation: ConversationId
    extents: frozenset[int]
    idle_seconds: float
    published: bool
    pinned: bool = False
    busy: bool = False
    incoming: bool = False

    @property
    def evictable(self) -> bool:
        return not (self.pinned or self.busy or self.incoming)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A conversation that may go. ``freeable_bytes`` counts the extents that become wholly empty when this one
    goes after all listed before it (G4).

    ``helps`` is false where others that stay hold every extent it is in: letting it go frees nothing, now or later.
    """

    conversation: ConversationId
    freeable_bytes: int
    idle_seconds: float = 0.0
    published: bool = True
    helps: bool = True


Victims = Sequence[Victim] | Callable[[], Sequence[Victim]]
"""Victims in order, or what works them out when they are needed."""


def order_victims(candidates: Iterable[IdleT]) -> tuple[IdleT, ...]:
    """G6: least recently used first; but while that one is unwritten, a published one that has been idle at least
    half as long goes before it, because letting it go costs no write and loses nothing.
    """
    by_age = sorted(candidates, key=lambda candidate: -candidate.idle_seconds)
    published = [candidate for candidate in by_age if candidate.published]
    unwritten = [candidate for candidate in by_age if not candidate.published]
    ordered: list[IdleT] = []
    written_next = unwritten_next = 0
    while written_next < len(published) and unwritten_next < len(unwritten):
        if published[written_next].idle_seconds * 2 >= unwritten[unwritten_next].idle_seconds:
            ordered.append(published[written_next])
            written_next += 1
        else:
            ordered.append(unwritten[unwritten_next])
            unwritten_next += 1
    return (*ordered, *published[written_next:], *unwritten[unwritten_next:])


def order_cheapest_first(candidates: Iterable[IdleT]) -> tuple[IdleT, ...]:
    """Under pressure: published ones first, because they cost no write, then unwritten ones; each oldest first."""
    by_age = sorted(candidates, key=lambda candidate: -candidate.idle_seconds)
    return tuple(sorted(by_age, key=lambda candidate: not candidate.published))


def victims_of(
    candidates: Collection[Candidate],
    *,
    extent_bytes: int,
    held_extents: Collection[int] = frozenset(),
    cheapest_first: bool = False,
) -> tuple[Victim, ...]:
    """G4: what eviction may really take, in victim order (G6), as bytes of extents that become wholly empty.

    ``candidates`` must be all parked conversations: those that stay keep the extents they share. ``held_extents``
    are held by something that is not a conversation, such as a write in flight (G9).
    """
    order = order_cheapest_first if cheapest_first else order_victims
    leaving = order(candidate for candidate in candidates if candidate.evictable)
    kept = set(held_extents).union(*(one.extents for one in candidates if not one.evictable))
    users = Counter(extent for candidate in leaving for extent in candidate.extents - kept)
    return tuple(_victim(candidate, candidate.extents - kept, users, extent_bytes) for candidate in leaving)


def _victim(candidate: Candidate, going: frozenset[int], users: Counter[int], extent_bytes: int) -> Victim:
    """The next victim in order; takes it out of ``users``, which counts who is left in each extent."""
    users.subtract(going)
    return Victim(
        conversation=candidate.conversation,
        freeable_bytes=extent_bytes * sum(1 for extent in going if users[extent] == 0),
        idle_seconds=candidate.idle_seconds,
        published=candidate.published,
        helps=bool(going),
    )


@dataclass(frozen=True, slots=True)
class Admit:
    """Commit the bytes; until then they are reserved (G15). For pressure: the floor holds again."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not commit; stream to disk instead (G14). ``missing_bytes`` and ``evictable_bytes`` are for the receipt."""

    reason: RefusalReason
    missing_bytes: int = 0
    evictable_bytes: int = 0


class ReleaseScope(enum.StrEnum):
    """What a release asks to be given back."""

    EVERYTHING = "everything"
    """Empty extents and the heap of every process of the pod: once a decision, because it costs milliseconds."""
    EXTENTS = "extents"
    """Only extents that have become empty: all that an eviction or a finished write frees."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give freed memory back to the kernel, so that the next reading shows it (G3)."""

    scope: ReleaseScope

    @property
    def first(self) -> bool:
        """Whether it is the one release of a decision that asks the heaps as well."""
        return self.scope is ReleaseScope.EVERYTHING


@dataclass(frozen=True, slots=True)
class Evict:
    """Let this conversation go, after its write-out (W1)."""

    conversation: ConversationId


@dataclass(frozen=True, slots=True)
class AwaitWrites:
    """Wait, within the caller's deadline (W3), until writes in flight let go of the memory they hold (G9)."""

    held_bytes: int


@dataclass(frozen=True, slots=True)
class HandToDisk:
    """G10: the fresh conversation cannot stay in RAM; write it out, then let it go. ``reason`` is stated."""

    conversation: ConversationId
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Drop:
    """G10: as ``HandToDisk`` where no disk can take it. A decision that is counted and stated, never silent."""

    conversation: ConversationId
    reason: RefusalReason


GateStep = Admit | Refuse | Release | Evict | AwaitWrites
CaptureStep = GateStep | HandToDisk | Drop


@dataclass(frozen=True, slots=True)
class GateProgress:
    """What has been done for one request so far; a value that the caller advances with ``after``.

    ``writes_in_flight_bytes`` is memory that writes hold beyond the conversations they belong to (G9). It is
    renewed with every step.
    """

    writes_in_flight_bytes: int = 0
    releases: int = 0
    everything_released: bool = False
    release_due: bool = False
    evicted: tuple[ConversationId, ...] = ()
    passed_over: tuple[ConversationId, ...] = ()
    waits: int = 0
    wait_allowed: bool = True
    fresh_gone: bool = False

    def after(self, step: CaptureStep, *, writes_in_flight_bytes: int | None = None) -> GateProgress:
        """The progress once ``step`` has been carried out; ``None`` means the writes in flight are as before."""
        held_bytes = self.writes_in_flight_bytes if writes_in_flight_bytes is None else writes_in_flight_bytes
        renewed = replace(self, writes_in_flight_bytes=held_bytes)
        match step:
            case Release(scope):
                everything = self.everything_released or scope is ReleaseScope.EVERYTHING
                return replace(renewed, releases=self.releases + 1, everything_released=everything, release_due=False)
            case Evict(conversation):
                return replace(renewed, evicted=(*self.evicted, conversation), release_due=True, wait_allowed=True)
            case AwaitWrites():
                return replace(renewed, waits=self.waits + 1, wait_allowed=False, release_due=True)
            case HandToDisk() | Drop():
                return replace(renewed, fresh_gone=True, release_due=True, wait_allowed=True)
            case _:
                return renewed

    def passing_over(self, step: Evict) -> GateProgress:
        """The progress when the conversation turned out to be busy between plan and eviction (case 55)."""
        return replace(self, passed_over=(*self.passed_over, step.conversation))

    @property
    def settled_with(self) -> frozenset[ConversationId]:
        """Conversations that are not asked for again: the loop takes each at most once (G8)."""
        return frozenset((*self.evicted, *self.passed_over))


NOTHING_DONE: Final = GateProgress()


@dataclass(frozen=True, slots=True)
class _Shortage:
    """What is missing at one reading, in memory and in the parked budget together (G8)."""

    memory_bytes: int
    parked_bytes: int
    conversations: int

    @property
    def nothing(self) -> bool:
        return self.memory_bytes <= 0 and self.parked_bytes <= 0 and self.conversations <= 0

    @property
    def missing_bytes(self) -> int:
        return max(0, self.memory_bytes, self.parked_bytes)

    @property
    def reason(self) -> RefusalReason:
        return RefusalReason.LOW_MEMORY if self.memory_bytes > 0 else RefusalReason.BUDGET

    def beyond(self, victims: Sequence[Victim]) -> _Shortage:
        """What would still be missing with all of ``victims`` gone (G5)."""
        evictable_bytes = _evictable_bytes(victims)
        return _Shortage(
            self.memory_bytes - evictable_bytes, self.parked_bytes - evictable_bytes, self.conversations - len(victims)
        )


def plan(
    request: GateRequest,
    *,
    reading: Reading,
    reserved_bytes: int,
    budget: Budget,
    victims: Victims,
    progress: GateProgress = NOTHING_DONE,
) -> GateStep:
    """The next step for ``request`` (G1-G9, G13-G15). Pure.

    ``reading`` must be newer than the last step, and ``reserved_bytes`` no newer than the reading
    (``Reservations.total_bytes`` read first), so that bytes committed in between count twice rather than never.
    ``victims`` are those that remain, in order, or how to get them: working them out is only needed where something
    has to go. Ones already evicted are ignored.
    """
    impossible = _impossible(request, budget)
    if impossible is not None:
        return impossible
    if reading.available_bytes is None:
        return Refuse(RefusalReason.UNKNOWN_READING)
    shortage = _shortage(request, _free_bytes(reading) - reserved_bytes, budget)
    return _step(shortage, victims, progress, take_all=request.kind is NeedKind.PRESSURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A conversation just captured, the *fresh* one. ``parked_bytes`` is what it really takes of the parked budget,
    ``disk_takes_it`` whether a disk tier can accept it.
    """

    conversation: ConversationId
    parked_bytes: int
    floor_bytes: int
    disk_takes_it: bool


def plan_after_capture(
    fresh: Capture,
    *,
    reading: Reading,
    reserved_bytes: int,
    budget: Budget,
    others: Victims,
    progress: GateProgress = NOTHING_DONE,
) -> CaptureStep:
    """The next step once ``fresh`` is in RAM and in ``budget``: do floor and budget still hold (G10, G11)? Pure.

    Short means a release and a new reading, then the oldest of the ``others``, and only where those do not
    suffice the fresh one itself, to disk. Others that cannot suffice stay until the fresh one is gone: taking them
    first would help nobody (G5). One that is larger than the whole budget evicts nobody (case 28). Unknown evicts
    nothing and hands the fresh one over (case 27). Where no disk takes it, it is dropped as a stated decision.
    ``Refuse`` ends it with the floor still broken and nothing left to take.
    """
    if fresh.parked_bytes > budget.parked_max_bytes and not progress.fresh_gone:
        return _part_with(fresh, RefusalReason.OVER_BUDGET)
    if reading.available_bytes is None:
        unknown = RefusalReason.UNKNOWN_READING
        return Refuse(unknown) if progress.fresh_gone else _part_with(fresh, unknown)
    shortage = _shortage_after_capture(fresh.floor_bytes, _free_bytes(reading) - reserved_bytes, budget)
    others_only = progress.passing_over(Evict(fresh.conversation))
    step = _step(shortage, others, others_only, take_all=progress.fresh_gone)
    if isinstance(step, Refuse) and not progress.fresh_gone:
        return _part_with(fresh, step.reason)
    return step


def _part_with(fresh: Capture, reason: RefusalReason) -> HandToDisk | Drop:
    return HandToDisk(fresh.conversation, reason) if fresh.disk_takes_it else Drop(fresh.conversation, reason)


def _free_bytes(reading: Reading) -> int:
    """What is available; below zero where more is in use than the limit allows, as under one that is not in force yet.

    A reading's room ends at zero (M7). What is missing does not: taking it for less would let conversations go for a
    request that is refused in the end (G5).
    """
    available_bytes = reading.available_bytes or 0
    if available_bytes or reading.limit_bytes is None or reading.current_bytes is None:
        return available_bytes
    return min(0, reading.limit_bytes - (reading.current_bytes - reading.credit_bytes))


def _impossible(request: GateRequest, budget: Budget) -> Refuse | None:
    """Refusals that no reading could change, so that nothing is released or read for them."""
    if request.parked_need_bytes <= 0:
        return None
    if budget.parked_max_bytes == 0:
        return Refuse(RefusalReason.PARKING_OFF, missing_bytes=request.parked_need_bytes)
    if request.parked_need_bytes > budget.parked_max_bytes:
        missing_bytes = request.parked_need_bytes - budget.parked_max_bytes
        return Refuse(RefusalReason.OVER_BUDGET, missing_bytes=missing_bytes)
    return None


def _shortage(request: GateRequest, free_bytes: int, budget: Budget) -> _Shortage:
    gives_back = request.kind in _GIVE_BACK
    adds_parked = request.parked_need_bytes > 0 or gives_back
    counted = budget.max_conversations > 0 and (request.parked_conversations > 0 or gives_back)
    return _Shortage(
        memory_bytes=request.need_bytes + request.floor_bytes - free_bytes,
        parked_bytes=budget.parked_bytes + request.parked_need_bytes - budget.parked_max_bytes if adds_parked else 0,
        conversations=budget.conversations + request.parked_conversations - budget.max_conversations if counted else 0,
    )


def _shortage_after_capture(floor_bytes: int, free_bytes: int, budget: Budget) -> _Shortage:
    """As ``_shortage``, with the captured bytes already in the reading and in the budget."""
    counted = budget.max_conversations > 0
    return _Shortage(
        memory_bytes=floor_bytes - free_bytes,
        parked_bytes=budget.parked_bytes - budget.parked_max_bytes,
        conversations=budget.conversations - budget.max_conversations if counted else 0,
    )


def _remaining(victims: Victims, progress: GateProgress) -> tuple[Victim, ...]:
    gone = progress.settled_with
    listed = victims() if callable(victims) else victims
    return tuple(victim for victim in listed if victim.conversation not in gone)


def _evictable_bytes(victims: Sequence[Victim]) -> int:
    return sum(victim.freeable_bytes for victim in victims)


def _step(shortage: _Shortage, victims: Victims, progress: GateProgress, *, take_all: bool) -> GateStep:
    """The ladder: fits, release, wait for writes, refuse, evict. Each rung is tried before the next costs anything."""
    if shortage.nothing:
        return Admit()
    if shortage.memory_bytes > 0 and not progress.everything_released:
        return Release(ReleaseScope.EVERYTHING)
    if progress.release_due:
        return Release(ReleaseScope.EXTENTS)
    if progress.wait_allowed and progress.writes_in_flight_bytes > 0 and shortage.missing_bytes > 0:
        return AwaitWrites(held_bytes=progress.writes_in_flight_bytes)
    remaining = _remaining(victims, progress)
    useful = remaining if shortage.conversations > 0 else tuple(victim for victim in remaining if victim.helps)
    beyond = shortage.beyond(useful)
    if useful and (beyond.nothing or (take_all and _evictable_bytes(useful) > 0)):
        return Evict(useful[0].conversation)
    return Refuse(beyond.reason, shortage.missing_bytes, _evictable_bytes(useful))


class Reservations:
    """Bytes admitted and not yet committed (G15). Thread-safe: committers report from their own threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[ReservationId, int] = {}
        self._last = 0

    def reserve(self, nbytes: int) -> ReservationId:
        """Hold ``nbytes`` for a request that has just been admitted."""
        with self._lock:
            self._last += 1
            reservation = ReservationId(self._last)
            self._open[reservation] = nbytes
            return reservation

    def committed(self, reservation: ReservationId, nbytes: int) -> None:
        """``nbytes`` of it are committed: the next reading shows them, so they are no longer held here."""
        with self._lock:
            if reservation in self._open:
                self._open[reservation] = max(0, self._open[reservation] - nbytes)

    def close(self, reservation: ReservationId) -> None:
        """The request has committed all it will, or has given up. Closing twice is harmless."""
        with self._lock:
            self._open.pop(reservation, None)

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return sum(self._open.values())

    def read(self, sample: Callable[[], Reading]) -> tuple[Reading, int]:
        """A reading and the bytes that come off it, in the only safe order: reservations first.

        Bytes committed in between are then counted twice, which refuses for a moment; the other way round they
        would be counted nowhere, and be spent twice.
        """
        reserved_bytes = self.total_bytes
        return sample(), reserved_bytes


_MARGIN_CEILING: Final = 1.0
"""A learnt margin never more than doubles a need: one absurd measurement must not close the gate for good."""

_MARGIN_DECAY: Final = 0.9
"""What is kept of the margin each time an estimate held: about twenty good estimates forget a bad one."""


class Margin:
    """G11: how much more than estimated a kind of need really took. Rises at once, falls slowly."""

    def __init__(self) -> None:
        self._overshoot: dict[NeedKind, float] = {}

    def observe(self, kind: NeedKind, *, estimate_bytes: int, actual_bytes: int) -> None:
        """Learn from one commitment; ``actual_bytes`` is what the readings before and after say it took."""
        if estimate_bytes <= 0:
            return
        measured = max(0.0, actual_bytes / estimate_bytes - 1.0)
        kept = self._overshoot.get(kind, 0.0) * _MARGIN_DECAY
        self._overshoot[kind] = min(_MARGIN_CEILING, max(measured, kept))

    def apply(self, kind: NeedKind, need_bytes: int) -> int:
        """The need with its margin. A restore knows its own bytes and is priced with them (G13)."""
        if kind is NeedKind.RESTORE:
            return need_bytes
        return need_bytes + math.ceil(need_bytes * self._overshoot.get(kind, 0.0))

    def ratio(self, kind: NeedKind) -> float:
        """The learnt overshoot, 0.0 to 1.0."""
        return self._overshoot.get(kind, 0.0)


REFUSALS_BEFORE_BACK_OFF: Final = 3
ATTEMPTS_SKIPPED: Final = 64


class BackOff:
    """G12: after three refusals in a row of one kind, the next 64 attempts are not asked for RAM at all.

    It only ever skips the attempt at RAM, never the disk (G14). When the 64 are over one attempt asks; if that is
    refused as well, it is still a refusal in a row and the next 64 are skipped.
    """

    def __init__(self) -> None:
        self._refusals: dict[NeedKind, int] = {}
        self._to_skip: dict[NeedKind, int] = {}
        self._limits: object = None

    def should_ask(self, kind: NeedKind, *, new_conversation: bool = False) -> bool:
        """Whether an estimate is worth paying; ``False`` uses up one of the skipped attempts."""
        left = self._to_skip.get(kind, 0)
        if left == 0 or new_conversation:
            return True
        self._to_skip[kind] = left - 1
        return False

    def refused(self, kind: NeedKind) -> None:
        self._refusals[kind] = self._refusals.get(kind, 0) + 1
        if self._refusals[kind] >= REFUSALS_BEFORE_BACK_OFF and self._to_skip.get(kind, 0) == 0:
            self._to_skip[kind] = ATTEMPTS_SKIPPED

    def succeeded(self, kind: NeedKind) -> None:
        self._refusals.pop(kind, None)
        self._to_skip.pop(kind, None)

    def limits_are(self, limits: object) -> None:
        """Tell the limits in force, as any comparable value; a change forgets all refusals.

        Configured limits and ``MemorySampler.limits_bytes()``, not the limit of whichever term bound the last reading.
        """
        if limits != self._limits:
            self._limits = limits
            self._refusals.clear()
            self._to_skip.clear()


class GateHost(Protocol):
    """Carries steps out. Methods may block; the ledger's lock must not be held."""

    def read(self) -> tuple[Reading, int]:
        """A new reading and the reserved bytes that come off it, in ``Reservations.read``'s order."""

    def budget(self) -> Budget: ...

    def victims(self) -> Sequence[Victim]:
        """Those that may go, in order; only asked for where something has to go.

        The list may be kept for a whole decision, because evicted ones are ignored, but must be made anew once
        ``evict`` has answered ``False``: what the later ones free has changed.
        """

    def release(self, step: Release) -> int:
        """Bytes given back to the kernel."""

    def evict(self, conversation: ConversationId) -> bool:
        """``False`` when it turned out to be busy and stays."""

    def await_writes(self, step: AwaitWrites) -> None: ...

    def writes_in_flight_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    """How one request ended, with what its receipt needs (G11)."""

    request: GateRequest
    outcome: Admit | Refuse
    before: Reading
    after: Reading
    progress: GateProgress
    released_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def admitted(self) -> bool:
        return isinstance(self.outcome, Admit)

    @property
    def reason(self) -> str:
        return self.outcome.reason.value if isinstance(self.outcome, Refuse) else ""


def decide(request: GateRequest, host: GateHost) -> GateDecision:
    """Drive ``plan`` to its end against a host: one step, one new reading, again.

    Whoever is admitted must reserve its bytes before the next decision is made (G15).
    """
    progress = GateProgress(writes_in_flight_bytes=host.writes_in_flight_bytes())
    before: Reading | None = None
    released_bytes = 0
    while True:
        reading, reserved_bytes = host.read()
        before = before or reading
        step = plan(
            request,
            reading=reading,
            reserved_bytes=reserved_bytes,
            budget=host.budget(),
            victims=host.victims,
            progress=progress,
        )
        if isinstance(step, Admit | Refuse):
            return GateDecision(
                request=request,
                outcome=step,
                before=before,
                after=reading,
                progress=progress,
                released_bytes=released_bytes,
                reserved_bytes=reserved_bytes,
            )
        progress, given_back = _carry_out(step, host, progress)
        released_bytes += given_back


def _carry_out(step: Release | Evict | AwaitWrites, host: GateHost, progress: GateProgress) -> tuple[GateProgress, int]:
    """The progress after the step, and the bytes it gave back to the kernel."""
    given_back = 0
    match step:
        case Release():
            given_back = host.release(step)
        case AwaitWrites():
            host.await_writes(step)
        case Evict(conversation):
            if not host.evict(conversation):
                return progress.passing_over(step), 0
    return progress.after(step, writes_in_flight_bytes=host.writes_in_flight_bytes()), given_back
