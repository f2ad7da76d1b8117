"""Whatever ends the demo, none of its processes is left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from parkade_serving.demo.engine import Engine, EngineFailedError, free_port

SERVER = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={own_session})
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def nothing(_: float) -> None:
    pass


def started(tmp_path: Path, *, own_session: bool) -> Engine:
    port = free_port()
    code = textwrap.dedent(SERVER.format(port=port, own_session=own_session))
    return Engine([sys.executable, "-c", code], dict(os.environ), port=port, log=tmp_path / "log")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = started(tmp_path, own_session=True)
    yield engine
    engine.kill()


def gone(process: psutil.Process) -> bool:
    """A zombie is gone: its parent was killed too, and whoever inherits it may not have looked yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants(engine: Engine) -> list[psutil.Process]:
    return psutil.Process(engine._child.pid).children(recursive=True)


def test_a_killed_engine_leaves_no_child_even_in_a_session_of_its_own(engine: Engine):
    engine.wait_ready(nothing, timeout_s=60)
    children = descendants(engine)
    engine.kill()
    assert children
    assert all(gone(child) for child in children)


def test_an_engine_that_leaves_a_child_behind_has_not_ended(engine: Engine):
    engine.wait_ready(nothing, timeout_s=60)
    (child,) = descendants(engine)
    waits: list[float] = []

    def waiting(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            child.kill()

    engine.stop(waiting, timeout_s=60)
    assert len(waits) >= 3
    assert gone(child)


def test_an_engine_that_does_not_end_in_time_is_killed_and_named(engine: Engine):
    engine.wait_ready(nothing, timeout_s=60)
    children = descendants(engine)
    with pytest.raises(EngineFailedError, match="did not end within"):
        engine.stop(nothing, timeout_s=0.2)
    assert all(gone(child) for child in children)


def test_an_engine_that_ends_by_itself_is_reported_with_its_cause_and_the_end_of_its_log(tmp_path: Path):
    code = (
        "print('WARNING ValueError: harmless'); print('ValueError: no room'); print('x\\n' * 50); raise SystemExit(3)"
    )
    engine = Engine([sys.executable, "-c", code], dict(os.environ), port=free_port(), log=tmp_path / "log")
    with pytest.raises(EngineFailedError, match="status 3") as caught:
        engine.wait_ready(nothing, timeout_s=60)
    assert "ValueError: no room" in str(caught.value)
    assert "harmless" not in str(caught.value)


def test_a_free_port_can_be_listened_on():
    code = f"import socket; socket.create_server(('127.0.0.1', {free_port()})).close()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
