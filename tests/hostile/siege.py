"""A real coordinator under attack: the service, its store, blobs and machine, over a hub in memory. Two honest devices
speak through the real device's half; the attacker, a member like them, says what it likes."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from dataclasses import replace
from pathlib import Path

from limits import MEMORY_MIB, allowed
from memory_broker import Hub, Loop

from talaria.federated import global_model, run_model
from talaria.federated.run import Run
from talaria.identity.credentials import Credentials
from talaria.model.spec import ModelSpec
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.device.machine import DeviceLimits, DeviceMachine, DeviceState
from talaria.protocol.transfer import chunk_frames, transfer_of
from talaria.types import Update
from talaria.wire import messages as m
from talaria.wire.chunks import describe
from talaria.wire.codec import encode_update
from talaria.wire.frames import Header, encode_frame
from talaria.wire.mqtt import Will
from talaria.wire.topics import coordinator_filters, device_filters
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.identity import membership
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_coordinator.web.queries import Views
from talaria_edge.identity.enroll import ask, finish

RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3, seed=1), algorithm="fedavg", rounds=2, seed=5)
HONEST = ("anna", "bela")
ATTACKERS = ("mallory", *(f"mallo-{i}" for i in range(1, 8)))
LIARS = tuple(f"liar-{i:02}" for i in range(64))
PATIENCE = 240.0
"""Seconds for a whole siege, on however busy a machine."""
ROOT = "fl/1/watch/"


def keys(folder: Path, attackers: tuple[str, ...] = ATTACKERS) -> Path:
    """A fleet's folder with the keys of its members beside it, and an empty store."""
    membership.create(folder / "fleet", "watch", "mqtts://localhost:8883", ["localhost"])
    for name in HONEST + attackers:
        request = ask(folder / name, membership.enroll(folder / "fleet", name))
        finish(folder / name, membership.admit(folder / "fleet", request.read_bytes()).encode())
    Store(folder / "empty.db").close()
    return folder


