"""``talaria.simulate``: what it gives, that the command gives the same, and that a killed run goes on."""

import errno
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from mypkg.nets import plain
from rich.console import Console
from safetensors.numpy import load_file, save_file
from torch.nn import Linear, ReLU, Sequential
from typer.testing import CliRunner

import talaria
from talaria import durable, plugins
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.bucketing import Bucketed
from talaria.aggregate.robust.median import Median
from talaria.aggregate.wrappers import Clipped
from talaria.algorithms.base import Card
from talaria.algorithms.fedavg import FedAvg
from talaria.cli.main import app
from talaria.cli.simulate_output import shown_progress
from talaria.data import Client
from talaria.errors import ConfigError, DataError, ModelError, StateError
from talaria.federated.fedbuff_run import Buffering
from talaria.model.state import state_of
from talaria.simulation import checkpoint, experiment
from talaria.simulation.simulator import RoundFacts
from talaria.tensors import equal
from talaria.training.engine import predict
from talaria.types import Samples

TWO = [{"rounds": 4}, {"rounds": 4, "asynchronous": True, "buffering": {"buffer": 2}}]


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    y = np.tile(np.arange(3), 60)
    x = draw.normal(0, 0.4, (180, 4)).astype(np.float32)
    x[:, 0] += 2 * y
    return {"x": x, "y": y, "client": np.repeat(["anna", "bela", "carl"], 60)}


@pytest.fixture(scope="module")
def data(arrays: dict[str, np.ndarray]) -> talaria.Federated:
    return talaria.Federated.from_arrays(**arrays)


@pytest.fixture(scope="module")
def file(arrays: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "mine.npz"
    np.savez(path, **arrays)
    return path


def command(*words: str) -> dict:
    done = CliRunner().invoke(app(words), list(words))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_python_and_the_command_give_the_same(file: Path) -> None:
    words = ["-a", "fedrep", "--rounds", "3", "--lr", "0.1", "-o", "head_epochs=2", "--evaluate-every", "1", "--json"]
    told = command("simulate", "-d", f"npz:{file}", *words)
    result = talaria.simulate(
        "fedrep", f"npz:{file}", rounds=3, recipe={"lr": 0.1}, options={"head_epochs": 2}, evaluate_every=1
    )
    assert json.loads(json.dumps(result.as_dict())) == told
    assert told["accuracy"]["mean"] == result.accuracy.mean > 0.6
    assert [point.round for point in result.curve] == [1, 2, 3]
    assert result.curve[-1].accuracy == result.accuracy.mean
    assert set(result.clients) == {"anna", "bela", "carl"}


def test_a_name_that_looks_like_a_number_can_be_said_by_the_command(tmp_path: Path) -> None:
    """Newcomer "7" was taken for seven newcomers, and a text option of an own dataset could not be 003."""
    x, y = np.eye(60, 4), np.tile([0, 1], 30)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=np.repeat(["5", "6", "7"], 20))
    words = ["simulate", "-d", f"npz:{tmp_path / 'mine.npz'}", "--rounds", "1", "--json"]
    told = command(*words, "--data-option", 'newcomers="7"')
    assert list(told["newcomers"]["clients"]) == ["7"]
    named = ["simulate", "-d", "mypkg.sets:called", "--rounds", "1", "--json", "--data-option"]
    assert command(*named, 'kind="003"')["accuracy"]["mean"] >= 0
    with pytest.raises(ConfigError, match="kind=3 must be text; a command says it in double quotes"):
        talaria.data.load("mypkg.sets:called", kind=3)


def test_the_curve_ends_with_the_last_round_whatever_the_step(data: talaria.Federated) -> None:
    result = talaria.simulate("fedavg", data, rounds=3, evaluate_every=2)
    assert [point.round for point in result.curve if point.accuracy is not None] == [2, 3]
    assert result.as_dict()["curve"][-1] == {"round": 3, "accuracy": result.accuracy.mean}


def test_objects_do_what_names_do(data: talaria.Federated) -> None:
    from talaria.aggregate.robust.median import Median
    from talaria.algorithms.fedprox import FedProx

    named = talaria.simulate("fedprox", data, rounds=2, options={"mu": 0.5}, aggregator="median:f=1")
    given = talaria.simulate(FedProx(mu=0.5), data, rounds=2, aggregator=Median(f=1))
    assert named.as_dict()["model"] == given.as_dict()["model"]


def test_a_module_of_ones_own_is_learned_and_served(data: talaria.Federated) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    before = module[0].weight.clone()
    result = talaria.simulate("fedper", data, model=module, rounds=15, recipe={"lr": 0.1})
    assert result.accuracy.mean > 0.8
    assert torch.equal(module[0].weight, before), "the module given is left as it is"
    test = data.clients["anna"].test
    found = (predict(result.model("anna"), test.x).argmax(1) == test.y).mean()
    assert float(found) == result.clients["anna"].accuracy
    with pytest.raises(ConfigError, match="client='dora' is none of this run"):
        result.model("dora")
    with pytest.raises(ConfigError, match="client='dora' is no member; choose one of anna"):
        result.parameters("dora")
    with pytest.raises(ConfigError, match="pretrained=True, but no weights are published"):
        talaria.simulate("fedper", data, model=module, rounds=1, pretrained=True)


