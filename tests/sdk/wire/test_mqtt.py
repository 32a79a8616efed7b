"""The MQTT transport against real brokers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import gc
import hashlib
import ipaddress
import os
import random
import socket
import subprocess
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paho.mqtt.client as paho
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from talaria.errors import ConfigError, StateError, TransportError
from talaria.identity.credentials import password_in
from talaria.wire.frames import MAX_FRAME
from talaria.wire.inbox_budget import EACH, Budget
from talaria.wire.mqtt import (
    Address,
    Arrival,
    LinkDown,
    LinkUp,
    Mqtt,
    NotTaken,
    Tls,
    Will,
    _Session,
)
from talaria.wire.mqtt_client import LARGEST, PIECE, _masked

FAST = {"backoff": (0.05, 0.2), "keepalive": 10}


async def arrivals(link: Mqtt, count: int) -> list[Arrival]:
    """The next ``count`` messages, or a failure after ten seconds."""
    found: list[Arrival] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            item = await link.receive()
            if isinstance(item, Arrival):
                found.append(item)
    return found


async def until(link: Mqtt, kind: type) -> object:
    async with asyncio.timeout(15):
        while True:
            item = await link.receive()
            if isinstance(item, kind):
                return item


@pytest.mark.parametrize("threaded", [True, False])
def test_messages_arrive_and_the_protocol_is_agreed(broker, threaded):
    async def story() -> None:
        hear = Mqtt(broker.url, "hear", ("t/#",), threaded=threaded, **FAST)
        say = Mqtt(broker.url, "say", ("none",), threaded=threaded, **FAST)
        await hear.start()
        await say.start()
        assert isinstance(await hear.receive(), LinkUp)
        sent = {f"t/{i}": bytes([i]) * 100_000 for i in range(40)}
        for topic, payload in sent.items():
            assert await say.publish(topic, payload)
        assert await say.flush(10)
        assert {a.topic: a.payload for a in await arrivals(hear, 40)} == sent
        assert hear.protocol == ("3.1.1" if type(broker).__name__ == "Amqtt" else "5")
        await say.close()
        await hear.close()
        with pytest.raises(TransportError, match="closed"):
            await hear.receive()
        assert not await say.publish("t/x", b"")

    asyncio.run(story())


def test_who_is_cancelled_in_the_moment_in_which_the_link_opens_ends(mosquitto, monkeypatch):
    real = _Session.open

    async def open_and_cancel(session, *args):
        await real(session, *args)
        starting.cancel()

    async def story() -> None:
        nonlocal starting
        monkeypatch.setattr(_Session, "open", open_and_cancel)
        link = Mqtt(mosquitto.url, "me", ("t/#",), **FAST)
        starting = asyncio.ensure_future(link.start())
        await asyncio.wait([starting])
        assert starting.cancelled()
        await link.close()

    starting: asyncio.Future[None]
    asyncio.run(story())


@pytest.mark.parametrize("threaded", [True, False])
def test_a_link_follows_more_as_it_goes_on_and_after_a_cut(broker, threaded):
    async def story() -> None:
        hear = Mqtt(broker.url, "hear", ("t/0",), threaded=threaded, **FAST)
        say = Mqtt(broker.url, "say", ("none",), **FAST)
        await hear.start()
        await say.start()
        await hear.follow("t/0", *(f"t/{i}" for i in range(1, 100)))
        await hear.follow("t/5")
        for again in (False, True):
            if again:
                hear.renew("as if it were cut")
                await until(hear, LinkDown)
                await until(hear, LinkUp)
            for i in range(101):
                assert await say.publish(f"t/{i}", b"x")
            assert sorted(a.topic for a in await arrivals(hear, 100)) == sorted(f"t/{i}" for i in range(100))
        await hear.close()
        await hear.follow("t/200")  # of a link that is closed, nothing
        await say.close()

    asyncio.run(story())


def test_retained_messages_are_marked_and_come_after_the_link(broker):
    async def story() -> None:
        say = Mqtt(broker.url, "say", ("none",), **FAST)
        await say.start()
        await say.publish("t/kept", b"kept", retain=True)
        assert await say.flush(10)
        hear = Mqtt(broker.url, "hear", ("t/#",), **FAST)
        await hear.start()
        assert isinstance(await hear.receive(), LinkUp)
        assert await arrivals(hear, 1) == [Arrival("t/kept", b"kept", retained=True)]
        await say.publish("t/live", b"live")
        assert await arrivals(hear, 1) == [Arrival("t/live", b"live", retained=False)]
        await hear.close()
        await say.close()

    asyncio.run(story())


def test_the_link_comes_back_with_a_new_will_after_the_broker_died(mosquitto):
    boots = []

    def will() -> Will:
        boots.append(len(boots) + 1)
        return Will("t/state", b"gone %d" % boots[-1])

    async def story() -> None:
        link = Mqtt(mosquitto.url, "dev", ("t/#",), will=will, **FAST)
        await link.start()
        assert isinstance(await link.receive(), LinkUp)
        mosquitto.kill()
        assert isinstance(await until(link, LinkDown), LinkDown)
        assert not await link.publish("t/lost", b"")
        assert not await link.flush(0.1)
        mosquitto.start()
        await until(link, LinkUp)
        await link.publish("t/again", b"1")
        assert await arrivals(link, 1) == [Arrival("t/again", b"1")]
        await link.close()

    asyncio.run(story())
    assert len(boots) >= 2


@pytest.mark.parametrize("will", [lambda: Will("dead/x", b"gone"), None])
def test_a_link_comes_back_from_a_broker_that_speaks_an_older_mqtt_than_the_one_before(mosquitto, make_amqtt, will):
    """It went on as it was agreed with the first: with a will it was never answered, and without it ended."""

    async def story() -> None:
        link = Mqtt(mosquitto.url, "x", ("t",), will=will, timeout=2.0, **FAST)
        await link.start()
        await until(link, LinkUp)
        assert link.protocol == "5"
        mosquitto.kill()
        make_amqtt(mosquitto.port)
        async with asyncio.timeout(60):
            while not isinstance(await link.receive(), LinkUp):
                pass
        assert link.protocol == "3.1.1"
        await link.close()

    asyncio.run(story())


def test_a_link_that_is_renewed_brings_a_new_will_and_leaves_without_the_old_one(mosquitto):
    boots = []

    def will() -> Will:
        boots.append(len(boots) + 1)
        return Will("t/state", b"gone %d" % boots[-1])

    async def story() -> None:
        hear = Mqtt(mosquitto.url, "hear", ("t/#",), **FAST)
        link = Mqtt(mosquitto.url, "dev", ("t/#",), will=will, **FAST)
        await hear.start()
        await link.start()
        link.renew("its boot is an old one")
        assert (await until(link, LinkDown)).reason == "its boot is an old one"
        await until(link, LinkUp)
        await link.publish("t/again", b"1")
        assert await arrivals(hear, 1) == [Arrival("t/again", b"1")]
        await link.close()
        await hear.close()

    asyncio.run(story())
    assert boots == [1, 2]


class Proxy:
    """A link between client and broker that a test can cut, or rob of the broker's acknowledgements."""

    def __init__(self, port: int) -> None:
        self._target, self._writers, self.robs, self.robbed = port, [], False, 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"mqtt://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, up_writer]

        async def flow(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    if self.robs and source is up_reader:
                        data = self._without_acknowledgements(data)
                    sink.write(data)
                    await sink.drain()
            except ConnectionError:
                pass
            sink.close()

        await asyncio.gather(flow(reader, up_writer), flow(up_reader, writer))

    def _without_acknowledgements(self, data: bytes) -> bytes:
        """``data`` of whole, short packets but for PUBACKs, as a broker sends it that drops them (Mosquitto does)."""
        kept = b""
        while data:
            packet, data = data[: 2 + data[1]], data[2 + data[1] :]
            if packet[0] == 0x40:
                self.robbed += 1
            else:
                kept += packet
        return kept

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@pytest.mark.parametrize("threaded", [True, False])
def test_a_link_whose_acknowledgements_are_lost_is_given_up_and_comes_back(broker, threaded, monkeypatch):
    monkeypatch.setattr("talaria.wire.mqtt.UNANSWERED_S", 2.0)

    async def story():
        async with Proxy(broker.port) as proxy:
            link = Mqtt(proxy.url, "anna", (), window=4, backoff=(0.1, 0.5), threaded=threaded)
            await link.start()
            assert isinstance(await until(link, LinkUp), LinkUp)
            assert await link.publish("t/x", b"1")
            assert await link.flush(20)
            proxy.robs = True
            for _ in range(4):
                assert await link.publish("t/x", b"2")
            # The window is full, and nothing of it is ever answered: this waited for ever.
            assert not await asyncio.wait_for(link.publish("t/x", b"3"), 60)
            down = await until(link, LinkDown)
            assert "unanswered for 2 s" in down.reason
            proxy.robs = False
            assert isinstance(await until(link, LinkUp), LinkUp)
            assert await link.publish("t/x", b"4")
            assert await link.flush(20)
            assert proxy.robbed == 4
            await link.close()

    asyncio.run(story())


@pytest.mark.parametrize("threaded", [True, False])
def test_no_more_of_a_message_is_held_than_a_frame_can_have(broker, threaded):
    """Whoever may publish at a broker without bounds could fill the memory of all that listen."""

    async def story():
        link = Mqtt(broker.url, "anna", ("t/#",), threaded=threaded)
        await link.start()
        for size in (1_900_000, MAX_FRAME, 1):
            assert await link.publish("t/x", bytes(size))
            assert await link.flush(20)
        huge, whole, small = await arrivals(link, 3)
        assert MAX_FRAME < len(huge.payload) <= LARGEST + PIECE
        assert (len(whole.payload), len(small.payload)) == (MAX_FRAME, 1)
        assert link.dropped == 0
        await link.close()

    asyncio.run(story())


@pytest.mark.parametrize("threaded", [True, False])
def test_a_payload_is_what_was_published_whatever_stands_before_it(mosquitto, threaded):
    """Properties of MQTT 5, with a length of one to three bytes; no payload is held once it was told."""
    sizes, payloads = (0, 1, 120, 127, 128, 300, 16_500), (b"", b"x", bytes(range(256)) * 4096)

    async def story():
        link = Mqtt(mosquitto.url, "anna", ("t/#",), threaded=threaded)
        await link.start()
        other = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        other.connect(link.address.host, link.address.port)
        other.loop_start()
        sent = []
        for size in sizes:
            for payload in payloads:
                about = Properties(PacketTypes.PUBLISH)
                about.UserProperty = ("k", "v" * size)
                sent.append((f"t/{size}/ü", payload))
                other.publish(*sent[-1], qos=len(sent) % 2, properties=about if size else None).wait_for_publish(20)
        about.UserProperty = [("k", "v" * 65_000)] * 20  # beyond what is held: nobody may cut a link with them
        other.publish("t/far", b"x", qos=1, properties=about).wait_for_publish(20)
        assert [(one.topic, one.payload) for one in await arrivals(link, len(sent) + 1)] == [*sent, ("t/far", b"")]
        other.disconnect()
        other.loop_stop()
        client = link._session._client
        await link.close()
        assert not client._in_packet["packet"]

    asyncio.run(story())


def told(packets, threaded):
    """Why a link ended to a broker that sent these packets once it had answered, and the messages that it holds."""

    async def serve(reader, writer):
        for answer in (b"\x20\x03\x00\x00\x00", b"\x90\x04\x00\x01\x00\x01"):
            await reader.readexactly((await reader.readexactly(2))[1])
            writer.write(answer)
        writer.write(packets)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def story():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            link = Mqtt(url, "anna", ("a",), threaded=threaded, backoff=(30.0, 60.0))
            await link.start()
            held = link._session._client._in_messages
            down = await until(link, LinkDown)
            await link.close()
            return down.reason, held

    return asyncio.run(story())


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize(
    "packet",
    [b"\x30\x00", b"\x30\x01\x00", b"\x30\x03\x00\x09a", b"\x32\x04\x00\x01a\x00", b"\x30\x04\x00\x01a\x7f",
     b"\x30\x08\x00\x01a\xff\xff\xff\xff\x7f"],
    ids=["nothing", "half a length", "topic", "number", "properties", "a length without end"],
)  # fmt: skip
def test_a_message_that_is_cut_short_ends_the_link(threaded, packet):
    assert told(packet, threaded)[0]


@pytest.mark.parametrize("threaded", [True, False])
def test_a_broker_that_sends_what_nobody_asked_for_cannot_have_it_held(threaded):
    """QoS 2, of which MQTT has 65535 messages under way."""
    packets = b"".join(b"\x34\x07\x00\x01a\x00" + bytes([number]) + b"\x00!" for number in range(1, 9))
    reason, held = told(packets, threaded)
    assert "error" in reason  # of the protocol, where paho knows that word
    assert not held


@pytest.mark.parametrize("threaded", [True, False])
def test_what_came_in_one_piece_is_heard_and_acknowledged_though_nothing_comes_after_it(threaded):
    """Of what was read ahead no selector tells."""
    payloads = [bytes([number % 256]) * (100_000 if number == 150 else number % 3) for number in range(300)]

    def packet(number, payload):
        left = 6 + len(payload)
        length = bytes([left & 127 | 128, left >> 7 & 127 | 128, left >> 14])
        return b"\x32" + length + b"\x00\x01a" + number.to_bytes(2, "big") + b"\x00" + payload

    async def serve(reader, writer):
        for answer in (b"\x20\x03\x00\x00\x00", b"\x90\x04\x00\x01\x00\x01"):
            await reader.readexactly((await reader.readexactly(2))[1])
            writer.write(answer)
        writer.write(b"".join(packet(number, payload) for number, payload in enumerate(payloads, 1)))
        with contextlib.suppress(asyncio.IncompleteReadError):  # the first connection asks what MQTT is spoken here
            said.append(await reader.readexactly(4 * len(payloads)))
        writer.close()

    async def story():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(30):
            link = Mqtt(f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}", "anna", ("a",), threaded=threaded)
            await link.start()
            heard = [one.payload for one in await arrivals(link, len(payloads))]
            await until(link, LinkDown)
            await link.close()
            return heard

    said = []
    assert asyncio.run(story()) == payloads
    assert said == [b"".join(b"\x40\x02" + number.to_bytes(2, "big") for number in range(1, 301))]


@pytest.mark.parametrize("threaded", [True, False])
def test_a_cut_link_sends_the_will_of_its_own_connection_and_comes_back(broker, threaded):
    boots = []

    def will() -> Will:
        boots.append(len(boots) + 1)
        return Will("t/state", b"gone %d" % boots[-1], retain=False)

    async def story() -> None:
        watch = Mqtt(broker.url, "watch", ("t/state",), **FAST)
        await watch.start()
        async with Proxy(broker.port) as proxy:
            link = Mqtt(proxy.url, "dev", ("t/#",), will=will, threaded=threaded, **FAST)
            await link.start()
            for boot in (1, 2):
                await until(link, LinkUp)
                proxy.cut()
                assert await arrivals(watch, 1) == [Arrival("t/state", b"gone %d" % boot)]
                await until(link, LinkDown)
            await until(link, LinkUp)
            await link.publish("t/again", b"1")
            assert await arrivals(link, 1) == [Arrival("t/again", b"1")]
            await link.close()
        await watch.close()

    asyncio.run(story())
    assert boots == [1, 2, 3]


def test_a_will_that_cannot_be_made_stops_the_transport_and_says_why(mosquitto):
    boots = []

    def will() -> Will:
        boots.append(1)
        if len(boots) > 1:
            raise StateError("cannot save the boot counter: disk full")
        return Will("t/state", b"gone")

    async def story() -> None:
        link = Mqtt(mosquitto.url, "dev", ("t/#",), will=will, **FAST)
        await link.start()
        mosquitto.kill()
        await until(link, LinkDown)
        for _ in range(2):
            with pytest.raises(StateError, match=r"^cannot save the boot counter"):
                await until(link, LinkUp)
        await link.close()

    asyncio.run(story())


def test_a_link_that_is_cut_at_once_each_time_is_tried_ever_more_rarely(mosquitto, monkeypatch):
    pauses, sleep = [], asyncio.sleep

    async def short(seconds: float) -> None:
        if asyncio.current_task().get_name() == "mqtt dev":
            pauses.append(seconds)
        await sleep(min(seconds, 0.01))

    async def story() -> None:
        async with Proxy(mosquitto.port) as proxy:
            link = Mqtt(proxy.url, "dev", ("t",), backoff=(1.0, 60.0))
            await link.start()
            monkeypatch.setattr("talaria.wire.mqtt.asyncio.sleep", short)
            for _ in range(5):
                await until(link, LinkUp)
                proxy.cut()
                await until(link, LinkDown)
            await until(link, LinkUp)
            await link.close()

    asyncio.run(story())
    assert len(pauses) >= 5
    assert 4.0 <= pauses[-1] < 8.0  # half to all of eight times the shortest


def test_each_new_reason_why_the_link_does_not_come_back_is_told_once(mosquitto):
    async def story() -> None:
        link = Mqtt(mosquitto.url, "dev", ("t",), **FAST)
        await link.start()
        mosquitto.kill()
        assert "link lost" in (await until(link, LinkDown)).reason
        refused = await until(link, LinkDown)
        assert "refused" in refused.reason
        link.address = Address.parse("mqtt://no-such-host.invalid:1883")
        assert "no-such-host.invalid" in (await until(link, LinkDown)).reason
        link.address = Address.parse(mosquitto.url)
        assert (await until(link, LinkDown)) == refused
        await asyncio.sleep(0.5)  # several more attempts, for the same reason
        mosquitto.start()
        item = await link.receive()
        assert isinstance(item, LinkUp)
        await link.close()

    asyncio.run(story())


def test_a_certificate_that_ended_is_named_when_the_link_does_not_come_back(make_mosquitto, tmp_path):
    tls, lines = certificates(tmp_path, client=True)
    broker = make_mosquitto(lines, "mqtts")

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("t",), tls=tls, **FAST)
        await link.start()
        broker.kill()
        await until(link, LinkDown)
        certificates(tmp_path, client=True, ended=True)  # in place: the broker reads its own when it starts again
        link._context = tls.context()
        broker.start()
        async with asyncio.timeout(15):
            while "ended on" not in (told := (await until(link, LinkDown)).reason):
                pass
        assert str(tmp_path / "client.pem") in told
        assert "talaria edge join" in told
        await link.close()

    asyncio.run(story())


