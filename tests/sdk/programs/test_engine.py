"""Trained by programs, a task ends where torch's loop does: pulled, in parts, on kept features, under masks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria.errors import ModelError
from talaria.model import pruning, zoo
from talaria.model.attention import heads_of
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import load, state_of
from talaria.programs.engine import ProgramEngine
from talaria.programs.given import Given
from talaria.programs.making import Maker
from talaria.programs.session import Session
from talaria.programs.source import Need
from talaria.tensors import equal
from talaria.training import frozen_features, loop, torch_engine
from talaria.training.batching import feed
from talaria.training.engine import predict, train
from talaria.training.interface import Task
from talaria.training.objectives import CrossEntropy, Pull, Slopes, cross_entropy
from talaria.types import Recipe, Samples

RECIPE = Recipe(lr=0.01, momentum=0.9, weight_decay=0.01, smoothing=0.1, epochs=1, batch=16)


@pytest.fixture(scope="module")
def engines(spec_of):
    """One engine a model: what it has built serves all tests."""
    made = {}
    return lambda name: made.setdefault(name, ProgramEngine(spec_of(name)))


def task_of(spec, count=40, keep=None, block=8, **changes):
    dense = zoo.build(spec)
    mask, model = None, dense
    if keep is not None:
        layout = zoo.layout(spec)
        mask = pruning.choose(pruning.importance(dense, layout), layout.full(), keep=keep, block=block)
        model = pruning.compact(dense, mask)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, *spec.input_shape), np.float32)
    train = Samples(x, rng.integers(0, spec.classes, count))
    task = Task(
        model=model,
        split=zoo.split(spec, dense),
        train=train,
        val=train.take(np.arange(0)),
        recipe=RECIPE,
        classes=spec.classes,
        mask=mask,
    )
    return task.but(**changes)


def longest(task):
    """Roundings of one step at most: a layer rounds once for each term of its sums, forward and back."""
    return max(math.prod(p.shape[1:]) * 100 for p in task.model.parameters() if p.dim() > 1)


def assert_near(task, found, wanted, steps):
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert roundings(found[key], value, scale=max(1.0, float(np.abs(value).max()))) <= steps * longest(task), key


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize("name", ["imu_cnn", "mlp", "fmnist_cnn"])
def test_training_is_the_loops(engines, spec_of, name, keep):
    task = task_of(spec_of(name), keep=keep)
    state = state_of(task.model)
    assert_near(task, engines(name).train(task, state), loop.train(task, state), steps=3)


@pytest.mark.parametrize("strength", [None, 0.5])
def test_the_next_training_of_these_shapes_is_bound_by_then_and_begins_anew(spec_of, monkeypatch, strength):
    spec = spec_of("mlp")
    first, second = task_of(spec), task_of(spec, client="bela")
    pulls = [None if strength is None else Pull({k: v + n for k, v in state_of(first.model).items()}, strength * n)
             for n in (1, 2)]  # fmt: skip
    state, engine = state_of(first.model), ProgramEngine(spec)
    engine.train(first, state, pull=pulls[0])
    monkeypatch.setattr(Session, "bound", lambda *_: pytest.fail("bound again"))
    found = engine.train(second, state, pull=pulls[1])
    monkeypatch.undo()
    assert equal(found, ProgramEngine(spec).train(second, state, pull=pulls[1]))
    assert not equal(found, engine.train(first, state, pull=pulls[0]))


@pytest.mark.parametrize("part", ["body", "head"])
def test_what_is_not_trained_stands_still(engines, spec_of, part):
    task = task_of(spec_of("imu_cnn"))
    state, only = state_of(task.model), task.split.of(part)
    found = engines("imu_cnn").train(task, state, only=only)
    assert_near(task, found, loop.train(task, state, only=only), steps=3)
    assert all(np.array_equal(found[key], state[key]) for key in state if key not in only)


def test_a_pull_enters_before_momentum(engines, spec_of):
    task = task_of(spec_of("imu_cnn"))
    state = state_of(task.model)
    anchor = {key: np.asarray(value + 1, value.dtype) for key, value in state.items()}
    pull = Pull(anchor, 0.5)
    found = engines("imu_cnn").train(task, state, pull=pull)
    assert_near(task, found, loop.train(task, state, pull=pull), steps=3)
    assert not np.allclose(found["head.weight"], engines("imu_cnn").train(task, state)["head.weight"])


class Spare(nn.Module):
    """Has a parameter that its pass does not read."""

    def __init__(self):
        super().__init__()
        self.body, self.spare, self.head = nn.Linear(6, 5), nn.Parameter(torch.ones(2)), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


@pytest.mark.parametrize("objective", [None, CrossEntropy()])
def test_what_no_loss_reaches_rests_where_it_is_pulled_too(objective):
    spec = zoo.keep(Spare(), (6,), 3, "head")
    task = task_of(spec)
    state = state_of(task.model)
    pull = Pull({key: value + np.float32(1) for key, value in state.items()}, 0.5)
    for engine in (ProgramEngine(spec), torch_engine):
        found = engine.train(task, state, pull=pull, objective=objective)
        assert np.array_equal(found["spare"], state["spare"]), engine
        assert not np.array_equal(found["body.weight"], state["body.weight"])


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize("name", ["imu_cnn", "fmnist_cnn"])
def test_kept_features_change_nothing(engines, spec_of, name, keep):
    task = task_of(spec_of(name), keep=keep, recipe=RECIPE.but(epochs=3))
    state, only = state_of(task.model), task.split.of("head")
    found = engines(name).train_upper(task, state, only=only)
    assert engines(name).source.lower(frozenset(only)) is not None
    assert_near(task, found, frozen_features.train(task, state, only=only), steps=9)


def test_weights_that_are_too_large_are_not_told_to_be_a_damaged_sample(engines, spec_of):
    task = task_of(spec_of("imu_cnn"), recipe=RECIPE.but(epochs=3))
    state = state_of(task.model)
    state["conv1.weight"] = np.full_like(state["conv1.weight"], 3e38)
    with pytest.raises(ModelError, match="frozen layers make NaN or infinity"):
        engines("imu_cnn").train_upper(task, state, only=task.split.of("head"))


def test_a_network_that_cannot_be_cut_trains_whole(engines, spec_of):
    task = task_of(spec_of("mlp"), recipe=RECIPE.but(epochs=3))
    state, every = state_of(task.model), task.split.keys
    found = engines("mlp").train_upper(task, state, only=every)
    assert equal(found, engines("mlp").train(task, state, only=every))


@pytest.mark.parametrize(("keep", "freeze"), [(None, ()), (0.5, ()), (None, ("bn2",)), (None, ("bn*",))])
def test_statistics_are_those_of_the_data_but_where_a_layer_is_frozen(engines, spec_of, keep, freeze):
    task = task_of(
        spec_of("imu_cnn"), count=300, keep=keep, recipe=RECIPE.but(freeze=freeze)
    )  # two batches of the pass
    state = state_of(task.model)
    found = engines("imu_cnn").calibrate(task, state)
    assert_near(task, found, loop.calibrate(task, state), steps=2)
    assert all(np.array_equal(found[key], state[key]) for key in task.still)
    counters = [value for key, value in found.items() if key.endswith("num_batches_tracked") and key not in task.still]
    assert [int(value) for value in counters] == [2] * len(counters)
    assert len(counters) == {(): 4, ("bn2",): 3, ("bn*",): 0}[freeze]


def test_no_sample_and_no_step_change_nothing(engines, spec_of):
    task = task_of(spec_of("imu_cnn"))
    state = state_of(task.model)
    engine = engines("imu_cnn")
    none = task.train.take(np.arange(0))
    assert equal(engine.train(task, state, samples=none), state)
    assert equal(engine.train(task, state, recipe=RECIPE.but(epochs=0)), state)
    assert equal(engine.train(task, state, only=()), state)
    assert equal(engine.calibrate(task, state, samples=none), state)


def test_one_sample_leaves_the_statistics(engines, spec_of):
    task = task_of(spec_of("imu_cnn"), count=1)
    state = state_of(task.model)
    assert_near(task, engines("imu_cnn").train(task, state), loop.train(task, state), steps=1)


def test_dropout_draws_follow_from_the_task_and_keep_their_share():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 400), nn.Dropout(0.25), nn.Linear(400, 4))
    spec = zoo.keep(net, (5,), 4)
    engine, task = ProgramEngine(spec), task_of(spec, recipe=RECIPE.but(weight_decay=0.0, momentum=0.0, steps=1))
    state = state_of(task.model)
    one = engine.train(task, state)
    assert equal(one, engine.train(task, state))
    assert not equal(one, engine.train(task.but(round=1), state))
    # The first step of SGD by hand, with the draws that the task's own seed gives.
    draws = engine_draws(engine, task, state)
    assert set(np.unique(draws)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(float((draws > 0).mean()) - 0.75) < 6 * math.sqrt(0.25 * 0.75 / draws.size)


def engine_draws(engine, task, state):
    from talaria.programs.engine import _Draws

    program = engine.source.program(Need.of(task.recipe, None))
    return _Draws(program, engine.source.falls, state, task, "train").next(16)["1"]


class Dropping(nn.Module):
    """torch's transformer layer as it is by default, which drops weights of attention too."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


