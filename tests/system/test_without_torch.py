"""A coordinator that never imports torch, and devices that train with programs: to the byte as simulated."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from servers import serving_small_packets
from torchless import TORCHLESS, torchless

from talaria import tensors
from talaria.federated import plan_compat
from talaria.federated.run_model import layout_of
from talaria.model.state import state_of
from talaria_coordinator.cli.orders import given
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.storage.store import Store
from talaria_export.runtime.verify import verify_bundle

RUNS = {"fedrep": {"head_epochs": 3, "final_epochs": 1}, "heart_pfl": {}}
COMMAND = "from talaria.cli.main import main; main()"


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Coordinator:
    """``talaria coordinator serve`` as a service starts it: a process of its own, from nothing."""

    def __init__(self, config, **beside):
        command = [sys.executable, "-c", COMMAND, "coordinator", "serve", str(config), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment() | beside)

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
    with Store(one.folder / "state" / "coordinator.db") as store:
        name = load_config(one.config).name
        sent = [attempt.down for attempt in store.attempts.of(name) if attempt.failure is None]
    # A link that stalls is sent some of it again; of what a device has an older one of, it may be sent the changes.
    assert sent[0] >= simulated.history[0].bytes_down
    assert all(sent)


class Agents:
    """``talaria edge run`` in a process that cannot import torch."""

    def __init__(self, files):
        words = ("edge", "run", *map(str, files), "--json")
        self.process = torchless(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())

    def wait_for(self, event):
        for line in self.process.stdout:
            told = json.loads(line)
            if told["event"] == event:
                return told
        raise AssertionError(f"ended with {self.process.wait(20)} before {event}: {self.process.stderr.read()[-2000:]}")

    def end(self):
        out, errors = self.process.communicate(timeout=90)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()], errors

    @property
    def libraries(self):
        return {Path(line.split()[-1]).name for line in Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()}

    @property
    def anonymous_mb(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon:"))

    def kill(self):
        """-9, where it has not ended."""
        self.process.kill()
        self.process.wait(20)
        self.process.stdout.close()
        self.process.stderr.close()


def without_engine(file):
    file.write_text(file.read_text().replace('engine = "onnx"\n', f'bundle = "{file.stem}.talaria"\n'))
    return file


def test_devices_without_torch_are_given_a_kit_and_learn_what_is_simulated(fleet, a_run, tmp_path):
    """Their device.toml says nothing of it; the kit comes in many small pieces, and they are killed in its midst."""
    run = a_run("fedrep", rounds=2, **RUNS["fedrep"])
    narrow = {g: max(8, n // 2) for g, n in layout_of(run.spec).sizes.items()}
    with serving_small_packets(tmp_path, 8000) as url:
        one = fleet(run, widths={"anna": narrow}, engine="onnx", broker=url)
        coordinator = Coordinator(one.config)
        try:
            broker = coordinator.wait_for("ready")["broker"]
            files = [without_engine(one.device_config(device, broker)) for device in one.devices]
            agents = Agents(files)
            try:
                parts = [one.state_of(device) for device in one.devices]
                while not any(part.glob("kit-*.part") for part in parts) and agents.process.poll() is None:
                    time.sleep(0.01)
            finally:
                agents.kill()
            agents = Agents(files)
            try:
                status, events, errors = agents.end()
            finally:
                agents.kill()
            assert status == 0, (errors, events[-4:])
            assert not any("torch" in name for name in coordinator.libraries)
            assert coordinator.process.wait(90) == 0
        finally:
            coordinator.close()
    simulated, members = one.simulated(), one.members()
    assert tensors.equal(one.shared(), simulated.shared)
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device
        assert [path.name for path in one.state_of(device).glob("kit*")] == ["kit.bin"]
        done = json.loads((one.state_of(device) / "result.json").read_text())
        with safe_open(done["personal"], framework="numpy") as found:
            served = {key: found.get_tensor(key) for key in found.keys()}  # noqa: SIM118 - of a file, no dict
        wanted = state_of(simulated.personal(members[device]))
        assert served.keys() == wanted.keys()
        assert all(np.array_equal(served[key], wanted[key]) for key in wanted), device
        assert done["deployed"]
        assert done["test"]["max_abs_diff"] <= 1e-4
        assert verify_bundle(done["bundle"]).ok


def test_an_agent_without_torch_carries_what_it_trains_with_and_little_else(fleet, a_run):
    """No keys, no secure sums, no words for people: their libraries are not in it after it has learned."""
    one = fleet(a_run("fedrep", rounds=2, **RUNS["fedrep"]), devices=("anna",), engine="onnx")
    coordinator = Coordinator(one.config)
    try:
        file = one.device_config("anna", coordinator.wait_for("ready")["broker"])
        text = file.read_text().replace('engine = "onnx"\n', "stay = true\n")
        file.write_text(f"{text}[guard]\nmin_battery = 0.0\nmax_celsius = 150\n")  # it looks before it trains
        agents = Agents([file])
        try:
            assert agents.wait_for("done")["rounds"] == 2
            libraries, anonymous = agents.libraries, agents.anonymous_mb
        finally:
            agents.kill()
    finally:
        coordinator.close()
    assert any(name.startswith("onnxruntime") for name in libraries)
    odd = ("_rust.abi3", "_pydantic_core", "torch", "onnx_cpp2py")  # cryptography's is the first
    assert not [name for name in libraries if name.startswith(odd)]
    assert anonymous < 75  # of private pages; torch alone has 300


def test_a_device_without_torch_plans_for_itself_and_learns_as_planned(fleet, a_run):
    """Widths by a budget in device.toml, from the kit; what it sends and keeps is what that plan simulates."""
    one = fleet(a_run("fedrep", rounds=2, **RUNS["fedrep"]), devices=("anna", "bela"), engine="onnx")
    coordinator = Coordinator(one.config)
    try:
        broker = coordinator.wait_for("ready")["broker"]
        files = [one.device_config(device, broker) for device in one.devices]
        text = files[0].read_text().replace('engine = "onnx"\n', "").replace("[plan.widths]", "[budget]")
        files[0].write_text(text + "latency_ms = 1000\nbundle_mb = 0.1\n")
        agents = Agents(files)
        try:
            status, events, errors = agents.end()
        finally:
            agents.kill()
        assert status == 0, (errors, events[-4:])
        assert coordinator.process.wait(90) == 0
    finally:
        coordinator.close()
    (planned,) = [told for told in events if told["event"] == "planned"]
    assert planned["device"] == "anna"
    assert planned["predicted"]["bundle_mb"] <= 0.1
    assert planned["predicted"]["latency_ms"] > 0
    made = plan_compat.read(one.state_of("anna") / "plan.json")
    assert made.widths == planned["widths"]
    one.widths["anna"] = made.widths
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for device in one.devices:
        assert tensors.equal(one.private(device), simulated.private[device]), device


def test_devices_without_torch_keep_their_kit_when_a_run_goes_on_and_get_the_next_runs(fleet, a_run):
    one = fleet(a_run("fedper", rounds=1), devices=("anna",), engine="onnx")
    config, kits = load_config(one.config), []

    def learned():
        coordinator = one.serve()  # whoever has torch makes its kits sooner
        file = one.device_config("anna", coordinator.wait_for("ready")["broker"])
        file.write_text(file.read_text().replace('engine = "onnx"\n', ""))
        agents = Agents([file])
        try:
            status, events, errors = agents.end()
        finally:
            agents.kill()
        assert status == 0, (errors, events[-4:])
        assert coordinator.end() == 0
        kits.append((one.state_of("anna") / "kit.bin").read_bytes())
        return {told["event"] for told in events}

    assert "kit-wanted" in learned()
    given(config, Order("extend", rounds=1))
    assert "kit-wanted" not in learned()
    given(config, Order("next", rounds=1, classes=4))
    one.write_data("anna", 0, classes=4)
    assert "kit-wanted" in learned()
    assert kits[0] == kits[1] != kits[2]
    assert len(one.private("anna")["head.weight"]) == 4


def test_where_nobody_has_torch_the_device_and_the_operator_are_told_what_to_do(fleet, a_run):
    """A coordinator that has its blueprint starts without torch; a damaged one is made again, where torch is."""
    one = fleet(a_run(rounds=1), engine="onnx")
    first = Coordinator(one.config)
    try:
        first.wait_for("started")
        [blueprint] = (one.folder / "state").glob("blueprint-*")
    finally:
        first.close()
    hidden = one.folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(TORCHLESS)  # its processes find no torch either
    coordinator = Coordinator(one.config, PYTHONPATH=str(hidden))
    try:
        agents = Agents([without_engine(one.device_config("anna", coordinator.wait_for("ready")["broker"]))])
        try:
            told = agents.wait_for("error")["error"]
        finally:
            agents.kill()
        assert "talaria programs kit FLEET.TOML" in told
        assert "[fleet] kit" in told
    finally:
        coordinator.close()
    blueprint.write_bytes(blueprint.read_bytes()[:-9])
    again = Coordinator(one.config)
    try:
        again.wait_for("started")
    finally:
        again.close()
