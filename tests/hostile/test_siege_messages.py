"""Attacks on the protocol itself, over the whole real path; ``test_siege_uploads.py`` has the table of all cases."""

from __future__ import annotations

import asyncio
import random
import struct
import zlib
from dataclasses import replace

import msgpack
import pytest
from siege import ROOT, Cost, Mallory

from talaria.protocol.coordinator.state import Rules
from talaria.protocol.transfer import transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import describe
from talaria.wire.frames import Header, encode_frame
from talaria.wire.signing import Signer
from talaria.wire.topics import device_filters

STRIKES = Rules().strikes


def signed(mallory: Mallory, kind: str, model: bytes) -> bytes:
    """Any bytes as a message of this type, well framed and signed."""
    mallory.seq += 1
    return encode_frame(Header(kind, "watch", mallory.name, boot=1, seq=mallory.seq), model, mallory.signer)


async def struck(s, *payloads: bytes) -> None:
    """Each of these, on the event topic, is refused; enough of them shut mallory out, and the round completes."""
    await s.opened("bela")
    await s.stored("anna")
    for i in range(STRIKES):
        with Cost():
            s.mallory.publish("evt", payloads[i % len(payloads)])
            await s.until("refused", i + 1, device="mallory")
    await s.shut_out(f"{STRIKES} offences")
    s.release("bela")
    await s.finishes("anna", "bela")


def test_12_deep_msgpack_nesting(siege):
    deep = (b"\x91" * 100_000 + b"\x90", b"\x81\xa1a" * 30_000 + b"\x90")
    siege(lambda s: struck(s, *(signed(s.mallory, "offer", model) for model in deep)))


def test_13_an_array_of_four_billion_entries(siege):
    declared = (b"\xdd", b"\xdf", b"\xdb", b"\xc6")
    siege(lambda s: struck(s, *(signed(s.mallory, "offer", kind + b"\xff" * 4 + bytes(100)) for kind in declared)))


def test_14_frames_cut_short_or_with_something_behind(siege):
    def frames(s):
        good = s.mallory.frame(m.Accept(attempt=1))
        return good[:-1], good[:20], good[:5], good + b"\0", b"\0"

    siege(lambda s: struck(s, *frames(s)))


def test_15_fuzzed_frames(siege):
    rng = random.Random(15)

    def fuzzed(good: bytes) -> bytes:
        data = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.5:  # with a right checksum, so that it is read further
            data[-4:] = struct.pack("<I", zlib.crc32(bytes(data[:-4])))
        return bytes(data)

    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        good = [s.mallory.frame(m.Accept(attempt=1)), s.mallory.frame(m.Want(model_digest=bytes(32), bitmap=b""))]
        with Cost(messages=600):
            for _ in range(600):
                s.mallory.publish(rng.choice(["evt", "state", "up/0123456789abcdef"]), fuzzed(rng.choice(good)))
                await asyncio.sleep(0)
            await s.until("quarantined", device="mallory")
        await s.shut_out("offences")
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story)


def test_23_a_replay_of_the_last_rounds_update(siege):
    async def story(s):
        await s.opened()
        s.mallory.upload(s.mallory.good())
        await s.finishes("anna", "bela", "mallory")
        await s.until("round-opened", attempt=2)
        anna = [(topic, payload) for topic, payload in s.lights["anna"].said if "/evt" in topic or "/up/" in topic]
        for topic, payload in anna:  # her very bytes, by whoever holds them: seen already, and nothing happens
            s.hub.publish(topic, payload)
        s.hub.pump()
        old = s.mallory.good(base_version=0)
        with Cost(messages=2 + describe(old).count):
            s.mallory.upload(old, number=2, base_version=1, nonce=b"as if it was new")
            await s.until("quarantined", device="mallory")
        await s.shut_out("it may be replayed")
        await s.finishes("anna", "bela", number=2)

    siege(story)


@pytest.mark.parametrize("base_version", [1, 7])
def test_23_an_update_that_says_it_was_made_from_a_later_body(siege, base_version):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        s.mallory.upload(s.mallory.good(base_version=base_version), base_version=0)
        await s.shut_out(f"made from global model {base_version}", "round 1 began from 0")
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story)


def test_24_the_same_nonce_twice(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        nonce = next(iter(s.service._state.nonces))
        for i in range(STRIKES):
            with Cost():
                s.mallory.offer(s.mallory.good(), nonce=nonce)
                await s.until("refused", i + 1, device="mallory")
        await s.shut_out("repeats the nonce")
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story)


