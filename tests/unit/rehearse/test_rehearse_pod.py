"""What is asked of the rehearsed pod, against a real HTTP server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from parkade_serving.demo.chat import Conversation
from parkade_serving.demo.script import ConversationScript
from parkade_serving.pod_client import PodRefusedError, PodUnreachableError
from parkade_serving.rehearse import pod as pod_module
from parkade_serving.rehearse.pod import Kept, Pod, PolicyRefusedError, Receipts
from parkade_serving.rehearse.runner import _published

METRICS = """\
# HELP parkade_write_out_total Write-outs.
parkade_write_out_total{outcome="written"} 7.0
parkade_write_out_total{outcome="refused_free_space"} 2.0
parkade_dirty_bytes 12.0
"""


@dataclass
class Answers:
    """What the server answers, by method and path without its query; each request that came."""

    url: str = ""
    found: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    failing: int = 0


@pytest.fixture
def answers() -> Iterator[Answers]:
    answers = Answers()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def do_PUT(self) -> None:
            answers.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._answer("PUT")

        def _answer(self, method: str) -> None:
            answers.asked.append(self.path)
            status, body = answers.found.get((method, self.path.partition("?")[0]), (404, {"detail": "no such route"}))
            if answers.failing:
                answers.failing -= 1
                status, body = 503, {"detail": "busy"}
            payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        answers.url = f"http://127.0.0.1:{server.server_port}"
        yield answers
        server.shutdown()
        thread.join()


@pytest.fixture
def pod(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> Pod:
    monkeypatch.setattr(pod_module, "_AGAIN_AFTER_S", 0.0)
    return Pod(answers.url)


def test_case_66_a_limit_that_cannot_be_met_now_is_told_from_a_wrong_policy(answers: Answers, pod: Pod):
    route = ("PUT", "/parkade/v1/policy")
    answers.found[route] = (200, {"applied": True})
    assert pod.set_policy({"memory": {}}) == {"applied": True}
    assert answers.bodies == [{"memory": {}}]
    answers.found[route] = (409, {"detail": "cannot be met now"})
    with pytest.raises(PolicyRefusedError, match="cannot be met now"):
        pod.set_policy({})
    answers.found[route] = (422, {"detail": "memory.floor: no"})
    with pytest.raises(PodRefusedError, match=r"memory\.floor") as caught:
        pod.set_policy({})
    assert caught.value.status == 422


def test_a_pod_that_is_gone_is_said_to_be():
    pod = Pod("http://127.0.0.1:1")
    for ask in (lambda: pod.set_policy({}), lambda: pod.counter("parkade_dirty_bytes")):
        with pytest.raises(PodUnreachableError):
            ask()


def test_a_busy_pod_is_asked_again(answers: Answers, pod: Pod):
    answers.found["GET", "/parkade/v1/summary"] = (200, {"ready": True})
    answers.failing = 2
    assert pod.summary() == {"ready": True}
    answers.failing = 100
    with pytest.raises(PodRefusedError):
        pod.summary()


def test_counters_are_read_by_name_and_label(answers: Answers, pod: Pod):
    answers.found["GET", "/metrics"] = (200, METRICS)
    assert pod.counter("parkade_write_out_total", outcome="refused_free_space") == 2.0
    assert pod.counter("parkade_dirty_bytes") == 12.0
    assert pod.counter("parkade_write_out_total", outcome="deadline") == 0.0


def test_what_the_pod_has_of_a_conversation_is_told_in_tokens(answers: Answers, pod: Pod):
    known = {"id": "abc", "disk_blocks": 3, "dirty_bytes": 0, "ram_bytes": 9, "in_flight": 1, "idle_seconds": 2.5}
    answers.found["GET", "/parkade/v1/conversations"] = (200, {"conversations": [known]})
    assert pod.conversations(block_tokens=128) == {"abc": Kept("abc", 384, 0, 9, 1, 2.5)}
    answers.found["GET", "/parkade/v1/conversations/mine"] = (200, {"id": "abc"})
    assert pod.id_of("mine") == "abc"
    assert pod.id_of("theirs") == ""


def test_case_69_a_client_deletes_its_conversation_by_its_own_name(answers: Answers, pod: Pod):
    route = ("DELETE", "/parkade/v1/conversations/mine")
    pod.forget("mine")
    answers.found[route] = (200, {"forgotten": True})
    pod.forget("mine")
    assert answers.asked == ["/parkade/v1/conversations/mine?by=client"] * 2
    answers.found[route] = (500, {})
    with pytest.raises(PodRefusedError):
        pod.forget("mine")


def test_every_receipt_is_fetched_once_and_a_silent_pod_is_asked_again(answers: Answers, pod: Pod):
    route = ("GET", "/parkade/v1/receipts")
    receipts = Receipts()
    first = {"id": 1796006959042333, "kind": "resize", "outcome": "noticed", "time": 5.0}
    answers.found[route] = (200, {"receipts": [first]})
    receipts.catch_up(pod)
    answers.found[route] = (500, {})
    receipts.catch_up(pod)
    answers.found[route] = (200, {"receipts": [first | {"id": 1796006959042334, "time": 9.0}]})
    receipts.catch_up(pod)
    assert "since=1796006959042333" in answers.asked[-1]
    assert [one["time"] for one in receipts.since(6.0, "resize", "noticed")] == [9.0]
    assert len(receipts.found) == 2


def conversation(session: str, turns: int) -> Conversation:
    return Conversation(ConversationScript(session, ()), "", session, turns=turns)


def test_s2_only_what_was_wholly_on_disk_and_unchanged_until_the_kill_must_come_back():
    known = [conversation(name, turns=2) for name in ("whole", "dirty", "newer", "unknown", "ram-only")]
    kept = {
        "id-whole": Kept("id-whole", 512, 0, 0, 0, 9.0),
        "id-dirty": Kept("id-dirty", 512, 4096, 0, 0, 9.0),
        "id-newer": Kept("id-newer", 512, 0, 0, 1, 0.0),
        "id-ram-only": Kept("id-ram-only", 0, 0, 4096, 0, 9.0),
    }
    ids = {one.session: f"id-{one.session}" for one in known if one.session != "unknown"}
    turns = {one.session: 2 for one in known} | {"newer": 1}
    assert _published(known, ids=ids, turns=turns, kept=kept) == {"whole": 512}
