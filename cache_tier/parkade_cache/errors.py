"""Every error this package raises on purpose, one root, leaves named for the situation.

A leaf also inherits the built-in a caller would expect, so that ``except OSError`` keeps its meaning.
Messages are one line and say what to do.
"""

from __future__ import annotations


class ParkadeError(Exception):
    """Root of all errors raised on purpose by Parkade."""


class PolicyError(ParkadeError, ValueError):
    """Limits, floors or budgets that cannot hold together."""


class SettingsError(ParkadeError, ValueError):
    """Start-up settings that would be unsafe to run with."""


class ArenaError(ParkadeError, MemoryError):
    """The kernel refused to commit parked memory."""


class SpillError(ParkadeError, OSError):
    """The spill directory cannot be used."""


class DirectoryInUseError(SpillError):
    """Another live process holds the spill directory."""


class FormatError(ParkadeError, ValueError):
    """A file is damaged, truncated, foreign or of another version."""


class ChecksumError(FormatError):
    """A block's bytes are not what was written."""


class UnsafePathError(SpillError):
    """A symlink, hard link, foreign owner or unsafe name where a pack was expected."""


class MalformedAccountError(ParkadeError, ValueError):
    """A kernel file about memory says something its format does not allow; the number in it is unknown, not zero."""


class IndexDamagedError(FormatError):
    """The spill index is damaged, older or of another identity; it is rebuilt from the packs."""
