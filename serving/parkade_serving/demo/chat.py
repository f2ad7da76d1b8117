"""Takes turns in a conversation over HTTP, with the OpenAI client, and measures them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from parkade_cache.errors import ParkadeError
from parkade_serving.demo.figures import TurnFigures, common_prefix, resumable_tokens
from parkade_serving.demo.plan import BLOCK_TOKENS, SERVED_NAME
from parkade_serving.demo.script import ConversationScript

if TYPE_CHECKING:
    from openai import OpenAI

REPLY_TOKENS: Final = 10
_TIMEOUT_S: Final = 600.0
_ANY_KEY: Final = "none"


class TurnFailedError(ParkadeError, RuntimeError):
    """The engine answered a turn with an error, or with an answer that cannot be measured."""


@dataclass(slots=True)
class Conversation:
    """One conversation as its user knows it, and the tokens that the engine saw."""

    script: ConversationScript
    system_prompt: str
    session: str
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt_tokens: tuple[int, ...] = ()
    reply_tokens: tuple[int, ...] = ()
    turns: int = 0

    def ask(self) -> list[dict[str, str]]:
        """All messages up to the next of the user's."""
        if not self.messages:
            self.messages = [{"role": "system", "content": self.system_prompt}]
        return [*self.messages, {"role": "user", "content": self.script.messages[self.turns]}]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from one turn."""

    text: str
    prompt_tokens: tuple[int, ...]
    reply_tokens: tuple[int, ...]
    cached_tokens: int
    first_token_seconds: float
    request: str


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """A turn's figures, and the request by which the engine knew it."""

    figures: TurnFigures
    request: str


class Chat:
    """A client of one engine."""

    def __init__(self, url: str) -> None:
        from openai import OpenAI  # noqa: PLC0415 - comes with the engine, takes a second, not for --help

        self._client: OpenAI = OpenAI(base_url=f"{url}/v1", api_key=_ANY_KEY, timeout=_TIMEOUT_S, max_retries=0)

    def warm_up(self) -> None:
        """One token, so that no run's first turn pays for what an engine does at its first request."""
        self._client.completions.create(model=SERVED_NAME, prompt="Hello", max_tokens=1, temperature=0)

    def take_turn(self, conversation: Conversation, *, after_restart: bool) -> MeasuredTurn:
        """The next turn of ``conversation``.

        Raises:
            TurnFailedError: the engine refused it or said nothing.

        """
        asked = conversation.ask()
        answer = self._ask(asked, conversation.session)
        figures = TurnFigures(
            conversation=conversation.script.name,
            turn=conversation.turns + 1,
            after_restart=after_restart,
            prompt_tokens=len(answer.prompt_tokens),
            cached_tokens=answer.cached_tokens,
            resumable_tokens=resumable_tokens(
                answer.prompt_tokens,
                conversation.prompt_tokens,
                conversation.reply_tokens,
                block_tokens=BLOCK_TOKENS,
            ),
            first_token_seconds=answer.first_token_seconds,
        )
        conversation.messages = [*asked, {"role": "assistant", "content": answer.text}]
        conversation.prompt_tokens, conversation.reply_tokens = answer.prompt_tokens, answer.reply_tokens
        conversation.turns += 1
        return MeasuredTurn(figures, answer.request)

    def _ask(self, messages: list[dict[str, str]], session: str) -> Answer:
        from openai import OpenAIError  # noqa: PLC0415

        begun = time.perf_counter()
        try:
            stream = self._client.chat.completions.create(
                model=SERVED_NAME,
                messages=cast("Any", messages),  # plain dictionaries of the right shape
                stream=True,
                stream_options={"include_usage": True},
                temperature=0,
                seed=0,
                max_tokens=REPLY_TOKENS,
                extra_headers={"X-Session-ID": session},
                extra_body={"return_token_ids": True},
            )
            return _collect(stream, begun)
        except OpenAIError as error:
            raise TurnFailedError(f"a turn failed: {error}") from error


def shared_with(prompt: tuple[int, ...], others: Iterable[Conversation]) -> int:
    """Whole-block tokens that a prompt shares with the longest match among other conversations' prompts."""
    longest = max((common_prefix(prompt, other.prompt_tokens) for other in others), default=0)
    return longest // BLOCK_TOKENS * BLOCK_TOKENS


def _collect(stream: Iterable[Any], begun: float) -> Answer:
    text, reply, prompt, cached, request = "", list[int](), tuple[int, ...](), 0, ""
    first: float | None = None
    for chunk in stream:
        request = chunk.id
        prompt = tuple(getattr(chunk, "prompt_token_ids", None) or prompt)
        for choice in chunk.choices:
            tokens = getattr(choice, "token_ids", None) or ()
            text += choice.delta.content or ""
            reply.extend(tokens)
            if first is None and (tokens or choice.delta.content):
                first = time.perf_counter() - begun
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    if first is None or not prompt:
        raise TurnFailedError("a turn failed: the engine sent no token, or not the tokens of the prompt")
    return Answer(text, prompt, tuple(reply), cached, first, request)