def test_what_the_broker_takes_at_most_is_known(make_mosquitto):
    broker = make_mosquitto("allow_anonymous true\nmax_packet_size 65536")

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("t",), **FAST)
        assert link.largest is None
        await link.start()
        assert link.largest == 65536
        await link.close()

    asyncio.run(story())


@pytest.mark.parametrize("threaded", [True, False])
def test_a_link_that_is_closed_leaves_no_open_file(mosquitto, threaded):
    """paho leaves two of them to the garbage collector, which may come late: a link that breaks again and again has
    opened more by then."""

    async def story() -> int:
        link = Mqtt(mosquitto.url, "dev", ("none",), threaded=threaded, **FAST)
        await link.start()
        await link.close()
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.disable()
    try:
        assert asyncio.run(story()) == asyncio.run(story())
    finally:
        gc.enable()


@pytest.mark.parametrize("threaded", [True, False])
def test_a_polite_close_sends_no_will(broker, threaded):
    async def story() -> None:
        watch = Mqtt(broker.url, "watch", ("t/#",), **FAST)
        await watch.start()
        link = Mqtt(broker.url, "dev", ("none",), will=lambda: Will("t/will", b"x"), threaded=threaded, **FAST)
        await link.start()
        await link.close()
        await watch.publish("t/end", b"")
        assert [a.topic for a in await arrivals(watch, 1)] == ["t/end"]
        await watch.close()

    asyncio.run(story())


