"""Thorki: two models that never meet in training, and a gate that is fitted on held-out samples."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch.nn import functional as F

from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.thorki import Thorki, fusion_gate, small_branch
from talaria.algorithms.thorki.fusion_gate import ConstantGate, SampleGate, divided, label_shift, mixed
from talaria.algorithms.thorki.module import Fused, module_of
from talaria.algorithms.thorki.thorki import SMALL
from talaria.errors import ConfigError, ModelError
from talaria.federated import rounds, run_model
from talaria.federated.run import Member, Run
from talaria.model import zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of, tensor_of
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors, equal, under, without
from talaria.training.interface import Task
from talaria.training.loop import predict
from talaria.training.objectives import cross_entropy
from talaria.types import Recipe, Samples

Tiny = Callable[..., Task]


def adapted(nonlinear: bool = False) -> Task:
    """An mlp with low-rank adapters on both hidden layers."""
    spec = ModelSpec("mlp", (6,), 3, adapters=AdapterSpec("lowrank", rank=2))
    model = zoo.build(spec)
    g = torch.Generator().manual_seed(4)
    y = torch.arange(24) % 3
    data = Samples.of(torch.randn(24, 6, generator=g) + y[:, None].float(), y)
    recipe = Recipe(epochs=2, batch=8, lr=0.05, momentum=0.0)
    return Task(model, zoo.split(spec, model), data, data.take(np.arange(6)), recipe, 3)


def fitted(algorithm: Thorki, task: Task) -> tuple[Tensors, Tensors, Tensors]:
    shared, private = algorithm.init(task.model, task.split)
    update, kept = algorithm.fit(task, shared, private)
    return shared, update.tensors, kept


def cost(z: Array, y: Array) -> float:
    return cross_entropy(z, y)[0]


def logits(seed: int, count: int = 60, classes: int = 5, sure: float = 1.5) -> tuple[Array, Array, Array]:
    """Two branches that are each right in a different half."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=g)
    hit = F.one_hot(y, classes).float() * sure
    a, b = (torch.randn(count, classes, generator=g) for _ in range(2))
    half = (torch.arange(count) < count // 2).float()[:, None]
    return (a + hit * half).numpy(), (b + hit * (1 - half)).numpy(), y.numpy()


def test_all_of_the_small_model_learns_whatever_the_recipe_freezes_of_the_large_one(tiny: Tiny) -> None:
    task = tiny(freeze=("body",))
    shared, private = Thorki().init(task.model, task.split)
    _, once = Thorki().fit(task, shared, private)
    _, twice = Thorki().fit(task.but(round=1), shared, once)
    small = [key for key in once if key.startswith("small/")]
    assert small
    assert not any(np.array_equal(once[key], twice[key]) for key in small)


def test_only_the_large_model_travels_and_bytes_are_its_own(tiny: Tiny) -> None:
    _, sent, kept = fitted(Thorki(), tiny(norm=True))
    assert not [k for k in sent if k.startswith(SMALL)]
    assert set(sent) == {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"}
    assert sum(v.size for v in sent.values()) == 24 + 4 + 8 + 12 + 3
    assert under(kept, SMALL)


def test_adapters_mode_sends_second_factors_and_head_and_leaves_the_base() -> None:
    task = adapted()
    shared, sent, kept = fitted(Thorki(general="adapters"), task)
    assert {k for k in sent if k.startswith("fc")} == {"fc1.adapter.up.weight", "fc2.adapter.up.weight"}
    assert set(sent) - {"fc1.adapter.up.weight", "fc2.adapter.up.weight"} == {"head.weight", "head.bias"}
    assert sum(v.size for v in sent.values()) == 128 * 2 + 64 * 2 + 64 * 3 + 3
    assert not any(np.array_equal(sent[k], shared[k]) for k in sent)
    before = without(Thorki(general="adapters").init(task.model, task.split)[1], SMALL)
    assert equal(before, without(kept, SMALL))  # frozen base and first factors, bit for bit


@pytest.mark.parametrize("net", ["Recurrent", "Attentive"])
def test_first_factors_stay_in_recurrent_layers_and_attention_too(net: str) -> None:
    """Each of their matrices has two factors of its own."""
    spec = ModelSpec(f"mypkg.nets:{net}", (3, 16), 3, adapters=AdapterSpec("lowrank", rank=2))
    run = Run(spec=spec, algorithm="thorki", hparams={"general": "adapters"}, rounds=1)
    rng = np.random.default_rng(0)
    own = Samples(rng.standard_normal((12, 3, 16)).astype(np.float32), np.arange(12) % 3)
    shared, _ = rounds.start(run)
    update, private = rounds.participate(run, Member("anna", own, own), shared, None, 1)
    first = state_of(run_model.template(spec))
    down = [key for key in run_model.split_of(run).adapters if key.endswith(".down.weight")]
    assert len(down) >= 2
    assert not {*down}.intersection(update.tensors)
    assert all(np.array_equal(private[key], first[key]) for key in down)
    assert all(key.replace(".down.", ".up.") in update.tensors for key in down)


def test_the_mean_of_models_is_exact_with_a_common_first_factor() -> None:
    task = adapted()
    algorithm = Thorki(general="adapters")
    shared, private = algorithm.init(task.model, task.split)
    updates = []
    for k in range(3):
        data = task.train.take(np.arange(k, 24, 3 - k))
        updates.append(algorithm.fit(task.but(client=f"c{k}", train=data), shared, private)[0].but(weight=1.0))
    mean, _ = MaskedMean().apply(shared, {}, updates)
    down, up = private["fc1.adapter.down.weight"].astype(np.float64), "fc1.adapter.up.weight"
    products = np.mean([u.tensors[up] @ down for u in updates], 0)
    merged = (mean[up] @ down).astype(np.float32)
    assert roundings(merged, products, np.abs(updates[0].tensors[up]).max()) <= 16


def test_adapters_mode_without_adapters_is_refused(tiny: Tiny) -> None:
    task = tiny()
    with pytest.raises(ModelError, match="has none"):
        Thorki(general="adapters").init(task.model, task.split)


def test_the_shared_path_is_fedavg_bit_for_bit(tiny: Tiny) -> None:
    task = tiny(norm=True, dropout=0.3)
    shared, sent, _ = fitted(Thorki(), task)
    _, private = FedAvg().init(task.model, task.split)
    plain, _ = FedAvg().fit(task, shared, private)
    assert equal(sent, plain.tensors)


def test_with_alpha_zero_the_system_is_the_large_model(tiny: Tiny) -> None:
    task = tiny()
    large = task.model.eval()
    small = small_branch.narrow((6,), 3).eval()
    x = tensor_of(task.train.x)
    with torch.no_grad():
        assert torch.equal(Fused(large, small, ConstantGate(0.0))(x), large(x))
        assert torch.equal(Fused(large, small, ConstantGate(1.0))(x), small(x))
        same = [Fused(large, large, ConstantGate(a))(x) for a in (0.1, 0.7)]
    assert roundings(same[0], same[1]) <= 64


def test_neither_branch_gets_a_gradient_from_the_other(tiny: Tiny) -> None:
    """The branches' random draws and tensors are apart: another small model changes nothing in what is sent."""
    _, one, kept = fitted(Thorki(), tiny(norm=True, dropout=0.3))
    _, two, other = fitted(Thorki(small="mlp", small_lr=0.001, small_epochs=7), tiny(norm=True, dropout=0.3))
    assert equal(one, two)
    assert not equal(under(kept, SMALL), under(other, SMALL))
    task = tiny(norm=True, dropout=0.3)
    shared, private = Thorki().init(task.model, task.split)
    _, again = Thorki().fit(task, {k: v + 1 for k, v in shared.items()}, private)
    assert equal(under(kept, SMALL), under(again, SMALL))


@pytest.mark.parametrize("seed", range(5))
def test_the_constant_gate_is_never_worse_than_either_branch(seed: int) -> None:
    general, small, y = logits(seed)
    alpha = fusion_gate.constant(general, small, y)
    single = min(cost(general, y), cost(small, y))
    best = cost(mixed(general, small, alpha), y)
    assert best <= single + 1e-6
    grid = [cost(mixed(general, small, a), y) for a in np.linspace(0, 1, 41)]
    assert best <= min(grid) + 1e-6
    assert all(2 * m <= a + b + 1e-6 for a, m, b in zip(grid, grid[1:], grid[2:], strict=False))  # convex in alpha


@pytest.mark.parametrize(("good", "expected"), [("general", 0.0), ("small", 1.0)])
def test_the_constant_gate_goes_to_the_end_where_one_branch_is_noise(good: str, expected: float) -> None:
    y = np.arange(30) % 3
    right, wrong = np.eye(3)[y] * 4.0, np.eye(3)[(y + 1) % 3] * 4.0
    pair = (right, wrong) if good == "general" else (wrong, right)
    assert fusion_gate.constant(*pair, y) == expected


def test_the_constant_gate_is_half_without_samples() -> None:
    empty = np.empty((0, 3))
    assert fusion_gate.constant(empty, empty, np.empty(0, np.int64)) == 0.5


def test_the_per_sample_gate_starts_at_one_half_and_has_the_stated_size() -> None:
    gate = SampleGate.drawn(10, Draws(0))
    general, small, _ = logits(0, classes=10)
    assert np.array_equal(gate(general, small), np.full((60, 1), 0.5))
    assert sum(p.numel() for p in module_of(gate).parameters()) == (2 * 10 + 3) * 16 + 16 + 17 == 401
    assert fusion_gate.evidence(general, small).shape == (60, 23)


def test_the_per_sample_gates_slopes_are_autograds() -> None:
    """And its module is the same function; both from a gate whose last layer is not zero any more."""
    general, small, y = logits(2)
    gate = fusion_gate.fit(general, small, y, Draws(0), per_sample=True, steps=3)
    assert isinstance(gate, SampleGate)
    module, (g, s) = module_of(gate), (tensor_of(general), tensor_of(small))
    alpha = module(g, s)
    F.cross_entropy((1 - alpha) * g + alpha * s, tensor_of(y)).backward()  # type: ignore[no-untyped-call]
    found = gate.slopes(general, small, fusion_gate.evidence(general, small), y)
    assert roundings(gate(general, small), alpha.detach()) <= 64
    for slope, parameter in zip(found.values(), module.parameters(), strict=True):
        assert roundings(slope, parameter.grad) <= 256


def test_the_per_sample_gate_learns_which_branch_knows_what() -> None:
    """One branch is sure and right exactly where the other is flat: no constant can use that."""
    g = torch.Generator().manual_seed(1)
    y = torch.randint(4, (400,), generator=g).numpy()
    hit = np.eye(4, dtype=np.float32)[y] * 5
    noise = torch.randn(400, 4, generator=g).numpy()
    knows = (np.arange(400) % 2 == 0)[:, None]
    general, small = np.where(knows, hit, noise * 2), np.where(knows, noise * 2, hit)
    gate = fusion_gate.fit(general, small, y, Draws(0), per_sample=True)
    assert isinstance(gate, SampleGate)
    constant = fusion_gate.constant(general, small, y)
    fused = cost(mixed(general, small, gate(general, small)), y)
    assert fused < 0.7 * cost(mixed(general, small, constant), y)


def test_the_per_sample_gate_gives_way_where_it_does_not_help() -> None:
    general, small, y = logits(3, count=200, sure=0.0)
    gate = fusion_gate.fit(general, small, y, Draws(0), per_sample=True, steps=1, lr=50.0)
    assert isinstance(gate, ConstantGate)


def test_fitting_twice_gives_the_same_gate(tiny: Tiny) -> None:
    task = tiny(count=40)
    shared, private = Thorki().init(task.model, task.split)
    _, private = Thorki(gate="sample").fit(task, shared, private)
    one, two = (Thorki(gate="sample").personal(task, shared, private) for _ in range(2))
    assert equal(state_of(one), state_of(two))


def test_held_out_samples_are_apart_from_those_trained_on(tiny: Tiny) -> None:
    task = tiny(count=41)
    assert divided(task, 0.1) == (task.train, task.val)
    bare = task.but(val=Samples(np.empty((0, 6), np.float32), np.empty(0, np.int64)))
    learn, adapt = divided(bare, 0.1)
    rows = {r.tobytes() for r in learn.x} & {r.tobytes() for r in adapt.x}
    assert not rows
    assert len(learn) + len(adapt) == 41
    assert sorted(set(adapt.y.tolist())) == [0, 1, 2]
    later, _ = divided(bare.but(round=9), 0.1)
    assert np.array_equal(later.x, learn.x)


def test_a_single_sample_trains_and_is_fused_half_and_half(tiny: Tiny) -> None:
    none = Samples(np.empty((0, 6), np.float32), np.empty(0, np.int64))
    task = tiny(count=1, norm=True).but(val=none)
    shared, private = Thorki().init(task.model, task.split)
    _, private = Thorki().fit(task, shared, private)
    model = Thorki().personal(task, shared, private)
    assert isinstance(model, Fused)
    assert model.gate(None, None) == 0.5
    assert np.isfinite(predict(model, task.train.x)).all()


def test_the_large_models_logits_are_shifted_by_the_devices_label_frequencies(tiny: Tiny) -> None:
    task = tiny(count=20, classes=2)
    shift = label_shift(task)
    assert np.exp(shift).tolist() == pytest.approx([(10 + 1 / 3) / 21, (10 + 1 / 3) / 21, (1 / 3) / 21])
    shared, private = Thorki().init(task.model, task.split)
    _, private = Thorki().fit(task, shared, private)
    model, plain = (Thorki(prior=p).personal(task, shared, private) for p in ("local", "none"))
    assert isinstance(model, Fused)
    assert isinstance(plain, Fused)
    assert np.array_equal(model.shift.numpy(), shift)
    assert plain.shift is None
    large = predict(model.general, task.train.x) + shift
    alone = Fused(model.general, model.small, ConstantGate(0.0), shift)
    assert np.array_equal(predict(alone, task.train.x), large)


def test_a_newcomer_trains_its_own_small_model(tiny: Tiny) -> None:
    task = tiny(count=30).but(newcomer=True)
    shared, private = Thorki().init(task.model, task.split)
    model = Thorki(join_epochs=20).personal(task, shared, private)
    assert isinstance(model, Fused)
    own = predict(model.small, task.train.x).argmax(1)
    assert float((own == task.train.y).mean()) > 0.6


def test_a_newcomer_of_no_epochs_serves_the_small_models_first_weights(tiny: Tiny) -> None:
    task = tiny(count=30).but(newcomer=True)
    model = Thorki(join_epochs=0).personal(task, *Thorki().init(task.model, task.split))
    assert isinstance(model, Fused)
    assert equal(state_of(model.small), state_of(small_branch.task_of(task, small_branch.AUTO).model))


@pytest.mark.parametrize(("shape", "largest"), [((6, 100), 15_000), ((1, 28, 28), 180_000), ((12,), 1_000)])
def test_the_automatic_small_model_is_small_and_the_same_everywhere(
    tiny: Tiny, shape: tuple[int, ...], largest: int
) -> None:
    before = torch.random.get_rng_state()
    data = Samples(np.zeros((2, *shape), np.float32), np.zeros(2, np.int64))
    task = tiny().but(train=data, classes=7, seed=3)
    one, two = (small_branch.task_of(task, "auto").model for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert equal(state_of(one), state_of(two))
    assert sum(p.numel() for p in one.parameters()) < largest
    assert one.eval()(torch.zeros(2, *shape)).shape == (2, 7)


def test_one_graph_with_both_branches_and_the_gate_exports(tmp_path: Path, tiny: Tiny) -> None:
    import onnxruntime

    task = tiny(count=60, norm=True)
    shared, private = Thorki().init(task.model, task.split)
    _, private = Thorki().fit(task, shared, private)
    model = Thorki(gate="constant").personal(task, shared, private)
    assert isinstance(model, Fused)
    for gate in (ConstantGate(0.3), SampleGate.drawn(3, Draws(0))):
        whole = Fused(model.general, model.small, gate).eval()
        path = str(tmp_path / "both.onnx")
        torch.onnx.export(whole, (tensor_of(task.train.x),), path, dynamo=True, external_data=False, verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        out = session.run(None, {session.get_inputs()[0].name: task.train.x})[0]
        assert roundings(out, predict(whole, task.train.x)) <= 1000


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"general": "half"}, "general"),
        ({"small": "nothing"}, "small"),
        ({"small_epochs": -1}, "small_epochs"),
        ({"small_lr": -0.1}, "small_lr"),
        ({"join_epochs": -1}, "join_epochs"),
        ({"gate": "open"}, "gate"),
        ({"prior": "theirs"}, "prior"),
        ({"gate_steps": 0}, "gate_steps"),
        ({"gate_lr": 0.0}, "gate_lr"),
        ({"adapt_share": 1.0}, "adapt_share"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Thorki(**options)  # type: ignore[arg-type]
