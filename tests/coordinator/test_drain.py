"""For whom a coordinator waits after the last round."""

import pytest

from talaria_coordinator.fleet.drain import LINGER_S, Leaving

ALL = ("anna", "bela")


def test_it_waits_for_everybody_who_is_here():
    leaving = Leaving(retry=1.0)
    assert not leaving.over(0.0, ALL, ALL)
    leaving.done("anna")
    assert not leaving.over(100.0, ALL, ALL)
    leaving.done("bela")
    assert leaving.over(101.0, ALL, ())


def test_who_is_offline_for_long_is_not_waited_for():
    leaving = Leaving(retry=1.0)
    leaving.done("anna")
    assert not leaving.over(10.0, ALL, ())
    assert not leaving.over(39.9, ALL, ())
    assert leaving.over(40.0, ALL, ())


def test_who_comes_back_is_waited_for_anew():
    leaving = Leaving(retry=1.0)
    leaving.done("anna")
    assert not leaving.over(10.0, ALL, ())
    assert not leaving.over(35.0, ALL, ("bela",))
    assert not leaving.over(45.0, ALL, ())
    assert leaving.over(75.0, ALL, ())


@pytest.mark.parametrize("online", [ALL, ()])
def test_nobody_is_waited_for_without_end(online):
    assert Leaving(retry=1000.0).over(LINGER_S, ALL, online)


def test_a_member_whose_link_breaks_again_and_again_has_the_time_to_come_back():
    leaving = Leaving(retry=0.1)
    assert not leaving.over(0.0, ALL, ())
    assert not leaving.over(14.9, ALL, ())
    assert leaving.over(15.0, ALL, ())
