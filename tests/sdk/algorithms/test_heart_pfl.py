"""HEART-PFL on the device: prototypes, alignment by direction and by value, the proximal pull, what travels."""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import Tensor, nn

import talaria
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.heart_pfl import HeartPFL, trainable
from talaria.algorithms.heart_pfl.heart_pfl import OWN
from talaria.algorithms.heart_pfl.prototypes import Aligned, aligned, alignment, features, prototypes, stages
from talaria.algorithms.heart_pfl.trained import sent as sent_keys
from talaria.data import Federated
from talaria.errors import ConfigError, ModelError
from talaria.federated.run import Engine
from talaria.model import zoo
from talaria.model.adapters import HEART_RESNET
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.split import split_model
from talaria.model.state import load, state_of, tensor_of
from talaria.tensors import Array, copied, equal, only, under, without
from talaria.training.engine import gradient
from talaria.training.interface import Task
from talaria.training.loop import train
from talaria.types import Recipe, Samples

Tiny = Callable[..., Task]


@pytest.fixture(scope="module")
def resnet() -> tuple[ModelSpec, nn.Module]:
    spec = ModelSpec("resnet18", (3, 32, 32), 100, adapters=HEART_RESNET)
    return spec, zoo.build(spec)


@pytest.mark.parametrize(("classes", "count"), [(100, 1_459_428), (101, 1_459_941), (102, 1_460_454), (10, 1_413_258)])
def test_trainable_parameters_of_the_papers_model(classes: int, count: int) -> None:
    spec = ModelSpec("resnet18", (3, 32, 32), classes, adapters=HEART_RESNET)
    model = zoo.build(spec)
    assert trainable(model, zoo.split(spec, model)) == count
    total = sum(p.numel() for p in model.parameters())
    assert total == 12_628_132 + (classes - 100) * 513


def test_adapters_by_stage_and_kind(resnet: tuple[ModelSpec, nn.Module]) -> None:
    spec, model = resnet
    sent = sent_keys(zoo.split(spec, model), "auto")
    size = {n: p.numel() for n, p in model.named_parameters() if n in sent}
    convs = [
        sum(v for n, v in size.items() if n.startswith(f"layer{k}.") and n.endswith("adapter.conv.weight"))
        for k in (1, 2, 3, 4)
    ]
    assert convs == [16_384, 65_536, 262_144, 1_048_576]
    assert sum(v for n, v in size.items() if ".adapter.norm." in n) == 7_680
    assert sum(v for n, v in size.items() if ".adapter." not in n and not n.startswith("fc.")) == 7_808
    assert not [n for n in sent if "downsample" in n]
    assert 4 * sum(size.values()) == 5_837_712


def test_a_zero_adapter_changes_nothing(resnet: tuple[ModelSpec, nn.Module]) -> None:
    spec, _ = resnet
    plain = zoo.build(ModelSpec("resnet18", (3, 32, 32), 100)).eval()
    adapted = zoo.build(spec).eval()
    state = {}
    own = state_of(plain)
    for k, v in state_of(adapted).items():
        state[k] = np.zeros_like(v) if k.endswith("adapter.conv.weight") else v
        twin = k.replace(".base.", ".")
        if ".adapter." not in k:
            state[k] = own[twin]
    load(adapted, state)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(adapted(x), plain(x))


def test_stages_of_a_resnet_are_its_four_layers(resnet: tuple[ModelSpec, nn.Module]) -> None:
    spec, model = resnet
    assert stages(zoo.split(spec, model)) == ("layer1", "layer2", "layer3", "layer4")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("imu_cnn", (6, 100), ("bn1", "bn2", "bn3", "bn4")),
        ("fmnist_cnn", (1, 28, 28), ("conv1", "conv2", "fc1")),
        ("mlp", (6,), ("fc1", "fc2")),
    ],
)
def test_stages_of_other_models_come_from_the_module_tree(
    name: str, shape: tuple[int, ...], expected: tuple[str, ...]
) -> None:
    spec = ModelSpec(name, shape, 3)
    model = zoo.build(spec)
    assert stages(zoo.split(spec, model)) == expected


