from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from talaria import personalizer, tasks
from talaria.errors import BudgetError, BundleError, ConfigError, DataError, ModelError
from talaria.model.spec import ModelSpec
from talaria.model.state import state_of, tensor_of
from talaria.personalizer import Joining, Personalizer
from talaria.planning.budget import Budget
from talaria.planning.plan import Plan
from talaria.planning.profile import Profile
from talaria.tensors import equal
from talaria.types import Recipe, Samples

SPEC = ModelSpec("imu_cnn", (6, 40), 3)
DEVICE = Profile(
    machine="0" * 16, cpu="a test", cores=1, memory_mb=1, train_rate=1e9, matrix_rate=1e9, bandwidth_mbs=1, disk_mbs=1
)


def motions(count: int, seed: int) -> Samples:
    """Three motions: sines of different frequency on all axes, in noise."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    time = torch.arange(40) / 40
    wave = torch.sin(2 * torch.pi * (2.0 + 4 * y)[:, None, None] * time + 6 * torch.rand(count, 6, 1, generator=draws))
    return Samples.of(wave + 0.3 * torch.randn(count, 6, 40, generator=draws), y)


TRAIN, VAL = motions(90, 1), motions(60, 2)


def fitted(plan: Plan | None = None, epochs: int = 12) -> Personalizer:
    return Personalizer(SPEC, plan=plan or Plan()).fit(TRAIN, VAL, epochs=epochs)


def test_alone_it_learns_within_its_budget() -> None:
    personal = Personalizer(SPEC, Budget(bundle_mb=0.06), profile=DEVICE).fit((TRAIN.x, TRAIN.y), VAL, epochs=15)
    assert personal.plan.widths
    assert personal.accuracy is not None
    assert personal.accuracy > 0.9
    values = sum(p.numel() for p in personal.model.parameters())
    assert values * (2 if personal.plan.precision == "fp16" else 4) <= 60_000
    assert not personal.model.training
    assert personal.model(tensor_of(VAL.x)).shape == (60, 3)


def test_equal_seeds_give_equal_models() -> None:
    one, two = fitted(Plan(widths={"conv1": 16}), 3), fitted(Plan(widths={"conv1": 16}), 3)
    for (name, a), (_, b) in zip(one.model.state_dict().items(), two.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_a_training_that_diverges_is_refused_and_the_model_before_stays() -> None:
    personal = fitted(epochs=2)
    before, accuracy = personal.model, personal.accuracy
    with pytest.raises(ConfigError, match=r"with lr=1e\+30 the training diverged, tensor .* NaN or infinity; lower lr"):
        personal.fit(TRAIN, VAL, epochs=2, recipe=Recipe(lr=1e30))
    assert (personal.model, personal.accuracy) == (before, accuracy)


def test_what_the_plan_freezes_does_not_move() -> None:
    personal = fitted(Plan(trained=("adapters", "head"), adapter="lowrank", rank=2), 4)
    from talaria.model import zoo
    from talaria.model.spec import AdapterSpec

    start = zoo.build(ModelSpec("imu_cnn", (6, 40), 3, adapters=AdapterSpec("lowrank", 2))).state_dict()
    for name, value in personal.model.state_dict().items():
        if "adapter" not in name and not name.startswith("head") and "num_batches" not in name:
            assert torch.equal(value, start[name]), name
    assert not torch.equal(personal.model.state_dict()["head.weight"], start["head.weight"])


@pytest.mark.parametrize(
    ("plan", "frozen", "learned"),
    [(Plan(), "conv1", "head.weight"), (Plan(trained=("body", "head")), "head", "conv1.weight")],
)
def test_what_the_recipe_freezes_does_not_move(plan: Plan, frozen: str, learned: str) -> None:
    from talaria.model import zoo

    start = zoo.build(SPEC).state_dict()
    personal = Personalizer(SPEC, plan=plan).fit(TRAIN, VAL, epochs=2, recipe=Recipe(freeze=(frozen,)))
    after = personal.model.state_dict()
    assert torch.equal(after[f"{frozen}.weight"], start[f"{frozen}.weight"])
    assert not torch.equal(after[learned], start[learned])


def test_channels_go_where_the_samples_need_them_least() -> None:
    budget = Budget(bundle_mb=0.06)
    personal = Personalizer(SPEC, budget, profile=DEVICE, by_worth=True)
    even = personal.plan
    personal.fit(TRAIN, VAL, epochs=15)
    assert personal.plan.widths
    assert personal.plan.widths != even.widths
    assert "worth least" in personal.plan.reasons["widths"]
    assert personal.plan.model == even.model
    assert (personal.accuracy or 0) > 0.9
    for name, width in personal.plan.widths.items():
        assert personal.model.get_submodule(name).weight.shape[0] == width
    for wrong in ({"model": nn.Linear(2, 2)}, {"model": SPEC, "plan": even}):
        with pytest.raises(ConfigError, match="by_worth"):
            Personalizer(**wrong, by_worth=True)  # type: ignore[arg-type]


def test_any_torch_module_is_pruned_by_a_plan_and_planned_for_a_budget() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv1d(6, 16, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten())
            self.out = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(self.body(x))
            return logits

    torch.manual_seed(0)
    net = Net()
    before = net.out.weight.clone()
    personal = Personalizer(net, head="out", plan=Plan(widths={"body.0": 8})).fit(TRAIN, VAL, epochs=3)
    assert personal.model.get_submodule("body.0").weight.shape[0] == 8
    assert torch.equal(net.out.weight, before)
    planned = Personalizer(net, Budget(bundle_mb=0.0044), profile=DEVICE)
    with pytest.raises(ModelError, match=r"not known yet; call fit\(train, val\) first"):
        _ = planned.plan
    planned.fit(TRAIN, VAL, epochs=3)
    kept = planned.plan.widths["body.0"]
    assert 0 < kept < 16
    assert planned.model.get_submodule("body.0").weight.shape[0] == kept
    assert (planned.plan.model, tuple(planned.model.get_submodule("out").weight.shape)) == (None, (3, 4 * kept))


def test_the_models_in_a_bundle_keep_its_budget(tmp_path: Path) -> None:
    """The fp32 form alone fits it, and with the small one that is served beside it does not."""
    bare = Personalizer(SPEC, profile=DEVICE).fit(TRAIN, VAL, epochs=2)
    bare.export(tmp_path / "bare.talaria", seconds=0)
    with ZipFile(tmp_path / "bare.talaria") as file:
        fp32 = file.getinfo("models/fp32.onnx").file_size
    limit = 1.1 * fp32 / 1e6
    personal = Personalizer(SPEC, Budget(bundle_mb=limit), profile=DEVICE).fit(TRAIN, VAL, epochs=2)
    assert not personal.plan.widths
    personal.export(tmp_path / "me.talaria", seconds=0)
    with ZipFile(tmp_path / "me.talaria") as file:
        assert sum(one.file_size for one in file.infolist() if one.filename.startswith("models/")) <= limit * 1e6


def test_a_bundle_runs_without_torch_and_holds_the_plan(tmp_path: Path) -> None:
    from talaria_export import Predictor

    personal = fitted(Plan(widths={"conv2": 16}, reasons={"widths": "a test"}), 6)
    report = personal.export(tmp_path / "deep" / "me.talaria", labels=["slow", "brisk", "fast"], seconds=0)
    assert report.ok
    predictor = Predictor(tmp_path / "deep" / "me.talaria")
    labels = [predictor(x).label for x in VAL.x[:6]]
    expected = personal.model(tensor_of(VAL.x[:6])).argmax(1)
    assert labels == [["slow", "brisk", "fast"][i] for i in expected]


def test_the_fleet_replaces_only_what_it_betters() -> None:
    personal = fitted(epochs=12)
    mine = personal.model
    seen: list[Joining] = []

    def worse(joining: Joining) -> nn.Module:
        seen.append(joining)
        return nn.Sequential(nn.Flatten(), nn.Linear(240, 3))

    personal.join("mqtt://broker.example", "watch", device="left", runtime=worse)
    assert personal.model is mine
    assert (seen[0].fleet, seen[0].device, len(seen[0].train)) == ("watch", "left", 90)

    class Oracle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(tensor_of(VAL.y), 3).float()

    personal.accuracy = 0.5
    oracle = Oracle()
    personal.join("mqtt://broker.example", "watch", runtime=lambda _: oracle)
    assert personal.model is oracle
    assert personal.accuracy == 1.0


def test_the_accuracy_that_pruning_cost_is_measured_and_its_limit_held(tmp_path: Path) -> None:
    tiny = Plan(widths={"conv1": 1, "conv2": 1, "conv3": 1, "conv4": 1})
    personal = Personalizer(SPEC, Budget(accuracy_drop=0.05), plan=tiny)
    assert personal.check is None
    check = personal.fit(TRAIN, VAL, epochs=9).check
    assert check is not None
    assert check.planned == personal.accuracy
    assert check.samples == len(VAL)
    assert check.drop > 0.05
    assert check.kept is False
    with pytest.raises(BudgetError, match=r"accuracy_drop=0\.05 is broken.*nearest possible") as refused:
        personal.export(tmp_path / "me.talaria")
    assert isinstance(refused.value.nearest, Budget)
    assert 0 <= (refused.value.nearest.accuracy_drop or 0) - check.drop < 0.0011
    whole = Personalizer(SPEC, plan=Plan(accuracy_drop=0.0)).fit(TRAIN, VAL, epochs=1).check
    assert whole is not None
    assert (whole.kept, whole.drop) == (True, 0.0)


def numbers(samples: Samples) -> Samples:
    """Two numbers of each motion, one in hundreds and one in thousandths."""
    return Samples(samples.x, np.stack([700 + 90 * samples.y, -0.003 * samples.y], 1).astype(np.float32))


def labels(samples: Samples) -> Samples:
    return Samples(samples.x, np.stack([samples.y == 0, samples.y > 0], 1).astype(np.int64))


def steps(samples: Samples) -> Samples:
    return Samples(samples.x, np.repeat(samples.y[:, None], 40, 1))


@pytest.mark.parametrize(
    ("task", "model", "own", "least"),
    [
        ("regression:kind=squared", ModelSpec("imu_cnn", (6, 40), 2), numbers, 0.5),
        ("multilabel", ModelSpec("imu_cnn", (6, 40), 2), labels, 0.8),
        ("per_step", ModelSpec("mypkg.nets:Steps", (6, 40), 3), steps, 0.4),
    ],
)
def test_another_task_is_learned_pruned_and_checked_by_its_own_score(
    task: str, model: ModelSpec, own: Any, least: float, tmp_path: Path
) -> None:
    train, val = own(TRAIN), own(VAL)
    groups = ("conv1", "conv2") if model.name == "imu_cnn" else ("one",)
    personal = Personalizer(model, Budget(accuracy_drop=0.9), plan=Plan(widths=dict.fromkeys(groups, 8)), task=task)
    personal.fit((train.x, train.y), val, epochs=15)
    out = personal.model(tensor_of(val.x)).numpy()
    assert personal.accuracy == pytest.approx(tasks.of(task).measured(out, val.y)[0])
    assert personal.accuracy > least, "in the targets' own units"
    check = personal.check
    assert check is not None
    assert (check.planned, check.samples, check.kept) == (personal.accuracy, len(val), True)
    assert check.dense > least
    report = personal.export(tmp_path / "me.talaria", seconds=0)
    assert report.figures["max_abs_diff"] < 0.01


class Convolutions(nn.Module):
    """Classes of each step, of convolutions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.said = nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.said(self.body(x).relu()).transpose(1, 2)
        return out


