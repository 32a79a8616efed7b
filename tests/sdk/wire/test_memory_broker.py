"""The broker in memory behaves as MQTT does where the protocol relies on it."""

from __future__ import annotations

import asyncio

import pytest
from memory_broker import Faults, Hub, Loop

from talaria.errors import ConfigError, TransportError
from talaria.wire.mqtt import Arrival, LinkDown, LinkUp, Will


def test_retained_messages_wills_and_filters():
    async def story():
        hub = Hub()
        watch = Loop(hub, "watch", ("t/+/state",))
        dev = Loop(hub, "dev", ("t/#",), will=lambda: Will("t/dev/state", b"gone"))
        await watch.start()
        await dev.start()
        assert isinstance(await watch.receive(), LinkUp)
        assert isinstance(await dev.receive(), LinkUp)
        assert await dev.publish("t/dev/state", b"here", retain=True)
        assert await dev.publish("t/dev/other", b"x")
        assert await watch.receive() == Arrival("t/dev/state", b"here", retained=False)
        late = Loop(hub, "late", ("t/dev/state",))
        await late.start()
        hub.pump()
        assert [await late.receive(), await late.receive()] == [
            LinkUp(),
            Arrival("t/dev/state", b"here", retained=True),
        ]
        dev.cut()
        hub.pump()
        assert await watch.receive() == Arrival("t/dev/state", b"gone", retained=False)
        assert [x async for x in several(dev, 4)][2] == LinkDown("cut")
        await dev.close()
        hub.pump()
        assert hub.retained == {"t/dev/state": b"gone"}
        assert not await dev.publish("t/x", b"")
        assert not await dev.flush(1)

    asyncio.run(story())


async def several(link, count):
    for _ in range(count):
        yield await link.receive()


def test_a_closed_loop_says_so():
    async def story():
        link = Loop(Hub(), "dev", ("t",))
        await link.start()
        await link.close()
        await link.receive()
        with pytest.raises(TransportError, match="closed"):
            await link.receive()

    asyncio.run(story())


def test_faults_are_drawn_from_the_seed():
    def heard(seed):
        hub, found = Hub(Faults(seed, drop=0.3, duplicate=0.3, reorder=0.5)), []
        hub.join("a", ("#",), lambda m: found.append(m.payload), None)
        for i in range(200):
            hub.publish("t", bytes([i]))
        hub.pump()
        return found

    assert heard(1) == heard(1)
    assert heard(1) != heard(2)
    assert len(set(heard(1))) < 200
    assert len(heard(1)) > len(set(heard(1)))
    assert heard(1) != sorted(heard(1))
    with pytest.raises(ConfigError, match="drop"):
        Faults(drop=1.0)