@pytest.mark.parametrize("adapters", [None, AdapterSpec("lowrank", 2)])
@pytest.mark.parametrize("keep", [None, 0.5])
def test_weights_of_attention_that_fall_away_are_the_same_on_both_engines(keep, adapters):
    torch.manual_seed(0)
    spec = replace(zoo.keep(Dropping((6, 8), 4), (6, 8), 4), adapters=adapters)
    engine, task = ProgramEngine(spec), task_of(spec, keep=keep, block=1)
    state = state_of(task.model)
    with torch.random.fork_rng():
        torch.manual_seed(1)  # which has no part in it
        wanted = loop.train(task, state)
    assert_near(task, engine.train(task, state), wanted, steps=3)
    slopes = loop.gradient(task, state)
    found = engine.gradient(task, state)
    assert_near(task, {key: found[key] for key in slopes}, slopes, steps=1)
    draws = engine.source.derivative(None, ("logits",)).graph.inputs
    attention = "layer.self_attn" + ("" if adapters is None else ".base")
    assert next(port.shape for port in draws if port.name == f"draw/{attention}") == ("N", 4, 6, 6)
    if keep is not None:
        heads = task.model.get_submodule(attention)
        assert (heads.num_heads, heads_of(heads)) == (2, 4)


def test_curvature_of_attention_that_drops_weights_is_torchs():
    torch.manual_seed(0)
    spec = zoo.keep(Dropping((3, 8), 4), (3, 8), 4)
    task = task_of(spec, count=8)
    state, rng = state_of(task.model), np.random.default_rng(1)
    walks = [engine.walk(task, state, task.recipe) for engine in (ProgramEngine(spec), torch_engine)]
    along = {key: rng.standard_normal(value.shape).astype(np.float32) for key, value in walks[0].weights.items()}
    found, wanted = (walk.curved(task.train.x, task.train.y, along, walk.draws("train/curve")) for walk in walks)
    assert_near(task, found, wanted, steps=1)


