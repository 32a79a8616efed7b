"""A device without torch asks for its run's kit: pieces that are lost, late or wrong, crashes, and bounds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from memory_broker import Faults

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.kits import KitOffer
from talaria.protocol.device.machine import DeviceLimits
from talaria.protocol.transfer import transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import describe
from talaria.wire.frames import decode_frame
from talaria.wire.topics import Topic

KIT = bytes(range(251)) * 40


def offered(w, data=KIT, chunk=1000):
    cut = describe(data, chunk)
    w.disk.models[cut.sha256] = data
    w.half = replace(w.half, kit=KitOffer(cut))
    return cut


def commands(actions):
    """What the coordinator says to one device."""
    frames = (decode_frame(x.payload) for x in actions if isinstance(x, a.Publish) and "/cmd" in x.topic)
    return [m.decode_message(frame) for frame in frames]


@pytest.mark.parametrize("seed", range(6))
def test_it_comes_whole_over_a_bad_network_and_restarts_of_both_sides(world, seed):
    w = world(3, Faults(seed=seed, drop=0.15, duplicate=0.15, reorder=0.3), signed=seed % 2 == 1)
    chance = Random(seed)
    w.begin()
    w.open(1)
    for number in range(400):
        for name in w.names:
            if name in w.devices and not w.disks[name].kit and w.devices[name][1].kit is None:
                w.say(name, e.NeedKit(w.now))
        if number == 3:
            offered(w)  # it was made only now
        w.run(1)
        victim = chance.random()
        if number < 60 and victim < 0.1:
            w.crash_coordinator()
            offered(w, chunk=chance.choice([500, 1000]))  # its broker may take smaller packets by now
            w.start_coordinator()
        elif number < 60 and victim < 0.4:
            name = chance.choice(w.names)
            w.crash_device(name)
            w.start_device(name)
        if number >= 60 and w.closed and all(w.disks[name].kit for name in w.names):
            break
    assert {name: w.disks[name].kit == KIT for name in w.names} == dict.fromkeys(w.names, True)
    assert [c.device for c in w.closed[0].counted] == w.names
    assert not [x for x in w.events if isinstance(x, a.Quarantined | a.KitRefused)]


def test_what_lies_on_flash_is_not_sent_again(world):
    w = world(1, Faults())
    cut = offered(w)
    w.begin()
    w.say("dev-0", e.NeedKit(w.now))
    there = w.disks["dev-0"].files.setdefault(("dev-0", transfer_of(cut.sha256)), {})
    while len(there) < 3:
        assert w.hub.pump(1)
    w.crash_device("dev-0")
    there = dict(there)
    w.start_device("dev-0")
    w.events.clear()
    w.say("dev-0", e.NeedKit(w.now))
    w.run(20)
    sent = [x for x in w.events if isinstance(x, a.SendChunks) and x.cut == cut and x.kind == "dn"]
    assert w.disks["dev-0"].kit == KIT
    assert not {index for action in sent for index in action.indices} & set(there)


def test_the_program_is_asked_where_nobody_knows_and_the_device_told_where_there_is_none(world):
    w = world(1, Faults())
    w.begin()
    w.say("dev-0", e.NeedKit(w.now))
    w.run(4)
    assert next(x for x in w.events if isinstance(x, a.KitAsked)).device == "dev-0"
    w.half = replace(w.half, kit=KitOffer(without="its algorithm needs torch"))
    w.run(4)
    assert [x.reason for x in w.events if isinstance(x, a.KitRefused)] == ["its algorithm needs torch"]
    assert w.devices["dev-0"][1].kit is None


def test_one_that_is_too_large_is_not_fetched(world):
    w = world(1, Faults())
    offered(w)
    w.begin()
    half, state = w.devices["dev-0"]
    w.devices["dev-0"] = replace(half, limits=DeviceLimits(retry=1.0, max_model=len(KIT) - 1)), state
    w.say("dev-0", e.NeedKit(w.now))
    w.run(4)
    [why] = [x.reason for x in w.events if isinstance(x, a.KitRefused)]
    assert f"{len(KIT)} bytes" in why
    assert "max_model" in why


def test_a_wrong_piece_is_refused_and_the_right_one_asked_for_again(world):
    w = world(1, Faults())
    cut = offered(w)
    w.begin()
    right = w.disk.models[cut.sha256]
    w.disk.models[cut.sha256] = bytes(len(right))
    w._send = lambda action, data: [
        w.hub.publish(str(Topic("watch", "dn", "dev-0", action.xfer)), frame)
        for frame in wrong(action, data)
    ]  # fmt: skip
    w.say("dev-0", e.NeedKit(w.now))
    w.run(3)
    assert "does not match its sha256" in next(x.reason for x in w.events if isinstance(x, a.FrameRefused))
    assert not w.disks["dev-0"].kit
    del w._send
    w.disk.models[cut.sha256] = right
    w.run(20)
    assert w.disks["dev-0"].kit == right


def wrong(action, data):
    """Chunks in right frames, of other bytes than the manifest says."""
    from talaria.wire.frames import Header, encode_frame

    for index in action.indices:
        offset, length = action.cut.place(index)
        header = Header(
            m.CHUNK, "watch", "dev-0", boot=action.boot, attempt=0, xfer=action.xfer, idx=index, off=offset
        )  # fmt: skip
        yield encode_frame(header, data[offset : offset + length])


def test_no_device_pulls_it_without_end(world):
    w = world(1, Faults(), serve=2)
    cut = offered(w)
    w.begin()
    w.run(3)
    half, state = w.devices["dev-0"]
    w.events.clear()
    for _ in range(200):
        out = []
        half._say(state, m.WantKit(sha256=cut.sha256, bitmap=b"\xff\x07"), out)
        for action in out:
            w.hub.publish(action.topic, action.payload)
        w.hub.pump()
    sent = sum(x.cut.place(i)[1] for x in w.events if isinstance(x, a.SendChunks) for i in x.indices)
    assert sent <= 2 * (len(KIT) + 5500) + 2 * 4 * 1000
    assert "more than 2 times" in next(x.reason for x in w.events if isinstance(x, a.FrameRefused))
    assert w.state.quarantined() == {}