def test_a_spec_for_other_samples_is_refused(data: talaria.Federated) -> None:
    with pytest.raises(ConfigError, match=r"input_shape=\(5,\), but the samples have \(4,\)"):
        talaria.simulate("fedper", data, talaria.ModelSpec("mlp", (5,), 3), rounds=1)


def test_baselines_stand_beside_a_run_on_its_page(data: talaria.Federated, tmp_path: Path) -> None:
    every = {"rounds": 2, "evaluate_every": 1}
    result = talaria.simulate("fedper", data, **every)
    others = {name: talaria.simulate(name, data, **every) for name in ("local", "fedavg", "fedavg_ft")}
    page = result.report(tmp_path / "out.html", others).read_text()
    assert page.count("<polyline") == 4
    for name, title in (("local", "Alone"), ("fedavg", "FedAvg"), ("fedavg_ft", "FedAvg, fine-tuned")):
        assert f"<title>anna, {title}: {others[name].clients['anna'].accuracy:.3f}</title>" in page
        asked = talaria.simulation.experiment.prepare("fedper", data, codec="int8", **every).baseline(name)
        again = asked.learn()
        assert again.as_dict()["model_digest"] == others[name].as_dict()["model_digest"]
    assert "upload, of dense FedAvg" in page
    assert "Device" not in page
    alone = result.report(tmp_path / "alone.html").read_text()
    assert "FedAvg, fine-tuned" not in alone
    with pytest.raises(ConfigError, match=r"beside='ditto' is no baseline; use some of local, fedavg, fedavg_ft"):
        result.report(tmp_path / "no.html", {"ditto": result})
    with pytest.raises(ConfigError, match=r"beside\['fedavg'\] is a run of 'fedper'; give what simulate\('fedavg'"):
        result.report(tmp_path / "no.html", {"fedavg": result})
    with pytest.raises(ConfigError, match=r"beside\['fedavg'\] is None"):
        result.report(tmp_path / "no.html", {"fedavg": None})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"beside=\[.*must hold results by the names of their algorithms"):
        result.report(tmp_path / "no.html", [result])  # type: ignore[arg-type]
    rows = np.zeros((8, 4))
    stranger = talaria.simulate("fedavg", talaria.Federated.from_arrays(rows, [0, 1] * 4), rounds=1)
    with pytest.raises(ConfigError, match=r"beside\['fedavg'\] learned from other data"):
        result.report(tmp_path / "no.html", {"fedavg": stranger})


def test_bytes_are_held_beside_those_of_fedavg_where_less_of_the_model_is_shared(
    data: talaria.Federated, tmp_path: Path
) -> None:
    """They were held beside the algorithm's own part, and called a share of FedAvg's."""
    head, whole = (talaria.simulate(name, data, rounds=2).as_dict() for name in ("lg_fedavg", "fedavg"))
    page = talaria.simulate("lg_fedavg", data, rounds=2).report(tmp_path / "out.html").read_text()
    assert head["bytes_whole"]["up"] < whole["bytes_whole"]["up"] / 5
    for way in ("up", "down"):
        share = f"{head[f'bytes_{way}'] / whole['bytes_whole'][way]:.2f}\u2009×"
        assert re.search(rf"{share}[^×]*{way}load, of dense FedAvg", page), (way, share)


def test_the_page_and_the_frame(data: talaria.Federated, tmp_path: Path) -> None:
    result = talaria.simulate("fedavg", data, rounds=2, evaluate_every=1)
    page = result.report(tmp_path / "out.html").read_text()
    assert "anna" in page
    assert "Round by round" in page
    with pytest.raises(StateError, match="cannot be written"):
        result.report(tmp_path / "missing" / "out.html")
    frame = result.to_frame()
    pandas = importlib.import_module("pandas")  # it takes a third of a second, and one test
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc["anna", "accuracy"] == result.clients["anna"].accuracy


