"""APFL: parameters are mixed, α stays in [0, 1] and at home, and w never learns of any of it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch.nn import functional as F

from talaria.algorithms.apfl import ALPHA, APFL
from talaria.algorithms.sharing import PERSONAL
from talaria.errors import ConfigError
from talaria.model.state import state_of, tensor_of, to_torch
from talaria.tensors import Tensors, copied, equal, only, under
from talaria.training.interface import Task
from talaria.training.loop import calibrate
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]


def apart(task: Task, alpha: float) -> tuple[Tensors, Tensors]:
    """A shared and a private state whose models differ."""
    shared, private = APFL(alpha=alpha).init(task.model, task.split)
    trained = [PERSONAL + k for k in task.split.parameters("body", "adapters", "head")]
    return shared, {k: v + 0.5 if k in trained else v for k, v in private.items()}


def test_gradients_of_mixture_and_alpha_against_autograd(tiny: Tiny) -> None:
    """One full batch: v' = v - η ∂f(αv + (1-α)w)/∂v and α' = α - η_α ∂f/∂α, both by autograd through the mixture."""
    task = tiny(epochs=1, batch=13, lr=0.1)
    shared, private = apart(task, 0.3)
    v = {k: t.clone().requires_grad_() for k, t in to_torch(under(private, PERSONAL)).items()}
    w, x, y = to_torch(shared), tensor_of(task.train.x), tensor_of(task.train.y)
    alpha = torch.tensor(0.3, requires_grad=True)
    mixed = {k: alpha * v[k] + (1 - alpha) * w[k] for k in w}
    loss = F.cross_entropy(torch.func.functional_call(task.model, mixed, (x,)), y)
    loss.backward()  # type: ignore[no-untyped-call]
    _, after = APFL(alpha_lr=0.05).fit(task, shared, private)
    for k, own in under(after, PERSONAL).items():
        assert roundings(own, (v[k] - 0.1 * v[k].grad).detach()) <= 64
    assert float(after[ALPHA]) == pytest.approx(0.3 - 0.05 * float(alpha.grad), abs=1e-6)


@pytest.mark.parametrize("rate", [0.01, 1e3])
def test_alpha_stays_in_its_interval(tiny: Tiny, rate: float) -> None:
    task = tiny()
    shared, private = apart(task, 0.5)
    _, after = APFL(alpha_update="every_step", alpha_lr=rate).fit(task, shared, private)
    assert 0 <= float(after[ALPHA]) <= 1
    assert float(after[ALPHA]) != 0.5


def test_alpha_is_learned_when_its_option_says(tiny: Tiny) -> None:
    task = tiny()
    shared, private = apart(task, 0.5)
    off, first, every = (
        float(APFL(alpha_update=update, alpha_lr=0.01).fit(task, shared, private)[1][ALPHA])
        for update in ("off", "first_batch", "every_step")
    )
    assert off == 0.5
    assert len({off, first, every}) == 3
    one = task.but(recipe=task.recipe.but(steps=1))
    alone = float(APFL(alpha_update="every_step", alpha_lr=0.01).fit(one, shared, private)[1][ALPHA])
    assert first == alone


def test_neither_own_model_nor_alpha_travels(tiny: Tiny, rounds: Rounds) -> None:
    sent, shared, _ = rounds(APFL(), tiny(norm=True))
    for update in sent:
        assert set(update.tensors) == set(shared)
        assert not any("/" in k for k in update.tensors)
        assert not update.metrics


def test_served_is_the_mixture_with_the_latest_shared_model(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny()
    _, shared, private = rounds(APFL(), task)
    newer = {k: v + 1 for k, v in shared.items()}
    alpha = float(private[ALPHA])
    served = state_of(APFL().personal(task, newer, private))
    for k, w in newer.items():
        assert roundings(served[k], alpha * private[PERSONAL + k] + (1 - alpha) * w) <= 16


@pytest.mark.parametrize("buffers", ["local", "aggregate"])
def test_the_mixture_has_statistics_of_its_own(tiny: Tiny, rounds: Rounds, buffers: str) -> None:
    task = tiny(norm=True, buffers=buffers)
    _, shared, private = rounds(APFL(), task)
    mean = {**shared, **private}["body.1.running_mean"]
    assert not np.array_equal(private[PERSONAL + "body.1.running_mean"], mean)
    assert int(private[PERSONAL + "body.1.num_batches_tracked"]) == 3 * 2 * 3
    served = state_of(APFL().personal(task, shared, private))
    assert equal(served, calibrate(task, served))


def test_a_newcomer_trains_its_own_model_under_a_still_shared_one(tiny: Tiny) -> None:
    task = tiny(norm=True).but(newcomer=True)
    shared, private = APFL(alpha=0.5).init(task.model, task.split)
    before = copied(shared), copied(private)
    served = state_of(APFL(alpha=0.5).personal(task, shared, private))
    assert equal(shared, before[0])
    assert equal(private, before[1])
    assert not equal(only(served, shared), shared)
    plain = state_of(APFL(join_epochs=0).personal(task, shared, private))
    assert equal(only(plain, shared), shared)


def test_weight_decay_acts_on_the_mixture(tiny: Tiny) -> None:
    """At α = 0 there is nothing of v in it, so v stays to the bit."""
    task = tiny(weight_decay=0.1)
    algorithm = APFL(alpha=0.0, alpha_update="off", allow_degenerate=True)
    shared, private = algorithm.init(task.model, task.split)
    _, after = algorithm.fit(task, shared, private)
    assert equal(under(after, PERSONAL), under(private, PERSONAL))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 0.0),
        ("alpha", 1.0),
        ("alpha", 1.5),
        ("alpha", float("nan")),
        ("alpha_update", "sometimes"),
        ("alpha_lr", -1.0),
        ("join_epochs", -1),
    ],
)
def test_bad_options(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"apfl: {field}={value!r}"):
        APFL(**{field: value})  # type: ignore[arg-type]
