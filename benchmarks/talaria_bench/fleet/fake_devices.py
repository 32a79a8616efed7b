"""Many light devices in one process: the real protocol and real bytes, but nothing is learned and nothing kept.

Each device verifies every chunk of the global model and forgets it, and answers with an update that is one template
but for one value of its own. Python code ``CODE`` with the argument ``JOB`` runs the devices that this JSON names and
tells, one JSON line each, what happened to them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from talaria.errors import TransportError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.device.machine import DeviceLimits, DeviceMachine, DeviceState
from talaria.protocol.driver import Driver
from talaria.protocol.words import UPLOAD
from talaria.wire.chunks import FileAssembly, describe
from talaria.wire.mqtt import Mqtt
from talaria.wire.topics import device_filters
from talaria.wire.transport import LinkDown, LinkUp, NotTaken, Will
from talaria_bench.fleet.secure_devices import SecurePart, value_of
from talaria_edge.agent.secure import Said

CODE = "from talaria_bench.fleet.fake_devices import main; main()"
STARTS_AT_ONCE = 20


@dataclass(frozen=True)
class Job:
    """What one process does. ``updates`` is a folder with ``head-N`` for each round N and ``tail``: both make an update
    of device ``alike``, and the first value of the tail is each device's own. Empty: devices fetch the global model
    and decline to learn. ``disk`` is where global models are put together; empty: they are verified and forgotten.
    ``secure`` is a folder with the run and all keys (:mod:`.secure_devices`), and ``leaves`` the step of a secure round
    in which the process dies, in the middle; 0: in none."""

    fleet: str
    url: str
    devices: list[str]
    retry_s: float
    rounds: int
    updates: str = ""
    alike: str = ""
    disk: str = ""
    secure: str = ""
    leaves: int = 0

    @classmethod
    def load(cls, text: str) -> Job:
        return cls(**json.loads(text))

    def dump(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Tally:
    """What all devices of a process did together, in bytes and messages."""

    down: int = 0
    last: int = 0
    """Of ``down``, the last models, which the devices leave with."""
    up: int = 0
    chunks: int = 0
    """Chunks of global models that came, whether new or not."""
    models: int = 0
    receipts: dict[str, int] = field(default_factory=dict)
    dropped: int = 0


def is_chunk(topic: str) -> bool:
    """Whether a piece of a global model travels on ``topic``."""
    parts = topic.split("/")
    return len(parts) > 4 and (parts[3] == "m" or parts[-2] == "dn")


class Updates:
    """The updates of a job, by device and round."""

    def __init__(self, job: Job) -> None:
        self._folder, self._alike = Path(job.updates), job.alike.encode()
        self._rest = (self._folder / "tail").read_bytes()[4:] if job.updates else b""

    def of(self, device: str, round: int) -> bytes:
        """The update of ``device`` for round ``round``."""
        head = (self._folder / f"head-{round}").read_bytes().replace(self._alike, device.encode())
        return b"".join((head, struct.pack("<f", value_of(device)), self._rest))


class Light:
    """One device."""

    def __init__(self, name: str, job: Job, updates: Updates, tally: Tally, told: Callable[..., None]) -> None:
        self.name, self._job, self._updates, self._tally, self._told = name, job, updates, tally, told
        limits = DeviceLimits(retry=job.retry_s, max_model=1 << 31)
        self._secure = SecurePart(Path(job.secure), job.fleet, name) if job.secure else None
        keys = {} if self._secure is None else self._secure.keys
        self._half = DeviceMachine(job.fleet, name, limits, profile=b"{}", **keys)
        self._state = DeviceState()
        self._update = b""
        self._driver = Driver(lambda cut: self._update, self._sent, inbox=0)
        self._part: FileAssembly | None = None
        self._parting = False
        self._over = False

    def _sent(self, size: int) -> None:
        self._tally.up += size

    async def run(self, gate: asyncio.Semaphore) -> None:
        """Take part until the last global model is here and the coordinator has heard the goodbye."""
        job = self._job
        link = Mqtt(
            job.url, f"{job.fleet}.{self.name}", device_filters(job.fleet, self.name),
            will=self._will, threaded=False, timeout=60.0, keepalive=60,
        )  # fmt: skip
        self._feed(e.Boot(time.monotonic()))
        try:
            await self._driver.run(self._live(link, gate))
        finally:
            self._tally.dropped += link.dropped

    async def _live(self, link: Mqtt, gate: asyncio.Semaphore) -> None:
        async with self._driver.linked(link, self._reach(link, gate), self._linked):
            self._driver.beside(self._tick())
            while not self._over:
                event = await self._driver.inbox.get()
                if isinstance(event, e.Received):
                    self._tally.down += event.size
                    self._tally.chunks += is_chunk(event.topic)
                self._feed(event)

    async def _reach(self, link: Mqtt, gate: asyncio.Semaphore) -> None:
        async with gate:
            while True:
                try:
                    await link.start()
                except TransportError as error:
                    self._told("unreachable", device=self.name, error=str(error))
                    await asyncio.sleep(random.uniform(0.5, 2.0))
                else:
                    break

    def _will(self) -> Will:
        self._feed(e.Connecting(time.monotonic()))
        return Will(*self._half.will(self._state))

    def _linked(self, change: LinkUp | LinkDown | NotTaken) -> None:
        if isinstance(change, LinkDown):
            self._told("cut", device=self.name, chunks=self._tally.chunks)

    async def _tick(self) -> None:
        # Idle devices look up now and then; not all of them at once.
        await asyncio.sleep(random.uniform(0, self._job.retry_s))
        while True:
            self._driver.inbox.put_nowait(e.Tick(time.monotonic()))
            if self._parting:
                self._driver.inbox.put_nowait(e.SayGoodbye(time.monotonic()))
            await asyncio.sleep(self._job.retry_s)

    def _feed(self, event: object) -> None:
        _, actions = self._half.step(self._state, event)
        for action in actions:
            self._carry_out(action)
        state = self._state
        if state.version < self._job.rounds or state.busy or self._parting:
            return
        if state.fetch is not None and not state.wanted:
            self._feed(e.FetchModel(time.monotonic()))
        elif state.fetch is None and state.model_digest:
            self._parting = True
            self._driver.inbox.put_nowait(e.SayGoodbye(time.monotonic()))

    def _carry_out(self, action: a.Action) -> None:
        match action:
            case a.Publish() | a.SendChunks():
                self._driver.say(action)
            case a.KeepChunk():
                self._keep(action)
            case a.ModelComplete():
                self._complete(action)
            case a.Train() if self._secure is not None:
                self._driver.spawn(self._say(action.attempt, action.version, self._secure.beginning(action)))
            case a.WordCame() if self._secure is not None and self._state.job is not None:
                if 0 < self._job.leaves <= action.step:
                    os._exit(0)  # without a word to anybody
                answer = self._secure.answering(action.attempt, action.data)
                self._driver.spawn(self._say(action.attempt, self._state.job.version, answer))
            case a.Train():
                self._train(action)
            case a.Receipted():
                seen = self._tally.receipts
                seen[action.outcome] = seen.get(action.outcome, 0) + 1
                self._told("received", device=self.name, attempt=action.attempt, outcome=action.outcome)
                self._update = b""
            case a.Released():
                self._over = True

    def _keep(self, action: a.KeepChunk) -> None:
        if not self._job.disk:
            return
        if self._part is None or self._part.cut.sha256 != action.cut.sha256:
            self._part = FileAssembly(Path(self._job.disk) / f"{self.name}.part", action.cut, 1 << 31)
        self._part.put(action.index, action.data, known=True)

    def _complete(self, action: a.ModelComplete) -> None:
        if self._part is not None:
            self._part.finish()
            self._part.close()
        self._tally.models += 1
        if action.version >= self._job.rounds:
            self._tally.last += action.cut.size
        self._told("model", device=self.name, version=action.version, chunks=self._tally.chunks, count=action.cut.count)
        self._driver.inbox.put_nowait(e.ModelStored(time.monotonic(), action.cut.sha256))

    def _train(self, action: a.Train) -> None:
        now = time.monotonic()
        if not self._job.updates:
            self._driver.inbox.put_nowait(e.DeclineRound(now, action.attempt, "it only fetches the model"))
            return
        self._update = self._updates.of(self.name, int(json.loads(action.spec)["round"]))
        cut = describe(self._update, self._state.chunk)
        self._driver.inbox.put_nowait(e.UpdateReady(now, action.attempt, action.version, cut))

    async def _say(self, attempt: int, version: int, word: Callable[[], Said | None]) -> None:
        spoken = await asyncio.to_thread(word)
        if spoken is not None and spoken.step == UPLOAD:
            self._update = spoken.data
            cut = describe(self._update, self._state.chunk)
            self._driver.inbox.put_nowait(e.UpdateReady(time.monotonic(), attempt, version, cut))
        elif spoken is not None:
            self._driver.inbox.put_nowait(e.SayWord(time.monotonic(), attempt, spoken.step, spoken.data))


async def take_part(job: Job) -> None:
    """Run all devices of ``job`` to their end, telling on stdout."""
    tally = Tally()

    def told(event: str, **facts: Any) -> None:
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()

    gate, updates = asyncio.Semaphore(STARTS_AT_ONCE), Updates(job)
    devices = [Light(name, job, updates, tally, told) for name in job.devices]
    told("here", pid=os.getpid())
    await asyncio.gather(*(device.run(gate) for device in devices))
    used = os.times()
    told("over", **asdict(tally), cpu_s=used.user + used.system)


def main() -> None:
    """Run the job that the first argument is."""
    with suppress(KeyboardInterrupt):
        asyncio.run(take_part(Job.load(sys.argv[1])))
