"""Ditto: a private model near the received one, which neither leaks nor disturbs what is sent."""

from collections.abc import Callable

import numpy as np
import pytest

from talaria.algorithms.ditto import Ditto
from talaria.algorithms.sharing import PERSONAL
from talaria.errors import ConfigError
from talaria.model.state import state_of
from talaria.tensors import Tensors, copied, equal, only, prefixed, under
from talaria.training.interface import Task
from talaria.training.loop import train
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]


def distance(a: Tensors, b: Tensors) -> float:
    return float(sum(np.square(a[k] - b[k]).sum() for k in b))


def test_a_stronger_pull_keeps_the_own_model_nearer(tiny: Tiny) -> None:
    far = []
    for lam in (0.1, 1.0, 5.0):
        task, algorithm = tiny(), Ditto(lam=lam)
        shared, private = algorithm.init(task.model, task.split)
        _, private = algorithm.fit(task, shared, private)
        far.append(distance(under(private, PERSONAL), shared))
    assert far[0] > far[1] > far[2] > 0


def test_contraction_without_a_gradient(bowl: Callable[..., Task]) -> None:
    """At the minimum of f the pull is all there is: ‖v' - w‖ = (1 - ηλ) ‖v - w‖ would hold for ∇f = 0; here
    v' - w = (1 - η(λ + 2)) (v - w) with w = 3 the minimum, and ηλ + 2η = 1 lands on w exactly."""
    shared = {"w": np.array(3.0 + 1e-6)}
    private = {PERSONAL + "w": np.array(2.0)}
    _, after = Ditto(lam=3.0).fit(bowl(lr=0.1), shared, private)
    assert float(after[PERSONAL + "w"]) == pytest.approx(3 - (1 - 0.5), abs=1e-5)
    _, after = Ditto(lam=8.0).fit(bowl(lr=0.1), shared, private)
    assert float(after[PERSONAL + "w"]) == pytest.approx(3.0, abs=1e-5)


def test_the_anchor_is_the_received_model_not_the_trained_one(bowl: Callable[..., Task]) -> None:
    """0 → 0.65 → 0.65 - 0.1 (2 (0.65 - 3) + 0.5 (0.65 - 1)) while w itself moves 1 → 1.4 → 1.72."""
    shared = {"w": np.array(1.0)}
    private = {PERSONAL + "w": np.array(0.0)}
    update, after = Ditto(lam=0.5).fit(bowl(steps=2), shared, private)
    assert float(after[PERSONAL + "w"]) == pytest.approx(1.1375)
    assert float(update.tensors["w"]) == pytest.approx(1.72)


def test_the_own_model_never_travels_and_has_its_own_statistics(tiny: Tiny, rounds: Rounds) -> None:
    for buffers in ("local", "aggregate"):
        sent, shared, private = rounds(Ditto(lam=1.0), tiny(norm=True, buffers=buffers))
        assert not any(k.startswith(PERSONAL) for u in sent for k in u.tensors)
        assert set(under(private, PERSONAL)) == set(state_of(tiny(norm=True).model))
        mean = {**shared, **private}["body.1.running_mean"]
        assert not np.array_equal(private[PERSONAL + "body.1.running_mean"], mean)


def test_served_is_the_own_model_whatever_the_shared_one_is(tiny: Tiny, rounds: Rounds) -> None:
    task = tiny(norm=True)
    _, shared, private = rounds(Ditto(), task)
    before = copied(private)
    served = Ditto().personal(task, {k: v * 0 for k, v in shared.items()}, private)
    assert equal(state_of(served), under(private, PERSONAL))
    assert equal(private, before)
    assert not served.training


def test_a_newcomer_starts_from_the_shared_model_and_is_pulled_to_it(tiny: Tiny) -> None:
    task = tiny(norm=True).but(newcomer=True)
    algorithm = Ditto(lam=5.0)
    shared, private = algorithm.init(task.model, task.split)
    assert equal(only(under(private, PERSONAL), shared), shared)
    near, free = (state_of(Ditto(lam=lam).personal(task, shared, private)) for lam in (5.0, 1e-9))
    assert 0 < distance(near, shared) < distance(free, shared)
    plain = Ditto(join_epochs=0).personal(task, shared, private)
    assert equal(only(state_of(plain), shared), shared)


def test_personal_epochs_and_rate(tiny: Tiny, rounds: Rounds) -> None:
    task, algorithm = tiny(), Ditto(lam=0.0, personal_epochs=3, personal_lr=0.02, allow_degenerate=True)
    shared, private = algorithm.init(task.model, task.split)
    _, after = algorithm.fit(task, shared, private)
    alone = train(task, under(private, PERSONAL), recipe=task.recipe.but(epochs=3, lr=0.02))
    assert equal(only(after, prefixed(alone, PERSONAL)), prefixed(alone, PERSONAL))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lam", -1.0),
        ("lam", float("nan")),
        ("lam", 0.0),
        ("personal_epochs", -1),
        ("personal_lr", -0.1),
        ("join_epochs", -1),
        ("lam", "much"),
        ("lam", None),
    ],
)
def test_bad_options(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"ditto: {field}={value!r}"):
        Ditto(**{field: value})  # type: ignore[arg-type]
