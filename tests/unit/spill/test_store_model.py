"""The store against a dict: whatever is done in whatever order, the disk holds what the model says (S2, W2, D6)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from parkade_cache.ids import PackId
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.outcome import Reservation
from parkade_cache.spill.store import SpillConfig, SpillStore
from parkade_cache.spill.testing import (
    Chain,
    FakeClock,
    chain_bytes,
    publish_chain,
    read_back,
    some_identity,
    some_payload,
    write_ranks,
)

SHARED = Path("/dev/shm")


class SpillModel(RuleBasedStateMachine):
    """``model`` is the truth: for each published pack, the names of its live blocks by their place."""

    packs = Bundle("packs")

    @initialize(ranks=st.integers(1, 2))
    def begin(self, ranks: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=SHARED if SHARED.is_dir() else None))
        self.fs, self.clock, self.ranks = FileSystem(), FakeClock(), ranks
        self.model: dict[PackId, dict[int, str]] = {}
        self.blocks = 0
        self.start()

    def start(self) -> None:
        config = SpillConfig(
            root=self.folder / "spill",
            capacity_bytes=1 << 30,
            min_free_bytes=0,
            write_budget_bytes_per_hour=None,
            block_bytes=5000,
            ranks=self.ranks,
        )
        self.store = SpillStore.open(config, some_identity(), fs=self.fs, clock=self.clock)

    def new_names(self, count: int) -> list[str]:
        self.blocks += count
        return [f"b{n}" for n in range(self.blocks - count, self.blocks)]

    @rule(target=packs, count=st.integers(1, 5))
    def publish(self, count: int) -> PackId:
        names = self.new_names(count)
        pack_id = publish_chain(self.fs, self.store, names)[0].header.pack_id
        self.model[pack_id] = dict(enumerate(names))
        return pack_id

    @rule(target=packs, count=st.integers(1, 3))
    def lose_the_news_of_a_complete_write(self, count: int) -> PackId:
        """Complete on all ranks, then cancelled: the next recovery adopts it (case 47)."""
        chain = Chain(self.new_names(count))
        reservation = self.store.reserve(chain_bytes(count, ranks=self.ranks))
        assert isinstance(reservation, Reservation)
        write_ranks(self.fs, self.store, reservation, chain)
        self.store.cancel(reservation)
        assert [pack.info.header.pack_id for pack in self.store.recover()] == [reservation.pack_id]
        self.model[reservation.pack_id] = dict(enumerate(chain.names))
        return reservation.pack_id

    @rule(pack_id=packs, entries=st.sets(st.integers(-1, 6)))
    def drop(self, pack_id: PackId, entries: set[int]) -> None:
        before = self.store.usage().used_bytes
        returned = self.store.drop(pack_id, entries)
        assert before - returned == self.store.usage().used_bytes
        live = self.model.get(pack_id, {})
        for entry in entries:
            live.pop(entry, None)
        if not live:
            self.model.pop(pack_id, None)

    @rule(target=packs, pack_id=consumes(packs))
    def quarantine(self, pack_id: PackId) -> object:
        if pack_id in self.model:
            self.store.quarantine(pack_id, "model")
            del self.model[pack_id]
        return multiple()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.start()
        self.recover_all()

    @rule()
    def restart_without_an_index(self) -> None:
        self.store.close()
        for path in (self.folder / "spill" / "identities").glob("*/index.sqlite*"):
            path.unlink()
        self.start()
        self.recover_all()

    @rule(hours=st.integers(-2, 2))
    def let_the_clock_run(self, hours: int) -> None:
        self.clock.now_s += hours * 3600

    def recover_all(self) -> None:
        found = list(self.store.recover())
        assert {pack.info.header.pack_id for pack in found} == set(self.model)

    @invariant()
    def disk_is_what_the_model_says(self) -> None:
        if not hasattr(self, "store"):
            return
        for pack_id, live in self.model.items():
            pack = self.store.load(pack_id)
            assert pack is not None
            assert set(range(len(pack.info.entries))) - pack.dead == set(live)
            for rank, payloads in enumerate(read_back(self.fs, self.store, pack.infos)):
                for entry, name in live.items():
                    assert payloads[pack.info.entries[entry].key] == some_payload(name, rank=rank)
        usage = self.store.usage()
        assert (usage.packs, usage.entries) == (len(self.model), sum(map(len, self.model.values())))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestSpillModel = SpillModel.TestCase
TestSpillModel.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
