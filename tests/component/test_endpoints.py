"""The pod's routes over a real owner's socket, and the plug-in inside vLLM's own application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest

from parkade_cache.metrics import CacheMetrics
from parkade_cache.receipts import ReceiptKind, ReceiptLog
from parkade_serving.admin_access import AdminAccess
from parkade_serving.collector import OwnerCollector, Registration
from parkade_serving.endpoints import ParkadeEndpoints, create
from parkade_serving.generation_routes import GENERATION_ROUTES
from parkade_serving.id_key import load_id_key
from parkade_serving.identity import NO_TENANT, Hasher, Tenant
from parkade_serving.rpc import OwnerClient, OwnerServer

Call = tuple[str, dict[str, Any]]


class Owner:
    """Handlers with the owner's names that keep what they were asked."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.ready: object = {"ready": True}
        self.log = ReceiptLog()
        self.metrics = CacheMetrics()

    def handlers(self) -> dict[str, Callable[[dict[str, Any]], object]]:
        answers: dict[str, Callable[[dict[str, Any]], object]] = {
            "summary": lambda _: {"version": "0.1.0", "draining": False},
            "conversations": lambda params: [{"id": f"c{number}"} for number in range(params["limit"])],
            "conversation": self.conversation,
            "forget": lambda params: {"id": params["id"], "forgotten": True},
            "pin": lambda params: params,
            "receipts": lambda params: [receipt.to_json() for receipt in self.log.query(**params)],
            "policy": lambda _: {"memory": {"parked": {"max": 1}}},
            "set_policy": self.set_policy,
            "drain": lambda _: {"written": 3, "dropped": 0},
            "ready": lambda _: self.ready,
            "live": lambda _: True,
            "metrics": lambda _: self.metrics.export(),
        }
        return {name: self._noting(name, answer) for name, answer in answers.items()}

    def _noting(self, name: str, answer: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
        def noting(params: dict[str, Any]) -> object:
            self.calls.append((name, params))
            return answer(params)

        return noting

    def conversation(self, params: dict[str, Any]) -> object:
        if params["id"] == "missing":
            raise LookupError("no conversation missing")
        if params["id"] == "unknown":
            return None
        return {"id": params["id"], "tokens": 5}

    def set_policy(self, params: dict[str, Any]) -> object:
        if params["policy"].get("memory") is None:
            raise ValueError("memory: must be set")
        if params["policy"]["memory"].get("limit") == 1:
            return {"applied": False, "outcome": "refused", "reason": "a limit of 1 B cannot be met now"}
        return {"applied": True, "outcome": "applied", "policy": params["policy"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pod"
    monkeypatch.setenv("PARKADE_SOCKET_DIR", str(folder))
    monkeypatch.setenv("PARKADE_ID_KEY", "k" * 32)
    monkeypatch.delenv("PARKADE_TOKEN_FILE", raising=False)
    return folder


@pytest.fixture
def owner(folder: Path) -> Iterator[Owner]:
    owner = Owner()
    with OwnerServer(folder / "owner.sock", owner.handlers()):
        yield owner


def client_for(folder: Path, *, host: str = "127.0.0.1", token_file: Path | None = None) -> TestClient:
    app = FastAPI()
    ParkadeEndpoints(OwnerClient(folder / "owner.sock"), AdminAccess(token_file)).attach_router(app)
    return TestClient(app, base_url="http://localhost:8000", client=(host, 50_000))


@pytest.fixture
def client(folder: Path) -> TestClient:
    return client_for(folder)


def problem_of(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["type"] == "about:blank"
    assert problem["title"]
    detail: str = problem["detail"]
    return detail


def test_the_summary_is_the_owners(owner: Owner, client: TestClient) -> None:
    response = client.get("/parkade/v1/summary")
    assert response.json() == {"version": "0.1.0", "draining": False}
    assert response.headers["cache-control"] == "no-store"


def test_conversations_come_in_pages(owner: Owner, client: TestClient) -> None:
    page = client.get("/parkade/v1/conversations?limit=2&after=c9").json()
    assert page == {"conversations": [{"id": "c0"}, {"id": "c1"}], "next": "c1"}
    assert owner.calls == [("conversations", {"limit": 2, "after": "c9"})]


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "x", "1.5", "00000000000001", "²"])
def test_a_limit_that_makes_no_sense_is_a_problem(owner: Owner, client: TestClient, limit: str) -> None:
    assert "limit" in problem_of(client.get("/parkade/v1/conversations", params={"limit": limit}), 400)
    assert owner.calls == []


def test_one_conversation_can_be_read_forgotten_and_pinned(owner: Owner, client: TestClient) -> None:
    assert client.get("/parkade/v1/conversations/c1").json() == {"id": "c1", "tokens": 5}
    assert client.delete("/parkade/v1/conversations/c1").json() == {"id": "c1", "forgotten": True}
    assert client.put("/parkade/v1/conversations/c1/pin").json() == {"id": "c1", "pinned": True}
    unpinned = client.put("/parkade/v1/conversations/c1/pin", json={"pinned": False})
    assert unpinned.json() == {"id": "c1", "pinned": False}


def test_an_unknown_conversation_is_a_404_problem(owner: Owner, client: TestClient) -> None:
    assert problem_of(client.get("/parkade/v1/conversations/missing"), 404) == "no conversation missing"
    assert "unknown" in problem_of(client.get("/parkade/v1/conversations/unknown"), 404)
    problem_of(client.get("/parkade/v1/conversations/" + "x" * 600), 404)
    problem_of(client.get("/parkade/v1/conversations/a%00b"), 404)


def test_a_clients_own_id_is_hashed_as_the_middleware_does_it(owner: Owner, client: TestClient) -> None:
    hasher = Hasher(load_id_key())
    client.get("/parkade/v1/conversations/mine?by=client")
    client.get("/parkade/v1/conversations/mine?by=client&tenant=acme")
    client.get("/parkade/v1/receipts?conversation=mine&by=client&salt=s")
    assert [params.get("id", params.get("conversation")) for _, params in owner.calls] == [
        hasher.conversation(NO_TENANT, "mine"),
        hasher.conversation(Tenant(b"header", b"acme"), "mine"),
        hasher.conversation(Tenant(b"salt", b"s"), "mine"),
    ]
    problem_of(client.get("/parkade/v1/conversations/mine?by=magic"), 400)


def test_receipts_are_filtered_and_can_be_followed(owner: Owner, client: TestClient) -> None:
    first = owner.log.add(ReceiptKind.TURN, conversation="c1", request="r1")
    second = owner.log.add(ReceiptKind.DROP, conversation="c1")
    owner.log.add(ReceiptKind.TURN, conversation="c2")

    def ids(query: str) -> list[int]:
        return [receipt["id"] for receipt in client.get(f"/parkade/v1/receipts?{query}").json()["receipts"]]

    assert ids("conversation=c1") == [first.id, second.id]
    assert ids("conversation=c1&kind=drop") == [second.id]
    assert ids(f"conversation=c1&since={first.id}") == [second.id]
    assert ids(f"conversation=c1&since={int(first.time) - 60}") == [first.id, second.id]
    assert ids("request=r1&limit=1") == [first.id]
    assert "since" in problem_of(client.get("/parkade/v1/receipts?since=yesterday"), 400)


def test_the_policy_is_read_and_replaced(owner: Owner, client: TestClient) -> None:
    document = {"memory": {"parked": {"max": "1Gi"}}}
    answer = client.put("/parkade/v1/policy", json=document).json()
    assert answer == {"applied": True, "outcome": "applied", "policy": document}
    assert owner.calls == [("set_policy", {"policy": document})]
    assert problem_of(client.put("/parkade/v1/policy", json={}), 422) == "memory: must be set"
    refused = client.put("/parkade/v1/policy", json={"memory": {"limit": 1}})
    assert problem_of(refused, 409) == "the policy before stays in force: a limit of 1 B cannot be met now"
    assert refused.headers["retry-after"] == "5"
    assert "JSON" in problem_of(client.put("/parkade/v1/policy", content=b"{"), 400)
    assert "JSON" in problem_of(client.put("/parkade/v1/policy", content=b""), 400)
    assert "object" in problem_of(client.put("/parkade/v1/policy", content=b"[]"), 400)
    assert "larger" in problem_of(client.put("/parkade/v1/policy", content=b"x" * 2_000_000), 413)


def test_a_drain_ends_readiness_and_not_life(owner: Owner, client: TestClient) -> None:
    assert client.get("/parkade/v1/ready").status_code == 200
    assert client.post("/parkade/v1/drain?seconds=5").json() == {"written": 3, "dropped": 0}
    assert owner.calls[-1] == ("drain", {"grace_s": 5.0})
    assert problem_of(client.get("/parkade/v1/ready"), 503) == "draining"
    assert client.get("/parkade/v1/live").json() == {"live": True}


@pytest.mark.parametrize(
    ("answer", "detail"), [({"ready": False, "reason": "recovering"}, "recovering"), (False, "not ready")]
)
def test_readiness_says_why_not(owner: Owner, client: TestClient, answer: object, detail: str) -> None:
    owner.ready = answer
    assert problem_of(client.get("/parkade/v1/ready"), 503) == detail


def test_without_an_owner_every_route_says_so_and_when_to_retry(client: TestClient) -> None:
    for path in ("summary", "ready", "live", "receipts"):
        response = client.get(f"/parkade/v1/{path}")
        assert "no cache owner" in problem_of(response, 503)
        assert response.headers["retry-after"]


def test_probes_answer_anybody_and_admin_routes_only_this_machine(owner: Owner, folder: Path) -> None:
    stranger = client_for(folder, host="10.0.0.7")
    assert stranger.get("/parkade/v1/ready").status_code == 200
    assert stranger.get("/parkade/v1/live").status_code == 200
    for method, path in [("GET", "summary"), ("POST", "drain"), ("DELETE", "conversations/c1"), ("PUT", "policy")]:
        assert "token file" in problem_of(stranger.request(method, f"/parkade/v1/{path}"), 403)
    assert [name for name, _ in owner.calls] == ["ready", "live"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"origin": "http://evil.example"},
        {"host": "rebound.example:8000"},
        {"host": "127.0.0.1.evil.example"},
    ],
)
def test_what_a_proxy_or_a_web_page_passed_on_is_not_this_machine(
    owner: Owner, client: TestClient, headers: dict[str, str]
) -> None:
    problem_of(client.post("/parkade/v1/drain", headers=headers), 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_every_loopback_address_is_this_machine(owner: Owner, folder: Path, host: str, name: str) -> None:
    assert client_for(folder, host=host).get("/parkade/v1/summary", headers={"host": name}).status_code == 200


def test_with_a_token_file_only_its_tokens_count_and_a_rotation_counts_at_once(
    owner: Owner, folder: Path, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("old\nnew\n")
    client = client_for(folder, host="10.0.0.7", token_file=token_file)

    def status(authorization: str | None) -> int:
        headers = {} if authorization is None else {"authorization": authorization}
        return client.get("/parkade/v1/summary", headers=headers).status_code

    assert [status("Bearer old"), status("bearer new"), status("Bearer wrong")] == [200, 200, 401]
    assert [status(None), status("Basic old"), status("Bearer "), status("Bearer")] == [401] * 4
    token_file.write_text("new\n")
    assert [status("Bearer old"), status("Bearer new")] == [401, 200]
    token_file.write_text("\n")
    assert [status("Bearer "), status("Bearer new")] == [401, 401]
    token_file.unlink()
    assert status("Bearer new") == 401
    refused = client.get("/parkade/v1/summary")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "Authorization" in problem_of(refused, 401)


def test_a_token_is_needed_on_this_machine_too_once_there_is_one(owner: Owner, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    client = client_for(folder, token_file=tmp_path / "token")
    problem_of(client.get("/parkade/v1/summary"), 401)


def scrape(folder: Path) -> str:
    registry = CollectorRegistry()
    registry.register(OwnerCollector(OwnerClient(folder / "owner.sock"), timeout_s=5.0))
    return generate_latest(registry).decode()


def test_a_scrape_shows_the_owners_numbers_of_this_moment(owner: Owner, folder: Path) -> None:
    owner.metrics.turns.labels(outcome="resumed_ram").inc(2)
    owner.metrics.gate_decision_seconds.observe(0.02)
    text = scrape(folder)
    assert "parkade_up 1.0" in text
    assert 'parkade_turns_total{outcome="resumed_ram"} 2.0' in text
    assert "# TYPE parkade_turns_total counter" in text
    assert 'parkade_gate_decision_seconds_bucket{le="0.03"} 1.0' in text


def test_a_scrape_without_an_owner_shows_that_and_no_old_numbers(folder: Path) -> None:
    names = {line.split("{")[0].split()[0] for line in scrape(folder).splitlines() if not line.startswith("#")}
    assert names == {"parkade_up"}


@pytest.mark.parametrize(
    "answer", [None, {"a": 1}, [5], [{"name": "x"}], [{"name": "x", "help": "", "type": "?", "samples": []}]]
)
def test_an_answer_that_makes_no_sense_does_not_break_the_scrape(folder: Path, answer: object) -> None:
    with OwnerServer(folder / "owner.sock", {"metrics": lambda _: answer}):
        assert "parkade_up 0.0" in scrape(folder)


def test_registering_again_replaces_and_multiprocess_mode_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, registration = CollectorRegistry(auto_describe=True), Registration()
    for _ in range(2):
        assert registration.replace(OwnerCollector(OwnerClient(folder / "owner.sock")), registry)
    assert generate_latest(registry).decode().count("\nparkade_up ") == 1
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    assert not registration.replace(OwnerCollector(OwnerClient(folder / "owner.sock")), registry)


@pytest.mark.slow
def test_the_plug_ins_work_inside_the_engines_own_application(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    from importlib import metadata

    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin, init_endpoint_plugins_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert isinstance(create(), EndpointPlugin)
    entry = metadata.EntryPoint("parkade", "parkade_serving.endpoints:create", "vllm.endpoint_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [entry])
    monkeypatch.setenv("VLLM_PLUGINS", "parkade")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [
            "--model",
            "m",
            "--enable-scale-out",
            "--api-key",
            "secret",
            "--middleware",
            "parkade_serving.middleware.IdentityMiddleware",
        ]
    )
    app = build_app(args, ("generate",))
    # Outermost: an id that cannot be used is refused before the key is asked for.
    assert app.user_middleware[0].cls.__name__ == "IdentityMiddleware"
    owner.metrics.turns.labels(outcome="reread").inc()
    client = TestClient(app, base_url="http://localhost:8000", client=("127.0.0.1", 50_000))

    async def init() -> None:
        await init_endpoint_plugins_state(None, app.state, args)

    import asyncio

    asyncio.run(init())
    assert client.get("/parkade/v1/summary").json()["version"] == "0.1.0"
    assert 'parkade_turns_total{outcome="reread"} 1.0' in client.get("/metrics").text
    refused = client.post("/v1/chat/completions", json={}, headers={"x-session-id": "x" * 600})
    assert refused.json()["error"]["code"] == 400
    assert client.post("/v1/chat/completions", json={}, headers={"x-session-id": "x"}).status_code == 401
    assert missing_routes(app) == set()


def missing_routes(app: FastAPI) -> set[str]:
    """Routes of the engine that take a salt or transfer parameters and that the middleware does not look into."""
    import typing

    def fields(annotation: Any) -> set[str]:
        own = set(getattr(annotation, "model_fields", ()))
        return own.union(*(fields(part) for part in typing.get_args(annotation)))

    found = set()
    for route in app.routes:
        if "POST" in (getattr(route, "methods", None) or ()):
            hints = typing.get_type_hints(route.endpoint, include_extras=True)  # type: ignore[attr-defined]
            if set().union(*map(fields, hints.values())) & {"cache_salt", "kv_transfer_params", "session_id"}:
                found.add(route.path)  # type: ignore[attr-defined]
    assert "/v1/chat/completions" in found
    return found - GENERATION_ROUTES