class Light:
    """An honest device: the real half and keys, a global model in memory, and an update that costs nothing to make."""

    def __init__(self, siege: Siege, name: str, held: bool) -> None:
        self.held, self.ready = held, []
        own = Credentials.load(siege.keys / name)
        self.siege, self.name = siege, name
        self.half = DeviceMachine("watch", name, DeviceLimits(retry=2.0), b"{}", own.signer, own.coordinator_key)
        self.state = DeviceState()
        self.parts, self.updates, self.model = {}, {}, b""
        self.refused, self.receipts, self.said = [], [], []
        self.tell(e.Boot(time.monotonic()))
        self.link()

    def link(self) -> None:
        """Connect, as a new boot."""
        self.tell(e.Connecting(time.monotonic()))
        will = Will(*self.half.will(self.state))
        self.siege.hub.join(self.name, device_filters("watch", self.name), self.hear, will)
        self.tell(e.Connected(time.monotonic()))

    def hear(self, arrival) -> None:
        """A message came."""
        self.tell(e.Received(time.monotonic(), arrival.topic, arrival.payload, arrival.retained))

    def tell(self, event: object) -> None:
        """Carry out what the half says to an event."""
        for action in self.half.step(self.state, event)[1]:
            match action:
                case a.Publish():
                    self.say(action.topic, action.payload, action.retain)
                case a.SendChunks():
                    data = self.updates[action.attempt]
                    for topic, payload in chunk_frames(action, lambda at, n, data=data: data[at : at + n]):
                        self.say(topic, payload)
                case a.KeepChunk():
                    self.parts[action.index] = action.data
                case a.ModelComplete():
                    self.model = b"".join(self.parts[i] for i in range(action.cut.count))
                    assert hashlib.sha256(self.model).digest() == action.cut.sha256
                    self.tell(e.ModelStored(time.monotonic(), action.cut.sha256))
                case a.Train():
                    self.updates[action.attempt] = self.siege.update(self.name, self.model, action.version)
                    self.ready.append((action.attempt, action.version))
                    self.work()
                case a.FrameRefused():
                    self.refused.append(action.reason)
                case a.Receipted():
                    self.receipts.append((action.attempt, action.outcome))

    def work(self) -> None:
        """What is learned is sent, unless this device is held back."""
        while self.ready and not self.held:
            number, version = self.ready.pop(0)
            self.tell(e.UpdateReady(time.monotonic(), number, version, describe(self.updates[number])))

    def say(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Publish, and remember it."""
        self.said.append((topic, payload))
        self.siege.hub.publish(topic, payload, retain)


class Siege:
    """One coordinator with an open round of anna, bela and some attackers, the first of whom is mallory."""

    def __init__(
        self, folder: Path, keys: Path, attackers: int | tuple[str, ...] = 1, run: Run = RUN, **options: object
    ) -> None:
        self.keys, self.hub, self.told, self.news = keys, Hub(), [], asyncio.Event()
        self.coordinator = membership.load_signer(keys / "fleet")
        self.lights: dict[str, Light] = {}
        self.learned: dict[str, Update] = {}
        """What devices learned from the first global model, where it is not made up."""
        names = ATTACKERS[:attackers] if isinstance(attackers, int) else attackers
        if not run.asynchronous:
            options = {"quorum": 2 / (2 + len(names))} | options
        options = {"retry_s": 2.0, "deadline_s": 60.0} | options
        self.config = FleetConfig(
            name="watch", run=run, state=folder, members=HONEST + names, identity=keys / "fleet", **options
        )
        shutil.copy(keys / "empty.db", folder / "coordinator.db")  # making the tables costs more than all the rest
        self.store, self.blobs = Store(folder / "coordinator.db"), FolderBlobs(folder / "blobs")
        self.views = Views(folder / "coordinator.db")
        self.use()
        self.attackers = [Mallory(self, name) for name in names]
        self.mallory = self.attackers[0]

    def use(self, recruit=None) -> None:
        """A new service, with what ``recruit`` starts as its ingest workers."""
        workers = 0 if recruit is None else 1
        filters = coordinator_filters("watch", uploads=not workers)
        self.config = replace(self.config, workers=workers)
        self.service = Service(
            self.config, self.store, self.blobs, report=self.hear, observe=self.see, recruit=recruit,
            open_transport=lambda url, config, will: Loop(self.hub, "co", filters, will),
        )  # fmt: skip

    def close(self) -> None:
        self.views.close()
        self.store.close()

    # -- what goes on

    def hear(self, event: dict) -> None:
        """The coordinator tells something; of refusals it tells a flood only once, so they are taken from below."""
        if event["event"] != "refused":
            self.told.append(event)
            self.news.set()

    def see(self, action: object) -> None:
        """The protocol machine refuses a message."""
        if isinstance(action, a.FrameRefused):
            self.told.append(
                {"event": "refused", "device": action.device, "topic": action.topic, "reason": action.reason}
            )
            self.news.set()

    def run(self, story) -> None:
        """The coordinator serves and ``story`` (a coroutine function of this siege) happens."""

        async def whole() -> None:
            async with asyncio.timeout(PATIENCE):
                serving = asyncio.ensure_future(self.service.run("hub"))
                ticking = asyncio.ensure_future(self.tick())
                try:
                    await self.until("connected")
                    await story(self)
                    assert not serving.done(), serving.exception()
                finally:
                    self.service.stop()
                    ticking.cancel()
                    await serving

        asyncio.run(whole())

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            for light in self.lights.values():
                light.tell(e.Tick(time.monotonic()))
            self.hub.pump()

    async def until(self, event: str, count: int = 1, **facts: object) -> list[dict]:
        """Wait until ``count`` events of this kind with these facts were told; all of them."""
        while True:
            found = self.of(event, **facts)
            if len(found) >= count:
                return found
            self.news.clear()
            await self.news.wait()

    def of(self, event: str, **facts: object) -> list[dict]:
        return [t for t in self.told if t["event"] == event and all(t.get(k) == v for k, v in facts.items())]

    async def opened(self, *held: str, honest: tuple[str, ...] = HONEST) -> None:
        """The round is open and these are there; those held back send no update. Attackers are heard of."""
        for mallory in self.attackers:
            if mallory.name not in honest:
                mallory.birth()
        for name in honest:
            self.lights[name] = Light(self, name, name in held)
        self.hub.pump()
        await self.until("round-opened")
        for name in honest:
            await self.until("progress", device=name, phase="working")

    async def stored(self, *names: str) -> None:
        """The coordinator has the updates of these, so that all its code has run once."""
        while not all((1, "stored") in self.lights[name].receipts for name in names):
            await asyncio.sleep(0.02)

    def release(self, *names: str) -> None:
        """Those held back send theirs."""
        for name in names:
            self.lights[name].held = False
            self.lights[name].work()
        self.hub.pump()

    async def finishes(self, *names: str, number: int = 1) -> None:
        """This round completes, and these updates count in it."""
        await self.until("round-closed", attempt=number)
        row = next(row for row in self.store.attempts.of("watch") if row.attempt == number)
        assert row.failure is None
        assert row.counted == tuple((number, name) for name in names)
        self.store.audit.verify()

    async def shut_out(self, *words: str, name: str = "mallory") -> None:
        """It is in quarantine, and the reason, with these words, stands where the operator looks."""
        await self.until("quarantined", device=name)
        shown = {d.device: d.quarantine for d in self.views.devices("watch", quarantined=True)}
        assert shown[name] == {d.device: d.quarantine for d in self.store.devices.of("watch")}[name]
        for word in words:
            assert word in shown[name], shown[name]

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Bytes on a topic of the fleet, as any client of the broker can send them."""
        self.hub.publish(ROOT + topic, payload, retain)
        self.hub.pump()

    def update(self, name: str, model: bytes, base_version: int, **changes: object) -> bytes:
        """A good update of this global model."""
        if name in self.learned:
            return encode_update(self.learned[name].but(base_version=base_version), compress=False)
        shared = global_model.decode_model(RUN, model)
        tensors = {n: shared[n] for n in run_model.update_schema(RUN)}
        return encode_update(
            Update(tensors=tensors, weight=8.0, client=name, base_version=base_version).but(**changes), compress=False
        )


class Mallory:
    """A member with keys of its own, which says whatever it is told to."""

    def __init__(self, siege: Siege, name: str) -> None:
        self.siege, self.name, self.seq = siege, name, 0
        self.signer = Credentials.load(siege.keys / name).signer

    def frame(self, message: m.Message, boot: int = 1, seq: int | None = None, device: str = "", signer=None) -> bytes:
        """A message in its frame, signed by itself unless another signer is given (``False``: by nobody)."""
        self.seq += 1
        header = Header(message.TYPE, "watch", device or self.name, boot=boot, seq=self.seq if seq is None else seq)
        return encode_frame(header, m.encode_message(message), (signer or self.signer) if signer is not False else None)

    def publish(self, kind: str, payload: bytes, retain: bool = False, device: str = "") -> None:
        """Bytes on a topic below ``d/``, its own unless ``device`` is given."""
        self.siege.publish(f"d/{device or self.name}/{kind}", payload, retain)

    def birth(self, boot: int = 1, online: bool = True) -> None:
        self.publish("state", self.frame(m.DeviceBirth(online=online, key=b"", profile=b""), boot), retain=True)

    def say(self, message: m.Message, **how: object) -> None:
        self.publish("evt", self.frame(message, **how))

    def offer(self, data: bytes, number: int = 1, base_version: int = 0, chunk: int = 120 * 1024, **changes: object):
        """Offer these bytes; how they are cut."""
        cut = describe(data, chunk)
        model = bytes.fromhex(self.siege.store.fleets.get("watch").model_digest)
        facts = {"sha256": cut.sha256, "hashes": cut.hashes, "nonce": cut.sha256[:16], "base_digest": model} | changes
        self.say(m.Offer(attempt=number, base_version=base_version, size=cut.size, chunk=cut.chunk, **facts))
        return cut

    def chunk(self, cut, index: int, data: bytes, off: int | None = None) -> None:
        name = transfer_of(cut.sha256)
        place = cut.chunk * index if off is None else off
        header = Header(m.CHUNK, "watch", self.name, boot=1, xfer=name, idx=index, off=place)
        self.publish(f"up/{name}", encode_frame(header, data))

    def upload(self, data: bytes, number: int = 1, base_version: int = 0, **changes: object) -> None:
        """A whole upload at once, without waiting to be asked."""
        cut = self.offer(data, number, base_version, **changes)
        for index in range(cut.count):
            self.chunk(cut, index, data[cut.chunk * index :][: cut.chunk])

    def good(self, base_version: int = 0) -> bytes:
        """An update that would count."""
        model = self.siege.blobs.get(self.siege.store.fleets.get("watch").model_digest)
        return self.siege.update(self.name, model, base_version)


class Cost:
    """CPU and memory of what stands in its ``with``: the :mod:`limits` of so many messages, beyond what was held."""

    def __init__(self, messages: int = 1) -> None:
        self.messages = messages

    def __enter__(self) -> Cost:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.begin, self.held = time.process_time(), memory("VmRSS")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        spent, grown = time.process_time() - self.begin, memory("VmHWM") - self.held
        if kind is None:
            limit = allowed() * self.messages
            assert spent < limit, f"took {spent:.3f} s of CPU for {self.messages} messages; at most {limit:.3f}"
            assert grown < MEMORY_MIB, f"took {grown:.0f} MiB"


def memory(field: str) -> float:
    """A figure of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024
