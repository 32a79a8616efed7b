"""Hostile devices of a fleet with an ingest worker: what it hands on costs them the same as without."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from memory_broker import Loop
from siege import ROOT, Cost

from talaria.wire.chunks import describe
from talaria.wire.topics import upload_filter
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.ingest.pool import Colleague
from talaria_coordinator.fleet.ingest.words import packed, words
from talaria_coordinator.fleet.ingest.worker import Worker
from talaria_coordinator.fleet.uploads import Uploads


class Link(Loop):
    """That of a worker, which hears all devices from the beginning."""

    async def follow(self, *filters):
        pass


class Process:
    """A worker in this process, as its coordinator sees one."""

    pid = 0

    def __init__(self, task):
        self.task = task

    def kill(self):
        self.task.cancel()

    def wait(self):
        return 0


def with_a_worker(siege):
    """Give the siege's coordinator one, over the same hub."""

    async def recruit(number):
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)

        async def work():
            link = Link(siege.hub, f"worker-{number}", (upload_filter("watch", "+"),))
            await link.start()
            uploads = Uploads(siege.config.state / "uploads", siege.config.max_update)
            learning = Learning(siege.config.run, siege.blobs)
            worker = Worker("watch", number, uploads, learning, lambda word: writer.write(packed(word)), writer.drain)
            try:
                await worker.run(link, words(reader))
            finally:
                writer.close()

        return Colleague(Process(asyncio.ensure_future(work())), *await asyncio.open_connection(sock=ours))

    siege.use(recruit)


def test_wrong_chunks_without_end(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        data = s.mallory.good()
        cut = s.mallory.offer(data)
        with Cost(messages=50):
            for _ in range(50):
                s.mallory.chunk(cut, 0, b"x" * cut.chunk)
                await asyncio.sleep(0)
            await s.until("quarantined", device="mallory")
        await s.shut_out("wrong chunks")
        s.release("bela")
        await s.finishes("anna", "bela")
        assert list((s.config.state / "uploads").glob("mallory.*")) == []

    siege(story, with_a_worker)


def test_an_update_made_to_harm_is_refused_and_the_round_completes(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        data = s.mallory.good().replace(b'weight\\":8.0', b'weight\\":-1 ')
        assert data != s.mallory.good()
        while not s.of("quarantined", device="mallory"):  # before it is asked nobody hears its chunks
            s.mallory.upload(data)
            await asyncio.sleep(0.05)
        await s.shut_out("weight")
        s.release("bela")
        await s.finishes("anna", "bela")
        rejected = [u.device for u in s.store.updates.of("watch", 1) if u.status == "rejected"]
        assert rejected == ["mallory"]

    siege(story, with_a_worker)


def test_what_is_planted_on_its_topics_is_cleared_and_held_against_it(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        for number in range(3):
            s.mallory.publish(f"up/{number:016x}", b"planted", retain=True)
        assert any(topic.startswith(f"{ROOT}d/mallory/up/") for topic in s.hub.retained)
        s.hub.recall("worker-0")
        await s.shut_out("retained")
        while any(topic.startswith(f"{ROOT}d/mallory/up/") for topic in s.hub.retained):
            await asyncio.sleep(0.02)
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story, with_a_worker)


def test_a_flood_of_chunks_that_nobody_wants_shuts_it_out(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        cut = describe(b"nobody asked for it")
        while not s.of("quarantined", device="mallory"):
            for _ in range(200):
                s.mallory.chunk(cut, 0, b"nobody asked for it")
            await asyncio.sleep(0)
        await s.shut_out("flooded")
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story, with_a_worker)


def test_an_offer_whose_sha256_is_not_that_of_its_chunks_is_refused(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        data, lie = s.mallory.good(), bytes(range(32))
        cut = replace(describe(data), sha256=lie)
        while not s.of("quarantined", device="mallory"):  # before it is asked nobody hears its chunks
            s.mallory.offer(data, sha256=lie)
            for index in range(cut.count):
                s.mallory.chunk(cut, index, data[cut.chunk * index :][: cut.chunk])
            await asyncio.sleep(0.05)
        await s.shut_out("whole sha256")
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story, with_a_worker)