def test_a_network_of_convolutions_ends_in_the_last_one() -> None:
    y = (TRAIN.x[:, 0] > 0).astype(np.int64)
    network = Convolutions()
    after = Personalizer(network, plan=Plan(trained=("head",)), task="per_step").fit((TRAIN.x, y), epochs=1).model
    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, after.state_dict()[name])}
    assert moved == {"said.weight", "said.bias"}


def test_targets_that_do_not_fit_the_task_are_refused() -> None:
    with pytest.raises(DataError, match=r"val: targets are .* need float32 \(N, 3\)"):
        Personalizer(SPEC, task="regression").fit((TRAIN.x, np.zeros((90, 3), np.float32)), numbers(VAL))
    with pytest.raises(ModelError, match=r"gives \(2, 3\) .* it must give \(N, steps, classes\)"):
        Personalizer(nn.Sequential(nn.Flatten(), nn.Linear(240, 8), nn.Linear(8, 3)), head="2", task="per_step").fit(
            steps(TRAIN)
        )
    with pytest.raises(ConfigError, match=r"by_worth=True .* task='multilabel' has none; leave it out"):
        Personalizer(SPEC, by_worth=True, task="multilabel")
    with pytest.raises(ConfigError, match="task='sums' is unknown"):
        Personalizer(SPEC, task="sums")