class Looks:
    """Cross-entropy, a penalty on features in the middle, and a bias of its own that is learned beside the model."""

    taps, own = ("logits", "mean conv2"), ("own/bias",)

    def __call__(self, seen, own, x, y):
        loss, slope = cross_entropy(seen["logits"] + own["own/bias"], y, 0.1)
        features = seen["mean conv2"]
        loss += 0.5 * float(np.square(features).sum() / len(y))
        return Slopes(loss, {"logits": slope, "mean conv2": features / np.float32(len(y))}, {"own/bias": slope.sum(0)})


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_objective_over_arrays_is_trained_as_torch_trains_it(engines, spec_of, keep, accumulate):
    task = task_of(spec_of("imu_cnn"), keep=keep, recipe=RECIPE.but(accumulate=accumulate))
    state = {**state_of(task.model), "own/bias": np.zeros(7, np.float32)}
    anchor = {key: np.asarray(value + 1, value.dtype) for key, value in state.items()}
    for only in (None, (*task.split.of("head"), "own/bias")):
        how = {"only": only, "objective": Looks(), "pull": Pull(anchor, 0.1)}
        found = engines("imu_cnn").train(task, state, **how)
        assert_near(task, found, torch_engine.train(task, state, **how), steps=3)
        assert found["own/bias"].any()
        assert all(np.array_equal(found[key], state[key]) for key in state if only is not None and key not in only)


