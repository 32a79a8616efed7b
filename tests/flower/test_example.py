"""`flwr run examples/flower`, as written: Flower's own SuperLink and simulation, to the bytes of `talaria simulate`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import free_port

import talaria
from talaria.federated.global_model import encode_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A home and ports of its own for Flower, as another SuperLink may be there; the one that `flwr run` leaves behind
    is ended."""
    home = str(tmp_path / "home")
    ports = {f"FLWR_LOCAL_{name}_API_PORT": str(free_port()) for name in ("SUPERLINK_HTTP", "CONTROL")}
    own = {"HOME": home, "FLWR_HOME": f"{home}/.flwr", "FLWR_TELEMETRY_ENABLED": "0", "RAY_ADDRESS": "local"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    Path(home).mkdir()
    yield {**os.environ, **own, **ports, "PATH": path, "OMP_NUM_THREADS": "1"}
    for process in psutil.process_iter():
        try:
            left = process.environ().get("FLWR_HOME") == own["FLWR_HOME"]
        except psutil.Error:
            continue
        if left:
            process.terminate()


@pytest.mark.timeout(600)
def test_flwr_run_comes_to_the_bytes_of_a_simulation(environment: dict[str, str], tmp_path: Path) -> None:
    app, saved = tmp_path / "app", tmp_path / "model.safetensors"
    shutil.copytree(EXAMPLE, app)
    with (app / "pyproject.toml").open("a") as file:
        file.write(f'save = "{saved}"\n')  # the last table is Talaria's
    words = [str(app), "--stream", "--federation-config", "num-supernodes=16", "--run-config", "talaria.rounds=2"]
    ran = subprocess.run(["flwr", "run", *words], env=environment, capture_output=True, text=True, check=False)
    assert saved.exists(), ran.stdout[-4000:] + ran.stderr[-2000:]
    expected = talaria.simulate("hermes", "smartwatch", rounds=2, workers=1)
    assert saved.read_bytes() == encode_model(expected.learned.shared)
    assert f"'accuracy': {expected.accuracy.mean}" in ran.stdout
