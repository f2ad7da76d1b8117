"""The clients, against a real HTTP server that answers as the engine does."""

from __future__ import annotations

import http.server
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from parkade_serving.demo.chat import TurnFailedError
from parkade_serving.rehearse import crowd as crowd_module
from parkade_serving.rehearse.crowd import Crowd, begun, retry_after_s
from parkade_serving.rehearse.texts import LONG, SMALL, Texts

pytest.importorskip("openai")


@dataclass
class Engine:
    """Answers every turn with one word; refuses those that it is told to."""

    refuse: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        length = int(request.headers["content-length"])
        body = json.loads(request.rfile.read(length))
        self.sessions.append(request.headers["x-session-id"])
        if self.refuse:
            status, headers = self.refuse.pop(0)
            self._send(request, status, "application/json", b'{"error": {"message": "come again"}}', headers)
            return
        prompt = list(range(len(json.dumps(body["messages"])) // 4))
        chunks: list[dict[str, Any]] = [
            {"prompt_token_ids": prompt, "choices": [{"index": 0, "delta": {"content": "yes"}, "token_ids": [1]}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": 1,
                    "total_tokens": len(prompt) + 1,
                    "prompt_tokens_details": {"cached_tokens": 128},
                },
            },
        ]
        common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "demo"}
        lines = [f"data: {json.dumps(common | chunk)}\n\n" for chunk in chunks]
        self._send(request, 200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode(), {})

    def _send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        status: int,
        kind: str,
        payload: bytes,
        headers: dict[str, str],
    ) -> None:
        request.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(payload)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(payload)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            engine.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        engine.url = f"http://127.0.0.1:{server.server_port}"
        yield engine
        server.shutdown()
        thread.join()


def texts() -> Texts:
    return Texts(lambda text, tokens: text[: tokens * 3], seed=7)


@pytest.fixture
def crowd() -> Crowd:
    return Crowd(texts(), seed=7)


def test_no_two_conversations_say_the_same_but_the_system_prompt():
    made = texts()
    conversations = [made.conversation(LONG) for _ in range(30)]
    assert len({one.script.messages[0] for one in conversations}) == 30
    assert len({one.session for one in conversations}) == 30
    assert {len(one.script.messages) for one in conversations} == {LONG.turns + LONG.spare_turns}


def test_the_same_seed_tells_the_same_story():
    first, second = texts().conversation(SMALL), texts().conversation(SMALL)
    assert first.script == second.script


def test_everybody_comes_back_once(engine: Engine, crowd: Crowd):
    made = texts()
    conversations = [made.conversation(SMALL) for _ in range(5)]
    crowd.revisit(engine.url, conversations)
    assert sorted(engine.sessions) == sorted(one.session for one in conversations)
    assert [one.turns for one in conversations] == [1] * 5
    assert all(turn.after_restart and turn.cached_tokens == 128 for turn in crowd.tally.turns)
    assert begun([*conversations, made.conversation(SMALL)]) == conversations


def test_who_leaves_is_known_until_everybody_comes_back(engine: Engine, crowd: Crowd):
    crowd.leave_behind(engine.url, 2)
    assert [one.turns for one in crowd.conversations] == [1, 1]
    crowd.revisit(engine.url, crowd.conversations)
    assert [one.turns for one in crowd.conversations] == [2, 2]


def test_case_61_who_is_asked_to_come_again_comes_again(engine: Engine, crowd: Crowd):
    engine.refuse = [(503, {"retry-after": "0"})]
    crowd.revisit(engine.url, [texts().conversation(SMALL)])
    assert (crowd.tally.answered, crowd.tally.retried, crowd.tally.failures) == (1, 1, [])


@pytest.mark.parametrize("refusal", [(500, {}), (503, {}), (400, {"retry-after": "1"})])
def test_what_fails_otherwise_is_kept_and_costs_the_conversation_nothing(
    engine: Engine, crowd: Crowd, refusal: tuple[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(crowd_module, "_AFTER_FAILURE_S", 0.0)
    engine.refuse = [refusal]
    conversation = texts().conversation(SMALL)
    crowd.revisit(engine.url, [conversation])
    assert conversation.turns == 0
    assert len(crowd.tally.failures) == 1
    crowd.revisit(engine.url, [conversation])
    assert conversation.turns == 1


def test_nobody_is_blamed_for_a_pod_that_is_being_killed(engine: Engine, crowd: Crowd):
    engine.refuse = [(500, {})]
    crowd.forgive()
    from parkade_serving.demo.chat import Chat

    crowd._turn(Chat(engine.url), texts().conversation(SMALL))
    assert crowd.tally.failures == []


def test_clients_begin_talk_and_end(engine: Engine, crowd: Crowd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crowd_module, "_LONG_THINKS_S", 0.0)
    monkeypatch.setattr(crowd_module, "_SMALL_THINKS_S", 0.0)
    crowd.start(engine.url)
    done = threading.Event()
    while crowd.tally.answered < 40:
        done.wait(0.01)
    crowd.stop()
    shapes = {one.script.name.partition("-")[0] for one in begun(crowd.conversations)}
    assert shapes == {"long", "small"}
    assert max(one.turns for one in crowd.conversations) <= LONG.turns + LONG.spare_turns - 1
    assert not any(thread.name.startswith("client-") for thread in threading.enumerate())


def test_a_conversation_that_was_left_has_always_a_turn_to_spare_for_the_second_life(crowd: Crowd):
    said_almost_all, has_more = texts().conversation(LONG), texts().conversation(LONG)
    said_almost_all.turns = LONG.turns + LONG.spare_turns - 1
    has_more.turns = said_almost_all.turns - 1
    crowd._left = [said_almost_all, has_more]
    chance = random.Random(1)
    assert {one and one.session for one in (crowd._returning(chance) for _ in range(50))} == {None, has_more.session}


def test_the_oldest_that_were_left_are_closed_but_for_the_one_that_is_talked_in(crowd: Crowd):
    made = texts()
    crowd._left = [made.conversation(LONG) for _ in range(5)]
    crowd.conversations = [*crowd._left, made.conversation(LONG)]
    first, second, third, *_ = crowd._left
    crowd._coming_back = second.session
    assert crowd.close_oldest(2) == [first, third]
    assert crowd._left[0] is second
    assert len(crowd.conversations) == 4
    assert crowd.close_oldest(10) == []


def test_an_error_that_is_no_answer_asks_nobody_to_come_again():
    assert retry_after_s(TurnFailedError("the engine sent no token")) is None
