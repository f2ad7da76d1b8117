"""Where the processes of one pod meet: a private folder with the owner's socket in it.

What must stay true: the folder belongs to this user and nobody else may enter it, since whoever reaches the socket may
forget conversations. Every process of a pod derives the same path from the environment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from parkade_cache.errors import SettingsError, UnsafePathError

SOCKET_DIR_ENV: Final = "PARKADE_SOCKET_DIR"
"""Set by ``parkade serve``; its presence also tells a process that it belongs to a Parkade pod."""
OWNER_SOCKET: Final = "owner.sock"
DRAINING_MARK: Final = "draining"
"""A file of this name in the socket folder: the pod takes no new generation requests (S1)."""

OVERLOADED_MARK: Final = "overloaded"
"""A file of this name in the socket folder: requests ask the owner before any work (case 61)."""

# sockaddr_un holds 108 bytes, the last of them NUL.
_MAX_PATH_BYTES: Final = 107


def socket_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The pod's folder for sockets: ``PARKADE_SOCKET_DIR``, else one per user."""
    named = env.get(SOCKET_DIR_ENV)
    return Path(named) if named else Path(f"/tmp/parkade-{os.getuid()}")  # noqa: S108 - checked before it is used


def owner_socket_path(env: Mapping[str, str] = os.environ) -> Path:
    return socket_folder(env) / OWNER_SOCKET


def draining_mark(env: Mapping[str, str] = os.environ) -> Path:
    return socket_folder(env) / DRAINING_MARK


def mark_draining(env: Mapping[str, str] = os.environ) -> None:
    """From now on this pod takes no new turns; readiness fails."""
    make_private_folder(socket_folder(env))
    draining_mark(env).touch(mode=0o600)


def clear_draining_mark(env: Mapping[str, str] = os.environ) -> None:
    """A new life takes turns again."""
    draining_mark(env).unlink(missing_ok=True)


def overloaded_mark(env: Mapping[str, str] = os.environ) -> Path:
    return socket_folder(env) / OVERLOADED_MARK


def make_private_folder(folder: Path) -> None:
    """Create ``folder`` for this user alone, or make sure that an existing one is.

    Raises:
        UnsafePathError: a symlink, another user's folder, or one that others may enter.

    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UnsafePathError(f"{folder} must be a folder of this user, not a link or another user's; set --socket-dir")
    if found.st_mode & 0o077:
        raise UnsafePathError(f"{folder} may be entered by other users; run: chmod 700 {folder}")


def check_socket_path(path: Path) -> None:
    """Refuse a path that no Unix socket can have.

    Raises:
        SettingsError: too long.

    """
    length = len(os.fsencode(path))
    if length > _MAX_PATH_BYTES:
        raise SettingsError(f"the socket path is {length} bytes long, at most {_MAX_PATH_BYTES} work; set --socket-dir")
