"""The spill store on real file systems: full, read-only, ext4 and tmpfs; its process killed (D6, D8, S2)."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parkade_cache.errors import DirectoryInUseError, SpillError
from parkade_cache.ids import NO_KEY
from parkade_cache.spill.aligned import aligned_buffer
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.outcome import Refusal, Reservation, WriteOutcome
from parkade_cache.spill.pack import PackAddress, PackInfo, pack_file_bytes
from parkade_cache.spill.pack_reader import PackReader
from parkade_cache.spill.pack_writer import PackBlock, PackWriter
from parkade_cache.spill.store import SpillConfig, SpillStore
from parkade_cache.spill.testing import Chain, FakeClock, publish_chain, read_back, some_identity, some_key

MIB = 1 << 20
BLOCK_BYTES = 300_000
FS = FileSystem()


def open_store(root: Path, **fields: Any) -> SpillStore:
    defaults: dict[str, Any] = {
        "root": root,
        "capacity_bytes": 1 << 30,
        "min_free_bytes": 0,
        "write_budget_bytes_per_hour": None,
        "block_bytes": BLOCK_BYTES,
        "ranks": 1,
    }
    return SpillStore.open(SpillConfig(**(defaults | fields)), some_identity(), clock=FakeClock())


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 MiB, in memory or ext4 in a file."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    if request.param == "ext4" and shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4 here")
    mount = tmp_path / "disk"
    mount.mkdir()
    if request.param == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount))
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(24 * MIB)
        run("mkfs.ext4", "-q", "-m", "0", str(image))
        run("mount", "-o", "loop", str(image), str(mount))
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def write_blocks(store: SpillStore, reservation: Reservation, count: int, *, expected: bool = False) -> PackInfo:
    memory = aligned_buffer(BLOCK_BYTES)
    memory[:BLOCK_BYTES] = os.urandom(BLOCK_BYTES)
    header = Chain(()).header(store, reservation.pack_id, 0)
    nbytes = pack_file_bytes([BLOCK_BYTES] * count) if expected else None
    with PackWriter(FS, store.rank_folder(0), header, direct=store.direct, expected_bytes=nbytes) as writer:
        for n in range(count):
            writer.append(PackBlock(some_key(str(n)), NO_KEY, 16, 0, memory, BLOCK_BYTES))
        return writer.finish([])


def reserve(store: SpillStore, nbytes: int) -> Reservation:
    answer = store.reserve(nbytes)
    assert isinstance(answer, Reservation), answer
    return answer


@pytest.mark.parametrize("expected", [True, False])
def test_a_disk_that_fills_up_half_way_is_an_error_and_everything_published_survives(
    disk: Path, expected: bool
) -> None:
    """D8, case 34; bad input: full directory. Another process takes the space after the reservation."""
    store = open_store(disk / "spill")
    publish_chain(FS, store, ["kept"])
    reservation = reserve(store, pack_file_bytes([BLOCK_BYTES] * 40))
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 3 * MIB))
    with pytest.raises(SpillError) as caught:
        write_blocks(store, reservation, 40, expected=expected)
    assert caught.value.errno == errno.ENOSPC
    store.cancel(reservation)
    assert list((store.rank_folder(0) / "tmp").iterdir()) == []
    answer = store.reserve(8 * MIB)
    assert isinstance(answer, Refusal)
    assert answer.outcome is WriteOutcome.REFUSED_FREE_SPACE
    filler.unlink()
    again = reserve(store, pack_file_bytes([BLOCK_BYTES] * 5))
    store.publish([write_blocks(store, again, 5)], again)
    store.close()
    with open_store(disk / "spill") as reopened:
        assert sorted(len(pack.info.entries) for pack in reopened.recover()) == [1, 5]


def fill(path: Path) -> None:
    """Take every byte there is."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017


