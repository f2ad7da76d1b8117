"""Deleting from and cleaning a spill directory that no living pod has: first a plan, then exactly that.

Plans are values made from a survey. Carrying one out needs the directory's lock, and goes through the index, the shelf
and the recovery that a pod uses, in their order: dead marks are on the device before space is given back, so that a
crash between any two steps leaves nothing of what went to be found again (D3, D6). What must stay true: a block that a
kept conversation needs never goes, in whosever pack it lies; links and other users' files are left alone (D5); the lock
file, the counts of generations, the id key and the receipts stay.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parkade_cache.errors import SpillError, UnsafePathError
from parkade_cache.ids import PackId
from parkade_cache.spill import layout
from parkade_cache.spill.clock import Clock
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.holdings import PackView
from parkade_cache.spill.index import SpillIndex
from parkade_cache.spill.inspection import (
    IdentitySurvey,
    IndexState,
    LeftFile,
    LostPack,
    PackFate,
    ReadOnlyFileSystem,
    Standing,
    Survey,
    require_spill_directory,
)
from parkade_cache.spill.layout import IdentityFolder
from parkade_cache.spill.lock import DirectoryLock
from parkade_cache.spill.quarantine import Quarantine
from parkade_cache.spill.recovery import PackBook, Recovery, RecoveryReport
from parkade_cache.spill.shelf import PackShelf


class StepKind(enum.StrEnum):
    """What a step takes away."""

    IDENTITY = "identity"
    CONVERSATION = "conversation"
    PACK = "pack"
    DEAD_SPACE = "dead_space"
    TEMPORARY = "temporary"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do. ``name`` is what goes, ``nbytes`` what that brings back, ``kept_blocks`` what others still need.

    ``drops`` are blocks to let go, by pack; ``packs`` go whole, or give their dead space back; ``path`` is a file.
    """

    kind: StepKind
    name: str
    why: str
    nbytes: int
    identity: str = ""
    conversation: str | None = None
    blocks: int = 0
    kept_blocks: int = 0
    drops: tuple[tuple[PackId, tuple[int, ...]], ...] = ()
    packs: tuple[PackId, ...] = ()
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done in a directory; ``unknown`` are names that were asked for and are not there."""

    root: Path
    steps: tuple[Step, ...]
    unknown: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """What all steps together bring back."""
        return sum(step.nbytes for step in self.steps)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done: bytes that came back on disk, and what was left alone, each with the reason."""

    nbytes: int
    left_alone: tuple[str, ...]


# -- plans -------------------------------------------------------------------------------------------------------------


def plan_conversations(survey: Survey, conversations: Sequence[str]) -> Plan:
    """Delete these conversations wherever they are: under every identity, and from what was set aside or left over.

    SpillError when an index could not be looked at.
    """
    _require_indexes(survey)
    wanted = tuple(dict.fromkeys(conversations))
    steps = [step for identity in survey.identities for step in _forget(identity, wanted)]
    steps += [_quarantined(file) for file in survey.quarantine if file.conversation in wanted]
    found = {step.conversation for step in steps}
    return Plan(survey.root, tuple(steps), tuple(name for name in wanted if name not in found))


def plan_identity(survey: Survey, fingerprint: str) -> Plan:
    """Delete everything of one identity."""
    steps = [_whole(one) for one in survey.identities if one.fingerprint == fingerprint]
    unknown = () if steps else (fingerprint,)
    steps += [_quarantined(file) for file in survey.quarantine if file.path.stem.endswith(f"-{fingerprint}")]
    return Plan(survey.root, tuple(steps), unknown)


def plan_all(survey: Survey) -> Plan:
    """Delete all conversations of all identities, and what was set aside."""
    steps = [_whole(one) for one in survey.identities]
    return Plan(survey.root, (*steps, *map(_quarantined, survey.quarantine)))


def plan_cleaning(survey: Survey, *, keep: Sequence[str] = ()) -> Plan:
    """Remove what no start will serve, and other identities than the own and those in ``keep``.

    SpillError when an index could not be looked at.
    """
    _require_indexes(survey)
    known = {one.fingerprint for one in survey.identities}
    steps: list[Step] = []
    for one in survey.identities:
        if one.standing is Standing.OWN or one.fingerprint in keep:
            steps += _clean(one)
        else:
            steps.append(_whole(one))
    unknown = tuple(fingerprint for fingerprint in keep if fingerprint not in known)
    return Plan(survey.root, (*steps, *map(_quarantined, survey.quarantine)), unknown)


