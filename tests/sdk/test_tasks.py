"""Tasks beside classification: their losses against torch's, their figures, what they refuse, and that fleets learn."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch.func import functional_call
from torch.nn import GRU, Linear, Module
from torch.nn import functional as F

import talaria
from talaria import tasks
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.sharing import update
from talaria.data import Client, Federated
from talaria.errors import ConfigError, DataError, ModelError
from talaria.federated import device_task, rounds, run_model
from talaria.federated.make_kit import kit_of
from talaria.federated.run import Member
from talaria.model.state import state_of
from talaria.model.weights import Served
from talaria.simulation.run import members_of
from talaria.training import engine as engines
from talaria.training.engine import predict, train
from talaria.training.interface import Task
from talaria.training.objectives import CrossEntropy
from talaria.types import Samples, Update

PEOPLE = ("anna", "bela", "carl")


@pytest.fixture(scope="module")
def draw() -> np.random.Generator:
    return np.random.default_rng(3)


def made(task: str, columns: int = 2) -> Federated:
    """Three people whose targets lie at places of their own."""
    draw, rows = np.random.default_rng(0), 40 * len(PEOPLE)
    x = draw.normal(size=(rows, 6)).astype(np.float32)
    person = np.repeat(np.arange(3), 40)
    numbers = np.stack([x[:, 0] + x[:, 1], x[:, 2] * 3], 1)[:, :columns] * 40 + 100 * (person[:, None] + 1)
    y: Any = numbers if task.startswith("regression") else (x[:, :columns] > 0).astype(int)
    return Federated.from_arrays(x, y, np.array(PEOPLE)[person], task=task)


@pytest.mark.parametrize(
    ("task", "theirs"),
    [
        ("regression:kind=squared", lambda out, y: F.mse_loss(out, y) / 2),
        ("regression:delta=0.4", lambda out, y: F.huber_loss(out, y, delta=0.4)),
        ("multilabel", lambda out, y: F.binary_cross_entropy_with_logits(out, y.float())),
        ("per_step", lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-1)),
    ],
)
def test_a_loss_and_its_slope_are_those_of_torch(task: str, theirs: Any, draw: np.random.Generator) -> None:
    shape = (7, 5, 3) if task == "per_step" else (7, 3)
    out = draw.normal(size=shape).astype(np.float32)
    y = tasks.of(task).example((7, 3)) if task != "per_step" else draw.integers(-1, 3, (7, 5))
    tensor = torch.tensor(out, requires_grad=True)
    wanted = theirs(tensor, torch.tensor(y))
    wanted.backward()
    loss, slope = tasks.of(task).loss(out, y)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    assert slope.dtype == np.float32
    assert tensor.grad is not None
    assert roundings(slope, tensor.grad.numpy()) < 64


@pytest.mark.parametrize(
    "task",
    [
        "classification:balance=true", "regression:kind=squared", "regression", "multilabel", "per_step",
        "multilabel:balance=true", "per_step:balance=true",
    ],
)  # fmt: skip
def test_a_slope_turns_as_its_own_differences_say(task: str, draw: np.random.Generator) -> None:
    steps = task.startswith("per_step")
    shape = (7, 5, 3) if steps else (7, 3)
    out, way = draw.normal(size=shape), draw.normal(size=shape)
    y = draw.integers(-1, 3, (7, 5)) if steps else tasks.of(task).example((7, 3))
    goal = tasks.of(task).fitted(y)
    ahead, behind = (goal.loss(out + far * way, y)[1] for far in (1e-6, -1e-6))
    assert np.allclose(goal.bent(out, y, way), (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-8)
    loss = [goal.loss(out + far * way, y)[0] for far in (1e-6, -1e-6)]
    assert (loss[0] - loss[1]) / 2e-6 == pytest.approx(float((goal.loss(out, y)[1] * way).sum()), rel=1e-5)


def test_a_balanced_loss_weighs_classes_by_their_shares(draw: np.random.Generator) -> None:
    had = np.array([0] * 6 + [2] * 2)  # class 1 has no sample here
    goal, out, y = (
        tasks.of("classification:balance=true").fitted(had),
        draw.normal(size=(5, 3)),
        np.array([0, 2, 0, 1, 2]),
    )
    tensor = torch.tensor(out, requires_grad=True)
    weights = torch.tensor([8 / 12, 4.0, 2.0], dtype=torch.float64)
    wanted = (F.cross_entropy(tensor, torch.tensor(y), reduction="none") * weights[torch.tensor(y)]).mean()
    wanted.backward()
    loss, slope = goal.loss(out, y)
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    assert tensor.grad is not None
    assert np.allclose(slope, tensor.grad.numpy(), rtol=1e-6)
    assert tasks.of("classification").fitted(had).loss(out, y)[0] != pytest.approx(loss)


def test_a_balanced_label_weighs_as_much_had_as_not(draw: np.random.Generator) -> None:
    y = np.array([[1, 0, 1]] + [[0, 0, 1]] * 3)  # the first label is rare, of the others there is one kind alone
    goal, out = tasks.of("multilabel:balance=true").fitted(y), draw.normal(size=(4, 3))
    weights = torch.tensor([[2.0, 1, 1]] + [[2 / 3, 1, 1]] * 3, dtype=torch.float64)
    wanted = F.binary_cross_entropy_with_logits(torch.tensor(out), torch.tensor(y).double(), weight=weights)
    assert goal.loss(out, y)[0] == pytest.approx(wanted.item(), rel=1e-6)


def test_a_balanced_step_weighs_by_the_share_of_its_class(draw: np.random.Generator) -> None:
    y = np.array([[0, 0, 0, -1], [0, 1, -1, -1]])
    goal, out = tasks.of("per_step:balance=true").fitted(y), draw.normal(size=(2, 4, 2))
    weights = torch.tensor([5 / 8, 5 / 2], dtype=torch.float64)
    each = F.cross_entropy(torch.tensor(out[y != -1]), torch.tensor(y[y != -1]), reduction="none")
    assert goal.loss(out, y)[0] == pytest.approx((each * weights[torch.tensor(y[y != -1])]).mean().item(), rel=1e-6)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_classes_of_steps_have_a_model_that_nobody_names(engine: Any) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2, 9)).astype(np.float32)
    data = Federated.from_arrays(
        x, (x[:, 0] > 0).astype(int), np.repeat(PEOPLE, 20), task="per_step", layout="channels_first"
    )
    found = talaria.simulate("fedper", data, rounds=3, recipe={"epochs": 8, "batch": 4}, engine=engine)
    assert found.run.spec.name == "steps_cnn"
    assert found.accuracy.mean > 0.8


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("algorithm", ["fedavg", "apfl"])
def test_slices_of_sequences_of_any_length_are_one_batch(algorithm: str, engine: Any) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 2, 9)).astype(np.float32)
    y = np.where(np.arange(9) < draw.integers(1, 9, (60, 1)), x[:, 0] > 0, -1)
    data = Federated.from_arrays(x, y, np.repeat(PEOPLE, 20), task="per_step", layout="channels_first")
    network = Steps()
    whole, cut = (
        talaria.simulate(
            algorithm, data, network, rounds=1, recipe={"batch": 10, "lr": 0.1, "accumulate": slices}, engine=engine
        ).learned.shared
        for slices in (1, 3)
    )
    assert roundings(cut, whole) < 256


def test_ffggs_gradient_of_sequences_of_any_length_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 2, 9)).astype(np.float32)
    y = np.where(np.arange(9) < draw.integers(1, 9, (60, 1)), x[:, 0] > 0, -1)
    data = Federated.from_arrays(x, y, np.repeat(PEOPLE, 20), task="per_step", layout="channels_first")
    network, found = Steps(), []
    for chunk in (1024, 5):
        monkeypatch.setattr("talaria.algorithms.ffgg.gradients.CHUNK", chunk)
        found.append(talaria.simulate("ffgg", data, network, rounds=1, options={"form": "gradient"}).learned.shared)
    assert roundings(*found) < 256


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_who_balances_labels_says_the_rare_one(engine: Any) -> None:
    draw = np.random.default_rng(0)
    y = (np.arange(300)[:, None] % np.array([16, 2]) == 0).astype(int)
    x = draw.normal(size=(300, 6)) + 1.2 * y[:, :1]
    found = {
        task: talaria.simulate(
            "fedavg", Federated.from_arrays(x, y, np.repeat(PEOPLE, 100), task=task), "mlp", rounds=2, engine=engine
        )
        for task in ("multilabel", "multilabel:balance=true")
    }
    test = found["multilabel"].data.clients["anna"].test.x
    said = {task: float((predict(one.model("anna"), test)[:, 0] > 0).mean()) for task, one in found.items()}
    assert said["multilabel:balance=true"] > said["multilabel"]


def test_who_balances_classes_finds_more_of_the_rare_one() -> None:
    draw = np.random.default_rng(0)
    y = (np.arange(300) % 16 == 0).astype(int)
    x = draw.normal(size=(300, 6)) + 1.2 * y[:, None]
    found = {}
    for task in ("classification", "classification:balance=true"):
        for engine in ("torch", "onnx"):
            data = Federated.from_arrays(x, y, np.repeat(PEOPLE, 100), task=task)
            done = talaria.simulate("fedavg", data, "mlp", rounds=2, recipe={"epochs": 2}, engine=engine)
            found[task, engine] = done.macro_recall.mean
    for engine in ("torch", "onnx"):
        assert found["classification:balance=true", engine] > found["classification", engine] + 0.1
    with pytest.raises(ConfigError, match=r"pfedgm: .* cannot learn task='classification:balance=true'"):
        talaria.simulate("pfedgm", data, "mlp", rounds=1)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_tuning_on_all_labels_balances_one_that_only_validation_has(engine: Any) -> None:
    y = np.tile([0, 1, 0, 1, 0, 1, 0, 1, 2, 2], 6)
    x, split = np.random.default_rng(0).normal(size=(60, 4)) + 2 * y[:, None], np.where(y == 2, 1, 0)
    split[-20:] = 2
    people, task = np.repeat(["anna", "bela"] * 3, 10), "classification:balance=true"
    data = Federated.from_arrays(x, y, people, split=split, task=task)
    options = {"tune_on": "all", "tune_epochs": 60, "tune_lr": 0.05}
    found = talaria.simulate("fedavg_ft", data, rounds=1, options=options, engine=engine)
    assert 2 in predict(found.model("anna"), data.clients["anna"].test.x).argmax(-1)


def test_the_figures_of_each_task() -> None:
    y = np.array([[1.0, 10], [3, 30]], np.float32)
    assert tasks.of("regression").measured(y, y) == (1.0, 0.0)
    assert tasks.of("regression").measured(y.mean(0) + 0 * y, y) == (0.0, -5.5)
    assert tasks.of("regression").measured(np.full_like(y, np.nan), y)[0] == tasks.of("regression").lowest
    one = np.full((1, 2), 7.0, np.float32)  # a client of one test sample, or of one target
    assert tasks.of("regression").measured(one, one) == (1.0, 0.0)
    assert tasks.of("regression").measured(one + 3, one) == (0.0, -3.0)
    assert tasks.of("regression").measured(y * 1e9, y * 0)[1] == pytest.approx(-11e9)
    units = np.array([1e-3, 1e6], np.float32)
    two = np.stack([np.arange(4.0), np.arange(4.0)], 1).astype(np.float32) * units
    blind = two.copy()
    blind[:, 0] = two[:, 0].mean()  # of two targets the one in millions does not hide the other
    assert tasks.of("regression").measured(blind, two)[0] == pytest.approx(0.5)
    flat = np.stack([two[:, 1], np.ones(4, np.float32)], 1)
    assert tasks.of("regression").measured(flat, flat)[0] == 1.0
    assert tasks.of("regression").measured(flat + np.array([0, 1], np.float32), flat)[0] == pytest.approx(0.5)
    several = np.array([[1, 0, 0], [1, 1, 0]])
    logits = np.array([[2.0, 1, -1], [3, -1, -1]], np.float32)
    assert tasks.of("multilabel").measured(logits, several) == (pytest.approx(2 / 3), pytest.approx(0.5))
    none = np.zeros_like(several)
    assert tasks.of("multilabel").measured(-np.abs(logits), none) == (1, 1), "nothing is said of samples with no label"
    assert tasks.of("multilabel").measured(np.full_like(logits, np.nan), none) == (0, 0)
    steps, padded = np.eye(2, dtype=np.float32)[np.array([[0, 1, 0]])], np.array([[0, 0, -1]])
    assert tasks.of("per_step").measured(steps, padded) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fedavg", {}), ("fedper", {}), ("fedrep", {}), ("ditto", {}), ("hermes", {"threshold": 0.0}),
        ("lg_fedavg", {}), ("ffgg", {}), ("apfl", {}), ("perfedavg", {}),
    ],
)  # fmt: skip
def test_both_engines_learn_numbers_in_their_own_units(algorithm: str, options: dict[str, Any]) -> None:
    data = made("regression")
    found = {
        engine: talaria.simulate(
            algorithm, data, "mlp", rounds=6, recipe={"epochs": 6, "lr": 0.05}, options=options, engine=engine
        )
        for engine in ("torch", "onnx")
    }
    assert found["torch"].accuracy.mean > 0.5
    assert found["torch"].accuracy.mean == pytest.approx(found["onnx"].accuracy.mean, abs=0.02)
    told = found["torch"].as_dict()
    assert (told["task"], told["figures"]["accuracy"]) == ("regression", "r2")
    answers = predict(found["torch"].model("carl"), data.clients["carl"].test.x)
    assert 200 < answers.mean() < 400, "the served model speaks in the targets' own units"


@pytest.mark.parametrize("task", ["regression", "multilabel"])
@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_the_model_that_apfl_shares_is_fedavgs(task: str, engine: Any) -> None:
    one, other = (
        talaria.simulate(name, made(task), "mlp", rounds=2, recipe={"epochs": 2}, engine=engine).learned.shared
        for name in ("apfl", "fedavg")
    )
    assert roundings(one, other) < 64


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_the_gradient_that_ffgg_sends_is_that_of_the_tasks_loss(engine: Any) -> None:
    steps = {"gamma": 1.0, "head_epochs": 0, "allow_degenerate": True}
    found = talaria.simulate(
        "ffgg", made("regression"), "mlp", rounds=1, options={"form": "gradient", **steps}, engine=engine
    )
    first, _ = rounds.start(found.run)
    sent = []
    for one in members_of(made("regression").clients).values():
        task = device_task.task_of(found.run, one, 1, None)
        state = engines.calibrate(task, state_of(task.model))
        sent.append(engines.gradient(task, state, only=task.split.of("body")))
    mean = {key: first[key] - sum(one[key] for one in sent) / len(sent) for key in first}
    assert roundings(found.learned.shared, mean) < 64


class Bending(Module):
    """A layer that bends, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Linear(6, 5), Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.first(x).tanh())
        return out


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize(
    ("task", "theirs"),
    [
        ("regression:kind=squared", lambda out, y: F.mse_loss(out, y) / 2),
        ("multilabel", lambda out, y: F.binary_cross_entropy_with_logits(out, y.float())),
    ],
)
def test_the_exact_form_of_perfedavg_bends_with_the_tasks_loss(task: str, theirs: Any, engine: Any) -> None:
    data = made(task)
    run = talaria.simulate("perfedavg", data, Bending(), rounds=1, options={"form": "exact"}).run
    one = device_task.task_of(run, members_of(data.clients, engine=engine)["anna"], 1, None)
    x, y = one.train.x[:9], one.train.y[:9]
    walk = engines.walk(one, state_of(one.model), one.recipe)
    weights, draws = walk.weights, np.random.default_rng(1)
    along = {key: draws.normal(size=value.shape).astype(np.float32) for key, value in weights.items()}

    def loss(*values: torch.Tensor) -> Any:
        named = dict(zip(weights, values, strict=True))
        return theirs(functional_call(Bending().double(), named, torch.tensor(x).double()), torch.tensor(y).double())

    at, ways = (tuple(torch.tensor(value).double() for value in given.values()) for given in (weights, along))
    wanted = dict(zip(weights, torch.autograd.functional.hvp(loss, at, ways)[1], strict=True))
    found = walk.curved(x, y, along, walk.draws("train"))
    assert roundings(found, {key: value.numpy().astype(np.float32) for key, value in wanted.items()}) < 200


