"""A site's rounds come from above, which is the test; its devices are real agents over a hub in memory."""

import asyncio
import threading

import pytest
import torch
from memory_broker import Hub, Loop

from talaria import tensors
from talaria.errors import ConfigError, WireError
from talaria.federated import global_model, rounds, run_model
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.types import Recipe, Samples
from talaria.wire.partial_sums import Bounds, decode_partial_sum
from talaria.wire.topics import coordinator_filters, device_filters
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.above import Above, Wanted
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.fleet.site import site
from talaria_coordinator.maintenance import fsck
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given

RUN = Run(spec=ModelSpec("imu_cnn", (3, 16), 3), algorithm="fedavg", rounds=6, recipe=Recipe(epochs=1, batch=6), seed=3)
NAMES = ("carl", "dora")


def samples(seed):
    y = torch.arange(18) % 3
    x = torch.randn(18, 3, 16, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


DATA = {name: samples(seed) for seed, name in enumerate(NAMES)}


class Site:
    """A site of carl and dora, and what is above it."""

    def __init__(self, folder):
        self.folder, self.hub, self.told = folder, Hub(), []
        self.store, self.blobs = Store(folder / "coordinator.db"), FolderBlobs(folder / "blobs")
        self.above, self.dora_may_learn = Above("site"), threading.Event()
        self.dora_may_learn.set()
        self.quorum = 1.0

    async def serve(self):
        """The coordinator, once something was asked for above."""
        while self.above.wanted is None:
            await asyncio.sleep(0.01)
        how = {"site": True, "quorum": self.quorum, "retry_s": 0.1, "stay": False}
        config = FleetConfig(name="garden", run=RUN, state=self.folder, members=NAMES, **how)
        self.service = Service(
            config, self.store, self.blobs, report=self.told.append, **site(self.above),
            open_transport=lambda url, config, will: Loop(self.hub, "co", coordinator_filters("garden"), will),
        )  # fmt: skip
        await self.service.run("hub")

    def data(self, name):
        if name == "dora":
            self.dora_may_learn.wait()
        return DATA[name]

    async def agent(self, name):
        config = DeviceConfig(
            device=name, fleet="garden", broker="mqtt://hub", state=self.folder / name, retry_s=0.1,
            source=Given(lambda: self.data(name)),
        )  # fmt: skip
        agent = Agent(
            config, report=self.told.append,
            open_transport=lambda c, will: Loop(self.hub, c.device, device_filters("garden", c.device), will),
        )  # fmt: skip
        return await agent.run()

    async def ask(self, wanted):
        """The site's partial sum of this round."""
        data = await asyncio.to_thread(self.above.ask, wanted)
        how = {"schema": run_model.update_schema(RUN), "layout": run_model.layout_of(RUN.spec)}
        return decode_partial_sum(data, bounds=Bounds(clients=2), client="site", **how)

    async def told_of(self, event, **facts):
        while not any(t["event"] == event and all(t.get(k) == v for k, v in facts.items()) for t in self.told):
            await asyncio.sleep(0.02)

    def counted(self):
        """By round, whose updates counted; the record is whole."""
        assert fsck.check(self.store, self.blobs).damage == ()
        every = [row for row in self.store.attempts.of("garden") if row.failure is None]
        return {row.round: [who for _, who in row.counted] for row in every}

    def run(self, story):
        """``story`` happens above, until it ends the run."""

        async def whole():
            async with asyncio.timeout(100):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.serve())
                    for name in NAMES:
                        group.create_task(self.agent(name))
                    try:
                        await story()
                    finally:
                        self.above.end()

        asyncio.run(whole())


