"""The shape of the repository: what would break an import, or blur who may know whom, fails here."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "parkade_cache": ROOT / "cache_tier" / "parkade_cache",
    "parkade_serving": ROOT / "serving" / "parkade_serving",
    "parkade_operator": ROOT / "operator" / "parkade_operator",
}

MAY_IMPORT = {
    "parkade_cache": {"numpy", "psutil", "pydantic", "xxhash", "prometheus_client", "boto3", "botocore"},
    "parkade_operator": {"parkade_cache", "kopf", "kubernetes", "pydantic"},
}
"""Besides the standard library and itself; `parkade_serving` may import what its extra and the engine bring."""

ONLY_IN_THE_ARCHIVE = {"boto3", "botocore"}


def imported_by(file: Path) -> Iterator[str]:
    """Top-level names of everything a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_no_top_level_folder_that_shadows_the_standard_library_is_a_package():
    """``operator/`` with an ``__init__.py`` would replace the module ``operator`` for everything run from here."""
    shadowing = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name in sys.stdlib_module_names]
    assert ROOT / "operator" in shadowing
    assert [folder.name for folder in shadowing if (folder / "__init__.py").exists()] == []


def test_no_folder_of_tests_is_a_package():
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_what_the_architecture_allows_it(package: str):
    allowed = MAY_IMPORT[package] | {package} | sys.stdlib_module_names
    foreign = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in PACKAGES[package].rglob("*.py")
        for name in imported_by(file)
        if name not in allowed or (name in ONLY_IN_THE_ARCHIVE and "archive" not in file.relative_to(ROOT).as_posix())
    }
    assert sorted(foreign) == []


def test_the_serving_package_never_imports_the_operator_or_kubernetes():
    forbidden = {"parkade_operator", "kopf", "kubernetes"}
    files = PACKAGES["parkade_serving"].rglob("*.py")
    assert [file.name for file in files if forbidden.intersection(imported_by(file))] == []


def test_the_wheel_holds_exactly_the_packages_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = {ROOT / path for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert built == set(PACKAGES.values())
    assert all((folder / "__init__.py").is_file() for folder in built)


def test_the_operator_image_pulls_no_engine():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = " ".join(extras["operator"])
    assert not any(name in named for name in ("vllm", "torch", "transformers", "fastapi", "pyzmq"))


def test_nothing_at_the_top_imports_the_engine_before_it_is_needed():
    """The command line must answer ``--help`` without the seconds that importing an engine takes."""
    lazy = [PACKAGES["parkade_serving"] / name for name in ("cli.py", "command_line.py", "model.py", "machine.py")]
    lazy += (PACKAGES["parkade_serving"] / "demo").glob("*.py")
    slow = {"vllm", "torch", "transformers", "openai", "tokenizers"}
    assert [file.name for file in lazy if slow.intersection(_imported_at_import_time(file))] == []


def _imported_at_import_time(file: Path) -> set[str]:
    module = ast.parse(file.read_text())
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names