class Slips(Looks):
    """Gives slopes in another form, or looks where nothing is."""

    def __init__(self, how) -> None:
        self.how = how
        self.taps = {"nowhere": ("logits", "conv2"), "as text": "logits"}.get(how, ("logits",))
        self.own = ("own/bias",) if how == "lost" else ()

    def __call__(self, seen, own, x, y):
        loss, slope = cross_entropy(seen["logits"], y)
        if self.how in ("pair", "none"):
            return loss, {"logits": slope}
        return Slopes(
            loss,
            {
                "short": {"logits": slope[:, 1:]},
                "few": {},
                "more": {"logits": slope, "mean conv2": slope},
                "wide": {"logits": slope.astype(np.float64)},
            }[self.how],
        )


@pytest.mark.parametrize("kind", ["torch", "onnx"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("pair", "objective Slips: gave a tuple; give Slopes"),
        ("short", r"objective Slips: gave \(16, 6\) as the slope of 'logits', which is \(16, 7\)"),
        ("few", "objective Slips: gave no slope of 'logits'; give the slope of every tap"),
        ("more", "objective Slips: gave a slope of 'mean conv2', at which it does not look"),
        ("nowhere", "the model has no 'conv2'; name 'logits'"),
        ("as text", "the model has no 'l'; name 'logits'"),
        ("lost", "objective Slips: its own 'own/bias' is not in the state"),
    ],
)
def test_what_an_objective_gives_in_another_form_is_named_by_both_engines(engines, spec_of, kind, how, said):
    task = task_of(spec_of("imu_cnn"), engine=engines("imu_cnn") if kind == "onnx" else None)
    with pytest.raises(ModelError, match=said):
        train(task, state_of(task.model), objective=Slips(how))


def test_slopes_of_double_precision_are_taken_by_both_engines(engines, spec_of):
    task = task_of(spec_of("imu_cnn"))
    state = state_of(task.model)
    found, wanted = (one.train(task, state, objective=Slips("wide")) for one in (engines("imu_cnn"), torch_engine))
    assert_near(task, found, wanted, steps=3)


def test_slices_of_a_batch_are_one_step(engines, spec_of):
    task = task_of(spec_of("imu_cnn"), recipe=RECIPE.but(accumulate=4))
    state = state_of(task.model)
    assert_near(task, engines("imu_cnn").train(task, state), loop.train(task, state), steps=3)
    found = engines("imu_cnn").train_upper(task, state, only=task.split.of("head"))
    assert_near(task, found, loop.train(task, state, only=task.split.of("head")), steps=3)


@pytest.mark.parametrize("objective", [None, CrossEntropy(0.2)])
@pytest.mark.parametrize("part", [None, "body"])
def test_a_gradient_is_torchs_and_moves_nothing(engines, spec_of, part, objective):
    task = task_of(spec_of("imu_cnn"), keep=0.5)
    state = state_of(task.model)
    how = {"only": None if part is None else task.split.of(part), "objective": objective}
    found = engines("imu_cnn").gradient(task, state, **how)
    assert_near(task, found, torch_engine.gradient(task, state, **how), steps=1)


