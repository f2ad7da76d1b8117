"""Reads the arguments that pass through to ``vllm serve``, without changing them.

Why it exists: a few of the engine's flags decide whether Parkade can keep its promises. They must be found however
vLLM would take them: with dashes or underscores, ``=`` or a space, by short name, dotted, abbreviated, or in the file
given with ``--config``. The last one counts, and the command line counts over the file.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from parkade_cache.errors import SettingsError

# Longest first: an abbreviation of one must not be taken for another that is meant in full.
_SHORT: Final[Mapping[str, str]] = {
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpr": "--data-parallel-start-rank",
    "-dpn": "--data-parallel-rank",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-n": "--nnodes",
    "-asc": "--api-server-count",
}
_CONFIG: Final = "--config"


class EngineArguments:
    """The arguments after ``parkade serve``, less Parkade's own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = tuple(arguments)
        self._found = [*self._from_file(), *_options(self.arguments)]

    @property
    def model(self) -> str | None:
        """The model as the first argument, which is where vLLM wants it."""
        first = self.arguments[0] if self.arguments else "-"
        return None if first.startswith("-") else first

    def has(self, flag: str) -> bool:
        return any(_means(name, flag) for name, _ in self._found)

    def value(self, flag: str) -> str | None:
        """The value that counts; None where the flag was not given."""
        values = [value for name, value in self._found if _means(name, flag)]
        return values[-1] if values else None

    def values(self, flag: str) -> tuple[str, ...]:
        """Every value of a flag that may be repeated."""
        return tuple(value for name, value in self._found if _means(name, flag))

    def number(self, flag: str) -> int | None:
        """The value as a whole number; None where it was not given or is not one, which vLLM will say itself."""
        try:
            return int(self.value(flag) or "")
        except ValueError:
            return None

    def _from_file(self) -> list[tuple[str, str]]:
        paths = [value for name, value in _options(self.arguments) if name == _CONFIG]
        return _read_config(Path(paths[-1])) if paths else []


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for position, argument in enumerate(arguments):
        if argument.startswith("-"):
            name, separator, value = argument.partition("=")
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            yield _canonical(name), value if separator else following


def _canonical(name: str) -> str:
    if not name.startswith("--"):
        return _SHORT.get(name, name)
    return name.partition(".")[0].removesuffix("+").replace("_", "-")


def _means(name: str, flag: str) -> bool:
    """Whether vLLM's parser takes ``name`` for ``flag``; an ambiguous abbreviation it refuses by itself."""
    if name == flag:
        return True
    return len(name) > len("--x") and flag.startswith(name) and name not in _FULL_NAMES


# Flags that begin another flag's name and are meant as they stand.
_FULL_NAMES: Final = frozenset(_SHORT.values()) | {"--config", "--model", "--enable-prompt-embeds"}


def _read_config(path: Path) -> list[tuple[str, str]]:
    # It comes with the engine, and is needed for this flag only.
    yaml: Any = importlib.import_module("yaml")

    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(document, Mapping):
        raise SettingsError(f"--config {path} must hold the engine's flags as a mapping")
    return [pair for key, value in document.items() for pair in _config_pairs(str(key), value)]


def _config_pairs(key: str, value: object) -> list[tuple[str, str]]:
    name = _canonical(f"--{key}")
    if isinstance(value, bool):
        return [(name if value else f"--no-{name.removeprefix('--')}", "")]
    if isinstance(value, list):
        return [(name, str(item)) for item in value]
    return [(name, json.dumps(value) if isinstance(value, Mapping) else str(value))]
