"""When a broker's silence means that an acknowledgement is lost: by hand, and for every order of a link that works."""

from hypothesis import given
from hypothesis import strategies as st

from talaria.wire.in_flight import ONWARD_S, InFlight


def sent(*times):
    flight = InFlight(60.0, 0.0)
    for number, now in enumerate(times, 1):
        flight.sent(number, now)
    return flight


def test_silence_is_borne_as_long_as_the_patience():
    flight = sent(5.0)
    assert not flight.forgotten(65.0)
    assert flight.forgotten(65.1)


def test_nothing_is_missed_while_nothing_is_sent():
    flight = sent()
    assert not flight.forgotten(1e6)
    flight.sent(1, 1e6)
    assert not flight.forgotten(1e6 + 59)


def test_an_answer_that_later_ones_overtake_is_lost():
    flight = sent(0.0, 1.0, 2.0)
    flight.acknowledged(2, 3.0)
    assert not flight.forgotten(59.0)
    flight.acknowledged(3, 61.0)
    assert flight.forgotten(61.0)
    flight.acknowledged(1, 62.0)
    assert not flight.forgotten(1e6)
    assert len(flight) == 0


def test_an_answer_to_what_was_never_counted_says_nothing():
    flight = sent(0.0)
    flight.acknowledged(9, 50.0)
    assert not flight.forgotten(100.0)
    assert flight.forgotten(110.1)


@given(st.lists(st.floats(0.1, 59.0), min_size=1, max_size=30))
def test_a_slow_link_that_answers_in_turn_is_never_given_up(pauses):
    """All is sent at once, and each answer comes within the patience after the one before."""
    flight, now = sent(*[0.0] * len(pauses)), 0.0
    for number, pause in enumerate(pauses, 1):
        assert not flight.forgotten(now + pause)
        now += pause
        flight.acknowledged(number, now)
    assert not flight.forgotten(1e6)


def test_a_message_is_on_its_way_by_its_name_until_a_moment_after_it_is_acknowledged():
    flight = InFlight(60.0, 0.0)
    flight.sent(1, 1.0, "chunk 7")
    flight.sent(2, 1.0)
    flight.sent(3, 2.0, "chunk 7")
    assert [flight.has(name, 2.0) for name in ("chunk 7", "chunk 8", "")] == [True, False, False]
    flight.acknowledged(1, 3.0)
    assert flight.has("chunk 7", 3.0 + 2 * ONWARD_S)
    flight.acknowledged(3, 6.0)
    flight.acknowledged(3, 7.0)
    assert flight.has("chunk 7", 6.0 + ONWARD_S / 2)  # who asked for it may not have it yet
    assert not flight.has("chunk 7", 6.0 + ONWARD_S)
    assert len(flight) == 1