def test_what_a_device_scales_by_stays_on_it_and_does_not_move_with_its_data() -> None:
    data = made("regression", 1)
    run = talaria.simulate("fedper", data, "mlp", rounds=1).run
    member = members_of(data.clients)["bela"]
    shared, _ = rounds.start(run)
    update, private = rounds.participate(run, member, shared, None, 1)
    assert not any("targets" in name for name in update.tensors)
    assert private["targets/mean"] == pytest.approx(member.train.y.mean(), rel=1e-5)
    later = Samples(member.train.x, member.train.y + np.float32(500))
    _, after = rounds.participate(run, Member("bela", later, member.val), shared, private, 2)
    assert after["targets/mean"] == private["targets/mean"]


@pytest.mark.parametrize("width", [1, 2])
def test_a_client_with_so_few_numbers_that_none_is_left_to_validate_takes_part(width: int) -> None:
    """Clients of 3 samples have none of 10 % to validate with, in a simulation and in a folder that begins to fill."""
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(43, 4)), np.repeat(["anna", "bela"], [3, 40])
    y = x[:, :width] if width > 1 else x[:, 0]
    found = talaria.simulate(
        "fedavg", talaria.data.Federated.from_arrays(x, y, client, task="regression"), "mlp", rounds=1
    )
    assert set(found.clients) == {"anna", "bela"}