def work_of(s, epoch: int) -> bytes:
    work = m.Work(attempt=9, version=0, model_digest=bytes(32), seconds=0.0, spec=b'{"round":9}')
    header = Header(work.TYPE, "watch", "anna", boot=epoch, seq=10**6)
    return encode_frame(header, m.encode_message(work), s.coordinator)


def test_25_an_older_coordinator(siege):
    async def story(s):
        await s.opened("anna")
        with Cost():
            s.publish("d/anna/cmd", work_of(s, epoch=0))  # signed, but from before this coordinator began
        assert "took over" in s.lights["anna"].refused[-1]
        assert s.lights["anna"].state.job.attempt == 1
        await s.until("progress", device="anna", phase="working")
        birth = m.CoordinatorBirth(online=False, key=b"", chunk=1, credit=1, max_update=1, retry=1.0, spec=b"")
        s.publish("co/state", encode_frame(Header("co", "watch"), m.encode_message(birth), s.coordinator), retain=True)
        s.release("anna")
        s.mallory.upload(s.mallory.good())
        await s.finishes("anna", "bela", "mallory")

    siege(story)


def test_26_a_forged_body(siege):
    async def story(s):
        await s.opened("anna", "bela")
        cut = describe(b"forged" * 100)
        facts = {"size": cut.size, "chunk": cut.chunk, "sha256": cut.sha256, "hashes": cut.hashes, "nonce": bytes(16)}
        model = m.encode_message(m.ModelManifest(version=9, **facts))
        for signer in (None, s.mallory.signer, Signer.generate()):
            with Cost():
                s.publish("co/model", encode_frame(Header("model", "watch", boot=1), model, signer), retain=True)
            for name in ("anna", "bela"):
                assert "not signed by the coordinator's key" in s.lights[name].refused[-1]
                assert s.lights[name].state.version == 0
        s.release("anna", "bela")
        s.mallory.upload(s.mallory.good())
        await s.finishes("anna", "bela", "mallory")

    siege(story)


def test_27_speaking_on_another_devices_topic(siege):
    async def story(s):
        await s.opened("anna")
        decline = m.Decline(attempt=1, reason="I am anna")
        attempts = (
            (s.mallory.frame(decline), "each device has its own"),
            (s.mallory.frame(decline, device="anna"), "not signed by its key"),
            (s.mallory.frame(decline, device="anna", signer=False), "not signed by its key"),
        )
        for i, (payload, reason) in enumerate(attempts, 1):
            with Cost():
                s.mallory.publish("evt", payload, device="anna")
                await s.until("refused", i, device="anna")
            assert reason in s.of("refused", device="anna")[-1]["reason"]
        s.mallory.publish("evt", s.mallory.frame(m.Accept(attempt=1), device="eve"), device="eve")
        assert "not enrolled" in (await s.until("refused", device="eve"))[0]["reason"]
        assert s.views.devices("watch", quarantined=True) == []  # anna did nothing
        s.release("anna")
        s.mallory.upload(s.mallory.good())
        await s.finishes("anna", "bela", "mallory")

    siege(story)


def test_28_retained_messages_planted(siege):
    """What a broker kept is neither a command nor the word of a device, signed though it may be."""
    evt = ROOT + "d/mallory/evt"

    def before(s):
        s.hub.retained[evt] = s.mallory.frame(m.Decline(attempt=1, reason="planted"))

    async def story(s):
        assert "retained" in (await s.until("refused", device="mallory"))[0]["reason"]
        await s.opened("anna")
        anna = s.lights["anna"]
        s.hub.cut("anna")
        s.publish("d/anna/cmd", work_of(s, epoch=1), retain=True)
        with Cost():
            anna.link()
            s.hub.pump()
        assert any("planted" in reason for reason in anna.refused)
        assert anna.state.job.attempt == 1
        s.release("anna")
        s.mallory.upload(s.mallory.good())
        await s.finishes("anna", "bela", "mallory")

    siege(story, before=before)


def test_29_a_client_id_taken_over(siege):
    """Where a broker keeps no names apart: she is put out, comes again, and nothing is lost."""

    async def story(s):
        await s.opened("anna", "bela")
        await s.until("progress", device="anna", phase="working")
        s.hub.join("anna", device_filters("watch", "anna"), lambda arrival: None, None)  # mallory, by her name
        await s.until("device-down", device="anna")
        s.lights["anna"].link()
        s.hub.pump()
        await s.until("device-up", 2, device="anna")
        s.release("anna", "bela")
        s.mallory.upload(s.mallory.good())
        await s.finishes("anna", "bela", "mallory")
        assert s.views.devices("watch", quarantined=True) == []

    siege(story)