def test_a_close_while_the_thread_of_the_link_ends_is_a_close(mosquitto, monkeypatch):
    looked, whole = threading.Event(), paho.Client.loop_forever

    def ends_when_looked_at(client: paho.Client, *args: object, **named: object) -> None:
        whole(client, *args, **named)
        looked.wait(10)

    async def story() -> None:
        link = Mqtt(mosquitto.url, "dev", ("none",), threaded=True, **FAST)
        await link.start()
        (thread,) = (t for t in threading.enumerate() if t.name == "paho-mqtt-client-dev")

        def look() -> threading.Thread:
            looked.set()
            thread.join(10)
            return threading.current_thread()

        within = SimpleNamespace(**{**vars(threading), "current_thread": look})
        monkeypatch.setattr("paho.mqtt.client.threading", within)
        await link.close()
        assert not thread.is_alive()

    monkeypatch.setattr(paho.Client, "loop_forever", ends_when_looked_at)
    asyncio.run(story())


def test_an_unreachable_broker_says_what_was_tried_and_how_to_start_one(unused_port):
    async def story() -> None:
        await Mqtt(f"mqtt://127.0.0.1:{unused_port}", "dev", ("t",), **FAST).start()

    with pytest.raises(TransportError) as caught:
        asyncio.run(story())
    for part in (f"127.0.0.1:{unused_port}", "MQTT 5", "3.1.1", "refused", f"mosquitto -p {unused_port}", "auto"):
        assert part in str(caught.value)


