"""The pack format: bytes to values and back, without I/O.

The written specification is ``docs/formats/pack.md``; change both together and raise ``PACK_VERSION``. What must stay
true: every byte outside the payload is covered by a checksum or by a rule; every count and size is proven against the
file's size before anything is allocated from it (D5); every block has its own checksum (D4); every offset is in whole
pages, so that payload goes between memory and device without a copy.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from parkade_cache.errors import FormatError, UnsafePathError
from parkade_cache.ids import BlockKey, PackId
from parkade_cache.spill.aligned import PAGE_BYTES, align_up, is_aligned

PACK_VERSION = 1
HEADER_MAGIC = b"PARKPACK"
TRAILER_MAGIC = b"PARKTAIL"
MAX_KEY_BYTES = 64
MAX_CONVERSATION_BYTES = 1024
MAX_ENTRIES = 1 << 20
MAX_TIPS = 1 << 16

_HEADER = struct.Struct("<8sIIQ16s8sIIdH")
_TRAILER = struct.Struct("<8sIIQQQQQIIQ16s")
_ENTRY = struct.Struct("<BBHIQQQQ64s64s")
_TIP = struct.Struct("<BBHIQ64s")
_CHECKSUM = slice(16, 24)
_ZERO_CHECKSUM = bytes(8)
_PACK_ID = re.compile(r"[0-9a-f]{32}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class PackEntry:
    """One block of a pack. ``offset`` and ``nbytes`` are of the payload in this rank's file."""

    key: BlockKey
    parent: BlockKey
    end_token: int
    group: int
    offset: int
    nbytes: int
    checksum: int

    @property
    def padded_bytes(self) -> int:
        """What the block takes in the file."""
        return align_up(self.nbytes)


@dataclass(frozen=True, slots=True)
class PackHeader:
    """Whose blocks a file holds. ``identity`` is a fingerprint, ``created_at`` is seconds since the epoch."""

    pack_id: PackId
    conversation: str
    identity: str
    rank: int
    ranks: int
    created_at: float


@dataclass(frozen=True, slots=True)
class PackAddress:
    """What the file at a pack's path must be, or it is refused (D1, D5)."""

    pack_id: PackId
    identity: str
    rank: int


@dataclass(frozen=True, slots=True)
class PackInfo:
    """Everything about one rank's pack file but its payload; ``tips`` are the conversation's chain ends and tokens."""

    header: PackHeader
    entries: tuple[PackEntry, ...]
    tips: tuple[tuple[BlockKey, int], ...]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where the footer lies and what it must hash to; already proven against the file's size."""

    pack_id: PackId
    header_checksum: int
    footer_checksum: int
    footer_offset: int
    footer_bytes: int
    entries: int
    tips: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class PackPages:
    """Header, footer and trailer as they lie in the file, zero padding stripped; the index keeps them verbatim."""

    header: bytes
    footer: bytes
    trailer: bytes


def checksum_of(data: bytes | memoryview) -> int:
    """The format's checksum, xxh3 with 64 bits; releases the interpreter lock for large data."""
    return xxhash.xxh3_64_intdigest(data)


def require_pack_id(text: str) -> PackId:
    """A pack's name, or UnsafePathError: names become paths, so nothing else may pass (D5)."""
    if not _PACK_ID.fullmatch(text):
        raise UnsafePathError(f"not a pack name: {text[:80]!r}")
    return PackId(text)


def require_fingerprint(text: str) -> str:
    """An identity's fingerprint, or UnsafePathError: it becomes a folder name (D5)."""
    if not _FINGERPRINT.fullmatch(text):
        raise UnsafePathError(f"not an identity fingerprint: {text[:80]!r}")
    return text


def footer_bytes(*, entries: int, tips: int) -> int:
    """Bytes of a footer before padding."""
    return entries * _ENTRY.size + tips * _TIP.size


def pack_file_bytes(block_bytes: Iterable[int], *, tips: int = 1) -> int:
    """Exact size of one rank's file with these blocks: what to reserve, times the ranks."""
    padded = [align_up(nbytes) for nbytes in block_bytes]
    return 2 * PAGE_BYTES + sum(padded) + align_up(footer_bytes(entries=len(padded), tips=tips))


def same_shape(one: PackInfo, other: PackInfo) -> bool:
    """Whether two ranks' files hold the same blocks at the same places; only checksums may differ."""
    return one.tips == other.tips and _shape(one) == _shape(other)


def _shape(info: PackInfo) -> list[tuple[BlockKey, BlockKey, int, int, int, int]]:
    return [(e.key, e.parent, e.end_token, e.group, e.offset, e.nbytes) for e in info.entries]