def test_30_chunks_beyond_the_manifest(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        data = s.mallory.good()
        cut = s.mallory.offer(data)
        places = [(cut.count, None), (2**31, 0), (0, 120 * 1024), (10**9, 2**50), (2**53, 2**53)]
        for i, (index, off) in enumerate(places):
            with Cost():
                s.mallory.chunk(cut, index, b"x" * 100, off=min(2**53, cut.chunk * index) if off is None else off)
                await s.until("refused", i + 1, device="mallory")
        await s.shut_out("chunk")
        assert list((s.config.state / "uploads").glob("mallory.*")) == []
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story)


def test_31_wrong_chunks_without_end(siege):
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
        assert list((s.config.state / "uploads").glob("mallory.*")) == []
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story)


def test_32_ten_thousand_transfers(siege):
    """Offers without end, of a member and of names that nobody knows: one is open at most, and memory does not grow."""

    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        frames = [
            encode_frame(Header("offer", "watch", f"eve-{i}", boot=1, seq=1), b"\x80") for i in range(5000)
        ]  # fmt: skip
        with Cost(messages=10_000):
            for i in range(5000):
                s.mallory.offer(i.to_bytes(4, "big"))
                s.publish(f"d/eve-{i}/evt", frames[i])
                if i % 200 == 0:
                    await asyncio.sleep(0)
            await s.until("refused", device="eve-4999")
        await s.shut_out("two different updates")
        state = s.service._state
        assert len(state.peers) == 3
        assert len(state.uploads) <= 1
        assert len(state.nonces) <= 3
        s.release("bela")
        await s.finishes("anna", "bela")

    siege(story)


def test_33_a_slow_loris(siege):
    """It holds the only place for an upload; the place goes to one who waits, and it is not held against it."""

    def before(s):
        half = s.service._half
        s.service._half = replace(half, rules=replace(half.rules, max_open=1, stall=1.5, retry=0.5))

    async def story(s):
        await s.opened("anna", "bela")
        cut = s.mallory.offer(s.mallory.good(), chunk=1000)
        await s.until("progress", device="bela", phase="working")
        s.release("anna", "bela")
        data = s.mallory.good()
        for index in range(4):
            s.mallory.chunk(cut, index, data[1000 * index :][:1000])
            await asyncio.sleep(0.3)
        await s.stored("anna", "bela")  # one after the other, in the place that was mallory's
        assert s.of("progress", device="mallory", phase="working")
        s.mallory.say(m.Decline(attempt=1, reason="never mind"))
        await s.finishes("anna", "bela")
        assert s.views.devices("watch", quarantined=True) == []  # a bad link looks like this

    siege(story, before=before)


