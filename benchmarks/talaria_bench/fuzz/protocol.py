"""Fuzz targets of the protocol: whole messages into both halves, saved states, and what a run is."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable

from talaria.errors import ConfigError, StateError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState, Rules
from talaria.protocol.device.machine import DeviceMachine, DeviceState
from talaria.protocol.transfer import transfer_of
from talaria.wire import messages
from talaria.wire.frames import MAX_PAYLOAD, Header, encode_frame
from talaria_bench.fuzz.target import Defect, Target
from talaria_bench.fuzz.wire import CUT, MODEL, TYPES, every_message

RULES = Rules(chunk=300, retry=1.0, max_update=10_000, max_bytes=20_000)
XFER = transfer_of(CUT.sha256)
ROOT = "fl/1/watch/"
UP, DOWN = (f"d/anna/{kind}" for kind in (f"up/{XFER}", f"dn/{XFER}"))
TO_COORDINATOR = ("co/state", "d/anna/state", "d/anna/evt", UP, "d/eve/evt")
TO_DEVICE = ("co/state", "co/model", "d/anna/cmd", DOWN, f"m/{XFER[:8]}/0")


def targets() -> list[Target]:
    """All of them."""
    up = [_event(4, 2, m) for m in every_message() if m.TYPE in ("accept", "offer", "want", "decline")]
    chunks = [_chunk(3, i) for i in range(CUT.count)]
    down = [_event(4, 2, m) for m in every_message() if m.TYPE in ("work", "grant", "need", "receipt", "abort")]
    model = [_event(0, 0, m) for m in every_message() if m.TYPE == "co"]
    model += [_event(0, 1, m) for m in every_message() if m.TYPE == "model"]
    coordinator, device = CoordinatorState(), DeviceState()
    for item in (*up, *chunks):
        _coordinator(item, coordinator)
    down = [*chunks, *down]
    for item in (*model, *down):
        _device(item, device)
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="hermes").to_json().encode()
    own = (StateError,)
    return [
        Target("coordinator half", _coordinator, (), [b"".join(up), b"".join((up[1], *chunks)), *up]),
        Target("device half", _device, (), [b"".join(model + down), b"".join(model), *down]),
        Target("coordinator state", _again(CoordinatorState.load), own, [coordinator.dump()]),
        Target("device state", _again(DeviceState.load), own, [device.dump()]),
        Target("run", lambda data: Run.from_json(data.decode("utf-8", "replace")), (ConfigError,), [run]),
    ]


def _event(boot: int, topic: int, message: messages.Message) -> bytes:
    """One message as fuzzed bytes: topic, type, boot and sequence number, length, global model."""
    packed = messages.encode_message(message)
    return struct.pack("<BBBBH", topic, TYPES.index(message.TYPE), boot, 1, len(packed)) + packed


def _chunk(topic: int, index: int) -> bytes:
    piece = MODEL[300 * index : 300 * index + 300]
    return struct.pack("<BBBBH", topic, len(TYPES), 1, index, len(piece)) + piece


def _events(data: bytes, known: tuple[str, ...]) -> Iterable[e.Received]:
    """At most 16 messages, all in the frames of a well-behaved transport."""
    at, count = 0, 0
    while at + 6 <= len(data) and count < 16:
        place, kind, boot, seq, size = struct.unpack_from("<BBBBH", data, at)
        model, at, count = data[at + 6 : at + 6 + size][:MAX_PAYLOAD], at + 6 + size, count + 1
        topic = known[place % len(known)]
        device = topic.split("/")[1] if topic.startswith("d/") else ""
        if kind < len(TYPES):
            header = Header(TYPES[kind], "watch", device, boot=boot, seq=count * (seq % 4))
        else:
            header = Header(messages.CHUNK, "watch", device, boot=boot, xfer=XFER, idx=seq, off=300 * seq)
        yield e.Received(float(count), ROOT + topic, encode_frame(header, model), retained=place > 200)


def _coordinator(data: bytes, state: CoordinatorState | None = None) -> None:
    half, state = CoordinatorMachine("watch", RULES), state or CoordinatorState()
    if state.epoch == 0:
        for first in (e.Start(0.0, 3), e.PublishModel(0.0, 1, CUT), e.OpenRound(0.0, 1, {"anna": b""}, None, 1)):
            half.step(state, first)
    for event in _events(data, TO_COORDINATOR):
        for action in half.step(state, event)[1]:
            if isinstance(action, a.Complete):
                half.step(state, e.Stored(event.now, action.attempt, action.device, action.cut.sha256))
        half.step(state, e.Tick(event.now))
    counted = [entry[:2] for attempt in state.attempts.values() for entry in attempt.counted]
    if len(counted) != len(set(counted)):
        raise Defect(f"counted twice: {counted}")
    _survives(CoordinatorState.load, state)


def _device(data: bytes, state: DeviceState | None = None) -> None:
    half, state = DeviceMachine("watch", "anna"), state or DeviceState()
    if state.boot == 0:
        for first in (e.Boot(0.0), e.Connecting(0.0), e.Connected(0.0)):
            half.step(state, first)
    for event in _events(data, TO_DEVICE):
        for action in half.step(state, event)[1]:
            if isinstance(action, a.ModelComplete):
                half.step(state, e.ModelStored(event.now, action.cut.sha256))
            if isinstance(action, a.Train):
                half.step(state, e.UpdateReady(event.now, action.attempt, action.version, CUT))
        half.step(state, e.Tick(event.now))
    _survives(DeviceState.load, state)


def _survives(load: Callable[[bytes], CoordinatorState | DeviceState], state: CoordinatorState | DeviceState) -> None:
    if load(state.dump()).dump() != state.dump():
        raise Defect(f"a state that does not survive being saved: {json.dumps(repr(state))[:500]}")


def _again(load: Callable[[bytes], CoordinatorState | DeviceState]) -> Callable[[bytes], None]:
    return lambda data: _survives(load, load(data))
