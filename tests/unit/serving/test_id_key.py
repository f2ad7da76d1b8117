"""The key of the ids: kept beside the blocks, private, the same after a restart."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from parkade_cache.errors import SettingsError
from parkade_serving.id_key import load_id_key


def test_the_environments_own_key_wins() -> None:
    assert load_id_key({"PARKADE_ID_KEY": "k" * 20, "PARKADE_ID_KEY_FILE": "/nowhere"}) == b"k" * 20


def test_a_key_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"s" * 32 + b"\n")
    assert load_id_key({"PARKADE_ID_KEY_FILE": str(tmp_path / "key")}) == b"s" * 32


def test_a_key_file_that_is_missing_is_an_error_and_never_made(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_id_key({"PARKADE_ID_KEY_FILE": str(tmp_path / "key")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 5000])
def test_a_key_of_a_useless_length_is_refused_without_showing_it(tmp_path: Path, key: bytes) -> None:
    (tmp_path / "key").write_bytes(key)
    with pytest.raises(SettingsError, match="16 to 4096 bytes"):
        load_id_key({"PARKADE_ID_KEY_FILE": str(tmp_path / "key")})


def test_a_generated_key_is_private_and_the_same_next_time(tmp_path: Path) -> None:
    env = {"PARKADE_ID_KEY_DIR": str(tmp_path)}
    first = load_id_key(env)
    assert load_id_key(env) == first
    assert [path.name for path in tmp_path.iterdir()] == ["id.key"]
    assert (tmp_path / "id.key").stat().st_mode & 0o777 == 0o600


def test_two_folders_have_two_keys(tmp_path: Path) -> None:
    keys = {load_id_key({"PARKADE_ID_KEY_DIR": str(tmp_path / name)}) for name in ("a", "b")}
    assert len(keys) == 2


def test_without_any_setting_the_socket_folder_keeps_the_key(tmp_path: Path) -> None:
    env = {"PARKADE_SOCKET_DIR": str(tmp_path / "pod")}
    assert load_id_key(env) == load_id_key(env)
    assert (tmp_path / "pod" / "id.key").exists()


def test_processes_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: keys.append(load_id_key({"PARKADE_ID_KEY_DIR": str(tmp_path)})))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert len(keys) == 8


def test_a_symlink_in_place_of_the_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"s" * 32)
    (tmp_path / "id.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError):
        load_id_key({"PARKADE_ID_KEY_DIR": str(tmp_path)})


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    load_id_key({"PARKADE_ID_KEY_DIR": str(tmp_path)})
    (tmp_path / "id.key").chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        load_id_key({"PARKADE_ID_KEY_DIR": str(tmp_path)})
