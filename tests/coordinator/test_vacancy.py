"""Whoever enters a fleet looks first whether another one serves it, at a broker that knows both by one name."""

import asyncio
from contextlib import suppress

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from talaria.errors import StateError, TransportError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.wire import messages as m
from talaria.wire.frames import Header, encode_frame
from talaria.wire.mqtt import LinkDown, LinkUp, Mqtt, Will
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet import vacancy
from talaria_coordinator.fleet.connection import over_mqtt
from talaria_coordinator.server.ingest import Post, _link
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given
from talaria_edge.identity import connection

TOPIC = "fl/1/watch/co/state"
EPOCH = 1_795_000_000_000


def birth(online):
    said = m.CoordinatorBirth(online=online, key=b"", chunk=1024, credit=8, max_update=1 << 20, retry=1.0, spec=b"{}")
    return encode_frame(Header(said.TYPE, "watch", boot=EPOCH), m.encode_message(said))


def test_a_coordinator_that_looking_puts_out_is_left_alone_where_it_comes_back(tmp_path, monkeypatch):
    """The broker told its last will, and to a second look the same will again: it always lost its fleet."""
    with open_broker("mosquitto", state=tmp_path) as broker:

        def link(will):
            return Mqtt(broker.url, "watch._coordinator", ("fl/1/watch/#",), will=will)

        async def story():
            other = link(lambda: Will(TOPIC, birth(False), retain=True))
            await other.start()
            await other.publish(TOPIC, birth(True), retain=True)
            await other.flush(5.0)
            with pytest.raises(StateError, match="another coordinator serves it"):
                await vacancy.look(link, "watch", None, known=EPOCH - 1)
            assert await vacancy.look(link, "watch", None, known=EPOCH) == EPOCH  # its own: who starts last has it
            await other.close()
            monkeypatch.setattr(vacancy, "ANSWER_S", 0.5)
            assert await vacancy.look(link, "watch", None, known=EPOCH - 1) == EPOCH  # it is gone

        asyncio.run(story())


def test_a_link_that_breaks_once_while_a_fleet_is_looked_at_is_no_other_coordinator(tmp_path, monkeypatch):
    """A coordinator restored from a backup told of another one, and ended, where its broker was restarted meanwhile."""
    monkeypatch.setattr(vacancy, "ANSWER_S", 2.0)
    with open_broker("mosquitto", state=tmp_path) as broker:

        def link(will):
            return Mqtt(broker.url, "watch._coordinator", ("fl/1/watch/#",), will=will)

        async def story():
            listener = Mqtt(broker.url, "listener", (TOPIC,))
            await listener.start()
            await listener.publish(TOPIC, birth(True), retain=True)
            await said(listener, birth(True))
            looks = asyncio.create_task(vacancy.look(link, "watch", None, known=EPOCH - 1))
            await said(listener, birth(False))  # that coordinator is asked whether it lives
            breaks = paho.Client(CallbackAPIVersion.VERSION2, "watch._coordinator")  # the broker ends who has this name
            breaks.connect("127.0.0.1", int(broker.url.rpartition(":")[2]))
            breaks.loop(0.1)
            breaks.disconnect()
            assert await looks == EPOCH
            await listener.close()

        asyncio.run(story())


@pytest.mark.parametrize("name", ["coordinator", "ingest-0"])
def test_no_device_has_the_name_of_a_coordinator_or_its_workers_at_the_broker(name, tmp_path):
    """Each is allowed: in a fleet without keys a device that was called so put its coordinator out again and again."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg")
    with open_broker("mosquitto", state=tmp_path) as broker:
        fleet = FleetConfig(name="watch", run=run, state=tmp_path, broker=broker.url, devices=1, workers=1)
        device = DeviceConfig(device=name, fleet="watch", broker=broker.url, state=tmp_path, source=Given(DeviceData))
        post = Post.of(fleet, broker.url, 0)

        def will():
            return Will(TOPIC, b"x")

        async def story():
            links = [
                over_mqtt(broker.url, fleet, will),
                _link(post, fleet, ("none",)),
                connection.over_mqtt(device, will),
            ]
            for link in links:
                await link.start()
            await asyncio.sleep(0.5)
            for link in links:
                assert isinstance(await link.receive(), LinkUp)
                await link.close()
                assert not [item async for item in rest(link) if isinstance(item, LinkDown)]

        asyncio.run(story())


async def rest(link):
    with suppress(TransportError):
        while True:
            yield await link.receive()


async def said(listener, payload):
    while getattr(await listener.receive(), "payload", b"") != payload:
        pass
