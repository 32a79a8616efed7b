"""A network of three named inputs, one of them a padding mask: real processes learn what was simulated, to the byte."""

import json
import shutil
import subprocess
from pathlib import Path

import mypkg
import numpy as np
import pytest
from nursery import nursery
from torchless import torchless

from talaria import inputs
from talaria_coordinator.storage.store import Store
from talaria_export import Predictor, open_bundle


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_fleet_learns_from_named_inputs_what_was_simulated(tmp_path, monkeypatch, engine):
    shutil.copytree(Path(mypkg.__file__).parent, tmp_path / "mypkg", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"}
    draw, y = np.random.default_rng(0), np.arange(120) % 3
    mask = np.arange(32) < draw.integers(8, 33, 120)[:, None]
    imu = (draw.standard_normal((120, 6, 32)) + 2 * y[:, None, None]) * mask[:, None]
    about = draw.standard_normal((120, 4))
    np.savez("mine.npz", x_imu=imu, x_about=about, x_mask=mask, y=y, client=np.arange(120) // 60)

    def begin(*words):
        return nursery().start(list(words), env)

    words = ("simulate", "-a", "hermes", "-d", "npz:mine.npz", "--model", "mypkg.nets:masked", "--rounds", "2")
    words += ("--engine", engine)
    simulation = begin(*words, "--write-fleet", "watch", "--json")
    out, errors = simulation.communicate(timeout=200)
    assert simulation.returncode == 0, errors
    kept = dict(np.load(tmp_path / "watch" / "data" / "client-0.npz"))
    apart = inputs.apart(kept.pop("x"), {"about": (4,), "imu": (6, 32), "mask": (32,)})  # as a device may keep them
    np.savez(tmp_path / "watch" / "data" / "client-0.npz", **kept, **{f"x_{name}": x for name, x in apart.items()})
    for name in ("client-0", "client-1"):
        path = tmp_path / "watch" / f"{name}.toml"
        text = path.read_text().replace("[device]\n", f'[device]\nbundle = "{name}.talaria"\n', 1)
        # A program needs no leave for the model's code, which is never run here.
        path.write_text(text if engine == "torch" else text.replace('allow = ["mypkg"]', "allow = []"))
    coordinator = begin("coordinator", "serve", "watch/fleet.toml", "--json")
    words = ("edge", "run", "watch/client-0.toml", "watch/client-1.toml", "--json")
    # With programs: where torch cannot be imported.
    agents = (
        begin(*words)
        if engine == "torch"
        else torchless(*words, "--threads", "1", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    )
    try:
        assert agents.wait(200) == 0, agents.stderr.read()
        assert coordinator.wait(100) == 0, coordinator.stderr.read()
    finally:
        for program in (agents, coordinator):
            if program.poll() is None:
                program.kill()
            program.communicate()
    with Store(tmp_path / "watch" / "state" / "coordinator" / "coordinator.db") as store:
        assert store.fleets.get("hermes").model_digest == json.loads(out)["model_digest"]
    bundle = tmp_path / "watch" / "client-0.talaria"
    assert list(open_bundle(bundle).parts) == ["about", "imu", "mask"]
    said = Predictor(bundle)({"imu": imu[:5], "about": about[:5], "mask": mask[:5]})
    assert len(said.labels) == 5