def test_a_host_of_which_one_address_is_silent_is_reached_by_another(mosquitto, monkeypatch):
    """As where IPv6 leads nowhere: the first address was given all the time that there was."""
    found = socket.getaddrinfo
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.create_server(("127.0.0.2", mosquitto.port), backlog=0))
        for _ in range(3):  # more than it keeps: who comes then is not answered
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(hole.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda _, *how, **more: [
            *found("127.0.0.2", *how, **more), *found("127.0.0.1", *how, **more)
        ])  # fmt: skip

        async def story() -> None:
            link = Mqtt(f"mqtt://broker.example:{mosquitto.port}", "dev", ("none",), timeout=3, **FAST)
            await link.start()
            await link.close()

        asyncio.run(story())


def test_a_connection_that_nobody_waits_for_any_more_does_not_put_out_the_next(mosquitto, monkeypatch):
    """A name server that answers late: the broker was asked for a session after another one had been made."""
    found, late = socket.getaddrinfo, threading.Event()

    async def story() -> None:
        lost = Mqtt(mosquitto.url, "dev", ("none",), timeout=0.3, **FAST)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *how, **more: late.wait(10) and found(*how, **more))
        with pytest.raises(TransportError, match="no answer within"):
            await lost.start()
        monkeypatch.setattr(socket, "getaddrinfo", found)
        link = Mqtt(mosquitto.url, "dev", ("none",), **FAST)
        await link.start()
        late.set()
        await asyncio.sleep(0.5)
        await link.close()
        heard = []
        with contextlib.suppress(TransportError):
            while True:
                heard.append(await link.receive())
        assert heard == [LinkUp()]

    asyncio.run(story())