def test_stages_are_found_below_a_single_container() -> None:
    model = nn.ModuleDict({"features": nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)]), "head": nn.Linear(2, 2)})
    assert stages(split_model(model, "head")) == ("features.1", "features.3", "features.5", "features.8")


def test_a_body_without_modules_has_no_stages() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.head = nn.Linear(2, 2)

    with pytest.raises(ModelError, match="features"):
        stages(split_model(Bare(), "head"))


ROUNDED = 64 * 2.0**-23


def rows(*values: list[float]) -> Array:
    return np.array(values, np.float32)


def far(own: list[Array], wanted: list[Array]) -> float:
    return alignment(own, wanted)[0]


# ---- alignment ----------------------------------------------------------------------------------------


def test_alignment_of_the_hand_vector() -> None:
    f, p, same = rows([3.0, 4.0]), rows([4.0, 3.0]), rows([0.0, 0.0])
    assert far([f, same], [p, same]) == pytest.approx(0.04 / 2, abs=ROUNDED)  # direction, of two stages
    assert far([same + 1, f], [same + 1, p]) == pytest.approx(1.0 / 2, abs=ROUNDED)  # value
    assert far([f], [p]) == pytest.approx(1.0, abs=ROUNDED)


@pytest.mark.parametrize(("angle", "expected"), [(0.0, 0.0), (np.pi / 2, 1.0), (np.pi, 2.0)])
def test_the_early_term_measures_direction_alone(angle: float, expected: float) -> None:
    f, p, rest = rows([2.0, 0.0]), rows([np.cos(angle), np.sin(angle)]), rows([0.0, 0.0, 0.0])
    for scale in (1.0, 7.0, 0.01):
        assert 2 * far([f, rest], [np.float32(scale) * p, rest]) == pytest.approx(expected, abs=ROUNDED)


def test_the_deep_term_is_zero_only_where_features_are_equal() -> None:
    f, rest = rows([1.0, -2.0]), rows([1.0, 1.0])
    assert far([rest, f], [rest, f]) == pytest.approx(0.0, abs=ROUNDED)
    assert far([rest, f], [rest, 2 * f]) > 0.1


def test_four_stages_are_averaged_over_stages_and_samples() -> None:
    rng = np.random.default_rng(0)
    own, want = ([rng.standard_normal((5, 3), np.float32) for _ in range(4)] for _ in range(2))
    total = 0.0
    for b in range(5):
        for k in range(4):
            f, p = own[k][b], want[k][b]
            total += 1 - f @ p / np.linalg.norm(f) / np.linalg.norm(p) if k < 2 else float(((f - p) ** 2).mean())
    assert far(own, want) == pytest.approx(total / (4 * 5), rel=1e-5)


def test_prototypes_are_the_group_means_in_eval_mode(tiny: Tiny) -> None:
    task = tiny(norm=True, dropout=0.5, classes=2)
    model = task.model.eval()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    (body,) = prototypes(task, state_of(model), ["body.2"], task.train)
    with torch.no_grad():
        f = model.body(tensor_of(task.train.x))
    for c in (0, 1):
        assert roundings(body[c], f[tensor_of(task.train.y) == c].mean(0)) <= 64
    assert body[2].tolist() == [0, 0, 0, 0]  # absent, never looked up
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())


def test_features_are_averaged_over_places() -> None:
    conv = nn.Conv2d(1, 4, 3)
    model = nn.Sequential(OrderedDict(conv=conv, flatten=nn.Flatten(), head=nn.Linear(64, 2)))
    x = np.random.default_rng(0).standard_normal((5, 1, 6, 6), np.float32)
    data = Samples(x, np.zeros(5, np.int64))
    task = Task(model, split_model(model, "head"), data, data, Recipe(), 2)
    (f,) = features(task, state_of(model), ["conv"])(x)
    assert roundings(f, conv(tensor_of(x)).detach().mean((2, 3))) <= 64


