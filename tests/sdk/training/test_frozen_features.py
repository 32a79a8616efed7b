from collections.abc import Callable

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import Tensor, nn
from torch.nn import Module

import talaria
from talaria.algorithms.fedrep import FedRep
from talaria.data import load as load_data
from talaria.errors import ModelError
from talaria.model import zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import load, state_of, tensor_of
from talaria.personalizer import Personalizer
from talaria.planning.memory import train_only
from talaria.planning.plan import Plan
from talaria.tensors import Tensors
from talaria.training import frozen_features, loop
from talaria.training.interface import Task
from talaria.types import Recipe, Samples


def task_of(
    spec: ModelSpec, count: int = 24, recipe: Recipe = Recipe(epochs=2, batch=8, lr=0.05, momentum=0.9)
) -> Task:
    model = zoo.build(spec)
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(count, *spec.input_shape, generator=draws)
    samples = Samples.of(x, torch.randint(0, spec.classes, (count,), generator=draws))
    split = zoo.split(spec, model)
    return Task(
        model=model, split=split, train=samples, val=samples.take(np.arange(4)), recipe=recipe, classes=spec.classes
    )


def lived_in(task: Task) -> Tensors:
    """A state whose BatchNorm statistics are not the initial ones."""
    return loop.calibrate(task, state_of(task.model))


IMU = ModelSpec("imu_cnn", (6, 40), 5)
MOBILE = ModelSpec("mobilenet_v3_small", (3, 32, 32), 5)
LITE = ModelSpec("efficientnet_lite0", (3, 32, 32), 5, adapters=AdapterSpec("lowrank", 4, where=("features.stage7",)))
GATED = ModelSpec("mypkg.nets:Gated", (6, 40), 5, adapters=AdapterSpec("lowrank", 4, where=("gru",)))
"""Adapters inside of a layer."""


@pytest.mark.parametrize(("spec", "part"), [(IMU, "head"), (MOBILE, "head"), (LITE, "adapters")])
def test_halves_put_together_are_the_network(spec: ModelSpec, part: str) -> None:
    task = task_of(spec)
    model = load(task.model, lived_in(task))
    found = frozen_features.halve(
        model, task.split.of("adapters", "head") if part == "adapters" else task.split.of("head")
    )
    assert not isinstance(found, str)
    whole = loop.predict(model, task.train.x)
    found.upper.eval()
    assert roundings(found.upper(found.lower(tensor_of(task.train.x))), whole) <= 200
    names = set(found.upper.state_dict())
    assert names < set(model.state_dict())
    assert len(names) < len(task.split.keys) / 2


def test_training_on_kept_features_gives_the_same_weights() -> None:
    for spec in (IMU, LITE, GATED):
        task = task_of(spec, recipe=Recipe(epochs=2, batch=8, lr=0.01, momentum=0.5))
        state = lived_in(task)
        only = task.split.of("adapters", "head")
        plain = loop.train(task, state, only=only)
        kept = frozen_features.train(task, state, only=only)
        assert list(kept) == list(plain)
        assert all(np.array_equal(kept[k], plain[k]) for k in plain if k not in only)
        # Every step makes what was rounded before it larger; a slip would lead as far away as the training went.
        apart, gone = (sum(float(np.square(a[k] - plain[k]).sum()) for k in only) ** 0.5 for a in (kept, state))
        assert apart <= 0.01 * gone, (apart, gone)
        assert gone > 0


def test_the_frozen_layers_run_once_per_sample() -> None:
    task = task_of(IMU, recipe=Recipe(epochs=5, batch=8, lr=0.05, momentum=0.0))
    calls: list[int] = []
    handle = task.model.get_submodule("conv1").register_forward_hook(lambda _m, _i, out: calls.append(len(out)))
    frozen_features.train(task, lived_in(task), only=task.split.of("head"))
    handle.remove()
    seen = sum(calls)
    # One pass calibrates BatchNorm, one asks for the shape of a single sample, one keeps what is learned from.
    assert seen == 24 + 1 + 24


