"""Drives real vLLM down the connector's rarer paths and writes what happened as JSON: ``paths_process.py FOLDER``.

Run by ``test_engine_paths.py``. One process for all of them, since starting one costs more than all scenarios.
A scenario that raises reports that in place of its facts; those after it still run.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from support.live_engine import BLOCK_TOKENS, PATIENCE_S, Asked, LiveEngine, held, id_of, words

from parkade_cache.buffers import BufferPool
from parkade_cache.ids import ConversationId, RequestId
from parkade_cache.lanes import Lane
from parkade_cache.turns import Turn
from parkade_serving import connector

FOLDER = Path(sys.argv[1])
ONLY = set(sys.argv[2:])
BLOCKS = 21
"""Twenty to compute in, and the engine's null block."""
CONTEXT = 20 * BLOCK_TOKENS
STEP_TOKENS = 4 * BLOCK_TOKENS
REPLY = 8

MOMENTS = ("captured", "written", "streamed", "answered", "over")
"""When a side call comes: while the newest state is being copied, written, streamed, computed, and after all that."""

ROOM_FOR_ONE = "512Ki"
"""Sixteen blocks: the conversation of a side call has thirteen."""

Facts = dict[str, Any]
Transcript = list[tuple[list[int], list[int]]]

SCRIPTS: dict[str, list[tuple[int, int]]] = {
    # New words and length of the reply, turn by turn.
    "grow-a": [(9 * BLOCK_TOKENS, 4 * BLOCK_TOKENS), (20, REPLY)],
    "grow-b": [(9 * BLOCK_TOKENS + 4, 4 * BLOCK_TOKENS), (20, REPLY)],
    "late-a": [(9 * BLOCK_TOKENS, 4 * BLOCK_TOKENS), (20, REPLY)],
    "late-b": [(9 * BLOCK_TOKENS + 4, 4 * BLOCK_TOKENS), (20, REPLY)],
    "prefill": [(18 * BLOCK_TOKENS, REPLY)],
    "decode": [(6 * BLOCK_TOKENS, 48)],
    "restore": [(12 * BLOCK_TOKENS, REPLY), (20, REPLY)],
    "gate": [(6 * BLOCK_TOKENS, REPLY)],
    "unscheduled": [(6 * BLOCK_TOKENS, REPLY)],
    "device": [(9 * BLOCK_TOKENS, BLOCK_TOKENS + REPLY), (20, REPLY)],
    "shared": [(8 * BLOCK_TOKENS + 5, REPLY)],
    "slow-disk": [(10 * BLOCK_TOKENS, REPLY), (20, REPLY)],
    "damaged": [(12 * BLOCK_TOKENS, REPLY), (20, REPLY), (20, REPLY)],
    "reset-ram": [(8 * BLOCK_TOKENS, REPLY), (20, REPLY)],
    "reset-disk": [(8 * BLOCK_TOKENS, REPLY), (20, REPLY)],
    "reset-written": [(8 * BLOCK_TOKENS, REPLY)],
    "reset-running": [(8 * BLOCK_TOKENS, BLOCK_TOKENS + REPLY)],
    "reset-restoring": [(8 * BLOCK_TOKENS, REPLY), (20, REPLY)],
    "reset-loading": [(8 * BLOCK_TOKENS, REPLY), (20, REPLY)],
    "reset-writing": [(8 * BLOCK_TOKENS, REPLY), (20, REPLY)],
} | {f"side-{moment}": [(12 * BLOCK_TOKENS, REPLY), (BLOCK_TOKENS, REPLY)] for moment in MOMENTS}


def policy(parked: str = "64Mi", *, mode: str = "OnEvict", **spill: Any) -> dict[str, Any]:
    return {
        "memory": {"floor": "64Mi", "parked": {"max": parked}},
        "spill": {"size": "1Gi", "minFree": "1Mi", "mode": mode, "writeBehindIdleSeconds": 0} | spill,
    }


