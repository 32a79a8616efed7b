"""Every algorithm, over a real broker: the same bytes as in simulation, shared and private, and a model at the end."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from talaria import tasks, tensors
from talaria.algorithms import ALGORITHMS
from talaria.errors import ConfigError
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


STEPS = ModelSpec("mypkg.nets:Steps", (3, 16), 3)
TASKS = {"multilabel": SPEC, "per_step": STEPS, "regression": replace(SPEC, classes=2)}
CASES = [(name, tasks.CLASSIFICATION, SPEC) for name in sorted(ALGORITHMS)]
CASES += [
    (name, task, spec) for task, spec in TASKS.items() for name in ("fedavg", "fedper", "fedrep", "ditto", "hermes")
]


def data_of(seed, task=tasks.CLASSIFICATION):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(18) % 3
    x = torch.randn(18, 3, 16, generator=draw) + y[:, None, None]
    if task == "multilabel":
        y = torch.stack([y == label for label in range(2)] + [y > 0], 1).long()
    elif task == "per_step":
        y = torch.where(torch.rand(18, 16, generator=draw) < 0.1, -1, y[:, None])  # some are padding
    elif task == "regression":
        y = torch.stack([100 + 7.0 * y, x[:, 0, 0]], 1)
    return DeviceData(Samples.of(x[:12], y[:12], task), Samples.of(x[12:], y[12:], task))


async def together(folder, url, name, run, data, plans, told):
    """A coordinator and its devices, each with its own connection, until the last round; ``told`` is what they tell."""
    fleet = f"{name}-{run.task}".replace("_", "-")  # of its own: what another fleet left on the broker is not waited for
    config = FleetConfig(name=fleet, run=run, state=folder, members=tuple(data), stay=False, retry_s=0.3, deadline_s=60)
    store, blobs = Store(folder / "db"), FolderBlobs(folder / "blobs")
    worker = ThreadPoolExecutor(1)
    try:
        agents = [
            Agent(
                DeviceConfig(
                    device=who, fleet=fleet, broker=url, state=folder / who, retry_s=0.3, plan=plans.get(who),
                    source=Given(lambda who=who: data[who]), allow=("mypkg",),
                ),
                worker=worker, report=told.append,
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


@pytest.mark.parametrize(("name", "task", "spec"), CASES, ids=lambda one: one if isinstance(one, str) else one.name)
def test_simulation_and_fleet_agree(tmp_path, broker, name, task, spec):
    hparams = {"threshold": 0.0} if name == "hermes" else {}
    recipe = Recipe(batch=6, lr=0.02)
    run = Run(spec=spec, algorithm=name, hparams=hparams, recipe=recipe, rounds=2, seed=3, task=task)
    data = {"anna": data_of(1, task), "bela": data_of(2, task)}
    plans = {"anna": Plan(widths={g: max(8, n // 2) for g, n in layout_of(spec).sizes.items()})}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        told = []
        shared, private, results = asyncio.run(together(tmp_path, broker, name, run, data, plans, told))
        simulated = simulate(run, {w: Member(w, d.train, d.val, plans.get(w)) for w, d in data.items()})
    finally:
        torch.set_num_threads(before)
    assert tensors.equal(shared, simulated.shared)
    for who in data:
        assert tensors.equal(private[who], simulated.private[who]), who
    assert all(result["parameters"] > 0 for result in results)
    assert not any("error" in result for result in results)
    # Who keeps a part of the channels downloads that part. Hermes' devices cut theirs down in the first round.
    narrow = {"local": [False], "hermes": [False, True, True]}.get(name, [True] * 3)
    if (name, task) == ("hermes", "regression"):  # its R² is below the threshold of 0 after so few steps
        narrow = [False] * 3
    assert parts_of(told, "anna") == narrow
    assert parts_of(told, "bela") == (narrow if name == "hermes" else [False] * len(narrow))


@pytest.mark.parametrize("task", TASKS)
def test_who_needs_classes_says_so_of_another_task(task):
    with pytest.raises(
        ConfigError, match=f"pfedgm: its head is one Gaussian for each class, .* task='{task}'; use fed"
    ):
        Run(spec=TASKS[task], algorithm="pfedgm", rounds=2, task=task)


def parts_of(told, who):
    """Of each model that came whether it was a part."""
    return [event.get("part", False) for event in told if (event["event"], event["device"]) == ("model", who)]


def test_who_compares_its_plan_with_the_dense_twin_has_the_last_model_whole(tmp_path, broker):
    run = Run(spec=SPEC, algorithm="fedper", recipe=Recipe(batch=6, lr=0.02), rounds=2, seed=3)
    data, told = {"anna": data_of(1), "bela": data_of(2)}, []
    plan = Plan(widths={g: max(8, n // 2) for g, n in layout_of(SPEC).sizes.items()}, accuracy_drop=0.99)
    _, _, (anna, _) = asyncio.run(together(tmp_path, broker, "twin", run, data, {"anna": plan}, told))
    assert anna["plan"]["accuracy"]["kept"]
    assert parts_of(told, "anna") == [True, True, False]
    assert parts_of(told, "bela") == [False] * 3