def test_a_look_is_torchs(engines, spec_of):
    task, taps = task_of(spec_of("imu_cnn"), count=300, keep=0.5), ("logits", "mean bn2", "into head")
    state = state_of(task.model)
    x = task.train.x
    found = engines("imu_cnn").looking(task, state, taps)(x)
    assert_near(task, found, torch_engine.looking(task, state, taps)(x), steps=1)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_walk_goes_as_torchs_does(engines, spec_of, accumulate):
    """Gradients elsewhere than at the weights, statistics kept or not, decay elsewhere, and steps with momentum."""
    task = task_of(spec_of("imu_cnn"), keep=0.5, recipe=RECIPE.but(accumulate=accumulate))
    state = state_of(task.model)
    ends = []
    for engine in (engines("imu_cnn"), torch_engine):
        walk = engine.walk(task, state, task.recipe)
        for x, y in feed(task, task.recipe, task.train):
            at = {key: np.asarray(value * 0.9, value.dtype) for key, value in walk.weights.items()}
            first = walk.gradient(x, y, at=at, keep=True)
            walk.step(walk.gradient(x, y))
            walk.step(first, at=at, scale=0.5)
        ends.append(walk.state())
    assert_near(task, *ends, steps=6)


@pytest.mark.parametrize("changes", [{}, {"clip": 0.5}, {"optimizer": "nesterov"}, {"optimizer": "adam"}])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_scaled_step_of_a_walk_is_torchs(engines, spec_of, changes, elsewhere):
    """Weight decay is scaled with the slopes, where it acts on the weights too, and clipped with them."""
    task = task_of(spec_of("mlp"), recipe=RECIPE.but(lr=0.5, weight_decay=1.0, **changes))
    state, rng = state_of(task.model), np.random.default_rng(1)
    ends = []
    for engine in (engines("mlp"), torch_engine):
        walk = engine.walk(task, state, task.recipe)
        slopes = {key: rng.standard_normal(value.shape).astype(np.float32) for key, value in walk.weights.items()}
        rng = np.random.default_rng(1)
        for _ in range(2):
            walk.step(
                slopes, at={key: np.asarray(-value) for key, value in state.items()} if elsewhere else None, scale=0.5
            )
        ends.append(walk.state())
    assert_near(task, *ends, steps=2)


def test_statistics_stand_still_between_the_slices_of_a_look_aside(engines, spec_of):
    """Slices of two, two and a lone sample, which is normalized by the statistics: without ``keep`` by those before."""
    task = task_of(spec_of("imu_cnn"), count=5, recipe=RECIPE.but(accumulate=3))
    state, (x, y) = state_of(task.model), (task.train.x, task.train.y)
    along = {key: value for key, value in state.items() if value.dtype == np.float32}
    walks = [engine.walk(task, state, task.recipe) for engine in (engines("imu_cnn"), torch_engine)]
    apart = [torch_engine.walk(task, state, task.recipe.but(accumulate=1)) for _ in range(3)]
    pieces = list(zip(apart, (slice(0, 2), slice(2, 4), slice(4, 5)), strict=True))
    parts = [(walk.gradient(x[rows], y[rows]), len(y[rows]) / 5) for walk, rows in pieces]
    wanted = {key: np.asarray(sum(share * part[key] for part, share in parts)) for key in parts[0][0]}
    for walk in walks:
        assert_near(task, walk.gradient(x, y), wanted, steps=1)
    assert_near(task, *(walk.curved(x, y, along, walk.draws("train/curve")) for walk in walks), steps=1)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["imu_cnn", "fmnist_cnn"])
def test_curvature_is_torchs(engines, spec_of, name, accumulate):
    task = task_of(spec_of(name), keep=0.5, recipe=RECIPE.but(accumulate=accumulate))
    state, rng = state_of(task.model), np.random.default_rng(1)
    walks = [engine.walk(task, state, task.recipe) for engine in (engines(name), torch_engine)]
    along = {key: rng.standard_normal(value.shape).astype(np.float32) for key, value in walks[0].weights.items()}
    found, wanted = (walk.curved(task.train.x, task.train.y, along, walk.draws("train/curve")) for walk in walks)
    assert_near(task, found, wanted, steps=1)
    assert all(equal(walk.state(), state) for walk in walks)