def transcripts() -> dict[str, Transcript]:
    """What each script's conversation says when nothing is ever cached."""
    engine = LiveEngine(FOLDER, policy=None, blocks=BLOCKS, context=CONTEXT, step_tokens=STEP_TOKENS)
    right: dict[str, Transcript] = {}
    for name, script in SCRIPTS.items():
        text: list[int] = []
        right[name] = []
        for number, (count, reply) in enumerate(script):
            asked = engine.send(text + words((name, number), count), reply=reply)
            engine.finish(asked)
            right[name].append((asked.prompt, asked.reply))
            text = asked.text
    engine.close()
    return right


class Scenarios:
    def __init__(self, engine: LiveEngine, right: dict[str, Transcript]) -> None:
        self.engine = engine
        self.right = right
        self.preemptions = 0
        self.flushes: list[tuple[int, int]] = []
        self.stale = 0
        self.reoffers = 0
        self._watch()

    def _watch(self) -> None:
        """Count how often the paths are really taken."""
        engine, side = self.engine, self.engine.side
        preempt, to_flush = engine.scheduler._preempt_request, side.to_flush
        settle, offer = side.settle_stale_jobs, side.offer_again

        def preempting(*args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            preempt(*args, **kwargs)

        def flushing(jobs: Sequence[int], output: Any) -> set[int]:
            asked = set(jobs)
            answer: set[int] = to_flush(asked, output)
            if asked:
                self.flushes.append((len(asked), len(answer)))
            return answer

        def settling() -> None:
            self.stale += len(side._stale)
            settle()

        def offering() -> None:
            self.reoffers += 1
            offer()

        engine.scheduler._preempt_request = preempting
        side.to_flush, side.settle_stale_jobs, side.offer_again = flushing, settling, offering

    # -- small helpers --------------------------------------------------------------------------------------

    def send(self, name: str, turn: int = 0) -> Asked:
        prompt, reply = self.right[name][turn]
        return self.engine.send(prompt, conversation=name, reply=len(reply))

    def turn(self, name: str, turn: int = 0) -> Facts:
        """One turn of the script by itself, out of reach of the engine's own cache."""
        self.forget_in_engine()
        asked = self.send(name, turn)
        self.engine.finish(asked)
        self.engine.settle()
        return self.facts(name, asked, turn)

    def facts(self, name: str, asked: Asked, turn: int = 0) -> Facts:
        prompt, reply = self.right[name][turn]
        whole = (len(prompt) - 1) // BLOCK_TOKENS
        return {
            "right_text": asked.reply == reply,
            "reply": asked.reply,
            "blocks": asked.cached / BLOCK_TOKENS,
            "of": whole,
            "receipt": self.engine.receipt(asked),
        }

    def forget_in_engine(self) -> None:
        self.engine.settle()
        assert self.engine.llm.reset_prefix_cache(), "the engine's own cache is in use"

    def computed(self, asked: Asked) -> int:
        request = self.engine.scheduler.requests.get(asked.id)
        return request.num_computed_tokens if request is not None else 0

    def totals(self) -> Facts:
        totals = self.engine.state.totals
        return {"dropped": totals.dropped_conversations, "not_captured": totals.not_captured_blocks}

    def end(self, **facts: Any) -> Facts:
        """Settled, checked, and nothing left over."""
        self.engine.settle()
        return facts | {"leaks": self.engine.leaks(), "totals": self.totals()}

    @contextmanager
    def policy(self, chosen: dict[str, Any]) -> Iterator[None]:
        self.engine.set_policy(chosen)
        try:
            yield
        finally:
            self.engine.settle()
            self.engine.set_policy(policy())

    @contextmanager
    def stuck_writes(self) -> Iterator[None]:
        """Background writes wait from now on; those that were due are over."""
        engine, dirty = self.engine, self.engine.state.conversations.dirty
        engine.until(lambda: engine.is_idle() and not any(dirty()), "all of it is written")
        with held(engine.mover._write_lane):
            yield

    def is_written(self, name: str) -> bool:
        conversation = self.engine.state.conversations.get(ConversationId(id_of(name)))
        return conversation is not None and bool(conversation.writing)

    # -- preemption -----------------------------------------------------------------------------------------

    def preempted(self) -> Facts:
        """Two requests outgrow the engine: each is cut off and goes on."""
        before, preemptions = self.totals(), self.preemptions
        both = {name: self.send(name) for name in ("grow-a", "grow-b")}
        self.engine.finish(*both.values())
        self.engine.settle()
        return self.end(
            before=before,
            preemptions=self.preemptions - preemptions,
            first={name: self.facts(name, asked) for name, asked in both.items()},
            second={name: self.turn(name, 1) for name in both},
        )

    def preempted_before_it_was_copied(self) -> Facts:
        """As above, but the copies are behind: the engine takes blocks back that nobody has copied."""
        before, preemptions, reoffers = self.totals(), self.preemptions, self.reoffers
        self.flushes.clear()
        both = {name: self.send(name) for name in ("late-a", "late-b")}
        with held(self.engine.mover._capture_lane):
            self.engine.until(lambda: self.preemptions > preemptions, "a request is preempted")
            for _ in range(5):
                self.engine.step()
        self.engine.finish(*both.values())
        self.engine.settle()
        return self.end(
            before=before,
            preemptions=self.preemptions - preemptions,
            reoffers=self.reoffers - reoffers,
            flushes=self.flushes[:],
            first={name: self.facts(name, asked) for name, asked in both.items()},
            second={name: self.turn(name, 1) for name in both},
        )

    # -- clients that go ------------------------------------------------------------------------------------

    def aborted_in_prefill(self) -> Facts:
        asked = self.send("prefill")
        self.engine.until(lambda: self.computed(asked) >= STEP_TOKENS, "a part of the prompt is read")
        computed = self.computed(asked)
        self.engine.abort(asked)
        self.engine.settle()
        return self.end(
            computed=computed,
            receipt=self.engine.receipt(asked),
            again=self.turn("prefill"),
        )

    def aborted_in_decode(self) -> Facts:
        asked = self.send("decode")
        self.engine.until(lambda: len(asked.reply) > BLOCK_TOKENS, "a part of the reply is there")
        self.engine.abort(asked)
        self.engine.settle()
        return self.end(receipt=self.engine.receipt(asked), again=self.turn("decode"))

    def aborted_before_it_was_scheduled(self) -> Facts:
        asked = self.send("unscheduled")
        self.engine.abort(asked)
        self.engine.settle()
        return self.end(receipt=self.engine.receipt(asked))

    def aborted_while_it_waits_for_the_gate(self) -> Facts:
        engine, admission = self.engine, self.engine.owner.admission
        serve, decided = admission.serve, threading.Event()

        def slow(turn: Turn) -> None:
            decided.wait(PATIENCE_S)
            serve(turn)

        admission.serve = slow
        try:
            asked = self.send("gate")
            engine.step()
            waiting = engine.state.turns[RequestId(asked.id)].admission_pending
            engine.abort(asked)
            engine.until(lambda: not engine.state.turns, "the request is closed")
        finally:
            decided.set()
            admission.serve = serve
        engine.settle()
        return self.end(waiting=waiting, receipt=engine.receipt(asked))

    def aborted_while_restoring(self) -> Facts:
        engine = self.engine
        with self.policy(policy("0")):
            self.turn("restore")
            self.forget_in_engine()
            with held(engine.mover._read_lane, threads=2):
                asked = self.send("restore", 1)
                engine.until(lambda: bool(engine.state.restoring), "the restore is under way")
                for _ in range(3):
                    engine.step()
                engine.abort(asked)
                for _ in range(3):
                    engine.step()
            engine.settle()
            return self.end(receipt=engine.receipt(asked), again=self.turn("restore", 1))

    # -- the connector's own paths ----------------------------------------------------------------------------

    def device_error(self) -> Facts:
        """A copy fails while its request runs: its blocks are offered again."""
        before, reoffers, device = self.totals(), self.reoffers, self.engine.mover.device
        copy_out, failures = device.copy_out, iter((True, False, True))

        def failing(blocks: Any, targets: Any, after: Any) -> None:
            if next(failures, False):
                raise RuntimeError("the device did not copy")
            copy_out(blocks, targets, after)

        device.copy_out = failing
        try:
            asked = self.send("device")
            self.engine.finish(asked)
            self.engine.settle()
        finally:
            device.copy_out = copy_out
        return self.end(
            before=before,
            reoffers=self.reoffers - reoffers,
            first=self.facts("device", asked),
            second=self.turn("device", 1),
        )

    def shared_blocks(self) -> Facts:
        """A second request reads blocks of a finished one that are not copied yet: nothing is given up for that."""
        before = self.totals()
        self.flushes.clear()
        self.forget_in_engine()
        with held(self.engine.mover._capture_lane):
            first = self.send("shared")
            self.engine.finish(first)
            second = self.send("shared")
            self.engine.finish(second)
            held_requests = len(self.engine.side.unsent)
        self.engine.settle()
        return self.end(
            before=before,
            flushes=self.flushes[:],
            held=held_requests,
            engine_blocks=second.cached / BLOCK_TOKENS,
            again=self.turn("shared"),
        )

    def disk_that_does_not_take_it(self) -> Facts:
        """A finished request's blocks wait for a stuck disk: at the limit they are given up, once, and counted."""
        engine, mover = self.engine, self.engine.mover
        limit, connector.HOLD_LIMIT_S = connector.HOLD_LIMIT_S, 0.3
        pool, mover._bounce = mover._bounce, BufferPool(buffer_bytes=mover._bounce.buffer_bytes, limit_bytes=1)
        before = self.totals()
        try:
            with self.policy(policy("0")):
                self.forget_in_engine()
                with held(mover._stream_lane):
                    asked = self.send("slow-disk")
                    engine.finish(asked)
                    for _ in range(3):
                        engine.step()
                    waiting = len(mover._waiting)
                    engine.until(lambda: not engine.side.unsent, "the held blocks are given up")
                engine.settle()
                return self.end(
                    before=before,
                    waiting=waiting,
                    first=self.facts("slow-disk", asked),
                    second=self.turn("slow-disk", 1),
                    drops=engine.receipts("drop", "slow-disk"),
                )
        finally:
            connector.HOLD_LIMIT_S = limit
            mover._bounce = pool

    def damaged(self) -> Facts:
        """A byte of a pack changes between two turns."""
        engine = self.engine
        with self.policy(policy("0")):
            self.turn("damaged")
            (pack,) = [
                pack
                for pack in engine.state.packs
                if pack.conversation == id_of("damaged") and engine.state.pack_numbers.get(pack.pack) is not None
            ]
            _flip_a_byte(pack.pack)
            hurt = self.turn("damaged", 1)
            engine.until(lambda: not engine.state.bad_packs, "the pack is set aside")
            return self.end(
                hurt=hurt,
                healed=self.turn("damaged", 2),
                quarantined=len(list((FOLDER / "spill" / "quarantine").glob(f"{pack.pack}*.pack"))),
                drops=engine.receipts("drop", "damaged"),
            )

    # -- new weights ------------------------------------------------------------------------------------------

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """Weights that give every block other bytes and every prompt another reply; the old ones come back after."""
        self._turn_weights()
        try:
            yield
        finally:
            self._turn_weights()
            self.engine.settle()
            assert self.engine.llm.reset_prefix_cache(reset_connector=True)

    def _turn_weights(self) -> None:
        self.engine.llm.apply_model(_turn_signs)

    def truth(self, prompt: list[int], reply: int) -> list[int]:
        """What the weights in force say to a prompt when no cache is read."""
        asked = self.engine.send(prompt, reply=reply, reads_cache=False)
        self.engine.finish(asked)
        return asked.reply

    def under_new_weights(self, name: str, turn: int) -> Facts:
        """A turn of a conversation that was begun under the old weights."""
        facts = self.turn(name, turn)
        prompt, reply = self.right[name][turn]
        asked = self.engine.send(prompt, conversation=f"{name}-again", reply=len(reply))
        self.engine.finish(asked)
        truth = self.truth(prompt, len(reply))
        return facts | {"true_text": facts["reply"] == truth, "old_text": truth == reply, "again": asked.reply == truth}

    def reset_at_rest(self) -> Facts:
        """New weights while conversations are in RAM, on disk, and on their way there."""
        engine = self.engine
        with self.policy(policy("0")):
            self.turn("reset-disk")
        self.turn("reset-ram")
        packs = set((FOLDER / "spill" / "identities").rglob("*.pack"))
        with self.policy(policy(mode="WriteBehind")), self.stuck_writes():
            asked = self.send("reset-written")
            engine.finish(asked)
            engine.until(lambda: self.is_written("reset-written"), "its write is ordered")
            self._turn_weights()
            answer = engine.llm.reset_prefix_cache(reset_connector=True)
        engine.settle()
        left = engine.owner.summary()
        with self.new_weights():
            self._turn_weights()
            return self.end(
                answer=answer,
                known=len(engine.state.conversations),
                disk_blocks=left["disk"]["blocks"],
                ram_blocks=left["ram"]["blocks"],
                old_packs=[str(pack) for pack in packs if pack.exists()],
                turns={name: self.under_new_weights(name, 1) for name in ("reset-ram", "reset-disk")}
                | {"reset-written": self.under_new_weights("reset-written", 0)},
            )

    def reset_with_a_request_running(self) -> Facts:
        """New weights in the middle of a reply; the engine starts the request anew, its copies are still under way."""
        engine, stale = self.engine, self.stale
        self.forget_in_engine()
        prompt, reply = self.right["reset-running"][0]
        with held(engine.mover._capture_lane):
            asked = self.send("reset-running")
            engine.until(lambda: len(asked.reply) == 4, "a part of the reply is there")
            jobs = len(engine.side._jobs)
            said = asked.reply[:]
            self._turn_weights()
            answer = engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            for _ in range(3):
                engine.step()
        engine.finish(asked)
        engine.settle()
        with self.new_weights():
            self._turn_weights()
            rest = self.truth(prompt + said, len(reply) - len(said))
            self.forget_in_engine()
            return self.end(
                answer=answer,
                jobs=jobs,
                stale=self.stale - stale,
                true_text=asked.reply == said + rest,
                receipt=engine.receipt(asked),
                next=self.under_new_weights("reset-running", 0),
            )

    def reset_while_restoring(self) -> Facts:
        """New weights while blocks of the old ones are on their way from disk; another request asks for them."""
        with self.policy(policy("0")):
            self.turn("reset-restoring")
        return self._reset_while_loading("reset-restoring", self.engine.mover._read_lane, threads=2)

    def reset_while_loading(self) -> Facts:
        """The same with blocks that come from RAM."""
        self.turn("reset-loading")
        return self._reset_while_loading("reset-loading", self.engine.mover._ram_lane, threads=1)

    def _reset_while_loading(self, name: str, lane: Lane, *, threads: int) -> Facts:
        engine, stale = self.engine, self.stale
        self.forget_in_engine()
        with held(lane, threads=threads):
            asked = self.send(name, 1)
            engine.until(lambda: any(turn.load_rows for turn in engine.state.turns.values()), "a load is under way")
            engine.step()
            self._turn_weights()
            answer = engine.llm.reset_prefix_cache(reset_connector=True)
            other = self._begin_other(name)
        engine.finish(asked)
        engine.settle()
        return self._end_other(name, other, answer=answer, stale=self.stale - stale)

    def reset_while_writing(self) -> Facts:
        """New weights while a write of old blocks is under way, as in the background of a pause; then a request."""
        engine, name = self.engine, "reset-writing"
        with self.policy(policy(mode="WriteBehind")), self.stuck_writes():
            asked = self.send(name)
            engine.finish(asked)
            engine.until(lambda: not engine.scheduler.has_requests(), "the engine is at rest")
            engine.until(lambda: self.is_written(name), "its write is ordered")
            self._turn_weights()
            answer = engine.llm.reset_prefix_cache(reset_connector=True)
            other = self._begin_other(name)
        engine.settle()
        return self._end_other(name, other, answer=answer)

    def _begin_other(self, name: str) -> Asked:
        """A request for the same words, while the old blocks are still in use."""
        prompt, reply = self.right[name][1]
        other = self.engine.send(prompt, conversation=f"{name}-other", reply=len(reply))
        self.engine.until(lambda: other.done or self.computed(other) >= len(prompt), "the other prompt is read")
        return other

    def _end_other(self, name: str, other: Asked, **facts: Any) -> Facts:
        engine = self.engine
        engine.finish(other)
        engine.settle()
        prompt, reply = self.right[name][1]
        with self.new_weights():
            self._turn_weights()
            truth = self.truth(prompt, len(reply))
            return self.end(
                **facts,
                other={"true_text": other.reply == truth, "receipt": engine.receipt(other)},
                next=self.under_new_weights(name, 1),
            )

    # -- side calls -------------------------------------------------------------------------------------------

    def side_calls(self) -> Facts:
        """A title is asked for under the conversation's own id, at each moment of its newest state's life (W6)."""
        return {moment: self._side_call(moment) for moment in MOMENTS}

    def _side_call(self, moment: str) -> Facts:
        engine, name, before = self.engine, f"side-{moment}", self.totals()
        mover = engine.mover
        chosen = {
            "written": policy(ROOM_FOR_ONE, mode="WriteBehind"),
            "streamed": policy("0"),
        }.get(moment, policy(ROOM_FOR_ONE))
        stuck: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "captured": lambda: held(mover._capture_lane),
            "written": self.stuck_writes,
            "streamed": lambda: held(mover._stream_lane),
        }
        self.forget_in_engine()
        with self.policy(chosen):
            with stuck.get(moment, nullcontext)():
                main = self.send(name)
                if moment == "answered":
                    engine.until(lambda: len(main.reply) > 2, "a part of the reply is there")
                else:
                    engine.finish(main)
                if moment == "written":
                    engine.until(lambda: self.is_written(name), "its write is ordered")
                if moment == "over":
                    engine.settle()
                side = engine.send(words(name, 6 * BLOCK_TOKENS), conversation=name, reply=4)
                engine.finish(side)
            engine.finish(main)
            engine.settle()
            return self.end(before=before, side=engine.receipt(side), next=self.turn(name, 1))


