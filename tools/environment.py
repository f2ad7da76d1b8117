"""Makes ``.venv`` complete: this project in place, the engine, and for developers the tools for tests and linting.

Why it exists: ``make demo`` and ``make test`` must be the only commands on a fresh clone of a bare machine, and must
cost nothing when the environment is there already.

What must stay true: runs on nothing but Python's standard library; a second run with unchanged inputs starts no
process at all. Inputs are what decides *which packages* are installed: settings of linters are not among them.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:
    sys.exit("error: Python 3.11 or newer is needed; name one with: make PYTHON=python3.11 ...")

import install_engine
from package_installer import InstallError, PackageInstaller

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PIP = "pip>=25.1"
"""The first pip that installs dependency groups."""

_PREPARE_MODEL = "from parkade_serving.model import prepare_model; prepare_model()"


class Level(enum.StrEnum):
    """How much the environment holds; each level holds the one before it."""

    RUN = "run"
    DEV = "dev"


EXTRAS = {Level.RUN: ("serving",), Level.DEV: ("serving", "operator", "archive")}
GROUPS: dict[Level, tuple[str, ...]] = {Level.RUN: (), Level.DEV: ("dev",)}


def fingerprint(project: dict[str, Any], tools: Sequence[bytes]) -> str:
    """Hash of everything that decides which packages the environment holds."""
    relevant = {
        "python": sys.version_info[:3],
        "build": project.get("build-system"),
        "project": project.get("project"),
        "groups": project.get("dependency-groups"),
        "hatch": project.get("tool", {}).get("hatch"),
        "tools": [hashlib.sha256(text).hexdigest() for text in tools],
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def current_fingerprint() -> str:
    """`fingerprint` of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return fingerprint(project, [(ROOT / "tools" / "install_engine.py").read_bytes(), str(ROOT).encode()])


def stamp_path(folder: Path, level: Level) -> Path:
    """Where an environment says what it holds."""
    return folder / f"parkade-{level}"


def is_current(folder: Path, level: Level, wanted: str) -> bool:
    """True when the environment holds ``level`` (or more) as it is wanted now."""
    enough = [candidate for candidate in Level if candidate == level or candidate is Level.DEV]
    stamps = [stamp_path(folder, candidate) for candidate in enough]
    return (folder / "bin" / "python").exists() and any(path.exists() and path.read_text() == wanted for path in stamps)


def create(folder: Path) -> Path:
    """Create the virtual environment where it is missing or broken; return its interpreter.

    Some distributions ship ``venv`` without ``ensurepip``: there the pip that runs outside installs one inside.
    """
    python = folder / "bin" / "python"
    if python.exists() and _works([str(python), "-m", "pip", "--version"]):
        return python
    print(f"==> virtual environment {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if _works([sys.executable, "-m", "venv", str(folder)]):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    if not _works([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "pip"]):
        raise InstallError("error: no pip: install Python's pip and venv packages and run the same command again")
    return python


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def project_arguments(level: Level) -> list[str]:
    """Arguments of pip for this project in place, with the extras and dependency groups of ``level``."""
    groups = [argument for group in GROUPS[level] for argument in ("--group", f"{ROOT / 'pyproject.toml'}:{group}")]
    return ["--editable", f"{ROOT}[{','.join(EXTRAS[level])}]", *groups]


def build(folder: Path, level: Level, *, log: Path) -> None:
    """Install everything into ``folder``; raises `InstallError` with a message when a step fails."""
    installer = PackageInstaller(python=create(folder), log=log)
    installer.install(["--upgrade", MINIMUM_PIP], label="pip")
    installer.use_uv()
    install_engine.install(installer, also=project_arguments(level))
    # One uses a single core and the other the rest. Whoever needs the model prepares it if this could not.
    with subprocess.Popen([str(installer.python), "-c", _PREPARE_MODEL], stderr=subprocess.DEVNULL):
        installer.finish(not_compiled=install_engine.NOT_COMPILED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring the environment up to date; prints nothing and takes no time when it is."""
    parser = argparse.ArgumentParser(description="Create or update the environment that make uses.")
    parser.add_argument("level", type=Level, choices=list(Level), help="run: to serve; dev: tests and linters too")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    options = parser.parse_args(arguments)
    folder: Path = options.venv.absolute()
    wanted = current_fingerprint()
    if is_current(folder, options.level, wanted):
        return 0
    begun = time.monotonic()
    log = ROOT / "build" / "install.log"
    log.unlink(missing_ok=True)
    try:
        build(folder, options.level, log=log)
    except KeyboardInterrupt:
        raise InstallError("error: interrupted; run the same command again to go on") from None
    stamp_path(folder, options.level).write_text(wanted)
    print(f"==> environment ready after {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
