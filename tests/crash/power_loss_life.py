"""Lives of a spill store that end in a power cut, and what must be true when the power comes back.

``Life`` uses a real store as owner and movers do, over a recording file system, and keeps a ``Truth`` of what it was
told. ``run_share`` makes up states of the disk at random moments of such lives (``support.power_loss``), opens each
with a new store and checks it against the truth. Everything follows from a seed, so that ``run_one`` shows a state
again.
"""

from __future__ import annotations

import enum
import logging
import random
import shutil
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from support.power_loss import DiskState, Journal, RecordingFileSystem

from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, PackId
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.generation import GenerationLife
from parkade_cache.spill.outcome import Reservation
from parkade_cache.spill.pack import PackHeader, PackInfo, pack_file_bytes
from parkade_cache.spill.pack_writer import PackBlock, PackWriter
from parkade_cache.spill.store import SpillConfig, SpillStore
from parkade_cache.spill.testing import FakeClock, SimulatedCrash, read_back, some_identity, some_key, some_payload

RECORDINGS = 100
"""Lives that the states are taken from; every second one goes on from a disk that the power cut of another left."""

STEPS = 20
"""What one life does: so many writes, drops, restarts and the like."""

SHARDS = 3
"""Folders that packs are spread over, so that a state is made quickly."""

IDENTITY = some_identity()
CONVERSATIONS = ("alpha", "beta", "gamma", "delta")


class ViolationError(AssertionError):
    """A power cut would have lost something, or shown something wrong."""


# -- what must be true ---------------------------------------------------------------------------------------


class Fate(enum.StrEnum):
    """What may become of a block when the power goes."""

    MUST = "must be found"
    MAY = "may be found"
    DEAD = "marked dead: not found while the index is there"
    NEVER = "never found again"


@dataclass(frozen=True, slots=True)
class Block:
    """A block's name, and the identity in force when it was written."""

    identity: str
    name: str

    def payload(self, rank: int) -> bytes:
        """New weights give the same block other bytes."""
        return some_payload(f"{self.name}@{self.identity}", rank=rank, nbytes=self.nbytes)

    @property
    def nbytes(self) -> int:
        return 300 + 700 * (sum(self.name.encode()) % 11)


@dataclass(slots=True)
class _Course:
    positions: list[int] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)


@dataclass
class Truth:
    """What the store has promised, by position in the journal."""

    restarts: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """From which position on the next start may find itself in which identities."""
    index_lost_from: int | None = None
    dropped: set[Block] = field(default_factory=set)
    """Blocks whose space was ever given back, or may have been."""
    quarantined: set[Block] = field(default_factory=set)
    _courses: dict[Block, _Course] = field(default_factory=dict)

    def tell(self, block: Block, fate: Fate, position: int) -> None:
        course = self._courses.setdefault(block, _Course())
        course.positions.append(position)
        course.fates.append(fate)

    def fate(self, block: Block, cut: int) -> Fate | None:
        """None for a block that nobody had begun to write."""
        course = self._courses.get(block)
        if course is None:
            return None
        at = bisect_right(course.positions, cut)
        return course.fates[at - 1] if at else None

    def with_fate(self, fate: Fate, identity: str, cut: int) -> set[Block]:
        return {block for block in self._courses if block.identity == identity and self.fate(block, cut) is fate}

    def identities(self, cut: int) -> frozenset[str]:
        return self.restarts[bisect_right([position for position, _ in self.restarts], cut) - 1][1]

    def index_lost(self, cut: int) -> bool:
        return self.index_lost_from is not None and self.index_lost_from < cut

    def excuses(self, block: Block, cut: int) -> bool:
        """Whether the block may have a hole in it: its dead mark is lost, with the index or with its pack's row."""
        return block in self.dropped and (self.index_lost(cut) or block in self.quarantined)

    def carried(self, cut: int, state: DiskState) -> Truth:
        """What still holds for a life that goes on from such a state."""
        lost = state.index_lost or self.index_lost(cut)
        after = Truth(
            restarts=[(0, self.identities(cut))],
            index_lost_from=-1 if lost else None,
            dropped=set(self.dropped),
            quarantined=set(self.quarantined),
        )
        for block in self._courses:
            fate = self.fate(block, cut)
            if fate is not None:
                after.tell(block, Fate.MAY if lost and fate is Fate.DEAD else fate, 0)
        return after


