"""Writing and reading pack files: alignment, order of steps, failures (D3, D4, D5, W7; cases 34, 42, 47, 48)."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parkade_cache.errors import FormatError, SpillError, UnsafePathError
from parkade_cache.ids import NO_KEY, PackId
from parkade_cache.spill import layout, transfer
from parkade_cache.spill.aligned import PAGE_BYTES, align_up, aligned_buffer
from parkade_cache.spill.files import FileSystem
from parkade_cache.spill.pack import PackAddress, PackEntry, PackHeader, PackInfo, pack_file_bytes
from parkade_cache.spill.pack_reader import PackReader
from parkade_cache.spill.pack_writer import PackBlock, PackWriter, WriterState
from parkade_cache.spill.testing import FaultyFileSystem, chain_blocks, some_key, some_payload

PACK = PackId("0123456789abcdef" * 2)
IDENTITY = "00112233aabbccdd"
HEADER = PackHeader(PACK, "conversation", IDENTITY, 0, 1, 1_700_000_000.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rank_folder = tmp_path / "rank-0"
    for path in (rank_folder, rank_folder / "tmp", rank_folder / "packs"):
        path.mkdir(mode=0o700)
    return rank_folder


def write(fs: FileSystem, folder: Path, blocks: list[PackBlock], *, direct: bool = True, depth: int = 2) -> PackInfo:
    with PackWriter(fs, folder, HEADER, direct=direct, depth=depth) as writer:
        writer.append_many(blocks)
        return writer.finish([(blocks[-1].key, 16 * len(blocks))])


def reader(fs: FileSystem, folder: Path, *, direct: bool = True, depth: int = 2) -> PackReader:
    path = layout.pack_path(folder, PACK)
    return PackReader(fs, path, expected=PackAddress(PACK, IDENTITY, 0), direct=direct, depth=depth)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]


def test_a_pack_is_read_back_as_it_was_written(fs: FileSystem, folder: Path) -> None:
    info = write(fs, folder, chain_blocks(["a", "b", "c"]))
    with reader(fs, folder) as opened:
        assert opened.read_info() == info
        buffers = [bytearray(entry.nbytes) for entry in info.entries]
        assert opened.read_into(info.entries, buffers) == [True, True, True]
    assert [bytes(buffer) for buffer in buffers] == [some_payload(name) for name in "abc"]


def test_the_file_is_exactly_as_large_as_what_was_to_be_reserved_for_it(fs: FileSystem, folder: Path) -> None:
    info = write(fs, folder, chain_blocks(["a", "b", "c"]))
    assert layout.pack_path(folder, PACK).stat().st_size == info.file_bytes == pack_file_bytes([5000] * 3)


def test_a_pack_is_private_and_has_its_name_only_when_it_is_finished(fs: FileSystem, folder: Path) -> None:
    """D3: private temporary, 0600; case 36: never found under its name before."""
    writer = PackWriter(fs, folder, HEADER, direct=True)
    writer.append_many(chain_blocks(["a"]))
    temporary = layout.temporary_path(folder, PACK)
    assert files_in(folder) == [temporary]
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    writer.finish([])
    assert files_in(folder) == [layout.pack_path(folder, PACK)]


def test_the_steps_of_finishing_are_in_the_order_that_a_crash_cannot_hurt(folder: Path) -> None:
    """D3: payload, flush, rename, flush of the folder; no flush more than that once the folder is there."""
    fs = FaultyFileSystem()
    with PackWriter(fs, folder, HEADER, direct=True, depth=0) as writer:
        writer.append_many(chain_blocks(["a"]))
        fs.operations.clear()
        writer.finish([])
    steps = [name for name in fs.operations if name not in {"lstat", "names"}]
    assert steps == ["pwritev", "flush", "close", "make_folder", "flush_folder", "rename", "flush_folder"]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_memory_of_any_alignment_is_written_and_read(
    fs: FileSystem, folder: Path, direct: bool, depth: int, padded: bool, shift: int
) -> None:
    nbytes, stride = 10_000, align_up(10_000)
    memory = aligned_buffer(4 * stride + PAGE_BYTES)
    memory[:] = os.urandom(len(memory))
    views = [memory[shift + n * stride :][: stride if padded else nbytes] for n in range(4)]
    blocks = [PackBlock(some_key(str(n)), NO_KEY, 16, 0, view, nbytes) for n, view in enumerate(views)]
    info = write(fs, folder, blocks, direct=direct, depth=depth)
    target = aligned_buffer(4 * stride + PAGE_BYTES)
    buffers = [target[shift + n * stride :][: stride if padded else nbytes] for n in range(4)]
    with reader(fs, folder, direct=direct, depth=depth) as opened:
        assert opened.read_into(info.entries, buffers) == [True] * 4
    assert all(a[:nbytes] == b[:nbytes] for a, b in zip(views, buffers, strict=True))


def test_aligned_padded_memory_goes_to_the_device_without_a_copy(folder: Path) -> None:
    """The page of the header apart, every piece given to the kernel is the caller's own memory."""
    memory = np.frombuffer(aligned_buffer(4 * PAGE_BYTES), dtype=np.uint8)
    seen: list[int] = []

    class Watching(FileSystem):
        def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            seen.extend(np.frombuffer(view, dtype=np.uint8).ctypes.data for view in views)
            return super().pwritev(fd, views, offset)

    blocks = [PackBlock(some_key(str(n)), NO_KEY, 16, 0, memory[n * 4096 : (n + 1) * 4096]) for n in range(4)]
    write(Watching(), folder, blocks)
    assert {memory.ctypes.data + n * 4096 for n in range(4)} <= set(seen)


