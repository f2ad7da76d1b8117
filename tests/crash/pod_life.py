"""Lives of a pod over one folder, each ended by SIGKILL: a program, run by ``test_sigkill``.

A process that only forks begins each life, hears from it what it has published, kills it at a random moment, and begins
the next one on the folder it left. That one must start, find everything that was published with its bytes, and nothing
that was deleted (S2). Owner, movers, threads and files are real; there is no model and no engine.

Everything but the moment of a kill by time follows from the seed. The last line says what was done, as JSON; anything
else than exit code 0 is a failure, explained on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# A fork copies no threads, so the process that forks must have none: not even those of a linear algebra library.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

from support.pod import BLOCK_TOKENS, EIGHT_EXTENTS, MortalFileSystem, Pod, block_keys, prompt

from parkade_cache import owner
from parkade_cache.ids import ConversationId
from parkade_cache.ledger import DiskState

SHARED_BLOCKS = 3
MOST_CONVERSATIONS = 7
MOST_BLOCKS = 40
STEPS = 40
HANGS_AFTER_S = 60.0
REMEMBERED_AS_GONE = 12
MOST_STARTING_OPERATIONS = 150
MOST_OPERATIONS = 600
LONGEST_S = 0.4


@dataclass(frozen=True)
class Published:
    """The first ``blocks`` blocks of this chain were on disk, published."""

    tokens: list[int]
    blocks: int


@dataclass
class Known:
    """What the lives so far have said; a life has its own copy of it."""

    published: dict[str, Published] = field(default_factory=dict)
    gone: dict[str, list[int]] = field(default_factory=dict)
    leaving: dict[str, list[int]] = field(default_factory=dict)

    def hear(self, word: dict[str, Any]) -> None:
        said, name = word["said"], word.get("name", "")
        if said == "published":
            self.published[name] = Published(word["tokens"], word["blocks"])
        elif said == "leaving":
            found = self.published.pop(name, None)
            self.leaving[name] = found.tokens if found is not None else word["tokens"]
        elif said == "left" and name in self.leaving:
            self.gone[name] = self.leaving.pop(name)
            while len(self.gone) > REMEMBERED_AS_GONE:
                self.gone.pop(next(iter(self.gone)))


@dataclass(frozen=True)
class Kill:
    """When a life ends: after so many operations on files, after some time, or never."""

    operations: int | None = None
    seconds: float | None = None
    once_checked: bool = False
    """Counted from when the life has checked what it found; else from its beginning."""


class KilledFileSystem(MortalFileSystem):
    """The real file system; the process kills itself just before or just after one operation."""

    def __init__(self, *, after: bool) -> None:
        self.kill_at = sys.maxsize
        self.after = after
        super().__init__()

    def kill_in(self, operations: int | None) -> None:
        if operations is not None:
            self.kill_at = len(self.operations) + operations

    def step(self, name: str) -> None:
        super().step(name)
        if len(self.operations) >= self.kill_at and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)

    def _track(self, name: str, done: Any, args: Any) -> None:
        super()._track(name, done, args)
        if len(self.operations) >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Life:
    """One process: starts, checks what it finds, and works until it is killed or has had enough."""

    def __init__(self, name: str, settings: argparse.Namespace, known: Known, out: int, kill: Kill) -> None:
        self._name = name
        self._chance = random.Random(name)
        self._settings = settings
        self._known = known
        self._out = out
        self._kill = kill
        self._fs = KilledFileSystem(after=self._chance.random() < 0.5)
        self._tokens = {name: published.tokens for name, published in known.published.items()}
        self._told: dict[str, int] = {}
        self._mute = False
        self._born = 0
        self._pod: Pod

    def run(self) -> None:
        if not self._kill.once_checked:
            self._fs.kill_in(self._kill.operations)
        parked_max = 0 if self._settings.streams else EIGHT_EXTENTS
        self._pod = Pod(
            folder=self._settings.folder,
            parked_max=parked_max,
            mode=self._settings.mode,
            ranks=self._settings.ranks,
            spill={"writeBehindIdleSeconds": 0},
            fs=self._fs,
        )
        self._say("started")
        self._check_tidy()
        self._check_published()
        self._check_gone()
        self._say("checked")
        if self._kill.once_checked:
            self._fs.kill_in(self._kill.operations)
        for _ in range(self._chance.randint(STEPS // 4, STEPS)):
            self._step()
            self._tell()
        self._pod.stop()
        self._tell()
        self._say("ended")

    def _say(self, said: str, **more: Any) -> None:
        os.write(self._out, json.dumps({"said": said, **more}).encode() + b"\n")

    # -- what an earlier life left ---------------------------------------------------------------------------

    def _check_tidy(self) -> None:
        disk = self._pod.owner.disk
        assert disk is not None
        # Of this identity: another one's files go when room is needed (D1).
        unfinished = [str(path) for path in disk.store.identity_folder.glob("rank-*/tmp/*")]
        assert not unfinished, f"files of unfinished writes are left: {unfinished}"
        # What nobody keeps goes when the start is over.
        deadline = time.monotonic() + HANGS_AFTER_S / 2
        while (left := self._untidy()) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not left, left

    def _untidy(self) -> str:
        disk = self._pod.owner.disk
        usage = None if disk is None else disk.usage()
        if disk is None or usage is None or usage.quarantined:
            return f"a pack was found damaged: {usage}"
        files = len(list(disk.store.identity_folder.rglob("*.pack")))
        expected = usage.packs * self._pod.ranks
        return "" if files == expected else f"{files} pack files, {expected} in the index"

    def _check_published(self) -> None:
        for name, published in self._known.published.items():
            found = self._published_blocks(published.tokens)
            assert found >= published.blocks, f"{name}: {published.blocks} blocks were published, {found} are found"
        names = list(self._known.published)
        for name in self._chance.sample(names, min(len(names), self._settings.restores)):
            published = self._known.published[name]
            turned = self._pod.turn(name, published.tokens)  # Compares the bytes of every block it loads.
            assert turned.reused >= published.blocks * BLOCK_TOKENS, (
                f"{name}: {turned.reused} tokens restored of {published.blocks} blocks"
            )

    def _check_gone(self) -> None:
        for name, tokens in self._known.gone.items():
            with self._pod.state.lock:
                left = [key for key in block_keys(tokens)[SHARED_BLOCKS:] if self._is_published(key)]
            assert not left, f"{name} was deleted, and {len(left)} of its blocks are found again"

    def _published_blocks(self, tokens: list[int]) -> int:
        """How many blocks of the chain, from its start, are published."""
        with self._pod.state.lock:
            keys = block_keys(tokens)
            return next((n for n, key in enumerate(keys) if not self._is_published(key)), len(keys))

    def _is_published(self, key: Any) -> bool:
        ledger = self._pod.state.ledger
        row = ledger.find(key)
        return row >= 0 and ledger.disk[row] == DiskState.PUBLISHED

    # -- work --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        steps = {
            self._grow: 10,
            self._begin: 4,
            self._evict: 5,
            self._forget: 1 if len(self._tokens) < MOST_CONVERSATIONS else 8,
            self._side_call: 1,
            self._break_off: 1,
            self._wait: 3,
            self._reset: 0.1,
        }
        self._chance.choices(list(steps), list(steps.values()))[0]()

    def _tell(self) -> None:
        """What is published now, for the conversations of which that is more than was said."""
        if self._mute:
            return
        for name, tokens in self._tokens.items():
            blocks = self._published_blocks(tokens)
            if blocks > self._told.get(name, 0):
                self._told[name] = blocks
                self._say("published", name=name, tokens=tokens, blocks=blocks)

    def _begin(self) -> None:
        if len(self._tokens) < MOST_CONVERSATIONS:
            self._born += 1
            name = f"{self._name}.{self._born}"
            self._turn(name, prompt(name, self._chance.randint(SHARED_BLOCKS + 1, 16), shared=SHARED_BLOCKS))

    def _grow(self) -> None:
        if self._tokens:
            name = self._chance.choice(list(self._tokens))
            tokens = self._tokens[name]
            if len(tokens) < MOST_BLOCKS * BLOCK_TOKENS:
                more = [self._chance.randrange(100_000) for _ in range(self._chance.randint(1, 6 * BLOCK_TOKENS))]
                tokens = [*tokens, *more]
            self._turn(name, tokens)

    def _turn(self, name: str, tokens: list[int]) -> None:
        reply = [self._chance.randrange(100_000) for _ in range(self._chance.randint(0, 2 * BLOCK_TOKENS))]
        self._tokens[name] = self._pod.turn(name, tokens, reply=reply).tokens

    def _evict(self) -> None:
        if self._tokens:
            self._pod.evict(self._chance.choice(list(self._tokens)))

    def _forget(self) -> None:
        if self._tokens:
            name = self._chance.choice(list(self._tokens))
            self._say("leaving", name=name, tokens=self._tokens.pop(name))
            self._told.pop(name, None)
            self._pod.owner.forget(ConversationId(name))
            self._say("left", name=name)

    def _side_call(self) -> None:
        """A title call under a conversation's own id (W6)."""
        if self._tokens:
            name = self._chance.choice(list(self._tokens))
            self._pod.turn(name, prompt(f"title of {name}", SHARED_BLOCKS + 2, shared=SHARED_BLOCKS))

    def _break_off(self) -> None:
        """A client that goes away in the middle of its prompt."""
        if self._tokens:
            name = self._chance.choice(list(self._tokens))
            more = [self._chance.randrange(100_000) for _ in range(8 * BLOCK_TOKENS)]
            running = self._pod.begin(name, [*self._tokens[name], *more])
            running.match()
            running.load()
            running.store_computed(running.matched_blocks, min(running.matched_blocks + 4, len(running.chain)))
            running.outcome = "aborted"
            running.finish()

    def _wait(self) -> None:
        if self._chance.random() < 0.5:
            self._pod.settle()
        else:
            time.sleep(self._chance.uniform(0.0, 0.02))

    def _reset(self) -> None:
        """New weights: what was there is gone, and what comes now ends with this process (trap 14)."""
        for name, tokens in self._tokens.items():
            self._say("leaving", name=name, tokens=tokens)
        self._pod.owner.reset()
        self._pod.settle()
        for name in self._tokens:
            self._say("left", name=name)
        self._mute = True


