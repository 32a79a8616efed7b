"""Whoever enters a fleet looks first whether another one serves it, at a broker that knows both by one name."""

import asyncio

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from talaria.errors import StateError
from talaria.wire import messages as m
from talaria.wire.frames import Header, encode_frame
from talaria.wire.mqtt import Mqtt, Will
from talaria_coordinator.broker import open_broker
from talaria_coordinator.fleet import vacancy

TOPIC = "fl/1/watch/co/state"
EPOCH = 1_795_000_000_000


def birth(online):
    said = m.CoordinatorBirth(online=online, key=b"", chunk=1024, credit=8, max_update=1 << 20, retry=1.0, spec=b"{}")
    return encode_frame(Header(said.TYPE, "watch", boot=EPOCH), m.encode_message(said))


def test_a_coordinator_that_looking_puts_out_is_left_alone_where_it_comes_back(tmp_path, monkeypatch):
    """The broker told its last will, and to a second look the same will again: it always lost its fleet."""
    with open_broker("mosquitto", state=tmp_path) as broker:

        def link(will):
            return Mqtt(broker.url, "watch.coordinator", ("fl/1/watch/#",), will=will)

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
            return Mqtt(broker.url, "watch.coordinator", ("fl/1/watch/#",), will=will)

        async def story():
            listener = Mqtt(broker.url, "listener", (TOPIC,))
            await listener.start()
            await listener.publish(TOPIC, birth(True), retain=True)
            await said(listener, birth(True))
            looks = asyncio.create_task(vacancy.look(link, "watch", None, known=EPOCH - 1))
            await said(listener, birth(False))  # that coordinator is asked whether it lives
            breaks = paho.Client(CallbackAPIVersion.VERSION2, "watch.coordinator")  # the broker ends who has this name
            breaks.connect("127.0.0.1", int(broker.url.rpartition(":")[2]))
            breaks.loop(0.1)
            breaks.disconnect()
            assert await looks == EPOCH
            await listener.close()

        asyncio.run(story())


async def said(listener, payload):
    while getattr(await listener.receive(), "payload", b"") != payload:
        pass
