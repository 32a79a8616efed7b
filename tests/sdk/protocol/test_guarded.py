"""What a member does on its own topics is its own doing where the broker guards them: planted messages are cleared and
held against it, floods shut it out, and it is told why."""

import pytest

from talaria.errors import ConfigError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState, Rules
from talaria.protocol.device.machine import DeviceMachine, DeviceState
from talaria.wire import messages as m
from talaria.wire.frames import Header, encode_frame
from talaria.wire.signing import Signer

ROOT = "fl/1/watch/d"
RULES = Rules(retry=1.0, strikes=3, burst=100, pace=10.0)


class Coordinator:
    """A coordinator's half with its state and a clock."""

    def __init__(self, guarded=True):
        self.own, self.anna = Signer.generate(), Signer.generate()
        self.half = CoordinatorMachine(
            "watch", RULES, b"{}", self.own, {"anna": self.anna.public}, enrolled=True, apart=guarded
        )
        self.state, self.now = CoordinatorState(), 100.0
        self.step(e.Start(self.now, 1))

    def step(self, event):
        return self.half.step(self.state, event)[1]

    def hear(self, topic, payload, retained=False, device="anna"):
        return self.step(e.Received(self.now, f"{ROOT}/{device}/{topic}", payload, retained))

    def said_by_anna(self, message, boot=1, seq=1):
        return encode_frame(
            Header(message.TYPE, "watch", "anna", boot=boot, seq=seq), m.encode_message(message), self.anna
        )


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


@pytest.fixture
def coordinator():
    return Coordinator()


def test_retained_messages_are_cleared_and_held_against_a_member_that_never_announced_itself(coordinator):
    for i in range(RULES.strikes):
        actions = coordinator.hear(f"up/x{i}", b"junk", retained=True)
        cleared = of(a.Publish, actions)[0]
        assert (cleared.topic, cleared.payload, cleared.retain) == (f"{ROOT}/anna/up/x{i}", b"", True)
    assert [found.device for found in of(a.Quarantined, actions)] == ["anna"]
    # What still comes of it is cleared as well.
    assert of(a.Publish, coordinator.hear("evt", b"junk", retained=True))[0].payload == b""
    assert coordinator.hear("evt", b"", retained=True) == []


def test_garbage_counts_against_a_member_that_never_announced_itself(coordinator):
    found = [of(a.Quarantined, coordinator.hear("evt", b"junk")) for _ in range(RULES.strikes)]
    assert list(map(len, found)) == [0] * (RULES.strikes - 1) + [1]


def test_where_topics_are_open_to_all_nobody_answers_for_what_strangers_plant():
    coordinator = Coordinator(guarded=False)
    for _ in range(2 * RULES.strikes):
        actions = coordinator.hear("evt", b"junk", retained=True)
        assert of(a.Publish, actions)[0].payload == b""
        assert not of(a.Quarantined, actions)
    for _ in range(2 * RULES.burst):
        assert not of(a.Quarantined, coordinator.hear("evt", b"junk"))
    assert coordinator.state.peers == {}


def test_names_that_are_no_members_are_not_remembered(coordinator):
    for i in range(50):
        coordinator.hear("evt", b"junk", device=f"x{i}")
    assert coordinator.state.peers == {}


def test_a_flood_of_well_formed_messages_shuts_its_sender_out(coordinator):
    again = coordinator.said_by_anna(m.Goodbye(version=0))
    for _ in range(RULES.burst):
        assert not of(a.Quarantined, coordinator.hear("evt", again))
    (out,) = of(a.Quarantined, coordinator.hear("evt", again))
    assert "flooded" in out.reason


def test_what_comes_at_a_lively_pace_is_no_flood(coordinator):
    again = coordinator.said_by_anna(m.Goodbye(version=0))
    for _ in range(10 * RULES.burst):
        coordinator.now += 1 / RULES.pace
        assert not of(a.Quarantined, coordinator.hear("evt", again))


def test_who_is_shut_out_is_told_why_but_not_at_each_word(coordinator):
    actions = coordinator.step(e.Revoke(coordinator.now, "anna", "called off by the operator"))
    birth = coordinator.said_by_anna(m.DeviceBirth(online=True, key=coordinator.anna.public, profile=b"{}"))
    told = of(a.Publish, actions)
    for _ in range(100):
        coordinator.now += 1.0
        told += [x for x in of(a.Publish, coordinator.hear("state", birth, retained=True)) if x.payload]
    assert [x.topic for x in told] == [f"{ROOT}/anna/cmd"] * 2
    device, state = (
        DeviceMachine("watch", "anna", signer=coordinator.anna, coordinator_key=coordinator.own.public),
        DeviceState(),
    )
    heard = [device.step(state, e.Received(0.0, x.topic, x.payload))[1] for x in told]
    why = "shut out by the coordinator: called off by the operator"
    assert [of(a.Noticed, actions)[0].text for actions in heard] == [why] * 2


def test_who_is_released_is_asked_to_announce_itself(coordinator):
    coordinator.step(e.Revoke(coordinator.now, "anna", "why"))
    actions = coordinator.step(e.Release(coordinator.now, "anna"))
    assert [x.topic for x in of(a.Publish, actions)] == [f"{ROOT}/anna/cmd"]
    assert coordinator.state.quarantined() == {}


def test_a_pace_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="pace=0"):
        Rules(pace=0)
