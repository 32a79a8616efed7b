"""A chunk that is asked for again while it waits for its turn goes out once, from the coordinator and from a worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from talaria.protocol.actions import Publish, SendChunks
from talaria.protocol.driver import Driver
from talaria.protocol.transfer import transfer_of
from talaria.wire.chunks import describe
from talaria.wire.frames import decode_frame
from talaria_coordinator.fleet.ingest import words
from talaria_coordinator.fleet.ingest.worker import Worker
from talaria_coordinator.fleet.uploads import Uploads

DATA = bytes(range(250)) * 4
CUT = describe(DATA, 100)
CHUNKS = SendChunks("watch", "dev-1", transfer_of(CUT.sha256), 7, 0, CUT, (0, 1, 2), "dn")


class Link:
    """A link that sends one message each time it is let; of ``names`` of those that were sent, ``away`` are still on
    their way."""

    def __init__(self):
        self.sent, self.names, self.away, self.may = [], [], set(), asyncio.Semaphore(0)

    async def publish(self, topic, payload, *, retain=False, name=""):
        await self.may.acquire()
        self.sent.append((topic, payload))
        self.names.append(name)
        return True

    def flying(self, name):
        return name in self.away

    def let(self, messages=1000):
        for _ in range(messages):
            self.may.release()

    async def flush(self, timeout):
        return True

    async def receive(self):
        await asyncio.Event().wait()

    def places(self):
        return [decode_frame(payload).header.idx for topic, payload in self.sent if "/dn/" in topic]


def test_a_chunk_that_stands_in_line_is_not_put_there_again():
    async def story():
        link, driver = Link(), Driver(lambda cut: DATA, inbox=4)
        assert driver.say(CHUNKS) == CHUNKS
        sending = asyncio.ensure_future(driver._send(link))
        await asyncio.sleep(0)  # its turn has come, and the link is busy
        for _ in range(3):
            assert driver.say(CHUNKS) is None
        assert driver.say(replace(CHUNKS, indices=(1, 3))) == replace(CHUNKS, indices=(3,))
        driver.say(Publish("x", b""))
        link.let()
        await driver.said(link, 60.0)
        assert link.places() == [0, 1, 2, 3]
        assert driver.say(CHUNKS) == CHUNKS  # it was sent, and may be lost
        await driver.said(link, 60.0)
        assert link.places() == [0, 1, 2, 3, 0, 1, 2]
        sending.cancel()

    asyncio.run(story())


def test_a_chunk_that_is_on_its_way_is_not_sent_again():
    """As over a thin link, whose device asks again before the first has come."""

    async def story():
        link, driver = Link(), Driver(lambda cut: DATA, inbox=4)
        sending = asyncio.ensure_future(driver._send(link))
        link.let()
        driver.say(CHUNKS)
        await driver.said(link, 60.0)
        link.away = {link.names[1]}
        driver.say(CHUNKS)
        await driver.said(link, 60.0)
        assert link.places() == [0, 1, 2, 0, 2]
        sending.cancel()

    asyncio.run(story())


@pytest.mark.parametrize("other", [{"device": "dev-2"}, {"boot": 8}, {"attempt": 1}, {"xfer": "ab" * 8}])
def test_what_another_header_has_is_another_chunk(other):
    async def story():
        driver = Driver(lambda cut: DATA, inbox=4)
        driver.say(CHUNKS)
        assert driver.say(replace(CHUNKS, **other)) == replace(CHUNKS, **other)

    asyncio.run(story())


def test_a_chunk_that_cannot_be_read_is_asked_for_again():
    async def story():
        link, kept = Link(), [DATA[:150]]
        driver = Driver(lambda cut: kept[0], inbox=4)
        link.let()
        sending = asyncio.ensure_future(driver._send(link))
        driver.say(CHUNKS)
        await driver.said(link, 60.0)
        assert link.places() == [0]
        kept[0] = DATA
        assert driver.say(CHUNKS) == CHUNKS
        await driver.said(link, 60.0)
        assert link.places() == [0, 0, 1, 2]
        sending.cancel()

    asyncio.run(story())


def test_a_worker_sends_what_stands_in_line_once(tmp_path):
    class Blobs:
        def get(self, digest):
            return DATA

    class Knows:
        blobs = Blobs()

    async def story():
        link, said = Link(), asyncio.Queue()
        order = words.Send("dev-1", CHUNKS.xfer, 7, CUT.size, CUT.chunk, CUT.sha256, [0, 1, 2])

        async def orders():
            for _ in range(4):
                yield order
            link.let()
            while not isinstance(await said.get(), words.Sent):
                pass
            yield replace(order, indices=[3])
            while not isinstance(await said.get(), words.Sent):
                pass

        worker = Worker("watch", 0, Uploads(tmp_path, 1), Knows(), said.put_nowait, None)
        async with asyncio.timeout(60):
            await worker.run(link, orders())
        assert link.places() == [0, 1, 2, 3]

    asyncio.run(story())
