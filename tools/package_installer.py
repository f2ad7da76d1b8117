"""Installs packages quickly, quietly and with one configuration: pip's.

Why it exists: an engine is 150 packages. uv installs them several times faster than pip but reads none of pip's
configuration, so here it is told what pip knows: indexes, link folders, certificates, constraints.

What must stay true: pip decides. Whatever uv cannot do is tried again with pip, and only pip's answer counts; nothing
here names a package index. A step prints one line, a heartbeat while it runs, and the end of the log only if it fails.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEARTBEAT_S = 10.0
_TAIL_LINES = 25
_SECTIONS = ("global", "install", ":env:")
"""Of pip's configuration, the weakest first."""


class InstallError(SystemExit):
    """A step failed; the message says where to look. Ends the program with status 1."""


@dataclass(frozen=True)
class StepResult:
    """How one command ended; ``output`` is all it printed."""

    code: int
    output: str

    @property
    def not_found(self) -> bool:
        """True when pip says that no index it knows offers what was asked for."""
        return self.code != 0 and "No matching distribution found" in self.output


def parse_pip_configuration(listing: str) -> dict[str, list[str]]:
    """Values per option of ``pip config list`` that count for installing, weakest first.

    >>> parse_pip_configuration("global.find-links='/a /b'")
    {'find-links': ['/a', '/b']}
    """
    entries: list[tuple[int, str, str]] = []
    for line in listing.splitlines():
        name, separator, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if separator and section in _SECTIONS:
            entries.append((_SECTIONS.index(section), option, value))
    found: dict[str, list[str]] = {}
    for _, option, value in sorted(entries, key=lambda entry: entry[0]):
        found.setdefault(option, []).extend(str(ast.literal_eval(value)).split())
    return found


def uv_environment(pip: Mapping[str, Sequence[str]], *, cache: Path) -> dict[str, str]:
    """Environment variables that make uv look where pip looks and choose as pip chooses."""
    settings = {
        "UV_CACHE_DIR": str(cache),
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_PROGRESS": "1",
        "UV_NO_CONFIG": "1",
    }
    joined = {
        "UV_DEFAULT_INDEX": " ".join(pip.get("index-url", ())[-1:]),
        "UV_INDEX": " ".join(pip.get("extra-index-url", ())),
        "UV_FIND_LINKS": ",".join(pip.get("find-links", ())),
        "UV_CONSTRAINT": " ".join(pip.get("constraint", ())),
        "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", ())),
        "SSL_CERT_FILE": " ".join(pip.get("cert", ())[-1:]),
    }
    return settings | {name: value for name, value in joined.items() if value}


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and "WARNING" not in line]
    return lines[-1][:90] if lines else "working"


@dataclass
class PackageInstaller:
    """Installs into the environment of ``python``; everything the tools print goes to ``log``."""

    python: Path
    log: Path
    _uv_settings: dict[str, str] | None = field(default=None, init=False)

    @property
    def _cache(self) -> Path:
        # Inside the environment, so that uv links files instead of copying them.
        return self.python.parent.parent / ".install-cache"

    def run(self, command: Sequence[str], *, settings: Mapping[str, str] | None = None) -> StepResult:
        """Run ``command`` with a heartbeat; never raises for the command's own failure."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        offset = self.log.stat().st_size if self.log.exists() else 0
        begun = time.monotonic()
        with self.log.open("ab") as sink:
            child = subprocess.Popen(
                command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=os.environ | dict(settings or {})
            )
            try:
                while (code := self._wait(child)) is None:
                    print(f"    {time.monotonic() - begun:4.0f} s  {_last_words(self._since(offset))}", flush=True)
            except BaseException:
                child.terminate()
                child.wait()
                raise
        return StepResult(code=code, output=self._since(offset))

    @staticmethod
    def _wait(child: subprocess.Popen[bytes]) -> int | None:
        try:
            return child.wait(timeout=HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            return None

    def _since(self, offset: int) -> str:
        return self.log.read_bytes()[offset:].decode(errors="replace")

    def _pip(self, arguments: Sequence[str]) -> StepResult:
        return self.run([str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments])

    def use_uv(self) -> None:
        """Prepare uv; where it cannot be had, pip goes on alone."""
        if self._pip(["install", "--quiet", "uv"]).code == 0:
            command = [str(self.python), "-m", "pip", "config", "list"]
            listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            self._uv_settings = uv_environment(parse_pip_configuration(listing), cache=self._cache)

    def attempt(self, arguments: Sequence[str], *, label: str) -> StepResult:
        """Install what ``arguments`` (pip's) name, with uv first; the result is pip's where uv could not."""
        print(f"==> {label}", flush=True)
        if self._uv_settings is not None:
            command = [str(self.python), "-m", "uv", "pip", "install", "--python", str(self.python), *arguments]
            result = self.run(command, settings=self._uv_settings)
            if result.code == 0:
                return result
            print("    uv could not; trying again with pip", flush=True)
        return self._pip(["install", *arguments])

    def install(self, arguments: Sequence[str], *, label: str) -> None:
        """`attempt`, raising `InstallError` with the end of the output when it fails."""
        result = self.attempt(arguments, label=label)
        if result.code != 0:
            tail = "\n".join(result.output.strip().splitlines()[-_TAIL_LINES:])
            raise InstallError(f"{tail}\nerror: {label} failed; the whole output is in {self.log}")

    def finish(self, *, not_compiled: str) -> None:
        """Compile bytecode, all cores at once, except paths that match ``not_compiled``; drop uv's cache.

        uv leaves bytecode to the first import, which would be the first engine's start, in three processes.
        """
        if self._uv_settings is None:
            return
        shutil.rmtree(self._cache, ignore_errors=True)
        print("==> bytecode, and the model", flush=True)
        folder = next((self.python.parent.parent / "lib").glob("python*/site-packages"))
        self.run([str(self.python), "-m", "compileall", "-qq", "-j", "0", "-x", not_compiled, str(folder)])
