"""What is said in a rehearsal's conversations: real text, cut to a number of tokens.

What must stay true: no two conversations share more than the system prompt, so that what one of them finds again is
its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from parkade_serving.demo.agent import SYSTEM_PROMPT
from parkade_serving.demo.chat import Conversation
from parkade_serving.demo.script import ConversationScript, CutText, read_source

_MODULES: Final = ("argparse", "tarfile", "inspect", "zipfile", "typing", "subprocess", "doctest", "pickle", "mailbox")
_SHORT_PROMPT: Final = SYSTEM_PROMPT.partition("# Tools")[0].rstrip()
_QUESTION: Final = "What in these lines would you test first?"


@dataclass(frozen=True, slots=True)
class Shape:
    """How long a conversation is: tokens of its first message and of each later one, and how many turns it takes."""

    name: str
    first_tokens: int
    later_tokens: int
    turns: int
    spare_turns: int
    """For those who come back to it later, after a restart for one."""


LONG: Final = Shape("long", first_tokens=650, later_tokens=130, turns=8, spare_turns=4)
"""About 1,000 tokens with the system prompt, growing by some 150 a turn."""
SMALL: Final = Shape("small", first_tokens=60, later_tokens=30, turns=6, spare_turns=4)


class Texts:
    """Makes conversations; not thread-safe."""

    def __init__(self, cut: CutText, *, seed: int) -> None:
        self._cut = cut
        self._random = random.Random(seed)  # noqa: S311 - which text is read is no secret
        self._sources = [read_source(module) for module in _MODULES]
        self._numbers = itertools.count(1)
        self._seed = seed

    def conversation(self, shape: Shape) -> Conversation:
        """A new conversation of that shape."""
        name = f"{shape.name}-{next(self._numbers)}"
        text = self._random.choice(self._sources)
        # From anywhere in the first half: what follows is long enough for every turn.
        text = text[self._random.randrange(len(text) // 2) :]
        script = ConversationScript(name, tuple(self._messages(name, shape, text)))
        return Conversation(script, _SHORT_PROMPT, f"rehearsal-{self._seed}-{name}")

    def _messages(self, name: str, shape: Shape, text: str) -> Iterator[str]:
        later = [shape.later_tokens] * (shape.turns + shape.spare_turns - 1)
        for size in (shape.first_tokens, *later):
            piece = self._cut(text, size)
            text = text[len(piece) :]
            yield f"Notes for {name}:\n\n```python\n{piece}\n```\n\n{_QUESTION}"
