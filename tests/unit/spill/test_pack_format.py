"""The pack format (docs/formats/pack.md): what is written is what is read, and nothing damaged is believed (D5, 42)."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkade_cache.errors import FormatError, UnsafePathError
from parkade_cache.ids import BlockKey, PackId
from parkade_cache.spill import pack
from parkade_cache.spill.aligned import PAGE_BYTES, align_up
from parkade_cache.spill.pack import PackEntry, PackHeader, PackInfo, PackPages

U32, U64 = 2**32 - 1, 2**64 - 1
keys = st.binary(min_size=1, max_size=pack.MAX_KEY_BYTES).map(BlockKey)
hex_digits = "0123456789abcdef"


@st.composite
def headers(draw: st.DrawFn) -> PackHeader:
    ranks = draw(st.integers(1, U32))
    text = st.text(max_size=200).filter(lambda name: "\0" not in name)
    return PackHeader(
        pack_id=PackId(draw(st.text(hex_digits, min_size=32, max_size=32))),
        conversation=draw(text),
        identity=draw(st.text(hex_digits, min_size=16, max_size=16)),
        rank=draw(st.integers(0, ranks - 1)),
        ranks=ranks,
        created_at=draw(st.floats(allow_nan=False, allow_infinity=False)),
    )


@st.composite
def infos(draw: st.DrawFn) -> PackInfo:
    entries, place = [], PAGE_BYTES
    for key in draw(st.lists(keys, min_size=1, max_size=20, unique=True)):
        nbytes = draw(st.integers(1, 1 << 40))
        parent = BlockKey(draw(st.binary(max_size=pack.MAX_KEY_BYTES)))
        numbers = draw(st.tuples(st.integers(0, U64), st.integers(0, U32), st.integers(0, U64)))
        entries.append(PackEntry(key, parent, numbers[0], numbers[1], place, nbytes, numbers[2]))
        place += align_up(nbytes)
    tips = tuple(draw(st.lists(st.tuples(keys, st.integers(0, U64)), max_size=5)))
    size = pack.pack_file_bytes([entry.nbytes for entry in entries], tips=len(tips))
    return PackInfo(header=draw(headers()), entries=tuple(entries), tips=tips, file_bytes=size)


SMALL = PackInfo(
    header=PackHeader(PackId("0a" * 16), "a conversation", "0b" * 8, 1, 2, 1_700_000_000.5),
    entries=(
        PackEntry(BlockKey(b"k1"), BlockKey(b""), 16, 0, 4096, 5000, 7),
        PackEntry(BlockKey(b"k2"), BlockKey(b"k1"), 32, 0, 12288, 4096, 8),
    ),
    tips=((BlockKey(b"k2"), 32),),
    file_bytes=pack.pack_file_bytes([5000, 4096]),
)


@given(infos())
def test_every_pack_description_survives_the_round_trip_through_its_pages(info: PackInfo) -> None:
    assert pack.decode_pages(pack.encode_pages(info)) == info


@given(headers())
def test_a_header_is_one_page(header: PackHeader) -> None:
    page = pack.encode_header(header)
    assert len(page) == PAGE_BYTES
    assert pack.parse_header(page) == header


def test_the_layout_is_the_one_that_is_written_down() -> None:
    """A change here is a new format version."""
    page = pack.encode_header(SMALL.header)
    assert page[:16] == b"PARKPACK" + struct.pack("<II", 1, 4096)
    assert page[24:40] == bytes.fromhex("0a" * 16)
    assert page[40:48] == bytes.fromhex("0b" * 8)
    assert struct.unpack_from("<IIdH", page, 48) == (1, 2, 1_700_000_000.5, 14)
    assert page[66:80] == b"a conversation"
    assert pack.footer_bytes(entries=1, tips=0) == 168
    assert pack.footer_bytes(entries=0, tips=1) == 80
    assert SMALL.file_bytes == 4096 + 8192 + 4096 + 4096 + 4096


@given(st.integers(0, PAGE_BYTES - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_flipped_byte_anywhere_in_the_header_is_refused(place: int, change: int) -> None:
    """Case 42: header flipped."""
    page = bytearray(pack.encode_header(SMALL.header))
    page[place] ^= change
    with pytest.raises(FormatError):
        pack.parse_header(bytes(page))


@given(st.integers(0, PAGE_BYTES - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_flipped_byte_anywhere_in_the_trailer_is_refused(place: int, change: int) -> None:
    """Case 42, D5."""
    header_page, footer = pack.encode_header(SMALL.header), pack.encode_footer(SMALL.entries, SMALL.tips)
    page = bytearray(pack.encode_trailer(SMALL, header_page=header_page, footer=footer))
    page[place] ^= change
    with pytest.raises(FormatError):
        pack.parse_trailer(bytes(page), file_bytes=SMALL.file_bytes)


@given(st.data())
def test_a_flipped_byte_anywhere_in_the_footer_or_its_padding_is_refused(data: st.DataObject) -> None:
    """Case 42, D5."""
    header_page, footer = pack.encode_header(SMALL.header), pack.encode_footer(SMALL.entries, SMALL.tips)
    trailer = pack.parse_trailer(pack.encode_trailer(SMALL, header_page=header_page, footer=footer))
    padded = bytearray(footer.ljust(align_up(len(footer)), b"\0"))
    padded[data.draw(st.integers(0, len(padded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError):
        pack.parse_footer(bytes(padded), trailer)


@given(st.binary(max_size=PAGE_BYTES), st.binary(max_size=4000), st.binary(max_size=PAGE_BYTES))
def test_random_pages_are_refused_and_never_anything_worse(header: bytes, footer: bytes, trailer: bytes) -> None:
    """Case 42: whatever the bytes are, the answer is FormatError."""
    with pytest.raises(FormatError):
        pack.decode_pages(PackPages(header, footer, trailer))


@given(st.integers(0, U64), st.integers(0, U64), st.integers(0, U32), st.integers(0, U32), st.integers(0, U64))
def test_impossible_counts_are_refused_even_under_a_good_checksum(
    offset: int, nbytes: int, entries: int, tips: int, size: int
) -> None:
    """D5: a trailer that vouches for itself is still not believed beyond the file's size."""
    fixed = pack._TRAILER.pack(b"PARKTAIL", 1, 4096, 0, 0, 0, offset, nbytes, entries, tips, size, bytes(16))
    with pytest.raises(FormatError):
        pack.parse_trailer(pack._sealed_page(fixed), file_bytes=SMALL.file_bytes)