class Turned(nn.Module):
    """What a layer says of a sequence; of several values it keeps the first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return self.head((found[0] if isinstance(found, tuple) else found).mean(1))


@pytest.mark.parametrize(
    "layer",
    [
        nn.GRU(8, 8, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    ],
    ids=["GRU", "transformer", "linear"],
)
def test_features_of_a_sequence_are_averaged_over_its_steps_not_over_its_channels(layer: nn.Module) -> None:
    model = Turned(layer)
    x = np.random.default_rng(0).standard_normal((5, 6, 8), np.float32)
    data = Samples(x, np.zeros(5, np.int64))
    task = Task(model, split_model(model, "head"), data, data, Recipe(), 2)
    (f,) = features(task, state_of(model), ["layer"])(x)
    with torch.no_grad():
        found = model.eval().layer(tensor_of(x))
    assert f.shape == (5, 8)
    assert roundings(f, (found[0] if isinstance(found, tuple) else found).mean(1)) <= 64


def test_of_a_list_of_modules_the_last_one_is_looked_at() -> None:
    spec = ModelSpec("mypkg.nets:Listed", (3, 16), 3)
    model = zoo.build(spec)
    at = stages(zoo.split(spec, model))
    assert at == ("inward", "blocks")
    x = np.random.default_rng(0).standard_normal((5, 3, 16), np.float32)
    data = Samples(x, np.zeros(5, np.int64))
    task = Task(model, zoo.split(spec, model), data, data, Recipe(), 3)
    found = features(task, state_of(model), at)(x)
    last = features(task, state_of(model), ["inward", "blocks.2"])(x)
    assert all(np.array_equal(one, other) for one, other in zip(found, last, strict=True))


def test_a_layer_and_its_adapter_are_one_module() -> None:
    spec = ModelSpec("mypkg.nets:Recurrent", (3, 16), 3, adapters=AdapterSpec("lowrank", rank=2))
    assert stages(zoo.split(spec, zoo.build(spec))) == ("gru",)


def by_torch(own: list[Tensor], logits: Tensor, y: Tensor, wanted: list[Tensor]) -> Tensor:
    """CE + 0.1 L_HDA in torch's own words, to be differentiated by autograd."""
    loss, early = nn.functional.cross_entropy(logits, y, label_smoothing=0.1), len(own) // 2
    for k, (f, p) in enumerate(zip(own, wanted, strict=True)):
        term = 1 - nn.functional.cosine_similarity(f, p, dim=1) if k < early else (f - p).square().mean(1)
        loss = loss + 0.1 * term.mean() / len(own)
    return loss


@pytest.mark.parametrize("variant", ["A", "B"])
def test_the_slopes_are_autograds(variant: str) -> None:
    """The loss and its gradient by every tap; in B through the class means, which hold all samples of a class."""
    g = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 2, 2, 0, 2, 1])
    own = [torch.randn(6, d, generator=g, requires_grad=True) for d in (3, 5, 4)]
    logits = torch.randn(6, 3, generator=g, requires_grad=True)
    fixed, other = ([torch.randn(n, d, generator=g) for d in (3, 5, 4)] for n in (3, 6))
    names = ("a", "b", "c")
    if variant == "A":
        loss = by_torch(own, logits, y, [p[y] for p in fixed])
    else:
        means = [torch.stack([f[y == c].mean(0) for c in range(3)])[y] for f in own]
        loss = by_torch(means, logits, y, other)
    slopes = torch.autograd.grad(loss, [logits, *own])
    arrays = [p.numpy() for p in fixed]
    objective = Aligned(names, 0.1, 0.1, 3, arrays, None if variant == "A" else lambda x: [f.numpy() for f in other])
    given = zip(objective.taps, (logits, *own), strict=True)
    seen = {tap: value.detach().numpy() for tap, value in given}
    found = objective(seen, {}, np.zeros((6, 1), np.float32), y.numpy())
    assert roundings(np.float32(found.loss), loss.detach()) <= 64
    for name, slope in zip(objective.taps, slopes, strict=True):
        assert roundings(found.taps[name], slope) <= 64, name


