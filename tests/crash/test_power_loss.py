"""The power goes at any moment: everything published is found again with its bytes, nothing else is believed (D3, S2).

``PARKADE_POWER_LOSS_STATES`` sets how many states are tried, ``PARKADE_POWER_LOSS_SEED`` which. A failure names the
state; ``PARKADE_POWER_LOSS_ONLY=life:state`` shows it again.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import pytest
from crash.power_loss_life import Faults, ViolationError, run_everywhere, run_one, run_share

from parkade_cache.spill import pack_reader
from parkade_cache.spill.index import SpillIndex

STATES = int(os.environ.get("PARKADE_POWER_LOSS_STATES", "10000"))
SEED = os.environ.get("PARKADE_POWER_LOSS_SEED", "1")
ONLY = os.environ.get("PARKADE_POWER_LOSS_ONLY", "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_d3_a_power_cut_at_any_moment_loses_nothing_published_and_shows_nothing_wrong() -> None:
    """S2, D3, D4, cases 34, 36, 44, 47, 69: 10,000 states of unflushed writes dropped, torn and reordered."""
    if ONLY:
        recording, _, number = ONLY.partition(":")
        run_one(SEED, int(recording), int(number))
        return
    tally = run_everywhere(SEED, STATES, processes=min(4, os.cpu_count() or 1))
    assert tally.states >= STATES


def violations(faults: Faults, *, lives: int = 12, states_each: int = 60) -> str:
    """What the simulation says of code with these faults; it must not take long to say something."""
    with pytest.raises(ViolationError) as caught:
        run_share("mutants", range(lives), states_each, faults)
    return str(caught.value)


def test_the_simulation_notices_when_payload_is_not_flushed() -> None:
    """D3: without the flush before the rename a complete name stands over bytes that are not there."""
    assert "found" in violations(Faults(skips=frozenset({"flush"})))


def test_the_simulation_notices_when_folders_are_not_flushed() -> None:
    """D3: without the flush after the rename a published pack has no name."""
    assert "published and not found" in violations(Faults(skips=frozenset({"flush_folder"})))


def lose_dead_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    transaction = SpillIndex._transaction

    def forgetful(self: SpillIndex, *, durable: bool = False) -> AbstractContextManager[None]:
        return transaction(self)

    monkeypatch.setattr(SpillIndex, "_transaction", forgetful)


def test_the_simulation_notices_when_dead_marks_are_not_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: a hole is taken for a block when its mark can be lost."""
    lose_dead_marks(monkeypatch)
    assert violations(Faults()).startswith(("found, but marked dead", "found with damaged bytes"))


def test_the_simulation_notices_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: that hole would be served if nobody compared checksums."""
    lose_dead_marks(monkeypatch)
    monkeypatch.setattr(pack_reader, "_is_whole", lambda target: True)
    assert "wrong bytes" in violations(Faults())
