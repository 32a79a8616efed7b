"""``talaria simulate --write-fleet``: the folder that it writes learns what was simulated, as real processes."""

import json

import numpy as np
import pytest

from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria_coordinator.storage.store import Store


@pytest.fixture
def mine(tmp_path):
    """Three clients with names of their own, one of which no device may have, and samples that any machine makes
    alike."""
    draw = np.random.default_rng(0)
    y = np.tile(np.arange(3), 30)
    x = draw.normal(0, 1, (90, 6, 32)).astype(np.float32)
    x[:, 0] += y[:, None]
    path = tmp_path / "mine.npz"
    np.savez(path, x=x, y=np.array(["rest", "walk", "run"])[y], client=np.repeat(["Anna Jäger", "bela", "carl"], 30))
    return path


def test_the_written_fleet_learns_what_was_simulated(fleet, command, mine, tmp_path):
    spec = ModelSpec("imu_cnn", (6, 32), 3, seed=4)
    plan = tmp_path / "small.json"
    plan.write_text(json.dumps(Plan(widths={"conv1": 16}, batch=8, model=spec.to_json()).to_json()))
    folder = tmp_path / "fleet"
    words = ("-a", "fedavg_ft", "-d", f"npz:{mine}", "--rounds", "2", "--seed", "4", "--aggregator", "median:f=1")
    plans = ("--plan", f"bela={plan}")
    status, out, err = command("simulate", *words, *plans, "--lr", "0.03", "--write-fleet", folder, "--json")
    assert status == 0, err
    assert f"talaria edge run {folder}/*.toml" in err
    told = json.loads(out)
    assert told["recipe"]["lr"] == 0.03

    one = fleet(devices=())
    coordinator = one._start("coordinator", "serve", folder / "fleet.toml", "--json")
    coordinator.wait_for("ready")
    agents = one._start("edge", "run", *sorted(folder.glob("*.toml")), "--json")
    assert agents.end() == 0, agents.errors
    assert coordinator.end() == 0, coordinator.errors
    store = Store(folder / "state" / "coordinator" / "coordinator.db")
    try:
        assert store.fleets.get("fedavg_ft").model_digest == told["model_digest"], (
            "the fleet's last global model is not the simulation's"
        )
    finally:
        store.close()
    parameters = {
        name: json.loads((folder / "state" / "devices" / name / "result.json").read_text())["parameters"]
        for name in told["clients"]
    }
    assert parameters == {name: client["parameters"] for name, client in told["clients"].items()}
    (anna,) = json.loads((folder / "names.json").read_text())
    assert parameters["bela"] < parameters[anna]
