"""An asynchronous fleet over a real broker: its record, replayed in the simulator, gives the same bytes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from talaria import tensors
from talaria.federated import global_model
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.simulation.run import replay
from talaria.simulation.schedules import Record
from talaria.types import Recipe, Samples
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given

SPEC = ModelSpec("imu_cnn", (3, 16), 3)
NAMES = ("anna", "bela", "carl", "dora")
TWO = Buffering(buffer=2, max_staleness=8)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with open_broker("mosquitto", state=tmp_path_factory.mktemp("broker")) as running:
        yield running.url


pytestmark = pytest.mark.usefixtures("one_thread")


def data_of(seed):
    y = torch.arange(18) % 3
    x = torch.randn(18, 3, 16, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


DATA = {name: data_of(i) for i, name in enumerate(NAMES)}


def a_run(algorithm, rounds=4, **more):
    recipe = Recipe(batch=6, lr=0.02)
    return Run(spec=SPEC, algorithm=algorithm, recipe=recipe, rounds=rounds, seed=3, **{"asynchronous": True, **more})


def records(store: Store, fleet: str) -> tuple[Record, ...]:
    """One record for each version made, for :func:`talaria.simulation.run.replay`.

    In rounds, updates that were received whole and came too late are named too, since their training moved the device's
    private part; one whose update was never received is not known here, and a replay may then differ by it. In an
    asynchronous run what does not count leaves no trace on the device, and is not named.
    """
    every = store.attempts.of(fleet)
    round = {row.attempt: row.round for row in every}
    made = [row for row in every if row.counted is not None]
    counted = [tuple(sorted((device, round[number] - 1) for number, device in row.counted or ())) for row in made]
    known = {training for version in counted for training in version}
    late: dict[int, set[tuple[str, int]]] = {}
    known_fleet = store.fleets.get(fleet)
    asynchronous = known_fleet is not None and Run.from_json(known_fleet.run, allow=None).asynchronous
    for row in every if not asynchronous else ():
        for update in store.updates.of(fleet, row.attempt):
            training = (update.device, row.round - 1)
            if update.status == "stored" and training not in known and row.round <= len(made):
                late.setdefault(row.round - 1, set()).add(training)
    return tuple(Record(version, tuple(sorted(late.get(index, ())))) for index, version in enumerate(counted))


class Fleet:
    """A coordinator and its devices in one event loop, each with its own connection; ``slow`` takes its time."""

    def __init__(self, folder, url, run, **options):
        self.folder, self.url, self.run = folder, url, run
        self.name = folder.name.replace("_", "-")[-30:].strip("-")
        self.options = {"members": NAMES, "buffering": TWO, "stay": False, "retry_s": 0.3, **options}
        self.store, self.blobs = Store(folder / "db"), FolderBlobs(folder / "blobs")
        self.workers = {name: ThreadPoolExecutor(1) for name in NAMES}
        self.told, self.services = [], []

    def close(self):
        for worker in self.workers.values():
            worker.shutdown()
        self.store.close()

    async def serve(self):
        config = FleetConfig(name=self.name, run=self.run, state=self.folder, **self.options)
        self.services.append(Service(config, self.store, self.blobs, report=self.told.append))
        await self.services[-1].run(self.url)

    def agent(self, name):
        config = DeviceConfig(
            device=name, fleet=self.name, broker=self.url, state=self.folder / name, retry_s=0.3,
            source=Given(lambda: DATA[name]),
        )  # fmt: skip
        return Agent(config, worker=self.workers[name], report=self.told.append).run()

    def shared(self):
        self.store.audit.verify()
        return global_model.decode_model(self.run, self.blobs.get(self.store.fleets.get(self.name).model_digest))

    def replayed(self):
        members = {name: Member(name, data.train, data.val) for name, data in DATA.items()}
        return replay(self.run, members, records(self.store, self.name), buffering=self.options["buffering"])


@pytest.fixture
def fleet(tmp_path, broker):
    made = []

    def make(run, **options):
        made.append(Fleet(tmp_path, broker, run, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def go(work):
    async def limited():
        async with asyncio.timeout(200):
            return await work

    return asyncio.run(limited())


@pytest.mark.parametrize("algorithm", ["ffgg", "fedper"])
def test_the_record_of_an_asynchronous_fleet_replays_to_the_same_bytes(fleet, algorithm):
    one = fleet(a_run(algorithm))

    async def story():
        return await asyncio.gather(one.serve(), *map(one.agent, NAMES))

    results = go(story())[1:]
    made = records(one.store, one.name)
    assert [len(record.counted) for record in made] == [2] * 4
    assert all(len({device for device, _ in record.counted}) == 2 for record in made)
    assert not any("error" in result for result in results)
    assert tensors.equal(one.shared(), one.replayed().shared)
    assert one.store.fleets.get(one.name).status == "done"
