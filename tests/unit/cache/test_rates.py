"""R3: a restore is skipped only when it is measured, and clearly slower than reading the prompt again."""

from __future__ import annotations

import pytest

from parkade_cache.rates import Rate, Rates


def rates(*, disk: float, prompt: float) -> Rates:
    return Rates(Rate(disk), Rate(prompt))


def test_r3_without_a_measurement_nothing_is_predicted_or_skipped() -> None:
    unmeasured = Rates.unmeasured()
    assert not unmeasured.measured
    assert not unmeasured.restore_is_slower(disk_bytes=1 << 40, tokens=1)
    assert not rates(disk=1.0, prompt=0.0).restore_is_slower(disk_bytes=1 << 40, tokens=1)
    assert not rates(disk=0.0, prompt=1e9).restore_is_slower(disk_bytes=1 << 40, tokens=1)


@pytest.mark.parametrize(("disk_bytes", "slower"), [(99, False), (119, False), (121, True), (1000, True)])
def test_r3_a_restore_must_be_clearly_slower_to_be_skipped(disk_bytes: int, slower: bool) -> None:
    assert rates(disk=100.0, prompt=100.0).restore_is_slower(disk_bytes=disk_bytes, tokens=100) is slower


def test_a_new_speed_is_believed_at_once_and_then_changed_step_by_step() -> None:
    rate = Rate()
    rate.observe(100, 1.0)
    assert rate.per_second == 100
    rate.observe(200, 1.0)
    assert rate.per_second == pytest.approx(130)
    for _ in range(20):
        rate.observe(200, 1.0)
    assert rate.per_second == pytest.approx(200, rel=0.01)


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (-5, 1.0), (100, 0.0), (100, 1e-5), (100, -1.0)])
def test_samples_that_mean_nothing_are_ignored(amount: float, seconds: float) -> None:
    rate = Rate()
    rate.observe(amount, seconds)
    assert rate.per_second == 0
    assert rate.seconds_for(100) is None


def test_seconds_follow_the_speed() -> None:
    assert Rate(50.0).seconds_for(100) == 2.0
