"""A link on which nothing comes through any more is given up, one that is merely quiet is not."""

import asyncio

from memory_broker import Hub, Loop

from talaria.wire.transport import LinkDown, LinkUp
from talaria_coordinator.fleet.deaf_link import Hearing


def test_a_quiet_link_is_asked_and_kept():
    hearing = Hearing(quiet=5.0)
    hearing.heard(0.0)
    assert [hearing.next(t) for t in (1.0, 4.9, 5.0, 5.1)] == ["wait", "wait", "ask", "wait"]
    hearing.heard(5.2)  # its own word came back
    assert [hearing.next(t) for t in (9.0, 10.3)] == ["wait", "ask"]


def test_a_deaf_link_is_renewed():
    hearing = Hearing(quiet=5.0)
    hearing.heard(0.0)
    assert [hearing.next(t) for t in (5.0, 9.9, 10.0)] == ["ask", "wait", "renew"]
    hearing.heard(10.0)
    assert hearing.next(11.0) == "wait"


def test_a_renewed_link_hears_again_what_is_retained():
    async def story():
        hub = Hub(eager=True)
        link = Loop(hub, "co", ("d/+/state",))
        await link.start()
        hub.publish("d/anna/state", b"birth", retain=True)
        link.renew("deaf")
        await link.recall()
        return [await link.receive() for _ in range(6)]

    up, live, down, again, *retained = asyncio.run(story())
    assert (type(up), type(down), type(again)) == (LinkUp, LinkDown, LinkUp)
    assert (live.retained, [x.payload for x in retained]) == (False, [b"birth"] * 2)
    assert all(x.retained for x in retained)
