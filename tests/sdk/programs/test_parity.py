"""A program's step is torch's step: layer by layer, model by model, under masks, at every batch, over several steps."""

import copy
import importlib.util
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria.errors import ConfigError, ModelError
from talaria.model import pruning, zoo
from talaria.model.compaction import gather
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of
from talaria.programs import differentiate, onnx_file, reference, vector
from talaria.programs.build import build, require_few
from talaria.programs.follow import followed
from talaria.programs.program import Program
from talaria.programs.session import Session
from talaria.training import loop
from talaria.types import Recipe

_nets = importlib.util.spec_from_file_location("talaria_program_nets", Path(__file__).with_name("nets.py"))
nets = importlib.util.module_from_spec(_nets)
_nets.loader.exec_module(nets)

RECIPES = {"plain": Recipe(momentum=0), "full": Recipe(momentum=0.9, weight_decay=0.01, smoothing=0.1)}


def arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return state_of(module)


def batch(shape, classes, count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, *shape), np.float32), rng.integers(0, classes, count)


@lru_cache
def net(name: str, recipe: str) -> Program:
    shape, make = nets.NETS[name]
    torch.manual_seed(0)
    return Program(build(zoo.keep(make(), shape, 4), "all", RECIPES[recipe]))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", nets.NETS)