def encode_header(header: PackHeader) -> bytes:
    """The first page of a file; ValueError for what the format cannot hold."""
    name = header.conversation.encode()
    if len(name) > MAX_CONVERSATION_BYTES or b"\0" in name:
        raise ValueError("a conversation id in a pack is at most 1024 bytes without NUL")
    if not (0 <= header.rank < header.ranks and math.isfinite(header.created_at)):
        raise ValueError("a pack header needs 0 <= rank < ranks and a finite time")
    fixed = _HEADER.pack(
        HEADER_MAGIC,
        PACK_VERSION,
        PAGE_BYTES,
        0,
        bytes.fromhex(require_pack_id(header.pack_id)),
        bytes.fromhex(require_fingerprint(header.identity)),
        header.rank,
        header.ranks,
        header.created_at,
        len(name),
    )
    return _sealed_page(fixed + name)


def encode_footer(entries: Iterable[PackEntry], tips: Iterable[tuple[BlockKey, int]]) -> bytes:
    """Entries and tips without padding; ValueError for what the format cannot hold."""
    try:
        records = [_encode_entry(entry) for entry in entries]
        records += [_TIP.pack(_key_bytes(key), 0, 0, 0, tokens, key) for key, tokens in tips]
    except struct.error as error:
        raise ValueError(f"a number does not fit the pack format: {error}") from error
    return b"".join(records)


def _encode_entry(entry: PackEntry) -> bytes:
    if len(entry.parent) > MAX_KEY_BYTES:
        raise ValueError(f"a parent key is at most {MAX_KEY_BYTES} bytes")
    sizes = (_key_bytes(entry.key), len(entry.parent), 0)
    place = (entry.group, entry.end_token, entry.offset, entry.nbytes, entry.checksum)
    return _ENTRY.pack(*sizes, *place, entry.key, entry.parent)


def _key_bytes(key: BlockKey) -> int:
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a block key is 1 to {MAX_KEY_BYTES} bytes")
    return len(key)


def encode_trailer(info: PackInfo, *, header_page: bytes, footer: bytes) -> bytes:
    """The last page of a file, written after everything it vouches for."""
    fixed = _TRAILER.pack(
        TRAILER_MAGIC,
        PACK_VERSION,
        PAGE_BYTES,
        0,
        _stored_checksum(header_page),
        checksum_of(footer),
        info.file_bytes - PAGE_BYTES - align_up(len(footer)),
        len(footer),
        len(info.entries),
        len(info.tips),
        info.file_bytes,
        bytes.fromhex(info.header.pack_id),
    )
    return _sealed_page(fixed)


def encode_pages(info: PackInfo) -> PackPages:
    """A pack's pages as the file has them."""
    header_page, footer = encode_header(info.header), encode_footer(info.entries, info.tips)
    trailer_page = encode_trailer(info, header_page=header_page, footer=footer)
    return PackPages(header=header_page.rstrip(b"\0"), footer=footer, trailer=trailer_page.rstrip(b"\0"))


def decode_pages(pages: PackPages) -> PackInfo:
    """The same checks as reading the file, on pages kept elsewhere; FormatError when they do not hold."""
    header_page, trailer_page = _padded_page(pages.header), _padded_page(pages.trailer)
    header = parse_header(header_page)
    trailer = parse_trailer(trailer_page)
    check_pair(header_page, header, trailer)
    entries, tips = parse_footer(pages.footer, trailer)
    return PackInfo(header=header, entries=entries, tips=tips, file_bytes=trailer.file_bytes)


def parse_header(page: bytes) -> PackHeader:
    """The first page's meaning; FormatError for any damage, other version or other kind of file."""
    _check_page(page, magic=HEADER_MAGIC, what="header")
    *_, pack_id, identity, rank, ranks, created_at, name_bytes = _HEADER.unpack_from(page)
    name_end = _HEADER.size + name_bytes
    if name_bytes > MAX_CONVERSATION_BYTES or not _is_zero(page[name_end:]):
        raise FormatError("pack header: conversation id runs over its page")
    if rank >= ranks or not math.isfinite(created_at):
        raise FormatError("pack header: impossible rank or time")
    try:
        conversation = page[_HEADER.size : name_end].decode()
    except UnicodeDecodeError as error:
        raise FormatError("pack header: conversation id is not UTF-8") from error
    return PackHeader(PackId(pack_id.hex()), conversation, identity.hex(), rank, ranks, created_at)


def parse_trailer(page: bytes, *, file_bytes: int | None = None) -> Trailer:
    """The last page's meaning, all its sizes proven to add up (to the file's size, where given)."""
    _check_page(page, magic=TRAILER_MAGIC, what="trailer")
    if not _is_zero(page[_TRAILER.size :]):
        raise FormatError("pack trailer: bytes where zeros belong")
    _, _, _, _, header_sum, footer_sum, offset, nbytes, entries, tips, size, pack_id = _TRAILER.unpack_from(page)
    trailer = Trailer(PackId(pack_id.hex()), header_sum, footer_sum, offset, nbytes, entries, tips, size)
    _check_sizes(trailer)
    if file_bytes is not None and size != file_bytes:
        raise FormatError(f"pack is {file_bytes} bytes long, its trailer says {size}")
    return trailer