def with_few(task: str, x: Any, y: Any, few: Any, engine: Any) -> float:
    """R² of a newcomer who has a few labels, over all samples; the members share these."""
    members = Federated.from_arrays(x, y, np.repeat(PEOPLE, 120), task=task)
    late = Client(Samples(x[few], y[few]), Samples(x[few], y[few]), Samples(x, y))
    data = replace(members, newcomers={"dora": late})
    done = talaria.simulate("fedavg", data, "mlp", rounds=4, recipe={"epochs": 4, "lr": 0.05}, engine=engine)
    assert done.newcomers is not None
    assert done.accuracy.mean > 0.4, "members have enough labels for either task"
    return done.newcomers.clients["dora"].accuracy


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_where_zero_means_something_the_mean_of_a_few_labels_is_not_taken_for_a_fact(engine: Any) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(360, 6)).astype(np.float32)
    y = (x[:, :1] - x[:, 1:2] + draw.normal(size=(360, 1))).astype(np.float32)  # a change: 0 on average
    few = np.argsort(-y[:, 0])[:12]  # whose labels are all of one side
    own, zero = (with_few(task, x, y, few, engine) for task in ("regression", "regression:center=zero"))
    assert own < 0 < zero


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_where_a_number_means_the_same_to_everybody_so_does_its_spread(engine: Any) -> None:
    """Who has seen only quiet days still forecasts the others as the fleet does."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(360, 6)).astype(np.float32)
    y = 20 * (x[:, :1] - x[:, 1:2]) + draw.normal(size=(360, 1)).astype(np.float32)
    quiet = np.argsort(np.abs(y[:, 0]))[:12]
    words = ("regression:center=zero", "regression:center=zero,spread=25")
    own, shared = (with_few(task, x, y, quiet, engine) for task in words)
    assert own < 0.3
    assert shared > 0.8


def test_a_spread_for_all_is_a_devices_scale_of_every_target() -> None:
    y = np.array([[1.0, 50.0], [3.0, 70.0]], np.float32)
    scale = tasks.of("regression:spread=4").scale(y)
    assert scale is not None
    assert (scale.mean.tolist(), scale.sd.tolist()) == ([2.0, 60.0], [4.0, 4.0])
    assert scale.scaled(y).tolist() == [[-0.25, -2.5], [0.25, 2.5]]


def test_several_labels_are_learned_on_both_engines() -> None:
    for engine in ("torch", "onnx"):
        found = talaria.simulate(
            "hermes", made("multilabel"), "mlp", rounds=6, recipe={"epochs": 6, "lr": 0.05}, engine=engine
        )
        assert found.accuracy.mean > 0.75


class Steps(Module):
    """A label for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = GRU(2, 8, batch_first=True), Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x.transpose(1, 2))[0])
        return out


