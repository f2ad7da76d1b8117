"""Whose files may be matched (D1)."""

from __future__ import annotations

import dataclasses

import pytest

from parkade_cache.spill.identity import Identity
from parkade_cache.spill.testing import some_identity


def test_a_fingerprint_is_16_hex_digits_and_the_same_in_every_process() -> None:
    assert some_identity().fingerprint == "48d636805f455e07"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Identity)])
def test_a_difference_in_any_field_is_another_identity(name: str) -> None:
    """D1."""
    other = 99 if isinstance(getattr(some_identity(), name), int) else "other"
    assert some_identity(**{name: other}).fingerprint != some_identity().fingerprint


def test_every_generation_is_an_identity_of_its_own() -> None:
    """Trap 14."""
    identity = some_identity()
    assert identity.at_generation(0) == identity.fingerprint
    assert len({identity.at_generation(n) for n in range(100)}) == 100
