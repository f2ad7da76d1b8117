"""The clients: two long conversations that take turns, and two small ones that keep the engine busy.

What must stay true: they speak ordinary HTTP and know nothing of the cache; a request that is asked to come again
comes again; whatever else fails is kept, and a conversation goes on from its last answered turn.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from parkade_serving.demo.chat import Chat, Conversation, TurnFailedError
from parkade_serving.demo.figures import TurnFigures
from parkade_serving.rehearse.texts import LONG, SMALL, Shape, Texts

_SMALL_CLIENTS: Final = 2
_LONG_THINKS_S: Final = 0.3
_SMALL_THINKS_S: Final = 2.0
_COMES_BACK: Final = 0.2
"""How often a long turn is one of a conversation that was left earlier."""
_RETRY_FOR_S: Final = 60.0
_AFTER_FAILURE_S: Final = 1.0
_END_TIMEOUT_S: Final = 120.0
_RETRY_STATUSES: Final = frozenset({429, 503})


@dataclass(slots=True)
class Tally:
    """What came of all requests so far."""

    turns: list[TurnFigures]
    failures: list[str]
    retried: int = 0

    @property
    def answered(self) -> int:
        return len(self.turns)


class Crowd:
    """All clients; their conversations outlive the pod."""

    def __init__(self, texts: Texts, *, seed: int) -> None:
        self._texts = texts
        self._seed = seed
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._forgiving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._after_restart = False
        self._left: list[Conversation] = []
        self._coming_back = ""
        self.conversations: list[Conversation] = []
        self.tally = Tally([], [])

    # -- while the pod lives ---------------------------------------------------------------------------------------

    def start(self, url: str) -> None:
        """All clients begin, or go on."""
        self._leaving.clear()
        self._forgiving.clear()
        bodies = [self._take_long_turns, *[self._take_small_turns] * _SMALL_CLIENTS]
        for number, body in enumerate(bodies):
            thread = threading.Thread(
                target=body,
                args=(Chat(url), random.Random(self._seed * 100 + number)),  # noqa: S311
                name=f"client-{number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def leave_behind(self, url: str, count: int) -> None:
        """So many users begin a long conversation, get one answer and go: their memory can be given back.

        They come back after the kill.
        """
        chat = Chat(url)
        for _ in range(count):
            conversation = self._begin(LONG)
            self._turn(chat, conversation)
            self._leave(conversation)

    def close_oldest(self, most: int) -> list[Conversation]:
        """Of those that were left, all but the ``most`` that were left last are closed for good: nobody comes back."""
        with self._lock:
            old = self._left[: max(0, len(self._left) - most)]
            closed = [one for one in old if one.session != self._coming_back]
            self._left = [one for one in self._left if one not in closed]
            self.conversations = [one for one in self.conversations if one not in closed]
            return closed

    def forgive(self) -> None:
        """The pod is about to be killed: requests that fail from now on do not count."""
        self._forgiving.set()
        self._leaving.set()

    def stop(self) -> None:
        """All clients end with the turn that they are in."""
        self._leaving.set()
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)
        self._threads.clear()

    def revisit(self, url: str, conversations: Sequence[Conversation]) -> None:
        """One more turn of each, three at a time, as everybody comes back after a restart."""
        self._after_restart = True
        self._leaving.clear()
        self._forgiving.clear()
        chats = threading.local()

        def visit(conversation: Conversation) -> None:
            if not hasattr(chats, "chat"):
                chats.chat = Chat(url)
            if not self._leaving.is_set():
                self._turn(chats.chat, conversation)

        with contextlib.ExitStack() as ending:
            pool = ThreadPoolExecutor(max_workers=1 + _SMALL_CLIENTS)
            ending.callback(pool.shutdown, wait=False, cancel_futures=True)
            ending.callback(self._leaving.set)
            list(pool.map(visit, conversations))

    # -- clients ---------------------------------------------------------------------------------------------------

    def _take_long_turns(self, chat: Chat, chance: random.Random) -> None:
        pair = [self._begin(LONG), self._begin(LONG)]
        while not self._leaving.is_set():
            for place in range(len(pair)):
                if pair[place].turns >= LONG.turns:
                    self._leave(pair[place])
                    pair[place] = self._begin(LONG)
                self._turn(chat, self._returning(chance) or pair[place])
                self._coming_back = ""
                if self._leaving.wait(_LONG_THINKS_S):
                    return

    def _take_small_turns(self, chat: Chat, chance: random.Random) -> None:
        conversation = self._begin(SMALL)
        while not self._leaving.wait(_SMALL_THINKS_S * chance.uniform(0.5, 1.5)):
            if conversation.turns >= SMALL.turns:
                self._leave(conversation)
                conversation = self._begin(SMALL)
            self._turn(chat, conversation)

    def _begin(self, shape: Shape) -> Conversation:
        with self._lock:
            conversation = self._texts.conversation(shape)
            self.conversations.append(conversation)
            return conversation

    def _leave(self, conversation: Conversation) -> None:
        with self._lock:
            self._left.append(conversation)

    def _returning(self, chance: random.Random) -> Conversation | None:
        """A long one that was left earlier, now and then, while it has more than its last turn to say."""
        if chance.random() >= _COMES_BACK:
            return None
        with self._lock:
            waiting = [one for one in self._left if LONG.turns <= one.turns < LONG.turns + LONG.spare_turns - 1]
            found = chance.choice(waiting) if waiting else None
            self._coming_back = "" if found is None else found.session
            return found

    def _turn(self, chat: Chat, conversation: Conversation) -> None:
        """One turn; asked again for as long as the pod says to come again."""
        deadline = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                figures = chat.take_turn(conversation, after_restart=self._after_restart).figures
            except TurnFailedError as error:
                if self._forgiving.is_set():
                    return
                seconds = retry_after_s(error)
                if seconds is None or time.monotonic() + seconds > deadline:
                    with self._lock:
                        self.tally.failures.append(f"{conversation.script.name}: {error}")
                    self._leaving.wait(_AFTER_FAILURE_S)
                    return
                with self._lock:
                    self.tally.retried += 1
                if self._leaving.wait(seconds):
                    return
            else:
                with self._lock:
                    self.tally.turns.append(figures)
                return


def retry_after_s(error: TurnFailedError) -> float | None:
    """When the pod wants to be asked again; None where it does not."""
    cause = error.__cause__
    response = getattr(cause, "response", None)
    if response is None or getattr(cause, "status_code", None) not in _RETRY_STATUSES:
        return None
    text = str(response.headers.get("retry-after", ""))
    return float(text) if text.isascii() and text.isdigit() else None


def begun(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Those that have an answered turn, and so something to come back to."""
    return [conversation for conversation in conversations if conversation.turns > 0]