def test_a_round_of_fedrep_passes_its_still_body_once_whatever_the_head_takes() -> None:
    def passed(epochs: int) -> int:
        task, calls = task_of(IMU, recipe=Recipe(epochs=1, batch=8, lr=0.05, momentum=0.0)), list[int]()
        task.model.get_submodule("conv1").register_forward_hook(lambda _m, _i, out: calls.append(len(out)))
        algorithm = FedRep(head_epochs=epochs, body_epochs=0, allow_degenerate=True)
        algorithm.fit(task, *algorithm.init(task.model, task.split))
        return sum(calls)

    # Once for BatchNorm, then each sample once, and a single one for the shape of what is kept.
    assert passed(1) == 24 + 24
    assert passed(2) == passed(10) == 24 + 24 + 1


def test_other_samples_and_another_recipe_are_kept_as_well() -> None:
    task = task_of(IMU)
    state, only = lived_in(task), task.split.of("head")
    options = {"recipe": Recipe(epochs=3, batch=5, lr=0.05, momentum=0.0), "samples": task.val, "purpose": "tune"}
    plain, kept = (
        loop.train(task, state, only=only, **options),
        frozen_features.train(task, state, only=only, **options),
    )
    assert not np.array_equal(plain["head.weight"], state["head.weight"])
    for key, value in plain.items():
        assert roundings(kept[key], value) <= 400


def test_through_onnx_runtime_the_features_are_the_same() -> None:
    from talaria.planning.onnx_runtime import exporter

    task = task_of(IMU)
    state = lived_in(task)
    only = task.split.of("head")
    plain, fast = (frozen_features.cached(task, state, only, export=e).task for e in (None, exporter()))
    assert plain is not None
    assert fast is not None
    assert roundings(fast.train.x, plain.train.x) <= 200


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.but(recipe=t.recipe.but(augment="imu")), "augment"),
        (lambda t: t.but(train=t.train.take(np.arange(0))), "no samples"),
    ],
)
def test_what_cannot_be_kept_is_trained_plainly(change: Callable[[Task], Task], word: str) -> None:
    task = change(task_of(IMU))
    state = state_of(task.model)
    only = task.split.of("head")
    assert word in frozen_features.cached(task, state, only).why
    plain, kept = loop.train(task, state, only=only), frozen_features.train(task, state, only=only)
    assert all(np.array_equal(plain[k], kept[k]) for k in plain)


def test_too_many_features_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(IMU)
    monkeypatch.setattr(frozen_features, "LARGEST_CACHE", 1000)
    found = frozen_features.cached(task, state_of(task.model), task.split.of("head"))
    assert found.task is None
    assert "MB" in found.why


class Data(Module):
    """Python control flow on values."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.low(x)
        out: Tensor = self.head(y if y.sum() > 0 else -y)
        return out


class Skip(Module):
    """The input is read above the first trained layer, and a dropout sits below the head."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.drop, self.head = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.cat([torch.relu(self.low(x)), x], 1)))
        return out


def test_a_network_that_cannot_be_followed_says_so() -> None:
    assert "cannot be followed" in str(frozen_features.halve(Data(), ["head.weight", "head.bias"]))


def test_a_dropout_below_the_head_is_drawn_anew_in_every_step() -> None:
    found = frozen_features.halve(Skip(), ["head.weight", "head.bias"])
    assert not isinstance(found, str)
    assert any(isinstance(m, nn.Dropout) for m in found.upper.modules())
    assert not any(isinstance(m, nn.Dropout) for m in found.lower.modules())