def test_units_are_never_larger_than_32_mib(folder: Path) -> None:
    """W1."""
    units: list[tuple[int, int]] = []

    class Watching(FileSystem):
        def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            units.append((sum(map(len, views)), len(views)))
            return super().pwritev(fd, views, offset)

    memory = aligned_buffer(40 << 20)
    small = [PackBlock(some_key(f"s{n}"), NO_KEY, 16, 0, memory[n * 4096 :][:4096]) for n in range(1500)]
    big = PackBlock(some_key("big"), NO_KEY, 16, 0, memory)
    write(Watching(), folder, [*small, big])
    assert max(nbytes for nbytes, _ in units) <= 32 << 20
    assert max(pieces for _, pieces in units) <= 1024


@given(st.lists(st.tuples(st.integers(1, 3 * PAGE_BYTES), st.integers(0, 600)), min_size=1, max_size=12), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sizes_in_any_units_survive(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, int]], direct: bool
) -> None:
    """Small units, so that blocks are split and merged in every way."""
    for module in ("pack_writer", "pack_reader"):
        monkeypatch.setattr(f"parkade_cache.spill.{module}.UNIT_BYTES", 4 * PAGE_BYTES)
        monkeypatch.setattr(f"parkade_cache.spill.{module}.BOUNCE_BYTES", 2 * PAGE_BYTES)
        monkeypatch.setattr(f"parkade_cache.spill.{module}.UNIT_PIECES", 3)
    fs = FileSystem()
    memory = aligned_buffer(16 * PAGE_BYTES)
    memory[:] = os.urandom(len(memory))
    views = [memory[shift : shift + nbytes] for nbytes, shift in sizes]
    blocks = [PackBlock(some_key(str(n)), NO_KEY, 16, 0, view) for n, view in enumerate(views)]
    info = write(fs, folder, blocks, direct=direct)
    order = list(reversed(range(len(views))))
    buffers = [bytearray(len(views[n])) for n in order]
    with reader(fs, folder, direct=direct) as opened:
        assert opened.read_info() == info
        assert all(opened.read_into([info.entries[n] for n in order], buffers))
    assert [bytes(buffer) for buffer in buffers] == [bytes(views[n]) for n in order]
    layout.pack_path(folder, PACK).unlink()


def test_a_block_is_written_once(fs: FileSystem, folder: Path) -> None:
    """W7."""
    with PackWriter(fs, folder, HEADER, direct=True) as writer:
        writer.append_many(chain_blocks(["a"]))
        with pytest.raises(ValueError, match="written once"):
            writer.append_many(chain_blocks(["a"]))
        with pytest.raises(ValueError, match="written once"):
            writer.append_many(chain_blocks(["b", "b"]))