def test_a_name_that_is_none_is_told_as_a_host_that_does_not_answer():
    with pytest.raises(TransportError, match=r"cannot use the MQTT broker at a\.\.b:1883"):
        asyncio.run(Mqtt("mqtt://a..b", "dev", ("none",)).start())


def test_a_wrong_password_is_named_and_not_shown(make_mosquitto, tmp_path):
    (tmp_path / "passwords").write_text("")
    broker = make_mosquitto(f"allow_anonymous false\npassword_file {tmp_path / 'passwords'}")

    async def story() -> None:
        await Mqtt(broker.url, "dev", ("t",), username="anna", password=lambda: "hunter2", **FAST).start()

    with pytest.raises(TransportError, match="check its user name and password") as caught:
        asyncio.run(story())
    assert "hunter2" not in str(caught.value)


def test_a_password_that_is_corrected_in_its_file_counts_at_the_next_attempt(make_mosquitto, tmp_path):
    known, own = tmp_path / "passwords", tmp_path / "own"
    subprocess.run(["mosquitto_passwd", "-c", "-b", known, "anna", "of today"], check=True, capture_output=True)
    known.chmod(0o644)
    broker = make_mosquitto(f"allow_anonymous false\npassword_file {known}")
    own.touch(mode=0o600)
    own.write_text("of yesterday")

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("t",), username="anna", password=password_in(own), **FAST)
        with pytest.raises(TransportError, match="check its user name and password"):
            await link.start()
        own.write_text("")  # as an editor leaves it for a moment
        with pytest.raises(TransportError, match="must hold one line, the password"):
            await link.start()
        own.write_text("of today")
        await link.start()
        await link.close()

    asyncio.run(story())


