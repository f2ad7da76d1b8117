"""S2 with the whole real server: SIGKILL at random points of its work, and what was published is served again.

Each life takes as long as vLLM needs to start, so an ordinary run kills twice; ``PARKADE_SERVER_KILLS=10`` is the
run that a release is measured by.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from support.server import Server

from parkade_serving.model import prepare_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("PARKADE_SERVER_KILLS", "2"))
BLOCK_TOKENS = 128
TEXT = inspect.getsource(textwrap)
NAMES = ("ada", "ben", "cyd")


def prompt_of(name: str, turn: int) -> str:
    return f"{name}: {TEXT[NAMES.index(name) * 900 :][: 1300 + 250 * (turn % 6)]}"


class Traffic(threading.Thread):
    """Takes turns until the server is gone; the text of each reply by conversation and turn."""

    def __init__(self, server: Server, first_turn: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.turn = first_turn
        self.ids: dict[str, str] = {}

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                for name in NAMES:
                    answer = self.server.chat(prompt_of(name, self.turn), session=name)
                    assert answer.status_code == 200, answer.text
                    self.ids[name] = answer.headers["x-parkade-conversation"]
                self.turn += 1


def published(server: Server, conversation: str) -> int:
    """Blocks of the conversation that are on disk for good just now."""
    answer = server.http.get(f"/parkade/v1/conversations/{conversation}")
    return int(answer.json()["disk_blocks"]) if answer.status_code == 200 else 0


def test_s2_the_whole_server_is_killed_at_random_points(tmp_path: Path) -> None:
    model = prepare_model()
    seed = int(os.environ.get("PARKADE_SEED", time.time_ns() % 1_000_000))
    chance = random.Random(seed)
    known: dict[str, tuple[int, int]] = {}
    turn = 0
    for life in range(KILLS + 1):
        server = Server(tmp_path, model, "--spill-mode", chance.choice(["write-behind", "on-evict"]))
        try:
            where = f"life {life} of seed {seed}"
            for name, (its_turn, blocks) in known.items():
                answer = server.chat(prompt_of(name, its_turn), session=name)
                usage = answer.json()["usage"]
                whole = usage["prompt_tokens"] // BLOCK_TOKENS
                cached = usage["prompt_tokens_details"]["cached_tokens"] // BLOCK_TOKENS
                assert cached >= min(blocks, whole), f"{where}: {name} had {blocks} blocks on disk, {cached} came back"
            assert server.http.get("/parkade/v1/summary").json()["disk"]["errors_total"] == 0, where
            if life == KILLS:
                break
            traffic = Traffic(server, turn)
            traffic.start()
            time.sleep(chance.uniform(1.0, 25.0))
            known = {
                name: (traffic.turn - 1, published(server, conversation))
                for name, conversation in dict(traffic.ids).items()
                if traffic.turn > turn
            }
            turn = traffic.turn + 1
        finally:
            family = server.family()
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive, f"left over after SIGKILL: {alive}"
        traffic_ended(server)
        check = subprocess.run(
            [sys.executable, "-m", "parkade_serving.cli", "cache", "check", str(tmp_path / "spill"), "--read-data"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert check.returncode == 0, f"life {life} of seed {seed}: {check.stdout}{check.stderr}"


def traffic_ended(server: Server) -> None:
    with contextlib.suppress(httpx.HTTPError):
        server.http.close()