class Blind(Module):
    """Shares of six features of which it does not see one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Linear(6, 6), Linear(6, 2)
        self.register_buffer("mask", torch.tensor([0.0] * 5 + [-torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((self.first(x) + self.mask).softmax(1))
        return out


def test_a_class_for_each_step_of_a_sequence() -> None:
    x = np.random.default_rng(0).normal(size=(90, 2, 9)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    y[:, 7:] = -1
    data = Federated.from_arrays(x, y, np.repeat(PEOPLE, 30), task="per_step", layout="channels_first")
    for engine in ("torch", "onnx"):
        found = talaria.simulate("ditto", data, Steps(), rounds=4, recipe={"epochs": 8, "lr": 0.1}, engine=engine)
        assert found.accuracy.mean > 0.8
    with pytest.raises(
        ModelError, match=r"'mlp': task='per_step' takes \(N, steps, classes\), but the model gives \(2, 2\)"
    ):
        talaria.simulate("fedavg", data, "mlp", rounds=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"task": "guess"}, "task='guess' is unknown; use one of classification, regression, multilabel, per_step"),
        ({"task": "regression:kind=odd"}, "kind='odd'.*huber"),
        ({"task": "regression:delta=0"}, "delta=0.*above 0"),
        ({"task": "regression:center=median"}, "center='median' is unknown; use 'mean' or 'zero'"),
        ({"task": "regression:spread=0"}, "spread=0.*above 0, in the targets' units"),
        ({"task": "regression:spread=wide"}, "spread='wide'.*a number or left out"),
        ({"task": "multilabel"}, "task='multilabel', but the targets of 'arrays' are for 'regression'"),
        ({"recipe": {"smoothing": 0.1}}, "smoothing=0.1 smooths the labels of plain classification.*set it to 0"),
        (
            {"algorithm": "pfedgm"},
            "pfedgm: its head is one Gaussian for each class, so it cannot learn task='regression'",
        ),
    ],
)
def test_what_does_not_fit_a_task_is_refused_at_once(words: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        talaria.simulate(**{"algorithm": "fedavg", "data": made("regression"), "rounds": 1, **words})


@dataclass(frozen=True)
class Smooth(FedAvg):
    """An algorithm of a user's own, with an objective of classes, whose card does not say so."""

    def fit(self, task: Task, shared: Any, private: Any) -> tuple[Update, Any]:
        state = train(task, {**shared, **private}, objective=CrossEntropy(0.1))
        return update(task, state, shared), private