def test_each_layer_errs_no_more_than_twice_as_much_as_torch(name, recipe):
    program = net(name, recipe)
    assert program.manifest.parity["program"] <= program.manifest.allowed
    found = vector.projections(program.run(vector.inputs(program.graph, program.manifest)))
    assert vector.deviation(found, program.manifest.expected) <= 4 * program.manifest.allowed


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", nets.NETS)
def test_many_steps_in_one_call_give_the_bytes_of_each_alone(name, recipe):
    program = net(name, recipe)
    feed = vector.inputs(program.graph, program.manifest)
    xs, ys = (np.stack([feed[one], feed[one][::-1], feed[one]]) for one in ("x", "y"))
    session = Session(onnx_file.write(followed(program.graph), ""), steady=True)
    names = [port.name for port in program.graph.outputs if port.name != "loss"]
    found = dict(zip(names, session(names, {**feed, "x": xs, "y": ys}), strict=True))
    for x, y in zip(xs, ys, strict=True):
        after = program.run({**feed, "x": x, "y": y})
        feed |= {one.removeprefix("next/"): after[one] for one in names}
    assert all(found[one].tobytes() == feed[one.removeprefix("next/")].tobytes() for one in names)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("keep", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("name", ["imu_cnn", "mlp", "fmnist_cnn"])
def test_one_file_serves_every_mask_and_batch(program_of, spec_of, name, keep, count):
    program, spec = Program(program_of(name)), spec_of(name)
    dense = zoo.build(spec)
    scores = pruning.importance(dense, zoo.layout(spec))
    mask = pruning.choose(scores, zoo.layout(spec).full(), keep=keep)
    module = pruning.compact(dense, mask)
    weights = gather(state_of(dense), mask)
    x, y = batch(spec.input_shape, spec.classes, count)
    momentum = program.momentum(weights)
    state, moved, loss = program.step(weights, momentum, x, y, lr=0.05)
    feed = {"x": x, "y": y, "lr": np.array(0.05, np.float32)}
    feed |= {f"weight/{k}": v for k, v in weights.items()} | {f"momentum/{k}": v for k, v in momentum.items()}
    exact, plain = (reference.step(module, Recipe(), None, feed, kind) for kind in (torch.float64, torch.float32))
    found = {"loss": loss} | {f"next/weight/{k}": state[k] for k in weights}
    found |= {f"next/momentum/{k}": v for k, v in moved.items()}
    assert vector.distance(found, exact) <= 4 * vector.distance(plain, exact) + 2**-23
    assert all(state[k].shape == v.shape and state[k].dtype == v.dtype for k, v in weights.items())


def _wide(net):
    """``net`` with a recurrent layer of 16 units."""
    name = "gru" if hasattr(net, "gru") else "lstm"
    own = getattr(net, name)
    setattr(net, name, type(own)(own.input_size, 16, own.num_layers, batch_first=True))
    net.head = nn.Linear(16, 4)
    return net


def _sloped(one, other):
    own = [
        nn.Conv1d(3, 16, 3),
        one,
        nn.Conv1d(16, 16, 3),
        other,
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    ]
    return nn.Sequential(*own)


def _shaped(name):
    shape, make = nets.NETS[name]
    net = make()
    net.shape = shape
    return net


def _encoder():
    return nets.Sequences(nn.Linear(3, 8), nets.encoder(dropout=0.0), wide=8)


def _convnext():
    net = nets.convnext(0.0)
    net.shape = (3, 16, 16)
    return net


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize(
    ("make", "groups"),
    [
        (_encoder, [f"layers.1.layers.{number}.{of}" for number in range(2) for of in ("self_attn", "linear1")]),
        (lambda: _sloped(nn.PReLU(16), nn.PReLU()), ["0", "2"]),
        (lambda: _shaped("rows"), ["0", "1", "2"]),
        (lambda: _shaped("rows2d"), ["0", "1"]),
        (lambda: _shaped("rows2d_large"), ["0", "1"]),
        (nets.Attending, ["attention", "conv"]),
        (nets.Hiding, ["attention", "conv"]),
        *((lambda way=way: nets.Asking(way), ["attention"]) for way in ("query", "padded", "others")),
        (lambda: nets.adapted(nets.Asking("padded"), "attention"), ["attention.base"]),
        (lambda: nets.Biased("learned"), ["attention", "conv"]),
        (lambda: nets.Biased("hidden"), ["attention", "conv"]),
        (lambda: nets.adapted(nets.Hiding(), "attention"), ["attention.base", "conv"]),
        (lambda: nets.adapted(_wide(nets.Recurrent("mean", 2)), "gru"), ["gru.base", "conv"]),
        (nets.Beside, ["one", "two"]),
        (nets.Grouped, ["one", "inner", "mix"]),
        (nets.Singly, ["one", "inner"]),
        (nets.Edged, ["one"]),
        (nets.Mirrored, ["one"]),
        (nets.Resized, ["one", "two"]),
        (nets.Squeezed, ["conv", "fc.0"]),
        (nets.Logs, ["one", "two"]),
        (nets.Spoken, ["one", "two", "mix"]),
        (nets.Lengths, ["one", "two"]),
        (nets.Lines, ["one", "two"]),
        (nets.Instances, ["one", "two"]),
        (nets.Extremes, ["one"]),
        (nets.Styled, ["one", "two"]),
        (nets.Equalized, ["one", "two", "fc"]),
        (nets.Ranged, ["one"]),
        (nets.swin, [f"features.{at}.mlp.0" for at in ("1.0", "1.1", "3.0")]),
        (_convnext, [f"features.{stage}.{block}.block.3" for stage, block in ((1, 0), (3, 0), (3, 1))]),
        (nets.Highest, ["one", "two"]),
        (nets.Padded, ["one", "mix"]),
        (nets.Weighed, ["one", "two"]),
        (lambda: _wide(nets.Recurrent("mean", 2)), ["gru", "conv"]),
        (lambda: _wide(nets.Long("state", 2)), ["lstm"]),
        (lambda: nets.BothWays(nn.GRU, "all", 16, num_layers=2), ["rnn"]),
        (lambda: nets.BothWays(nn.LSTM, "out", 16), ["rnn"]),
        (lambda: nets.BothWays(nn.RNN, "mean", 16, num_layers=2, nonlinearity="relu"), ["rnn"]),
        (lambda: nets.adapted(nets.BothWays(nn.GRU, "ends", 16, num_layers=2), "rnn"), ["rnn.base"]),
    ],
)
def test_what_a_mask_takes_its_program_takes_too(make, groups, count):
    torch.manual_seed(0)
    net = make()
    shape = getattr(net, "shape", nets.LINE)
    spec = zoo.keep(net, shape, 4)
    layout = zoo.layout(spec)
    assert {*layout.sizes} == {*groups}
    mask = pruning.choose(pruning.importance(net, layout), layout.full(), keep=0.5, block=1)
    module, weights = pruning.compact(net, mask), gather(state_of(net), mask)
    assert all(len(mask.kept[group]) < size for group, size in layout.sizes.items())
    program, (x, y) = Program(build(spec)), batch(shape, 4, count)
    momentum = program.momentum(weights)
    state, _, _ = program.step(weights, momentum, x, y, lr=0.05)
    feed = {"x": x, "y": y, "lr": np.array(0.05, np.float32)}
    feed |= {f"weight/{k}": v for k, v in weights.items()} | {f"momentum/{k}": v for k, v in momentum.items()}
    exact, plain = (reference.step(module, Recipe(), None, feed, kind) for kind in (torch.float64, torch.float32))
    found = {f"next/weight/{k}": state[k] for k in weights if f"next/weight/{k}" in exact}  # tables of numbers stay
    exact, plain = ({k: one[k] for k in found} for one in (exact, plain))
    assert vector.distance(found, exact) <= 4 * vector.distance(plain, exact) + 2**-23


@pytest.mark.parametrize("trained", ["all", "head", "body"])
@pytest.mark.parametrize("name", ["imu_cnn", "mlp"])
def test_several_steps_are_the_loops(program_of, spec_of, name, trained):
    spec = spec_of(name)
    program, module = Program(program_of(name, trained)), zoo.build(spec)
    split = zoo.split(spec, module)
    only = None if trained == "all" else split.of(trained)
    weights, recipe, steps = arrays(module), Recipe(lr=0.01), 4
    momentum = program.momentum(weights)
    trained = loop.freeze_but(module, only).values()
    optimizer = torch.optim.SGD(trained, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay)
    for number in range(steps):
        x, y = batch(spec.input_shape, spec.classes, 16, number)
        weights, momentum, loss = program.step(weights, momentum, x, y, lr=recipe.lr)
        optimizer.zero_grad()
        mine = loop.cross_entropy()(module, torch.from_numpy(x), torch.from_numpy(y))
        mine.backward()
        optimizer.step()
        # a layer rounds once for each term of its sums, forward and back, and a step carries that on
        longest = max(math.prod(p.shape[1:]) * 100 for p in module.parameters() if p.dim() > 1)
        assert roundings(loss, mine.detach()) <= (number + 1) * longest
    frozen = {k for k in weights if only is not None and k not in only}
    now = arrays(module)
    assert all(np.array_equal(weights[k], now[k]) for k in frozen)
    for name_, value in now.items():
        assert roundings(weights[name_], value) <= steps * longest, name_


@pytest.mark.parametrize("name", ["Gated", "Attentive"])
def test_adapters_inside_a_layer_train_alone(name):
    spec = ModelSpec(f"mypkg.nets:{name}", (6, 32), 3, adapters=AdapterSpec("lowrank", 2))
    module = zoo.build(spec)
    program, split = Program(build(spec, "adapters,head")), zoo.split(spec, module)
    assert program.manifest.parity["program"] <= program.manifest.allowed
    weights, before = arrays(module), arrays(module)
    momentum = program.momentum(weights)
    for number in range(2):  # the first factors follow once the last ones are no longer zero
        weights, momentum, _ = program.step(weights, momentum, *batch((6, 32), 3, 4, number), lr=0.1)
    changed = {key for key in weights if not np.array_equal(weights[key], before[key])}
    assert changed == {*split.of("adapters", "head")}
    assert any(".adapter.weight_hh_l0." in key or ".adapter.out_proj." in key for key in changed)


def test_a_batch_of_one_leaves_the_statistics(program_of, spec_of):
    program, module = Program(program_of("imu_cnn")), zoo.build(spec_of("imu_cnn"))
    weights = arrays(module)
    x, y = batch((6, 100), 7, 1)
    after, _, _ = program.step(weights, program.momentum(weights), x, y, lr=0.1)
    kept = [k for k in weights if "running" in k or k.endswith("tracked")]
    assert kept
    assert all(np.array_equal(after[k], weights[k]) for k in kept)


def test_dropout_follows_the_given_draw():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 4))
    spec = zoo.keep(net, (5,), 4)
    program, weights = Program(build(spec)), arrays(net)
    x, y = batch((5,), 4, 3)
    none = {"1": np.zeros((3, 6), np.float32)}
    state, _, loss = program.step(weights, program.momentum(weights), x, y, lr=0.1, draws=none)
    assert np.array_equal(state["0.weight"], weights["0.weight"])
    assert loss == pytest.approx(
        float(nn.functional.cross_entropy(net[2].bias.detach().expand(3, 4), torch.from_numpy(y)))
    )
    with pytest.raises(ModelError, match="draw/1"):
        program.step(weights, program.momentum(weights), x, y, lr=0.1)