# -- a life --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pack:
    pack_id: PackId
    blocks: list[Block]
    dead: set[int] = field(default_factory=set)

    def live(self) -> list[int]:
        return [n for n in range(len(self.blocks)) if n not in self.dead]


@dataclass(frozen=True, slots=True)
class Faults:
    """What code that gets it wrong would do."""

    skips: frozenset[str] = frozenset()
    """Operations of the file system that are left out."""


class Life:
    """One or more processes that use a spill directory one after the other, until the power goes."""

    def __init__(self, base: Path, truth: Truth, *, name: str, ranks: int, faults: Faults) -> None:
        self.truth = truth
        self.journal = Journal(base)
        self.store: SpillStore
        self._name = name
        self._root = base / "volume" / "spill"
        self._chance = random.Random(name)
        self._ranks = ranks
        self._faults = faults
        self._clock = FakeClock(1_700_000_000.0 + 1000 * len(name))
        self._log_pages = self._chance.choice((4, 20, 200))
        self._fs = self._new_file_system()
        self._packs: list[_Pack] = []
        self._blocks = 0
        self._chains: dict[str, str] = {}

    def run(self, steps: int = STEPS) -> None:
        """Live; ends without closing anything, as a power cut does."""
        self._start()
        for _ in range(steps):
            self._clock.advance(self._chance.uniform(0.0, 40.0))
            dies_in = self._chance.randint(1, 40) if self._chance.random() < 0.12 else None
            self._fs.die_in = dies_in
            with suppress(SimulatedCrash):
                self._step()
            if self._fs.dead:
                self._next_process()
            self._fs.die_in = None

    def end(self) -> None:
        """Close what the life has open, nothing of it recorded any more."""
        self._fs.dead = True
        for keeper in self._fs.bury():
            keeper.close()

    def _step(self) -> None:
        steps: dict[Callable[[], None], int] = {
            self._write: 10,
            self._stream: 4,
            self._write_in_vain: 2,
            self._lose_the_news: 1,
            self._write_and_discard: 1,
            self._drop: 5,
            self._drop_several: 2,
            self._drop_held: 1,
            self._touch: 3,
            self._look: 2,
            self._quarantine: 1,
            self._restart: 2,
            self._reset_index: 1,
            self._new_weights: 1,
            self._make_room: 1,
        }
        self._chance.choices(list(steps), list(steps.values()))[0]()

    # -- processes -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        begun = self.journal.position
        self.store = SpillStore.open(
            _config(self._root, self._ranks), IDENTITY, fs=self._fs, clock=self._clock, entropy=self._entropy
        )
        found = self.store.fingerprint
        if self.truth.restarts and found not in self.truth.identities(begun):
            raise ViolationError(f"{self._name}: a start without a power cut found itself in identity {found}")
        self.truth.restarts.append((self.journal.position if self.truth.restarts else 0, frozenset({found})))
        self._recover()

    def _recover(self) -> None:
        """What the store finds is published from here on; what must be there and is not is a violation already."""
        identity = self.store.fingerprint
        found = {
            pack.info.header.pack_id: _Pack(pack.info.header.pack_id, _blocks_of(pack.info, identity), set(pack.dead))
            for pack in self.store.recover()
        }
        known = {pack.pack_id for pack in self._packs}
        self._packs += [pack for pack_id, pack in found.items() if pack_id not in known]
        now = self.journal.position
        live = {pack.blocks[n] for pack in self._packs for n in pack.live()}
        missing = self.truth.with_fate(Fate.MUST, identity, now) - live
        if missing:
            raise ViolationError(f"{self._name}: a start without a power cut did not find {_names(missing)}")
        for block in live:
            # One that came back from a hole that was there in part only is damaged, and no loss.
            self.truth.tell(block, Fate.MAY if self.truth.excuses(block, now) else Fate.MUST, now)
        interrupted = self.truth.with_fate(Fate.MAY, identity, now) & self.truth.dropped
        for block in interrupted - live - self.truth.quarantined:
            # A drop was interrupted. What one start does not find for that, no later one does, power cut or not.
            self.truth.tell(block, Fate.DEAD, now)

    def _next_process(self) -> None:
        """The process was killed; the next one goes on with what the kernel has."""
        keepers = self._fs.bury()
        self._fs = self._new_file_system()
        self._fs.keep_until_close(keepers)
        self._packs = []
        self._start()

    def _new_file_system(self) -> RecordingFileSystem:
        return RecordingFileSystem(self.journal, skips=self._faults.skips, log_pages=self._log_pages)

    def _restart(self) -> None:
        self.store.close()
        self._next_process()

    def _entropy(self, _bits: int) -> int:
        self._blocks += 1
        return self._blocks << 8 | self._chance.randrange(SHARDS)

    # -- writes ----------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self._publish(*self._write_pack(self._new_blocks(), allocates=self._chance.random() < 0.5))

    def _stream(self) -> None:
        """A pack that grows while other things happen."""
        blocks = self._new_blocks()
        between = [self._touch, self._drop, self._write, self._look]
        self._publish(*self._write_pack(blocks, between=self._chance.choice(between)))

    def _publish(self, blocks: Sequence[Block], infos: list[PackInfo], reservation: Reservation) -> None:
        self.store.publish(infos, reservation)
        self._tell(blocks, Fate.MUST)
        self._packs.append(_Pack(reservation.pack_id, list(blocks)))

    def _write_in_vain(self) -> None:
        """Some ranks finish, one does not: no pack."""
        blocks = self._new_blocks(Fate.NEVER)
        reservation = self._reserve(blocks)
        writers = self._writers(reservation)
        spoilt = self._chance.randrange(self._ranks)
        for rank, writer in enumerate(writers):
            writer.append_many(self._pack_blocks(blocks, rank))
            if rank != spoilt:
                writer.finish(self._tips(blocks))
        writers[spoilt].abort()
        self.store.cancel(reservation)

    def _lose_the_news(self) -> None:
        """Complete on every rank, but not known to be: the next recovery adopts it (case 47)."""
        _, _, reservation = self._write_pack(self._new_blocks())
        self.store.cancel(reservation)
        if self._chance.random() < 0.5:
            self._recover()

    def _write_and_discard(self) -> None:
        """Deleted while it was written (case 69)."""
        blocks, _, reservation = self._write_pack(self._new_blocks())
        self.store.discard(reservation)
        self._tell(blocks, Fate.NEVER)

    def _write_pack(
        self, blocks: list[Block], *, allocates: bool = False, between: Callable[[], None] | None = None
    ) -> tuple[list[Block], list[PackInfo], Reservation]:
        reservation = self._reserve(blocks)
        writers = self._writers(reservation, blocks if allocates else None)
        payloads = [self._pack_blocks(blocks, rank) for rank in range(self._ranks)]
        first = len(blocks) if between is None else self._chance.randint(1, len(blocks))
        for writer, mine in zip(writers, payloads, strict=True):
            writer.append_many(mine[:first])
        if between is not None:
            between()
            grown = self.store.grow(reservation, 5000)
            assert isinstance(grown, Reservation), grown
            reservation = grown
            for writer, mine in zip(writers, payloads, strict=True):
                for block in mine[first:]:
                    writer.append(block)
        order = list(range(self._ranks))
        self._chance.shuffle(order)
        infos = {rank: writers[rank].finish(self._tips(blocks)) for rank in order}
        return blocks, [infos[rank] for rank in range(self._ranks)], reservation

    def _new_blocks(self, fate: Fate = Fate.MAY) -> list[Block]:
        """Blocks that nobody wrote before; after new weights their names come again with other bytes."""
        count = self._chance.randint(1, 4)
        self._blocks += count
        first = self._blocks - count
        blocks = [Block(self.store.fingerprint, f"{len(self._name)}.{n}") for n in range(first, first + count)]
        self._tell(blocks, fate)
        return blocks

    def _reserve(self, blocks: Sequence[Block]) -> Reservation:
        nbytes = pack_file_bytes([block.nbytes for block in blocks]) * self._ranks
        answer = self.store.reserve(nbytes, urgent=self._chance.random() < 0.5)
        assert isinstance(answer, Reservation), answer
        return answer

    def _writers(self, reservation: Reservation, allocated: Sequence[Block] | None = None) -> list[PackWriter]:
        conversation = self._chance.choice(CONVERSATIONS)
        nbytes = None
        if allocated is not None:
            nbytes = pack_file_bytes([block.nbytes for block in allocated]) + self._chance.choice((0, 8192))
        return [
            PackWriter(
                self._fs,
                self.store.rank_folder(rank),
                PackHeader(
                    reservation.pack_id, conversation, self.store.fingerprint, rank, self._ranks, self._clock.now()
                ),
                direct=self.store.direct,
                expected_bytes=nbytes,
                depth=0,
            )
            for rank in range(self._ranks)
        ]

    def _pack_blocks(self, blocks: Sequence[Block], rank: int) -> list[PackBlock]:
        """A chain that goes on from a shared beginning or from another pack's end."""
        parent = some_key(self._chains[self._name]) if self._name in self._chains else NO_KEY
        made = []
        for n, block in enumerate(blocks):
            key = some_key(block.name)
            made.append(PackBlock(key, parent, 16 * (n + 1), 0, block.payload(rank)))
            parent = key
        if rank == self._ranks - 1:
            self._chains[self._name] = self._chance.choice(blocks).name
        return made

    def _tips(self, blocks: Sequence[Block]) -> list[tuple[BlockKey, int]]:
        return [(some_key(blocks[-1].name), 16 * len(blocks))]

    # -- letting go ------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        packs = [pack for pack in self._packs if pack.live()]
        if packs:
            self._drop_from([self._chance.choice(packs)])

    def _drop_several(self) -> None:
        packs = [pack for pack in self._packs if pack.live()]
        self._drop_from(self._chance.sample(packs, min(3, len(packs))))

    def _drop_held(self) -> None:
        """A mover reads while blocks of its pack are dropped."""
        packs = [pack for pack in self._packs if pack.live()]
        if packs:
            pack = self._chance.choice(packs)
            self.store.hold(pack.pack_id)
            self._drop_from([pack])
            self._touch()
            self.store.unhold(pack.pack_id)
            self._tell_if_gone(pack)

    def _drop_from(self, packs: Sequence[_Pack]) -> None:
        going: dict[PackId, list[int]] = {}
        for pack in packs:
            live = pack.live()
            going[pack.pack_id] = live if self._chance.random() < 0.3 else live[: self._chance.randint(1, len(live))]
        blocks = [pack.blocks[n] for pack in packs for n in going[pack.pack_id]]
        self.truth.dropped.update(blocks)
        self._tell(blocks, Fate.MAY, begins=True)
        held = any(self.store._held[pack.pack_id] for pack in packs)
        self.store.drop_many(going)
        self._tell(blocks, Fate.DEAD)
        for pack in packs:
            pack.dead.update(going[pack.pack_id])
            if not held:
                self._tell_if_gone(pack)

    def _tell_if_gone(self, pack: _Pack) -> None:
        if pack.live():
            return
        self._packs = [other for other in self._packs if other is not pack]
        if self.store.load(pack.pack_id) is None:
            # Its files are removed and their folder flushed: not even a lost index brings it back.
            self._tell(pack.blocks, Fate.NEVER)
        elif not self.truth.index_lost(self.journal.position):
            raise ViolationError(f"{self._name}: a pack without a living block is still there")

    def _quarantine(self) -> None:
        if self._packs:
            pack = self._packs.pop(self._chance.randrange(len(self._packs)))
            self.truth.quarantined.update(pack.blocks)
            self._tell([pack.blocks[n] for n in pack.live()], Fate.MAY, begins=True)
            self._tell([pack.blocks[n] for n in pack.dead], Fate.MAY, begins=True)
            self.store.quarantine(pack.pack_id, "told by the test")

    def _new_weights(self) -> None:
        life = self._chance.choice((GenerationLife.DURABLE, GenerationLife.DURABLE, GenerationLife.UNTIL_RESTART))
        restarted = self.store._generation.number + (1 if life is GenerationLife.DURABLE else 2)
        after = frozenset({IDENTITY.at_generation(restarted)})
        before = self.truth.identities(self.journal.position)
        self.truth.restarts.append((self.journal.position + 1, before | after))
        self._packs = []
        self.store.new_generation(life=life)
        self._blocks -= min(self._blocks, 10)
        self.truth.restarts.append((self.journal.position, after))

    # -- the rest --------------------------------------------------------------------------------------------

    def _touch(self) -> None:
        some = self._chance.sample(CONVERSATIONS, 2)
        self.store.touch([ConversationId(name) for name in some], self._clock.now())

    def _look(self) -> None:
        self.store.usage()
        self.store.probe()

    def _make_room(self) -> None:
        """Quarantined and other identities' files go."""
        self.store.make_room(1 << 40)

    def _reset_index(self) -> None:
        """The index was found damaged while the store ran."""
        self.truth.index_lost_from = min(self.journal.position, self.truth.index_lost_from or self.journal.position)
        self.store._index_damage = "told by the test"
        self._recover()

    def _tell(self, blocks: Iterable[Block], fate: Fate, *, begins: bool = False) -> None:
        """From now on, or from the next event on for what has only begun."""
        position = self.journal.position + begins
        for block in blocks:
            self.truth.tell(block, fate, position)


