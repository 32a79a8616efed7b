"""Both halves together over a hub in memory, in virtual time."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_broker import Faults

from talaria.errors import StateError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState
from talaria.protocol.device.state import DeviceState
from talaria.wire import messages as m
from talaria.wire.frames import Header, decode_frame, encode_frame

QUIET = Faults()


def digests(w, number):
    return [(n, number, hashlib.sha256(w.disks[n].updates[number, n]).digest()) for n in w.names]


def counted(closed):
    return [(c.device, c.attempt, c.sha256) for c in closed.counted]


@pytest.mark.parametrize("signed", [False, True])
def test_a_round_counts_each_device_once(world, signed):
    w = world(3, QUIET, signed=signed)
    w.begin()
    w.open(1)
    w.run(10)
    assert counted(w.closed[0]) == digests(w, 1)
    assert w.closed[0].missing == ()
    assert w.receipts == {(n, 1): ["stored"] for n in w.names}
    assert not [x for x in w.events if isinstance(x, a.FrameRefused | a.Quarantined)]


def test_rounds_follow_one_another_with_new_bodies(world):
    w = world(2, QUIET)
    w.begin()
    for number in (1, 2, 3):
        w.publish_body(number)
        w.open(number)
        w.run(8)
    assert [c.attempt for c in w.closed] == [1, 2, 3]
    assert all(counted(c) == digests(w, c.attempt) for c in w.closed)
    assert all(entry.base_version == c.attempt for c in w.closed for entry in c.counted)


@pytest.mark.parametrize("seed", range(12))
def test_a_bad_network_and_restarts_of_both_sides_count_each_device_exactly_once(world, seed):
    faults = Faults(seed=seed, drop=0.15, duplicate=0.15, reorder=0.3)
    w = world(4, faults, signed=seed % 2 == 1)
    chance = Random(seed)
    w.begin()
    for number in (1, 2, 3):
        w.publish_body(number, multicast=seed % 3 != 0)
        w.open(number)
        for _ in range(6):
            w.run(chance.uniform(0.5, 3))
            victim = chance.choice(["co", "link", "device", "device"])
            name = chance.choice(w.names)
            if victim == "co":
                w.crash_coordinator()
                w.start_coordinator()
            elif victim == "device":
                w.crash_device(name)
                w.run(chance.uniform(0, 2))
                w.start_device(name)
            elif name in w.devices:
                w.hub.cut(name)
                w.link_device(name)
        for _ in range(200):
            if any(c.attempt == number for c in w.closed):
                break
            w.run(5)
        assert [c.attempt for c in w.closed] == list(range(1, number + 1))
        assert counted(w.closed[-1]) == digests(w, number)
    assert not [x for x in w.events if isinstance(x, a.Quarantined | a.Equivocation)]
    assert w.state.quarantined() == {}
    w.run(20)
    assert {outcome for outcomes in w.receipts.values() for outcome in outcomes} == {"stored"}


def test_a_closed_round_is_announced_again_until_it_is_committed(world):
    w = world(2, QUIET)
    w.auto_commit = False
    w.begin()
    w.open(1)
    w.run(10)
    first = w.closed[0]
    w.crash_coordinator()
    w.start_coordinator()
    assert w.closed == [first, first]
    w.tell(e.Committed(w.now, 1))
    w.crash_coordinator()
    w.start_coordinator()
    assert w.closed == [first, first]


def test_an_update_that_the_store_holds_is_not_asked_for_again(world):
    w = world(1, QUIET)
    w.begin()
    w.open(1, quorum=1)
    before = w.disk.state
    w.run(5)
    assert len(w.closed) == 1
    w.crash_coordinator()
    w.disk.state = before  # the machine's own state was lost, the store's row was not
    w.events.clear()
    w.closed.clear()
    w.start_coordinator()
    w.run(5)
    assert counted(w.closed[-1]) == digests(w, 1)
    assert not [x for x in w.events if isinstance(x, a.KeepChunk)]


def test_the_deadline_closes_with_quorum_and_the_late_one_gets_a_late_receipt(world):
    w = world(3, QUIET)
    w.begin()
    w.devices.pop("dev-2")  # it is there, and says nothing
    w.open(1, seconds=10, quorum=2)
    w.run(8)
    assert w.closed == []
    w.run(4)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]
    assert w.closed[0].missing == ("dev-2",)
    w.start_device("dev-2")
    w.say("dev-2", e.Received(w.now, *_work(w, "dev-2", 1)))
    w.run(6)
    assert w.receipts["dev-2", 1] == ["late"]
    assert len(w.closed) == 1


def test_a_round_does_not_wait_for_who_has_gone_once_there_is_a_quorum(world):
    w = world(4, QUIET)
    w.begin()
    w.run(2)
    w.crash_device("dev-3")  # before it is asked
    w.run(1)
    w.devices.pop("dev-2")  # it trains for long
    w.open(1, seconds=600, quorum=2)
    w.run(3)
    assert w.closed == []
    w.crash_device("dev-2")
    w.run(11)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]
    assert w.closed[0].missing == ("dev-2", "dev-3")


def test_a_broker_that_is_started_again_closes_no_round_before_its_devices_are_back(world):
    """It publishes the last will of everybody at once."""
    w = world(3, QUIET)
    w.begin()
    w.run(2)
    slow = w.devices.pop("dev-2")  # it trains for long
    w.open(1, seconds=600, quorum=1)
    w.run(3)
    w.devices["dev-2"] = slow
    w.crash_device("dev-2")
    w.run(2)
    w.start_device("dev-2")
    w.run(8)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1", "dev-2"]


def test_without_a_quorum_who_has_gone_is_waited_for_and_counts_when_it_comes_back(world):
    w = world(2, QUIET)
    w.begin()
    w.run(2)
    w.crash_device("dev-1")
    w.open(1, seconds=600, quorum=2)
    w.run(20)
    assert w.closed == w.failed == []
    w.start_device("dev-1")
    w.run(5)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]


def test_a_start_of_the_coordinator_takes_nobody_for_gone(world):
    w = world(2, QUIET)
    w.begin()
    w.run(2)
    w.devices.pop("dev-1")  # it trains for long
    w.open(1, seconds=600, quorum=1)
    w.run(5)
    w.crash_coordinator()
    w.start_coordinator()
    w.run(5)
    assert w.closed == w.failed == []


def test_a_round_does_not_wait_for_who_left_while_the_broker_lost_its_last_will(world):
    w = world(3, QUIET)
    w.begin()
    w.run(2)
    slow = w.devices.pop("dev-2")  # it trains for long
    w.open(1, seconds=6000, quorum=2)
    w.run(50)
    w.devices["dev-2"] = slow
    w.run(50)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1", "dev-2"], "who answers is waited for"
    del w.devices["dev-2"]
    w.hub.leave("dev-2")
    w.open(2, seconds=6000, quorum=2)
    w.run(25)
    assert len(w.closed) == 1
    w.run(20)
    assert w.closed[1].missing == ("dev-2",)
    assert [d.device for d in w.events if isinstance(d, a.DeviceDown)] == ["dev-2"]
    w.start_device("dev-2")
    w.open(3, seconds=6000, quorum=2)
    w.run(5)
    assert len(w.closed[2].counted) == 3


def test_who_trains_in_silence_is_asked_and_not_taken_for_gone(world):
    w = world(2, QUIET)
    w.begin()
    w.run(2)
    work, w.work = w.work, lambda *_, **__: None  # dev-1 trains for ten minutes
    w.open(1, seconds=6000, quorum=1)
    w.run(1)
    w.work = work
    w.work("dev-0", 1, 0)
    w.run(600)
    assert w.closed == w.failed == []
    w.work("dev-1", 1, 0)
    w.run(5)
    assert len(w.closed[0].counted) == 2


def test_who_is_not_heard_after_a_start_of_the_coordinator_is_asked_too(world):
    w = world(2, QUIET)
    w.begin()
    w.run(2)
    w.devices.pop("dev-1")
    w.open(1, seconds=6000, quorum=1)
    w.run(5)
    w.crash_coordinator()
    w.hub.leave("dev-1")
    w.hub.retained.clear()
    w.start_coordinator()
    w.run(50)
    assert w.closed == []
    w.run(30)
    assert w.closed[0].missing == ("dev-1",)


def test_a_device_that_forgot_its_update_in_the_middle_of_an_upload_is_asked_until_it_hears(world):
    """What is said to it as it comes back may be lost on the way."""
    w = world(2, QUIET)
    w.begin()
    w.update_of = lambda name, attempt: f"{name}/{attempt}/".encode() * 9000
    w.open(1, seconds=6000, quorum=1)
    while w.state.attempts[1].cohort["dev-1"].phase != "receiving":
        w.hub.pump(1)
    w.crash_device("dev-1")
    boot = DeviceState.load(w.disks["dev-1"].state).boot
    w.disks["dev-1"].state = replace(DeviceState(), boot=boot).dump()
    w.disks["dev-1"].updates.clear()
    say, w.say = w.say, lambda name, event: [] if _is_work(event) else say(name, event)
    w.start_device("dev-1")
    w.run(3)
    w.say = say
    w.run(20)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]


def test_a_device_that_forgot_its_update_and_declines_is_not_waited_for(world):
    w = world(1, QUIET)
    w.begin()
    w.update_of = lambda name, attempt: f"{name}/{attempt}/".encode() * 9000
    w.open(1, seconds=6000, quorum=1)
    while w.state.attempts[1].cohort["dev-0"].phase != "receiving":
        w.hub.pump(1)
    w.crash_device("dev-0")
    boot = DeviceState.load(w.disks["dev-0"].state).boot
    w.disks["dev-0"].state = replace(DeviceState(), boot=boot).dump()
    w.work = lambda name, number, version, again=False: w.say(name, e.DeclineRound(w.now, number, "no samples"))
    w.start_device("dev-0")
    w.run(5)
    assert [x.attempt for x in w.failed] == [1]
    assert w.state.uploads == {}


def test_a_round_that_fails_tells_its_operator_who_declined_and_no_other_device(world):
    w, sent = world(3, QUIET), []
    publish = w.hub.publish
    w.hub.publish = lambda *given, **how: (sent.append(given[:2]), publish(*given, **how))[1]

    def work(name, number, version):
        if name != "dev-2":  # which trains on
            w.say(name, e.DeclineRound(w.now, number, f"training of {name} diverged"))

    w.work = work
    w.begin()
    w.open(1, seconds=5, quorum=1)
    w.run(20)
    assert [x.reason for x in w.failed] == [
        "0 of at least 1 updates came; dev-0 declined (training of dev-0 diverged), and 1 more declined"
    ]
    told = [payload for topic, payload in sent if topic.endswith("dev-2/cmd")]
    assert any(b"0 of at least 1 updates came" in payload for payload in told)
    assert not any(b"diverged" in payload for payload in told)


def _is_work(event):
    return isinstance(event, e.Received) and bool(event.payload) and decode_frame(event.payload).header.type == "work"


def _work(w, device, number):
    """The work order of a round, as it would come late."""
    from talaria.wire import messages as m
    from talaria.wire.frames import Header, encode_frame

    attempt = w.state.attempts[number]
    work = m.Work(
        attempt=number,
        version=attempt.version,
        model_digest=attempt.model_digest,
        seconds=0.0,
        spec=f"plan of {device}".encode(),
    )
    peer = w.state.peers[device]
    peer.said += 1
    header = Header("work", "watch", device, boot=w.epoch, seq=peer.said)
    return f"fl/1/watch/d/{device}/cmd", encode_frame(header, m.encode_message(work), w.signer)


def test_the_deadline_without_quorum_fails_the_round(world):
    w = world(2, QUIET)
    w.begin()
    w.crash_device("dev-1")
    w.open(1, seconds=5, quorum=2)
    w.run(7)
    assert w.closed == []
    assert [(f.attempt, f.stored) for f in w.failed] == [(1, 1)]
    w.open(2, quorum=2)
    w.start_device("dev-1")
    w.run(8)
    assert counted(w.closed[0]) == digests(w, 2)


def test_over_provisioning_closes_at_the_target_and_calls_the_rest_off(world):
    w = world(3, QUIET)
    w.work = lambda name, number, version: None if name == "dev-2" else type(w).work(w, name, number, version)
    w.begin()
    w.open(1, quorum=2, target=2)
    w.run(6)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]
    assert any(isinstance(x, a.Cancel) and x.attempt == 1 for x in w.events)


def test_a_declining_device_does_not_hold_the_round(world):
    w = world(2, QUIET)

    def work(name, number, version):
        if name == "dev-0":
            w.say(name, e.DeclineRound(w.now, number, "battery below 20 %"))
        else:
            type(w).work(w, name, number, version)

    w.work = work
    w.begin()
    w.open(1, quorum=1)
    w.run(6)
    assert w.closed[0].missing == ("dev-0",)
    assert any(isinstance(x, a.Progressed) and x.reason == "battery below 20 %" for x in w.events)


@pytest.mark.parametrize("gone", [False, True])
def test_a_round_without_a_quorum_does_not_wait_for_who_has_gone_where_one_that_declined_may_help_to_it(world, gone):
    """It waited for its deadline, though one write had failed, and the next try would have had a quorum; where that one
    has gone, too, no try would."""
    w = world(3, QUIET)
    failing = ["dev-0"]

    def work(name, number, version):
        if name in failing:
            failing.clear()
            w.say(name, e.DeclineRound(w.now, number, "a write failed"))
        elif name != "dev-2":
            type(w).work(w, name, number, version)

    w.work = work
    w.begin()
    w.run(2)
    w.open(1, seconds=600, quorum=2)
    w.run(20)
    assert [member.phase for member in w.state.attempts[1].cohort.values()] == ["declined", "stored", "working"]
    if gone:
        w.crash_device("dev-0")
        w.run(5)
    w.crash_device("dev-2")
    w.run(20)
    assert [one.attempt for one in w.failed] == ([] if gone else [1])
    if gone:
        return
    w.open(2, seconds=600, quorum=2)
    w.run(20)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]


def test_a_rejected_update_counts_nowhere_and_shuts_its_device_out(world):
    w = world(2, QUIET)
    tell = type(w).tell

    def judge(event):
        if isinstance(event, e.Stored) and event.device == "dev-0":
            event = e.UpdateRejected(w.now, event.attempt, "dev-0", "holds NaN")
        return tell(w, event)

    w.tell = judge
    w.begin()
    w.open(1, quorum=1)
    w.run(8)
    assert [c.device for c in w.closed[0].counted] == ["dev-1"]
    assert w.state.quarantined() == {"dev-0": "holds NaN"}
    assert w.receipts["dev-0", 1] == ["rejected"]
    w.tell(e.Release(w.now, "dev-0"))
    assert w.state.quarantined() == {}


def test_a_damaged_file_is_fetched_again_where_it_is_damaged(world):
    w = world(1, QUIET)
    tell, hurt = type(w).tell, []

    def judge(event):
        if isinstance(event, e.Stored) and not hurt:
            hurt.append(event)
            return tell(w, e.Damaged(w.now, event.attempt, event.device, frozenset({0, 1, 2})))
        return tell(w, event)

    w.tell = judge
    w.begin()
    w.open(1)
    w.run(8)
    kept = [x.index for x in w.events if isinstance(x, a.KeepChunk) and x.cut.size == 4500]
    assert kept == [0, 1, 2, 3, 4, 3, 4]
    assert len(w.closed) == 1


def test_a_body_reaches_all_by_one_multicast_and_repairs_go_to_one(world):
    w = world(5, QUIET)
    w.start_coordinator()
    for name in w.names:
        w.start_device(name)
    w.run(1)
    w.publish_body(0, size=50_000)
    w.hub.pump(30)  # each of five devices has some
    w.hub.cut("dev-3")
    w.link_device("dev-3")
    for name in w.names:
        w.say(name, e.FetchModel(w.now))
    w.run(30)
    sends = [x for x in w.events if isinstance(x, a.SendChunks)]
    assert [len(x.indices) for x in sends if x.kind == "m"] == [50]
    assert {x.device for x in sends if x.kind == "dn"} == {"dev-3"}
    assert all(len(d.models) == 1 for d in w.disks.values())


def test_who_is_not_asked_downloads_nothing_until_its_program_wants_the_model(world):
    w = world(3, QUIET)
    w.start_coordinator()
    for name in w.names:
        w.start_device(name)
    for number in (1, 2):
        w.publish_body(number, multicast=False)
        cohort = {name: f"plan of {name}".encode() for name in w.names[:2]}
        w.tell(e.OpenRound(w.now, number, cohort, None, 2))
        w.run(8)
    sent = [x.device for x in w.events if isinstance(x, a.SendChunks) and x.kind in ("m", "dn")]
    assert set(sent) == set(w.names[:2])
    assert [c.attempt for c in w.closed] == [1, 2]
    assert not w.disks["dev-2"].models
    w.say("dev-2", e.FetchModel(w.now))
    w.run(5)
    assert w.disks["dev-2"].models == w.disks["dev-0"].models


def test_one_chunk_at_a_time_is_asked_for_as_soon_as_the_one_before_it_came(world):
    """A coordinator may tell so: the device waited as for one that is lost, after each chunk."""
    w = world(1, QUIET, credit=1)
    w.begin()
    w.open(1)
    w.run(4)
    assert counted(w.closed[0]) == digests(w, 1)


def test_a_body_that_was_cut_ten_times_resends_at_most_two_windows_each(world):
    w = world(1, QUIET)
    w.start_coordinator()
    w.publish_body(0, size=100_000, multicast=False)
    w.start_device("dev-0")
    w.open(1)
    for _ in range(10):
        w.hub.pump(40)
        w.crash_device("dev-0")
        w.start_device("dev-0")
    w.run(60)
    asked = sum(len(x.indices) for x in w.events if isinstance(x, a.SendChunks) and x.kind == "dn")
    assert len(w.closed) == 1
    assert asked <= 100 + 10 * 2 * w.rules.credit


def test_open_uploads_are_bounded_and_the_others_wait_their_turn(world):
    w = world(6, QUIET, max_open=2)
    w.begin()
    w.open(1)
    most = 0
    for _ in range(40):
        w.run(0.5)
        most = max(most, len(w.state.uploads))
    assert counted(w.closed[0]) == digests(w, 1)
    assert most <= 2


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize(("devices", "each"), [(2, 4), (5, 3), (30, 1)])
def test_no_more_is_asked_for_than_a_broker_keeps_for_one_that_listens(world, devices, each, relayed):
    w = world(devices, QUIET, max_asked=12_000, relayed=relayed)
    w.begin()
    w.open(1)
    most, together = dict.fromkeys(w.names, 0), 0
    for _ in range(4000):
        w.hub.pump(1)
        w.report()
        asked = {device: len(upload.receiver.asked) for (device, _), upload in w.state.uploads.items()}
        most |= {device: max(most[device], count) for device, count in asked.items()}
        together = max(together, sum(asked.values()))
        if w.closed:
            break
    assert sorted(counted(w.closed[0])) == sorted(digests(w, 1))
    assert together <= 12
    assert max(most.values()) == 4  # who comes first is alone
    assert min(most.values()) <= each


def test_updates_of_earlier_rounds_count_within_the_staleness_allowed(world):
    w = world(3, QUIET)
    slow: list[tuple[str, int, int]] = []

    def work(name, number, version):
        if name == "dev-2" and number == 1:
            slow.append((name, number, version))
        else:
            type(w).work(w, name, number, version)

    w.work = work
    w.begin()
    w.open(1, quorum=2, target=2, stale=2)
    w.run(5)
    assert [c.device for c in w.closed[0].counted] == ["dev-0", "dev-1"]
    w.publish_body(1)
    w.tell(e.OpenRound(w.now, 2, {n: f"plan of {n}".encode() for n in w.names[:2]}, None, 2, 2, 2))
    type(w).work(w, *slow[0])
    w.run(6)
    entries = {(c.device, c.attempt, c.base_version) for c in w.closed[1].counted}
    assert ("dev-2", 1, 0) in entries
    assert len(entries) == 2


def test_a_state_survives_being_saved_at_any_moment(world):
    w = world(2, Faults(seed=5, drop=0.1))
    w.begin()
    w.open(1, seconds=50)
    for _ in range(20):
        w.run(0.5)
        assert type(w.state).load(w.state.dump()).dump() == w.state.dump()
        for _, state in w.devices.values():
            assert type(state).load(state.dump()).dump() == state.dump()


def test_a_coordinator_stops_where_a_newer_one_is_seen(world):
    w = world(1, QUIET)
    w.begin()
    w.run(2)
    old = w.state
    half = w.half
    w.start_coordinator()  # a second one, of a newer epoch
    topic, payload = "fl/1/watch/co/state", w.hub.retained["fl/1/watch/co/state"]
    old, actions = half.step(old, e.Received(w.now, topic, payload, True))
    assert actions == [a.Fenced(2)]
    for event in (e.Tick(w.now), e.Tick(w.now + 1000), e.Connected(w.now + 1000)):
        assert half.step(old, event) == (old, []), "it says nothing more"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    drop=st.floats(0, 0.4),
    duplicate=st.floats(0, 0.4),
    reorder=st.floats(0, 0.6),
    blows=st.lists(st.tuples(st.sampled_from(["co", "link", "off"]), st.integers(0, 2), st.floats(0, 4)), max_size=12),
    places=st.sampled_from([1, 2, 64]),
)
def test_whatever_the_network_and_the_crashes_each_device_counts_once(
    world, seed, drop, duplicate, reorder, blows, places
):
    w = world(3, Faults(seed, drop, duplicate, reorder), max_open=places)
    w.begin()
    w.open(1)
    for what, who, pause in blows:
        w.run(pause)
        name = w.names[who]
        if what == "co":
            w.crash_coordinator()
            w.start_coordinator()
        elif what == "off":
            w.crash_device(name)
            w.start_device(name)
        else:
            w.hub.cut(name)
            w.link_device(name)
    for _ in range(300):
        if w.closed:
            break
        w.run(5)
    assert counted(w.closed[0]) == digests(w, 1)
    assert set(map(repr, w.closed)) == {repr(w.closed[0])}
    assert w.state.quarantined() == {}


def test_a_birth_that_the_broker_lost_is_said_again(world):
    w = world(1, QUIET)
    w.begin()
    w.hub.pump()
    w.state.peers.clear()  # as if it had never come
    w.run(70)
    assert w.state.peers["dev-0"].online
    w.open(1)
    w.run(5)
    assert len(w.closed) == 1


def test_the_coordinators_birth_is_repeated_for_those_who_missed_it(world):
    w = world(1, QUIET)
    w.begin()
    w.run(1)
    seen = [x for x in w.events if isinstance(x, a.CoordinatorSeen)]
    w.run(130)
    again = [x for x in w.events if isinstance(x, a.CoordinatorSeen)]
    assert len(seen) == 1
    assert len(again) == 3
    assert {(x.online, x.epoch, x.spec) for x in again} == {(True, 1, b"spec")}


def test_a_device_whose_body_was_replaced_before_it_had_it_declines(world):
    w = world(1, QUIET)
    w.begin()
    w.crash_device("dev-0")
    w.disks["dev-0"].models.clear()
    w.open(1)
    w.hub.pump()
    w.publish_body(1)  # in mid-round
    w.start_device("dev-0")
    w.run(20)
    assert any(isinstance(x, a.Progressed) and "was replaced" in x.reason for x in w.events)
    assert len(w.failed) == 1


def test_a_coordinator_that_lost_its_last_seconds_loses_no_stored_update(world):
    w = world(3, QUIET)
    w.begin()
    w.open(1)
    opened = w.disk.state
    for _ in range(40):
        w.hub.pump(5)
        w.crash_coordinator()
        w.disk.state = opened  # every save since the round opened was one that may be lost
        w.start_coordinator()
        if w.closed:
            break
        w.run(0.5)
    w.run(20)
    assert counted(w.closed[-1]) == digests(w, 1)
    assert {repr(c) for c in w.closed} == {repr(w.closed[0])}


def test_whenever_the_coordinator_last_saved_what_the_store_holds_counts_once_and_takes_no_place(world):
    """What waited at that save was received once more, and counted twice."""

    def three_of_four(saves):
        w = world(4, QUIET, max_open=1)
        slow, real = [], w.work
        w.work = lambda *job: real(*job) if job[0] != "dev-3" else slow.append(job)
        w.begin()
        w.open(1)
        while sum(m.phase == "stored" for m in w.state.attempts[1].cohort.values()) < 3:
            if not w.hub.pump(1):
                w.run(0.5)
            if w.disk.state not in saves:
                saves.append(w.disk.state)
        w.crash_coordinator()
        return w, real, slow

    saves = []
    three_of_four(saves)
    for save in saves[saves.index(next(s for s in saves if CoordinatorState.load(s).attempts)) :]:
        w, real, slow = three_of_four([])
        w.disk.state = save
        w.start_coordinator()
        assert (w.state.waiting, w.state.offers, w.state.uploads) == ([], {}, {})
        for job in slow:
            real(*job)
        w.run(20)
        assert counted(w.closed[0]) == digests(w, 1)


def test_an_update_that_came_in_the_place_of_another_leaves_that_ones_place_to_others(world):
    """Where the coordinator had saved the other one last, its place was taken for good, and the round did not end."""
    w = world(2, QUIET, max_open=1)
    w.begin()
    w.open(1)
    while not w.state.uploads:
        w.hub.pump(1) or w.run(0.5)
    ((first, _),) = w.state.uploads
    saved = w.state.dump()
    w.crash_coordinator()
    w.disk.updates[1, first] = b"another update of the same device, which it made after a reboot"
    w.disk.state = saved
    w.start_coordinator()
    assert not w.state.uploads
    w.run(20)
    assert {c.device for c in w.closed[0].counted} == set(w.names)


def test_a_device_that_reboots_in_training_is_told_to_train_again(world):
    w = world(1, QUIET)
    w.work = lambda *_: None
    w.begin()
    w.open(1)
    w.run(5)
    assert w.trained == [("dev-0", 1)]
    w.crash_device("dev-0")
    del w.work
    w.start_device("dev-0")
    w.run(8)
    assert w.trained == [("dev-0", 1)] * 2
    assert counted(w.closed[0]) == digests(w, 1)


def test_a_device_that_reboots_after_its_receipt_offers_nothing_new(world):
    w = world(2, QUIET)
    w.auto_commit = False
    w.begin()
    w.open(1)
    w.run(8)
    w.crash_device("dev-0")
    w.start_device("dev-0")
    w.run(8)
    assert w.trained.count(("dev-0", 1)) == 1
    assert w.receipts["dev-0", 1] == ["stored"]
    assert len(w.closed[0].counted) == 2


def test_an_epoch_comes_once(world):
    w = world(1, QUIET)
    w.begin()
    for epoch in (w.epoch, w.epoch - 1):
        with pytest.raises(StateError, match=f"epoch={epoch} must be above"):
            w.half.step(w.state, e.Start(w.now, epoch))


def test_a_receipt_is_given_as_soon_as_the_store_has_the_update(world):
    """Not only once the device offers again."""
    w = world(3, QUIET, retry=20.0)
    w.begin()
    w.open(1)
    w.run(10)
    assert w.receipts == {(n, 1): ["stored"] for n in w.names}


def test_a_receipt_that_was_lost_is_given_again(world):
    w = world(2, QUIET)
    w.begin()
    w.open(1)
    w.run(8)
    _, state = w.devices["dev-0"]
    state.job.phase = "offering"  # as if the receipt had never come
    w.run(5)
    assert w.receipts["dev-0", 1] == ["stored", "stored"]
    assert [len(c.counted) for c in w.closed] == [2]


def test_a_store_that_answers_twice_counts_once(world):
    w = world(2, QUIET)
    w.crash_device("dev-1")
    w.begin()
    w.crash_device("dev-1")
    w.open(1)
    w.run(8)
    sha = hashlib.sha256(w.disk.updates[1, "dev-0"]).digest()
    assert w.tell(e.Stored(w.now, 1, "dev-0", sha)) == []
    assert len(w.state.attempts[1].counted) == 1


def test_chunks_that_the_disk_lost_are_fetched_again(world):
    w = world(1, QUIET)
    w.begin()
    w.open(1)
    while not any(w.disk.files.values()):
        w.hub.pump(1)
    w.disk.state = w.state.dump()
    w.crash_coordinator()
    w.disk.files.clear()
    w.start_coordinator()
    w.run(10)
    assert counted(w.closed[0]) == digests(w, 1)


def test_a_command_that_comes_twice_is_obeyed_once(world):
    w = world(1, QUIET)
    w.begin()
    w.open(1)
    seen, say = [], w.say

    def twice(name, event):
        actions = say(name, event)
        if isinstance(event, e.Received) and event.topic.endswith("/cmd"):
            seen.append(say(name, event))
        return actions

    w.say = twice
    w.run(8)
    assert len(seen) >= 3
    assert all(actions == [] for actions in seen)
    assert len(w.closed) == 1


def test_a_device_that_leaves_for_good_is_waited_for_no_more_and_is_answered_once_that_is_durable(world):
    w = world(3, QUIET)
    w.begin()
    gone = w.names[1]
    w.crash_device(gone)
    w.open(1, quorum=2)
    w.run(4)
    assert not w.closed
    header = Header("leave", "watch", gone, boot=9, seq=1)
    event = e.Received(w.now, f"fl/1/watch/d/{gone}/evt", encode_frame(header, m.encode_message(m.Leave())))
    _, actions = w.half.step(w.state, event)
    heard = [action for action in actions if not isinstance(action, a.Save)]
    said = [decode_frame(x.payload).header.type if isinstance(x, a.Publish) else type(x) for x in heard]
    assert said[-3:] == [a.Departed, "farewell", a.RoundClosed]


def test_a_device_whose_birth_was_lost_is_told_to_be_there_by_the_first_that_it_says():
    half, state = CoordinatorMachine("watch"), CoordinatorState()
    half.step(state, e.Start(0.0, 1))

    def say(boot, message, kind="evt", seq=0):
        payload = encode_frame(Header(message.TYPE, "watch", "anna", boot=boot, seq=seq), m.encode_message(message))
        return half.step(state, e.Received(1.0, f"fl/1/watch/d/anna/{kind}", payload))[1]

    birth = m.DeviceBirth(online=True, key=b"", profile=b"{}")
    assert a.DeviceUp("anna", 1, b"{}") in say(1, birth, "state")
    assert a.DeviceDown("anna", 1) in say(1, m.DeviceBirth(online=False, key=b"", profile=b"{}"), "state")
    assert a.DeviceUp("anna", 2, b"{}") in say(2, m.Goodbye(version=0), seq=1)
    assert not any(isinstance(action, a.DeviceUp) for action in say(2, m.Goodbye(version=0), seq=2))
