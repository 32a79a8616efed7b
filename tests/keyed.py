"""A fleet with keys in one process: the real coordinator with its own Mosquitto (TLS, rights by certificate), real
agents over real links, and members who mean harm."""

import asyncio
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from talaria import tensors
from talaria.federated import global_model
from talaria.federated.run import Member, Run
from talaria.identity.credentials import Credentials
from talaria.simulation.run import simulate
from talaria.types import Samples
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.config.store import StoreConfig
from talaria_coordinator.identity import membership
from talaria_coordinator.server.server import serve_all
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.agent.rounds import Rounds
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given
from talaria_edge.identity.enroll import ask, finish

HONEST = ("anna", "bela")
FLEET = "watch"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def enrol(keys, folder, device):
    """All steps of joining, as the two programs do them."""
    request = ask(folder, membership.enroll(keys, device))
    finish(folder, membership.admit(keys, request.read_bytes()).encode())
    return Credentials.load(folder)


def data_of(seed):
    y = torch.arange(18) % 3
    x = torch.randn(18, 6, 32, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


class Keyed:
    """What runs, and all that it tells. ``port`` is the broker's; agents may go another way (``through``: to which port
    which device connects)."""

    def __init__(self, folder: Path, run: Run, members=HONEST, others=(), **options):
        self.folder, self.run, self.members, self.told, self.through = folder, run, members, [], {}
        folder.chmod(0o755)
        self.port, self.keys = free_port(), folder / "keys"
        found(self.keys, FLEET, ["localhost"], self.port, len(members))
        self.own = {name: enrol(self.keys, folder / f"id-{name}", name) for name in (*members, *others)}
        self.options = {"members": members, "retry_s": 0.2, "stay": False, "deadline_s": 60.0, **options}
        self.worker = ThreadPoolExecutor(1)

    @property
    def url(self):
        return f"mqtts://127.0.0.1:{self.port}"

    @property
    def state(self):
        return self.folder / "state"

    @property
    def broker(self):
        """The folder of the broker's files."""
        return self.state / "broker"

    async def serve(self):
        given = {"broker": "mosquitto", "port": self.port, "identity": self.keys, **self.options}
        config = FleetConfig(name=FLEET, run=self.run, state=self.state, **given)
        await serve_all([config], self.told.append)

    def device(self, name):
        """How this device is set up."""
        return DeviceConfig(
            device=name, fleet=FLEET, broker=f"mqtts://127.0.0.1:{self.through.get(name, self.port)}",
            state=self.folder / name, retry_s=0.2, source=Given(lambda: data_of(self.members.index(name))),
            identity=self.folder / f"id-{name}",
        )  # fmt: skip

    def agent(self, name):
        return Agent(self.device(name), worker=self.worker, report=self.told.append)

    @property
    def store(self):
        """What the coordinator keeps, to read beside it."""
        return Store(self.options.get("store", StoreConfig()).where(self.state), make=False)

    def counted(self):
        """By learning round, in how many updates each device counted."""
        with self.store as store:
            store.audit.verify()
            rows = [row for row in store.attempts.of(FLEET) if row.counted is not None]
            assert [row.round for row in rows] == list(range(1, len(rows) + 1))
            return {row.round: [device for _, device in row.counted] for row in rows}

    def learned_what_simulation_learns(self):
        """To the bit: nobody's update is missing, and none is there twice."""
        data = {name: data_of(i) for i, name in enumerate(self.members)}
        simulated = simulate(self.run, {name: Member(name, own.train, own.val) for name, own in data.items()})
        with self.store as store:
            data = FolderBlobs(self.state / "blobs").get(store.fleets.get(FLEET).model_digest)
        return tensors.equal(global_model.decode_model(self.run, data), simulated.shared)

    async def told_of(self, event, seconds=60, count=1, **facts):
        """The first ``count`` events of a kind with these facts; AssertionError where they do not come."""
        try:
            async with asyncio.timeout(seconds):
                while len(have := self.of(event, **facts)) < count:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"no {event} {facts}; the last: {self.told[-12:]}") from None
        return have[-1]

    def of(self, event, **facts):
        return [x for x in list(self.told) if x["event"] == event and all(x.get(k) == v for k, v in facts.items())]

    def live(self, scenario, seconds=120):
        """Coordinator and agents, and beside them what a test does, until the run is over."""

        async def together():
            async with self._within(seconds), asyncio.TaskGroup() as group:
                serving = group.create_task(self.serve())
                await self.told_of("ready")
                agents = [group.create_task(self.agent(name).run()) for name in self.members]
                await scenario()
                await asyncio.gather(*agents)
                await serving

        asyncio.run(together())

    @asynccontextmanager
    async def _within(self, seconds):
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise AssertionError(f"not over within {seconds} s; the last: {self.told[-12:]}") from None

    @asynccontextmanager
    async def running(self, *names, seconds=120):
        """Coordinator (told to stay) and agents, for as long as the block lasts; the agents' tasks by name."""
        self.options["stay"] = True
        async with self._within(seconds):
            tasks = {"co": asyncio.ensure_future(self.serve())}
            try:
                await self.told_of("connected", fleet=FLEET)
                tasks |= {name: asyncio.ensure_future(self.agent(name).run()) for name in names}
                yield tasks
            finally:
                for task in tasks.values():
                    task.cancel()
                ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
            for outcome in ended:
                if isinstance(outcome, Exception):
                    raise outcome

    def raw(self, device, clean=True):
        """A TLS link to the broker as ``device``, past CONNACK, to write MQTT 3.1.1 packets to."""
        context = self.own[device].tls.context()
        link = context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), 20), server_hostname="localhost")
        name = device.encode()
        body = b"\x00\x04MQTT\x04" + bytes([2 * clean]) + b"\x00\x3c" + len(name).to_bytes(2, "big") + name
        link.sendall(bytes([0x10, len(body)]) + body)
        if link.recv(4)[:1] != b"\x20":
            link.close()
            raise ConnectionRefusedError(f"the broker does not take {device}")
        return link

    def train_after(self, monkeypatch, event):
        """Devices wait with training until this was told."""
        real = Rounds.learn

        async def learn(rounds, learner, action):
            await self.told_of(event)
            await real(rounds, learner, action)

        monkeypatch.setattr(Rounds, "learn", learn)

    def close(self):
        self.worker.shutdown()


class Cutter:
    """A way to the broker on which links can be cut, at any byte."""

    def __init__(self, upstream):
        self.upstream, self.cuts = upstream, 0
        self._links, self._tasks = set(), set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks)

    def cut(self):
        self.cuts += bool(self._links)
        for writer in self._links:
            writer.transport.abort()

    async def _accept(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        back, front = await asyncio.open_connection("127.0.0.1", self.upstream)
        ends = {writer, front}
        self._links |= ends
        await asyncio.gather(_carry(reader, front), _carry(back, writer))
        self._links -= ends


async def _carry(reader, writer):
    """All that comes, until one end is gone; then the other goes as well."""
    try:
        while data := await reader.read(1 << 14):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def packet(topic, payload, retain=False):
    """A PUBLISH of MQTT 3.1.1, QoS 0."""
    body = len(topic).to_bytes(2, "big") + topic.encode() + payload
    length, head = len(body), bytearray([0x30 | retain])
    while True:
        length, digit = divmod(length, 128)
        head.append(digit | (128 if length else 0))
        if not length:
            return bytes(head) + body


def pour(link, data):
    """Write ``data`` again and again, as fast as the broker takes it, until the link is cut; True where it was."""
    try:
        while True:
            link.sendall(data)
    except (ssl.SSLError, OSError):
        return True