@pytest.mark.parametrize("threaded", [True, False])
def test_a_topic_that_the_broker_forbids_is_told_once_and_the_link_stays(make_mosquitto, tmp_path, threaded):
    (tmp_path / "acl").write_text("topic deny fl/1/t/d/a/up/#\ntopic readwrite #\n")
    (tmp_path / "acl").chmod(0o644)
    broker = make_mosquitto(f"allow_anonymous true\nacl_file {tmp_path / 'acl'}")

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("fl/1/t/d/a/#",), threaded=threaded, **FAST)
        await link.start()
        for _ in range(2):
            for transfer in ("0123456789abcdef", "fedcba9876543210"):
                await link.publish(f"fl/1/t/d/a/up/{transfer}", b"chunk")
            await link.publish("fl/1/t/d/a/evt", b"taken")
            assert await link.flush(10)
        heard = [await link.receive() for _ in range(4)]
        told = [item.reason for item in heard if isinstance(item, NotTaken)]
        assert len(told) == 1, heard
        assert told[0].startswith("the broker refuses what is published on fl/1/t/d/a/up/#: Not authorized; correct")
        assert [item.payload for item in heard if isinstance(item, Arrival)] == [b"taken"] * 2
        await link.close()

    asyncio.run(story())


@pytest.mark.parametrize("line", ["max_qos 0", "retain_available false"])
def test_a_broker_that_may_not_carry_what_is_needed_is_told_what_to_allow(make_mosquitto, line):
    """It was said to start a broker, or to correct the URL."""
    broker = make_mosquitto(f"allow_anonymous true\n{line}")
    link = Mqtt(broker.url, "dev", ("t",), will=lambda: Will("t", b"gone"), **FAST)
    with pytest.raises(TransportError, match=r"not supported\. Talaria needs both: .*max_qos, retain_available\)$"):
        asyncio.run(link.start())


@pytest.mark.parametrize("threaded", [True, False])
def test_a_broker_with_a_bound_that_it_does_not_tell_is_named_with_the_mend(make_mosquitto, threaded):
    """Mosquitto answers what is too large with what MQTT 5 does not know; the link was lost to a `Protocol error`."""
    broker = make_mosquitto("allow_anonymous true\nmessage_size_limit 20000")

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("t",), threaded=threaded, **FAST)
        await link.start()
        await until(link, LinkUp)
        await link.publish("t", bytes(30_000))
        assert "raise that (Mosquitto: message_size_limit)" in (await until(link, LinkDown)).reason
        await link.close()

    asyncio.run(story())


def certificates(folder, client: bool = False, ended: bool = False, holds=(-2, 1)) -> tuple[Tls, str]:
    """A CA, a server certificate for 127.0.0.1 that ``holds`` within these days, perhaps one of a client (that has
    ended), and Mosquitto's lines."""
    now = datetime.datetime.now(datetime.UTC)

    def make(name: str, issuer_key=None, issuer=None, since=-2, until=1):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(True, False, False, False, False, issuer is None, issuer is None, False, False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=since))
            .not_valid_after(now + datetime.timedelta(days=until))
            .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key((issuer_key or key).public_key()), critical=False
            )
        )
        if issuer is not None:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
        return key, builder.sign(issuer_key or key, hashes.SHA256()), subject

    def write(name: str, data: bytes):
        path = folder / name
        path.write_bytes(data)
        path.chmod(0o644)  # Mosquitto started as root reads them as its own user
        return path

    ca_key, ca, ca_name = make("test ca")
    key, cert, _ = make("127.0.0.1", ca_key, ca_name, *holds)
    pem, pkcs8, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ca_path = write("ca.pem", ca.public_bytes(pem))
    cert_path = write("cert.pem", cert.public_bytes(pem))
    key_path = write("key.pem", key.private_bytes(pem, pkcs8, plain))
    lines = f"allow_anonymous true\ncertfile {cert_path}\nkeyfile {key_path}"
    if not client:
        return Tls(ca=ca_path), lines
    own_key, own, _ = make("dev", ca_key, ca_name, until=-1 if ended else 1)
    own_path = write("client.pem", own.public_bytes(pem))
    own_key_path = write("client.key", own_key.private_bytes(pem, pkcs8, plain))
    return Tls(ca_path, own_path, own_key_path), f"{lines}\ncafile {ca_path}\nrequire_certificate true"


