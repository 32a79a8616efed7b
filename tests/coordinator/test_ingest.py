"""The coordinator's side of its ingest workers: what is said to whom, when one is there, gone, and there again."""

import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace

import msgpack
import pytest

from talaria import plugins
from talaria.errors import StateError, TransportError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.wire.chunks import describe
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.config.store import StoreConfig
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.hands import Hands
from talaria_coordinator.fleet.ingest import words as w
from talaria_coordinator.fleet.ingest.pool import Colleague, Seat
from talaria_coordinator.fleet.ingest.worker import Worker as RealWorker
from talaria_coordinator.fleet.uploads import Uploads
from talaria_coordinator.server.ingest import PROGRAM, Post, _begun
from talaria_coordinator.storage.blobs import FolderBlobs

CUT = describe(bytes(300_000))
KEY = ("anna", "0123456789abcdef")


class Worker:
    """The other end of the socket."""

    pid = 7

    def __init__(self, reader, writer):
        self._said, self.writer, self.killed = w.words(reader), writer, asyncio.Event()

    def kill(self):
        self.killed.set()

    def wait(self):
        return -9

    async def hears(self):
        return await anext(self._said)

    def says(self, *words):
        self.writer.write(b"".join(map(w.packed, words)))


class Desk:
    """A seat, who sits there, and all that comes of it."""

    def __init__(self):
        self.told, self.all, self.gone = [], [], 0
        self.came, self.workers = asyncio.Queue(), asyncio.Queue()
        hands = Hands(None, lambda event, **facts: self.told.append((event, facts)), None, self.came.put)
        self.seat = Seat(0, self._recruit, hands, self._sent)

    def _sent(self, size):
        self.gone += size

    async def _recruit(self, number):
        ours, theirs = socket.socketpair()
        worker = Worker(*await asyncio.open_connection(sock=theirs))
        self.workers.put_nowait(worker)
        self.all.append(worker)
        return Colleague(worker, *await asyncio.open_connection(sock=ours))


def run(story):
    async def whole():
        desk = Desk()
        living = asyncio.ensure_future(desk.seat.live())
        async with asyncio.timeout(60):
            try:
                await story(desk, desk.seat)
            finally:
                living.cancel()
                await asyncio.gather(living, return_exceptions=True)
                for worker in desk.all:
                    worker.writer.close()
                    await asyncio.gather(worker.writer.wait_closed(), return_exceptions=True)

    asyncio.run(whole())


def test_a_worker_that_comes_anew_is_told_what_is_open_and_nothing_else():
    async def story(desk, seat):
        seat.follow("anna")
        seat.follow("bela")
        seat.take(KEY, CUT)
        seat.take(("bela", "b" * 16), CUT)
        seat.drop(("bela", "b" * 16))
        for _ in range(2):
            worker = await desk.workers.get()
            take = w.Take(*KEY, CUT.size, CUT.chunk, CUT.sha256, CUT.hashes)
            assert [await worker.hears() for _ in range(3)] == [w.Follow("anna"), w.Follow("bela"), take]
            worker.says(w.Has(*KEY, [1]), w.Came(*KEY, [0, 2], 99))
            first, second = await desk.came.get(), await desk.came.get()
            assert (first.device, first.xfer, first.chunks) == (*KEY, frozenset({1}))
            assert isinstance(second, e.ChunksCame)
            assert (second.chunks, second.size) == (frozenset({0, 2}), 99)
            check = asyncio.ensure_future(seat.checked(KEY, 1, "ab"))
            assert await worker.hears() == w.Check(*KEY, 1, "ab")
            worker.writer.close()
            assert await check is None
            await worker.killed.wait()
        worker = await desk.workers.get()
        for _ in range(3):
            await worker.hears()
        check = asyncio.ensure_future(seat.checked(KEY, 1, "ab"))
        await worker.hears()
        worker.says(w.Kept(*KEY, "{}"))
        assert await check == w.Kept(*KEY, "{}")
        worker.writer.close()
        worker = await desk.workers.get()
        assert [await worker.hears() for _ in range(2)] == [w.Follow("anna"), w.Follow("bela")]
        seat.follow("carl")
        assert await worker.hears() == w.Follow("carl"), "what is kept is nobody's business any more"
        lost = [facts for event, facts in desk.told if event == "ingest-lost"]
        assert [facts["reason"] for facts in lost] == ["ended with status -9"] * 3
        assert [facts["again_in_s"] for facts in lost] == [0.2, 0.4, 0.8]
        worker.writer.close()

    run(story)


