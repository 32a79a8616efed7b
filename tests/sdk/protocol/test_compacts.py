"""A device downloads the part of the channels that it keeps, and of a model that it has an older one of, what changed:
over bad networks, restarts, and with bounds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from memory_broker import Faults

from talaria.errors import WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.compacts import MASKS
from talaria.protocol.device.download import ASKS
from talaria.wire import messages as m
from talaria.wire.frames import decode_frame

PART = 1200
WHOLE = 5500
FEW = len(b"changes") + 64
"""What stands in for changes here."""


def said(w, kind):
    """What devices said of this kind."""
    frames = (decode_frame(x.payload) for x in w.events if isinstance(x, a.Publish) and x.topic.endswith("/evt"))
    return [m.decode_message(frame) for frame in frames if frame.header.type == kind.TYPE]


def keep(w, *names, mask=str(PART).encode()):
    for name in names or w.names:
        w.say(name, e.Keeps(w.now, mask))


def begun(w, *narrow, none=False):
    w.start_coordinator()
    w.publish_body(0, multicast=False)
    for name in w.names:
        w.start_device(name)
    if not none:
        keep(w, *narrow)


def down(w):
    """Bytes of models that went to each device alone."""
    found = dict.fromkeys([*w.disks, ""], 0)
    for x in w.events:
        if isinstance(x, a.SendChunks) and x.kind in ("dn", "m"):
            found[x.device if x.kind == "dn" else ""] += sum(x.cut.place(i)[1] for i in x.indices)
    return found


def test_who_keeps_a_part_downloads_that_part_and_who_keeps_all_the_whole(world):
    w = world(3, Faults())
    begun(w, "dev-0", "dev-1")
    w.open(1)
    w.run(10)
    assert [c.device for c in w.closed[0].counted] == w.names
    assert down(w) == {"dev-0": PART, "dev-1": PART, "dev-2": WHOLE, "": 0}
    assert sum(isinstance(x, a.CompactAsked) for x in w.events) == 1, "one mask is made once"


@pytest.mark.parametrize("seed", range(6))
def test_it_comes_whole_over_a_bad_network_and_restarts_of_both_sides(world, seed):
    w = world(3, Faults(seed=seed, drop=0.15, duplicate=0.15, reorder=0.3), signed=seed % 2 == 1)
    chance = Random(seed)
    begun(w)
    for number in range(1, 4):
        w.open(number)
        for _ in range(200):
            keep(w)
            w.run(1)
            if len(w.closed) == number:
                break
            if number < 3 and chance.random() < 0.2:
                w.crash_coordinator()
                w.start_coordinator()
                w.publish_body(number - 1, multicast=False)
            elif number < 3 and chance.random() < 0.3:
                name = chance.choice(w.names)
                w.crash_device(name)
                w.start_device(name)
        w.publish_body(number, multicast=False)
    assert len(w.closed) == 3
    assert not [x for x in w.events if isinstance(x, a.Quarantined)]
    assert [sorted(c.device for c in closed.counted) for closed in w.closed] == [w.names] * 3


def test_what_is_sent_to_all_is_let_go_by(world):
    w = world(2, Faults())
    begun(w, "dev-0")
    w.publish_body(1)
    w.run(2)
    assert ("dev-0", "") not in {(device, "") for device, _ in w.disks["dev-0"].files}
    assert not w.disks["dev-0"].files
    assert len(next(iter(w.disks["dev-1"].models.values()))) == WHOLE
    w.open(1)
    w.run(10)
    assert len(next(iter(w.disks["dev-0"].models.values()))) == PART


def test_a_part_that_is_not_enough_is_replaced_by_the_whole_in_the_same_round(world):
    w = world(1, Faults())
    begun(w)
    learn = w.work

    def at_first(name, number, version):
        w.work = learn
        w.say(name, e.TooNarrow(w.now))

    w.work = at_first
    w.open(1)
    w.run(10)
    assert [c.device for c in w.closed[0].counted] == ["dev-0"]
    assert len(next(iter(w.disks["dev-0"].models.values()))) == WHOLE
    assert w.trained == [("dev-0", 1)] * 2


def test_who_gets_no_answer_takes_the_whole(world):
    w = world(1, Faults())
    w._narrow = lambda action: None
    begun(w)
    w.open(1)
    w.run(15)
    assert [c.device for c in w.closed[0].counted] == ["dev-0"]
    assert len(said(w, m.WantCompact)) == ASKS
    assert down(w)["dev-0"] == WHOLE


def test_bytes_that_are_no_mask_get_the_whole(world):
    w = world(1, Faults())
    w._narrow = lambda asked: w.tell(
        e.CompactMade(w.now, asked.want, None, (asked.device,))
    )  # fmt: skip
    begun(w)
    w.open(1)
    w.run(5)
    assert [c.device for c in w.closed[0].counted] == ["dev-0"]
    assert len(said(w, m.WantCompact)) == 1


def test_a_device_has_no_more_than_a_few_masks_made(world):
    w = world(2, Faults())
    begun(w, "dev-1")
    state = w.devices["dev-0"][1]
    digest = w.state.model.cut.sha256
    for number in range(MASKS + 3):
        out = []
        w.devices["dev-0"][0]._say(state, m.WantCompact(model_digest=digest, mask=str(100 + number).encode()), out)
        for action in out:
            w.hub.publish(action.topic, action.payload, action.retain)
        w.hub.pump()
    asked = [x for x in w.events if isinstance(x, a.CompactAsked)]
    assert len(asked) == MASKS
    assert "one" in next(x.reason for x in w.events if isinstance(x, a.FrameRefused))
    assert not [x for x in w.events if isinstance(x, a.Quarantined)]
    w.open(1)
    w.run(10)
    assert len(w.closed) == 1, "the others are served"


def test_a_part_that_is_too_large_is_refused(world):
    w = world(1, Faults())
    begun(w)
    half, state = w.devices["dev-0"]
    w.devices["dev-0"] = replace(half, limits=replace(half.limits, max_model=WHOLE)), state
    w.hub.pump()
    huge = m.CompactManifest(
        of=w.state.model.cut.sha256, size=WHOLE + 1, chunk=1000, sha256=bytes(32), hashes=bytes(32 * 6), nonce=bytes(16)
    )
    with pytest.raises(WireError, match="above this device's limit"):
        w.devices["dev-0"][0]._model.narrowed(replace(state, compact_asks=1), huge, w.now, [])


def test_who_asked_for_no_less_than_the_model_takes_no_less(world):
    """As where another program with its name asked: what changed of that one's model is of no use here."""
    w = world(1, Faults())
    begun(w, none=True)
    w.hub.pump()
    half, state = w.devices["dev-0"]
    cut, before, out = w.state.model.cut, state.fetch, []
    less = m.CompactManifest(of=cut.sha256, size=9, chunk=9, sha256=bytes(32), hashes=bytes(32), nonce=bytes(16))
    half._model.narrowed(state, less, w.now, out)
    assert (out, state.fetch, state.fetch_of) == ([], before, b"")
    w.open(1)
    w.run(10)
    assert [c.device for c in w.closed[0].counted] == ["dev-0"]
    assert down(w) == {"dev-0": WHOLE, "": 0}