class Clamped(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of, self.shift, self.low, self.head = (
            of,
            nn.Parameter(torch.zeros(5)),
            nn.Parameter(torch.full((5,), -1.0)),
            nn.Linear(5, 4),
        )

    def forward(self, x):
        return self.head(self.of(x + self.shift, self.low))


@pytest.mark.parametrize(
    "of",
    [
        lambda x, low: x.clamp(-1, 1),
        lambda x, low: torch.clip(x, max=1) + x.clamp_min(0),
        lambda x, low: x.clamp(min=low, max=torch.tensor(1.0)),
        lambda x, low: x + low.clamp(-1, 1),
    ],
    ids=["numbers", "one", "tensors", "parameter"],
)
def test_a_value_at_a_bound_learns_as_in_torch(of):
    torch.manual_seed(0)
    net = Clamped(of)
    program, weights = Program(build(zoo.keep(net, (5,), 4))), arrays(net)
    x, y = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]]), torch.tensor([1])
    state, _, _ = program.step(weights, program.momentum(weights), x.numpy(), y.numpy(), lr=1.0)
    nn.functional.cross_entropy(net(x), y).backward()
    for name, parameter in net.named_parameters():
        slope = torch.zeros(5) if parameter.grad is None else parameter.grad
        np.testing.assert_allclose(state[name], parameter.detach() - slope, atol=1e-6, err_msg=name)


