"""The training loop: what is frozen stands still to the bit, what is drawn is seeded, what is computed is right."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from talaria import seeds
from talaria.errors import ConfigError, ModelError
from talaria.model.cloning import clone
from talaria.model.split import split_model
from talaria.model.state import load, state_of, tensor_of
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors, copied, equal, is_float, only
from talaria.training import augment, batching, loop, torch_engine
from talaria.training.batching import feed
from talaria.training.engine import never_trained, ready
from talaria.training.functional_sgd import FunctionalSGD
from talaria.training.interface import Task
from talaria.training.objectives import CrossEntropy, Pull
from talaria.types import Recipe, Samples


class Net(nn.Module):
    """6 inputs, a body with BatchNorm and dropout, 3 classes."""

    def __init__(self, norm: bool, dropout: float) -> None:
        super().__init__()
        layers = [nn.Linear(6, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.Tanh(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.noise = nn.Dropout(dropout)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.noise(self.body(x)))
        return out


def task(count: int = 13, norm: bool = True, dropout: float = 0.0, **recipe: object) -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Net(norm, dropout)
    g = torch.Generator().manual_seed(4)
    data = Samples.of(torch.randn(count, 6, generator=g), np.arange(count) % 3)
    settings = {"epochs": 2, "batch": 4, "lr": 0.1, "momentum": 0.0, **recipe}
    return Task(model, split_model(model), data, data, Recipe(**settings), 3)  # type: ignore[arg-type]


def start(task: Task) -> Tensors:
    return state_of(task.model)


# what is frozen


@pytest.mark.parametrize("part", ["body", "head"])
def test_frozen_tensors_stand_still_to_the_bit(part: str) -> None:
    """Parameters and BatchNorm statistics, under momentum and weight decay, also with gradients from before."""
    t = task(momentum=0.9, weight_decay=0.1)
    state = loop.train(t, start(t))
    trained = t.split.of(part)  # type: ignore[arg-type]
    after = loop.train(t, state, only=trained)
    still = [k for k in state if k not in trained]
    assert equal(only(after, still), only(state, still))
    assert all(not np.array_equal(after[k], state[k]) for k in trained)


def test_modes_follow_what_is_trained() -> None:
    """Dropout within a frozen body is off; beside a trained head it is on; BatchNorm stands in eval."""
    t = task(dropout=0.5)
    seen: dict[str, bool] = {}

    def look(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.update({name: m.training for name, m in module.named_modules()})
        return F.cross_entropy(module(x), y)

    loop.train(t, start(t), only=t.split.of("head"), objective=look)
    assert seen == {
        "": True, "body": False, "body.0": False, "body.1": False, "body.2": False, "body.3": False,
        "noise": True, "head": True,
    }  # fmt: skip
    loop.train(t, start(t), objective=look)
    assert all(seen.values())


def test_nothing_to_train_changes_nothing() -> None:
    t = task()
    state = start(t)
    assert equal(loop.train(t, state, only=()), state)
    assert equal(loop.train(t, state, recipe=t.recipe.but(epochs=0)), state)
    assert equal(loop.train(t, state, recipe=t.recipe.but(steps=0)), state)


@pytest.mark.parametrize("steps", [None, 5])
def test_no_samples_train_nothing(steps: int | None) -> None:
    """An empty set given on purpose is not replaced by the task's own."""
    t = task(steps=steps)
    state = start(t)
    empty = t.train.take(np.arange(0))
    assert equal(loop.train(t, state, samples=empty), state)
    assert equal(loop.calibrate(t, state, samples=empty), state)


def test_inputs_stay_untouched() -> None:
    t = task()
    state = start(t)
    before, x = copied(state), t.train.x.copy()
    loop.train(t, state)
    loop.gradient(t, state)
    loop.calibrate(t, state)
    loop.accuracy(t, state, t.val)
    assert equal(state, before)
    assert np.array_equal(t.train.x, x)


# the step itself


