"""Which failed requests are sent again: those that came to a stub that was dead already, and others for who asks."""

from __future__ import annotations

import pytest

from tritonpilot.entry.resend import FORGET_S, PATIENCE_S, TOGETHER_S, Again, Deaths

SAID = b'{"error":"Stub process \'ctr_0_0\' is not healthy."}'


def test_what_fails_first_may_have_been_in_the_stub_and_what_fails_later_was_not() -> None:
    deaths = Deaths()

    assert [deaths.never_reached(SAID, at_s) for at_s in (10.0, 10.001, 10 + TOGETHER_S)] == [False, False, False]
    assert deaths.never_reached(SAID, 11.0)
    assert deaths.never_reached(SAID, 12.0)


def test_instances_die_apart() -> None:
    deaths = Deaths()
    deaths.never_reached(SAID, 10.0)

    assert deaths.never_reached(SAID.replace(b"ctr_0_0", b"ctr_0_1"), 11.0) is False


def test_the_next_death_of_an_instance_that_was_healed_is_another_one() -> None:
    deaths = Deaths()
    deaths.never_reached(SAID, 10.0)

    assert deaths.never_reached(SAID, 10.1 + FORGET_S) is False


@pytest.mark.parametrize("said", [b"", b'{"error":"an exception of the model"}', b"Exceeds maximum queue size"])
def test_other_errors_are_no_deaths(said: bytes) -> None:
    assert Deaths().never_reached(said, 0.0) is None


def test_who_asks_for_it_is_sent_again_once_though_it_may_be_what_killed_the_stub() -> None:
    plain, asking = Again(False, False), Again(True, False)

    assert not plain.may(False, 1.0)
    assert asking.may(False, 1.0)
    assert not asking.may(False, 2.0)


def test_without_a_deadline_patience_ends() -> None:
    bounded, free = Again(False, False), Again(False, True)

    assert bounded.may(True, 1.0)
    assert bounded.may(True, PATIENCE_S)
    assert not bounded.may(True, 1.1 + PATIENCE_S)
    assert free.may(True, 1.0)
    assert free.may(True, 1e6)
