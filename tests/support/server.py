"""``parkade serve`` as a process for tests: one life over a folder that outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One life of ``parkade serve`` over a folder that outlives it."""

    def __init__(self, folder: Path, model: Path, *flags: str, wait: bool = True) -> None:
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
                    *flags,
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
