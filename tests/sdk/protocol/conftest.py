"""One coordinator machine and many device machines over a hub in memory, in virtual time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import pytest
from memory_broker import Faults, Hub

from talaria.errors import WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState, Rules
from talaria.protocol.device.machine import DeviceLimits, DeviceMachine, DeviceState
from talaria.protocol.transfer import chunk_frames, transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import Cut, describe
from talaria.wire.frames import decode_frame
from talaria.wire.mqtt import Arrival, Will
from talaria.wire.signing import Signer
from talaria.wire.topics import coordinator_filters, device_filters, parse, upload_filter

FED = "watch"
CHANGES = b"changes"


def made(*words: object, size: int = 3000) -> bytes:
    """Bytes that depend on ``words`` alone."""
    seed = "/".join(map(str, words)).encode()
    block = b"".join(hashlib.sha256(seed + bytes([i % 256, i // 256])).digest() for i in range(-(-size // 32)))
    return block[:size]


@dataclass
class Disk:
    """What survives a crash."""

    state: bytes = b""
    firm: bytes = b""
    """The last state that was saved at once; later ones may wait, and be lost with the process."""
    files: dict[tuple[str, str], dict[int, bytes]] = field(default_factory=dict)
    models: dict[bytes, bytes] = field(default_factory=dict)
    updates: dict[tuple[int, str], bytes] = field(default_factory=dict)
    kit: bytes = b""

    @property
    def held(self) -> bytes:
        """The sha256 of the file of a device's model."""
        return hashlib.sha256(next(iter(self.models.values()))).digest() if self.models else b""


