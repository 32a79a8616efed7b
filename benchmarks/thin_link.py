"""What a device sends and receives over a thin link, beside what it has to: `benchmarks/thin_link.py --rate 64`.

A Mosquitto and a coordinator; the device reaches them through a link that lets so many kB a second through, each way.
Two rounds of FedAvg with imu_cnn, whose model and update have about 450 kB, and the usual `retry_s` of two seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from talaria import time
from talaria.federated import global_model, run_model
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.types import Recipe, Samples
from talaria_bench.fleet.thin_link import thin
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, Given

RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3, seed=1), algorithm="fedavg", rounds=2, recipe=Recipe(batch=8))


def samples() -> DeviceData:
    """Eighteen windows of three classes."""
    y = np.arange(18) % 3
    x = np.random.default_rng(1).standard_normal((18, 6, 32)).astype(np.float32) + y[:, None, None].astype(np.float32)
    return DeviceData(Samples.of(x[:12], y[:12]), Samples.of(x[12:], y[12:]))


async def learned(folder: Path, url: str, rate: float, told: list[dict[str, Any]]) -> None:
    """Both rounds; all that coordinator and device tell goes to ``told``."""
    config = FleetConfig(name="watch", run=RUN, state=folder, members=("anna",), stay=False, deadline_s=0)
    with Store(folder / "db") as store, ThreadPoolExecutor(1) as worker:
        service = Service(config, store, FolderBlobs(folder / "blobs"), report=told.append)
        async with thin(urlsplit(url).port or 1883, rate) as port, asyncio.TaskGroup() as group:
            own = DeviceConfig(
                device="anna", fleet="watch", broker=f"mqtt://127.0.0.1:{port}", state=folder / "anna",
                source=Given(samples),
            )  # fmt: skip
            group.create_task(service.run(url))
            group.create_task(Agent(own, worker=worker, report=told.append).run())


def main() -> None:
    """One run for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, nargs="+", default=[64.0, 16.0], help="kB a second, each way")
    model = len(global_model.encode_model(run_model.first_shared(RUN)))
    for rate in parser.parse_args().rate:
        told: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as name, open_broker("mosquitto", state=Path(name) / "broker") as broker:
            begin = time.monotonic()
            asyncio.run(learned(Path(name), broker.url, 1000 * rate, told))
            seconds = time.monotonic() - begin
        updates = [item["update_bytes"] for item in told if item["event"] == "trained"]
        traffic = [item["traffic"] for item in told if item["event"] == "received"]
        up, down = (sum(one[way] for one in traffic) for way in ("up", "down"))
        least = (sum(updates) + 3 * model) / (1000 * rate)
        print(
            json.dumps(
                {
                    "kB_a_second": rate,
                    "up_of_updates": round(up / sum(updates), 3),
                    "down_of_models": round(down / (len(traffic) * model), 3),
                    "seconds": round(seconds, 1),
                    "of_least": round(seconds / least, 2),
                }
            )
        )


if __name__ == "__main__":
    main()