def test_an_upload_that_is_dropped_is_waited_for_no_more():
    """A worker says nothing of what it has forgotten. Once it was offered anew, who waited for the first verdict did so
    for ever, and the coordinator did not end."""

    async def story(desk, seat):
        worker = await desk.workers.get()
        seat.follow("anna")
        await worker.hears()
        for asked in (False, True):
            seat.take(KEY, CUT)
            before = asyncio.ensure_future(seat.checked(KEY, 1, "ab"))
            if asked:
                await asyncio.sleep(0)
            seat.drop(KEY)
            async with asyncio.timeout(5):
                assert await before is None
            seat.take(KEY, CUT)
            after = asyncio.ensure_future(seat.checked(KEY, 1, "ab"))
            while not isinstance(await worker.hears(), w.Drop):
                pass
            worker.says(w.Kept(*KEY, "{}"))
            assert await after == w.Kept(*KEY, "{}")

    run(story)


def test_what_becomes_of_an_upload_that_was_dropped_says_nothing_of_the_same_that_is_offered_anew():
    """As for the next try at a round whose deadline came while a slow disk kept it. It was never checked, and its
    device waited for its receipt until that deadline too."""

    async def story(desk, seat):
        worker = await desk.workers.get()
        seat.take(KEY, CUT)
        before = asyncio.ensure_future(seat.checked(KEY, 1, "ab"))
        await asyncio.sleep(0)
        seat.drop(KEY)
        assert await before is None
        seat.take(KEY, CUT)
        worker.says(w.Kept(*KEY, "{}"), w.Has(*KEY, []))
        await desk.came.get()
        after = asyncio.ensure_future(seat.checked(KEY, 1, "ab"))
        await asyncio.sleep(0)
        worker.says(w.Kept(*KEY, "{}"))
        assert await after == w.Kept(*KEY, "{}")

    run(story)


def test_how_a_worker_is_can_be_asked_at_any_time():
    async def story(desk, seat):
        async def until(true):
            while not true(seat.worker):
                await asyncio.sleep(0.01)

        assert (seat.worker.pid, seat.worker.connected, seat.worker.word) == (None, False, "it is being started")
        worker = await desk.workers.get()
        await until(lambda now: now.pid == 7)
        began = seat.worker.since
        seat.follow("anna")
        seat.take(("bela", "b" * 16), CUT)
        worker.says(w.Linked(True), w.Kept(*KEY, "{}"), w.Unfit("bela", "b" * 16, "x" * 999))
        await until(lambda now: now.word.startswith("an update of bela does not fit: xxx"))
        now = seat.worker
        assert (now.connected, now.devices, now.updates, len(now.word), now.since) == (True, 2, 1, 200, began)
        assert now.heard >= began
        worker.writer.close()
        await until(lambda now: now.word == "ended with status -9")
        assert (seat.worker.pid, seat.worker.connected) == (None, False)
        again = await desk.workers.get()
        await until(lambda now: now.pid == 7)
        assert (seat.worker.devices, seat.worker.updates) == (2, 0)
        assert seat.worker.since > began
        again.writer.close()

    run(story)


def test_models_are_sent_by_a_worker_that_reaches_the_broker():
    async def story(desk, seat):
        asked = a.SendChunks("watch", "anna", "x", 3, 0, CUT, (0, 2), "dn")
        worker = await desk.workers.get()
        assert not seat.sends(asked)
        for up in (True, False):
            worker.says(w.Linked(up, "" if up else "the broker is gone"), w.Sent(5))
            while desk.gone < 5 * (2 - up):
                await asyncio.sleep(0.01)
            assert seat.sends(asked) is up
        assert await worker.hears() == w.Send("anna", "x", 3, CUT.size, CUT.chunk, CUT.sha256, [0, 2])
        worker.writer.close()

    run(story)


def test_a_fold_that_a_worker_does_not_finish_is_left_to_the_coordinator():
    async def story(desk, seat):
        counted = (a.Counted("anna", 4, 3, b"a" * 32), a.Counted("bela", 4, 3, b"b" * 32))
        assert await seat.folded("aa", "bb", 3, counted) is None, "nobody is there yet"
        worker = await desk.workers.get()
        seat.follow("anna")
        assert await worker.hears() == w.Follow("anna")
        for answer, expected in ((w.Sum("cc", "dd"), ("cc", "dd")), (w.Sum("", ""), None), (None, None)):
            fold = asyncio.ensure_future(seat.folded("aa", "bb", 3, counted))
            heard = await worker.hears()
            assert (heard.model, heard.server) == ("aa", "bb")
            assert tuple(a.Counted(*entry) for entry in heard.counted) == counted
            assert await seat.folded("aa", "bb", 3, counted) is None, "one at a time"
            if answer is None:
                worker.writer.close()
            else:
                worker.says(answer)
            assert await fold == expected

    run(story)


def test_blobs_that_a_worker_cannot_read_are_told_in_words_and_with_no_trace(tmp_path, caplog):
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg")
    said = []
    one = RealWorker("watch", 0, Uploads(tmp_path, 1), Learning(run, FolderBlobs(tmp_path / "none")), said.append, None)
    asyncio.run(one._fold(w.Fold("aa" * 32, "bb" * 32, 3, ())))
    assert said == [w.Sum("", "")]
    (told,) = caplog.records
    assert told.exc_info is None
    assert "cannot be read from" in told.getMessage()


