"""``parkade serve`` as people run it: real HTTP, real vLLM, signals, a restart, hostile clients."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

TEXT = inspect.getsource(textwrap)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One life of ``parkade serve`` over a folder that outlives it."""

    def __init__(self, folder: Path, model: Path, *, wait: bool = True) -> None:
        self.port = free_port()
        self.log = folder / f"server-{self.port}.log"
        folder.chmod(0o700)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "parkade_serving.cli", "serve", str(model)),
                    *("--parked-max", "256Mi", "--memory-floor", "64Mi", "--spill-dir", str(folder / "spill")),
                    *("--spill-size", "1Gi", "--spill-min-free", "1Mi", "--socket-dir", str(folder / "sockets")),
                    *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "small"),
                    *("--max-model-len", "1024", "--num-gpu-blocks-override", "9", "--dtype", "float32"),
                    *("--enforce-eager", "--max-num-seqs", "2"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        if wait:
            self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        pytest.fail(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def chat(self, text: str, *, session: str | None = "ticket-4711", **extra: Any) -> httpx.Response:
        headers = {} if session is None else {"x-session-id": session}
        body = {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        return self.http.post("/v1/chat/completions", json=body | extra, headers=headers)

    def turns(self) -> list[dict[str, Any]]:
        answer = self.http.get("/parkade/v1/receipts", params={"kind": "turn"})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["receipts"]
        return found

    def await_turns(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 20
        while len(found := self.turns()) < count:
            assert time.monotonic() < deadline, f"{len(found)} turn receipts, not {count}"
            time.sleep(0.05)
        return found

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.http.close()
        self.process.send_signal(signum)
        return self.process.wait(timeout=180)


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