def test_a_known_size_is_allocated_at_once_and_cut_to_what_was_written(fs: FileSystem, folder: Path) -> None:
    with PackWriter(fs, folder, HEADER, direct=True, expected_bytes=1 << 20) as writer:
        assert layout.temporary_path(folder, PACK).stat().st_blocks * 512 >= 1 << 20
        writer.append_many(chain_blocks(["a"]))
        info = writer.finish([])
    assert layout.pack_path(folder, PACK).stat().st_size == info.file_bytes


def test_an_aborted_pack_leaves_nothing(fs: FileSystem, folder: Path) -> None:
    """W7, case 34."""
    writer = PackWriter(fs, folder, HEADER, direct=True)
    writer.append_many(chain_blocks(["a"]))
    writer.abort()
    writer.abort()
    assert files_in(folder) == []
    with pytest.raises(SpillError):
        writer.append_many(chain_blocks(["b"]))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_write_that_fails_half_way_reports_its_error_and_leaves_no_file(folder: Path, code: int, depth: int) -> None:
    """Case 34, W7, D8."""
    writes = iter([None, OSError(code, os.strerror(code))])
    fs = FaultyFileSystem(rule=lambda name, _n: next(writes, None) if name == "pwritev" else None)
    writer = PackWriter(fs, folder, HEADER, direct=True, depth=depth)
    writer.append_many(chain_blocks(["a"]))
    with pytest.raises(SpillError) as caught:
        writer.append_many(chain_blocks(["b"]))
    assert caught.value.errno == code
    assert writer.state is WriterState.FAILED
    assert files_in(folder) == []


def test_no_thread_uses_the_callers_memory_after_a_failure(folder: Path) -> None:
    """The first of two units fails while the second is under way: both have ended when the error comes out."""
    under_way: set[int] = set()

    class Slow(FileSystem):
        def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            under_way.add(offset)
            try:
                if offset == 0:
                    raise OSError(errno.EIO, "first")
                return super().pwritev(fd, views, offset)
            finally:
                under_way.discard(offset)

    memory = aligned_buffer(70 << 20)
    blocks = [PackBlock(some_key(str(n)), NO_KEY, 16, 0, memory[n << 20 : (n + 1) << 20]) for n in range(70)]
    with pytest.raises(SpillError), PackWriter(Slow(), folder, HEADER, direct=True) as writer:
        writer.append_many(blocks)
    assert under_way == set()
    assert files_in(folder) == []


@pytest.mark.parametrize("step", ["flush", "close", "rename"])
def test_a_step_of_finishing_that_fails_leaves_no_file(folder: Path, step: str) -> None:
    """W7, D3."""
    armed = False
    fs = FaultyFileSystem(rule=lambda name, _n: OSError(errno.EIO, "x") if armed and name == step else None)
    writer = PackWriter(fs, folder, HEADER, direct=True)
    writer.append_many(chain_blocks(["a"]))
    armed = True
    with pytest.raises(SpillError):
        writer.finish([])
    assert files_in(folder) == []
    fs.bury()


def test_a_failed_flush_of_the_folder_is_reported_and_the_complete_file_stays(folder: Path) -> None:
    """Case 47: rename done, the folder's flush fails; reported as failed, never lost silently."""
    renamed = False

    def rule(name: str, _n: int) -> OSError | None:
        nonlocal renamed
        renamed |= name == "rename"
        return OSError(errno.EIO, "x") if renamed and name == "flush_folder" else None

    writer = PackWriter(FaultyFileSystem(rule=rule), folder, HEADER, direct=True)
    writer.append_many(chain_blocks(["a"]))
    with pytest.raises(SpillError, match="complete and stays"):
        writer.finish([])
    writer.abort()
    with reader(FileSystem(), folder) as opened:
        assert opened.read_info().entries[0].key == some_key("a")


def test_a_pack_without_blocks_is_never_made(fs: FileSystem, folder: Path) -> None:
    with pytest.raises(SpillError, match="no blocks"), PackWriter(fs, folder, HEADER, direct=True) as writer:
        writer.finish([])
    assert files_in(folder) == []


def test_a_name_that_is_taken_is_not_written_over(fs: FileSystem, folder: Path, tmp_path: Path) -> None:
    """D3: exclusive; D5: a link in the temporary's place is not followed."""
    target = tmp_path / "target"
    layout.temporary_path(folder, PACK).symlink_to(target)
    with pytest.raises(SpillError):
        PackWriter(fs, folder, HEADER, direct=True)
    assert not target.exists()


