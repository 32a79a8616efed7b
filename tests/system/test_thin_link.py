"""Over a thin link a piece takes longer than what is waited for elsewhere: none is sent twice for that."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from servers import serving_small_packets

from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.types import Recipe, Samples
from talaria.wire.chunks import CHUNK
from talaria_bench.fleet.thin_link import thin
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given

RATE = 250_000
"""Bytes a second, each way."""
RETRY_S = 0.05
MODEL = 458_756
BESIDE = 100_000 + 2 * CHUNK
"""Bytes of all that is said beside, and of two pieces that a busy machine may ask for too late."""
RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3, seed=1), algorithm="fedavg", rounds=1, recipe=Recipe(batch=8))


def samples():
    y = torch.arange(18) % 3
    x = torch.randn(18, 6, 32, generator=torch.Generator().manual_seed(1)) + y[:, None, None]
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


def test_what_takes_long_is_sent_once(tmp_path):
    told = []

    async def learn(url):
        config = FleetConfig(
            name="watch", run=RUN, state=tmp_path, members=("anna",), retry_s=RETRY_S, stay=False, deadline_s=0
        )
        service = Service(config, store, FolderBlobs(tmp_path / "blobs"), report=told.append)
        async with thin(int(url.rsplit(":", 1)[1]), RATE) as port, asyncio.timeout(120), asyncio.TaskGroup() as group:
            own = DeviceConfig(
                device="anna", fleet="watch", broker=f"mqtt://127.0.0.1:{port}", state=tmp_path / "anna",
                retry_s=RETRY_S, source=Given(samples),
            )  # fmt: skip
            group.create_task(service.run(url))
            group.create_task(Agent(own, worker=worker, report=told.append).run())

    with (
        serving_small_packets(tmp_path, 2**21) as url, Store(tmp_path / "db") as store, ThreadPoolExecutor(1) as worker
    ):  # fmt: skip
        asyncio.run(learn(url))
    (trained,) = (item for item in told if item["event"] == "trained")
    (received,) = (item for item in told if item["event"] == "received")
    assert received["outcome"] == "stored"
    assert trained["update_bytes"] <= received["traffic"]["up"] <= trained["update_bytes"] + BESIDE
    assert MODEL <= received["traffic"]["down"] <= MODEL + BESIDE
