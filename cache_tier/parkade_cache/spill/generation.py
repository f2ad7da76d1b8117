"""New weights under an old name: a counter that makes an identity a new one (trap 14).

The counter lies in ``<root>/<identity>.generation`` and only ever rises. A generation that holds until restart stands
for weights that exist in the running process alone: the next start loads others, so it begins a further generation
instead of serving that one's blocks.
"""

from __future__ import annotations

import enum
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from parkade_cache.errors import FormatError, UnsafePathError
from parkade_cache.spill import layout
from parkade_cache.spill.clock import Clock
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.identity import Identity

_log = logging.getLogger(__name__)


class GenerationLife(enum.StrEnum):
    """How long the blocks of a generation stay true."""

    UNTIL_RESTART = "until_restart"
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class Generation:
    """The generation in force."""

    number: int
    life: GenerationLife

    def next(self, life: GenerationLife) -> Generation:
        """The one after this."""
        return Generation(self.number + 1, life)


def open_generation(fs: FileSystem, clock: Clock, root: Path, identity: Identity) -> Generation:
    """The generation that a starting process uses."""
    try:
        found = _read(fs, _path(root, identity))
    except (FormatError, UnsafePathError) as error:
        # The time in milliseconds is above any count: blocks of weights that nobody can tell any more are not served.
        _log.warning("%s; beginning a new generation of packs", error)
        return store_generation(fs, root, identity, Generation(int(clock.now() * 1000), GenerationLife.DURABLE))
    if found.life is GenerationLife.DURABLE:
        return found
    return store_generation(fs, root, identity, found.next(GenerationLife.DURABLE))


def stored_generation(fs: FileSystem, root: Path, identity: Identity) -> Generation:
    """The generation that is written down, for who only looks; FormatError or UnsafePathError when nobody can tell."""
    return _read(fs, _path(root, identity))


def store_generation(fs: FileSystem, root: Path, identity: Identity, generation: Generation) -> Generation:
    """Make a generation the one in force, on disk, before anything is written under it."""
    text = json.dumps({"generation": generation.number, "life": generation.life.value})
    layout.write_small_file(fs, _path(root, identity), text.encode())
    return generation


def _path(root: Path, identity: Identity) -> Path:
    return root / f"{identity.fingerprint}.generation"


def _read(fs: FileSystem, path: Path) -> Generation:
    try:
        found = json.loads(layout.read_small_file(fs, path))
        number, life = found["generation"], GenerationLife(found["life"])
    except FileNotFoundError:
        return Generation(0, GenerationLife.DURABLE)
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"damaged: {path}") from error
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise FormatError(f"holds an impossible generation: {path}")
    return Generation(number, life)
