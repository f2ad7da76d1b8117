"""Sizes mean the same on the command line, in the policy and in the custom resources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_cache.quantity import format_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1", 1),
        ("512Mi", 512 * 1024**2),
        ("96Gi", 96 * 1024**3),
        ("1G", 10**9),
        ("1.5Ti", 3 * 1024**4 // 2),
        ("2k", 2000),
        (" 7Ki ", 7168),
        (123, 123),
    ],
)
def test_a_kubernetes_quantity_is_a_whole_number_of_bytes(text: str | int, nbytes: int) -> None:
    assert parse_quantity(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Gi",
        "-1",
        "+1",
        "1 Gi",
        "1gi",
        "1KB",
        "1e3",
        "0x10",
        "١٢",
        "1.3",
        "0.1Ki",
        "9" * 21,
        "8Ei",
        "1\n2",
        -1,
        True,
    ],
)
def test_what_is_no_size_is_refused_in_one_line(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"size|whole number") as refusal:
        parse_quantity(text)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [None, 1.5, b"1Gi", [], {}])
def test_a_value_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_quantity(value)  # type: ignore[arg-type]


def test_a_very_long_text_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ValueError, match="not a size") as refusal:
        parse_quantity("9" * 100_000)
    assert len(str(refusal.value)) < 200


@given(st.integers(min_value=0, max_value=2**53 - 1), st.sampled_from(["", "Ki", "Mi", "k", "M"]))
def test_every_whole_quantity_below_the_limit_is_exact(number: int, suffix: str) -> None:
    factor = {"": 1, "Ki": 1024, "Mi": 1024**2, "k": 1000, "M": 10**6}[suffix]
    if number * factor < 2**63:
        assert parse_quantity(f"{number}{suffix}") == number * factor


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1024**3 * 3 // 2, "1.5 GiB"),
        (1024**3 - 1, "1.0 GiB"),
        (-2048, "-2.0 KiB"),
        (2**62, "4.0 EiB"),
        (2**70, "1024.0 EiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
