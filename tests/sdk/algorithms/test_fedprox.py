"""FedProx: the pull holds the device near what it received, and shares what FedAvg shares."""

from collections.abc import Callable

import numpy as np
import pytest

from talaria.algorithms.fedavg import FedAvg
from talaria.algorithms.fedprox import FedProx
from talaria.errors import ConfigError
from talaria.tensors import Tensors, copied, equal, minus
from talaria.training.interface import Task
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]


def moved(algorithm: object, task: Task) -> float:
    shared, private = algorithm.init(task.model, task.split)  # type: ignore[attr-defined]
    update, _ = algorithm.fit(task, shared, private)  # type: ignore[attr-defined]
    return float(sum(np.square(v).sum() for v in minus(update.tensors, shared).values()))


def test_a_stronger_pull_keeps_the_update_nearer(tiny: Tiny) -> None:
    free, *pulled = moved(FedAvg(), tiny()), *(moved(FedProx(mu=mu), tiny()) for mu in (0.1, 1.0, 5.0))
    assert free > pulled[0] > pulled[1] > pulled[2] > 0


def test_the_anchor_is_the_received_model_and_stays(tiny: Tiny) -> None:
    """A received model other than the scratch module's present weights."""
    task, algorithm = tiny(), FedProx(mu=8.0, allow_degenerate=False)
    shared, private = algorithm.init(task.model, task.split)
    far = {k: v + 3 for k, v in shared.items()}
    before = copied(far)
    update, _ = algorithm.fit(task, far, private)
    assert equal(far, before)
    assert all(np.abs(update.tensors[k] - far[k]).max() < 1.0 for k in far)


def test_batchnorm_is_no_part_of_the_pull(tiny: Tiny, rounds: Rounds) -> None:
    """Statistics stay home and are not pulled; the first step, at the anchor itself, has a finite gradient."""
    sent, shared, private = rounds(FedProx(), tiny(norm=True))
    assert set(private) == {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
    assert all(np.isfinite(v).all() for update in sent for v in update.tensors.values())
    assert set(sent[0].tensors) == set(shared)


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_bad_mu(mu: float) -> None:
    with pytest.raises(ConfigError, match="fedprox: mu="):
        FedProx(mu=mu)


def test_neutral_mu_is_refused_unless_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"mu=0.0 makes it FedAvg.*allow_degenerate"):
        FedProx(mu=0.0)
    assert FedProx(mu=0.0, allow_degenerate=True).mu == 0
