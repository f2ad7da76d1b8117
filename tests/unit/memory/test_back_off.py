"""G12 and case 24: a kind of need that is refused again and again stops paying for estimates."""

from __future__ import annotations

from parkade_cache.memory.gate import ATTEMPTS_SKIPPED, BackOff, NeedKind


def refused(times: int, kind: NeedKind = NeedKind.PARK) -> BackOff:
    back_off = BackOff()
    for _ in range(times):
        back_off.refused(kind)
    return back_off


def asks(back_off: BackOff, attempts: int, kind: NeedKind = NeedKind.PARK) -> int:
    return sum(back_off.should_ask(kind) for _ in range(attempts))


def test_case_24_after_3_refusals_in_a_row_the_next_64_attempts_pay_no_estimate():
    back_off = refused(3)

    assert asks(back_off, 64) == 0
    assert back_off.should_ask(NeedKind.PARK)


def test_case_24_two_refusals_are_not_enough():
    assert asks(refused(2), 10) == 10


def test_case_24_a_new_conversation_still_asks_and_uses_up_no_skipped_attempt():
    back_off = refused(3)

    assert all(back_off.should_ask(NeedKind.PARK, new_conversation=True) for _ in range(100))
    assert asks(back_off, ATTEMPTS_SKIPPED) == 0


def test_case_24_a_success_resets():
    back_off = refused(3)
    back_off.succeeded(NeedKind.PARK)
    assert asks(back_off, 5) == 5

    back_off = refused(2)
    back_off.succeeded(NeedKind.PARK)
    back_off.refused(NeedKind.PARK)
    assert asks(back_off, 5) == 5, "refusals count only in a row"


def test_g12_kinds_are_counted_apart():
    assert asks(refused(3, NeedKind.PARK), 5, NeedKind.RESTORE) == 5


def test_g12_a_changed_limit_is_asked_again_at_once_and_the_same_limit_is_not():
    back_off = BackOff()
    back_off.limits_are((10, 2))
    for _ in range(3):
        back_off.refused(NeedKind.PARK)

    back_off.limits_are((10, 2))
    assert not back_off.should_ask(NeedKind.PARK)
    back_off.limits_are((11, 2))
    assert back_off.should_ask(NeedKind.PARK)


def test_g12_a_refusal_after_the_pause_is_still_one_in_a_row():
    back_off = refused(3)
    assert asks(back_off, ATTEMPTS_SKIPPED + 1) == 1

    back_off.refused(NeedKind.PARK)

    assert asks(back_off, ATTEMPTS_SKIPPED) == 0


def test_g12_a_refused_new_conversation_does_not_make_the_pause_longer():
    back_off = refused(3)
    assert asks(back_off, 60) == 0

    back_off.refused(NeedKind.PARK)

    assert asks(back_off, 5) == 1