@pytest.mark.parametrize("threaded", [True, False])
def test_tls_carries_messages_and_refuses_a_broker_of_another_ca(make_mosquitto, tmp_path, monkeypatch, threaded):
    tls, lines = certificates(tmp_path)
    broker = make_mosquitto(lines, "mqtts")

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("t",), tls=tls, threaded=threaded, **FAST)
        await link.start()
        for i in range(20):  # several records of TLS in one read
            await link.publish("t", bytes([i]) * 40_000)
        assert [a.payload for a in await arrivals(link, 20)] == [bytes([i]) * 40_000 for i in range(20)]
        await link.close()
        stranger = Mqtt(broker.url, "dev", ("t",), **FAST)
        with pytest.raises(TransportError, match=r"another authority than this machine trusts, .* SSL_CERT_FILE"):
            await stranger.start()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pm"))
        stranger = Mqtt(broker.url, "dev", ("t",), **FAST)
        with pytest.raises(TransportError, match=r"correct SSL_CERT_FILE='.*ca.pm', which cannot be read"):
            await stranger.start()
        plain = Mqtt(broker.url.replace("mqtts", "mqtt"), "dev", ("t",), threaded=threaded, **FAST)
        with pytest.raises(TransportError, match="asks for TLS, write mqtts:// in place of mqtt://"):
            await plain.start()

    asyncio.run(story())
    with warnings.catch_warnings():  # paho leaves the socket of a failed handshake to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize("holds", [(-2, -1), (1, 2)])
def test_a_brokers_certificate_that_does_not_hold_today_is_told_with_the_clock(make_mosquitto, tmp_path, holds):
    """It was said to be of another authority or name, and to correct the URL."""
    tls, lines = certificates(tmp_path, holds=holds)
    broker = make_mosquitto(lines, "mqtts")
    link = Mqtt(broker.url, "dev", ("t",), tls=tls, **FAST)
    with pytest.raises(TransportError, match=r"^(?!.*another authority).*clock says \d{4}-.*`talaria fleet rotate`"):
        asyncio.run(link.start())
    with warnings.catch_warnings():  # as above
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_an_authority_that_is_replaced_in_its_file_counts_at_the_next_attempt(make_mosquitto, tmp_path):
    """As a new password does; each device had to be started again."""
    tls, lines = certificates(tmp_path)
    broker = make_mosquitto(lines, "mqtts")

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("t",), tls=tls, **FAST)
        await link.start()
        await until(link, LinkUp)
        broker.kill()
        (tmp_path / "ca.pem").write_text("half of it")
        await until(link, LinkDown)
        await until(link, LinkDown)  # it has tried meanwhile
        certificates(tmp_path)
        broker.start()
        await until(link, LinkUp)
        await link.close()

    asyncio.run(story())


def test_websockets_carry_messages(amqtt_websocket):
    async def story() -> None:
        link = Mqtt(amqtt_websocket.url, "dev", ("t",), **FAST)
        await link.start()
        await link.publish("t", b"x" * 100_000)
        assert (await arrivals(link, 1))[0].payload == b"x" * 100_000
        await link.close()

    asyncio.run(story())


def test_mosquitto_has_what_is_sent_to_it_over_websockets(make_mosquitto, unused_port):
    # It starts with no listener for WebSockets alone.
    broker = make_mosquitto(f"protocol websockets\nlistener {unused_port} 127.0.0.1\nallow_anonymous true", "ws")
    payload = bytes(range(251)) * 300

    async def story() -> None:
        link = Mqtt(broker.url, "dev", ("t/digest",), **FAST)
        await link.start()
        await link.publish("t/large", payload, retain=True)
        assert await link.flush(20)
        assert await link.publish("t/digest", b"small")
        assert (await arrivals(link, 1))[0].payload == b"small"
        await link.close()
        late = Mqtt(broker.url, "late", ("t/large",), keepalive=60)
        await late.start()
        async with asyncio.timeout(60):  # Mosquitto 2.0.11 writes 4 kB each tenth of a second
            while not isinstance(item := await late.receive(), Arrival):
                pass
        assert item.payload == payload
        await late.close()

    asyncio.run(story())


@pytest.mark.parametrize("size", [0, 1, 3, 4, 125, 126, 65_535, 65_536, 100_001])
def test_a_websocket_masks_as_paho_does(size, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: b"\x01\x80\xff\x07"[:count])
    frame = paho._WebsocketWrapper._create_frame.__get__(object())
    data = random.Random(size).randbytes(size)
    for masks in (0, 1):
        assert _masked(frame, 2, bytearray(data), masks) == frame(2, bytearray(data), 1)  # nothing goes out unmasked