GOLDEN = Path(__file__).parents[2] / "fixtures" / "packs" / "version-1.pack"


def test_a_pack_written_by_the_first_release_of_this_format_is_still_read(fs: FileSystem, folder: Path) -> None:
    """The file in the fixtures never changes; a build that cannot read it needs another format version."""
    path = layout.pack_path(folder, PACK)
    path.parent.mkdir(mode=0o700)
    shutil.copyfile(GOLDEN, path)
    with reader(fs, folder) as opened:
        info = opened.read_info()
        buffers = [bytearray(entry.nbytes) for entry in info.entries]
        assert opened.read_into(info.entries, buffers) == [True, True]
    assert info.header == HEADER
    assert info.tips == ((some_key("b"), 32),)
    assert [bytes(buffer) for buffer in buffers] == [some_payload("a"), some_payload("b")]
    path.unlink()
    write(fs, folder, chain_blocks(["a", "b"]))
    assert path.read_bytes() == GOLDEN.read_bytes()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 0x40]))


def cut(nbytes: int) -> Callable[[Path, PackInfo], None]:
    return lambda path, _info: os.truncate(path, nbytes)


def cut_from_end(nbytes: int) -> Callable[[Path, PackInfo], None]:
    return lambda path, info: os.truncate(path, info.file_bytes - nbytes)


def cut_whole_pages_from_end(pages: int) -> Callable[[Path, PackInfo], None]:
    return cut_from_end(pages * PAGE_BYTES)