def _require_indexes(survey: Survey) -> None:
    for one in survey.identities:
        if one.index is IndexState.NOT_COPIED:
            raise SpillError(errno.EIO, f"the index of identity {one.fingerprint} cannot be read: {one.index_reason}")


def _forget(survey: IdentitySurvey, conversations: Sequence[str]) -> Iterator[Step]:
    """What goes of one identity, a step a conversation; what several of them share goes with the first."""
    packs = {pack.pack_id: pack for pack in survey.packs}
    living = {pack_id: sum(1 for _ in pack.living()) for pack_id, pack in packs.items()}
    holdings = survey.holdings
    for name, keys in holdings.only_of(conversations).items():
        if name not in holdings.conversations:
            continue
        drops: dict[PackId, list[int]] = {}
        for place in (place for key in keys for place in holdings.places[key]):
            drops.setdefault(place.pack_id, []).append(place.entry)
        yield Step(
            kind=StepKind.CONVERSATION,
            name=name,
            why="",
            nbytes=sum(_freed(packs[pack_id], entries, living) for pack_id, entries in drops.items()),
            identity=survey.fingerprint,
            conversation=name,
            blocks=len(keys),
            kept_blocks=len(holdings.conversations[name].keys) - len(keys),
            drops=tuple((pack_id, tuple(sorted(entries))) for pack_id, entries in sorted(drops.items())),
        )
    yield from (_lost(survey, pack) for pack in survey.lost if pack.conversation in conversations)
    yield from (_temporary(survey, file) for file in survey.temporaries if file.conversation in conversations)


def _freed(pack: PackView, entries: Sequence[int], living: dict[PackId, int]) -> int:
    """What letting blocks of a pack go brings back; with its last block the rest of its files goes."""
    living[pack.pack_id] -= len(entries)
    if living[pack.pack_id]:
        return pack.bytes_of(entries)
    return pack.bytes_of(entries) + pack.owed_bytes + pack.rest_bytes


def _clean(survey: IdentitySurvey) -> Iterator[Step]:
    yield from (_lost(survey, pack) for pack in survey.lost if pack.fate in _NEVER_SERVED)
    owing = [pack for pack in survey.packs if pack.indexed and pack.owed]
    if owing:
        yield Step(
            kind=StepKind.DEAD_SPACE,
            name=f"{len(owing)} packs",
            why="blocks that no lookup finds any more",
            nbytes=sum(pack.owed_bytes for pack in owing),
            identity=survey.fingerprint,
            blocks=sum(len(pack.owed) for pack in owing),
            packs=tuple(pack.pack_id for pack in owing),
        )
    yield from (_temporary(survey, file) for file in survey.temporaries)


_NEVER_SERVED = frozenset({PackFate.INCOMPLETE, PackFate.MISSING, PackFate.DAMAGED, PackFate.EMPTY})


def _whole(survey: IdentitySurvey) -> Step:
    model = survey.identity.model if survey.identity is not None else "not described"
    return Step(
        kind=StepKind.IDENTITY,
        name=survey.fingerprint,
        why=f"{survey.standing}, {model}",
        nbytes=survey.disk_bytes,
        identity=survey.fingerprint,
        blocks=len(survey.holdings.places),
    )


def _lost(survey: IdentitySurvey, pack: LostPack) -> Step:
    return Step(
        kind=StepKind.PACK,
        name=pack.pack_id,
        why=pack.reason,
        nbytes=pack.disk_bytes,
        identity=survey.fingerprint,
        conversation=pack.conversation,
        packs=(pack.pack_id,),
    )


def _temporary(survey: IdentitySurvey, file: LeftFile) -> Step:
    return Step(
        kind=StepKind.TEMPORARY,
        name=file.path.name,
        why="unfinished",
        nbytes=file.nbytes,
        identity=survey.fingerprint,
        conversation=file.conversation,
        path=file.path,
    )


def _quarantined(file: LeftFile) -> Step:
    return Step(
        kind=StepKind.QUARANTINED,
        name=file.path.name,
        why="damaged",
        nbytes=file.nbytes,
        conversation=file.conversation,
        path=file.path,
    )


# -- carrying out ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(root: Path, *, fs: FileSystem | None = None, clock: Clock | None = None) -> Iterator[None]:
    """Have the directory to oneself.

    DirectoryInUseError, naming who has it, when a pod does; SpillError when it is no spill directory.
    """
    fs = fs or FileSystem()
    require_spill_directory(ReadOnlyFileSystem(), root)
    try:
        lock = DirectoryLock.acquire(fs, clock or Clock(), root)
    except OSError as error:
        layout.raise_spill_error(error, f"locking spill directory {root}")
    try:
        yield
    finally:
        lock.release()


