"""f(w) = (w - 3)²: one step of each method by hand, and the values that known mistakes would give instead."""

from collections.abc import Callable

import numpy as np
import pytest

from talaria.algorithms.apfl import ALPHA, APFL
from talaria.algorithms.ditto import Ditto
from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.fedprox import FedProx
from talaria.algorithms.perfedavg import PerFedAvg
from talaria.algorithms.sharing import PERSONAL
from talaria.tensors import Tensors
from talaria.training.interface import Task

Bowl = Callable[..., Task]


def w(value: float, name: str = "w") -> Tensors:
    return {name: np.array(value, np.float64)}


def near(value: object) -> object:
    return pytest.approx(value, abs=1e-9)


def test_gradient_step_of_the_bowl(bowl: Bowl) -> None:
    update, _ = FedAvg().fit(bowl(), w(1.0), {})
    assert float(update.tensors["w"]) == near(1.4)


def test_fedprox_second_step_is_pulled_to_the_received_model(bowl: Bowl) -> None:
    """1 → 1.4 → 1.70; without the pull it would be 1.72."""
    update, _ = FedProx(mu=0.5).fit(bowl(steps=2), w(1.0), {})
    assert float(update.tensors["w"]) == near(1.70)


def test_ditto_takes_gradient_and_pull_in_one_step(bowl: Bowl) -> None:
    """0 → 0.65; with the pull after the step it would be 0.62."""
    update, private = Ditto(lam=0.5).fit(bowl(), w(1.0), w(0.0, PERSONAL + "w"))
    assert float(private[PERSONAL + "w"]) == near(0.65)
    assert float(update.tensors["w"]) == near(1.4)


def test_ditto_pull_passes_through_momentum(bowl: Bowl) -> None:
    """Two steps with momentum 0.9: 0 → 0.65, then 0.65 - 0.1 (0.9 (-6.5) + 2 (0.65 - 3) + 0.5 (0.65 - 1))."""
    _, private = Ditto(lam=0.5).fit(bowl(steps=2, momentum=0.9), w(1.0), w(0.0, PERSONAL + "w"))
    assert float(private[PERSONAL + "w"]) == near(0.65 + 0.1 * (5.85 + 4.7 + 0.175))


def apfl_step(task: Task, **options: object) -> tuple[float, float, float]:
    private = {**w(0.0, PERSONAL + "w"), ALPHA: np.array(0.25)}
    update, private = APFL(**options).fit(task, w(1.0), private)  # type: ignore[arg-type]
    return float(update.tensors["w"]), float(private[PERSONAL + "w"]), float(private[ALPHA])


def test_apfl_own_step_carries_alpha_once(bowl: Bowl) -> None:
    """v̄ = 0.75, g = -4.5, v' = 0.1125, w' = 1.4; without the chain rule v' would be 0.45."""
    assert apfl_step(bowl(), alpha_update="off") == near((1.4, 0.1125, 0.25))


@pytest.mark.parametrize("update", ["first_batch", "every_step"])
def test_apfl_alpha_step_at_the_old_values(bowl: Bowl, update: str) -> None:
    """α' = 0.25 - 0.01 · 4.5 = 0.205; the doubly scaled form with 0.02 α would give 0.221825."""
    assert apfl_step(bowl(), alpha_update=update, alpha_lr=0.01) == near((1.4, 0.1125, 0.205))


@pytest.mark.parametrize(("form", "value"), [("fo", 0.048), ("hf", 0.0384), ("exact", 0.0384)])
def test_perfedavg_meta_step(bowl: Bowl, form: str, value: float) -> None:
    """w̃ = 0.6, ∇f(w̃) = -4.8; the inner gradient in a momentum buffer would give 0.102."""
    algorithm = PerFedAvg(inner_lr=0.1, form=form)
    update, _ = algorithm.fit(bowl(lr=0.01, momentum=0.9), w(0.0), {})
    assert float(update.tensors["w"]) == near(value)


def test_perfedavg_momentum_sees_outer_gradients_alone(bowl: Bowl) -> None:
    """Second first-order step with momentum: 0.048 - 0.01 (0.9 (-4.8) + 2 (w̃ - 3)), w̃ = 0.048 + 0.1 · 5.904."""
    update, _ = PerFedAvg(inner_lr=0.1, form="fo").fit(bowl(steps=2, lr=0.01, momentum=0.9), w(0.0), {})
    assert float(update.tensors["w"]) == near(0.048 + 0.01 * (4.32 + 2 * (3 - 0.6384)))


def test_perfedavg_serves_one_inner_step(bowl: Bowl) -> None:
    served = PerFedAvg(inner_lr=0.1, adapt_steps=1).personal(bowl(lr=0.01, momentum=0.9, weight_decay=0.5), w(0.0), {})
    assert float(served.w) == near(0.6)  # type: ignore[arg-type]