def test_a_store_opens_and_serves_on_a_disk_without_a_free_byte(disk: Path) -> None:
    """D8: full is not gone. Where SQLite cannot even open, that is a SpillError, and nothing is lost."""
    with open_store(disk / "spill") as store:
        infos = publish_chain(FS, store, ["kept"])
    fill(disk / "filler")
    try:
        store = open_store(disk / "spill")
    except SpillError as error:
        assert error.errno in {errno.ENOSPC, errno.EIO, errno.ENOENT}  # noqa: PT017
    else:
        assert len(list(store.recover())) == 1
        assert next(read_back(FS, store, infos))[some_key("kept")] is not None
        store.close()
    (disk / "filler").unlink()
    with open_store(disk / "spill") as store:
        assert len(list(store.recover())) == 1


def test_a_read_only_disk_is_said_at_the_start(disk: Path) -> None:
    """D8; bad input: unwritable directory. It is used again when the mount is writable again."""
    with open_store(disk / "spill") as store:
        publish_chain(FS, store, ["kept"])
    run("mount", "-o", "remount,ro", str(disk))
    with pytest.raises(SpillError, match="be writable"):
        open_store(disk / "spill")
    run("mount", "-o", "remount,rw", str(disk))
    with open_store(disk / "spill") as again:
        assert len(list(again.recover())) == 1
        again.probe()


def loop_device(mount: Path) -> str:
    return subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE", str(mount)], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_a_disk_that_turns_read_only_while_in_use_still_reads_and_heals_when_it_is_mounted_again(disk: Path) -> None:
    """D8: the kernel remounts ext4 read-only when it finds it damaged, under the files that are open."""
    device = loop_device(disk)
    trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
    run("mount", "-o", "remount,errors=remount-ro", str(disk))
    if not trigger.exists():
        pytest.skip("this kernel cannot be told to find a damaged file system")
    store = open_store(disk / "spill")
    infos = publish_chain(FS, store, ["kept"])
    os.sync()
    trigger.write_text("x")
    with pytest.raises(SpillError):
        store.probe()
    reservation = store.reserve(pack_file_bytes([BLOCK_BYTES]))
    if isinstance(reservation, Reservation):
        with pytest.raises(SpillError):
            write_blocks(store, reservation, 1)
        store.cancel(reservation)
    assert next(read_back(FS, store, infos))[some_key("kept")] is not None
    store.close()
    subprocess.run(["umount", str(disk)], check=True)
    image = disk.parent / "image"
    subprocess.run(["fsck.ext4", "-y", str(image)], capture_output=True, check=False)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    with open_store(disk / "spill") as again:
        assert len(list(again.recover())) == 1
        again.probe()


def test_dead_blocks_give_their_bytes_back_to_the_file_system(disk: Path) -> None:
    """D6, on the file system's own count."""
    store = open_store(disk / "spill")
    reservation = reserve(store, pack_file_bytes([BLOCK_BYTES] * 20))
    info = write_blocks(store, reservation, 20)
    store.publish([info], reservation)
    os.sync()
    before = FS.space(disk).free_bytes
    returned = store.drop(reservation.pack_id, range(3, 18))
    os.sync()
    assert returned == 15 * info.entries[0].padded_bytes
    assert FS.space(disk).free_bytes - before == pytest.approx(returned, abs=256 * 1024)
    store.close()
    index = next((disk / "spill" / "identities").glob("*/index.sqlite"))
    index.unlink()
    with open_store(disk / "spill") as again:
        assert [pack.dead for pack in again.recover()] == [frozenset(range(3, 18))]