def _config(root: Path, ranks: int) -> SpillConfig:
    return SpillConfig(
        root=root,
        capacity_bytes=1 << 30,
        min_free_bytes=0,
        write_budget_bytes_per_hour=None,
        block_bytes=5000,
        ranks=ranks,
    )


def _blocks_of(info: PackInfo, identity: str) -> list[Block]:
    return [Block(identity, entry.key.rstrip(b"\0.").decode()) for entry in info.entries]


def _names(blocks: Iterable[Block]) -> list[str]:
    return sorted(block.name for block in blocks)


# -- the check -----------------------------------------------------------------------------------------------


def check(volume: Path, ranks: int, truth: Truth, cut: int, state: DiskState) -> None:
    """Open what the power cut left, and compare it with what was promised; ``ViolationError`` says what is wrong."""
    fs = FileSystem()
    config = _config(volume / "volume" / "spill", ranks)
    try:
        with SpillStore.open(config, IDENTITY, clock=FakeClock(1_700_100_000.0)) as store:
            _check_found(fs, store, truth, cut, state)
            _check_tidy(store, twice=cut % 4 == 0)
    except ViolationError:
        raise
    except Exception as error:
        raise ViolationError(f"the start failed: {type(error).__name__}: {error}") from error


def _check_found(fs: FileSystem, store: SpillStore, truth: Truth, cut: int, state: DiskState) -> None:
    identity = store.fingerprint
    if truth.restarts and identity not in truth.identities(cut):
        raise ViolationError(f"it found itself in identity {identity}, allowed are {sorted(truth.identities(cut))}")
    good, bad = _read_everything(fs, store)
    missing = truth.with_fate(Fate.MUST, identity, cut) - (good - bad)
    if missing:
        raise ViolationError(f"published and not found, or damaged: {_names(missing)}")
    index_lost = state.index_lost or truth.index_lost(cut)
    for block in good | bad:
        fate = truth.fate(block, cut)
        if fate in {None, Fate.NEVER} or (fate is Fate.DEAD and not index_lost):
            raise ViolationError(f"found, but {fate or 'never written'}: {block.name}")
    damaged = {block for block in bad if not truth.excuses(block, cut) and not (index_lost and block in truth.dropped)}
    if damaged:
        raise ViolationError(f"found with damaged bytes: {_names(damaged)}")