def test_34_flapping_and_a_stale_last_will(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        s.mallory.birth(boot=7)
        await s.until("device-up", 2, device="mallory")
        s.mallory.birth(boot=6, online=False)  # the last will of a connection before this one
        assert s.of("device-down", device="mallory") == []
        with Cost(messages=140):
            for boot in range(8, 148):
                s.mallory.birth(boot=boot)
                await asyncio.sleep(0)
            told = await s.until("refused", device="mallory")
        assert "more than 30 births within a minute" in told[0]["reason"]
        assert len(s.of("device-up", device="mallory")) <= 31
        s.release("bela")
        s.mallory.say(m.Decline(attempt=1, reason="never mind"), boot=200, seq=1)
        await s.finishes("anna", "bela")
        assert s.views.devices("watch", quarantined=True) == []  # a link that somebody cuts looks like this

    siege(story)


def test_35_two_different_updates_of_one_round(siege):
    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        first = s.mallory.good()
        s.mallory.upload(first)
        while [u.status for u in s.store.updates.of("watch", 1) if u.device == "mallory"] != ["stored"]:
            await asyncio.sleep(0.1)
        second = s.update("mallory", s.blobs.get(s.store.fleets.get("watch").model_digest), 0, weight=9.0)
        with Cost():
            s.mallory.offer(second)
            await s.until("quarantined", device="mallory")
        await s.shut_out("two different updates")
        assert s.store.updates.equivocations("watch") == [(1, "mallory", describe(second).sha256.hex())]
        assert [e["kind"] for e in s.store.audit.events("watch") if e["kind"] == "equivocation"] == ["equivocation"]
        s.release("bela")
        await s.finishes("anna", "bela", "mallory")  # the first, which was receipted, stays
        row = next(u for u in s.store.updates.of("watch", 1) if u.device == "mallory")
        assert row.digest == describe(first).sha256.hex()

    siege(story)


def test_a_member_cannot_ask_for_a_large_manifest_without_end(siege):
    """A want of a hundred bytes is answered by a manifest, which for a large global model is large."""

    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        model = s.blobs.get(s.store.fleets.get("watch").model_digest)
        allowed = Rules().serve * len(model) + Rules().credit * Rules().chunk
        s.service._state.peers["mallory"].served = allowed  # as after very many of them
        with Cost(messages=STRIKES + 1):
            for _ in range(STRIKES + 1):
                s.mallory.say(m.Want(model_digest=describe(model).sha256, bitmap=b""))
                await asyncio.sleep(0)
            told = await s.until("refused", STRIKES, device="mallory")
        assert "times the model" in told[-1]["reason"]
        assert s.views.devices("watch", quarantined=True) == []  # a broker that drops what is sent makes many ask so
        s.mallory.upload(s.mallory.good())
        s.release("bela")
        await s.finishes("anna", "bela", "mallory")

    siege(story)


def test_what_a_message_says_beyond_its_fields_is_refused(siege):
    siege(lambda s: struck(s, signed(s.mallory, "accept", msgpack.packb({"attempt": 1, "more": 2}))))


def test_a_transfer_of_another_device_cannot_be_filled(siege):
    async def story(s):
        await s.opened("anna", "bela")
        data = s.mallory.good()
        cut = describe(data)
        header = Header(m.CHUNK, "watch", "anna", xfer=transfer_of(cut.sha256), idx=0, off=0)
        s.mallory.publish(f"up/{transfer_of(cut.sha256)}", encode_frame(header, data[: cut.chunk]), device="anna")
        s.mallory.upload(data)
        s.release("anna", "bela")
        await s.finishes("anna", "bela", "mallory")

    siege(story)


def nested(value: bytes, name: str = "v") -> bytes:
    """A frame of fleet "watch", of nobody, whose header holds this msgpack value under ``name``."""
    fields = {b"v": b"\x01", b"l": b"\x00", b"t": b"\xa3dev", b"f": b"\xa5watch", b"d": b"\xa3eve"}
    fields |= {name.encode(): value}
    head = bytes([0x80 + len(fields)]) + b"".join(b"\xa1" + key + packed for key, packed in fields.items())
    whole = b"FLF1" + struct.pack("<H", len(head)) + head
    return whole + struct.pack("<I", zlib.crc32(whole))


def test_a_header_that_nests_as_deep_as_can_be_read_ends_nobody(siege):
    """msgpack reads lists up to a thousand deep; to print, compare or forget one takes more stack than a program that
    serves has left. Unsigned, by a stranger, and kept by the broker for the next start."""
    deep = [
        nested(b"\x91" * depth + b"\x90", name) for name in "vltfsx" for depth in (8, 400, 700, *range(900, 975, 5))
    ]

    def before(s):
        for i, payload in enumerate(deep):
            s.hub.retained[f"{ROOT}d/eve-{i}/state"] = payload
        s.hub.retained[ROOT + "co/state"] = nested(b"\x91" * 950 + b"\x90")

    async def story(s):
        await s.opened("anna", "bela")
        for i in range(len(deep)):
            assert s.of("refused", device=f"eve-{i}")
        for payload in deep:
            s.publish("co/state", payload)
            s.publish("d/anna/cmd", payload)
        await s.until("refused", len(deep), device="")
        assert len(s.lights["anna"].refused) >= 2 * len(deep)
        s.release("anna", "bela")
        s.mallory.upload(s.mallory.good())
        await s.finishes("anna", "bela", "mallory")

    siege(story, before=before)


def test_a_profile_that_nests_as_deep_as_can_be_read_is_none(siege):
    """What can just be read cannot be read again further down in the program: stored, it would end every start."""

    async def story(s):
        await s.opened("anna", "bela")
        for boot, depth in enumerate((9, 300, *range(800, 1000, 10)), 2):
            profile = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
            birth = m.DeviceBirth(online=True, key=b"", profile=profile)
            s.mallory.publish("state", s.mallory.frame(birth, boot=boot), retain=True)
            await s.until("device-up", boot, device="mallory")
        assert {d.device: d.profile for d in s.store.devices.of("watch")}["mallory"] == {}
        s.mallory.say(m.Decline(attempt=1, reason="that was all"), boot=boot)
        s.release("anna", "bela")
        await s.finishes("anna", "bela")

    siege(story)