def test_what_cannot_be_done_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without TLS"):
        fitted(epochs=1).join("mqtt://broker.example", "watch")
    monkeypatch.setattr(personalizer, "RUNTIMES", "talaria.nobody-is-in-this-group")
    with pytest.raises(ConfigError, match="needs the device's agent; pip install talaria"):
        fitted(epochs=1).join("mqtt://broker.example", "watch")
    fresh = Personalizer(SPEC, plan=Plan())
    with pytest.raises(ModelError, match="fit"):
        _ = fresh.model
    with pytest.raises(ModelError, match="fit"):
        fresh.export("x.talaria")
    with pytest.raises(DataError, match="no samples"):
        fresh.fit(TRAIN.take(np.arange(0)))
    with pytest.raises(DataError, match="shape"):
        fresh.fit(Samples.of(np.zeros((4, 6, 50)), np.zeros(4, int)))
    with pytest.raises(DataError, match=r"labels span 0\.\.3, need 0\.\.2"):
        fresh.fit(Samples.of(np.zeros((4, 6, 40)), np.arange(4)))
    with pytest.raises(ConfigError, match="ModelSpec"):
        Personalizer("imu_cnn")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match=r"cannot write .*file/me.talaria: .* make that folder"):
        fitted(epochs=1).export(tmp_path / "file" / "me.talaria")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(x)), x


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(1))
        return out