def _read_everything(fs: FileSystem, store: SpillStore) -> tuple[set[Block], set[Block]]:
    """Living blocks that have their bytes on every rank, and those that some rank's reader says are damaged."""
    good: set[Block] = set()
    bad: set[Block] = set()
    for pack in store.recover():
        blocks = _blocks_of(pack.info, store.fingerprint)
        living = [(blocks[n], entry.key) for n, entry in enumerate(pack.info.entries) if n not in pack.dead]
        for rank, payloads in enumerate(read_back(fs, store, pack.infos)):
            for block, key in living:
                if payloads[key] not in {None, block.payload(rank)}:
                    raise ViolationError(f"wrong bytes: block {block.name}, rank {rank}")
                (bad if payloads[key] is None else good).add(block)
    return good, bad


def _check_tidy(store: SpillStore, *, twice: bool) -> None:
    """Nothing half done is left; looking ``twice`` finds nothing new."""
    known = set(store._index.pack_ids())
    for rank in range(store.ranks):
        left = [path.name for path in (store.rank_folder(rank) / "tmp").iterdir()]
        if left:
            raise ViolationError(f"temporary files are left: {left}")
        files = {path.stem for path in (store.rank_folder(rank) / "packs").glob("*/*")}
        if files != known:
            raise ViolationError(f"packs and index differ: {sorted(files ^ known)}")
    if not twice:
        return
    store.usage()
    if list(store.recover()):
        raise ViolationError("a second recovery found packs that the first one had not")