@pytest.mark.parametrize("patience", ["BEGIN_S", "STILL_S"])
def test_a_worker_that_stands_still_is_replaced_and_holds_up_no_round(monkeypatch, patience):
    """Stopped, say, while it begins, or while the broker is away: its socket stays open."""
    monkeypatch.setattr(f"talaria_coordinator.fleet.ingest.pool.{patience}", 0.2)

    async def story(desk, seat):
        worker = await desk.workers.get()
        while seat.worker.pid is None:
            await asyncio.sleep(0)
        fold = asyncio.ensure_future(seat.folded("aa", "bb", 3, ()))
        await worker.hears()
        if patience == "STILL_S":
            worker.says(w.Linked(True), w.Linked(False, "the broker is gone"))
        assert await fold is None
        await worker.killed.wait()
        await desk.workers.get()
        reasons = [facts["reason"] for event, facts in desk.told if event == "ingest-lost"]
        assert reasons[0] == "it said nothing for 0.2 s"

    run(story)


def test_a_worker_that_waits_for_a_broker_says_that_it_goes_on(monkeypatch):
    monkeypatch.setattr("talaria_coordinator.server.ingest.AGAIN_S", 0.0)
    said = []

    class Link:
        async def start(self):
            if len(said) < 5:
                raise TransportError("nobody answers")

    assert asyncio.run(_begun(Link(), said.append, lambda: False))
    assert said == [w.Linked(False, "nobody answers"), *4 * [w.Alive()]]


def test_a_worker_with_nothing_to_do_says_that_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("talaria_coordinator.fleet.ingest.worker.BEAT_S", 0.0)
    said = asyncio.Queue()

    class Link:
        async def receive(self):
            await asyncio.Event().wait()

    async def orders():
        assert [await said.get() for _ in range(2)] == [w.Alive()] * 2
        for nothing in ():
            yield nothing

    async def story():
        async with asyncio.timeout(60):
            one = RealWorker("watch", 0, Uploads(tmp_path, 1), None, said.put_nowait, None)
            await one.run(Link(), orders())

    asyncio.run(story())


@pytest.mark.parametrize("data", [b"\xc1", msgpack.packb([99]), msgpack.packb([0, 1, 2, 3]), msgpack.packb(7)])
def test_a_worker_that_says_what_nobody_says_is_replaced(data):
    async def story(desk, seat):
        worker = await desk.workers.get()
        worker.writer.write(data)
        await desk.workers.get()
        assert "cannot be read" in next(facts["reason"] for event, facts in desk.told if event == "ingest-lost")

    run(story)


def test_a_worker_that_cannot_begin_says_why(tmp_path):
    """A real one: its run names an algorithm of a package that is not there."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=1)
    config = FleetConfig(name="watch", run=run, state=tmp_path, devices=2, workers=1)
    post = json.dumps(
        asdict(Post.of(config, "mqtt://127.0.0.1:1", 0)) | {"run": run.to_json().replace("fedavg", "no_such")}
    )

    async def story():
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM], stdin=theirs.fileno(), stderr=subprocess.DEVNULL
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(post.encode() + b"\n")
        said = [word async for word in w.words(reader)]
        writer.close()
        await writer.wait_closed()
        assert process.wait(60) != 0
        return said

    (why,) = asyncio.run(story())
    assert not why.up
    assert "no_such" in why.reason


def test_a_worker_that_waits_for_a_broker_ends_with_its_coordinator(tmp_path):
    """A real one. Killed together with its broker, a coordinator left it behind for as long as no broker came."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=1)
    config = FleetConfig(name="watch", run=run, state=tmp_path, devices=2, workers=1)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-m", PROGRAM], stdin=theirs.fileno())
    with ours:
        ours.sendall(json.dumps(asdict(Post.of(config, "mqtt://127.0.0.1:1", 0))).encode() + b"\n")
        assert ours.recv(1 << 16)  # that nobody answers
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_a_worker_knows_of_its_fleet_what_matters(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_beside", [str(tmp_path)])
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=1)
    config = FleetConfig(
        name="watch", run=run, state=tmp_path, devices=2, grows=True, aggregator="median", deadline_s=7.0,
        max_update=1 << 22, broker="mqtts://b.example", username="coordinator", password_file=tmp_path / "password",
        store=StoreConfig(blobs="s3://here/there"),
    )  # fmt: skip
    post = Post(**json.loads(json.dumps(asdict(Post.of(config, "mqtts://host:8883", 1)))))
    assert post.config() == replace(config, broker="mqtts://host:8883")
    assert list(post.beside) == [str(tmp_path)]


def test_words_are_for_one_side():
    with pytest.raises(StateError, match="Kept is not for this side"):
        w.require(w.Kept(*KEY, "{}"), w.Take)

    async def story(desk, seat):
        worker = await desk.workers.get()
        worker.says(w.Follow("anna"))
        await desk.workers.get()
        assert "not for a worker to say" in next(
            facts["reason"] for event, facts in desk.told if event == "ingest-lost"
        )

    run(story)