@pytest.mark.parametrize("threaded", [True, False])
def test_a_websocket_that_takes_a_packet_in_parts_has_all_of_it(threaded):
    """paho forgets a packet of which its WebSocket has sent a part, and counts the next one as sent with it."""
    payloads = [bytes([number]) * (MAX_FRAME - number) for number in range(6)]

    async def frame(reader):
        size = (await reader.readexactly(2))[1] & 127
        if size >= 126:
            size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
        key, data = await reader.readexactly(4), await reader.readexactly(size)
        return (np.frombuffer(data, np.uint8) ^ np.resize(np.frombuffer(key, np.uint8), size)).tobytes()

    async def serve(reader, writer):
        served.append(asyncio.current_task())
        asked = await reader.readuntil(b"\r\n\r\n")
        key = next(line[19:] for line in asked.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key: "))
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(b"HTTP/1.1 101 .\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n")
        for answer in (b"\x20\x03\x00\x00\x00", b"\x90\x04\x00\x01\x00\x01"):
            await frame(reader)
            writer.write(bytes((0x82, len(answer))) + answer)
        with contextlib.suppress(asyncio.IncompleteReadError):  # the first connection asks what MQTT is spoken here
            while True:
                await asyncio.sleep(0.1)  # so that the link fills what lies between
                packet = await frame(reader)
                if packet[0] == 0x32:
                    heard.append(packet[10:])
                    writer.write(b"\x82\x04\x40\x02" + packet[7:9])
        writer.close()

    async def story():
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        own.bind(("127.0.0.1", 0))
        async with await asyncio.start_server(serve, sock=own) as server, asyncio.timeout(30):
            link = Mqtt(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", "anna", ("a",), threaded=threaded)
            await link.start()
            link._session._client.socket()._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
            for payload in payloads:
                assert await link.publish("a", payload)
            flushed = await link.flush(10)
            await link.close()
            await asyncio.wait(served)
            assert flushed

    heard, served = [], []
    asyncio.run(story())
    assert heard == payloads


def test_a_link_whose_full_inbox_drops_acknowledges_meanwhile():
    """Else a broker hears nothing until all is dropped that was read ahead, and takes the link for dead."""
    taken, lost = MAX_FRAME // EACH, 20

    async def serve(reader, writer):
        for answer in (b"\x20\x03\x00\x00\x00", b"\x90\x04\x00\x01\x00\x01"):
            await reader.readexactly((await reader.readexactly(2))[1])
            writer.write(answer)
        writer.write(b"".join(b"\x32\x06\x00\x01a\x00" + bytes((number, 0)) for number in range(1, taken + lost + 1)))
        with contextlib.suppress(asyncio.IncompleteReadError):  # the first connection asks what MQTT is spoken here
            await reader.readexactly(4 * taken)
            dropped.append(link.dropped)
            link._budget._patience = 0
            heard.set()
        writer.close()

    async def story():
        nonlocal link
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(30):
            url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            link = Mqtt(url, "anna", ("a",), keepalive=3, inbox=MAX_FRAME)
            link._budget._patience = 0.3
            await link.start()
            await heard.wait()
            await link.close()

    link, dropped, heard = None, [], asyncio.Event()
    asyncio.run(story())
    assert dropped[0] < lost


def test_a_full_inbox_drops_instead_of_growing(mosquitto):
    async def story() -> None:
        hear = Mqtt(mosquitto.url, "hear", ("t",), keepalive=3, inbox=2 * MAX_FRAME, backoff=(0.05, 0.2))
        say = Mqtt(mosquitto.url, "say", ("none",), **FAST)
        await hear.start()
        await say.start()
        for _ in range(4):
            await say.publish("t", bytes(MAX_FRAME - 1000))
        assert await say.flush(10)
        async with asyncio.timeout(10):
            while hear.dropped < 2:
                await asyncio.sleep(0.05)
        assert len(await arrivals(hear, 2)) == 2
        await say.publish("t", b"more")
        assert (await arrivals(hear, 1))[0].payload == b"more"
        await say.close()
        await hear.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://host", "no MQTT URL"),
        ("mqtt://", "no MQTT URL"),
        ("mqtt://host:99999", "port"),
        ("host:1883", "no MQTT"),
    ],
)
def test_a_bad_url_is_refused(url, what):
    with pytest.raises(ConfigError, match=what):
        Address.parse(url)


def test_no_line_is_written_for_a_packet_and_an_error_is_heard(caplog):
    class Packet:
        def __str__(self) -> str:
            raise AssertionError("written out")

    async def story() -> None:
        client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        session = _Session(client, asyncio.Queue(), Budget(1, 1.0), 1, True, False)
        client._easy_log(paho.MQTT_LOG_DEBUG, "Received PUBLISH %s", Packet())
        client._easy_log(paho.MQTT_LOG_ERR, "failed to receive on socket: %s", "reset")
        client.on_disconnect(client, None, None, 7)
        assert await session.lost.wait_reason() == "link lost: failed to receive on socket: reset"

    asyncio.run(story())
    gc.collect()
    assert "never retrieved" not in caplog.text  # nobody waited for this link


def test_an_address_hides_its_password():
    address = Address.parse("mqtts://anna:s%40cret@host")
    assert (address.username, address.password, address.port, address.tls) == ("anna", "s@cret", 8883, True)
    assert "s@cret" not in repr(address)
    assert "s@cret" not in str(address)


def test_a_missing_ca_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no-such"):
        Mqtt("mqtts://host", "dev", ("t",), tls=Tls(ca=tmp_path / "no-such.pem"))
