"""A goodbye is said until it is answered, but not for ever."""

from talaria_edge.agent.goodbye import Parting


def test_it_is_repeated_until_it_is_answered():
    parting = Parting(every=1.0, patience=5.0)
    assert not parting.over(100.0)
    assert parting.due(100.0)
    assert not parting.due(100.9)
    assert parting.due(101.0)
    assert not parting.over(104.9)
    parting.answered = True
    assert parting.over(101.1)
    assert not parting.due(200.0)


def test_it_ends_without_an_answer():
    parting = Parting(every=1.0, patience=5.0)
    assert parting.due(100.0)
    assert not parting.over(104.9)
    assert parting.over(105.0)
