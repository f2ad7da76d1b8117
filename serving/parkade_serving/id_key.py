"""The key under which conversation ids and tenants' salts are hashed.

What must stay true: the key outlives the process as long as the blocks that were stored under it, so it lies beside
them; it is never in a command line or a log; pods that share blocks are given the same key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from parkade_cache.errors import SettingsError
from parkade_serving.sockets import make_private_folder, socket_folder

KEY_ENV: Final = "PARKADE_ID_KEY"
"""The key itself."""
KEY_FILE_ENV: Final = "PARKADE_ID_KEY_FILE"
"""A file with the key, such as a mounted secret; it must exist."""
KEY_DIR_ENV: Final = "PARKADE_ID_KEY_DIR"
"""A folder that keeps a generated key; the spill directory where there is one."""
KEY_NAME: Final = "id.key"
_MIN_KEY_BYTES: Final = 16
_MAX_KEY_BYTES: Final = 4096


def load_id_key(env: Mapping[str, str] = os.environ) -> bytes:
    """The key from the environment, its file, or one generated and kept beside the blocks.

    Raises:
        SettingsError: the key is missing, too short or readable by others.

    """
    if key := env.get(KEY_ENV):
        return _checked(key.encode(), KEY_ENV)
    if name := env.get(KEY_FILE_ENV):
        return read_id_key(Path(name))
    if name := env.get(KEY_DIR_ENV):
        return _kept_key(Path(name))
    folder = socket_folder(env)
    make_private_folder(folder)
    return _kept_key(folder)


def read_id_key(path: Path) -> bytes:
    """The key in a file, without the line end an editor adds."""
    try:
        with path.open("rb") as file:
            return _checked(file.read(_MAX_KEY_BYTES + 1).strip(), str(path))
    except OSError as error:
        raise SettingsError(f"the id key {path} cannot be read: {error.strerror or error}") from None


def _kept_key(folder: Path) -> bytes:
    path = folder / KEY_NAME
    with contextlib.suppress(FileExistsError):
        _generate(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SettingsError(f"the id key {path} cannot be read: {error.strerror or error}") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise SettingsError(f"the id key {path} must be a file that only this user may read; run: chmod 600 {path}")
        return _checked(file.read(_MAX_KEY_BYTES + 1).strip(), str(path))


def _generate(path: Path) -> None:
    """Put a new key at ``path`` whole or not at all, without replacing one that another process put there."""
    draft = path.with_name(f".{KEY_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            return
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(descriptor)
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise SettingsError(f"no id key can be kept in {path.parent}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _checked(key: bytes, where: str) -> bytes:
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise SettingsError(f"the id key in {where} must have {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes")
    return key