# Blocks of 5000 bytes lie at 4096 and 12288; the footer page at 20480, the trailer page at 24576; 28672 bytes in all.
CUTS = {
    "to nothing": cut(0),
    "inside the magic": cut(4),
    "one byte before the header ends": cut(PAGE_BYTES - 1),
    "after the header": cut(PAGE_BYTES),
    "inside the first block": cut(PAGE_BYTES + 1000),
    "after the first block": cut(12288),
    "inside the second block": cut(13000),
    "after the payload": cut(20480),
    "inside the footer": cut(20480 + 100),
    "before the trailer": cut_whole_pages_from_end(1),
    "inside the trailer": cut_from_end(1),
}
DAMAGE: dict[str, Callable[[Path, PackInfo], None]] = {
    **{f"cut {where}": do for where, do in CUTS.items()},
    "header flipped": lambda path, _info: flip(path, 30),
    "version flipped": lambda path, _info: flip(path, 8),
    "footer flipped": lambda path, _info: flip(path, 20480 + 10),
    "trailer flipped": lambda path, info: flip(path, info.file_bytes - PAGE_BYTES + 40),
    "trailing byte": lambda path, info: os.truncate(path, info.file_bytes + 1),
    "trailing page": lambda path, info: os.truncate(path, info.file_bytes + PAGE_BYTES),
    "a terabyte, sparse": lambda path, _info: os.truncate(path, 1 << 40),
    "foreign": lambda path, info: path.write_bytes(os.urandom(info.file_bytes)),
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_refused_before_the_destination_is_touched(
    fs: FileSystem, folder: Path, damage: Callable[[Path, PackInfo], None], direct: bool
) -> None:
    """Case 42, D5; bad input: damaged, foreign, truncated or oversized pack."""
    info = write(fs, folder, chain_blocks(["a", "b"]))
    assert (info.entries[1].offset, info.file_bytes) == (12288, 28672)
    damage(layout.pack_path(folder, PACK), info)
    with reader(fs, folder, direct=direct) as opened, pytest.raises(FormatError):
        opened.read_info()


@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_payload_byte_costs_that_block_alone_and_its_memory_is_wiped(
    fs: FileSystem, folder: Path, direct: bool
) -> None:
    """Case 42, D4."""
    info = write(fs, folder, chain_blocks(["a", "b", "c"]))
    flip(layout.pack_path(folder, PACK), info.entries[1].offset + 4999)
    buffers = [bytearray(b"x" * entry.nbytes) for entry in info.entries]
    with reader(fs, folder, direct=direct) as opened:
        assert opened.read_info() == info
        assert opened.read_into(info.entries, buffers) == [True, False, True]
    assert bytes(buffers[0]) == some_payload("a")
    assert bytes(buffers[1]) == bytes(5000)
    assert bytes(buffers[2]) == some_payload("c")


def test_an_unreadable_sector_costs_one_block_not_the_run_it_was_read_in(folder: Path) -> None:
    """D4, D8."""
    info = write(FileSystem(), folder, chain_blocks(["a", "b", "c"]))
    bad = info.entries[1].offset

    class BadSector(FileSystem):
        def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            if offset <= bad < offset + sum(map(len, views)):
                raise OSError(errno.EIO, "medium error")
            return super().preadv(fd, views, offset)

    buffers = [bytearray(entry.nbytes) for entry in info.entries]
    with reader(BadSector(), folder) as opened:
        assert opened.read_into(info.entries, buffers) == [True, False, True]


def test_entries_that_cannot_be_in_the_file_are_misses(fs: FileSystem, folder: Path) -> None:
    """D5: an entry from a damaged index reads nothing and allocates nothing."""
    write(fs, folder, chain_blocks(["a"]))
    entries = [PackEntry(some_key("x"), NO_KEY, 16, 0, offset, 10, 0) for offset in (0, 1, 4097, 1 << 62, 24576)]
    with reader(fs, folder) as opened:
        assert opened.read_into(entries, [bytearray(10) for _ in entries]) == [False] * 5


@pytest.mark.parametrize(
    "expected",
    [PackAddress(PackId("ff" * 16), IDENTITY, 0), PackAddress(PACK, "f" * 16, 0), PackAddress(PACK, IDENTITY, 1)],
    ids=["pack", "identity", "rank"],
)
def test_a_pack_in_another_packs_place_is_refused(fs: FileSystem, folder: Path, expected: PackAddress) -> None:
    """D1, D5; bad input: foreign pack."""
    write(fs, folder, chain_blocks(["a"]))
    path = layout.pack_path(folder, PACK)
    with PackReader(fs, path, expected=expected, direct=False) as opened, pytest.raises(FormatError):
        opened.read_info()


def as_symlink(path: Path, other: Path) -> None:
    path.rename(other)
    path.symlink_to(other)


def as_hard_link(path: Path, other: Path) -> None:
    os.link(path, other)


def as_pipe(path: Path, other: Path) -> None:
    path.rename(other)
    os.mkfifo(path)


def as_folder(path: Path, other: Path) -> None:
    path.rename(other)
    path.mkdir()


def in_linked_folder(path: Path, other: Path) -> None:
    path.parent.rename(other)
    path.parent.symlink_to(other)


@pytest.mark.parametrize("disguise", [as_symlink, as_hard_link, as_pipe, as_folder, in_linked_folder])
def test_links_and_other_kinds_of_files_are_neither_read_nor_removed(
    fs: FileSystem, folder: Path, tmp_path: Path, disguise: Callable[[Path, Path], None]
) -> None:
    """Case 48, D5."""
    write(fs, folder, chain_blocks(["a"]))
    path = layout.pack_path(folder, PACK)
    disguise(path, tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError):
        reader(fs, folder)
    with pytest.raises(UnsafePathError):
        layout.remove_file(fs, path)
    assert (tmp_path / "elsewhere").exists()
    assert os.path.lexists(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(fs: FileSystem, folder: Path) -> None:
    """D5: foreign owners."""
    write(fs, folder, chain_blocks(["a"]))
    path = layout.pack_path(folder, PACK)
    os.chown(path, 12345, 12345)
    with pytest.raises(UnsafePathError, match="belongs to user 12345"):
        reader(fs, folder)


def test_a_missing_pack_is_an_error_with_its_number(fs: FileSystem, folder: Path) -> None:
    layout.pack_path(folder, PACK).parent.mkdir(mode=0o700)
    with pytest.raises(SpillError) as caught:
        reader(fs, folder)
    assert caught.value.errno == errno.ENOENT


def test_short_writes_and_reads_are_continued(folder: Path) -> None:
    class Short(FileSystem):
        def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            return super().pwritev(fd, [views[0][:4096]], offset)

        def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            return super().preadv(fd, [views[0][:4096]], offset)

    info = write(Short(), folder, chain_blocks(["a", "b"]))
    buffers = [bytearray(entry.nbytes) for entry in info.entries]
    with reader(Short(), folder) as opened:
        assert opened.read_info() == info
        assert opened.read_into(info.entries, buffers) == [True, True]
    assert transfer.UNIT_BYTES == 32 << 20
