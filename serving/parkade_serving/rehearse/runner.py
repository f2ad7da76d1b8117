"""Carries a rehearsal out: the pod starts, the clients talk, the waves come, the pod is killed and starts again.

What must stay true: whatever ends it, the pod, the neighbour and the clients end with it; a pod that ends by itself is
a result, not an error of the script.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.errors import ParkadeError
from parkade_cache.quantity import format_bytes
from parkade_serving.demo.chat import Chat, Conversation
from parkade_serving.demo.console import Console
from parkade_serving.demo.engine import Engine, EngineFailedError, free_port
from parkade_serving.demo.plan import EngineChoice, engine_environment
from parkade_serving.pod_client import PodRefusedError, PodUnreachableError
from parkade_serving.rehearse import waves
from parkade_serving.rehearse.crowd import Crowd, begun
from parkade_serving.rehearse.disk import SmallDisk
from parkade_serving.rehearse.enclosure import Enclosure
from parkade_serving.rehearse.ending import undisturbed
from parkade_serving.rehearse.figures import Killing, Measured, resumed
from parkade_serving.rehearse.neighbour import Neighbour, NeighbourGoneError
from parkade_serving.rehearse.plan import GENEROUS_LIMIT_BYTES, Need, Rounds, pod_command, upper_limit
from parkade_serving.rehearse.pod import Kept, Pod
from parkade_serving.rehearse.stage import Stage
from parkade_serving.rehearse.texts import Texts

_SETTLE_S: Final = 2.0
_FIRST_TURNS: Final = 8
_FIRST_TURNS_TIMEOUT_S: Final = 120.0
_LATEST_KILL_S: Final = 6.0
_SECONDS_PER_WAVE: Final = 20.0
_SECONDS_PER_VISIT: Final = 2.5
_SECONDS_OF_FULL_DISK: Final = 60.0


class PodNotEnclosedError(ParkadeError, RuntimeError):
    """The pod runs, and does not count the memory of the group it was put into."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a rehearsal takes place."""

    choice: EngineChoice
    rounds: Rounds
    seed: int
    enclosure: Enclosure
    disk: SmallDisk | None
    """None where the pod spills to an ordinary folder that must not be filled."""
    folder: Path
    console: Console
    deadline: float

    @property
    def spill_parent(self) -> Path:
        return self.disk.mount if self.disk is not None else self.folder