class Killer:
    """Forks one life after the other and ends it."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        self._chance = random.Random(f"{settings.seed}/killer")
        self._known = Known()
        self._numbers = Counter[str]()

    def run(self) -> Counter[str]:
        """So many kills, then one more life that checks everything and ends by itself."""
        while self._numbers["kills"] < self._settings.kills:
            self._life(self._next_kill())
        self._settings.restores = MOST_CONVERSATIONS
        self._life(Kill())
        return self._numbers

    def _next_kill(self) -> Kill:
        once_checked = self._chance.random() < 0.7
        kind = self._chance.choices(("operation", "time", "never"), (12, 12, 1))[0]
        if kind == "operation":
            most = MOST_OPERATIONS if once_checked else MOST_STARTING_OPERATIONS
            return Kill(operations=self._chance.randint(1, most), once_checked=once_checked)
        if kind == "time":
            return Kill(seconds=self._chance.uniform(0.0, LONGEST_S), once_checked=once_checked)
        return Kill()

    def _life(self, kill: Kill) -> None:
        self._numbers["lives"] += 1
        name = f"{self._settings.seed}-{self._numbers['lives']}"
        hears, says = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hears)
            _be(Life(name, self._settings, self._known, says, kill), says)
        os.close(says)
        words, timely = _listen(hears, pid, kill)
        os.close(hears)
        _, status = os.waitpid(pid, 0)
        how = f"life {name}, {kill}, heard {len(words)} words"
        if not timely:
            raise SystemExit(f"{how}: it hangs")
        self._judge(words, status, how)
        _require_alone(pid, how)

    def _judge(self, words: list[dict[str, Any]], status: int, how: str) -> None:
        for word in words:
            if word["said"] == "failed":
                raise SystemExit(f"{how}\n{word['text']}")
            self._known.hear(word)
            self._numbers[word["said"]] += 1
        # A life that was killed in the middle of letting go has promised nothing about what it was letting go of.
        self._known.leaving.clear()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self._numbers["kills"] += 1
        elif os.waitstatus_to_exitcode(status) != 0 or not words or words[-1]["said"] != "ended":
            raise SystemExit(f"{how}: ended with status {status} after {[word['said'] for word in words[-3:]]}")


def _be(life: Life, out: int) -> NoReturn:
    """The forked process: never comes back to what its parent was doing."""
    os.setsid()
    code = 0
    try:
        life.run()
    except BaseException:  # noqa: BLE001 - whatever went wrong, the parent must hear of it
        code = 1
        text = traceback.format_exc()[-4000:]
        os.write(out, json.dumps({"said": "failed", "text": text}).encode() + b"\n")
    os._exit(code)


def _listen(hears: int, pid: int, kill: Kill) -> tuple[list[dict[str, Any]], bool]:
    """Everything a life said whole until it ended; False when it had to be ended because it hung."""
    heard = b""
    hangs_at = time.monotonic() + HANGS_AFTER_S
    kill_at = hangs_at
    if kill.seconds is not None and not kill.once_checked:
        kill_at = time.monotonic() + kill.seconds
    killed = False
    while True:
        ready, _, _ = select.select([hears], [], [], max(0.0, (hangs_at if killed else kill_at) - time.monotonic()))
        if ready:
            piece = os.read(hears, 1 << 16)
            if not piece:
                break
            heard += piece
            if kill.seconds is not None and kill.once_checked and kill_at == hangs_at and b'"checked"' in heard:
                kill_at = time.monotonic() + kill.seconds
        elif not killed:
            killed = True
            os.kill(pid, signal.SIGKILL)
        else:
            break
    lines = heard.split(b"\n")[:-1]
    return [json.loads(line) for line in lines], not (killed and kill_at == hangs_at)


def _require_alone(pid: int, how: str) -> None:
    """Nothing that the life has started is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, 0)
        raise SystemExit(f"{how}: processes of it are left")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", choices=("OnEvict", "WriteBehind"), default="WriteBehind")
    parser.add_argument("--streams", action="store_true", help="no RAM: everything is streamed to disk")
    parser.add_argument("--restores", type=int, default=3, help="conversations that each life restores at its start")
    settings = parser.parse_args()
    # Uses reach the index while the lives last, not only after seconds.
    owner.TOUCH_INTERVAL_S = 0.02
    print(json.dumps(Killer(settings).run()))


if __name__ == "__main__":
    main()
    sys.exit(0)
