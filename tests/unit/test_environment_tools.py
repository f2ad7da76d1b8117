"""The tools that make the environment: what uv is told, and when nothing has to be done."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

CONFIGURATION = """\
:env:.cert='/certs/env.crt'
:env:.find-links='/wheels'
global.cert='/certs/global.crt'
global.constraint='/constraints.txt'
global.extra-index-url='file:///one file:///two'
download.index-url='file:///elsewhere'
"""


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def tool(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_uv_is_told_everything_that_pip_is_configured_with(tmp_path: Path):
    installer = tool("package_installer")
    settings = installer.uv_environment(installer.parse_pip_configuration(CONFIGURATION), cache=tmp_path)
    assert settings["UV_INDEX"] == "file:///one file:///two"
    assert settings["UV_FIND_LINKS"] == "/wheels"
    assert settings["UV_CONSTRAINT"] == "/constraints.txt"
    assert settings["SSL_CERT_FILE"] == "/certs/env.crt"
    assert "UV_DEFAULT_INDEX" not in settings


def test_uv_chooses_among_indexes_as_pip_does(tmp_path: Path):
    settings = tool("package_installer").uv_environment({}, cache=tmp_path)
    assert settings["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_only_what_decides_which_packages_are_installed_makes_an_environment_old():
    fingerprint = tool("environment").fingerprint
    project = {"project": {"dependencies": ["a"]}, "tool": {"ruff": {"line-length": 120}}}
    same = project | {"tool": {"ruff": {"line-length": 100}}}
    other = project | {"project": {"dependencies": ["a", "b"]}}
    assert fingerprint(project, [b"x"]) == fingerprint(same, [b"x"])
    assert fingerprint(project, [b"x"]) != fingerprint(other, [b"x"])
    assert fingerprint(project, [b"x"]) != fingerprint(project, [b"y"])


def test_a_developers_environment_is_also_good_for_running(tmp_path: Path):
    environment = tool("environment")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    environment.stamp_path(tmp_path, environment.Level.DEV).write_text("wanted")
    assert environment.is_current(tmp_path, environment.Level.RUN, "wanted")
    assert environment.is_current(tmp_path, environment.Level.DEV, "wanted")
    assert not environment.is_current(tmp_path, environment.Level.DEV, "newer")


def test_an_environment_to_run_in_is_not_enough_for_developers(tmp_path: Path):
    environment = tool("environment")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    environment.stamp_path(tmp_path, environment.Level.RUN).write_text("wanted")
    assert not environment.is_current(tmp_path, environment.Level.DEV, "wanted")


@pytest.mark.parametrize(
    ("path", "skipped"),
    [
        ("/venv/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py", True),
        ("/venv/lib/python3.11/site-packages/sympy/core/tests/test_basic.py", True),
        ("/venv/lib/python3.11/site-packages/vllm/v1/engine/core.py", False),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", False),
    ],
)
def test_bytecode_is_compiled_for_what_an_engine_imports(path: str, skipped: bool):
    assert bool(re.search(tool("install_engine").NOT_COMPILED, path)) is skipped


def test_no_package_index_is_named_in_the_tools():
    text = "".join(path.read_text() for path in TOOLS.glob("*.py"))
    assert re.findall(r"https?://|\.org\b|\.io\b", text) == []