class Forecast(Module):
    """What it read last, and beside it what a layer says."""

    def __init__(self, shape: tuple[int, ...], outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.inner, self.fc = Linear(shape[0], 8), Linear(8, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1:] + self.fc(self.inner(x).tanh())


class Tied(Forecast):
    """Its last layer has another one's weight, and says all."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__((shape[0],), 8)
        self.outer = Linear(8, outputs)
        self.inner, self.fc = Linear(8, outputs), Linear(outputs, 8)
        self.inner.weight = self.outer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.fc(self.inner(torch.cat([x, x[:, :2]], 1))))


class Apart(Module):
    """A layer for each number."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.inner, self.head = Linear(shape[0], 8), torch.nn.ModuleList(Linear(8, 1) for _ in range(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).tanh()
        return torch.cat([one(x) for one in self.head], 1)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Apart, r"last layer \(head.1.weight\) gives 1 of the model's 2 numbers, .*'regression:center=zero,spread=1'"),
        (Forecast, r"Forecast gives is more than its last layer \(fc.weight\) says.*'regression:center=zero,spread=1'"),
        (lambda *shape: Forecast(*shape, bias=False), r"head \(fc.weight\) has no weight and bias.*spread=1'"),
        (Tied, r"Tied gives is more than its last layer \(outer.weight\) says"),
    ],
)
def test_what_a_last_layer_cannot_scale_is_refused_before_it_learns(model: Any, said: str) -> None:
    """It was scaled by halves, and R² fell far below 0 where the loss had been small."""
    data, learned = made("regression"), list[int]()
    with pytest.raises(ModelError, match=said):
        talaria.simulate("fedavg", data, model, rounds=1, progress=lambda facts: learned.append(facts.round))
    assert not learned
    if model not in (Tied, Apart):
        personal = talaria.Personalizer(model(data.input_shape, 2), task="regression", head="fc")
        with pytest.raises(ModelError, match=said):
            personal.fit(next(iter(data.clients.values())).train, epochs=1)
    plain = "regression:center=zero,spread=1"
    result = talaria.simulate("fedavg", data, model, rounds=1, task=plain)
    one = next(iter(result.clients))
    state = {name: torch.from_numpy(value) for name, value in result.learned.shared.items()}
    x = torch.from_numpy(data.clients[one].test.x)
    assert torch.equal(result.model(one)(x), functional_call(result.model(one), state, (x,), tie_weights=False))


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_an_objective_of_classes_says_of_other_targets_what_it_takes(task: str) -> None:
    said = "cross-entropy: outputs .* are not of one class for each sample; .*classes_alone"
    with pytest.raises(DataError, match=said):
        talaria.simulate(Smooth(), made(task), rounds=1, engine="torch")


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_whose_training_diverged_is_named(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"update of '\w+': tensor .* NaN or infinity, .*; lower the learning rate"):
        talaria.simulate("fedavg", made("multilabel"), "mlp", rounds=3, recipe={"lr": 1e30}, engine=engine)