class Rehearsal:
    """One rehearsal, from the first start of its pod to its last answer."""

    def __init__(self, setting: Setting, texts: Texts) -> None:
        self._setting = setting
        self._engine: Engine | None = None
        self._stage = Stage(
            enclosure=setting.enclosure,
            crowd=Crowd(texts, seed=setting.seed),
            console=setting.console,
            chance=random.Random(setting.seed),  # noqa: S311 - a seed repeats a rehearsal
            deadline=setting.deadline,
        )

    @property
    def measured(self) -> Measured:
        return self._stage.measured

    def run(self) -> Measured:
        """Carry it out; what was measured is there also when the pod ended by itself.

        Raises:
            EngineFailedError: the pod did not start at all.
            PodNotEnclosedError: it does not see its control group.

        """
        begun_at = time.monotonic()
        with undisturbed() as cleanup:
            sockets = Path(tempfile.mkdtemp(prefix="parkade-"))
            cleanup.callback(shutil.rmtree, sockets, ignore_errors=True)
            cleanup.callback(self._kill)
            self._start(sockets)
            neighbour = Neighbour(self._setting.enclosure.processes_file)
            cleanup.callback(neighbour.end)
            try:
                self._first_life(neighbour)
                self._kill_and_come_back(sockets)
                self._stage.note_life()
            except (PodUnreachableError, PodRefusedError, EngineFailedError, NeighbourGoneError) as error:
                self.measured.broken = " ".join(str(error).split())[:1000]
                self._stage.crowd.forgive()
            self._count_up()
            self._stage.crowd.forgive()
        self.measured.seconds = time.monotonic() - begun_at
        return self.measured

    # -- lives of the pod ------------------------------------------------------------------------------------------

    def _start(self, sockets: Path) -> None:
        setting, stage = self._setting, self._stage
        setting.enclosure.set_limit(GENEROUS_LIMIT_BYTES)
        port = free_port()
        plain = pod_command(setting.choice, port=port, folder=setting.spill_parent, sockets=sockets)
        program = setting.enclosure.wrap(plain, python=setting.choice.python)
        env = engine_environment(os.environ, setting.choice)
        self._engine = Engine(program, env, port=port, log=setting.folder / "engine.log")
        setting.console.line("the pod starts")
        seconds = self._engine.wait_ready(lambda waited: setting.console.status(f"the pod starts, {waited:.0f} s"))
        stage.start_seconds = max(stage.start_seconds, seconds)
        stage.meet(Pod(self._engine.url))
        Chat(self._engine.url).warm_up()
        setting.console.line(f"the pod is ready after {seconds:.0f} s")

    def _kill(self) -> None:
        if self._engine is not None:
            self._engine.kill()
            self._engine = None

    def _set_first_limit(self) -> None:
        """A limit that fits what this engine takes here, which nobody knows before it runs."""
        stage, measured = self._stage, self.measured
        time.sleep(_SETTLE_S)
        need = Need(stage.need().base_bytes, stage.parked_max_bytes)
        stage.raise_limit(upper_limit(need.lowered_limit(need.parked_bytes // 2)))
        seen = stage.pod.summary()["memory"]["limit_bytes"]
        if stage.enclosure.has_kernel_limit and seen != stage.limit_bytes:
            raise PodNotEnclosedError(
                f"the pod reads a limit of {seen} bytes where {stage.limit_bytes} were set; it does not see its group"
            )
        measured.base_bytes, measured.limit_bytes = need.base_bytes, stage.limit_bytes
        measured.parked_max_bytes = stage.parked_max_bytes
        stage.console.line(
            f"the pod takes {format_bytes(need.base_bytes)}; limit {format_bytes(stage.limit_bytes)},"
            f" parked at most {format_bytes(stage.parked_max_bytes)}"
        )

    # -- the first life --------------------------------------------------------------------------------------------

    def _first_life(self, neighbour: Neighbour) -> None:
        stage, rounds, chance = self._stage, self._setting.rounds, self._stage.chance
        self._set_first_limit()
        stage.doing = "conversations begin"
        stage.crowd.start(stage.pod.url)
        stage.await_turns(_FIRST_TURNS, timeout_s=_FIRST_TURNS_TIMEOUT_S)
        for number in range(rounds.gulps):
            stage.doing = f"neighbour {number + 1} of {rounds.gulps}"
            if self._has_time("neighbour", rounds.gulps - number):
                self.measured.gulps.append(waves.gulp(stage, neighbour, floor_share=chance.uniform(0.12, 0.25)))
        for number in range(rounds.changes):
            stage.doing = f"limit {number + 1} of {rounds.changes}"
            if not self._has_time("limit changes", rounds.changes - number):
                break
            self.measured.changes.append(waves.change_announced(stage, given_share=chance.uniform(0.3, 0.6)))
            if self._setting.enclosure.has_kernel_limit:
                deep = self._setting.enclosure.kernel_refuses and number % 2 == 1
                share = chance.uniform(0.6, 0.85)
                self.measured.changes.append(waves.change_unannounced(stage, floor_share=share, deep=deep))
        if not self._setting.enclosure.has_kernel_limit:
            self._skip("unannounced limit changes: there is no control group")
        stage.doing = "disk full"
        if self._setting.disk is not None and self._has_time("full disk", 1, _SECONDS_OF_FULL_DISK):
            self.measured.full_disk = waves.fill_disk(stage, self._setting.disk)

    def _has_time(self, what: str, left: int, seconds: float = _SECONDS_PER_WAVE) -> bool:
        """Whether another round fits, with the kill and the second life still to come."""
        stage = self._stage
        visits = len(stage.crowd.conversations) * _SECONDS_PER_VISIT
        if stage.has_time_for(seconds + stage.start_seconds + visits):
            return True
        self._skip(f"{left} rounds of {what}: no time left; give it more with --minutes")
        return False

    def _skip(self, what: str) -> None:
        self.measured.skipped.append(what)
        self._stage.console.line(f"left out: {what}")

    # -- the kill --------------------------------------------------------------------------------------------------

    def _kill_and_come_back(self, sockets: Path) -> None:
        stage = self._stage
        stage.doing = "before the kill"
        ids = {one.session: stage.pod.id_of(one.session) for one in begun(stage.crowd.conversations)}
        deadline = time.monotonic() + stage.chance.uniform(0.5, _LATEST_KILL_S)
        while time.monotonic() < deadline:
            stage.pause(0.1)
        stage.fetch()
        stage.note_life()
        stage.crowd.forgive()
        # Last of all: what is asked for here must be true when the pod dies.
        turns = {one.session: one.turns for one in begun(stage.crowd.conversations)}
        kept = stage.pod.conversations(block_tokens=stage.block_tokens)
        self._kill()
        stage.console.line("the pod was killed")
        stage.crowd.stop()
        known = begun(stage.crowd.conversations)
        published = _published(known, ids=ids, turns=turns, kept=kept)
        self.measured.unpublished = frozenset(one.script.name for one in known if one.session not in published)
        self._start(sockets)
        stage.raise_limit(self.measured.limit_bytes)
        stage.doing = "everybody comes back"
        stage.crowd.revisit(stage.pod.url, known)
        stage.fetch()
        self._judge_revisits(known, published)

    def _judge_revisits(self, known: list[Conversation], published: Mapping[str, int]) -> None:
        by_name = {turn.conversation: turn for turn in self._stage.crowd.tally.turns if turn.after_restart}
        lost = []
        for conversation in known:
            on_disk_tokens = published.get(conversation.session)
            turn = by_name.get(conversation.script.name)
            if on_disk_tokens is not None and (turn is None or not resumed(turn, on_disk_tokens)):
                lost.append(conversation.script.name)
        self.measured.killing = Killing(
            published=len(published),
            resumed=len(published) - len(lost),
            lost=tuple(lost),
            not_judged=len(known) - len(published),
            start_seconds=self._stage.start_seconds,
        )
        self._stage.console.line(f"{len(published)} conversations were on disk, {len(published) - len(lost)} went on")

    def _count_up(self) -> None:
        """What kernel, clients and receipts have counted."""
        stage, measured = self._stage, self.measured
        measured.oom_kills = stage.enclosure.oom_kills()
        measured.turns = tuple(stage.crowd.tally.turns)
        measured.failures = tuple(stage.crowd.tally.failures)
        measured.retried = stage.crowd.tally.retried
        measured.receipts = tuple(stage.receipts.found)
        measured.conversations_dropped = max(measured.conversations_dropped, len(measured.drops))


def _published(
    known: list[Conversation], *, ids: Mapping[str, str], turns: Mapping[str, int], kept: Mapping[str, Kept]
) -> dict[str, int]:
    """Conversations that were wholly on disk when the pod was asked last, and how many tokens of them, by session.

    One that was answered in the moment between that and the kill is not among them.
    """
    found: dict[str, int] = {}
    for conversation in known:
        session = conversation.session
        one = kept.get(ids.get(session, ""))
        unchanged = turns.get(session) == conversation.turns
        if one is not None and unchanged and not one.dirty_bytes and one.on_disk_tokens:
            found[session] = one.on_disk_tokens
    return found
