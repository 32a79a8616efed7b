"""Real agents and a real coordinator in one event loop, over a link in memory; and a device's learning on its own."""

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from memory_broker import Hub, Loop

from talaria.federated import global_model, rounds
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.simulation.run import simulate
from talaria.types import Recipe, Samples
from talaria.wire.topics import coordinator_filters, device_filters
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.agent.training import Learner
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given
from talaria_edge.storage.state import DeviceStore

SPEC = ModelSpec("imu_cnn", (6, 32), 3, seed=1)


def motions(count, seed, noise=0.5):
    """Three classes that differ in their mean, in noise."""
    y = torch.arange(count) % 3
    x = noise * torch.randn(count, 6, 32, generator=torch.Generator().manual_seed(seed)) + y[:, None, None].float()
    return Samples.of(x, y)


def device_data(seed):
    return DeviceData(motions(24, seed), motions(12, seed + 100))


class House:
    """A fleet in memory, with all that it tells; each device runs its agent with options of its own."""

    def __init__(self, folder, run, names, **options):
        self.folder, self.run, self.hub = folder, run, Hub()
        self.options = {"retry_s": 0.1, "stay": False, **options}
        self.data = {name: device_data(i) for i, name in enumerate(names)}
        self.told, self.devices = [], {}
        self.store, self.blobs = Store(folder / "db"), FolderBlobs(folder / "blobs")
        self.worker = ThreadPoolExecutor(1)

    def close(self):
        self.worker.shutdown()
        self.store.close()

    async def serve(self):
        config = FleetConfig(
            name="watch", run=self.run, state=self.folder, members=tuple(self.data), **self.options
        )  # fmt: skip

        def over_hub(url, config, will):
            return Loop(self.hub, "co", coordinator_filters("watch"), will)

        await Service(config, self.store, self.blobs, report=self.told.append, open_transport=over_hub).run("loop")

    async def agent(self, name, read=None, **options):
        config = DeviceConfig(
            device=name, fleet="watch", broker="mqtt://127.0.0.1", state=self.folder / name, retry_s=0.1,
            source=Given(lambda: self.data[name]), **options,
        )  # fmt: skip
        self.devices[name] = config
        more = {} if read is None else {"read": read}
        agent = Agent(
            config, worker=self.worker, report=self.told.append,
            open_transport=lambda c, will: Loop(self.hub, c.device, device_filters("watch", c.device), will), **more,
        )  # fmt: skip
        return await agent.run()

    def of(self, event, device=None):
        return [t for t in self.told if t["event"] == event and device in (None, t.get("device"))]

    def shared(self):
        return global_model.decode_model(self.run, self.blobs.get(self.store.fleets.get("watch").model_digest))

    def private(self, name):
        with DeviceStore(self.folder / name, "watch", name) as store:
            return store.private().tensors

    def simulated(self):
        members = {n: Member(n, d.train, d.val, self.devices[n].plan) for n, d in self.data.items()}
        return simulate(self.run, members)


def run_all(*work, seconds=280):
    async def together():
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*work)

    return asyncio.run(together())


def a_run(algorithm="fedavg", rounds=1, **options):
    recipe = options.pop("recipe", Recipe(batch=8, epochs=2, lr=0.05, momentum=0.0))
    return Run(spec=SPEC, algorithm=algorithm, rounds=rounds, seed=5, recipe=recipe, **options)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def house(tmp_path):
    made = []

    def make(run=None, names=("anna", "bela"), **options):
        made.append(House(tmp_path, run or a_run(), names, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(name="motions")
def _motions():
    return motions


@pytest.fixture(name="device_data")
def _device_data():
    return device_data


@pytest.fixture(name="run_all")
def _run_all():
    return run_all


@pytest.fixture(name="a_run")
def _a_run():
    return a_run


@pytest.fixture
def finished(tmp_path):
    """Lets one device personalize and deploy from a global model that some rounds of ``run`` made, without a link."""

    def finish(run, shared, data=None, **options):
        config = DeviceConfig(
            device="anna", fleet="watch", broker="mqtt://127.0.0.1", state=tmp_path / "anna",
            source=Given(lambda: data or device_data(0)), **{"variants": ("fp32",), **options},
        )  # fmt: skip
        model = global_model.encode_model(shared)
        with DeviceStore(config.state, "watch", "anna") as store:
            store.model_part("x").write_bytes(model)
            store.adopt_model("x")
            return Learner(config, store, run).finish(hashlib.sha256(model).digest())

    return finish


@pytest.fixture(scope="session")
def learned():
    """A run, its untrained global model, and one that a device learned well."""
    run = a_run(recipe=Recipe(batch=8, epochs=8, lr=0.05, momentum=0.0))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    data = device_data(0)
    found = run, rounds.start(run)[0], simulate(run, {"a": Member("a", data.train, data.val)}).shared
    torch.set_num_threads(before)
    return found
