"""Windows without a label, of one file: a fleet over MQTT calibrates BatchNorm on them as its simulation does."""

import asyncio
import gc
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import talaria
from talaria import tensors
from talaria.cli.main import app
from talaria_coordinator.broker import open_broker
from talaria_coordinator.config.fleet import load_config as fleet_config
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.agent.agent import Agent
from talaria_edge.config import load_config as device_config
from talaria_edge.storage.state import DeviceStore

ALGORITHM = "ffgg"
"""Its heads are fitted on the calibrated body from the first round on, so that the global model depends on it."""


@pytest.fixture
def broker(tmp_path):
    """Of its own for each fleet: nothing that another left there is waited for."""
    with open_broker("mosquitto", state=tmp_path / "broker") as running:
        yield running.url


async def learned(folder, url, devices):
    """The digest of the last global model of the fleet in ``folder``, and each device's private tensors."""
    config = replace(fleet_config(folder / "fleet.toml"), retry_s=0.3)
    worker = ThreadPoolExecutor(1)
    with Store(folder / "db") as store:
        try:
            agents = [
                Agent(replace(device_config(folder / f"{who}.toml"), broker=url, retry_s=0.3), worker=worker)
                for who in devices
            ]
            async with asyncio.timeout(120):
                await asyncio.gather(
                    Service(config, store, FolderBlobs(folder / "blobs")).run(url), *(a.run() for a in agents)
                )
        finally:
            worker.shutdown()
        digest = store.fleets.get(ALGORITHM).model_digest
    private = {}
    for who in devices:
        with DeviceStore(folder / "state" / "devices" / who, ALGORITHM, who) as mine:
            private[who] = mine.private().tensors
    return digest, private


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.collect()


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_fleet_with_unlabelled_windows_learns_what_was_simulated(tmp_path, broker, one_thread, engine):
    draw, y = np.random.default_rng(0), np.tile(np.arange(3), 20)
    x = (draw.normal(size=(60, 6, 32)) + y[:, None, None]).astype(np.float32)
    split, client = np.tile([0, 0, 0, 1, 2, 3], 10), np.repeat(["anna", "bela"], 30)
    mine, folder = tmp_path / "mine.npz", tmp_path / "fleet"
    np.savez(mine, x=x, y=np.where(split == 3, -1, y), split=split, client=client)
    words = ["simulate", "-a", ALGORITHM, "-d", f"npz:{mine}", "--rounds", "2", "--engine", engine, "--json"]
    words += ["--write-fleet", str(folder), "--save", str(tmp_path / "kept")]
    done = CliRunner().invoke(app(words), words)
    assert done.exit_code == 0, done.output

    digest, private = asyncio.run(learned(folder, broker, ("anna", "bela")))
    assert digest == json.loads(done.stdout)["model_digest"]
    again = talaria.resume(tmp_path / "kept")
    for who, own in private.items():
        assert tensors.equal(own, again.learned.private[who]), who

    data = talaria.data.load(f"npz:{mine}")
    assert [len(one.unlabelled) for one in data.clients.values()] == [5, 5]
    without = {name: replace(one, unlabelled=None) for name, one in data.clients.items()}
    other = talaria.simulate(ALGORITHM, replace(data, clients=without), rounds=2, engine=engine)
    assert not tensors.equal(other.learned.shared, again.learned.shared)