def carry_out(plan: Plan, survey: Survey, *, fs: FileSystem | None = None) -> Outcome:
    """Do all of ``plan``, made from ``survey``, both made under the lock that the caller holds.

    SpillError when the device fails: what was done until then is done, and the rest can be planned again.
    """
    fs = fs or FileSystem()
    try:
        before = _bytes_in(fs, plan.root)
        left_alone = [
            reason
            for one in survey.identities
            for reason in _in_identity(fs, one, plan.root, [s for s in plan.steps if s.identity == one.fingerprint])
        ]
        left_alone += [reason for step in plan.steps if not step.identity for reason in _remove_file(fs, step)]
        return Outcome(max(0, before - _bytes_in(fs, plan.root)), tuple(left_alone))
    except OSError as error:
        layout.raise_spill_error(error, f"cleaning spill directory {plan.root}, a part of which may be done")


def _bytes_in(fs: FileSystem, root: Path) -> int:
    return sum(layout.tree_bytes(fs, root / name) for name in fs.names(root))


def _in_identity(fs: FileSystem, survey: IdentitySurvey, root: Path, steps: Sequence[Step]) -> Iterator[str]:
    """Do the steps in one identity's folder; what was left alone."""
    folder = IdentityFolder(root, survey.fingerprint)
    if any(step.kind is StepKind.IDENTITY for step in steps):
        yield from _remove_identity(fs, folder)
    elif steps:
        try:
            with contextlib.closing(_Identity(fs, folder, survey)) as identity:
                for step in steps:
                    yield from identity.do(step)
        except UnsafePathError as error:
            yield str(error)


def _remove_identity(fs: FileSystem, folder: IdentityFolder) -> Iterator[str]:
    layout.remove_tree(fs, folder.path)
    fs.flush_folder(folder.path.parent)
    if folder.path.exists():
        yield f"not all of {folder.path} could be removed: it holds links or another user's files"


def _remove_file(fs: FileSystem, step: Step) -> Iterator[str]:
    if step.path is None:
        return
    try:
        layout.remove_file(fs, step.path)
        fs.flush_folder(step.path.parent)
    except UnsafePathError as error:
        yield str(error)


class _Identity:
    """One identity's index and packs, opened to be changed."""

    def __init__(self, fs: FileSystem, folder: IdentityFolder, survey: IdentitySurvey) -> None:
        self._fs = fs
        self._index = SpillIndex.open(fs, folder.index, identity=folder.fingerprint)
        if survey.index is IndexState.DAMAGED and not self._index.empty_because:
            # Damaged somewhere inside: what was planned was read from the packs, and so will be what is done.
            self._index.reset(because=survey.index_reason)
        self._shelf = PackShelf(fs, folder, ranks=survey.ranks)
        self._recovery = Recovery(
            index=self._index,
            shelf=self._shelf,
            quarantine=Quarantine(fs, folder.root, capacity_bytes=sys.maxsize),
            book=PackBook(),
            report=RecoveryReport(),
        )

    def close(self) -> None:
        self._index.close()

    def do(self, step: Step) -> Iterator[str]:
        """One step; what was left alone."""
        try:
            if step.drops:
                self._drop(dict(step.drops))
            elif step.kind is StepKind.DEAD_SPACE:
                # Marks may be seen and not be on the device yet: their process was killed in between.
                self._index.flush()
                for pack_id in step.packs:
                    self._recovery.return_space(pack_id)
            elif step.kind is StepKind.PACK:
                for pack_id in step.packs:
                    self._shelf.remove(pack_id)
                    self._shelf.flush_names(pack_id)
                    self._index.delete(pack_id)
        except UnsafePathError as error:
            yield str(error)
        if step.kind is StepKind.TEMPORARY:
            yield from _remove_file(self._fs, step)

    def _drop(self, drops: dict[PackId, tuple[int, ...]]) -> None:
        """Marked dead on the device in one go, then the space returned, as ``SpillStore.drop_many`` does."""
        for pack_id in drops:
            # A pack without a row, or with a damaged one, gets one first: only a row can say that a block is dead.
            if self._recovery.load(pack_id) is None:
                self._recovery.adopt(pack_id)
        self._index.mark_dead({pack_id: entries for pack_id, entries in drops.items() if self._index.has(pack_id)})
        for pack_id in drops:
            self._recovery.return_space(pack_id)