@pytest.mark.parametrize("variant", ["A", "B"])
def test_alignment_reaches_the_personal_weights(tiny: Tiny, variant: str) -> None:
    """In the release both sides are made without a gradient, so that the term does nothing."""
    task = tiny(adapter=True, norm=True)
    state = state_of(task.model)
    own = {k: v + np.float32(0.3) if k.startswith(("adapter", "body.0")) else v for k, v in state.items()}
    slope, plain = (
        gradient(task, own, objective=aligned(task, state, weight, variant))["adapter.weight"]
        for weight in (HeartPFL().align, 0.0)
    )
    assert not np.allclose(slope, plain, atol=1e-6)


def test_alignment_draws_the_personal_features_to_the_global_prototypes(tiny: Tiny) -> None:
    task = tiny(count=24, epochs=30, lr=0.01)
    away = {k: v + 1.0 for k, v in state_of(task.model).items()}
    algorithm, off = HeartPFL(align=1.0, lam=0.0), HeartPFL(align=0.0, lam=0.0, allow_degenerate=True)
    shared, private = algorithm.init(task.model, task.split)

    def distance(algorithm: HeartPFL) -> float:
        _, kept = algorithm.fit(task, away, private)
        at = stages(task.split)
        wanted = prototypes(task, away, at, task.train)
        own = features(task, under(kept, OWN), at)(task.train.x)
        return far(own, [p[task.train.y] for p in wanted])

    assert distance(algorithm) < 0.5 * distance(off)
    del shared


# ---- both phases --------------------------------------------------------------------------------------


def test_what_is_sent_is_fedavgs_and_never_the_personal_model(tiny: Tiny) -> None:
    task = tiny(norm=True, dropout=0.2)
    task = task.but(train=task.train)
    shared, private = HeartPFL().init(task.model, task.split)
    seen = {**private}
    for k in task.split.counters:
        seen[k] = seen[OWN + k] = np.array(1)  # statistics count as trained: no calibration
    update, kept = HeartPFL().fit(task, shared, seen)
    plain, _ = FedAvg().fit(task, shared, {k: v for k, v in seen.items() if not k.startswith(OWN)})
    assert equal(update.tensors, plain.tensors)
    assert not [k for k in update.tensors if k.startswith(OWN)]
    assert not equal(only(under(kept, OWN), shared), update.tensors)


def test_with_adapters_the_rest_is_frozen(tiny: Tiny) -> None:
    task = tiny(adapter=True, norm=True)
    shared, private = HeartPFL().init(task.model, task.split)
    assert set(shared) == {"adapter.weight", "adapter.bias", "head.weight", "head.bias", "body.1.weight", "body.1.bias"}
    update, kept = HeartPFL().fit(task, shared, private)
    for name in ("body.0.weight", "body.0.bias"):
        assert np.array_equal(kept[name], private[name])
        assert OWN + name not in kept
    assert all(not np.array_equal(update.tensors[k], shared[k]) for k in shared)


def test_without_pull_and_alignment_the_personal_model_is_a_local_one(tiny: Tiny) -> None:
    task = tiny()
    start = state_of(task.model)
    algorithm = HeartPFL(lam=0.0, align=0.0, allow_degenerate=True)
    shared, private = algorithm.init(task.model, task.split)
    _, kept = algorithm.fit(task, shared, private)
    assert equal(under(kept, OWN), train(task, start, purpose="personal"))


def test_a_strong_pull_pins_the_personal_model_to_the_global_one(tiny: Tiny) -> None:
    away = []
    for lam in (0.0, 0.5, 5.0):
        task = tiny(lr=0.1, epochs=5)
        algorithm = HeartPFL(lam=lam)
        shared, private = algorithm.init(task.model, task.split)
        _, kept = algorithm.fit(task, shared, private)
        own = under(kept, OWN)
        away.append(sum(float(np.square(own[k] - shared[k]).sum()) for k in shared))
    assert away[0] > away[1] > away[2]
    assert away[2] < 0.05 * away[0]


def test_a_pull_that_overshoots_is_refused(tiny: Tiny) -> None:
    task = tiny(lr=0.1)
    algorithm = HeartPFL(lam=6.0)
    shared, private = algorithm.init(task.model, task.split)
    with pytest.raises(ConfigError, match=r"lam=6\.0"):
        algorithm.fit(task, shared, private)