def test_one_epoch_is_plain_sgd() -> None:
    t = task(norm=False, epochs=1, momentum=0.9, weight_decay=0.01, smoothing=0.1)
    state = start(t)
    after = loop.train(t, state)
    model = loop.served(t, state).requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    order = tensor_of(t.draws("train").order(13))
    for index in (order[:4], order[4:8], order[8:]):  # a last batch of one joins the batch before
        optimizer.zero_grad()
        x, y = tensor_of(t.train.x)[index], tensor_of(t.train.y)[index]
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
    assert equal(after, state_of(model))


def test_pull_enters_before_momentum() -> None:
    t = task(norm=False, steps=2, batch=13, momentum=0.9)
    state = start(t)
    anchor = {k: np.asarray(v + 1) for k, v in state.items()}
    after = loop.train(t, state, pull=Pull(anchor, 0.5))
    w, buffer = copied(state), {k: np.zeros_like(v) for k, v in state.items()}
    for _ in range(2):
        slope = loop.gradient(t, w)
        buffer = {k: 0.9 * buffer[k] + slope[k] + 0.5 * (w[k] - anchor[k]) for k in w}
        w = {k: np.asarray(w[k] - 0.1 * buffer[k]) for k in w}
    assert all(roundings(after[k], w[k]) <= 100 for k in w)
    assert equal(anchor, {k: np.asarray(v + 1) for k, v in state.items()})


def test_accumulated_slices_are_one_batch() -> None:
    """Without BatchNorm; 13 samples in 3 slices are of unequal size."""
    whole, cut = (
        loop.train(t, start(t)) for t in (task(norm=False, batch=13), task(norm=False, batch=13, accumulate=3))
    )
    assert all(roundings(whole[k], cut[k]) <= 100 for k in whole)
    many = task(norm=False, batch=2, accumulate=50)
    assert all(np.isfinite(v).all() for v in loop.train(many, start(many)).values())


def test_steps_count_instead_of_epochs() -> None:
    t = task(steps=5)
    assert int(loop.train(t, start(t))["body.1.num_batches_tracked"]) == 5
    t = task(epochs=2)
    assert int(loop.train(t, start(t))["body.1.num_batches_tracked"]) == 2 * 3


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("batch", [1, 4])
def test_few_samples_and_batches_of_one(count: int, batch: int) -> None:
    """BatchNorm has no variance over one sample: it then stands in eval, and the rest still learns."""
    t = task(count=count, batch=batch)
    state = start(t)
    after = loop.train(t, state)
    assert all(np.isfinite(v).all() for v in after.values())
    assert not np.array_equal(after["head.weight"], state["head.weight"])
    lone = count == 1 or batch == 1
    assert int(after["body.1.num_batches_tracked"]) == (
        0 if lone else 2 * batching.steps_of(Recipe(batch=batch, epochs=1, lr=0.05, momentum=0.0), count)
    )


# what is drawn


def test_the_same_task_gives_the_same_bits_and_another_does_not() -> None:
    t = task(dropout=0.5)
    state = start(t)
    first = loop.train(t, state)
    torch.rand(7)
    assert equal(first, loop.train(t, state))
    for other in (t.but(round=1), t.but(client="ben"), t.but(seed=1)):
        assert not equal(first, loop.train(other, state))
    assert not equal(first, loop.train(t, state, purpose="tune"))


def test_the_global_generator_is_left_alone() -> None:
    t = task(dropout=0.5)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    loop.train(t, start(t))
    loop.gradient(t, start(t))
    loop.calibrate(t, start(t))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("objective", [None, CrossEntropy()], ids=["loss", "objective"])
