"""Whole runs on convolutions against plain loops in float64: on a smooth network, nothing but rounding is between them.

With ReLU and max pooling a rounding may switch a unit, and with it a term of the Hessian: no bound holds there.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import talaria
from talaria import seeds
from talaria.algorithms.perfedavg.triples import apart, third
from talaria.data.client import Client
from talaria.data.federated import Federated
from talaria.federated.run import Engine
from talaria.training.batching import batches, steps_of
from talaria.types import Recipe, Samples

ROUNDS, RECIPE = 2, Recipe(epochs=1, batch=8, lr=0.05, momentum=0.9, weight_decay=1e-2)
Weights = dict[str, Tensor]
Loop = Callable[[nn.Module, Weights, Weights, Client, str, int], None]
"""Trains weights and private tensors in place, for one client and round."""


def network(norm: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = (norm(2, c) if norm is nn.GroupNorm else norm(c) for c in (4, 8))
    below = [nn.Conv2d(1, 4, 3, padding=1), first, nn.Tanh(), nn.AvgPool2d(2)]
    above = [nn.Conv2d(4, 8, 3, padding=1), second, nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)]
    return nn.Sequential(*below, *above)


def fleet() -> Federated:
    rng = np.random.default_rng(3)

    def some(count: int) -> Samples:
        y = np.arange(count) % 3
        return Samples((rng.normal(size=(count, 1, 8, 8)) + y[:, None, None, None]).astype(np.float32), y)

    clients = {name: Client(some(count), some(3), some(6)) for name, count in (("anna", 25), ("bela", 14), ("carl", 1))}
    return Federated("fields", clients, ("a", "b", "c"), (1, 8, 8))


class Loss:
    """The cross-entropy of a batch of one client at any weights, and gradients of it."""

    def __init__(self, module: nn.Module, samples: Samples) -> None:
        self.module, self.x, self.y = module, torch.tensor(samples.x).double(), torch.tensor(samples.y)

    def __call__(self, weights: Weights, buffers: Weights, rows: np.ndarray) -> Tensor:
        self.module.train(len(rows) > 1)
        return F.cross_entropy(functional_call(self.module, {**weights, **buffers}, (self.x[rows],)), self.y[rows])

    def slopes(self, weights: Weights, buffers: Weights, rows: np.ndarray, again: bool = False) -> Weights:
        leaves = weights if again else {k: w.detach().requires_grad_() for k, w in weights.items()}
        found = torch.autograd.grad(self(leaves, buffers, rows), [*leaves.values()], create_graph=again)
        return dict(zip(leaves, found, strict=True))


def step(weights: Weights, slopes: Weights, momentum: Weights) -> None:
    for k, slope in slopes.items():
        momentum[k] = RECIPE.momentum * momentum[k] + slope if k in momentum else slope
        weights[k] = weights[k] - RECIPE.lr * momentum[k]


def apfl(module: nn.Module, w: Weights, private: Weights, client: Client, name: str, number: int) -> None:
    loss, buffers, count = Loss(module, client.train), [k for k, _ in module.named_buffers()], len(client.train)
    if not private:
        state = {**w, **dict(module.named_buffers())}
        private |= {f"personal/{k}": t.clone() for k, t in state.items()} | {k: state[k].clone() for k in buffers}
        private["mix/alpha"] = torch.tensor(0.5).double()
    theirs, mine = {k: private[k] for k in buffers}, {k: private[f"personal/{k}"] for k in buffers}
    v, alpha, of_w, of_v = {k: private[f"personal/{k}"] for k in w}, private["mix/alpha"], Weights(), Weights()
    draws = seeds.draws(0, name, number, "train")
    for batch, rows in enumerate(batches(count, RECIPE.batch, steps_of(RECIPE, count), draws)):
        mixed = {k: alpha * v[k] + (1 - alpha) * w[k] for k in w}
        slopes, at = loss.slopes(w, theirs, rows), loss.slopes(mixed, mine, rows)
        along = torch.stack([((v[k] - w[k]) * at[k]).sum() for k in w]).sum()
        learned = (alpha - RECIPE.lr * along).clamp(0, 1) if batch == 0 else alpha
        step(v, {k: alpha * (g + RECIPE.weight_decay * mixed[k]) for k, g in at.items()}, of_v)
        step(w, {k: g + RECIPE.weight_decay * w[k] for k, g in slopes.items()}, of_w)
        alpha = learned
    private |= {f"personal/{k}": t for k, t in v.items()} | {"mix/alpha": alpha}


def exact(module: nn.Module, w: Weights, private: Weights, client: Client, name: str, number: int) -> None:
    loss, buffers = Loss(module, client.train), dict(module.named_buffers())
    private |= {} if private else {k: b.clone() for k, b in buffers.items()}
    momentum, count = Weights(), len(client.train)
    outer, inner = (seeds.draws(0, name, number, purpose) for purpose in ("train", "train/inner"))

    def still() -> Weights:
        return {k: b.clone() for k, b in private.items()}

    for second in batches(count, third(count, RECIPE.batch), steps_of(RECIPE, count), outer):
        first, last = apart(count, second, RECIPE.batch, inner)
        near = loss.slopes(w, private, first)
        g = loss.slopes({k: w[k] - RECIPE.lr * near[k] for k in w}, still(), second)
        leaves = {k: t.detach().requires_grad_() for k, t in w.items()}
        slopes = loss.slopes(leaves, still(), last, again=True)
        inside = torch.stack([(slopes[k] * g[k]).sum() for k in w]).sum()
        bent = torch.autograd.grad(inside, [*leaves.values()])
        meta = {k: g[k] - RECIPE.lr * b for k, b in zip(w, bent, strict=True)}
        step(w, {k: s + RECIPE.weight_decay * w[k] for k, s in meta.items()}, momentum)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.GroupNorm])
@pytest.mark.parametrize(("name", "options", "loop"), [("apfl", {}, apfl), ("perfedavg", {"form": "exact"}, exact)])
def test_a_run_is_that_of_a_plain_loop_in_float64(
    name: str, options: dict[str, object], loop: Loop, norm: type[nn.Module], engine: Engine
) -> None:
    data, module = fleet(), network(norm).double()
    shared, private = (
        {k: p.detach().clone() for k, p in module.named_parameters()},
        {n: Weights() for n in data.clients},
    )
    for number in range(1, ROUNDS + 1):
        sent = []
        for who, client in data.clients.items():
            w = dict(shared)
            loop(module, w, private[who], client, who, number)
            sent.append((len(client.train), w))
        shared = {k: sum(n * w[k] for n, w in sent) / sum(n for n, _ in sent) for k in shared}  # type: ignore[misc]

    found = talaria.simulate(name, data, network(norm), rounds=ROUNDS, recipe=RECIPE, options=options, engine=engine)
    for key, value in shared.items():
        np.testing.assert_allclose(found.learned.shared[key], value.numpy(), rtol=0, atol=2e-6, err_msg=key)
    for who, own in private.items():
        kept = found.learned.private[who]
        assert kept.keys() == own.keys()
        for key, value in own.items():
            np.testing.assert_allclose(kept[key], value.numpy(), rtol=0, atol=5e-6, err_msg=f"{who} {key}")