def test_fewer_samples_than_a_batch_still_train(tiny: Tiny) -> None:
    task = tiny(count=3, batch=16, norm=True)
    shared, private = HeartPFL().init(task.model, task.split)
    update, _ = HeartPFL().fit(task, shared, private)
    assert not equal(update.tensors, shared)


def test_the_personal_model_is_served_and_a_newcomer_gets_one(tiny: Tiny) -> None:
    task = tiny(count=24)
    shared, private = HeartPFL().init(task.model, task.split)
    _, kept = HeartPFL().fit(task, shared, private)
    assert equal(state_of(HeartPFL().personal(task, shared, kept)), under(kept, OWN))
    new = state_of(HeartPFL(join_epochs=5).personal(task.but(newcomer=True), shared, private))
    assert not equal(new, {**shared, **without(private, OWN)})


def test_hooks_are_gone_after_training(tiny: Tiny) -> None:
    task = tiny()
    shared, private = HeartPFL().init(task.model, task.split)
    HeartPFL().fit(task, shared, private)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in task.model.modules())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lam": -1.0}, "lam"),
        ({"align": -0.1}, "align"),
        ({"align": 0.0}, "allow_degenerate"),
        ({"variant": "C"}, "variant"),
        ({"trains": "some"}, "trains"),
        ({"join_epochs": -1}, "join_epochs"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        HeartPFL(**options)  # type: ignore[arg-type]


def test_adapters_are_needed_where_they_are_asked_for(tiny: Tiny) -> None:
    task = tiny()
    with pytest.raises(ModelError, match="adapters"):
        HeartPFL(trains="adapters").init(task.model, task.split)


def test_samples_and_state_stay_untouched(tiny: Tiny) -> None:
    task = tiny()
    x = task.train.x.copy()
    shared, private = HeartPFL().init(task.model, task.split)
    before = copied({**shared, **private})
    HeartPFL().fit(task, shared, private)
    assert equal(before, {**shared, **private})
    assert np.array_equal(x, task.train.x)
    assert isinstance(task.train, Samples)


class Walked(nn.Module):
    """A sequence that is walked with the batch first, or as torch's layers have it by default."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.embed, self.norm = first, nn.Linear(3, 8), nn.LayerNorm(8)
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=first), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(torch.relu(self.embed(x.permute((0, 2, 1) if self.first else (2, 0, 1)))))
        logits: Tensor = self.head(self.norm(out).mean(1 if self.first else 0))
        return logits


def sequences() -> Federated:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(96, 3, 12)).astype(np.float32), draw.integers(0, 4, 96)
    return Federated.from_arrays(x, y, np.repeat(["anna", "bela"], 48))


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_sequences_before_the_batch_are_learned_as_those_behind_it(engine: Engine) -> None:
    found = []
    for first in (True, False):
        torch.manual_seed(0)
        net, recipe = Walked(first), {"batch": 8, "epochs": 1, "lr": 0.05}
        done = talaria.simulate("heart_pfl", sequences(), net, rounds=2, recipe=recipe, engine=engine)
        found.append(state_of(done.model("anna")))
    assert found[0].keys() == found[1].keys()
    assert all(np.allclose(found[0][key], found[1][key], rtol=1e-3, atol=1e-5) for key in found[0])


def test_a_batch_as_large_as_a_sequence_is_long_is_refused_where_either_may_be_it() -> None:
    with pytest.raises(ModelError, match=r"'embed' gives \(12, 12, 8\) for 12 samples.*take another batch size"):
        talaria.simulate("heart_pfl", sequences(), Walked(False), rounds=1, recipe={"batch": 12}, engine="torch")


class Placed(nn.Module):
    """A transformer whose places are embedded, which are the same for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(3, 8), nn.Embedding(12, 8)
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.size(2)))
        logits: Tensor = self.head(self.layer(self.embed(x.transpose(1, 2)) + places).mean(1))
        return logits


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_layer_that_says_nothing_of_a_sample_is_named_with_what_to_write_instead(engine: Engine) -> None:
    with pytest.raises(ModelError, match=r"'places' gives the same for every sample.*self.places = nn.Parameter"):
        talaria.simulate("heart_pfl", sequences(), Placed(), rounds=1, engine=engine)