def test_a_corrupt_count_allocates_nothing() -> None:
    """Case 42: never an allocation from a corrupt count."""
    sizes = (4096, 2**32 * 168, 2**32 - 1, 0, 2**63)
    page = pack._sealed_page(pack._TRAILER.pack(b"PARKTAIL", 1, 4096, 0, 0, 0, *sizes, bytes(16)))
    tracemalloc.start()
    with pytest.raises(FormatError):
        pack.parse_trailer(page)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 * 1024


@pytest.mark.parametrize("version", [0, 2, U32])
def test_another_version_is_refused_by_name(version: int) -> None:
    """Case 42: wrong version."""
    page = bytearray(pack.encode_header(SMALL.header))
    page[8:12] = version.to_bytes(4, "little")
    with pytest.raises(FormatError, match=f"format version {version}"):
        pack.parse_header(bytes(page))


def test_pages_of_two_different_packs_do_not_pass_as_one() -> None:
    """D5: every part is whole, together they are not a file."""
    other_header = PackHeader(PackId("0c" * 16), "another", "0b" * 8, 1, 2, 0.0)
    other = pack.encode_pages(PackInfo(other_header, SMALL.entries, SMALL.tips, SMALL.file_bytes))
    ours = pack.encode_pages(SMALL)
    with pytest.raises(FormatError, match="different files"):
        pack.decode_pages(PackPages(ours.header, other.footer, other.trailer))


def test_overlapping_blocks_and_repeated_keys_are_refused() -> None:
    """D5: offsets are not believed either."""
    first, second = SMALL.entries
    overlapping = PackEntry(second.key, second.parent, 32, 0, first.offset, second.nbytes, 0)
    repeated = PackEntry(first.key, second.parent, 32, 0, second.offset, second.nbytes, 0)
    for entry in (overlapping, repeated):
        info = PackInfo(SMALL.header, (first, entry), SMALL.tips, SMALL.file_bytes)
        with pytest.raises(FormatError):
            pack.decode_pages(pack.encode_pages(info))


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "0" * 31, "0" * 33, "A" * 32, "0" * 31 + "/", "0" * 32 + "\n", "..", "\0" * 32]
)
def test_unsafe_names_never_become_paths(name: str) -> None:
    """Case 48, D5."""
    with pytest.raises(UnsafePathError):
        pack.require_pack_id(name)


def test_what_the_format_cannot_hold_is_a_value_error_before_anything_is_written() -> None:
    long_name = PackHeader(PackId("0a" * 16), "x" * 1025, "0b" * 8, 0, 1, 0.0)
    with pytest.raises(ValueError, match="1024"):
        pack.encode_header(long_name)
    negative = PackEntry(BlockKey(b"k"), BlockKey(b""), -1, 0, 4096, 1, 0)
    with pytest.raises(ValueError, match="does not fit"):
        pack.encode_footer([negative], [])