@pytest.mark.parametrize("how", [{}, {"workers": 2}, {"codec": "int8"}, {"asynchronous": True}], ids=str)
def test_whose_model_runs_away_is_named_while_it_is_finite(how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"update of '\w+': tensor .* at most 1e\+06.*lower the learning rate"):
        talaria.simulate("fedavg", made("multilabel"), "mlp", rounds=3, recipe={"lr": 1e3}, **how)


@pytest.mark.parametrize(("algorithm", "tensor"), [("local", "fc1.weight"), ("ditto", "personal/fc1.weight")])
def test_what_diverged_is_not_kept_on_a_device(algorithm: str, tensor: str) -> None:
    recipe = {"lr": 1e30} if algorithm == "local" else {}
    options = {} if algorithm == "local" else {"personal_lr": 1e30}
    with pytest.raises(
        ConfigError, match=rf"private state of 'anna': tensor '{tensor}' holds NaN or infinity.*lower the learning rate"
    ):
        talaria.simulate(algorithm, made("multilabel"), "mlp", rounds=3, recipe=recipe, options=options)


def test_a_network_with_a_mask_of_infinities_learns_under_both_policies_of_buffers() -> None:
    for buffers in ("local", "aggregate"):
        found = talaria.simulate("fedper", made("multilabel"), Blind(), rounds=1, buffers=buffers)
        assert np.isinf(found.model("anna").state_dict()["mask"].numpy()).any()


