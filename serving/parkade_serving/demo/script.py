"""What is said in the demo's conversations: real text, cut to a number of tokens.

What must stay true: the same machine and model give the same script, so that all runs ask the same questions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parkade_cache.errors import ParkadeError
from parkade_serving.demo.agent import SYSTEM_PROMPT

ROUNDS_BEFORE: Final = 3
ROUNDS_AFTER: Final = 2

FIRST_PROMPT_TOKENS: Final = 1900
"""About 2,000 with what the chat template adds."""
LATER_TOKENS: Final = 240
"""About 300 with the question and what the chat template adds."""

_SOURCES: Final = {"ada": "argparse", "ben": "tarfile", "cyd": "inspect", "new": "zipfile"}
_NEWCOMER: Final = "new"
_FALLBACK_CHARS_PER_TOKEN: Final = 3.3

_QUESTION: Final = "Which class or function here would you read first to understand the module, and why?"
_FOLLOW_UPS: Final = (
    "What does this part add to what you have seen so far?",
    "Which of these functions could raise, and what should a caller do about it?",
    "Name one thing in these lines that a test should cover.",
    "What would break if these lines were removed?",
)

CutText = Callable[[str, int], str]
"""Cuts a text to at most so many tokens."""


class SourceUnavailableError(ParkadeError, LookupError):
    """The running Python has no readable source for a module of the script."""


@dataclass(frozen=True, slots=True)
class ConversationScript:
    """One conversation: what its user says, turn by turn."""

    name: str
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoScript:
    """Everything that is said."""

    system_prompt: str
    conversations: tuple[ConversationScript, ...]
    newcomer: ConversationScript
    """First seen after the restart."""


def make_script(cut: CutText) -> DemoScript:
    """The script, with texts cut by ``cut``.

    Raises:
        SourceUnavailableError: the standard library's sources are not installed.

    """
    scripts = {name: _conversation(name, module, cut) for name, module in _SOURCES.items()}
    newcomer = scripts.pop(_NEWCOMER)
    return DemoScript(SYSTEM_PROMPT, tuple(scripts.values()), newcomer)


def _conversation(name: str, module: str, cut: CutText) -> ConversationScript:
    system_tokens = _count_by_cutting(SYSTEM_PROMPT, cut)
    sizes = [FIRST_PROMPT_TOKENS - system_tokens] + [LATER_TOKENS] * (ROUNDS_BEFORE + ROUNDS_AFTER - 1)
    return ConversationScript(name, tuple(_messages(module, _pieces(read_source(module), sizes, cut))))


def _count_by_cutting(text: str, cut: CutText) -> int:
    """Tokens of ``text``: the smallest number that cuts nothing off."""
    low, high = 1, len(text)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(text, middle)) == len(text) else (middle + 1, high)
    return low


def _pieces(text: str, sizes: Sequence[int], cut: CutText) -> Iterator[str]:
    rest = text
    for size in sizes:
        piece = cut(rest, size)
        # Whole lines only; a single line longer than a piece is kept as it was cut.
        piece = piece[: piece.rfind("\n") + 1] or piece
        rest = rest[len(piece) :]
        yield piece


def _messages(module: str, pieces: Iterator[str]) -> Iterator[str]:
    yield f"This is the beginning of {module}.py:\n\n```python\n{next(pieces)}```\n\n{_QUESTION}"
    for question, piece in zip(_FOLLOW_UPS, pieces, strict=True):
        yield f"Result of read_file, the next lines of {module}.py:\n\n```python\n{piece}```\n\n{question}"


def read_source(module: str) -> str:
    """The source text of a module of the standard library."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise SourceUnavailableError(f"the source of Python's module {module} is not installed; install it to run this")
    return Path(spec.origin).read_text(encoding="utf-8")


def cutter_for(model: str) -> CutText:
    """A cutter with the model's own tokenizer where its file can be read, else by a typical length of a token."""
    path = Path(model) / "tokenizer.json"
    return _exact_cutter(path) if path.is_file() else _cut_by_length


def _cut_by_length(text: str, tokens: int) -> str:
    return text[: int(tokens * _FALLBACK_CHARS_PER_TOKEN)]


def _exact_cutter(path: Path) -> CutText:
    from tokenizers import Tokenizer  # noqa: PLC0415 - comes with the engine, and --help must not need it

    tokenizer = Tokenizer.from_file(str(path))

    def cut(text: str, tokens: int) -> str:
        # No token of code is longer than 16 characters on average, and encoding a whole file would take a second.
        encoded = tokenizer.encode(text[: tokens * 16], add_special_tokens=False)
        if len(encoded.offsets) <= tokens:
            return text
        end: int = encoded.offsets[tokens][0]
        return text[:end]

    return cut