def test_a_mask_of_what_is_fixed_is_refused_with_the_mend():
    net = nn.Sequential(nn.Conv1d(3, 6, 3, groups=3), nn.ReLU(), nn.Flatten(), nn.Linear(60, 4))
    spec = zoo.keep(net, (3, 12), 4)
    program, mask = Program(build(spec)), zoo.layout(spec).full()
    weights = gather(state_of(net), pruning.choose(pruning.importance(net, mask.layout), mask, keep=0.5, block=1))
    x, y = batch((3, 12), 4, 2)
    with pytest.raises(ModelError, match=r"0.weight.*leave these channels whole in every mask and plan.*train .*torch"):
        program.step(weights, program.momentum(weights), x, y, lr=0.1)
    for given in ((x[:, :2], y), (x, y[:1]), (x[:0], y[:0])):
        with pytest.raises(ModelError, match=r"'[xy]'.*give at least one sample, with its label, of the shape"):
            program.step(arrays(net), program.momentum(arrays(net)), *given, lr=0.1)


def test_what_takes_too_many_operators_is_refused_before_it_is_run(monkeypatch):
    def few(graph):
        return require_few(graph, 40)

    monkeypatch.setattr("talaria.programs.build.require_few", few)
    monkeypatch.delattr("talaria.programs.session.Session.__init__")
    spec = zoo.keep(nets.BothWays(nn.GRU, "mean"), (3, 4), 4)
    for make in (build, lambda spec: differentiate.packed(spec, None, ("logits",)), differentiate.curved):
        with pytest.raises(ModelError, match=r"operators, at most 40 are run; shorten the sequences"):
            make(spec)


def test_opening_a_program_does_not_look_for_buffers_that_fit(program_of):
    """It takes the square of the operators: seconds for a recurrent layer."""
    assert not Program(program_of("sequence")).session._session.get_session_options().enable_mem_reuse


def test_settings_that_no_step_has_are_refused(spec_of):
    with pytest.raises(ConfigError, match="accumulate=2"):
        build(spec_of("mlp"), "all", Recipe(accumulate=2))
    with pytest.raises(ConfigError, match="trained='hips'"):
        build(spec_of("mlp"), "hips")
    with pytest.raises(ConfigError, match="nothing is trained"):
        build(spec_of("mlp"), "adapters")


def test_the_same_model_gives_the_same_bytes(program_of, spec_of):
    assert build(copy.deepcopy(spec_of("mlp"))) == program_of("mlp")