# -- many states ---------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was looked at."""

    states: int = 0
    events: int = 0
    found: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.states += other.states
        self.events += other.events
        self.found += other.found


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where the machine has such a place."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="parkade-power-loss-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _recorded(seed: str, recording: int, faults: Faults) -> Iterator[tuple[Life, int]]:
    """The life of this number; an odd one goes on from a power cut in the life before it."""
    ranks = 1 + recording // 2 % 2
    with scratch() as folder:
        name = f"{seed}/{recording - recording % 2}"
        (folder / "first" / "volume").mkdir(parents=True)
        life = Life(folder / "first", Truth(), name=name, ranks=ranks, faults=faults)
        life.run()
        life.end()
        if recording % 2:
            chance = random.Random(f"{name}/cut")
            cut = chance.randint(0, life.journal.position)
            state = life.journal.state_at(cut, chance)
            (folder / "second").mkdir()
            state.save(folder / "second")
            life = Life(folder / "second", life.truth.carried(cut, state), name=f"{name}+", ranks=ranks, faults=faults)
            life.run()
            life.end()
        yield life, ranks


def _try_state(life: Life, ranks: int, seed: str, recording: int, number: int) -> DiskState:
    chance = random.Random(f"{seed}/{recording}/{number}")
    cut = chance.randint(0, life.journal.position)
    state = life.journal.state_at(cut, chance)
    with scratch() as folder:
        state.save(folder)
        try:
            check(folder, ranks, life.truth, cut, state)
        except ViolationError as error:
            raise ViolationError(
                f"{error}\nseed {seed}, life {recording}, state {number}, {ranks} ranks"
                f" (PARKADE_POWER_LOSS_SEED={seed} PARKADE_POWER_LOSS_ONLY={recording}:{number})\n"
                f"{state.story}\n{life.journal.describe(cut)}"
            ) from error
    return state


def run_share(seed: str, recordings: Sequence[int], states_each: int, faults: Faults = Faults()) -> Tally:
    """So many states of each of these lives; the first ``ViolationError`` ends it."""
    logging.disable(logging.CRITICAL)
    tally = Tally()
    try:
        for recording in recordings:
            with _recorded(seed, recording, faults) as (life, ranks):
                tally.events += life.journal.position
                for number in range(states_each):
                    state = _try_state(life, ranks, seed, recording, number)
                    tally.states += 1
                    tally.found["index lost" if state.index_lost else "index kept"] += 1
    finally:
        logging.disable(logging.NOTSET)
    return tally


def run_everywhere(seed: str, states: int, processes: int) -> Tally:
    """So many states of all lives together, in processes of their own."""
    recordings = max(2, min(RECORDINGS, states // 20))
    shares = [list(range(share, recordings, processes)) for share in range(processes)]
    states_each = -(-states // recordings)
    tally = Tally()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part in pool.map(partial(run_share, seed, states_each=states_each), shares):
            tally.add(part)
    return tally


def run_one(seed: str, recording: int, number: int) -> None:
    """One state again."""
    with _recorded(seed, recording, Faults()) as (life, ranks):
        _try_state(life, ranks, seed, recording, number)
