"""A coordinator that never imports torch, and devices that train with programs: to the byte as simulated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from talaria import tensors
from talaria.federated.rounds import layout_of
from talaria.model.state import state_of

RUNS = {"fedrep": {"head_epochs": 3, "final_epochs": 1}, "heart_pfl": {}}
COMMAND = "from talaria.cli.main import main; main()"
TORCHLESS = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "functorch"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Refused())
"""


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Coordinator:
    """``talaria coordinator serve`` as a service starts it: a process of its own, from nothing."""

    def __init__(self, config):
        command = [sys.executable, "-c", COMMAND, "coordinator", "serve", str(config), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())

    def wait_for(self, event):
        for line in self.process.stdout:
            told = json.loads(line)
            if told["event"] == event:
                return told
        raise AssertionError(f"it ended with {self.process.wait(20)} before {event}")

    @property
    def libraries(self):
        return {Path(line.split()[-1]).name for line in Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()}

    def close(self):
        self.process.kill()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.mark.parametrize("algorithm", ["heart_pfl"])
def test_devices_that_train_with_programs_learn_what_is_simulated(fleet, a_run, algorithm):
    run = a_run(algorithm, rounds=2, **RUNS[algorithm])
    narrow = {g: max(8, n // 2) for g, n in layout_of(run.spec).sizes.items()}
    one = fleet(run, widths={"anna": narrow}, engine="onnx")
    coordinator = Coordinator(one.config)
    try:
        ready = coordinator.wait_for("ready")
        agents = one.agents(ready["broker"])
        coordinator.wait_for("round-closed")
        assert not any("torch" in name for name in coordinator.libraries)
        assert agents.end() == 0
        assert coordinator.process.wait(90) == 0
    finally:
        coordinator.close()
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device


def test_a_coordinator_that_has_its_blueprint_starts_where_there_is_no_torch(fleet, a_run):
    one = fleet(a_run(rounds=1))
    first = Coordinator(one.config)
    try:
        first.wait_for("started")
        [blueprint] = (one.folder / "state").glob("blueprint-*")
    finally:
        first.close()
    command = [sys.executable, "-c", TORCHLESS + COMMAND, "coordinator", "serve", str(one.config), "--json"]

    def served():
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True, env=environment()) as it:
            events = []
            for line in it.stdout:
                events.append(json.loads(line)["event"])
                if events[-1] == "started":
                    it.kill()
            return events, it.stderr.read()

    assert served()[0][-1] == "started"
    blueprint.write_bytes(blueprint.read_bytes()[:-9])  # damaged: made again, by a process that has torch
    assert served()[0][-1] == "started"


class Agents:
    """``talaria edge run`` in a process that cannot import torch."""

    def __init__(self, files):
        command = [sys.executable, "-c", TORCHLESS + COMMAND, "edge", "run", *map(str, files), "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment())

    def end(self):
        out, errors = self.process.communicate(timeout=90)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()], errors


@pytest.mark.parametrize("algorithm", ["fedrep"])
def test_devices_without_torch_learn_from_a_kit_what_is_simulated(fleet, a_run, algorithm):
    run = a_run(algorithm, rounds=2, **RUNS.get(algorithm, {}))
    narrow = {g: max(8, n // 2) for g, n in layout_of(run.spec).sizes.items()}
    one = fleet(run, widths={"anna": narrow}, engine="onnx")
    kit = one.folder / "watch.kit"
    made = [sys.executable, "-c", COMMAND, "programs", "kit", str(one.config), "--out", str(kit)]
    subprocess.run(made, check=True, env=environment(), stdout=subprocess.DEVNULL)
    coordinator = Coordinator(one.config)
    try:
        broker = coordinator.wait_for("ready")["broker"]
        files = [one.device_config(device, broker) for device in one.devices]
        for file in files:
            file.write_text(file.read_text().replace('engine = "onnx"', 'engine = "onnx"\nkit = "watch.kit"'))
        agents = Agents(files)
        try:
            status, events, errors = agents.end()
        finally:
            agents.process.kill()
        assert status == 0, (errors, events[-4:])
        assert coordinator.process.wait(90) == 0
    finally:
        coordinator.close()
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    members = one.members()
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device
        done = json.loads((one.state_of(device) / "result.json").read_text())
        with safe_open(done["personal"], framework="numpy") as found:
            served = {key: found.get_tensor(key) for key in found.keys()}  # noqa: SIM118 - of a file, no dict
        wanted = state_of(simulated.personal(members[device]))
        assert served.keys() == wanted.keys()
        assert all(np.array_equal(served[key], wanted[key]) for key in wanted), device


def test_a_device_without_torch_and_kit_says_what_to_do(fleet, a_run):
    one = fleet(a_run(rounds=1), engine="onnx")
    coordinator = Coordinator(one.config)
    try:
        agents = Agents([one.device_config("anna", coordinator.wait_for("ready")["broker"])])
        try:
            status, events, _ = agents.end()
        finally:
            agents.process.kill()
    finally:
        coordinator.close()
    assert status == 1
    [told] = [item["error"] for item in events if item["event"] == "failed"]
    assert "talaria programs kit" in told
    assert "talaria[torch]" in told
