"""The pieces of the machines: windows, the replay guard, saved states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_broker import Faults

from talaria.bitmaps import indices_of
from talaria.errors import ConfigError, StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import state_codec
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState, Rules
from talaria.protocol.device.machine import DeviceLimits, DeviceMachine, DeviceState
from talaria.protocol.transfer import Receiver, ReplayWindow
from talaria.wire.chunks import describe
from talaria.wire.frames import Frame, Header

DATA = bytes(range(200)) * 10
CUT = describe(DATA, 100)


def piece(index, data=None):
    return Frame(
        Header("chunk", "f", xfer="x", idx=index, off=100 * index), data or DATA[100 * index : 100 * index + 100]
    )


@given(st.integers(1, 16), st.randoms(), st.floats(0, 0.6))
def test_windows_never_exceed_the_credit_and_end_with_everything(credit, random, loss):
    receiver, flying, now, asked_in_all = Receiver(CUT), [], 0.0, 0
    bitmap = receiver.window(now, credit)
    while not receiver.whole:
        asked = indices_of(bitmap, CUT.count) if bitmap else set()
        asked_in_all += len(asked)
        flying += [i for i in asked if random.random() >= loss]
        assert len(receiver.asked) <= credit
        random.shuffle(flying)
        if flying:
            receiver.take(piece(flying.pop()), now)
            bitmap = receiver.window(now, credit)
        else:
            now += 1
            bitmap = receiver.window(now, credit, again=True)
            assert bitmap or receiver.whole
    assert receiver.have == set(range(20))
    if loss == 0:
        assert asked_in_all == 20


def test_a_wrong_chunk_is_counted_and_asked_for_again():
    receiver = Receiver(CUT)
    receiver.window(0.0, 4)
    with pytest.raises(WireError, match="sha256"):
        receiver.take(piece(0, b"x" * 100), 1.0)
    assert (receiver.bad, 0 in receiver.have, 0 in receiver.asked) == (1, False, False)
    assert receiver.take(piece(0), 1.0)
    assert not receiver.take(piece(0), 1.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), max_size=200))
def test_the_guard_lets_nothing_pass_twice_and_nothing_of_an_older_boot(heard):
    guard, passed = ReplayWindow(), []
    for boot, seq in heard:
        if guard.fresh(boot, seq):
            assert (boot, seq) not in passed
            assert all(boot >= b for b, _ in passed)
            assert seq >= 1
            passed.append((boot, seq))


def test_the_guard_refuses_what_is_older_than_the_numbers_it_remembers():
    guard = ReplayWindow()
    assert all(guard.fresh(1, seq) for seq in range(1, 101))
    assert not any(guard.fresh(1, seq) for seq in range(1, 101))
    assert guard.fresh(1, 1000)
    assert not guard.fresh(1, 936)
    assert guard.fresh(1, 937), "63 behind is still told apart"


def test_a_new_boot_counts_from_the_beginning():
    guard = ReplayWindow()
    assert guard.fresh(1, 500)
    assert all(guard.fresh(2, seq) for seq in range(1, 101))
    assert not guard.fresh(1, 501)


@given(st.permutations(range(1, 60)))
def test_the_guard_lets_everything_recent_pass_once_in_any_order(order):
    guard = ReplayWindow()
    assert all(guard.fresh(1, seq) for seq in order)
    assert not any(guard.fresh(1, seq) for seq in order)


@dataclass
class Inner:
    name: str
    at: tuple[int, str] = (0, "")


@dataclass
class Outer:
    many: dict[tuple[str, int], Inner] = field(default_factory=dict)
    some: set[int] = field(default_factory=set)
    maybe: float | None = None
    raw: bytes = b""
    yes: bool = False


STATES = st.builds(
    Outer,
    many=st.dictionaries(
        st.tuples(st.text(max_size=3), st.integers(0, 9)),
        st.builds(Inner, name=st.text(max_size=3), at=st.tuples(st.integers(0, 9), st.text(max_size=3))),
        max_size=3,
    ),
    some=st.sets(st.integers(0, 2**53)),
    maybe=st.none() | st.floats(allow_nan=False),
    raw=st.binary(),
    yes=st.booleans(),
)


@given(STATES)
def test_a_saved_state_comes_back(state):
    data = state_codec.dump(state)
    assert state_codec.load(Outer, data) == state
    assert state_codec.dump(state_codec.load(Outer, data)) == data
    with pytest.raises(StateError, match="not of format 3"):
        state_codec.load(Outer, b"\x92\x02" + data[2:])


@given(st.lists(STATES, min_size=1, max_size=4))
def test_what_is_saved_again_and_again_has_the_bytes_of_a_first_save(states):
    saver, kept = state_codec.Saver(), Outer()
    for state in states:  # one object that changes in place, as a machine's
        for key, inner in state.many.items():
            kept.many.setdefault(key, Inner("")).at = inner.at
            kept.many[key].name = inner.name
        kept.some ^= state.some
        kept.maybe, kept.raw, kept.yes = state.maybe, state.raw, state.yes
        assert saver.dump(kept) == state_codec.dump(kept)
        assert saver.dump(state) == state_codec.dump(state)
        assert saver.dump(kept) == state_codec.dump(kept)


@dataclass
class Whole:
    name: str
    deep: dict[int, Holding] = field(default_factory=dict)


@dataclass
class Noted:
    inner: Inner
    maybe: Inner | None = None
    some: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    notes: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Holding:
    inner: Inner
    some: list[int] = field(default_factory=list)
    below: dict[tuple[str, int], Noted] = field(default_factory=dict)


INNER = st.builds(Inner, name=st.sampled_from("ab"), at=st.tuples(st.integers(0, 3), st.text(max_size=2)))
WHERE = ("inner", "name", "at", "some", "below", "its name", "its maybe", "its some", "its seen", "its notes", "gone")
CHANGES = st.tuples(st.integers(0, 2), st.sampled_from(WHERE), INNER)


@given(st.lists(CHANGES, max_size=20))
def test_a_change_in_place_at_any_depth_is_saved(changes):
    saver, kept = state_codec.Saver(), Whole("round")
    for key, what, inner in changes:
        one = Noted(Inner(""), maybe=Inner(""), notes={"a": [], "b": []})
        holding = kept.deep.setdefault(key, Holding(Inner(""), below={("", key): one}))
        saver.dump(kept)
        for noted in [*holding.below.values()]:
            match what:
                case "its name":
                    noted.inner.name = inner.name
                case "its maybe":
                    (noted.maybe or Inner("")).at = inner.at
                case "its some":
                    noted.some.append(inner.at[0])
                case "its seen":
                    noted.seen ^= {inner.at[0]}
                case "its notes":
                    noted.notes[inner.name].append(inner.at[0])
        match what:
            case "inner":
                holding.inner = Inner(inner.name, inner.at)
            case "name":
                holding.inner.name = inner.name
            case "at":
                holding.inner.at = inner.at
            case "some":
                holding.some.append(inner.at[0])
            case "below":
                holding.below[inner.name, key] = Noted(Inner(inner.name), notes={"a": [], "b": []})
            case "gone":
                del kept.deep[key]
        assert saver.dump(kept) == state_codec.dump(kept)


@given(STATES, st.data())
def test_a_damaged_state_is_a_state_error_or_another_valid_state(state, data):
    raw = bytearray(state_codec.dump(state))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        found = state_codec.load(Outer, bytes(raw))
    except StateError:
        return
    assert isinstance(found, Outer)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", msgpack.packb([1, {}]), msgpack.packb([2, {"boot": 1}]), msgpack.packb([2, [1, 2]])]
)
@pytest.mark.parametrize("cls", [CoordinatorState, DeviceState])
def test_what_is_no_state_is_refused(cls, data):
    with pytest.raises(StateError, match="backup"):
        cls.load(data)


def started():
    half, state = CoordinatorMachine("watch"), CoordinatorState()
    half.step(state, e.Start(0.0, 1))
    return half, state


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([e.Start(0.0, 1)], "above the last one"),
        ([e.OpenRound(0.0, 1, {"a": b""})], "PublishModel"),
        ([e.PublishModel(0.0, 0, CUT), e.OpenRound(0.0, 1, {})], "do not fit"),
        ([e.PublishModel(0.0, 0, CUT), e.OpenRound(0.0, 1, {"a": b""}, quorum=2)], "do not fit"),
        ([e.PublishModel(0.0, 0, CUT), e.OpenRound(0.0, 1, {"a": b""}), e.OpenRound(0.0, 2, {"a": b""})], "still open"),
        ([e.PublishModel(0.0, 0, CUT), e.OpenRound(0.0, 1, {"a": b""}), e.OpenRound(0.0, 1, {"a": b""})], "not after"),
        ([e.Enlist(0.0, 3, {"a": b""})], "not open"),
        ([e.Committed(0.0, 3)], "not closed"),
        ([e.Boot(0.0)], "not an event"),
    ],
)
def test_a_program_that_asks_out_of_turn_is_told_so(events, what):
    half, state = started()
    for event in events[:-1]:
        half.step(state, event)
    with pytest.raises(StateError, match=what):
        half.step(state, events[-1])


def test_a_device_is_told_of_a_wrong_event_and_limits_are_checked():
    with pytest.raises(StateError, match="not an event"):
        DeviceMachine("watch", "a").step(DeviceState(), e.Start(0.0, 1))
    with pytest.raises(ConfigError, match="credit=0"):
        DeviceLimits(credit=0)
    with pytest.raises(ConfigError, match="profile"):
        DeviceMachine("watch", "a", profile=bytes(5000))
    with pytest.raises(WireError, match="'A'"):
        DeviceMachine("watch", "A")
    for wrong in ({"chunk": 0}, {"credit": 65}, {"retry": 0.0}, {"max_bytes": 10}, {"stall": 1.0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            Rules(**wrong)


def test_patience_is_that_of_a_thin_link_until_it_is_known_and_grows_while_nothing_comes():
    large = Receiver(describe(bytes(4 * 122_880), 122_880))
    large.window(0.0, 2)
    assert [large.patience(wait) for wait in (2.0, 9.0)] == [7.5, 9.0]
    large.window(7.5, 2, again=True)
    assert large.patience(2.0) == 15.0
    header = Header("chunk", "f", xfer="x", idx=0, off=0)
    large.take(Frame(header, bytes(122_880)), 12.0)  # asked for at 0, whichever of the two it is
    assert large.patience(2.0) == 24.0
    large.take(Frame(replace(header, idx=1, off=122_880), bytes(122_880)), 17.0)
    assert large.patience(2.0) == 24.0
    for tries in (9, 1100):  # of which the second is a day with nobody to answer
        for _ in range(tries):
            large.window(50.0, 2, again=True)
        assert large.patience(2.0) == 60.0
    small = Receiver(CUT)
    small.window(0.0, 4)
    assert small.patience(2.0) == 2.0
    small.take(piece(0), 0.1)
    assert small.patience(2.0) == 2.0


def test_an_abort_by_the_operator_fails_the_round():
    half, state = started()
    half.step(state, e.PublishModel(0.0, 0, CUT))
    half.step(state, e.OpenRound(0.0, 1, {"a": b""}))
    _, actions = half.step(state, e.AbortRound(1.0, 1, "stopped by the operator"))
    assert [x.reason for x in actions if isinstance(x, a.RoundFailed)] == ["stopped by the operator"]
    half.step(state, e.OpenRound(2.0, 2, {"a": b""}))


def test_a_revoked_device_is_out_at_once():
    half, state = started()
    half.step(state, e.PublishModel(0.0, 0, CUT))
    half.step(state, e.OpenRound(0.0, 1, {"a": b"", "b": b""}))
    half.step(state, e.Revoke(1.0, "a", "key was stolen"))
    assert state.attempts[1].cohort["a"].phase == "dropped"
    assert state.quarantined() == {"a": "key was stolen"}
    half.step(state, e.AbortRound(1.0, 1, "x"))
    half.step(state, e.OpenRound(2.0, 2, {"a": b"", "b": b""}))
    assert state.attempts[2].cohort["a"].phase == "dropped"


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("seed", range(1, 5))
def test_pieces_that_change_with_a_restart_lose_no_update(world, seed, relayed):
    """What is offered, waits or has come in part is cut anew, and nobody is shut out for it."""
    w = world(4, Faults(seed=seed, drop=0.4, reorder=0.3), signed=True, relayed=relayed, max_open=2)
    chance = Random(seed)
    w.begin()
    for number in (1, 2):
        w.publish_body(number)
        w.open(number)
        for _ in range(3):
            w.run(chance.uniform(0.0, 2.0))
            w.crash_coordinator()
            w.run(chance.choice([0.0, 2.0]))  # what is said meanwhile waits at the broker
            w.start_coordinator(chunk=chance.choice([300, 500, 1000]))
        for _ in range(200):
            if any(c.attempt == number for c in w.closed):
                break
            w.run(5)
        assert {counted.device for counted in w.closed[-1].counted} == set(w.names)
    assert {outcome for outcomes in w.receipts.values() for outcome in outcomes} == {"stored"}
    assert w.state.quarantined() == {}