def _turn_signs(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[::2] *= -1


def _flip_a_byte(pack: str) -> None:
    (path,) = (FOLDER / "spill").rglob(f"{pack}.pack")
    with path.open("r+b") as file:
        file.seek(4096 + 5 * 32_768 + 777)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0xFF]))


SCENARIOS: tuple[Callable[[Scenarios], Facts], ...] = (
    Scenarios.preempted,
    Scenarios.preempted_before_it_was_copied,
    Scenarios.aborted_in_prefill,
    Scenarios.aborted_in_decode,
    Scenarios.aborted_before_it_was_scheduled,
    Scenarios.aborted_while_it_waits_for_the_gate,
    Scenarios.aborted_while_restoring,
    Scenarios.device_error,
    Scenarios.shared_blocks,
    Scenarios.disk_that_does_not_take_it,
    Scenarios.damaged,
    Scenarios.side_calls,
    Scenarios.reset_at_rest,
    Scenarios.reset_with_a_request_running,
    Scenarios.reset_while_restoring,
    Scenarios.reset_while_loading,
    Scenarios.reset_while_writing,
)


def main() -> None:
    right = transcripts()
    # Extents take their size from the first budget: one that is small makes them small.
    small = policy(ROOM_FOR_ONE)
    engine = LiveEngine(FOLDER, policy=small, blocks=BLOCKS, context=CONTEXT, step_tokens=STEP_TOKENS)
    engine.set_policy(policy())
    scenarios = Scenarios(engine, right)
    facts: Facts = {}
    for scenario in SCENARIOS:
        name = scenario.__name__
        if ONLY and name not in ONLY:
            continue
        started = time.monotonic()
        try:
            facts[name] = scenario(scenarios) | {"seconds": time.monotonic() - started}
        except Exception:  # noqa: BLE001 - reported as the scenario's outcome; the others still run
            facts[name] = {"error": traceback.format_exc()}
    (FOLDER / "facts.json").write_text(json.dumps(facts, indent=1))
    engine.close()


if __name__ == "__main__":
    main()
