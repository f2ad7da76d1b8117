"""M2 and cases 1 and 2: the machine's free memory is parsed strictly, and unknown is not zero."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parkade_cache.errors import MalformedAccountError
from parkade_cache.memory.cgroup import parse_groups, parse_mounts
from parkade_cache.memory.pressure import PressureScope, parse_pressure
from parkade_cache.memory.reading import ReadingSource, admits, parse_meminfo

UNHURRIED = settings(deadline=None)

BROKEN = {
    "empty": "",
    "no key": "MemTotal: 100 kB\nMemFree: 50 kB\n",
    "minus sign": "MemAvailable: -1 kB\n",
    "plus sign": "MemAvailable: +1 kB\n",
    "unit MB": "MemAvailable: 1 MB\n",
    "no unit": "MemAvailable: 1\n",
    "unit stuck to a letter": "MemAvailable: 1x\n",
    "2^64-1 kB overflows as bytes": f"MemAvailable: {2**64 - 1} kB\n",
    "2^64 kB": f"MemAvailable: {2**64} kB\n",
    "more digits than a number may have": "MemAvailable: " + "9" * 5000 + " kB\n",
    "trailing word": "MemAvailable: 1 kB more\n",
    "key twice": "MemAvailable: 1 kB\nMemAvailable: 1 kB\n",
    "key twice, second broken": "MemAvailable: 1 kB\nMemAvailable: x\n",
    "hexadecimal": "MemAvailable: 0x10 kB\n",
    "underscore": "MemAvailable: 1_000 kB\n",
    "digits of another script": "MemAvailable: ١٢ kB\n",
    "carriage return": "MemAvailable: 1 kB\r\n",
    "key inside another line": "Free MemAvailable: 1 kB\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_case_1_a_malformed_meminfo_is_unknown_and_refused_even_for_need_0_and_floor_0(machine: Any, text: str):
    machine.meminfo_text(text)

    reading = machine.sample()

    assert not reading.known
    assert reading.available_bytes is None
    assert reading.source is None
    assert reading.unknown_reason
    assert not admits(reading, need_bytes=0, floor_bytes=0)


def test_case_2_zero_is_known_and_admits_nothing_above_it(machine: Any):
    machine.meminfo_text("MemAvailable: 0 kB\n")

    reading = machine.sample()

    assert reading.known
    assert (reading.available_bytes, reading.source) == (0, ReadingSource.MEMINFO)
    assert admits(reading, need_bytes=0, floor_bytes=0)
    assert not admits(reading, need_bytes=0, floor_bytes=1)


def test_m2_the_largest_number_whose_bytes_fit_64_bits_is_known():
    most_kib = (2**64 - 1) // 1024

    assert parse_meminfo(f"MemAvailable: {most_kib} kB\n".encode()).available_bytes == most_kib * 1024
    with pytest.raises(MalformedAccountError):
        parse_meminfo(f"MemAvailable: {most_kib + 1} kB\n".encode())


def test_m2_a_broken_total_does_not_hide_what_is_available():
    meminfo = parse_meminfo(b"MemTotal: lots\nMemAvailable: 3 kB")

    assert (meminfo.available_bytes, meminfo.total_bytes) == (3072, None)


@UNHURRIED
@given(st.binary() | st.binary().map(lambda tail: b"MemAvailable: " + tail) | st.text().map(str.encode))
def test_m2_whatever_a_kernel_file_holds_it_is_a_number_or_malformed_and_nothing_else(text: bytes):
    for parse in (parse_meminfo, parse_groups, parse_mounts, lambda text: parse_pressure(text, PressureScope.GROUP)):
        with contextlib.suppress(MalformedAccountError):
            parse(text)


def test_m9_an_unreadable_meminfo_is_unknown_with_and_without_a_cap(pod: Any):
    pod.v2_group("", max=10 << 30, current=1 << 30)
    (pod.root / "proc/meminfo").unlink()

    assert not pod.sample().known
    assert not pod.sample(cap_bytes=1 << 30).known
