"""A goodbye is said until it is answered, but not for ever."""

import asyncio
from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("more", [1, 0])
def test_a_device_that_stays_says_it_to_each_coordinator_that_has_a_run_to_its_end(house, run_all, a_run, more):
    """The second one waited ten minutes for it: its answer was held for that of the first."""
    one = house(a_run("fedper", rounds=1), names=("anna",))

    async def serve_twice():
        agent = asyncio.ensure_future(one.agent("anna", stay=True))
        await one.serve()
        if more:
            one.run = replace(one.run, rounds=one.store.runs.extend("watch", more))
        await one.serve()
        agent.cancel()
        await asyncio.wait([agent])

    run_all(serve_twice(), seconds=120)
    assert len(one.of("done", "anna")) == 1 + more
    assert one.store.fleets.get("watch").round == 1 + more
