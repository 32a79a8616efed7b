"""One enrolled device that means harm, on a real Mosquitto with TLS and rights: the others learn on, it is cut off, and
nothing that it left stays."""

import asyncio
import os
import re
from contextlib import suppress

import pytest
from keyed import FLEET, packet, pour

from talaria.errors import TransportError
from talaria.wire import messages as m
from talaria.wire.frames import Header, encode_frame
from talaria.wire.mqtt import Arrival, Mqtt
from talaria_coordinator.broker import mosquitto, open_broker
from talaria_coordinator.identity import membership
from talaria_coordinator.storage.store import Store

ROUNDS = 6


def resident(pid):
    """MiB of a process."""
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024


def of_device(fleet, name):
    store = Store(fleet.state / "coordinator.db")
    try:
        return next(d for d in store.devices.of(FLEET) if d.device == name)
    finally:
        store.close()


def left_behind(fleet):
    """Topics that a coordinator hears as retained, other than births, once the fleet is over."""

    async def hear():
        topics = [f"fl/1/{FLEET}/d/+/{kind}" for kind in ("evt", "up/+", "state")]
        link = Mqtt(running.url, "co", tuple(topics), tls=membership.tls(fleet.keys))
        await link.start()
        got = []
        try:
            async with asyncio.timeout(1.0):
                while True:
                    item = await link.receive()
                    if isinstance(item, Arrival):
                        got.append(item.topic)
        except TimeoutError:
            return got
        finally:
            await link.close()

    with open_broker("mosquitto", port=fleet.port, state=fleet.broker, security=fleet.keys / "broker") as running:
        return asyncio.run(hear())


def sent_off(fleet):
    """mallory's certificate is no longer let in."""
    link = Mqtt(fleet.url, "mallory", (), tls=fleet.own["mallory"].tls, timeout=5.0)
    with pytest.raises(TransportError):
        asyncio.run(link.start())


def test_retained_messages_of_one_device_are_cleared_and_it_is_cut_off(keyed):
    """It plants large messages on topics of its own as fast as it can; before, it never announced itself."""
    fleet = keyed(ROUNDS, others=("mallory",))
    junk = os.urandom(120_000)

    async def plant():
        await fleet.told_of("round-opened")
        link = fleet.raw("mallory")
        data = [packet(f"fl/1/{FLEET}/d/mallory/up/x{i}", junk, retain=True) for i in range(800)]
        link.settimeout(60)

        def work():
            try:
                for one in data:
                    link.sendall(one)
            except OSError:
                return

        await asyncio.to_thread(work)
        await fleet.told_of("quarantined", device="mallory")
        assert await asyncio.to_thread(pour, link, packet("x", b""))
        await asyncio.to_thread(sent_off, fleet)

    fleet.live(plant)
    assert len(fleet.of("round-closed")) == ROUNDS
    assert [x["device"] for x in fleet.of("quarantined")] == ["mallory"]
    assert len(fleet.of("refused", device="mallory")) < 10
    assert "retained" in of_device(fleet, "mallory").quarantine
    assert [topic for topic in left_behind(fleet) if "mallory" in topic] == []


@pytest.mark.timeout(900)
def test_a_flood_at_full_speed_is_cut_off_and_learning_goes_on(keyed):
    """Well-formed, rightly signed, and nothing new in it: one frame, sent again and again.

    What waited at the broker when it was cut off, a busy machine works off for minutes.
    """
    fleet = keyed(ROUNDS, others=("mallory",), deadline_s=0.0)
    word = m.Accept(attempt=1)
    frame = encode_frame(
        Header(word.TYPE, FLEET, "mallory", boot=1, seq=1), m.encode_message(word), fleet.own["mallory"].signer
    )
    data = packet(f"fl/1/{FLEET}/d/mallory/evt", frame) * 64

    async def flood():
        await fleet.told_of("round-opened")
        link = fleet.raw("mallory")
        link.settimeout(60)
        assert await asyncio.to_thread(pour, link, data)
        await fleet.told_of("quarantined", device="mallory")
        await asyncio.to_thread(sent_off, fleet)

    fleet.live(flood, seconds=800)
    assert len(fleet.of("round-closed")) == ROUNDS
    assert [x["device"] for x in fleet.of("quarantined")] == ["mallory"]
    assert "flooded the fleet" in of_device(fleet, "mallory").quarantine
    assert len(fleet.of("refused", device="mallory")) < 10


def subscriptions(size, count):
    """SUBSCRIBE packets of filters that nobody else has; the broker keeps them over a cut where the session lasts."""
    for _ in range(count):
        name = os.urandom(size // 2).hex().encode()
        body = b"\x00\x01" + len(name).to_bytes(2, "big") + name + b"\x00"
        length, head = len(body), bytearray([0x82])
        while True:
            length, digit = divmod(length, 128)
            head.append(digit | (128 if length else 0))
            if not length:
                break
        yield bytes(head) + body


def test_a_broker_that_was_filled_to_its_limit_begins_anew_and_learning_goes_on(keyed, monkeypatch):
    """Endless subscriptions are heard by nobody, and fill what the broker may use; it then throws out all others."""
    monkeypatch.setattr(mosquitto, "MEMORY", 6 * 2**20)
    monkeypatch.setattr(mosquitto, "IN_FLIGHT", 1)
    monkeypatch.setattr("talaria_coordinator.fleet.service.QUIET_S", 1.0)
    fleet = keyed(ROUNDS, others=("mallory",))
    fleet.train_after(monkeypatch, "broker")

    def fill():
        for size in (60_000, 6000, 600, 60, 6, 2):
            with suppress(OSError), fleet.raw("mallory", clean=False) as link:
                link.settimeout(5)
                for one in subscriptions(size, 400):
                    link.sendall(one)

    def full():  # Mosquitto may also crash there, and is started again; it is filled once more
        return [x["reason"] for x in fleet.of("broker") if "out of memory" in x["reason"]]

    async def besiege():
        await fleet.told_of("round-opened")
        while not full():
            await asyncio.to_thread(fill)
        await fleet.told_of("connected", count=2)

    fleet.live(besiege)
    assert len(fleet.of("round-closed")) == ROUNDS
    assert "'mallory'" in full()[0]
    assert fleet.of("quarantined") == []
