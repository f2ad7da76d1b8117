"""What is said in the demo: real text, in pieces of the right size, the same each time."""

from __future__ import annotations

from parkade_serving.demo.chat import Conversation
from parkade_serving.demo.script import (
    FIRST_PROMPT_TOKENS,
    LATER_TOKENS,
    ROUNDS_AFTER,
    ROUNDS_BEFORE,
    make_script,
    read_source,
)


def cut_words(text: str, tokens: int) -> str:
    """A tokenizer for tests: four characters are a token."""
    return text[: tokens * 4]


def test_three_conversations_have_five_turns_and_the_newcomer_can_say_something():
    script = make_script(cut_words)
    assert [len(one.messages) for one in script.conversations] == [ROUNDS_BEFORE + ROUNDS_AFTER] * 3
    assert script.newcomer.messages


def test_the_same_script_comes_out_each_time():
    assert make_script(cut_words) == make_script(cut_words)


def test_prompts_have_about_the_promised_number_of_tokens():
    script = make_script(cut_words)
    for conversation in script.conversations:
        first, *later = (len(message) / 4 for message in conversation.messages)
        assert FIRST_PROMPT_TOKENS * 0.9 < first + len(script.system_prompt) / 4 < FIRST_PROMPT_TOKENS * 1.1
        assert all(LATER_TOKENS * 0.8 < size < LATER_TOKENS * 1.3 for size in later)


def test_pieces_of_a_source_follow_each_other_without_a_gap():
    source = read_source("argparse")
    pieces = [
        message.split("```python\n")[1].split("```")[0] for message in make_script(cut_words).conversations[0].messages
    ]
    assert source.startswith("".join(pieces))


def test_conversations_share_their_system_prompt_and_nothing_after_it():
    script = make_script(cut_words)
    assert len({one.messages[0] for one in (*script.conversations, script.newcomer)}) == 4


def test_a_conversation_asks_with_everything_that_was_said_before():
    script = make_script(cut_words)
    conversation = Conversation(script.conversations[0], script.system_prompt, "session")
    first = conversation.ask()
    assert [message["role"] for message in first] == ["system", "user"]
    conversation.messages = [*first, {"role": "assistant", "content": "because"}]
    conversation.turns = 1
    assert [message["role"] for message in conversation.ask()] == ["system", "user", "assistant", "user"]
    assert conversation.ask()[:2] == first