X, Y = np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 3
FOUR = ModelSpec("mlp", (4,), 3)


def test_arrays_and_lists_are_taken_as_tensors_are() -> None:
    pairs: list[tuple[Any, Any]] = [
        (X, Y),
        (X.tolist(), Y.tolist()),
        (list(X), list(Y)),
        (torch.tensor(X), torch.tensor(Y)),
    ]
    given = [Personalizer(FOUR).fit(pair, epochs=1).model.state_dict() for pair in pairs]
    for other in given[1:]:
        assert all(torch.equal(value, given[0][name]) for name, value in other.items())


@pytest.mark.parametrize(
    ("model", "train", "val", "says"),
    [
        (nn.Linear(4, 3), (X, Y), None, "the model is one layer, Linear, without a name and with nothing before it"),
        (FOUR, ([X[0], X[1][:2]], [0, 1]), None, "x: is no array .* give samples of one shape"),
        (FOUR, (X, X[:, 0]), None, "y has dtype float64, need whole numbers; a classifier needs classes"),
        (FOUR, (X, np.array(["a"] * 20)), None, "y: holds <U1, need numbers; turn texts"),
        (FOUR, (X[:, :3], Y), None, r"inputs of shape \(3,\), the model takes \(4,\)"),
        (FOUR, (X, Y + 1), None, r"train: labels span 1\.\.3, need 0\.\.2"),
        (FOUR, (X, Y), (X[:, :3], Y), r"val: inputs of shape \(3,\), train has \(4,\)"),
        (FOUR, (X, Y), (X, Y + 5), r"val: labels span 5\.\.7, need 0\.\.2"),
        (FOUR, (X, Y - 1), None, r"train: labels span -1\.\.1, need 0\.\.2"),
        (FOUR, (X, np.eye(3)[Y]), None, r"train: labels are int64 \(20, 3\), need int64 \(N,\), one class for each"),
        (FOUR, None, None, r"train: need Samples, or a pair \(x, y\) of arrays, got NoneType"),
        (Pair(), (X, Y), None, r"model: gives a tuple for a batch of 2; it must give"),
        (
            Words(),
            (np.arange(80).reshape(20, 4), Y),
            None,
            r"train's samples span 0\.\.79, .* no entry",
        ),
        (Words(), (np.ones((20, 4)), Y), (np.full((20, 4), 9), Y), r"val's samples span 9\.\.9, .* no entry"),
    ],
)
def test_what_cannot_be_learned_from_says_why(model: Any, train: Any, val: Any, says: str) -> None:
    with pytest.raises((DataError, ModelError), match=says):
        Personalizer(model).fit(train, val, epochs=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("budget", {"latency_ms": 3}), ("plan", {"widths": {}}), ("recipe", {"lr": 1}), ("profile", 5), ("head", 2)],
)
def test_settings_of_another_kind_are_refused_by_name(name: str, value: Any) -> None:
    settings, recipe = ({}, value) if name == "recipe" else ({name: value}, None)
    with pytest.raises(ConfigError, match=f"{name}=.* must be (a|the dotted name of a) "):
        Personalizer(FOUR, **settings).fit((X, Y), recipe=recipe)


