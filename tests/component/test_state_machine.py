"""Owner, mover and store against a model that is a dict: whatever happens in whatever order, nothing wrong is served.

The model knows, for each conversation, the longest chain it was last given, and every block ever stored. What is
served may be less than the model has (a kill takes what was not written, a small disk lets the oldest go), never more,
and never other bytes: ``Running.load`` compares every block it loads.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.pod import BLOCK_BYTES, BLOCK_TOKENS, EIGHT_EXTENTS, Pod, block_keys, prompt

from parkade_cache.ids import BlockKey, ConversationId
from parkade_cache.ledger import DiskState

NAMES = st.sampled_from(["A", "B", "C", "D", "E"])
BLOCKS = st.integers(min_value=1, max_value=12)


class CacheMachine(RuleBasedStateMachine):
    """One folder, one life of a pod after the other."""

    parked_max = EIGHT_EXTENTS
    disk_blocks = 100_000

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="parkade-machine-"))
        self.chains: dict[str, list[int]] = {}
        self.stored: set[BlockKey] = set()
        self.safe: dict[str, list[int]] = {}
        self.numbers = iter(range(10_000))
        self.live()

    def live(self) -> None:
        self.pod = Pod(folder=self.folder / "spill", parked_max=self.parked_max, size=self.disk_blocks * BLOCK_BYTES)

    def teardown(self) -> None:
        if hasattr(self, "pod"):
            self.pod.__exit__()
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- what clients do ---------------------------------------------------------------------------------

    def serve(self, name: str, tokens: list[int]) -> None:
        pod = self.pod
        known = len(tokens) // BLOCK_TOKENS
        keys = block_keys(tokens)
        most = next((n for n, key in enumerate(keys) if key not in self.stored), known)
        turned = pod.turn(name, tokens)
        assert turned.reused <= most * BLOCK_TOKENS, "more was served than was ever stored"
        self.served(name, turned.reused, tokens)
        self.stored.update(keys)
        self.chains[name] = tokens

    def served(self, name: str, reused: int, tokens: list[int]) -> None:
        """A conversation that nothing may have cost anything comes back in full."""
        chain = self.safe.get(name, [])
        if tokens[: len(chain)] == chain:
            assert reused >= len(chain), f"{name} came back with {reused} of {len(chain)} tokens"
        self.safe[name] = tokens

    @rule(name=NAMES, shared=st.integers(0, 4), blocks=BLOCKS)
    def first_turn(self, name: str, shared: int, blocks: int) -> None:
        self.serve(name, prompt(f"{name} {next(self.numbers)}", shared + blocks, shared=shared))

    @precondition(lambda self: bool(self.chains))
    @rule(data=st.data(), blocks=BLOCKS)
    def next_turn(self, data: st.DataObject, blocks: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.chains)))
        self.serve(name, [*self.chains[name], *prompt(str(next(self.numbers)), blocks)])

    @precondition(lambda self: bool(self.chains))
    @rule(data=st.data(), blocks=BLOCKS)
    def side_call(self, data: st.DataObject, blocks: int) -> None:
        """W6: a request under the same id that does not extend it; the conversation stays what it was."""
        name = data.draw(st.sampled_from(sorted(self.chains)))
        kept = data.draw(st.integers(0, len(self.chains[name]) // BLOCK_TOKENS))
        tokens = [*self.chains[name][: kept * BLOCK_TOKENS], *prompt(str(next(self.numbers)), blocks)]
        self.pod.turn(name, tokens)
        self.stored.update(block_keys(tokens))

    @precondition(lambda self: bool(self.chains))
    @rule(data=st.data(), blocks=BLOCKS)
    def other_conversation_from_the_same_chain(self, data: st.DataObject, blocks: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.chains)))
        other = data.draw(NAMES)
        self.serve(other, [*self.chains[name], *prompt(str(next(self.numbers)), blocks)])

    @rule(name=NAMES, blocks=BLOCKS, copied=st.booleans())
    def request_that_is_aborted(self, name: str, blocks: int, copied: bool) -> None:
        tokens = prompt(str(next(self.numbers)), blocks)
        running = self.pod.begin(name, tokens)
        running.outcome = "aborted"
        if copied:
            running.match()
            running.store_computed(0, len(running.chain))
            running.store(0, len(running.chain), cancel=True)
            self.stored.update(running.chain)
        running.finish()

    # -- what the pod and its operator do ----------------------------------------------------------------

    @rule(name=NAMES)
    def evict(self, name: str) -> None:
        self.pod.settle()
        self.pod.evict(name)

    @rule(name=NAMES, urgent=st.booleans())
    def write(self, name: str, urgent: bool) -> None:
        found = self.pod.state.conversations.get(ConversationId(name))
        if found is not None and self.pod.owner.disk is not None:
            self.pod.owner.disk.order_write(found, urgent=urgent)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.pod.owner.forget(ConversationId(name))
        self.chains.pop(name, None)
        self.safe.pop(name, None)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.pod.owner.pin(ConversationId(name), pinned=pinned)

    @rule(available=st.sampled_from([64 << 30, 0, None]))
    def memory_changes(self, available: int | None) -> None:
        self.pod.sampler.available_bytes = available

    @rule()
    def restart(self) -> None:
        self.pod.sampler.available_bytes = 64 << 30
        self.pod.stop()
        self.live()

    @rule()
    def kill(self) -> None:
        """S2: what was published is served afterwards; what was not may be gone."""
        pod = self.pod
        with pod.state.lock:
            before = published(pod)
            pod.fs.dead = True
        pod.kill()
        self.safe = {name: [] for name in self.safe}
        self.live()
        lost = before - published(self.pod)
        assert not lost, f"{len(lost)} published blocks are gone"

    @invariant()
    def counters_are_what_counting_gives(self) -> None:
        if hasattr(self, "pod"):
            self.pod.settle()
            self.pod.owner.tick()
            self.pod.settle()
            self.pod.check()
            self.pod.until(self.every_pack_is_used, "there is a file for each pack that has blocks, and no other")

    def every_pack_is_used(self) -> bool:
        try:
            found = {path.stem for path in self.pod.packs()}
        except FileNotFoundError:
            return False  # One went while the folder was read.
        return found == {str(pack.pack) for pack in self.pod.state.packs if pack.live}


class SmallMachine(CacheMachine):
    """RAM for one conversation and a disk for a few: everything is let go all the time, so less may come back."""

    parked_max = 16 * BLOCK_BYTES
    disk_blocks = 90

    def served(self, name: str, reused: int, tokens: list[int]) -> None:
        pass


def published(pod: Pod) -> set[BlockKey]:
    ledger = pod.state.ledger
    with pod.state.lock:
        return {key for key, row in ledger.rows.items() if ledger.disk[row] == DiskState.PUBLISHED}


_SETTINGS = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
CacheMachine.TestCase.settings = _SETTINGS
SmallMachine.TestCase.settings = _SETTINGS
TestRoomyCache = CacheMachine.TestCase
TestSmallCache = SmallMachine.TestCase