@pytest.mark.parametrize("how", TWO, ids=["in rounds", "asynchronous"])
def test_a_run_that_ends_in_the_middle_goes_on_to_the_same_bytes(
    how: dict, data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = talaria.simulate("ditto", data, seed=3, evaluate_every=2, **how)

    class CutError(Exception):
        pass

    def cut(facts: object) -> None:
        if facts.round == 3:  # type: ignore[attr-defined]
            raise CutError

    with pytest.raises(CutError):
        talaria.simulate("ditto", data, seed=3, evaluate_every=2, **how, save=tmp_path / "a", progress=cut)
    seen: list[int] = []
    result = talaria.resume(tmp_path / "a", data=data, progress=lambda facts: seen.append(facts.round))
    assert seen == [4]
    assert result.as_dict() == whole.as_dict()
    for client, private in whole.learned.private.items():
        other = result.learned.private[client]
        assert private.keys() == other.keys()
        assert all(np.array_equal(private[name], other[name]) for name in private)
    monkeypatch.setattr(durable, "write", None)  # a whole run may lie where nobody writes
    again = talaria.resume(tmp_path / "a", data=data)
    assert again.as_dict() == whole.as_dict()
    assert json.loads((tmp_path / "a" / checkpoint.RESULT).read_text()) == json.loads(json.dumps(whole.as_dict()))


@pytest.mark.parametrize(("asked", "used"), [(None, [2, 2]), (0, [2]), (1, [2, 1])])
def test_a_run_goes_on_with_as_many_workers_as_it_began_with(
    data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, used: list[int]
) -> None:
    """Torch's threads round otherwise than workers do: it came to other bytes without a word."""
    whole = talaria.simulate("ditto", data, rounds=3, workers=1)
    found, crew_of = list[int](), experiment.crew_of
    monkeypatch.setattr(experiment, "crew_of", lambda *it: (found.append(it[3]), crew_of(*it))[1])

    def cut(facts: RoundFacts) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talaria.simulate("ditto", data, rounds=3, workers=2, save=tmp_path / "a", progress=cut)
    more = {} if asked is None else {"workers": asked}
    again = talaria.resume(tmp_path / "a", data=data, **more)
    assert found == used
    if asked is None:
        assert again.as_dict() == whole.as_dict()


def test_a_run_that_is_slow_to_keep_is_kept_less_often_and_goes_on_to_the_same_bytes(
    data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = talaria.simulate("ditto", data, rounds=4)
    monkeypatch.setattr(experiment, "SLOW_S", 0.0)
    monkeypatch.setattr(experiment, "SPARED", 1e9)
    kept: list[int] = []
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *it: (kept.append(len(it[1].history)), write(*it)))

    def cut(facts: RoundFacts) -> None:
        if facts.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talaria.simulate("ditto", data, rounds=4, save=tmp_path / "a", progress=cut)
    assert kept == [1]
    assert talaria.resume(tmp_path / "a", data=data).as_dict() == whole.as_dict()
    assert kept == [1, 2, 4], "the first, and the last"


def test_what_was_measured_after_the_last_round_is_not_measured_again(
    data: talaria.Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmeasured = talaria.simulate("ditto", data, rounds=3)
    measured: list[int | None] = []
    evaluate = experiment.evaluate
    monkeypatch.setattr(
        experiment, "evaluate", lambda *it, **more: (measured.append(len(it[0].history)), evaluate(*it, **more))[1]
    )
    result = talaria.simulate("ditto", data, rounds=3, evaluate_every=2)
    assert measured == [2, 3]
    assert result.members == unmeasured.members


def test_a_result_is_kept_and_opened_again(data: talaria.Federated, tmp_path: Path) -> None:
    result = talaria.simulate("fedrep", data, rounds=2)
    assert result.save(tmp_path / "runs" / "a") == tmp_path / "runs" / "a"
    assert talaria.resume(tmp_path / "runs" / "a", data=data).as_dict() == result.as_dict()
    with pytest.raises(StateError, match="holds a run already"):
        result.save(tmp_path / "runs" / "a")


def test_a_long_history_is_kept_and_read_again(data: talaria.Federated, tmp_path: Path) -> None:
    """A run of 1,000 clients could not be kept after some 2,400 rounds, and ended in safetensors' error. Names of four
    bytes a letter come to as many after fewer."""
    x, y = np.zeros((1000, 4)), np.tile([0, 1], 500)
    many = talaria.Federated.from_arrays(x, y, np.repeat([f"{n:03}" + "\U0001f469" * 61 for n in range(500)], 2))
    one = talaria.simulate("fedavg", many, rounds=1, recipe={"epochs": 0})
    learned = replace(one.learned, history=one.learned.history * 140)
    kept = replace(one, learned=learned).save(tmp_path / "run")
    assert (kept / checkpoint.STATE).stat().st_size > 100e6
    assert len(talaria.resume(kept, data=many).learned.history) == 140


def test_a_folder_that_is_learned_into_is_not_learned_into_by_another(data: talaria.Federated, tmp_path: Path) -> None:
    """Two that went on with one run replaced each other's files, until one was told to make the folder."""
    refused, kept = list[str](), tmp_path / "run"

    def another(facts: RoundFacts) -> None:
        for ask in (lambda: talaria.resume(kept, data=data), lambda: talaria.simulate("ditto", data, save=kept)):
            with pytest.raises(StateError) as raised:
                ask()
            refused.append(str(raised.value))

    talaria.simulate("ditto", data, rounds=1, save=kept, progress=another)
    assert refused == [f"{kept}: is being learned now; wait until that has ended, or name another"] * 2
    with durable.held(kept):  # what is whole may be read by many
        talaria.resume(kept, data=data)


@pytest.mark.parametrize("draw", [np.int64(3), np.array([3])], ids=repr)
def test_what_json_cannot_hold_may_be_asked_for(tmp_path: Path, draw: Any) -> None:
    """An option of the data, and torch's own device: learned, it ended in a TypeError where it was kept."""
    how = {"rounds": 1, "data_options": {"draw": draw}, "device": torch.device("cpu")}
    whole = talaria.simulate("fedavg", "mypkg.sets:given", **how)
    kept = whole.save(tmp_path / "a")
    assert talaria.simulate("fedavg", "mypkg.sets:given", **how, save=tmp_path / "b").as_dict() == whole.as_dict()
    again = {}
    if draw.shape:
        with pytest.raises(ConfigError, match="or an option of it, was an object; give it: resume"):
            talaria.resume(kept)
        again = {"data": whole.data}
    assert talaria.resume(kept, **again).as_dict() == whole.as_dict()


def test_a_kept_run_is_read_in_one_pass_however_many_clients_it_has(
    data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, passes, under = talaria.simulate("fedper", data, rounds=1), list[str](), checkpoint.under
    result.save(tmp_path / "a")
    monkeypatch.setattr(checkpoint, "under", lambda tensors, prefix: passes.append(prefix) or under(tensors, prefix))
    assert talaria.resume(tmp_path / "a", data=data).as_dict() == result.as_dict()
    assert len(set(passes)) == len(passes) == 4, passes


class Fixed(Sequential):
    """A network without a channel that may go: its one hidden layer runs twice."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(Linear(shape[0], shape[0]), Linear(shape[0], classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](self[0](x)))


def test_a_run_that_is_refused_when_it_learns_does_not_keep_its_folder(data: talaria.Federated, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none that may go"):
        talaria.simulate("hermes", data, Fixed, rounds=1, save=tmp_path)
    talaria.simulate("fedper", data, Fixed, rounds=1, save=tmp_path)
    assert json.loads((tmp_path / checkpoint.RESULT).read_text())["algorithm"] == "fedper"


class Tied(Sequential):
    """A network whose last layer has the weight of its second one."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(Linear(shape[0], 8), Linear(8, classes), Linear(classes, 8), Linear(8, classes))
        self[3].weight = self[1].weight


@pytest.mark.parametrize("algorithm", ["fedper", "fedrep", "fedbabu", "lg_fedavg"])
def test_a_weight_that_is_of_the_body_and_of_a_private_head_does_not_travel(
    algorithm: str, data: talaria.Federated
) -> None:
    with pytest.raises(ConfigError, match=r"sends '[13].weight' and keeps '[13].weight' on the device.* fedavg"):
        talaria.simulate(algorithm, data, Tied, rounds=1)
    assert talaria.simulate("fedavg", data, Tied, rounds=1).clients


def test_a_weight_of_two_layers_of_which_one_is_to_learn_is_refused(data: talaria.Federated) -> None:
    with pytest.raises(ModelError, match=r"'3.weight' is to learn and '1.weight' is not, which are one weight"):
        talaria.simulate("fedavg_ft", data, Tied, rounds=1, options={"tune": "head"})
    with pytest.raises(ModelError, match="which are one weight"):
        talaria.simulate("fedavg", data, Tied, rounds=1, recipe={"freeze": ["3"]})
    assert talaria.simulate("fedavg", data, Tied, rounds=1, recipe={"freeze": ["1", "3"]}).clients


class TiedBody(Sequential):
    """A network whose first two layers have one weight."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(Linear(shape[0], shape[0]), ReLU(), Linear(shape[0], shape[0]), Linear(shape[0], classes))
        self[2].weight = self[0].weight


def test_what_is_worked_out_beside_the_module_has_a_weight_of_two_layers_under_both_names(
    data: talaria.Federated, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """The name that comes last is the one that a module is loaded with."""
    mixed = talaria.simulate("apfl", data, TiedBody, rounds=2)
    own, alpha = mixed.learned.private["anna"], float(mixed.learned.private["anna"]["mix/alpha"])
    at = alpha * own["personal/0.weight"] + (1 - alpha) * mixed.learned.shared["0.weight"]
    np.testing.assert_allclose(mixed.model("anna").state_dict()["2.weight"].numpy(), at, atol=1e-6)
    np.savez(tmp_path / "proxy.npz", x=arrays["x"][:30], y=arrays["y"][:30])
    for algorithm, more in {
        "ffgg": {"options": {"form": "gradient"}},
        "heart_pfl": {"aggregator": f"akt:proxy={tmp_path / 'proxy.npz'},steps=3,lr=0.1"},
    }.items():
        first, shared = (talaria.simulate(algorithm, data, TiedBody, rounds=n, **more).learned.shared for n in (1, 2))
        assert np.array_equal(shared["0.weight"], shared["2.weight"]), algorithm
        assert not np.array_equal(shared["2.weight"], first["2.weight"]), algorithm


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import talaria
import torch
from talaria import durable, plugins
from talaria.simulation import checkpoint

with np.load(sys.argv[1]) as stored:
    data = talaria.Federated.from_arrays(**stored)
place = Path(sys.argv[2])
torch.set_num_threads(1)
rename, writes = durable.rename, []

def learn(folder):
    talaria.simulate("ditto", data, rounds=3, seed=3, evaluate_every=1, save=folder)

def killed(number, after):
    seen = []

    def cut(source, target):
        seen.append(target.name)
        last = len(seen) == number + 1
        if after or not last:
            rename(source, target)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    durable.rename = cut
    learn(place / f"{number}-{after}")

for number in range(5):
    for after in (False, True):
        child = os.fork()  # of a process in which no other thread ever was
        if not child:
            killed(number, after)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (number, after, status)

def counted(source, target):
    writes.append(target.name)
    rename(source, target)

durable.rename = counted
learn(place / "whole")
assert writes == [checkpoint.EXPERIMENT, *[checkpoint.STATE] * 3, checkpoint.RESULT], writes
"""


def test_a_run_killed_at_any_write_goes_on_to_the_same_bytes(
    data: talaria.Federated, file: Path, tmp_path: Path
) -> None:
    """Killed before or after any file takes its name: what was asked for, each round's state, what came out."""

    def bytes_of(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(file), str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(5):
            for after in (False, True):
                folder = tmp_path / f"{number}-{after}"
                if (folder / checkpoint.EXPERIMENT).exists():
                    assert checkpoint.rounds(folder) == 3
                    talaria.resume(folder, data=data)
                else:  # nothing was begun, so nothing is in the way
                    talaria.simulate("ditto", data, rounds=3, seed=3, evaluate_every=1, save=folder)
                assert bytes_of(folder) == bytes_of(tmp_path / "whole"), (number, after)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "how", [{"privacy": {"clip": 1.0, "noise": 0.5}}, {"aggregator": "clipped:norm=0.05,inner=mean"}], ids=list
)
def test_what_goes_tensor_by_tensor_goes_on_in_the_same_order(
    data: talaria.Federated, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Noise is drawn and lengths are added up in the order of the tensors, of which safetensors has another."""

    def end(facts: RoundFacts) -> None:
        if facts.round == 2:
            raise KeyboardInterrupt

    whole = talaria.simulate("fedper", data, rounds=4, save=tmp_path / "whole", **how)
    with pytest.raises(KeyboardInterrupt):
        talaria.simulate("fedper", data, rounds=4, save=tmp_path / "cut", progress=end, **how)
    again = talaria.resume(tmp_path / "cut", data=data)
    assert again.as_dict() == whole.as_dict()
    both = [(tmp_path / name / checkpoint.STATE).read_bytes() for name in ("whole", "cut")]
    assert both[0] == both[1]
    state, facts = load_file(tmp_path / "cut" / checkpoint.STATE), safetensors_facts(both[1])
    del facts["order"], facts["sha256"], facts["run"]  # as an older version left it
    facts |= {"format": 2, "history": json.loads(state.pop("history").tobytes())}
    save_file(state, tmp_path / "cut" / checkpoint.STATE, {"talaria": json.dumps(facts)})
    began = json.loads((tmp_path / "cut" / checkpoint.EXPERIMENT).read_text()) | {"format": 2}
    (tmp_path / "cut" / checkpoint.EXPERIMENT).write_text(json.dumps(began))
    assert talaria.resume(tmp_path / "cut", data=data).as_dict() == whole.as_dict()


def test_progress_that_is_no_function_is_refused_before_a_round_is_learned(
    data: talaria.Federated, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="simulate: progress=3 must be a function that takes a round's facts"):
        talaria.simulate("fedper", data, rounds=4, save=tmp_path / "run", progress=3)  # type: ignore[arg-type]
    assert talaria.simulate("fedper", data, rounds=1, save=tmp_path / "run").accuracy.mean >= 0


def test_random_buckets_are_those_of_the_seed() -> None:
    """A fleet's are secret; a simulation's are drawn again whenever it is run."""
    x, y = np.random.default_rng(0).normal(size=(48, 4)), np.tile([0, 1], 24)
    six = talaria.Federated.from_arrays(x, y, np.repeat(np.arange(6), 8))
    learn = partial(talaria.simulate, "fedavg", six, rounds=2)
    for how in ("bucketed:inner=median", Clipped(inner=Bucketed(inner=Median()), norm=0.1)):
        assert len({learn(aggregator=how).as_dict()["model_digest"] for _ in range(2)}) == 1
    keys = {
        learn(aggregator=rule, seed=seed).learned.server["bucket/key"].tobytes()
        for seed in (0, 1)
        for rule in ("bucketed:inner=median", "bucketed:inner=median,seed=7")
    }
    assert len(keys) == 3  # that of 7 is the same in both
    own = [talaria.simulate(FedAvg(aggregator=Bucketed(inner=Median())), six, rounds=1) for _ in range(2)]
    assert len({one.learned.server["bucket/key"].tobytes() for one in own}) == 1


def safetensors_facts(data: bytes) -> dict[str, Any]:
    """What a checkpoint says beside its tensors."""
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts: dict[str, Any] = json.loads(head["__metadata__"]["talaria"])
    return facts


def test_progress_has_the_rate_and_the_time_left() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with shown_progress("fedavg on mine", 4, quiet=False, console=console) as progress:
        for number in range(1, 5):
            progress(RoundFacts(number, ("anna",), 1, {}))
            time.sleep(0.002)
    told = out.getvalue()
    assert "4/4" in told
    assert "rounds/" in told
    assert "fedavg on mine: measuring" in told


@pytest.mark.slow
def test_a_killed_command_is_resumed(file: Path, tmp_path: Path) -> None:
    words = ["simulate", "-a", "fedper", "-d", f"npz:{file}", "--rounds", "60", "--json"]
    kept = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", "from talaria.cli.main import main; main()", *words, "--save", str(kept)]
    )
    state = kept / checkpoint.STATE
    while not state.exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert command("simulate", "--resume", str(kept), "--json") == command(*words)


def test_what_cannot_be_resumed_is_said(data: talaria.Federated, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="holds no saved run"):
        talaria.resume(tmp_path)
    result = talaria.simulate("fedavg", data, rounds=1)
    kept = result.save(tmp_path / "a")
    with pytest.raises(ConfigError, match="was an object; give it"):
        talaria.resume(kept)
    with pytest.raises(ConfigError, match="data='smartwatch' must be the Federated that the run began with"):
        talaria.resume(kept, data="smartwatch")  # type: ignore[arg-type]
    other = talaria.Federated.from_arrays(np.ones((40, 4)), np.tile([0, 1, 2, 1], 10), np.repeat(["anna", "bela"], 20))
    with pytest.raises(DataError, match="is not what this run began with"):
        talaria.resume(kept, data=other)
    (kept / checkpoint.STATE).write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(StateError, match="damaged"):
        talaria.resume(kept, data=data)
    text = json.loads((kept / checkpoint.EXPERIMENT).read_text())
    (kept / checkpoint.EXPERIMENT).write_text(json.dumps(text | {"format": 99}))
    with pytest.raises(StateError, match="a run of format 99, and this version reads 2 and 3; go on with it"):
        talaria.resume(kept, data=data)


def test_a_run_is_resumed_under_its_own_rule_alone(data: talaria.Federated, tmp_path: Path) -> None:
    """Another one went on from its rounds, to bytes that no whole run has."""
    plain = talaria.simulate("fedavg", data, rounds=1).save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="its rule is that of its algorithm, not Median; leave it out"):
        talaria.resume(plain, data=data, aggregator=Median(f=1))
    own = talaria.simulate("fedavg", data, rounds=1, aggregator=Median(f=0)).save(tmp_path / "own")
    with pytest.raises(ConfigError, match="its rule is Median, not Bucketed; give that"):
        talaria.resume(own, data=data, aggregator=Bucketed(inner=Median()))
    for wrong in (Median, "median:f=0"):
        with pytest.raises(ConfigError, match="resume: aggregator"):
            talaria.resume(own, data=data, aggregator=wrong)  # type: ignore[arg-type]
    assert talaria.resume(own, data=data, aggregator=Median(f=0)).clients.keys() == data.clients.keys()


def test_a_module_of_another_process_is_not_taken_for_one_of_this(
    data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both number what they keep from 1: a run went on with whatever module had the number of its own."""
    module = Sequential(Linear(4, 8), ReLU(), Linear(8, 3))
    kept = talaria.simulate("fedavg", data, module, rounds=1).save(tmp_path / "a")
    assert talaria.resume(kept, data=data).clients.keys() == data.clients.keys()
    monkeypatch.setattr(plugins, "PROCESS", "another")
    with pytest.raises(ConfigError, match="was an object of the process that began it; write that into a module"):
        talaria.resume(kept, data=data)


def test_a_checkpoint_with_one_bit_flipped_is_not_learned_on_from(data: talaria.Federated, tmp_path: Path) -> None:
    """Every part of it is still of the right form: only a checksum tells."""
    kept = talaria.simulate("fedavg", data, rounds=1).save(tmp_path / "a")
    whole = (kept / checkpoint.STATE).read_bytes()
    for at in (whole.index(b"bytes_up") + 12, len(whole) - 2):  # a figure among the facts, and a value of a tensor
        flipped = bytearray(whole)
        flipped[at] ^= 1
        (kept / checkpoint.STATE).write_bytes(flipped)
        with pytest.raises(StateError, match=r"state\.safetensors: damaged .*remove it to begin this run anew"):
            talaria.resume(kept, data=data)
    (kept / checkpoint.STATE).write_bytes(whole.replace(b"sha256", b"sha***", 1))  # an earlier version wrote none
    assert talaria.resume(kept, data=data).clients.keys() == data.everyone.keys()


def test_a_file_that_counts_other_clients_is_refused(data: talaria.Federated, tmp_path: Path) -> None:
    talaria.simulate("fedavg", data, rounds=1, save=tmp_path / "a")
    kept = tmp_path / "a" / checkpoint.STATE
    other = kept.read_bytes().replace(b'sent\\": {\\"anna', b'sent\\": {\\"anne')
    kept.write_bytes(other.replace(b"sha256", b"sha***"))
    with pytest.raises(StateError, match="of other clients than the data"):
        talaria.resume(tmp_path / "a", data=data)


def test_a_file_of_another_run_is_refused(data: talaria.Federated, tmp_path: Path) -> None:
    """The same clients and tensors: it went on from there, under the other's name."""
    for seed in (0, 1):
        talaria.simulate("fedavg", data, rounds=1, seed=seed, save=tmp_path / str(seed))
    (tmp_path / "0" / checkpoint.STATE).replace(tmp_path / "1" / checkpoint.STATE)
    with pytest.raises(StateError, match=r"state\.safetensors: is of another run than experiment\.json beside it"):
        talaria.resume(tmp_path / "1", data=data)


@pytest.mark.parametrize(("full_in", "mend"), [(1, "begin anew"), (2, "resume")])
def test_a_full_disk_is_said_with_what_its_folder_allows(
    data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_in: int, mend: str
) -> None:
    """Before a round is kept there is nothing to go on from."""
    kept, write = tmp_path / "run", durable.write
    states: list[Path] = []

    def full(path: Path, content: bytes, mode: int) -> None:
        states.extend([path] * (path.name == checkpoint.STATE))
        if len(states) == full_in:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content, mode=mode)

    monkeypatch.setattr(durable, "write", full)
    with pytest.raises(StateError, match=f"No space left on device.; free space there, then {mend}"):
        talaria.simulate("fedper", data, rounds=3, save=kept)
    monkeypatch.undo()
    again = talaria.simulate("fedper", data, rounds=3, save=kept) if full_in == 1 else talaria.resume(kept, data=data)
    assert len(again.learned.history) == 3


def test_a_result_that_could_not_be_saved_is_saved_there_later(
    data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was said to hold a run, and going on with that learned it all again."""
    result, write = talaria.simulate("fedavg", data, rounds=1), durable.write

    def full(path: Path, content: bytes, mode: int) -> None:
        if path.name == checkpoint.STATE:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content, mode=mode)

    monkeypatch.setattr(durable, "write", full)
    with pytest.raises(StateError, match="No space left on device"):
        result.save(tmp_path / "run")
    monkeypatch.undo()
    assert talaria.resume(result.save(tmp_path / "run"), data=data).as_dict() == result.as_dict()


def test_a_whole_run_is_measured_again_where_nobody_writes(
    data: talaria.Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that were given in another order than that of their names were written anew."""
    options = {"tune_epochs": 1, "mix": 0.5}
    kept = talaria.simulate("fedavg_ft", data, rounds=1, options=options).save(tmp_path / "run")
    monkeypatch.setattr(durable, "write", lambda *_, **__: pytest.fail("it was written"))
    talaria.resume(kept, data=data)


def test_unlabelled_windows_are_part_of_what_a_run_began_with() -> None:
    own = Samples.of([[0.0], [1.0]], [0, 1])

    def digest(rest: np.ndarray | None) -> str:
        return checkpoint.fingerprint(
            talaria.Federated("one", {"anna": Client(own, own, own, unlabelled=rest)}, ("a", "b"), (1,))
        )

    kept = "82540415e0b0b364f09d3d1e0e07b5721e31be61695c50a59354aaa97102b217"  # of a run from before there were any
    assert digest(None) == digest(np.zeros((0, 1), np.float32)) == kept
    assert len({kept, digest(np.zeros((1, 1), np.float32)), digest(np.ones((1, 1), np.float32))}) == 3


def test_a_function_that_makes_the_model_is_one(data: talaria.Federated) -> None:
    def mine(shape: tuple[int, ...], outputs: int) -> Linear:
        return Linear(*shape, outputs)

    here = talaria.simulate(
        "local", data, lambda shape, outputs: Sequential(mine(shape, 6), mine((6,), outputs)), rounds=1
    )
    assert here.model("anna")[1].weight.shape == (3, 6)
    named, given = (talaria.simulate("fedper", data, one, rounds=1) for one in ("mypkg.nets:plain", plain))
    assert named.run == given.run


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": 7}, "must be a dataset's name or a Federated"),
        ({"data_options": {"seed": 1}}, "data_options=.* are for a dataset's name"),
        ({"algorithm": "fedpre"}, "fedpre"),
        ({"plans": {"dora": talaria.Plan()}}, "must be the Plan of a client"),
        ({"buffering": Buffering(buffer=2)}, "only an asynchronous run has it"),
        ({"asynchronous": True, "buffering": {"bufer": 2}}, r"option 'bufer' is unknown \(did you mean 'buffer'\?\)"),
        ({"plans": [talaria.Plan()]}, "plans=.* must be a Plan, Plans by client, or the names of their files"),
        ({"plans": "there_is.json"}, "there_is.json cannot be read"),
        ({"aggregator": MaskedMean}, r"aggregator: MaskedMean is a class; make one, such as MaskedMean\(\)"),
        ({"aggregator": 3}, "aggregator: a int has no init"),
        ({"options": 3}, "options=3 must be a table of values by name"),
        ({"recipe": [0.1]}, r"recipe=\[0.1\] must be a table"),
        ({"over": "some"}, "over=some must be in 0..10"),
        ({"over": np.float32(0.5), "fraction": 0.5}, "over=0.5 must be in 0..10.*; write its .item"),
        ({"model": Linear(4, 3)}, r"model 'torch.nn.modules.linear:Linear#\d+' is one layer, Linear, without a name"),
        ({"model": 5}, r"model '\?:int#\d+': is a int; name a function \(input_shape, classes\)"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": np.int64(2)}, r"rounds=np.int64\(2\) must be a whole number; write its .item\(\)"),
        ({"seed": np.int64(2)}, r"seed=np.int64\(2\) must be a whole number in 0.*; write its .item\(\)"),
        ({"workers": np.int64(2)}, r"workers=np.int64\(2\) must be a whole number in 1.*; write its .item\(\)"),
        ({"recipe": {"lr": np.float32(0.5)}}, r"lr=np.float32\(0.5\) must be above 0.*; write its .item\(\)"),
        ({"options": {"mu": np.int64(2)}}, r"'mu'\]=np.int64\(2\) must be a number or text; write its .item\(\)"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"save": "a\0b"}, r"save='a\\x00b' must be a path"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(given: dict, message: str, data: talaria.Federated) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        talaria.simulate(**{"algorithm": "fedavg", "data": data, "rounds": 1, **given})


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_samples_that_run_backwards_are_learned(data: talaria.Federated, engine: Any) -> None:
    """A view such as x[::-1], of which torch makes no tensor: it ended in torch's ValueError."""

    def shown(view: Any) -> talaria.Federated:
        clients = {
            name: Client(*(Samples(view(part.x), view(part.y)) for part in (one.train, one.val, one.test)))
            for name, one in data.clients.items()
        }
        return replace(data, clients=clients)

    backwards, copied = (
        talaria.simulate("fedavg", shown(view), rounds=1, engine=engine).as_dict()
        for view in (lambda array: array[::-1], lambda array: array[::-1].copy())
    )
    assert backwards == copied


@dataclass(frozen=True, kw_only=True)
class OfTorch(FedAvg):
    """FedAvg by somebody whose loss is written in torch."""

    card: ClassVar[Card] = replace(FedAvg.card, torch_alone="its loss is torch's code")


def test_an_algorithm_that_needs_torch_is_refused_by_programs_with_its_reason(data: talaria.Federated) -> None:
    with pytest.raises(ConfigError, match=r"its loss is torch's code.*engine='torch'"):
        talaria.simulate(OfTorch(), data, rounds=1, engine="onnx")


def test_what_is_no_path_is_said() -> None:
    y = np.arange(20) % 2
    data = talaria.data.Federated.from_arrays(np.eye(20, 4)[:, :4] + y[:, None], y, np.repeat(["anna", "bela"], 10))
    with pytest.raises(ConfigError, match=r"simulate: save=3 must be a path, as text or pathlib\.Path"):
        talaria.simulate("fedavg", data, rounds=1, save=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="resume: folder=None must be a path"):
        talaria.resume(None)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"x: cannot be written .File name too long"):
        talaria.simulate("fedavg", data, rounds=1, save="x" * 300)
    with pytest.raises(StateError, match="py: holds no saved run; name the folder that"):
        talaria.resume(__file__)
    result = talaria.simulate("fedavg", data, rounds=1)
    for ask in (result.report, result.save):
        with pytest.raises(ConfigError, match="=3 must be a path"):
            ask(3)  # type: ignore[arg-type]


def test_an_app_that_infers_may_simulate_meanwhile(tmp_path: Path) -> None:
    """``torch.inference_mode`` around an app's code lets nothing learn, and what is made in it never."""
    network = Sequential(Linear(4, 5), ReLU(), Linear(5, 3))
    alone = talaria.simulate("fedper", "mypkg.sets:rings", network, rounds=1)
    for engine in ("torch", "onnx"):
        with torch.inference_mode():
            found = talaria.simulate(
                "fedper", "mypkg.sets:rings", network, rounds=1, engine=engine, save=tmp_path / engine
            )
            again = talaria.resume(tmp_path / engine)
        assert again.accuracy.mean == found.accuracy.mean
        assert engine == "onnx" or equal(found.learned.shared, alone.learned.shared)


def test_an_app_that_infers_is_given_personal_models(data: talaria.Federated) -> None:
    """Such as are tuned before they are served."""
    result = talaria.simulate("fedrep", data, rounds=1)
    with torch.inference_mode():
        model = result.model("anna")
    assert equal(state_of(model), state_of(result.model("anna")))


def test_an_app_that_has_numpy_raise_may_simulate_meanwhile() -> None:
    """What is too small for a format is 0 in it, which numpy says nothing of by itself."""
    x = np.random.default_rng(0).normal(size=(60, 6, 32))
    x[:, :3] *= 1e-50
    y, client = np.tile(np.arange(3), 20), np.repeat(["anna", "bela"], 30)
    with np.errstate(all="raise"):
        data = talaria.Federated.from_arrays(x, y, client)
        talaria.simulate("fedavg", data, "imu_cnn", rounds=1, codec="fp16", download="fp16")
        assert not Samples.of(x, y).x[:, :3].any()


@pytest.mark.parametrize("algorithm", ["pfedgm", "thorki", "heart_pfl"])
def test_torchs_generator_is_the_apps_own(algorithm: str) -> None:
    before = torch.get_rng_state()
    talaria.simulate(algorithm, "mypkg.sets:rings", "mypkg.nets:plain", rounds=1)
    assert torch.equal(torch.get_rng_state(), before)