def test_targets_that_do_not_fit_are_refused() -> None:
    x = np.zeros((9, 3), np.float32)
    with pytest.raises(DataError, match=r"y\[0\] holds NaN"):
        Samples(x, np.full(9, np.nan, np.float32))
    with pytest.raises(
        DataError, match=r"data: y\[4\] holds NaN, infinity or a value beyond float32; drop that sample"
    ):
        Federated.from_arrays(x, np.where(np.arange(9) == 4, np.nan, 1.0), task="regression")
    with pytest.raises(DataError, match=r"y spans -1\.\.-1, so no step has a class; label steps from 0 up"):
        Federated.from_arrays(np.zeros((9, 2, 5)), np.full((9, 5), -1), task="per_step")
    with pytest.raises(DataError, match=r"y spans -1\.\.0, so all steps have one class"):
        Federated.from_arrays(np.zeros((9, 2, 5)), np.full((9, 5), -1) + np.eye(9, 5, dtype=int), task="per_step")
    with pytest.raises(DataError, match=r"y has shape \(9, 5\); .* number the classes or labels of a row"):
        Federated.from_arrays(np.zeros((9, 2, 5)), np.full((9, 5), "walk"), task="per_step")
    flat = Federated.from_arrays(np.zeros((9, 5)), np.arange(45).reshape(9, 5) % 2, task="per_step")
    with pytest.raises(ConfigError, match=r"class for each step of samples of shape \(5,\); .*x\[:, None\]"):
        talaria.simulate("fedavg", flat, rounds=1)
    with pytest.raises(DataError, match=r"name the task of these targets"):
        Federated.from_arrays(x, np.zeros((9, 2)))
    with pytest.raises(DataError, match=r"labels span 0\.\.2, need 0 or 1"):
        Federated.from_arrays(x, np.arange(18).reshape(9, 2) % 3, task="multilabel")


