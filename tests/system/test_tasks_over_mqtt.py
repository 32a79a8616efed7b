"""A regression as real processes over Mosquitto: the bytes of the simulation, and bundles that give numbers."""

import json
import subprocess

import numpy as np
import pytest
from torchless import torchless

from talaria_coordinator.storage.store import Store
from talaria_export import Predictor, verify_bundle


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_fleet_learns_numbers_and_serves_them(fleet, command, tmp_path, engine):
    draw = np.random.default_rng(0)
    x = draw.normal(0, 1, (90, 6)).astype(np.float32)
    # Whole numbers, as a meter gives them: nothing in the file says that they are no classes.
    y = np.rint(100 + 40 * x[:, 0] + np.repeat([0, 60, 120], 30))
    mine = tmp_path / "mine.npz"
    np.savez(mine, x=x, y=y, client=np.repeat(["anna", "bela", "carl"], 30))
    folder = tmp_path / "fleet"
    words = ("-a", "ditto", "-d", f"npz:{mine}", "--model", "mlp", "--task", "regression", "--rounds", "2")
    words += ("--engine", engine)
    words += (
        "--recipe",
        "optimizer=adamw",
        "--recipe",
        "schedule=cosine",
        "--recipe",
        "clip=1",
        "--recipe",
        "warmup=1",
    )
    status, out, err = command("simulate", *words, "--write-fleet", folder, "--json")
    assert status == 0, err
    told = json.loads(out)
    assert 'task = "regression"' in (folder / "fleet.toml").read_text()
    for path in folder.glob("*.toml"):
        if path.name != "fleet.toml":
            bundle = f'[device]\nbundle = "{tmp_path / path.stem}.talaria"\n'
            path.write_text(path.read_text().replace("[device]\n", bundle, 1))

    one = fleet(devices=())
    coordinator = one._start("coordinator", "serve", folder / "fleet.toml", "--json")
    coordinator.wait_for("ready")
    files = sorted(folder.glob("*.toml"))
    if engine == "torch":
        agents = one._start("edge", "run", *files, "--json")
        assert agents.end() == 0, agents.errors
    else:  # as on a device that has no torch
        with torchless("edge", "run", *map(str, files), "--json", stdout=subprocess.PIPE) as agents:
            said, _ = agents.communicate(timeout=240)
        assert agents.returncode == 0, said[-3000:]
    assert coordinator.end() == 0, coordinator.errors
    store = Store(folder / "state" / "coordinator" / "coordinator.db")
    try:
        assert store.fleets.get("ditto").model_digest == told["model_digest"], (
            "fleet and simulation learned other bytes"
        )
    finally:
        store.close()

    result = json.loads((folder / "state" / "devices" / "carl" / "result.json").read_text())
    assert result["deployed"] is True, result
    assert result["test"]["accuracy"] == pytest.approx(told["clients"]["carl"]["accuracy"], abs=1e-3)
    predictor = Predictor(tmp_path / "carl.talaria")
    with np.load(folder / "data" / "carl.npz") as stored:
        answers = predictor(stored["x"])
        assert answers.values.shape == (30, 1)
        assert abs(float(answers.values.mean()) - float(stored["y"].mean())) < 40
        assert verify_bundle(tmp_path / "carl.talaria", samples=(stored["x"], stored["y"]), seconds=0).ok