def rounds(w, *numbers):
    """What goes down to each device in these rounds, each from a model of its own."""
    found = []
    for number in numbers:
        before = down(w)
        w.open(number)
        w.run(10)
        assert len(w.closed) == number
        found.append({name: count - before[name] for name, count in down(w).items() if name})
        w.publish_body(number, multicast=False)
    return found


def test_the_first_model_comes_whole_and_the_next_ones_as_what_changed(world):
    w = world(2, Faults())
    w.follows = True
    begun(w, "dev-0")
    first, second, third = rounds(w, 1, 2, 3)
    assert first == {"dev-0": PART, "dev-1": WHOLE}
    assert second == third == {"dev-0": FEW, "dev-1": FEW}
    newest = w.disk.models[w.devices["dev-0"][1].model_digest]
    for name, size in (("dev-0", PART), ("dev-1", WHOLE)):
        (kept,) = w.disks[name].models.values()
        assert kept == newest[:size]


def test_who_was_away_for_some_rounds_gets_what_changed_since(world):
    w = world(2, Faults())
    w.follows = True
    begun(w, none=True)
    rounds(w, 1)
    w.crash_device("dev-1")
    w.names = ["dev-0"]
    rounds(w, 2, 3)
    w.names = ["dev-0", "dev-1"]
    w.start_device("dev-1")
    assert rounds(w, 4) == [{"dev-0": FEW, "dev-1": FEW}]


def test_a_coordinator_that_lost_the_older_model_sends_what_it_has(world):
    w = world(2, Faults())
    w.follows = True
    begun(w, "dev-0")
    rounds(w, 1)
    w.disk.models = {w.state.model.cut.sha256: w.disk.models[w.state.model.cut.sha256]}
    assert rounds(w, 2) == [{"dev-0": PART, "dev-1": WHOLE}]


