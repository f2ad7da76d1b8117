"""Makes ``.venv`` complete: this project in place, the engine, and the tools for tests and linting.

Why it exists: ``make test`` and ``make demo`` must be the only commands on a fresh clone of a bare machine, and must cost
nothing when the environment is there already.

What must stay true: runs on nothing but Python's standard library; a second run with unchanged inputs starts no
process at all. Inputs are what decides *which packages* are installed: settings of linters are not among them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import install_engine
from pip_runner import InstallError, check, run_pip

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("serving", "operator", "archive")
GROUPS = ("test", "lint")
STAMP_NAME = "parkade-environment"
MINIMUM_PIP = "pip>=25.1"
"""The first pip that installs dependency groups."""


def fingerprint(project: dict[str, Any], tools: Sequence[bytes], *, engine: bool) -> str:
    """Hash of everything that decides which packages the environment holds."""
    relevant = {
        "python": sys.version_info[:3],
        "engine": engine,
        "build": project.get("build-system"),
        "project": project.get("project"),
        "groups": project.get("dependency-groups"),
        "hatch": project.get("tool", {}).get("hatch"),
        "tools": [hashlib.sha256(text).hexdigest() for text in tools],
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def current_fingerprint(*, engine: bool) -> str:
    """`fingerprint` of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = [(ROOT / "tools" / name).read_bytes() for name in ("environment.py", "install_engine.py")]
    return fingerprint(project, tools, engine=engine)


def create(folder: Path, *, log: Path) -> Path:
    """Create the virtual environment where it is missing or broken; return its interpreter.

    Some distributions ship ``venv`` without ``ensurepip``: there the pip that runs outside installs one inside.
    """
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return python
    print(f"==> virtual environment {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True).returncode != 0:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        outside = ["--python", str(python), "install", "pip"]
        label = "pip inside the environment"
        check(run_pip(Path(sys.executable), outside, log=log, label=label), log=log, label=label)
    return python


def project_arguments() -> list[str]:
    """pip's arguments for this project in place, with its extras, and the dependency groups for developers."""
    groups = [argument for group in GROUPS for argument in ("--group", f"{ROOT / 'pyproject.toml'}:{group}")]
    return ["--editable", f"{ROOT}[{','.join(EXTRAS)}]", *groups]


def build(folder: Path, *, engine: bool, log: Path) -> None:
    """Install everything into ``folder``; raises `InstallError` with a message when pip fails."""
    python = create(folder, log=log)
    check(run_pip(python, ["install", "--upgrade", MINIMUM_PIP], log=log, label="pip"), log=log, label="pip")
    if engine:
        install_engine.install(python, also=project_arguments(), log=log)
    else:
        label = "parkade and its tools, without an engine"
        check(run_pip(python, ["install", *project_arguments()], log=log, label=label), log=log, label=label)


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring the environment up to date; prints nothing and takes no time when it is."""
    parser = argparse.ArgumentParser(description="Create or update the development environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--no-engine", dest="engine", action="store_false", help="leave vLLM and the model out")
    options = parser.parse_args(arguments)
    folder: Path = options.venv.absolute()
    stamp = folder / STAMP_NAME
    wanted = current_fingerprint(engine=options.engine)
    if stamp.exists() and stamp.read_text() == wanted and (folder / "bin" / "python").exists():
        return 0
    begun = time.monotonic()
    log = ROOT / "build" / "install.log"
    log.unlink(missing_ok=True)
    try:
        build(folder, engine=options.engine, log=log)
    except KeyboardInterrupt:
        raise InstallError("error: interrupted; run the same command again to go on") from None
    stamp.write_text(wanted)
    print(f"==> environment ready after {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
