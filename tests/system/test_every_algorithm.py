"""Every algorithm, over a real broker: the same bytes as in simulation, shared and private, and a model at the end."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from talaria import tensors
from talaria.algorithms import ALGORITHMS
from talaria.federated import global_model
from talaria.federated.rounds import layout_of
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria.simulation.run import simulate
from talaria.types import Recipe, Samples
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given
from talaria_edge.storage.state import DeviceStore

SPEC = ModelSpec("imu_cnn", (3, 16), 3)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with open_broker("mosquitto", state=tmp_path_factory.mktemp("broker")) as running:
        yield running.url


def data_of(seed):
    y = torch.arange(18) % 3
    x = torch.randn(18, 3, 16, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


async def together(folder, url, name, run, data, plans):
    """A coordinator and its devices, each with its own connection, until the last round."""
    fleet = name.replace("_", "-")
    config = FleetConfig(name=fleet, run=run, state=folder, members=tuple(data), stay=False, retry_s=0.3, deadline_s=60)
    store, blobs = Store(folder / "db"), FolderBlobs(folder / "blobs")
    worker = ThreadPoolExecutor(1)
    try:
        agents = [
            Agent(
                DeviceConfig(
                    device=who, fleet=fleet, broker=url, state=folder / who, retry_s=0.3, plan=plans.get(who),
                    source=Given(lambda who=who: data[who]),
                ),
                worker=worker,
            )
            for who in data
        ]  # fmt: skip
        async with asyncio.timeout(120):
            results = await asyncio.gather(Service(config, store, blobs).run(url), *(a.run() for a in agents))
        shared = global_model.decode_model(run, blobs.get(store.fleet(fleet).model_digest))
    finally:
        worker.shutdown()
        store.close()
    private = {}
    for who in data:
        with DeviceStore(folder / who, fleet, who) as mine:
            private[who] = mine.private().tensors
    return shared, private, results[1:]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_simulation_and_fleet_agree(tmp_path, broker, name):
    hparams = {"threshold": 0.0} if name == "hermes" else {}
    run = Run(spec=SPEC, algorithm=name, hparams=hparams, recipe=Recipe(batch=6, lr=0.02), rounds=2, seed=3)
    data = {"anna": data_of(1), "bela": data_of(2)}
    plans = {"anna": Plan(widths={g: max(8, n // 2) for g, n in layout_of(SPEC).sizes.items()})}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shared, private, results = asyncio.run(together(tmp_path, broker, name, run, data, plans))
        simulated = simulate(run, {w: Member(w, d.train, d.val, plans.get(w)) for w, d in data.items()})
    finally:
        torch.set_num_threads(before)
    assert tensors.equal(shared, simulated.shared)
    for who in data:
        assert tensors.equal(private[who], simulated.private[who]), who
    assert all(result["parameters"] > 0 for result in results)
    assert not any("error" in result for result in results)