def test_dropout_of_a_walk_is_torchs_and_can_be_drawn_again():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.25), nn.Linear(40, 4))
    spec = zoo.keep(net, (5,), 4)
    task = task_of(spec)
    state = state_of(task.model)
    found = []
    for engine in (ProgramEngine(spec), torch_engine):
        walk = engine.walk(task, state, task.recipe)
        draws = walk.draws("train/curve")
        again = draws.copy()
        once, twice = (walk.gradient(task.train.x, task.train.y, draws=one) for one in (draws, again))
        assert equal(once, twice)
        found += [once, walk.gradient(task.train.x, task.train.y, draws=draws)]
    assert not equal(found[0], found[1])
    assert_near(task, found[0], found[2], steps=1)
    assert_near(task, found[1], found[3], steps=1)


def test_what_is_served_is_torchs_module(engines, spec_of):
    task = task_of(spec_of("mlp"))
    state = state_of(task.model)
    model = engines("mlp").served(task, state)
    assert equal(state_of(model), state_of(load(task.model, state)))
    assert not model.training


@pytest.mark.parametrize("keep", [None, 0.5])
def test_a_network_is_not_cut_where_a_sequence_passes(keep):
    """The moments of a sequence are rows there, and no features of samples: it trains whole."""
    spec = ModelSpec("mypkg.nets:Recurrent", (3, 16), 3, options={"width": 16})
    task = task_of(spec, count=8, keep=keep, recipe=Recipe(epochs=4, batch=4, lr=0.1))
    engine, state = ProgramEngine(spec), state_of(task.model)
    assert engine.source.lower(engine.source.parameters) is None
    found = engine.train_upper(task, state, only=engine.source.parameters)
    assert_near(task, found, loop.train(task, state), steps=8)


class LeftPadded(nn.Module):
    """Looks back over tokens that are padded on the left: the first ones see none at all."""

    def __init__(self, dropout, kind):
        super().__init__()
        self.words, self.kind, self.dropout = nn.Embedding(20, 8), kind, dropout
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y, later = self.words(x.long()), torch.ones(6, 6).triu(1).bool()
        if self.kind == "function":
            seen = (x != 0)[:, None].expand(-1, 6, -1)
            dropped = self.dropout if self.training else 0.0
            return self.head((y + nn.functional.scaled_dot_product_attention(y, y, y, seen, dropped)).mean(1))
        return self.head(self.layer(y, src_mask=later, src_key_padding_mask=x == 0)[:, -1])


@pytest.mark.parametrize(("dropout", "kind"), [(0.0, "layer"), (0.1, "layer"), (0.0, "function"), (0.1, "function")])
def test_a_query_that_sees_no_key_spoils_nothing(dropout, kind):
    spec = zoo.keep(zoo.own(LeftPadded(dropout, kind), torch.ones(2, 6)), (6,), 3, "head")
    task, rng = task_of(spec), np.random.default_rng(0)
    x = rng.integers(1, 20, (40, 6)).astype(np.float32)
    x[:20, :2] = 0  # of half of the samples
    x[3] *= kind == "layer"  # else nothing in it is seen
    task = task.but(train=Samples(x, task.train.y))
    state = state_of(task.model)
    wanted = loop.train(task, state)
    assert all(np.isfinite(value).all() for value in wanted.values())
    assert_near(task, ProgramEngine(spec).train(task, state), wanted, steps=3)


class PowerMean(nn.Module):
    """A mean of powers, of which ``p`` is no share that falls away."""

    def __init__(self):
        super().__init__()
        self.p = 3

    def forward(self, x):
        return x.clamp(min=1e-6).pow(self.p).mean(2).pow(1 / self.p)


