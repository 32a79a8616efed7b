"""Pauses follow how long links lived."""

import pytest

from talaria.wire.backoff import STEADY, Backoff


def nominal(backoff, count):
    """The next pauses without their spread."""
    return [backoff.pause(1.0) for _ in range(count)]


def test_a_broker_that_does_not_answer_is_tried_ever_more_rarely():
    backoff = Backoff(1.0, 60.0)
    assert nominal(backoff, 8) == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_link_that_breaks_at_once_is_not_tried_at_once():
    backoff, pauses = Backoff(1.0, 60.0), []
    for _ in range(6):
        backoff.lived(0.3)
        pauses += nominal(backoff, 1)
    assert pauses == [1, 2, 4, 8, 8, 8]
    backoff.failed()
    assert nominal(backoff, 1) == [60]


def test_a_link_that_lived_is_tried_at_once_again():
    backoff = Backoff(1.0, 60.0)
    for _ in range(5):
        backoff.lived(0.3)
        backoff.pause(0.0)
    backoff.lived(STEADY * 1.0)
    assert nominal(backoff, 2) == [1, 2]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_many_that_lose_a_broker_together_come_back_spread(share):
    assert 0.5 <= Backoff(1.0, 60.0).pause(share) < 1.0


def test_a_thousand_tries_overflow_nothing():
    assert nominal(Backoff(0.5, 60.0), 2000)[-1] == 60
