"""A device whose coordinator lies: it says what is wrong, declines, and goes on with whoever speaks the truth."""

import asyncio
import json
import os
from dataclasses import replace

import pytest
from memory_broker import Loop

from talaria.bitmaps import indices_of
from talaria.federated import global_model, run_model
from talaria.model import zoo
from talaria.protocol.actions import SendChunks
from talaria.protocol.transfer import chunk_frames, transfer_of
from talaria.types import Recipe
from talaria.wire import changes
from talaria.wire import messages as m
from talaria.wire.chunks import CHUNK, describe
from talaria.wire.frames import Header, decode_frame, encode_frame
from talaria.wire.transport import Arrival

ROOT = "fl/1/watch/"


class Liar:
    """A coordinator of one device, ``anna``, that says what a test has it say."""

    def __init__(self, house):
        self.house, self.epoch, self.said = house, 1, 0
        self.link = Loop(house.hub, "liar", (f"{ROOT}d/#",), None)

    def _say(self, topic, message, device="", retain=False):
        self.said += 1
        header = Header(message.TYPE, "watch", device, boot=self.epoch, seq=self.said if device else 0)
        self._publish(ROOT + topic, encode_frame(header, m.encode_message(message)), retain)

    def _publish(self, *given):
        self.house.hub.publish(*given)
        self.house.hub.pump()

    def begin(self, run, model, version=0, **lies):
        """Be there with this run and this global model."""
        facts = {"online": True, "key": b"", "chunk": CHUNK, "credit": 8, "max_update": 1 << 30, "retry": 0.1}
        self._say("co/state", m.CoordinatorBirth(**{**facts, "spec": run.to_json().encode(), **lies}), retain=True)
        self.model, self.cut = model, describe(model)
        names = ("size", "chunk", "sha256", "hashes")
        self.parcel = {name: getattr(self.cut, name) for name in names} | {"nonce": os.urandom(16)}
        self._say("co/model", m.ModelManifest(**self.parcel, version=version), retain=True)

    def ask(self, attempt, version=0, **spec):
        facts = {"attempt": attempt, "version": version, "model_digest": self.cut.sha256, "seconds": 0.0}
        self._say("d/anna/cmd", m.Work(**facts, spec=json.dumps({"round": 1, **spec}).encode()), "anna")

    async def answer(self, attempt, kind=(m.Offer, m.Decline), seconds=30):
        """What the device says to that attempt; it gets the chunks that it asks for meanwhile."""
        async with asyncio.timeout(seconds):
            while True:
                said = await self.link.receive()
                if not isinstance(said, Arrival) or not said.topic.endswith("/evt"):
                    continue
                message = m.decode_message(decode_frame(said.payload))
                if isinstance(message, m.Want) and message.bitmap:
                    self._send(message.bitmap)
                if isinstance(message, m.WantCompact):  # there is nothing smaller
                    self._say("d/anna/cmd", m.CompactManifest(**self.parcel, of=self.cut.sha256), "anna")
                if isinstance(message, kind) and message.attempt == attempt:
                    return message

    def _send(self, bitmap):
        sha256, indices = self.cut.sha256, tuple(sorted(indices_of(bitmap, self.cut.count)))
        chunks = SendChunks("watch", "anna", transfer_of(sha256), self.epoch, 0, self.cut, indices, "dn")
        for topic, payload in chunk_frames(chunks, lambda offset, length: self.model[offset : offset + length]):
            self._publish(topic, payload)


@pytest.fixture
def lied_to(house, run_all):
    """``lied_to(run, story, **options)``: anna's agent beside a coordinator that does what ``story`` says; what anna
    told. The agent must live to the end of it."""

    def go(run, story, **options):
        one = house(run, names=("anna",))

        async def both():
            await (liar := Liar(one)).link.start()
            agent = asyncio.create_task(one.agent("anna", **options))
            while not one.of("connected"):
                await asyncio.sleep(0.01)
            telling = asyncio.create_task(story(liar))
            await asyncio.wait((agent, telling), return_when=asyncio.FIRST_COMPLETED)
            assert not agent.done(), agent.exception()
            agent.cancel()
            await asyncio.wait((agent,))
            await telling

        run_all(both(), seconds=60)
        return one.told

    return go


def errors_in(told):
    return [event["error"] for event in told if event["event"] == "error"]


def test_a_global_model_that_begins_as_changes_do_is_declined(lied_to, a_run):
    """The device asked for the model that they are changes of, which has no name, and ended; so did each next start."""
    run = a_run()

    async def story(liar):
        liar.begin(run, changes.MAGIC + bytes(3000))
        liar.ask(1)
        assert isinstance(await liar.answer(1), m.Decline)
        liar.begin(run, global_model.encode_model(run_model.first_shared(run)), version=1)
        liar.ask(2, version=1)
        assert isinstance(await liar.answer(2), m.Offer)

    lied_to(run, story)


def test_chunks_too_small_for_the_update_are_declined(lied_to, a_run):
    """The agent ended in that error, and with it all agents of its process."""
    run = a_run()

    async def story(liar):
        liar.begin(run, global_model.encode_model(run_model.first_shared(run)), chunk=1)
        liar.ask(1)
        assert "more than 3600 chunks of 1" in (await liar.answer(1)).reason

    assert any("3600 chunks" in error for error in errors_in(lied_to(run, story)))


@pytest.mark.parametrize(
    "cost", [{"epsilon": "inf", "delta": 1}, {"epsilon": -1, "delta": 0}, {"epsilon": 10**400, "delta": 0.1}, [1]]
)
def test_a_cost_of_privacy_that_is_none_is_declined(lied_to, a_run, cost):
    """The card of the personal model would carry it: with infinity in it no bundle could be written."""
    run = a_run()

    async def story(liar):
        liar.begin(run, global_model.encode_model(run_model.first_shared(run)))
        liar.ask(1, privacy=cost)
        assert "cannot be read" in (await liar.answer(1)).reason

    lied_to(run, story)


def test_a_training_that_takes_too_long_gives_way_to_another_run(lied_to, a_run):
    """The thread that learns was busy until the device was started again, though its operator had mended the run."""
    long, good = (a_run(recipe=Recipe(batch=8, epochs=epochs)) for epochs in (3000, 1))

    async def story(liar):
        liar.begin(long, global_model.encode_model(run_model.first_shared(long)))
        liar.ask(1)
        serving = asyncio.create_task(liar.answer(1))
        while not liar.house.of("training"):
            await asyncio.sleep(0.02)
        serving.cancel()
        liar.epoch = 2
        liar.begin(good, global_model.encode_model(run_model.first_shared(good)), version=1)
        liar.ask(2, version=1)
        assert isinstance(await liar.answer(2, seconds=8), m.Offer)

    assert any("called off" in error for error in errors_in(lied_to(long, story)))


def test_a_model_of_another_form_than_the_samples_is_not_built(lied_to, a_run, monkeypatch):
    """It was looked through in the loop that hears and speaks, for minutes where its inputs are large."""
    run, built = a_run(), []
    other = replace(run, spec=replace(run.spec, input_shape=(6, 40)))
    start = global_model.encode_model(run_model.first_shared(other))
    monkeypatch.setattr(zoo, "build", built.append)
    monkeypatch.setattr(zoo, "surveyed", built.append)
    run_model.template.cache_clear()

    async def story(liar):
        liar.begin(other, start)
        liar.ask(1)
        assert "the model takes (6, 40)" in (await liar.answer(1)).reason

    lied_to(run, story)
    assert not built