@pytest.mark.parametrize(
    ("recipe", "task", "says"),
    [
        ({"steps": 5}, "classification", "recipe: steps=5 is for rounds, and fit learns for epochs=; leave it out"),
        ({"schedule": "cosine"}, "classification", "schedule='cosine' is for rounds"),
        ({"warmup": 3}, "classification", "warmup=3 is for rounds"),
        ({"smoothing": 0.1}, "classification:balance=true", "smoothing=0.1 smooths the labels of plain class"),
    ],
)
def test_what_fit_would_pass_over_in_a_recipe_is_refused(recipe: dict[str, Any], task: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Personalizer(FOUR, task=task).fit((X, Y), epochs=1, recipe=Recipe(**recipe))


class Spoken(nn.Module):
    """Words as samples hold them, and dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(nn.functional.dropout(self.embed(x).mean(1), 0.3, self.training))


def test_a_network_of_ones_own_is_trained_as_a_fleet_trains_it():
    draw = np.random.default_rng(0)
    y = np.tile(np.arange(3), 40)
    x = np.where(draw.random((120, 9)) < 0.6, draw.integers(0, 20, (120, 9)), 5 * y[:, None])
    network, found = Spoken(), []
    for seed in range(2):
        torch.manual_seed(seed)  # what falls away is the device's own draw
        personal = Personalizer(network).fit((x[:90], y[:90]), (x[90:], y[90:]), epochs=8)
        found.append(personal.model.state_dict())
    assert personal.accuracy > 0.6
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_an_app_that_infers_may_personalize_meanwhile(tmp_path: Path) -> None:
    """``torch.inference_mode`` around an app's code lets nothing learn, and what is made in it never."""
    draws, network = np.random.default_rng(0), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    samples = Samples.of(draws.normal(size=(12, 4)), np.arange(12) % 3)

    alone = Personalizer(network).fit(samples, epochs=2)
    with torch.inference_mode():
        found = Personalizer(network).fit(samples, epochs=2)
        report = found.export(tmp_path / "me.talaria", seconds=0)
    assert equal(state_of(found.model), state_of(alone.model))
    assert report.figures["max_abs_diff"] < 1e-4


class Noisy(nn.Module):
    """Two linear layers behind noise of its own; in training it waits for whoever trains beside it."""

    others = Barrier(2, timeout=1)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.head(self.body(x))  # type: ignore[no-any-return]
        with suppress(BrokenBarrierError):
            self.others.wait()
        return self.head(self.body(x + torch.rand(len(x), 4)))  # type: ignore[no-any-return]


def test_two_threads_learn_what_each_learns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0)
    samples, network = Samples.of(draws.normal(size=(12, 4)), np.arange(12) % 3), Noisy()

    def learned(_: int) -> Tensor:
        return Personalizer(network, head="head").fit(samples, epochs=3).model.head.weight  # type: ignore[return-value, union-attr]

    Noisy.others.abort()
    alone = learned(0)
    monkeypatch.setattr(Noisy, "others", Barrier(2, timeout=1))
    with ThreadPoolExecutor(2) as threads:
        assert all(torch.equal(one, alone) for one in threads.map(learned, range(2)))


def test_a_head_beside_a_spec_is_refused_which_has_its_own() -> None:
    with pytest.raises(ConfigError, match=r"head='fc' is a module's; a ModelSpec has its own"):
        Personalizer(ModelSpec("imu_cnn", (6, 32), 3), head="fc")
