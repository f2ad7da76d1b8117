"""Carries the runs out: engines start, conversations take turns, engines end, engines start again.

What must stay true: only one engine is asked at a time, so that nobody's figures suffer from another's work; engines
may start side by side, because a start uses one core and measures nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from parkade_serving.demo.accounts import (
    count_drops,
    outcome_of,
    packed_bytes,
    read_cache_figures,
    read_turn_outcomes,
)
from parkade_serving.demo.chat import Chat, Conversation, MeasuredTurn, shared_with
from parkade_serving.demo.console import Console
from parkade_serving.demo.engine import Engine, free_port
from parkade_serving.demo.figures import CacheFigures, RunFigures, TurnFigures
from parkade_serving.demo.plan import EngineChoice, RunPlan, describe, engine_command, engine_environment
from parkade_serving.demo.script import ROUNDS_AFTER, ROUNDS_BEFORE, DemoScript
from parkade_serving.pod_client import PodClient

BEFORE_KILL_S: Final = 6.0
"""A conversation whose last turn ended 5 s before a kill must survive it in full."""
_POLL_S: Final = 0.25

PickPort = Callable[[], int]


@dataclass(slots=True)
class Run:
    """One run while it goes on."""

    plan: RunPlan
    budget_bytes: int | None
    folder: Path
    sockets: Path
    conversations: list[Conversation]
    newcomer: Conversation
    turns: list[TurnFigures] = field(default_factory=list)
    newcomer_turn: TurnFigures | None = None
    cache: CacheFigures = field(default_factory=CacheFigures)
    shutdown_seconds: float | None = None
    engine: Engine | None = None

    def figures(self) -> RunFigures:
        """What was measured, once the run is over."""
        dropped = max(self.cache.conversations_dropped, count_drops(self.folder))
        return RunFigures(
            name=self.plan.name,
            ram_budget_bytes=self.budget_bytes,
            turns=tuple(self.turns),
            newcomer=self.newcomer_turn,
            cache=dataclasses.replace(self.cache, conversations_dropped=dropped),
            shutdown_seconds=self.shutdown_seconds,
        )


class Runner:
    """Carries out runs in ``folder`` with one script."""

    def __init__(
        self,
        choice: EngineChoice,
        script: DemoScript,
        *,
        folder: Path,
        console: Console,
        pick_port: PickPort = free_port,
    ) -> None:
        self._choice = choice
        self._script = script
        self._folder = folder
        self._console = console
        self._pick_port = pick_port

    def run_together(self, plans: Sequence[tuple[RunPlan, int | None]]) -> Iterator[RunFigures]:
        """The figures of ``plans`` (each with its budget in bytes), whose engines start side by side."""
        with contextlib.ExitStack() as cleanup:
            runs = [self._prepare(plan, budget, cleanup) for plan, budget in plans]
            self._start(runs)
            for run in runs:
                self._play(run, rounds=ROUNDS_BEFORE, after_restart=False)
                if run.plan.killed:
                    self._wait(BEFORE_KILL_S, f"{run.plan.name}: waits before the kill")
                self._end(run, killed=run.plan.killed)
            self._start(runs)
            for run in runs:
                if run.plan.budget is not None:
                    self._welcome(run)
                self._play(run, rounds=ROUNDS_AFTER, after_restart=True)
                # How long an orderly end takes is known from the restart, but for a run that was killed there.
                self._end(run, killed=run.shutdown_seconds is not None)
                yield run.figures()

    def _prepare(self, plan: RunPlan, budget_bytes: int | None, cleanup: contextlib.ExitStack) -> Run:
        folder = self._folder / plan.name
        folder.mkdir(parents=True, exist_ok=True)
        # The path of a socket may have some 100 characters: not for a folder that a user chose.
        sockets = Path(tempfile.mkdtemp(prefix="parkade-"))
        cleanup.callback(shutil.rmtree, sockets, ignore_errors=True)
        run = Run(
            plan=plan,
            budget_bytes=budget_bytes,
            folder=folder,
            sockets=sockets,
            conversations=[
                Conversation(script, self._script.system_prompt, f"{plan.name}-{script.name}")
                for script in self._script.conversations
            ],
            newcomer=Conversation(self._script.newcomer, self._script.system_prompt, f"{plan.name}-new"),
        )
        cleanup.callback(_kill_engine, run)
        return run

    def _start(self, runs: Sequence[Run]) -> None:
        for run in runs:
            port = self._pick_port()
            command = engine_command(self._choice, run.plan, port=port, folder=run.folder, sockets=run.sockets)
            env = engine_environment(os.environ, self._choice)
            run.engine = Engine(command, env, port=port, log=run.folder / "engine.log")
            self._console.line(f"{run.plan.name}: engine starts ({describe(run.plan)})")
        for run in runs:
            took = _engine(run).wait_ready(self._waiting(f"{run.plan.name}: engine starts"))
            self._console.line(f"{run.plan.name}: engine ready after {took:.0f} s more")
            Chat(_engine(run).url).warm_up()

    def _play(self, run: Run, *, rounds: int, after_restart: bool) -> None:
        chat = Chat(_engine(run).url)
        measured: list[MeasuredTurn] = []
        for _ in range(rounds):
            for conversation in run.conversations:
                self._console.status(f"{run.plan.name}: {conversation.script.name} waits for its first token")
                measured.append(chat.take_turn(conversation, after_restart=after_restart))
                self._tell(run, measured[-1].figures)
        run.turns.extend(self._with_outcomes(run, measured))

    def _welcome(self, run: Run) -> None:
        """A conversation first seen after the restart: what it can resume is the shared system prompt."""
        measured = Chat(_engine(run).url).take_turn(run.newcomer, after_restart=True)
        shared = shared_with(run.newcomer.prompt_tokens, run.conversations)
        measured = dataclasses.replace(measured, figures=dataclasses.replace(measured.figures, resumable_tokens=shared))
        self._tell(run, measured.figures)
        (run.newcomer_turn,) = self._with_outcomes(run, [measured])

    def _with_outcomes(self, run: Run, measured: Sequence[MeasuredTurn]) -> list[TurnFigures]:
        outcomes = read_turn_outcomes(PodClient(_engine(run).url)) if run.plan.budget is not None else {}
        return [
            dataclasses.replace(one.figures, outcome=outcome_of(one.request, outcomes) or _plain_outcome(one.figures))
            for one in measured
        ]

    def _end(self, run: Run, *, killed: bool) -> None:
        engine = _engine(run)
        packed = packed_bytes(run.folder)
        if run.plan.budget is not None:
            run.cache = run.cache.plus(read_cache_figures(PodClient(engine.url)))
        if killed:
            engine.kill()
            self._console.line(f"{run.plan.name}: engine killed")
        else:
            seconds = engine.stop(self._waiting(f"{run.plan.name}: engine ends"))
            run.shutdown_seconds = max(run.shutdown_seconds or 0.0, seconds)
            run.cache = run.cache.plus(CacheFigures(spilled_bytes=max(0, packed_bytes(run.folder) - packed)))
            self._console.line(f"{run.plan.name}: engine ended within {seconds:.1f} s")
        run.engine = None

    def _tell(self, run: Run, turn: TurnFigures) -> None:
        cached = f"{turn.cached_tokens:5d} cached of {turn.resumable_tokens:5d} resumable"
        self._console.line(
            f"{run.plan.name:<12} {turn.conversation} turn {turn.turn}: {turn.prompt_tokens:5d} tokens, {cached},"
            f" first token {turn.first_token_seconds:6.2f} s"
        )

    def _waiting(self, what: str) -> Callable[[float], None]:
        return lambda seconds: self._console.status(f"{what}, {seconds:.0f} s")

    def _wait(self, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._console.status(f"{what}, {left:.0f} s")
            time.sleep(min(left, _POLL_S))


def _engine(run: Run) -> Engine:
    if run.engine is None:
        raise AssertionError(f"the engine of {run.plan.name} was not started")
    return run.engine


def _kill_engine(run: Run) -> None:
    if run.engine is not None:
        run.engine.kill()
        run.engine = None


def _plain_outcome(turn: TurnFigures) -> str:
    """What a turn without a receipt was, by its tokens alone."""
    if not turn.resumable_tokens:
        return "first"
    if turn.resumed:
        return "resumed"
    return "partial" if turn.cached_tokens else "reread"