def test_another_thread_has_the_generator_between_two_batches(
    objective: CrossEntropy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's loop of messages makes a model while another one learns: it must not wait for a whole training."""
    t, batches, begun, made = task(dropout=0.5), loop.feed, Event(), Event()
    state = start(t)
    alone = torch_engine.train(t, state, objective=objective)

    def slowly(*given: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches(*given):
            yield batch
            begun.set()
            assert made.wait(60)

    monkeypatch.setattr(loop, "feed", slowly)
    with ThreadPoolExecutor(1) as learner:
        found = learner.submit(torch_engine.train, t, state, objective=objective)
        begun.wait(60)
        with seeds.aside():
            torch.rand(7)
        made.set()
        assert equal(found.result(), alone)


def test_augmentation_draws_from_the_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def shout(x: Array, draws: Draws) -> Array:
        seen.append(int(draws.words(1)[0]))
        return x * 2

    monkeypatch.setitem(augment.AUGMENTATIONS, "shout", shout)
    t = task(augment="shout", epochs=1)
    state = start(t)
    first = loop.train(t, state)
    assert equal(first, loop.train(t, state))
    assert seen[:3] == seen[3:]
    assert not equal(first, loop.train(task(epochs=1), state))
    with pytest.raises(ConfigError, match="augment='louder'"):
        loop.train(task(augment="louder"), state)


# gradient, calibrate, evaluate


def test_gradient_is_autograds() -> None:
    t = task()
    state = start(t)
    slope = loop.gradient(t, state)
    model = loop.served(t, state).requires_grad_(True).train()
    F.cross_entropy(model(tensor_of(t.train.x)), tensor_of(t.train.y)).backward()
    expected = {k: p.grad for k, p in model.named_parameters()}
    assert slope.keys() == expected.keys()
    assert all(np.array_equal(slope[k], expected[k]) for k in slope)


def test_gradient_of_a_part_sees_the_rest_frozen() -> None:
    t = task(dropout=0.5)
    state = loop.train(t, start(t))
    slope = loop.gradient(t, state, only=t.split.of("head"))
    assert set(slope) == {"head.weight", "head.bias"}
    assert equal(slope, loop.gradient(t, state, only=t.split.of("head")))
    t = task()
    model = loop.served(t, state)
    model.head.requires_grad_(True)  # type: ignore[union-attr]
    F.cross_entropy(model(tensor_of(t.train.x)), tensor_of(t.train.y)).backward()
    plain = loop.gradient(t, state, only=t.split.of("head"))
    assert np.array_equal(plain["head.weight"], model.head.weight.grad)  # type: ignore[union-attr]


def test_calibrate_gives_the_statistics_of_the_data() -> None:
    t = task()
    state = loop.train(t, start(t))
    after = loop.calibrate(t, state)
    hidden = F.linear(*map(tensor_of, (t.train.x, state["body.0.weight"], state["body.0.bias"])))
    assert roundings(after["body.1.running_mean"], hidden.mean(0)) <= 64
    assert roundings(after["body.1.running_var"], hidden.var(0)) <= 64
    rest = [k for k in state if k not in t.split.statistics | t.split.counters]
    assert equal(only(after, rest), only(state, rest))
    assert t.model.body[1].momentum == 0.1  # type: ignore[index, union-attr]


def test_calibrate_by_pieces_is_the_mean_over_them() -> None:
    t = task(count=12)
    state = start(t)
    after = loop.calibrate(t, state, batch=4)
    hidden = F.linear(*map(tensor_of, (t.train.x, state["body.0.weight"], state["body.0.bias"])))
    pieces = [hidden[first::3] for first in range(3)]
    assert roundings(after["body.1.running_mean"], torch.stack([h.mean(0) for h in pieces]).mean(0)) <= 64
    assert roundings(after["body.1.running_var"], torch.stack([h.var(0) for h in pieces]).mean(0)) <= 64


def test_ready_calibrates_only_what_never_trained_here() -> None:
    t = task()
    fresh = start(t)
    assert never_trained(t, fresh)
    assert equal(ready(t, fresh), loop.calibrate(t, fresh))
    trained = loop.train(t, fresh)
    assert not never_trained(t, trained)
    assert ready(t, trained) is trained
    still = t.but(recipe=t.recipe.but(freeze=("body.1",)))  # its only BatchNorm, which no round will move
    assert ready(still, fresh) is fresh


def test_predict_is_in_eval_and_puts_modes_back() -> None:
    t = task(dropout=0.9)
    model = load(t.model, start(t)).train()
    model.head.eval()  # type: ignore[union-attr]
    before = {m: m.training for m in model.modules()}
    first = loop.predict(model, t.train.x, batch=5)
    assert np.array_equal(first, loop.predict(model, t.train.x, batch=5))
    assert roundings(first, loop.predict(model, t.train.x)) <= 64
    assert {m: m.training for m in model.modules()} == before
    assert loop.predict(model, t.train.x[:0]).shape == (0, 3)


def test_predict_looks_in_the_fast_layout_and_puts_the_old_one_back() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(3 * 4 * 4, 5))
    seen = []
    model[2].register_forward_hook(lambda layer, given, out: seen.append((len(out), out.stride(1))))
    x = np.random.default_rng(0).standard_normal((150, 2, 8, 8), np.float32)
    with torch.no_grad():
        plain = model(torch.from_numpy(x)).numpy()
    assert roundings(loop.predict(model, x), plain) < 100
    assert seen == [(150, 16), (100, 1), (50, 1)]
    assert all(p.is_contiguous() for p in model.parameters())


def test_accuracy_counts_right_labels() -> None:
    t = task()
    state = start(t)
    right = loop.predict(load(t.model, state), t.train.x).argmax(1)
    assert loop.accuracy(t, state, Samples(t.train.x, right)) == 1.0
    assert loop.accuracy(t, state, Samples(t.train.x, (right + 1) % 3)) == 0.0
    assert loop.accuracy(t, state, t.train.take(np.arange(0))) == 0.0


# loading and serving


def test_served_is_a_module_of_its_own() -> None:
    t = task()
    state = start(t)
    model = loop.served(t, state)
    loop.train(t, state)
    assert model is not t.model
    assert equal(state_of(model), state)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_a_state_that_does_not_fit_is_named() -> None:
    t = task()
    state = start(t)
    with pytest.raises(ModelError, match=r"missing \['head.bias'\]"):
        load(t.model, {k: v for k, v in state.items() if k != "head.bias"})
    with pytest.raises(ModelError, match=r"unknown \['tail'\]"):
        load(t.model, {**state, "tail": np.ones(1)})
    with pytest.raises(ModelError, match=r"'head.bias' is \(4,\), the model has \(3,\)"):
        load(t.model, {**state, "head.bias": np.ones(4)})


def test_training_leaves_no_freeze_behind() -> None:
    """The one scratch module serves the next phase as if it were new."""
    t = task()
    state = start(t)
    fresh = loop.train(t, state)
    loop.train(t, state, only=t.split.of("head"))
    assert equal(loop.train(t, state), fresh)


# steps one at a time


@pytest.mark.parametrize(
    "make",
    [
        task,
        lambda: task(norm=False, dropout=0.5),
        lambda: task(count=1),
        lambda: task(momentum=0.9, weight_decay=0.1, smoothing=0.1, accumulate=2),
    ],
    ids=["norm", "dropout", "lone sample", "all options"],
)
def test_a_walk_of_plain_steps_is_training(make: Callable[[], Task]) -> None:
    t = make()
    state = start(t)
    walk = FunctionalSGD(t, state, t.recipe)
    for x, y in feed(t, t.recipe, t.train):
        walk.step(walk.gradient(x, y, keep=True))
    assert equal(walk.state(), loop.train(make(), state))


def test_a_walk_of_plain_steps_is_training_in_the_fast_layout() -> None:
    """Convolutions in channels-last memory: the walk's own weights have the layout of the module's."""

    def make() -> Task:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layers = (
                nn.Conv2d(3, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 4, 3),
                nn.Flatten(),
                nn.Linear(16, 3),
            )
            model = loop.in_fast_layout(nn.Sequential(*layers))
        data = Samples.of(torch.randn(9, 3, 6, 6, generator=torch.Generator().manual_seed(4)), np.arange(9) % 3)
        return Task(model, split_model(model, "5"), data, data, Recipe(epochs=2, batch=4, momentum=0.9, lr=0.05), 3)

    t = make()
    state = start(t)
    walk = FunctionalSGD(t, state, t.recipe)
    assert t.model.state_dict()["0.weight"].is_contiguous(memory_format=torch.channels_last)
    for x, y in feed(t, t.recipe, t.train):
        walk.step(walk.gradient(x, y, keep=True))
    assert equal(walk.state(), loop.train(make(), state))


class Viewed(nn.Module):
    """A map of several places, joined with its channels by ``view``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head, self.passes = nn.Conv2d(1, 6, 3), nn.Linear(96, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.head(self.conv(x).view(x.size(0), -1))


def test_a_network_of_one_layout_is_found_out_once_and_so_are_its_copies() -> None:
    x = np.zeros((4, 1, 6, 6), np.float32)
    found, tried = Viewed(), Viewed()
    want = loop.predict(found, x)
    assert found.passes == 2, "in the fast layout, and again as it is"
    loop.try_fast_layout(tried, torch.from_numpy(x))
    for one in (found, clone(found), tried, clone(tried)):
        one.passes = 0
        again = loop.predict(one, x)
        assert one.passes == 1
        assert again.shape == want.shape
        assert loop.in_fast_layout(one).conv.weight.is_contiguous()
    assert np.array_equal(loop.predict(found, x), want)


def test_two_walks_share_one_module_without_meeting() -> None:
    t = task(dropout=0.5)
    state = start(t)
    other = {k: np.asarray(v + 0.1, v.dtype) if is_float(v) else v for k, v in state.items()}
    a, b = FunctionalSGD(t, state, t.recipe), FunctionalSGD(t, other, t.recipe)
    for x, y in feed(t, t.recipe, t.train):
        for walk in (a, b):
            walk.step(walk.gradient(x, y, keep=True))
    assert equal(a.state(), loop.train(t, state))
    assert equal(b.state(), loop.train(t, other))


def test_a_walk_keeps_statistics_only_where_asked() -> None:
    t = task()
    walk = FunctionalSGD(t, start(t), t.recipe)
    before = walk.state()
    walk.gradient(t.train.x, t.train.y)
    assert equal(walk.state(), before)
    walk.gradient(t.train.x, t.train.y, keep=True)
    assert not equal(walk.state(), before)
    assert equal(only(walk.state(), walk.weights), only(before, walk.weights))


class Skipping(nn.Module):
    """A layer that every second pass goes without."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.passes = nn.Linear(6, 6), nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.head(self.body(x) if self.passes % 2 else x)


def test_what_a_slice_goes_without_learns_from_the_others() -> None:
    t = task(accumulate=2)
    ends = []
    for learn in (loop.train, None):
        own = t.but(model=Skipping(), split=split_model(Skipping()))
        with torch.no_grad():
            for parameter in own.model.parameters():
                parameter.fill_(0.1)
        state = start(own)
        if learn is None:
            walk = FunctionalSGD(own, state, own.recipe)
            for x, y in feed(own, own.recipe, own.train):
                walk.step(walk.gradient(x, y, keep=True))
        ends.append(walk.state() if learn is None else learn(own, state))
    assert equal(*ends)
    assert not equal(only(ends[0], ["body.weight"]), only(state, ["body.weight"]))


@pytest.mark.parametrize("dim", ["plain", 0, 1, None])
def test_curvature_is_the_hessians_product(dim: int | str | None) -> None:
    t = task(count=6, norm=False)
    if not isinstance(dim, str):  # of which torch's own second derivative is wrong, but with dim=None
        weight_norm(t.model.body[0], dim=dim)
        t = t.but(split=split_model(t.model))
    walk = FunctionalSGD(t, start(t), t.recipe)
    rng = np.random.default_rng(1)
    along = {k: np.asarray(rng.standard_normal(v.shape), np.float32) for k, v in walk.weights.items()}
    w = {k: v.astype(np.float64) for k, v in walk.weights.items()}
    product = walk.curved(t.train.x, t.train.y, along, walk.draws("train"))

    model = t.model.double()
    exact = Samples(t.train.x, t.train.y)
    object.__setattr__(exact, "x", t.train.x.astype(np.float64))
    precise = t.but(train=exact, model=model)
    ahead, behind = (
        loop.gradient(precise, {k: np.asarray(v + far * along[k].astype(np.float64)) for k, v in w.items()})
        for far in (1e-5, -1e-5)
    )
    for k, bent in product.items():
        assert roundings(bent, (ahead[k] - behind[k]) / 2e-5) <= 200
