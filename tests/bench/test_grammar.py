"""The stranger of the bench says everything that a decoder can meet, and the same for the same seed."""

from talaria.errors import WireError
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState
from talaria.wire import messages as m
from talaria.wire.frames import MAX_FRAME, Header, decode_frame, encode_frame
from talaria.wire.messages import decode_message
from talaria.wire.topics import parse
from talaria_bench.fuzz.grammar import Stranger


def speech(seed, count=3000):
    stranger = Stranger(seed, "watch", ("anna",))
    accept = encode_frame(Header("accept", "watch", "anna", 1, 2), m.encode_message(m.Accept(attempt=1)))
    stranger.hears("fl/1/watch/d/anna/evt", accept)
    return [stranger.says() for _ in range(count)]


def test_it_says_all_kinds_of_things():
    said, refused = speech(1), set()
    kinds = {parse(topic).kind for topic, _, _ in said}
    assert kinds == {"co/state", "co/model", "m", "state", "evt", "cmd", "up", "dn"}
    assert {retain for *_, retain in said} == {True, False}
    assert max(len(payload) for _, payload, _ in said) > MAX_FRAME
    taken = 0
    for _, payload, _ in said:
        try:
            decode_message(decode_frame(payload))
            taken += 1
        except WireError as why:
            refused.add(str(why))
    assert taken > 200  # perfect but for the key
    for part in ("nest deeper", "checksum", "must be", "unknown", "are above", "is no Talaria frame"):
        assert any(part in why for why in refused), part
    assert speech(1, 99) == said[:99]
    assert speech(2, 99) != said[:99]


def test_whatever_it_says_shuts_nobody_out_and_ends_nothing():
    half = CoordinatorMachine("watch", keys={"anna": bytes(32)}, enrolled=True, apart=False)
    state = CoordinatorState()
    half.step(state, e.Start(0.0, 3))
    for i, (topic, payload, retain) in enumerate(speech(3)):
        half.step(state, e.Received(float(i), topic, payload, retain))
    assert state.quarantined() == {}
    assert state.peers == {}