def test_a_share_falls_away_in_layers_that_draw_alone():
    net = nn.Sequential(nn.Conv1d(3, 8, 3), PowerMean(), nn.Dropout(0.25), nn.Linear(8, 3))
    assert ProgramEngine(zoo.keep(net, (3, 9), 3)).source.falls == {"2": 0.25}


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.each = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 16, 3, groups=16)
        self.last, self.head = nn.Conv1d(16, 16, 1), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.last(self.each(self.first(x).relu()).relu()).relu().mean(2))


@pytest.mark.parametrize(("keep", "block", "left"), [(0.5, 8, 8), (0.01, 1, 1)])
def test_depthwise_convolutions_are_looked_through_at_the_width_that_a_mask_leaves(keep, block, left):
    spec = zoo.keep(Depthwise(), (3, 12), 3, "head")
    task = task_of(spec, keep=keep, block=block)
    state, maker = state_of(task.model), Maker(spec)
    assert state["each.weight"].shape == (left, 1, 3)
    given = Given(maker.parameters, (), {}, {}, {"forward": maker.forward().write()})
    x = task.train.x
    wanted = predict(task.model, x)
    assert roundings(given.served(task, state).predict(x), wanted, scale=1.0) <= 100
    engine = ProgramEngine(spec)
    assert engine.accuracy(task, state, task.train) == float((wanted.argmax(1) == task.train.y).mean())
    other = {**state, "head.weight": -state["head.weight"], "head.bias": -state["head.bias"]}  # of the same shapes
    assert engine.accuracy(task, other, task.train) == float((wanted.argmin(1) == task.train.y).mean())


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x).round())


def test_a_part_by_which_nothing_is_learned_has_a_derivative_of_zeros():
    spec = zoo.keep(Rounded(), (6,), 3, "head")
    task = task_of(spec)
    found = ProgramEngine(spec).gradient(task, state_of(task.model), only=task.split.of("body"))
    assert found.keys() == {"body.weight", "body.bias"}
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize("drop", [nn.Dropout, nn.Dropout1d])
def test_a_head_that_begins_with_dropout_over_maps_draws_as_wide_as_its_features_are(drop, keep):
    net = nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), drop(0.3), nn.Flatten(), nn.Linear(64, 3))
    spec = zoo.keep(net, (2, 10), 3)
    task = task_of(spec, keep=keep, block=1, recipe=RECIPE.but(epochs=4))
    state, only, engine = state_of(task.model), task.split.of("head"), ProgramEngine(spec)
    found = engine.train_upper(task, state, only=only)
    assert [need.upper for need in engine.source.programs] == [True]
    assert_near(task, found, torch_engine.train_upper(task, state, only=only), steps=12)


def test_an_input_of_another_dtype_is_named(engines, spec_of):
    task = task_of(spec_of("mlp"))
    look = engines("mlp").looking(task, state_of(task.model), ("logits",))
    with pytest.raises(ModelError, match="'x' is float64; convert it to float32"):
        look(task.train.x.astype(np.float64))


class Deep(nn.Module):
    """Drops branches at random, one below all that the head trains and one beside it."""

    def __init__(self):
        from torchvision.ops import StochasticDepth  # here: every process that runs tests would pay two seconds for it

        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.inner, self.outer = (
            nn.Sequential(nn.Linear(8, 8), StochasticDepth(0.2, "row")),
            StochasticDepth(0.5, "row"),
        )

    def forward(self, x):
        y = self.first(x).relu()
        return self.head(y + self.outer(self.inner(y)))


@pytest.mark.parametrize("part", ["head", "body"])
def test_branches_that_fall_away_do_so_anew_on_kept_features(part):
    spec = zoo.keep(Deep(), (6,), 3, "head")
    task = task_of(spec, recipe=RECIPE.but(epochs=4))
    state, only = state_of(task.model), task.split.of("head") if part == "head" else {"inner.0.weight", "head.weight"}
    wanted = loop.train(task, state, only=only)
    for engine in (torch_engine, ProgramEngine(spec)):
        assert_near(task, engine.train_upper(task, state, only=only), wanted, steps=12)