def test_writing_and_reading_leave_the_page_cache_alone(tmp_path: Path) -> None:
    """Extra page cache for packs would be memory that the pod's limit pays for."""
    with open_store(tmp_path / "spill") as store:
        if not store.direct or shutil.which("fincore") is None:
            pytest.skip("no direct I/O or no fincore here")
        reservation = reserve(store, pack_file_bytes([BLOCK_BYTES] * 100))
        info = write_blocks(store, reservation, 100, expected=True)
        store.publish([info], reservation)
        path = store.path_of(reservation.pack_id, 0)
        buffers = [aligned_buffer(BLOCK_BYTES)[:BLOCK_BYTES] for _ in info.entries]
        expected = PackAddress(reservation.pack_id, store.fingerprint, 0)
        with PackReader(FS, path, expected=expected, direct=True) as reader:
            assert all(reader.read_into(info.entries, buffers))
        command = ["fincore", "-b", "-n", "-o", "RES", str(path)]
        resident = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert int(resident) == 0


CHILD = """
import sys
from pathlib import Path
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.store import SpillConfig, SpillStore
from parkade_cache.spill.testing import publish_chain, some_identity

config = SpillConfig(root=Path(sys.argv[1]), capacity_bytes=1 << 30, min_free_bytes=0,
                     write_budget_bytes_per_hour=None, block_bytes=5000, ranks=2)
store = SpillStore.open(config, some_identity())
list(store.recover())
for n in range(100_000):
    publish_chain(FileSystem(), store, [f"{sys.argv[2]}-{n}-{m}" for m in range(3)])
    print(n, flush=True)
"""


def start_child(root: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(root), name], stdout=subprocess.PIPE, text=True)


def last_published(child: subprocess.Popen[str], count: int) -> None:
    assert child.stdout is not None
    for _ in range(count):
        assert child.stdout.readline()


def test_another_live_process_keeps_the_directory_until_it_is_killed(tmp_path: Path) -> None:
    """Bad input: directory used by another live pod; the lock goes with the process, however it ends."""
    child = start_child(tmp_path / "spill", "x")
    try:
        last_published(child, 1)
        with pytest.raises(DirectoryInUseError, match=f"process {child.pid} on host"):
            open_store(tmp_path / "spill", ranks=2)
    finally:
        child.kill()
        child.communicate()
    open_store(tmp_path / "spill", ranks=2).close()


def test_a_killed_process_leaves_everything_it_published_and_nothing_else(tmp_path: Path) -> None:
    """S2: SIGKILL at some instant, several lives long; what it said it published is there with the right bytes."""
    published: set[str] = set()
    for life in range(3):
        child = start_child(tmp_path / "spill", f"life{life}")
        last_published(child, 3 + life)
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        said = 3 + life + len(rest.split())
        published |= {f"life{life}-{n}-{m}" for n in range(said) for m in range(3)}
    with open_store(tmp_path / "spill", ranks=2) as store:
        found: set[str] = set()
        for pack in store.recover():
            for payloads in read_back(FS, store, pack.infos):
                assert None not in payloads.values()
            found |= {entry.key.rstrip(b"\0.").decode() for entry in pack.info.entries}
        assert published <= found
        assert len(found - published) <= 3 * 3
        assert list((tmp_path / "spill").rglob("*.tmp")) == []


def test_thousands_of_packs_are_recovered_without_opening_one(tmp_path: Path) -> None:
    """S3: the index answers; opens are counted, not seconds."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    root = root / f"parkade-{os.getpid()}"
    opened: list[Path] = []

    class Watching(FileSystem):
        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            opened.append(path)
            return super().open(path, flags, mode)

    try:
        with open_store(root) as store:
            for n in range(1000):
                publish_chain(FS, store, [f"b{n}"])
        config = SpillConfig(
            root=root,
            capacity_bytes=1 << 30,
            min_free_bytes=0,
            write_budget_bytes_per_hour=None,
            block_bytes=BLOCK_BYTES,
            ranks=1,
        )
        with SpillStore.open(config, some_identity(), fs=Watching(), clock=FakeClock()) as store:
            assert sum(1 for _ in store.recover()) == 1000
        assert not [path for path in opened if path.suffix == ".pack"]
    finally:
        shutil.rmtree(root, ignore_errors=True)
