"""``parkade serve`` as people run it: real HTTP, real vLLM, signals, a restart, hostile clients."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from support.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

TEXT = inspect.getsource(textwrap)


@pytest.fixture(scope="module")
def model() -> Path:
    from parkade_serving.model import prepare_model

    return prepare_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path, model: Path) -> Iterator[Server]:
    server = Server(folder, model)
    yield server
    if server.process.poll() is None:
        server.end(signal.SIGKILL)


def test_a_turn_is_answered_and_leaves_a_receipt(server: Server) -> None:
    answer = server.chat(TEXT[:2000])
    assert answer.status_code == 200, answer.text
    conversation = answer.headers["x-parkade-conversation"]
    receipt = server.await_turns(1)[-1]
    assert receipt["conversation"] == conversation
    assert receipt["outcome"] == "reread"
    listed = server.http.get(f"/parkade/v1/conversations/{conversation}").json()
    assert listed["ram_blocks"] == receipt["prompt_tokens"] // 128


def test_the_summary_and_vllms_own_metrics_tell_the_same(server: Server) -> None:
    summary = server.http.get("/parkade/v1/summary").json()
    metrics = server.http.get("/metrics").text
    assert "vllm:" in metrics
    parked = next(line for line in metrics.splitlines() if line.startswith('parkade_blocks_bytes{tier="ram"}'))
    assert float(parked.split()[1]) == summary["ram"]["bytes"]


@pytest.mark.parametrize("session", ["x" * 1_000_000, "a\tb", "a" * 513], ids=["1-MB", "control", "513-bytes"])
def test_an_impossible_session_id_is_refused_or_cut_off_and_loses_nothing(server: Server, session: str) -> None:
    before = server.http.get("/parkade/v1/summary").json()["ram"]
    try:
        answer = server.chat("hello", session=session)
    except httpx.TransportError:
        pass  # The HTTP server itself refuses headers of this size.
    else:
        assert answer.status_code in {400, 431}
        assert answer.text
    assert server.http.get("/parkade/v1/summary").json()["ram"] == before


def test_an_unknown_model_is_refused_by_the_engine_and_loses_nothing(server: Server) -> None:
    answer = server.chat("hello", model="no-such-model")
    assert answer.status_code == 404


def test_another_tenants_salt_never_hits(server: Server) -> None:
    text = TEXT[3000:5000]
    first = server.chat(text, session="a", cache_salt="tenant-one")
    other = server.chat(text, session="a", cache_salt="tenant-two")
    assert first.status_code == other.status_code == 200
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first.headers["x-parkade-conversation"] != other.headers["x-parkade-conversation"]


def test_a_forgotten_conversation_is_gone(server: Server) -> None:
    answer = server.chat(TEXT[6000:7500], session="to be forgotten")
    conversation = answer.headers["x-parkade-conversation"]
    assert server.http.delete(f"/parkade/v1/conversations/{conversation}").status_code in {200, 204}
    assert server.http.get(f"/parkade/v1/conversations/{conversation}").status_code == 404


def test_a_second_pod_on_the_same_directory_is_refused_with_one_clear_line(
    server: Server, folder: Path, model: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    second = subprocess.run(
        [
            *(sys.executable, "-c", OPEN_THE_DIRECTORY, str(folder / "spill")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "DirectoryInUseError" in second.stdout
    assert server.http.get("/health").status_code == 200


OPEN_THE_DIRECTORY = """
import sys
from pathlib import Path
from parkade_cache.spill import Identity, SpillConfig, SpillStore
config = SpillConfig(root=Path(sys.argv[1]), capacity_bytes=1 << 30, min_free_bytes=0,
                     write_budget_bytes_per_hour=None, block_bytes=4096, ranks=1)
identity = Identity(model="m", revision="", dtype="", kv_cache_dtype="", drafter="", layout="", block_tokens=16,
                    parallel="", hash_algorithm="", hash_seed="", format_version=1)
try:
    SpillStore.open(config, identity)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_policy_counts_while_the_pod_serves_and_a_wrong_one_changes_nothing(server: Server) -> None:
    """Cases 66 and 67, over HTTP."""
    server.chat(TEXT[:2000])
    before = server.http.get("/parkade/v1/policy").json()
    lowered = {**before, "memory": {**before["memory"], "floor": 96 << 20, "parked": {"max": 0}}}
    answer = server.http.put("/parkade/v1/policy", json=lowered)
    assert (answer.status_code, answer.json()["outcome"]) == (200, "applied")
    summary = server.http.get("/parkade/v1/summary").json()
    assert (summary["memory"]["floor_bytes"], summary["ram"]["blocks"]) == (96 << 20, 0)
    wrong = server.http.put("/parkade/v1/policy", json={**before, "spill": {"size": "tiny"}})
    assert (wrong.status_code, wrong.headers["content-type"]) == (422, "application/problem+json")
    assert server.http.get("/parkade/v1/policy").json()["memory"] == answer.json()["policy"]["memory"]
    assert server.http.put("/parkade/v1/policy", json=before).json()["applied"]
    assert server.http.get("/parkade/v1/summary").json()["dropped_conversations_total"] == 0


def test_every_process_of_the_pod_can_be_asked_for_its_heap(server: Server) -> None:
    """A policy with a floor that is not met makes the gate ask; a limit below what is used is refused in the end."""
    before = server.http.get("/parkade/v1/policy").json()
    # More than the machine has free: nothing can be given back for it, but the heaps are asked.
    floor = server.http.get("/parkade/v1/summary").json()["memory"]["available_bytes"] + (64 << 20)
    answer = server.http.put("/parkade/v1/policy", json={**before, "memory": {"floor": floor, "parked": {"max": 0}}})
    assert answer.status_code == 200, answer.text
    receipts = server.http.get("/parkade/v1/receipts", params={"kind": "policy"}).json()["receipts"]
    asked = {heap["process"] for heap in receipts[-1]["heaps"]}
    assert asked == {"api-server", "engine-core", "worker-0"}
    metrics = server.http.get("/metrics").text
    for process in asked:
        assert f'parkade_trim_seconds_count{{allocator="glibc",process="{process}"}}' in metrics
    assert server.http.put("/parkade/v1/policy", json=before).json()["applied"]


def test_sigterm_writes_out_and_the_next_life_resumes_from_disk(server: Server, folder: Path, model: Path) -> None:
    """S1, S2: what was only in RAM is on disk before the processes end, and none of them is left over."""
    text = TEXT[:2000]
    before = server.chat(text)
    assert before.status_code == 200
    family = server.family()
    assert server.end() == 0
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    again = Server(folder, model)
    try:
        answer = again.chat(text)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 128 * 128
        assert answer.json()["choices"] == before.json()["choices"]
        receipts = [r for r in again.turns() if r["conversation"] == answer.headers["x-parkade-conversation"]]
        assert receipts[-1]["outcome"] == "resumed_disk"
        assert again.http.get("/parkade/v1/summary").json()["dropped_conversations_total"] == 0
    finally:
        family = again.family()
        again.end(signal.SIGKILL)
        gone, alive = psutil.wait_procs(family, timeout=20)
        assert not alive, f"left over after SIGKILL: {alive}"
        assert gone