def _check_sizes(trailer: Trailer) -> None:
    if not 0 < trailer.entries <= MAX_ENTRIES or trailer.tips > MAX_TIPS:
        raise FormatError("pack trailer: impossible number of entries or tips")
    if trailer.footer_bytes != footer_bytes(entries=trailer.entries, tips=trailer.tips):
        raise FormatError("pack trailer: footer size does not match its counts")
    if trailer.footer_offset + align_up(trailer.footer_bytes) + PAGE_BYTES != trailer.file_bytes:
        raise FormatError("pack trailer: sizes do not add up to the file's")
    if not is_aligned(trailer.footer_offset) or trailer.footer_offset < PAGE_BYTES * (1 + trailer.entries):
        raise FormatError("pack trailer: no room for the payload before the footer")


def check_pair(header_page: bytes, header: PackHeader, trailer: Trailer) -> None:
    """Header and trailer belong to the same file."""
    if trailer.pack_id != header.pack_id or trailer.header_checksum != _stored_checksum(header_page):
        raise FormatError("pack header and trailer are of different files")


def parse_footer(footer: bytes, trailer: Trailer) -> tuple[tuple[PackEntry, ...], tuple[tuple[BlockKey, int], ...]]:
    """Entries and tips; ``footer`` may carry its zero padding."""
    body = memoryview(footer)[: trailer.footer_bytes]
    if len(body) != trailer.footer_bytes or not _is_zero(footer[trailer.footer_bytes :]):
        raise FormatError("pack footer: cut short, or bytes where zeros belong")
    if checksum_of(body) != trailer.footer_checksum:
        raise FormatError("pack footer: checksum does not match")
    split = trailer.entries * _ENTRY.size
    entries = tuple(_parse_entry(record) for record in _ENTRY.iter_unpack(body[:split]))
    _check_entries(entries, payload_end=trailer.footer_offset)
    return entries, tuple(_parse_tip(record) for record in _TIP.iter_unpack(body[split:]))


def _parse_entry(record: tuple[int, int, int, int, int, int, int, int, bytes, bytes]) -> PackEntry:
    key_bytes, parent_bytes, zero, group, end_token, offset, nbytes, checksum, key, parent = record
    if zero:
        raise FormatError("pack footer: bytes where zeros belong")
    return PackEntry(
        key=_unpad_key(key, key_bytes, least=1),
        parent=_unpad_key(parent, parent_bytes, least=0),
        end_token=end_token,
        group=group,
        offset=offset,
        nbytes=nbytes,
        checksum=checksum,
    )


def _parse_tip(record: tuple[int, int, int, int, int, bytes]) -> tuple[BlockKey, int]:
    key_bytes, zero, zeros, more_zeros, tokens, key = record
    if zero or zeros or more_zeros:
        raise FormatError("pack footer: bytes where zeros belong")
    return _unpad_key(key, key_bytes, least=1), tokens


def _unpad_key(padded: bytes, nbytes: int, *, least: int) -> BlockKey:
    if not least <= nbytes <= MAX_KEY_BYTES or not _is_zero(padded[nbytes:]):
        raise FormatError("pack footer: a key of impossible size")
    return BlockKey(padded[:nbytes])


def _check_entries(entries: tuple[PackEntry, ...], *, payload_end: int) -> None:
    # Blocks lie back to back from the first page to the footer, so none can overlap another or leave the file.
    place = PAGE_BYTES
    for entry in entries:
        if entry.offset != place or entry.nbytes < 1:
            raise FormatError("pack footer: blocks do not lie back to back")
        place += entry.padded_bytes
    if place != payload_end:
        raise FormatError("pack footer: payload does not end where the footer begins")
    if len({entry.key for entry in entries}) != len(entries):
        raise FormatError("pack footer: the same block twice")


def _is_zero(data: bytes) -> bool:
    return not data.strip(b"\0")


def _sealed_page(fixed: bytes) -> bytes:
    page = bytearray(fixed.ljust(PAGE_BYTES, b"\0"))
    page[_CHECKSUM] = checksum_of(bytes(page)).to_bytes(8, "little")
    return bytes(page)


def _padded_page(stripped: bytes) -> bytes:
    if len(stripped) > PAGE_BYTES:
        raise FormatError("a kept page is longer than a page")
    return stripped.ljust(PAGE_BYTES, b"\0")


def _stored_checksum(page: bytes) -> int:
    return int.from_bytes(page[_CHECKSUM], "little")


def _check_page(page: bytes, *, magic: bytes, what: str) -> None:
    if len(page) != PAGE_BYTES or not page.startswith(magic):
        raise FormatError(f"pack {what}: not a Parkade pack")
    version, page_bytes = struct.unpack_from("<II", page, len(magic))
    if version != PACK_VERSION:
        raise FormatError(f"pack {what}: format version {version}, this build reads {PACK_VERSION}")
    blank = page[: _CHECKSUM.start] + _ZERO_CHECKSUM + page[_CHECKSUM.stop :]
    if checksum_of(blank) != _stored_checksum(page) or page_bytes != PAGE_BYTES:
        raise FormatError(f"pack {what}: checksum does not match")
