"""A coordinator that has imported torch works a run's model out once, before its threads ask for it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import mypkg

from talaria.federated import run_model
from talaria.federated.run import Run
from talaria.model import prunability
from talaria.model.spec import ModelSpec
from talaria_coordinator.fleet import blueprints


def test_threads_find_what_one_has_worked_out(tmp_path, monkeypatch):
    run = Run(spec=ModelSpec("imu_cnn", (3, 52), 5), algorithm="fedper")
    monkeypatch.setattr(run_model, "_adopted", {})
    survey, asked = prunability.survey, []
    monkeypatch.setattr(prunability, "survey", lambda *given: asked.append(given) or survey(*given))
    assert "torch" in sys.modules
    blueprints.prepare(run, tmp_path)
    assert len(asked) == 1
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (run_model.layout_of(run.spec), run_model.update_schema(run)), range(8)))
    assert len(asked) == 1
    assert all(layout is found[0][0] and schema is found[0][1] for layout, schema in found)


def test_a_run_that_is_extended_has_the_blueprint_that_it_had(tmp_path):
    """Each extension left one more, of the size of the model."""
    run = Run(spec=ModelSpec("mlp", (6,), 3), algorithm="fedavg", rounds=2)
    for one in (run, replace(run, rounds=5), replace(run, rounds=9)):
        blueprints.prepare(one, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


SETTINGS = """
import sys
from pathlib import Path
from talaria_coordinator.config.fleet import load_config
print(load_config(Path(sys.argv[1])).run.spec.name, "torch" in sys.modules)
"""


def test_a_model_of_ones_own_is_not_imported(tmp_path):
    """It held the whole of torch, 550 MB, in a service that promises none, and each command waited for it."""
    fleet = tmp_path / "fleet.toml"
    spec = '[run.spec]\nname = "mypkg.nets:plain"\ninput_shape = [6]\nclasses = 3\n'
    fleet.write_text(f'[fleet]\nname = "a"\ndevices = 2\n[run]\nalgorithm = "fedavg"\nrounds = 1\n{spec}')
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS, str(fleet)],
        env=os.environ | {"PYTHONPATH": str(Path(mypkg.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "mypkg.nets:plain False\n"