@pytest.fixture
def garden(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    one = Site(tmp_path)
    yield one
    one.store.close()
    torch.set_num_threads(before)


def model(factor):
    """Some global model, as tensors and as it travels."""
    found = {name: value * value.dtype.type(factor) for name, value in rounds.start(RUN)[0].items()}
    return found, global_model.encode_model(found, RUN.download)


def learned(shared, round):
    """What a site's members learn of this model in this round, in one sum."""
    found = {n: rounds.participate(RUN, Member(n, d.train, d.val), shared, None, round)[0] for n, d in DATA.items()}
    return sum(one.weight for one in found.values()), {
        name: (found["carl"].tensors[name].astype(float) + found["dora"].tensors[name]) / 2 for name in shared
    }


def test_a_site_learns_the_rounds_that_are_asked_for_and_enters_those_that_it_missed(garden):
    first, began = model(1.0)
    later, went_on = model(0.9)
    _, last = model(0.8)

    async def story():
        partial = await garden.ask(Wanted(1, began))
        weight, mean = learned(first, 1)
        assert (partial.clients, partial.weight, partial.base_version) == (2, weight, 0)
        assert all(abs(partial.means[name] - mean[name]).max() < 1e-6 for name in mean)
        again = await garden.ask(Wanted(1, began))
        assert tensors.equal(again.means, partial.means), "asked for twice, it is learned once"

        partial = await garden.ask(Wanted(4, went_on))  # the fleet above learned rounds 2 and 3 without this site
        assert partial.base_version == 3
        assert all(abs(partial.means[name] - mean).max() < 1e-6 for name, mean in learned(later, 4)[1].items())

        with pytest.raises(WireError, match="has learned 3 rounds, and round 2 is asked for from another"):
            await garden.ask(Wanted(2, began))
        with pytest.raises(WireError, match="has learned 3 rounds, and round 4 is asked for from another"):
            await garden.ask(Wanted(4, last))
        order = Order("extend", rounds=2)
        await garden.service.order(order)
        with pytest.raises(ConfigError, match="this is a site; how long it learns"):
            await asyncio.wrap_future(order.answer)
        assert await asyncio.to_thread(garden.above.ask, Wanted(RUN.rounds + 1, last, final=True)) == b""
        assert garden.store.fleets.get("garden").round == RUN.rounds, "it has the last model when that is said"

    garden.run(story)
    assert [t["round"] for t in garden.told if t["event"] == "summed"] == [1, 4]
    fleet = garden.store.fleets.get("garden")
    assert (fleet.round, fleet.status, garden.blobs.get(fleet.model_digest)) == (RUN.rounds, "done", last)
    assert garden.counted() == {1: [*NAMES], 2: [], 3: [], 4: [*NAMES], 5: [], 6: []}


def test_a_round_that_is_not_wanted_any_more_is_called_off_and_holds_nothing_up(garden):
    began, went_on, last = (model(factor)[1] for factor in (1.0, 0.9, 0.8))

    async def story():
        garden.dora_may_learn.clear()
        old = asyncio.ensure_future(garden.ask(Wanted(1, began)))
        await garden.told_of("received", device="carl", outcome="stored")
        asked = asyncio.ensure_future(garden.ask(Wanted(2, went_on)))
        with pytest.raises(WireError, match="round 1 of this site is not wanted any more"):
            await old
        await garden.told_of("round-failed", attempt=1, reason="the fleet above went on to round 2")
        garden.dora_may_learn.set()
        partial = await asked
        assert (partial.clients, partial.base_version) == (2, 1)
        assert await asyncio.to_thread(garden.above.ask, Wanted(RUN.rounds + 1, last, final=True)) == b""
        assert garden.store.fleets.get("garden").round == RUN.rounds, "it has the last model when that is said"

    garden.run(story)
    assert garden.counted() == {1: [], 2: [*NAMES], 3: [], 4: [], 5: [], 6: []}


def test_a_site_that_is_told_to_end_waits_for_nobody_above(garden):
    """Its sum had gone up: it waited for the next model, for ever where the fleet above was away."""

    async def story():
        serving = asyncio.create_task(garden.serve())
        agents = [asyncio.create_task(garden.agent(name)) for name in NAMES]
        await garden.ask(Wanted(1, model(1.0)[1]))
        try:
            async with asyncio.timeout(60):
                garden.service.stop()
                await serving
        finally:
            for agent in agents:
                agent.cancel()
            await asyncio.wait(agents)
            garden.above.end()

    asyncio.run(story())
    (kept,) = garden.store.attempts.unclosed("garden")
    assert (kept.round, kept.failure) == (1, None), "a start announces it again"


def test_a_site_does_not_wait_for_a_device_until_it_is_too_late_above(garden):
    began, last = (model(factor)[1] for factor in (1.0, 0.8))
    garden.quorum = 0.5

    async def story():
        garden.dora_may_learn.clear()
        partial = await garden.ask(Wanted(1, began, seconds=2.5))  # its own deadline_s is 600
        assert partial.clients == 1
        garden.dora_may_learn.set()
        await asyncio.to_thread(garden.above.ask, Wanted(RUN.rounds + 1, last, final=True))

    garden.run(story)
    assert garden.counted()[1] == ["carl"]
