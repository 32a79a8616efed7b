"""LG-FedAvg: the representation stays at home, the head is shared; unknown devices get the ensemble."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria.algorithms.lg_fedavg import LGFedAvg
from talaria.algorithms.lg_fedavg.ensemble import ensemble
from talaria.errors import ConfigError, ModelError
from talaria.model.state import state_of, tensor_of
from talaria.model.weights import Served
from talaria.tensors import Tensors, equal, only
from talaria.training.interface import Task
from talaria.training.loop import predict
from talaria.types import Update

Tiny = Callable[..., Task]
Rounds = Callable[..., tuple[list[Update], Tensors, Tensors]]


def test_only_the_top_travels(tiny: Tiny, rounds: Rounds) -> None:
    """The reversed split of the authors' CIFAR-10 code would share the body."""
    for net in ({}, {"norm": True}, {"norm": True, "buffers": "aggregate"}, {"adapter": True}):
        sent, shared, private = rounds(LGFedAvg(), tiny(**net), 1)
        assert set(sent[0].tensors) == set(shared) == {"head.weight", "head.bias"}
        assert any(k.startswith("body") for k in private)


def test_one_joint_step_per_batch(tiny: Tiny, rounds: Rounds) -> None:
    """Two half-steps would advance BatchNorm twice: 13 samples in batches of 4 (the last of 5), 2 epochs, 3 rounds."""
    _, _, private = rounds(LGFedAvg(), tiny(norm=True))
    assert int(private["body.1.num_batches_tracked"]) == 3 * 2 * 3


def test_the_server_never_touches_the_body(tiny: Tiny, rounds: Rounds) -> None:
    _, shared, private = rounds(LGFedAvg(), tiny())
    served = state_of(LGFedAvg().personal(tiny(), {k: v + 1 for k, v in shared.items()}, private))
    assert equal(only(served, private), private)
    assert all(np.array_equal(served[k], shared[k] + 1) for k in shared)


def test_a_newcomer_learns_a_body_under_the_still_head(
    tiny: Tiny, start: Callable[..., tuple[Tensors, Tensors]]
) -> None:
    task = tiny(norm=True, weight_decay=0.1).but(newcomer=True)
    shared, private = start(LGFedAvg(), task)
    served = state_of(LGFedAvg().personal(task, shared, private))
    assert equal(only(served, shared), shared)
    assert not equal(only(served, ["body.0.weight"]), only(private, ["body.0.weight"]))
    plain = state_of(LGFedAvg(join_epochs=0).personal(tiny().but(newcomer=True), *start(LGFedAvg(), tiny())))
    assert equal(plain, state_of(tiny().model))


def test_ensemble_of_one_model_is_that_model(tiny: Tiny) -> None:
    task = tiny()
    many, one = (tensor_of(predict(m, task.train.x)).softmax(1) for m in (ensemble([task.model] * 3), task.model))
    assert roundings(many, one) <= 64


def test_ensemble_is_the_mean_of_probabilities(tiny: Tiny, rounds: Rounds) -> None:
    models = []
    for seed in (1, 2, 3):
        task = tiny(seed=seed, norm=True, dropout=0.5, client=str(seed))
        _, shared, private = rounds(LGFedAvg(), task)
        models.append(LGFedAvg().personal(task, shared, private))
    x = tensor_of(tiny(seed=8).train.x)
    mean = torch.stack([m(x).softmax(1) for m in models]).mean(0)
    both = ensemble(models)
    assert roundings(both(x).exp(), mean) <= 64
    assert not both.training
    assert roundings(both(x).exp().sum(1), torch.ones(len(x))) <= 64


def test_the_ensemble_of_what_is_served_without_torch_answers_as_the_module() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((4, 3)).astype(np.float32) for _ in range(3)]
    modules = [torch.nn.Linear(3, 4, bias=False) for _ in weights]
    for module, weight in zip(modules, weights, strict=True):
        module.weight.data.copy_(torch.from_numpy(weight))
    each = [Served({"weight": w}, lambda x, w=w: x @ w.T, frozenset({"weight"})) for w in weights]
    module, served = ensemble(modules), ensemble(each)
    x = 30 * rng.standard_normal((7, 3)).astype(np.float32)
    np.testing.assert_allclose(served.predict(x), predict(module, x), rtol=1e-5, atol=1e-5)
    assert equal(state_of(module), dict(served.state))
    assert served.size == 36


def test_ensemble_of_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="at least one"):
        ensemble([])


@pytest.mark.parametrize(("field", "value"), [("join_epochs", -1), ("weighting", "even")])
def test_bad_options(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"lg_fedavg: {field}={value!r}"):
        LGFedAvg(**{field: value})  # type: ignore[arg-type]