@pytest.mark.parametrize(("shape", "dtype"), [((5, 12), "f4"), ((12, 5), "f4"), ((5, 12), "u1"), ((5, 5), "f4")])
def test_the_side_that_is_as_long_as_the_steps_is_the_time(shape: tuple[int, int], dtype: str) -> None:
    x, y = np.random.default_rng(0).integers(0, 9, (9, *shape)).astype(dtype), np.arange(45).reshape(9, 5) % 2
    data = Federated.from_arrays(x, y, task="per_step", standardize=False)
    assert data.input_shape == (5 if shape == (5, 5) else 12, 5)
    assert talaria.simulate("fedavg", data, rounds=1).accuracy.mean > 0


def test_a_device_with_a_kit_serves_numbers_in_their_own_units() -> None:
    data = made("regression")
    base = talaria.simulate("fedper", data, "mlp", rounds=1, seed=91, recipe={"optimizer": "adam", "clip": 1.0}).run
    one = members_of(data.clients)["carl"]
    shared, _ = rounds.start(base)
    served = {}
    for engine in ("torch", "onnx"):
        if engine == "onnx":
            run_model.equip(base, kit_of(base))
        member = Member("carl", one.train, one.val, engine=engine)
        _, private = rounds.participate(base, member, shared, None, 1)
        served[engine] = rounds.personalize(base, member, shared, private)
    test = data.clients["carl"].test.x
    assert isinstance(served["onnx"], Served)
    assert np.allclose(predict(served["onnx"], test), predict(served["torch"], test), rtol=1e-3)
    state = served["torch"].state_dict()
    assert all(np.allclose(value, state[name], rtol=1e-2, atol=1e-2) for name, value in served["onnx"].state.items())


def test_who_has_no_labelled_step_is_refused_and_scores_nothing() -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3, 12)), np.tile([0, 1], (40, 6))
    who, split = np.repeat(["anna", "bela"], 20), np.tile([0, 0, 1, 2], 10)
    for part, number in (("train", 0), ("test", 2)):
        odd = np.where(((who == "bela") & (split == number))[:, None], -1, y)
        with pytest.raises(DataError, match=f"bela {part} has no labelled step, all are -1; label some, or drop"):
            Federated.from_arrays(x, odd, who, split, task="per_step")
    odd = np.where(((who == "bela") & (split == 1))[:, None], -1, y)
    assert Federated.from_arrays(x, odd, who, split, task="per_step").labels == ("label-0", "label-1")
    with pytest.raises(DataError, match="train: no step is labelled, all are -1"):
        talaria.Personalizer(talaria.ModelSpec("steps_cnn", (3, 12), 2), task="per_step").fit((x, np.full_like(y, -1)))
