"""Which engine trains, where it is to be found out, and on which device torch does."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import talaria
from talaria.algorithms import ALGORITHMS
from talaria.cli.main import app
from talaria.data.federated import Federated
from talaria.errors import ConfigError, ModelError
from talaria.federated.run import Member, Run, require_device
from talaria.simulation import pick_engine
from talaria.simulation.pick_engine import pick
from talaria.simulation.run import members_of
from talaria.tensors import equal
from talaria.types import Samples


@pytest.fixture(scope="module")
def data() -> Federated:
    draw = np.random.default_rng(3)
    y = np.tile(np.arange(3), 20)
    x = draw.normal(size=(60, 6, 32)) + y[:, None, None]
    return Federated.from_arrays(x, y, np.repeat(["anna", "bela"], 30))


class Clock:
    """A clock of CPU time that a round on each engine moves by so much."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.now, self.asked = 0.0, list[str]()
        monkeypatch.setattr(pick_engine.time, "process_time", lambda: self.now)

        def participate(run: Run, member: Member, *rest: object) -> None:
            assert run.recipe.most_steps == 10
            self.asked.append(member.engine)
            self.now += seconds[member.engine]

        monkeypatch.setattr(pick_engine.rounds, "participate", participate)


@pytest.mark.parametrize(("seconds", "best"), [((0.2, 0.1), "onnx"), ((0.1, 0.2), "torch"), ((0.1, 0.1), "torch")])
def test_the_faster_engine_is_taken_by_turns_of_a_short_round(
    data: Federated, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], best: str
) -> None:
    run = talaria.simulate("fedavg", data, "mlp", rounds=1).run
    clock = Clock(monkeypatch, torch=seconds[0], onnx=seconds[1])
    found = pick(run, data.clients, {})
    assert found.engine == best
    assert clock.asked == ["torch", "onnx"] * 4
    assert found.seconds == pytest.approx({"torch": seconds[0], "onnx": seconds[1]})
    assert ("0.50 of the CPU time" in found.why) == (seconds[0] != seconds[1])
    long = Clock(monkeypatch, torch=1.0, onnx=0.5)
    assert pick(run, data.clients, {}).engine == "onnx"
    assert long.asked == ["torch", "onnx"] * 2


def test_an_engine_is_picked_for_an_asynchronous_run_too(data: Federated) -> None:
    found = talaria.simulate("fedavg", data, "mlp", rounds=2, asynchronous=True, engine="auto")
    assert len(found.curve) == 2


def test_torch_trains_what_programs_cannot(data: Federated, monkeypatch: pytest.MonkeyPatch) -> None:
    run = talaria.simulate("fedavg", data, "mlp", rounds=1).run

    def participate(run: Run, member: Member, *rest: object) -> None:
        if member.engine == "onnx":
            raise ModelError("program: 'conv' is a Conv4d, which has no rule")

    monkeypatch.setattr(pick_engine.rounds, "participate", participate)
    found = pick(run, data.clients, {})
    assert found.engine == "torch"
    assert "programs cannot train this run (program: 'conv' is a Conv4d" in found.why


def test_what_was_picked_is_said_and_kept(data: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "talaria.simulation.experiment.pick", lambda *given: pick_engine.Pick("onnx", "a short round took 0.2")
    )
    file = tmp_path / "mine.npz"
    clients = {name: one.train for name, one in data.clients.items()}
    np.savez(
        file,
        x=np.concatenate([one.x for one in clients.values()]),
        y=np.concatenate([one.y for one in clients.values()]),
        client=np.repeat(list(clients), [len(one) for one in clients.values()]),
    )
    words = ["simulate", "-a", "fedavg", "-d", f"npz:{file}", "--model", "mlp", "--rounds", "2", "--json"]
    auto = CliRunner().invoke(app(words), [*words, "--engine", "auto", "--save", str(tmp_path / "run")])
    assert auto.exit_code == 0, auto.output
    assert "engine: onnx, for a short round took 0.2" in auto.stderr
    onnx = CliRunner().invoke(app(words), [*words, "--engine", "onnx"])
    assert "engine:" not in onnx.stderr
    told = json.loads(auto.stdout)
    assert told == json.loads(onnx.stdout)
    assert told["engine"] == "onnx"
    assert talaria.resume(tmp_path / "run").as_dict()["engine"] == "onnx"
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["engine"] == "onnx"


GPU = ["cuda"] if torch.cuda.is_available() else []
OWN = ("fedrep", "perfedavg", "thorki", "pfedgm", "lg_fedavg")
"""Algorithms with modules, steps or layers of their own."""


@pytest.mark.parametrize(("name", "device"), [*((n, "cpu:0") for n in OWN), *((n, d) for n in ALGORITHMS for d in GPU)])
def test_what_is_learned_there_is_learned_here(data: Federated, name: str, device: str) -> None:
    """To the bit on the same processor by another name, and up to a GPU's own rounding on one."""
    model, how = "mlp" if device == "cpu:0" else "imu_cnn", {"rounds": 1, "recipe": {"epochs": 1}}
    here = talaria.simulate(name, data, model, **how)
    there = talaria.simulate(name, data, model, device=device, **how)
    assert {p.device.type for p in there.model("anna").parameters()} <= {"cpu"}
    if device == "cpu:0":
        assert equal(here.learned.shared, there.learned.shared)
        assert here.clients == there.clients
    for key, value in here.learned.shared.items():
        assert np.allclose(value, there.learned.shared[key], rtol=0, atol=1e-2 * max(1.0, float(np.abs(value).max())))


def test_the_devices_module_lies_there(data: Federated, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[object]()
    plain = torch.nn.Module.to

    def to(self: torch.nn.Module, *where: object, **how: object) -> torch.nn.Module:
        moved.extend(where)
        return plain(self, *where, **how)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    talaria.simulate("fedavg", data, "mlp", rounds=1, device="cpu:0")
    assert moved.count("cpu:0") >= 2 * len(data.clients)


def test_a_device_that_cannot_be_used_is_refused(data: Federated) -> None:
    with pytest.raises(ConfigError, match=r"device='moon' cannot be used here .*use device='cpu'"):
        talaria.simulate("fedavg", data, "mlp", rounds=1, device="moon")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"device='cuda' cannot be used here .*use device='cpu'"):
            talaria.simulate("fedavg", data, "mlp", rounds=1, device="cuda")
    with pytest.raises(ConfigError, match="engine='onnx' trains on the CPU"):
        talaria.simulate("fedavg", data, "mlp", rounds=1, device="cpu:0", engine="onnx")
    with pytest.raises(ConfigError, match="leave workers and ray out"):
        talaria.simulate("fedavg", data, "mlp", rounds=1, device="cpu:0", workers=2)
    require_device("cpu", "onnx", alone=False)
    one = next(iter(members_of(data.clients, None, "torch", "cpu:0").values()))
    assert (one.device, isinstance(one.train, Samples)) == ("cpu:0", True)