class World:
    """The drivers of all machines, in one thread; every crash keeps only the disks."""

    def __init__(
        self, devices: int, faults: Faults, signed: bool = False, relayed: bool = False, **rules: object
    ) -> None:
        self.now, self.hub = 0.0, Hub(faults)
        self.rules = Rules(**{"chunk": 1000, "retry": 1.0, "stall": 20.0, "credit": 4} | rules)
        self.names = [f"dev-{i}" for i in range(devices)]
        self.signers = {n: Signer.of(hashlib.sha256(n.encode()).digest()) for n in self.names} if signed else {}
        self.signer = Signer.of(bytes(32)) if signed else None
        self.disk = Disk()
        self.disks = {n: Disk() for n in self.names}
        self.closed: list[a.RoundClosed] = []
        self.failed: list[a.RoundFailed] = []
        self.events: list[a.Action] = []
        self.receipts: dict[tuple[str, int], list[str]] = {}
        self.trained: list[tuple[str, int]] = []
        self.sent_bytes = 0
        self.epoch = 0
        self.state = CoordinatorState()
        self.half = CoordinatorMachine(
            FED, self.rules, b"spec", self.signer, {n: s.public for n, s in self.signers.items()}, enrolled=signed,
            relayed=relayed,
        )  # fmt: skip
        self.relayed = relayed
        self.expected: dict[tuple[str, str], Cut] = {}
        self.reports: list[tuple[str, str, int | None]] = []
        self.devices: dict[str, tuple[DeviceMachine, DeviceState]] = {}
        self.auto_commit = True
        self.follows = False
        """Whether devices tell which file they have, and so may ask for changes."""
        self.made_of: dict[bytes, bytes] = {}
        """Files by their sha256; changes stand in for them by naming both."""
        self.update_of = lambda name, attempt: made(name, attempt, size=4500)

    # -- coordinator --------------------------------------------------------------------------------

    def start_coordinator(self, **rules: object) -> None:
        """With ``rules``: its operator, or the broker, bounds these otherwise from now on."""
        self.epoch += 1
        self.state = CoordinatorState.load(self.disk.state) if self.disk.state else CoordinatorState()
        found = {k: frozenset(v) for k, v in self.disk.files.items()}
        stored = {k: hashlib.sha256(v).digest() for k, v in self.disk.updates.items()}
        if rules:
            self.rules = replace(self.rules, **rules)
            self.half = replace(self.half, rules=self.rules)
        self.tell(e.Start(self.now, self.epoch, found, stored))
        filters = coordinator_filters(FED, uploads=not self.relayed)
        self.hub.join("co", filters, self._to_coordinator, Will(*self.half.will(self.state)))
        if self.relayed:
            self.start_worker()
        self.tell(e.Connected(self.now))
        if rules:
            self.publish_body(self.state.model.version, multicast=False)

    def crash_coordinator(self) -> None:
        self.hub.cut("co")
        self.expected.clear()
        self.reports.clear()
        self.hub.cut("worker")

    # -- one ingest worker, which keeps chunks on the coordinator's disk and tells of two at a time

    def start_worker(self) -> None:
        self.hub.join("worker", (upload_filter(FED, "+"),), self._to_worker, None)
        for key in list(self.expected):
            self.listen(key)

    def crash_worker(self) -> None:
        self.reports.clear()
        self.hub.cut("worker")

    def listen(self, key: tuple[str, str]) -> None:
        self.tell(e.Listening(self.now, *key, frozenset(self.disk.files.get(key, {}))))

    def report(self) -> None:
        said, self.reports = self.reports, []
        for device, xfer, index in said:
            if index is None:
                self.listen((device, xfer))
            else:
                self.tell(e.ChunksCame(self.now, device, xfer, frozenset({index}), 1))

    def _to_worker(self, arrival: Arrival) -> None:
        topic = parse(arrival.topic)
        key = topic.device, topic.xfer
        cut, pieces = self.expected.get(key), self.disk.files.setdefault(key, {})
        try:
            frame = decode_frame(arrival.payload)
            fits = cut is not None and cut.fits(frame.header.idx, frame.payload)
            new = fits and frame.header.idx not in pieces
            if fits and not new:
                self.reports.append((*key, frame.header.idx))
        except WireError:
            new = False
        if new:
            pieces[frame.header.idx] = frame.payload
            self.reports.append((*key, frame.header.idx))
        if not new or len(self.reports) > 1 or len(pieces) == cut.count:
            self.report()
        if not new:
            self._to_coordinator(arrival)

    def _to_coordinator(self, arrival: Arrival) -> None:
        self.tell(e.Received(self.now, arrival.topic, arrival.payload, arrival.retained))

    def tell(self, event: object) -> list[a.Action]:
        self.state, actions = self.half.step(self.state, event)
        for action in actions:
            self.events.append(action)
            match action:
                case a.Save():
                    self.disk.state = self.state.dump()
                    self.disk.firm = self.disk.firm if action.soon else self.disk.state
                case a.Publish():
                    self.hub.publish(action.topic, action.payload, action.retain)
                case a.SendChunks():
                    self._send(action, self.disk.models[action.cut.sha256])
                case a.KeepChunk():
                    self.disk.files.setdefault((action.device, action.xfer), {})[action.index] = action.data
                case a.Expect():
                    self.expected[action.device, action.xfer] = action.cut
                    self.reports.append((action.device, action.xfer, None))  # said after all that it said before
                case a.Discard():
                    self.expected.pop((action.device, action.xfer), None)
                    self.disk.files.pop((action.device, action.xfer), None)
                case a.Complete():
                    pieces = self.disk.files[action.device, action.xfer]
                    data = b"".join(pieces[i] for i in sorted(pieces))
                    assert hashlib.sha256(data).digest() == action.cut.sha256
                    self.disk.updates[action.attempt, action.device] = data
                    self.tell(e.Stored(self.now, action.attempt, action.device, action.cut.sha256))
                case a.CompactAsked():
                    self._narrow(action)
                case a.RoundClosed():
                    self.closed.append(action)
                    if self.auto_commit:
                        self.tell(e.Committed(self.now, action.attempt))
                case a.RoundFailed():
                    self.failed.append(action)
        return actions

    def _narrow(self, action: a.CompactAsked) -> None:
        """The part that a mask keeps: the model's bytes up to the mask's number."""
        want = action.want
        keep = slice(int(want.mask.decode() or 1 << 20))
        data = self.disk.models[want.model_digest][keep]
        older = self.disk.models.get(want.base, b"")[keep] if isinstance(want, m.WantChanges) else b""
        if older and hashlib.sha256(older).digest() == want.held:
            self.made_of[digest := hashlib.sha256(data).digest()] = data
            data = CHANGES + want.held + digest
        cut = describe(data, self.rules.chunk)
        self.disk.models[cut.sha256] = data
        self.tell(e.CompactMade(self.now, action.want, cut, (action.device,)))

    def _send(self, action: a.SendChunks, data: bytes) -> None:
        for topic, payload in chunk_frames(action, lambda off, n: data[off : off + n]):
            self.sent_bytes += len(payload)
            self.hub.publish(topic, payload)

    def publish_body(self, version: int, size: int = 5500, multicast: bool = True) -> Cut:
        data = made("model", version, size=size)
        cut = describe(data, self.rules.chunk)
        self.disk.models[cut.sha256] = data
        self.tell(e.PublishModel(self.now, version, cut, multicast))
        return cut

    def open(self, number: int, seconds: float | None = None, quorum: int | None = None, **more: object) -> None:
        cohort = {n: f"plan of {n}".encode() for n in self.names}
        self.tell(e.OpenRound(self.now, number, cohort, seconds, quorum or len(cohort), **more))

    # -- devices ------------------------------------------------------------------------------------

    def start_device(self, name: str) -> None:
        disk = self.disks[name]
        state = DeviceState.load(disk.state) if disk.state else DeviceState()
        key = None if self.signer is None else self.signer.public
        limits = DeviceLimits(retry=1.0, credit=4)
        half = DeviceMachine(FED, name, limits, f"profile {name}".encode(), self.signers.get(name), key)
        self.devices[name] = (half, state)
        model = next(iter(disk.models), b"")
        partial = state.partial()
        chunks = frozenset() if partial is None else frozenset(disk.files.get((name, partial[0]), {}))
        self.say(name, e.Boot(self.now, model, chunks, held=disk.held if self.follows else b""))
        self.link_device(name)

    def link_device(self, name: str) -> None:
        self.say(name, e.Connecting(self.now))
        half, state = self.devices[name]
        self.hub.join(
            name,
            device_filters(FED, name),
            lambda m: self.say(name, e.Received(self.now, m.topic, m.payload, m.retained)) and None,
            Will(*half.will(state)),
        )
        self.say(name, e.Connected(self.now))

    def crash_device(self, name: str) -> None:
        self.hub.cut(name)
        self.devices.pop(name, None)

    def say(self, name: str, event: object) -> list[a.Action]:
        if name not in self.devices:
            return []
        half, state = self.devices[name]
        disk = self.disks[name]
        _, actions = half.step(state, event)
        for action in actions:
            self.events.append(action)
            match action:
                case a.Save():
                    disk.state = state.dump()
                case a.Publish():
                    self.hub.publish(action.topic, action.payload, action.retain)
                case a.SendChunks():
                    self._send(action, disk.updates[action.attempt, name])
                case a.KeepChunk():
                    disk.files.setdefault((name, action.xfer), {})[action.index] = action.data
                case a.Discard():
                    disk.files.pop((name, action.xfer), None)
                case a.ModelComplete():
                    pieces = disk.files.pop((name, action.xfer))
                    data = b"".join(pieces[i] for i in sorted(pieces))
                    assert hashlib.sha256(data).digest() == action.cut.sha256
                    assert transfer_of(action.cut.sha256) == action.xfer
                    if data.startswith(CHANGES):
                        of, to = data[len(CHANGES) : -32], data[-32:]
                        if of != disk.held:
                            self.say(name, e.ChangesUnfit(self.now, action.cut.sha256))
                            continue
                        data = self.made_of[to]
                    disk.models = {action.of or action.cut.sha256: data}
                    held = disk.held if self.follows else b""
                    self.say(name, e.ModelStored(self.now, action.cut.sha256, action.of, held))
                case a.KitBegun():
                    found = frozenset(disk.files.get((name, action.xfer), {}))
                    self.say(name, e.KitFound(self.now, action.cut.sha256, found))
                case a.KitComplete():
                    pieces = disk.files.pop((name, action.xfer))
                    disk.kit = b"".join(pieces[i] for i in sorted(pieces))
                    assert hashlib.sha256(disk.kit).digest() == action.cut.sha256
                    self.say(name, e.KitStored(self.now))
                case a.Train():
                    assert action.model_digest in disk.models
                    assert action.spec == f"plan of {name}".encode()
                    self.trained.append((name, action.attempt))
                    self.work(name, action.attempt, action.version)
                case a.CutAnew():
                    self.work(name, action.attempt, action.base_version)
                case a.Receipted():
                    self.receipts.setdefault((name, action.attempt), []).append(action.outcome)
        return actions

    def work(self, name: str, number: int, version: int) -> None:
        """Train at once; the update is on disk before the machine hears of it."""
        data = self.disks[name].updates.setdefault((number, name), self.update_of(name, number))
        self.say(name, e.UpdateReady(self.now, number, version, describe(data, self.devices[name][1].chunk)))

    # -- time ---------------------------------------------------------------------------------------

    def run(self, seconds: float, round: float = 0.5) -> None:
        end = self.now + seconds
        while self.now < end:
            self.hub.pump()
            self.now += round
            for name in list(self.devices):
                self.say(name, e.Tick(self.now))
            self.report()
            self.tell(e.Tick(self.now))
        self.hub.pump()

    def begin(self) -> None:
        self.start_coordinator()
        self.publish_body(0)
        for name in self.names:
            self.start_device(name)


@pytest.fixture
def world() -> type[World]:
    return World
