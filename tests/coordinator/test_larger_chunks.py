"""How large the pieces of a model are: as the operator asks, where the broker takes it; it may change under way."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from servers import serving_small_packets

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.protocol.coordinator.state import Rules, credit_of
from talaria.types import Recipe, Samples
from talaria.wire.chunks import CHUNK, ROOM
from talaria.wire.frames import MAX_PAYLOAD
from talaria_coordinator.broker import mosquitto
from talaria_coordinator.config.fleet import FleetConfig, load_config
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given

RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3, seed=1), algorithm="fedavg", rounds=2, recipe=Recipe(batch=8))
MODEL = 458_756
"""Bytes of its model, as a fleet sends it."""


def data_of(seed):
    y = torch.arange(18) % 3
    x = torch.randn(18, 6, 32, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


class Fleet:
    """Two devices and their coordinator, which may be started with other chunks. ``sizes`` are of what it sent."""

    def __init__(self, folder, url, worker):
        self.folder, self.url, self.worker = folder, url, worker
        self.told, self.sizes, self.changed = [], [], asyncio.Event()
        self.may_train = threading.Event()
        self.may_train.set()

    def tell(self, item):
        self.told.append(item)
        if item["event"] == "training":
            self.worker.submit(self.may_train.wait)
        self.changed.set()

    def count(self, event):
        return sum(item["event"] == event for item in self.told)

    async def told_of(self, event, times):
        while self.count(event) < times:
            self.changed.clear()
            await self.changed.wait()

    def service(self, chunk, store):
        config = FleetConfig(
            name="watch", run=RUN, state=self.folder, members=("anna", "bela"), retry_s=0.2, stay=False, chunk=chunk
        )
        return Service(config, store, FolderBlobs(self.folder / "blobs"), report=self.tell, sent=self.sizes.append)

    async def device(self, seed, name):
        folder, source = self.folder / name, Given(lambda: data_of(seed))
        own = DeviceConfig(device=name, fleet="watch", broker=self.url, state=folder, retry_s=0.2, source=source)
        return await Agent(own, worker=self.worker, report=self.tell).run()


def learn(tmp_path, url, live):
    """Two rounds, of which ``live(fleet, store)`` runs the coordinator; each update counts once."""

    async def go():
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for seed, name in enumerate(("anna", "bela")):
                group.create_task(fleet.device(seed, name))
            with Store(tmp_path / "db") as store:
                await live(fleet, store)

    with ThreadPoolExecutor(1) as worker:
        fleet = Fleet(tmp_path, url, worker)
        asyncio.run(go())
    assert fleet.count("round-closed") == 2
    assert {item["outcome"] for item in fleet.told if item["event"] == "received"} == {"stored"}
    return fleet


@pytest.mark.parametrize(("takes", "chunk"), [(2**21, MAX_PAYLOAD), (300_000, 300_000 - ROOM)])
def test_pieces_are_as_large_as_asked_for_and_as_the_broker_takes(tmp_path, takes, chunk):
    with serving_small_packets(tmp_path, takes) as url:
        fleet = learn(tmp_path, url, lambda fleet, store: fleet.service(MAX_PAYLOAD, store).run(url))
    assert {item["chunk"] for item in fleet.told if item["event"] == "connected" and "fleet" in item} == {chunk}
    most = min(chunk, MODEL)
    assert most <= max(fleet.sizes) <= most + ROOM


def test_an_update_that_waits_is_cut_anew_where_pieces_are_smaller_after_a_restart(tmp_path):
    async def live(fleet, store):
        first = fleet.service(MAX_PAYLOAD, store)
        serving = asyncio.create_task(first.run(fleet.url))
        fleet.may_train.clear()
        await fleet.told_of("training", 2)
        first.stop()
        await serving
        fleet.may_train.set()
        await fleet.told_of("trained", 2)
        await fleet.service(CHUNK, store).run(fleet.url)

    with serving_small_packets(tmp_path, 2**21) as url:
        fleet = learn(tmp_path, url, live)
    assert fleet.count("trained") == 4


def test_larger_pieces_take_no_more_memory():
    assert [credit_of(kib << 10) for kib in (4, 120, 240, 400, 1024)] == [8, 8, 4, 2, 2]
    for chunk in (CHUNK, 2 * CHUNK, MAX_PAYLOAD):
        assert credit_of(chunk) * chunk <= max(Rules.credit * CHUNK, 2 * chunk)


def test_a_mosquitto_of_ours_keeps_all_that_devices_are_asked_for(tmp_path):
    (line,) = (
        x for x in mosquitto.config("127.0.0.1", 1883, tmp_path).splitlines() if x.startswith("max_queued_bytes")
    )
    assert int(line.split()[1]) >= Rules.max_asked + 4 * MAX_PAYLOAD  # and all that is said beside


def test_a_mosquitto_of_ours_takes_what_is_asked_for(tmp_path):
    text = mosquitto.config("127.0.0.1", 1883, tmp_path, chunk=MAX_PAYLOAD)
    (line,) = (line for line in text.splitlines() if line.startswith("max_packet_size"))
    assert int(line.split()[1]) - ROOM >= MAX_PAYLOAD


@pytest.mark.parametrize("kib", [3, 1025, 120.5, "120"])
def test_a_size_that_cannot_be_is_named(tmp_path, kib):
    path = tmp_path / "fleet.toml"
    shown = f'"{kib}"' if isinstance(kib, str) else kib
    learned = '[run]\nalgorithm="fedper"\ndefaults="smartwatch"\n[run.spec]\ninput_shape=[6,100]\nclasses=7\n'
    path.write_text(f'[fleet]\nname="watch"\ndevices=2\n[broker]\nchunk_kib={shown}\n{learned}')
    with pytest.raises(ConfigError, match=r"chunk_kib.*(4|whole)"):
        load_config(path)
