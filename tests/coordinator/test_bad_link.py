"""The proxy of the chaos bench: it knows MQTT packets, and does to them what it is told and nothing else."""

import asyncio

import pytest

from talaria.errors import WireError
from talaria_bench.fleet.meters import slope
from talaria_bench.fleet.proxy import Proxy, Trouble, client_of, read_packet

V3 = b"\x10\x14\x00\x04MQTT\x04\x02\x00\x3c\x00\x08watch.d1"
V5 = b"\x10\x1a\x00\x04MQTT\x05\x02\x00\x3c\x05\x11\x00\x00\x00\x0a\x00\x08watch.d1"


def publish(number):
    return b"\x32\x06\x00\x01t" + number.to_bytes(2, "big") + bytes([number])


@pytest.mark.parametrize("connect", [V3, V5])
def test_it_knows_who_connects(connect):
    assert client_of(connect) == "d1"


@pytest.mark.parametrize("wrong", [b"", b"\x30\x00", V3[:9], b"\x10\xff\xff\xff\xff\x01"])
def test_what_is_no_connect_is_refused(wrong):
    with pytest.raises(WireError, match="CONNECT"):
        client_of(wrong)


async def packets(reader, count):
    return [await asyncio.wait_for(read_packet(reader), 60) for _ in range(count)]


def through(*troubles, count=40):
    """What a broker hears of ``count`` messages of one client, and the troubles afterwards."""
    heard = []

    async def broker(reader, writer):
        try:
            assert await read_packet(reader) == V3
            while True:
                heard.append(await read_packet(reader))
        except EOFError:
            pass
        finally:
            writer.close()

    async def story():
        server = await asyncio.start_server(broker, "127.0.0.1", 0)
        proxy = Proxy(server.sockets[0].getsockname()[1], seed=7)
        await proxy.open()
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(V3)
        await asyncio.sleep(0.05)
        for trouble in troubles:
            proxy.make(trouble)
        for number in range(count):
            if not writer.is_closing():
                writer.write(publish(number))
                await asyncio.sleep(0)
        await asyncio.sleep(0.6)
        writer.close()
        await proxy.close()
        server.close()

    asyncio.run(story())
    return heard


SENT = [publish(i) for i in range(40)]


def test_a_good_link_changes_nothing():
    assert through() == SENT


def test_doubled_packets_come_again_with_the_flag_of_mqtt():
    trouble = Trouble("duplicate", "d1", 60.0, 0.5)
    heard = through(trouble)
    copies = [p for p in heard if p[0] & 8]
    assert [p for p in heard if not p[0] & 8] == SENT
    assert len(copies) == trouble.touched > 5
    assert {bytes([p[0] & ~8]) + p[1:] for p in copies} <= set(SENT)


def test_turned_round_packets_all_come_in_another_order():
    trouble = Trouble("reorder", "all", 60.0, 0.5)
    heard = through(trouble)
    assert heard != SENT
    assert sorted(heard) == sorted(SENT)
    assert trouble.touched > 5


def test_a_delay_keeps_the_order():
    trouble = Trouble("delay", "d1", 60.0, 0.2)
    assert through(trouble) == SENT
    assert trouble.touched == 40


def test_a_cut_ends_the_link_and_another_clients_trouble_is_not_ours():
    ours, other = Trouble("cut", "d1", 60.0), Trouble("duplicate", "d2", 60.0, 1.0)
    assert through(other) == SENT
    assert len(through(ours)) < 40
    assert (ours.touched, other.touched) == (1, 0)


def test_a_slope_is_that_of_the_line():
    assert slope([5.0, 5.5, 6.0, 6.5]) == pytest.approx(0.5)
    assert slope([3.0]) == 0.0