class Waves(Module):
    """Numbers that the pass makes without a sample, below the head and in it."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.mid, self.head = nn.Linear(4, 4), nn.Linear(6, 6), nn.Linear(6, 4)
        self.register_buffer("waves", torch.linspace(-1, 1, 24).reshape(6, 4).cos())
        self.register_buffer("prior", torch.linspace(0, 1, 12).reshape(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.low(x)) @ self.waves.T + 0.1 * torch.arange(6.0)
        out: Tensor = self.head(torch.relu(self.mid(y))) @ self.prior.exp().T
        return out


def test_numbers_that_the_pass_makes_are_no_part_of_the_state() -> None:
    """A head alone was refused: its tensors '_tensor_constant0' are in no state."""
    data, model = load_data("mypkg.sets:rings"), Waves()
    found = [
        talaria.simulate("fedrep", data, model, head="head", rounds=2, engine=engine) for engine in ("torch", "onnx")
    ]
    for name, value in found[0].model("client-0").state_dict().items():
        assert roundings(found[1].model("client-0").state_dict()[name], value) <= 2000, name
    before = set(vars(model))
    assert not isinstance(frozen_features.halve(model, ["head.weight", "head.bias"]), str)
    assert set(vars(model)) == before


class Noisy(Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.low(x))
        if self.training:
            y = y + torch.randn_like(y)
        out: Tensor = self.head(y)
        return out


def test_noise_below_the_head_is_drawn_anew_in_every_step() -> None:
    model = Noisy()
    found = frozen_features.halve(model, ["head.weight", "head.bias"])
    assert not isinstance(found, str)
    x = torch.ones(2, 4)
    assert torch.equal(found.lower(x), found.lower(x))
    assert not torch.equal(found.upper(found.lower(x)), found.upper(found.lower(x)))


class Twins(Module):
    """Two halves of a sample through one body."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.head = nn.Linear(2, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.tanh(x).chunk(2, 1)
        out: Tensor = self.head(torch.cat([torch.relu(self.low(one)), torch.relu(self.low(two))], 1))
        return out


def test_pieces_of_a_value_are_no_features() -> None:
    """What stays frozen ends before them: one value that holds two was taken for a tensor."""
    found = frozen_features.halve(Twins(), ["low.weight", "low.bias"])
    assert not isinstance(found, str)
    assert found.cut == "tanh"
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    plan = Plan(adapter="lowrank", rank=1, trained=("adapters", "head"))
    assert len(list(Personalizer(Twins(), plan=plan).fit((x, y), epochs=2).model.parameters())) == 6
    adapters = AdapterSpec("lowrank", 1, where=("low",))
    for engine in ("torch", "onnx"):
        talaria.simulate(
            "fedrep", load_data("mypkg.sets:rings"), Twins(), rounds=1, engine=engine, adapters=adapters, head="head"
        )


def test_nothing_is_kept_where_the_first_layer_trains() -> None:
    task = task_of(IMU)
    assert "first layer" in frozen_features.cached(task, state_of(task.model), task.split.keys).why


def test_frozen_layers_are_those_of_the_training_loop() -> None:
    """The memory model freezes by its own, lower function; both leave the same gradients, and no BatchNorm astir."""
    spec = LITE
    model, other = zoo.build(spec), zoo.build(spec)
    only = zoo.split(spec, model).of("adapters", "head")
    loop.freeze_but(model, only)
    train_only(other, only)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in other.parameters()]
    norms = [
        (a.training, b.training)
        for a, b in zip(model.modules(), other.modules(), strict=True)
        if isinstance(a, nn.BatchNorm2d)
    ]
    assert norms
    assert all(a == b for a, b in norms)


def test_weights_that_are_too_large_are_not_told_to_be_a_damaged_sample() -> None:
    """An owner was asked to drop the first of windows that are all whole."""
    task = task_of(IMU, recipe=Recipe(epochs=2, batch=8))
    state = lived_in(task)
    state["conv1.weight"] = np.full_like(state["conv1.weight"], 3e38)
    with pytest.raises(ModelError, match="frozen layers make NaN or infinity"):
        frozen_features.train(task, state, only=task.split.of("adapters", "head"))