def test_another_mask_than_that_of_the_file_gets_its_part(world):
    w = world(1, Faults())
    w.follows = True
    begun(w, "dev-0")
    rounds(w, 1)
    keep(w, "dev-0", mask=str(PART - 100).encode())
    assert rounds(w, 2, 3) == [{"dev-0": PART - 100}, {"dev-0": FEW}]


def test_changes_that_do_not_fit_the_flash_are_let_go_and_the_model_is_asked_for_anew(world):
    w = world(2, Faults())
    w.follows = True
    begun(w, "dev-0")
    rounds(w, 1)
    for disk in w.disks.values():
        disk.models = {digest: data + b"spoiled" for digest, data in disk.models.items()}
    assert rounds(w, 2) == [{"dev-0": FEW + PART, "dev-1": FEW + WHOLE}]
    assert rounds(w, 3) == [{"dev-0": FEW, "dev-1": FEW}]


def test_changes_are_not_asked_for_while_another_model_is_put_in_force(world, monkeypatch):
    """As where an asynchronous fleet makes a version meanwhile: they fitted the flash no more when they came, which was
    told as an error, and the whole model was fetched after them."""
    w, late, unfit = world(1, Faults()), [], []
    w.follows, say = True, w.say
    begun(w, none=True)
    rounds(w, 1)
    kinds = {e.ModelStored: late, e.ChangesUnfit: unfit}
    monkeypatch.setattr(w, "say", lambda *x: kinds[type(x[1])].append(x) if type(x[1]) in kinds else say(*x))
    for version in (2, 3):
        w.publish_body(version, multicast=False)
        w.run(1)
        w.say("dev-0", e.FetchModel(w.now))
        w.run(3)
    assert not unfit
    assert [event.sha256 for _, event in late][-1:] == [w.state.model.cut.sha256]
    assert list(w.disks["dev-0"].models) == [w.state.model.cut.sha256]


def test_a_coordinator_of_before_there_were_any_is_asked_as_before(world, monkeypatch):
    w = world(2, Faults())
    w.follows = True
    begun(w, "dev-0")
    rounds(w, 1)
    monkeypatch.delitem(m.BY_TYPE, m.WantChanges.TYPE)
    assert rounds(w, 2) == [{"dev-0": PART, "dev-1": WHOLE}]
    assert not [x for x in w.events if isinstance(x, a.Quarantined)]
    monkeypatch.undo()
    asked = said(w, m.WantChanges)
    assert len(asked) == 2, "one question of each, and no more of that kind in this version"
    assert len(said(w, m.WantCompact)) < ASKS


def test_who_waits_for_what_changed_takes_it_from_all_if_it_comes_there(world):
    w = world(2, Faults())
    w.follows = True
    begun(w, none=True)
    rounds(w, 1)
    before = down(w)
    w.publish_body(7)
    w.open(2)
    w.run(10)
    assert len(w.closed) == 2
    after = down(w)
    assert (after[""], after["dev-0"], after["dev-1"]) == (before[""] + WHOLE, before["dev-0"], before["dev-1"])


@pytest.mark.parametrize("seed", range(8))
def test_all_is_learned_over_a_bad_network_and_restarts_of_both_sides(world, seed):
    w = world(3, Faults(seed=seed, drop=0.15, duplicate=0.15, reorder=0.3), signed=seed % 2 == 1)
    chance = Random(seed)
    w.follows = True
    begun(w, "dev-0")
    for number in range(1, 6):
        w.open(number)
        for _ in range(200):
            keep(w, "dev-0")
            w.run(1)
            if len(w.closed) == number:
                break
            if chance.random() < 0.1:
                w.crash_coordinator()
                w.start_coordinator()
                w.publish_body(number - 1, multicast=False)
            elif chance.random() < 0.2:
                name = chance.choice(w.names)
                w.crash_device(name)
                w.start_device(name)
        w.publish_body(number, multicast=False)
    assert len(w.closed) == 5
    assert not [x for x in w.events if isinstance(x, a.Quarantined)]
    assert said(w, m.WantChanges)
    assert w.made_of


def test_a_model_that_is_on_flash_already_ends_the_transfer_of_another(world):
    """As where others tried a run that is called off: the transfer was asked for for ever, and the run never over."""
    w = world(1, Faults())
    begun(w, none=True)
    first = w.state.model.cut
    rounds(w, 1)
    w.run(1)
    state = w.devices["dev-0"][1]
    assert state.fetched == w.state.model.cut.sha256
    assert state.model_digest == first.sha256
    w.tell(e.PublishModel(w.now, 2, first, False))
    w.run(1)
    assert (state.fetch, state.fetched) == (None, None)
    assert not w.disks["dev-0"].files
