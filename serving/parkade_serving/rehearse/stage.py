"""What the waves of a rehearsal share: the pod, its limit, the clients, the clock.

What must stay true: while the script waits, receipts are fetched, so that none is lost when the pod is killed; a limit
that both kernel and policy know is raised in the kernel first and lowered in the policy first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from parkade_serving.demo.accounts import read_cache_figures
from parkade_serving.demo.console import Console
from parkade_serving.rehearse.crowd import Crowd
from parkade_serving.rehearse.enclosure import Enclosure
from parkade_serving.rehearse.figures import LongestHook, Measured, releases
from parkade_serving.rehearse.plan import MOST_LEFT, PARKED_BLOCKS, Need, policy_document
from parkade_serving.rehearse.pod import Pod, Receipts

_FETCH_EVERY_S: Final = 1.0
_LOOKS: Final = 5
_BETWEEN_LOOKS_S: Final = 0.2


@dataclass(slots=True)
class Stage:
    """One rehearsal while it goes on."""

    enclosure: Enclosure
    crowd: Crowd
    console: Console
    chance: random.Random
    deadline: float
    """Monotonic; rounds that would not end before it are left out."""
    measured: Measured = field(default_factory=Measured)
    receipts: Receipts = field(default_factory=Receipts)
    block_tokens: int = 0
    block_bytes: int = 0
    limit_bytes: int = 0
    """What counts for the pod now, the smaller one of kernel and policy."""
    start_seconds: float = 0.0
    doing: str = ""
    _pod: Pod | None = None
    _fetched: float = float("-inf")

    @property
    def pod(self) -> Pod:
        if self._pod is None:
            raise AssertionError("the pod has not been started")
        return self._pod

    def meet(self, pod: Pod) -> None:
        """A new life of the pod."""
        self._pod = pod
        identity = pod.summary()["identity"]
        self.block_tokens, self.block_bytes = int(identity["block_tokens"]), int(identity["block_bytes"])

    @property
    def parked_max_bytes(self) -> int:
        return PARKED_BLOCKS * self.block_bytes

    # -- time --------------------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Wait; receipts are fetched and old conversations closed now and then."""
        begun = time.monotonic()
        time.sleep(seconds)
        # Every process here competes for the same cores: what this one waits for them, a hook may wait too.
        waited = time.monotonic() - begun - seconds
        self.measured.core_wait_seconds = max(self.measured.core_wait_seconds, waited)
        if time.monotonic() - self._fetched >= _FETCH_EVERY_S:
            self.fetch()
            for conversation in self.crowd.close_oldest(MOST_LEFT):
                self.pod.forget(conversation.session)
            tally = self.crowd.tally
            self.console.status(f"{self.doing}: {tally.answered} turns, {self.released_since(0.0)} left memory")

    def fetch(self) -> None:
        """Every receipt up to now."""
        self.receipts.catch_up(self.pod)
        self._fetched = time.monotonic()

    def await_turns(self, count: int, *, timeout_s: float) -> bool:
        """Wait until so many more turns were answered."""
        wanted = self.crowd.tally.answered + count
        return self.wait(lambda: self.crowd.tally.answered >= wanted, timeout_s=timeout_s) is not None

    def wait(self, what: Callable[[], bool], *, timeout_s: float, every_s: float = 0.1) -> float | None:
        """Seconds until ``what()`` came true; None where it did not in time."""
        begun = time.monotonic()
        while not what():
            if time.monotonic() - begun > timeout_s:
                return None
            self.pause(every_s)
        return time.monotonic() - begun

    def has_time_for(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.deadline

    # -- memory ------------------------------------------------------------------------------------------------

    def available_bytes(self) -> int:
        """What is left under the limit, by the kernel's own numbers."""
        return self.limit_bytes - self.enclosure.net_bytes()

    def need(self) -> Need:
        """What the pod cannot give back, and what it has parked.

        The largest of a few looks: an engine takes and gives back within a step, and what is parked changes between
        two questions.
        """
        looks = []
        for _ in range(_LOOKS):
            parked_bytes = int(self.pod.summary()["memory"]["parked_held_bytes"])
            looks.append(Need.of(net_bytes=self.enclosure.net_bytes(), parked_bytes=parked_bytes))
            time.sleep(_BETWEEN_LOOKS_S)
        return Need(max(look.base_bytes for look in looks), looks[-1].parked_bytes)

    def idle_parked_bytes(self) -> int:
        """What is parked for conversations that nobody is talking in just now."""
        kept = self.pod.conversations(block_tokens=self.block_tokens)
        return sum(one.ram_bytes for one in kept.values() if not one.in_flight)

    def raise_limit(self, limit_bytes: int, *, parked_max_bytes: int | None = None) -> None:
        """Kernel first, then policy."""
        self.enclosure.set_limit(limit_bytes)
        self.announce(limit_bytes, parked_max_bytes=parked_max_bytes)
        self.limit_bytes = limit_bytes

    def announce(self, limit_bytes: int, *, parked_max_bytes: int | None = None) -> None:
        """The policy alone; returns once it counts."""
        parked = self.parked_max_bytes if parked_max_bytes is None else parked_max_bytes
        self.pod.set_policy(policy_document(limit_bytes=limit_bytes, parked_max_bytes=parked))

    # -- what the pod said ---------------------------------------------------------------------------------------

    def released_since(self, moment: float) -> int:
        """Conversations that have left RAM since ``moment`` (unix seconds), by the receipts fetched so far."""
        return sum(float(one["time"]) >= moment for one in releases(self.receipts.found))

    def note_life(self) -> None:
        """What only a living pod can say of itself: losses and its longest hook."""
        figures = read_cache_figures(self.pod.client)
        self.measured.conversations_dropped += figures.conversations_dropped
        if figures.longest_hook_seconds > self.measured.hook.seconds:
            self.measured.hook = LongestHook(name=figures.longest_hook, seconds=figures.longest_hook_seconds)
