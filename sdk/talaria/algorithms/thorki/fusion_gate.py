"""A gate that weighs two models' logits per sample, z = (1 − α) z_G + α z_P, fitted on samples that neither was
trained on: on its own training data an over-fitted branch looks better than it is.

Reconstructed for Thorki; no public text gives the fusion network. The constant gate's cross-entropy is convex in α
(the log-sum-exp of an affine map), so its fitted value is never worse than either branch on the fitting samples.
"""

from copy import deepcopy

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn import functional as F

from talaria import seeds
from talaria.model.state import tensor_of
from talaria.seeds import Draws
from talaria.types import Samples, Task

HIDDEN = 16
HELD_OUT = 5
"""Every fifth sample decides when to stop fitting the per-sample gate."""


def divided(task: Task, share: float) -> tuple[Samples, Samples]:
    """``(D_train, D_adapt)``, disjoint and the same in every round: the validation samples are D_adapt, or where there
    are none, a ``share`` of the training samples of each class, at least one of two or more."""
    if len(task.val):
        return task.train, task.val
    draws = seeds.draws(task.seed, task.client, 0, "thorki adapt")
    held = np.zeros(len(task.train), bool)
    for label in sorted(set(task.train.y.tolist())):
        own = np.flatnonzero(task.train.y == label)
        if len(own) > 1:
            count = max(1, round(share * len(own)))
            held[own[draws.order(len(own))[:count]]] = True
    return task.train.take(np.flatnonzero(~held)), task.train.take(np.flatnonzero(held))


def label_shift(task: Task) -> Tensor:
    """log π_i (C,): the device's label frequencies, with one sample's weight spread over all classes."""
    count = torch.bincount(tensor_of(task.train.y), minlength=task.classes).float()
    return torch.log((count + 1 / task.classes) / (count.sum() + 1))


class ConstantGate(Module):
    """The same α for every sample."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, general: Tensor, small: Tensor) -> Tensor:
        """α, a scalar that broadcasts to (N, 1); the logits (N, C) are not looked at."""
        alpha: Tensor = self.get_buffer("alpha")
        return alpha


class SampleGate(Module):
    """α(x) = σ(MLP(u)) from the 2C + 3 numbers of :func:`evidence`; ½ everywhere until it is fitted."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = Linear(2 * classes + 3, HIDDEN)
        self.out = Linear(HIDDEN, 1)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, general: Tensor, small: Tensor) -> Tensor:
        """α (N, 1) for the two branches' logits (N, C)."""
        hidden = torch.relu(self.hidden(evidence(general, small)))
        return torch.sigmoid(self.out(hidden))


class Fused(Module):
    """Both branches and the gate as one module: what is served and exported. ``shift`` (C,) is added to the general
    branch's logits; none by default."""

    def __init__(self, general: Module, small: Module, gate: Module, shift: Tensor | None = None) -> None:
        super().__init__()
        self.general, self.small, self.gate = general, small, gate
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C)."""
        general, small = self.general(x), self.small(x)
        if self.shift is not None:
            general = general + self.shift
        return mixed(general, small, self.gate(general, small))


def mixed(general: Tensor, small: Tensor, alpha: Tensor) -> Tensor:
    """``(1 − α) general + α small``."""
    return (1 - alpha) * general + alpha * small


def evidence(general: Tensor, small: Tensor) -> Tensor:
    """(N, 2C + 3): both class distributions, the gap of their largest probabilities, and both entropies."""
    logs = [F.log_softmax(z, 1) for z in (general, small)]
    probs = [log.exp() for log in logs]
    entropies = [-(p * log).sum(1, keepdim=True) for p, log in zip(probs, logs, strict=True)]
    gap = probs[0].amax(1, keepdim=True) - probs[1].amax(1, keepdim=True)
    return torch.cat([*probs, gap, *entropies], 1)


def constant(general: Tensor, small: Tensor, y: Tensor) -> float:
    """The α in [0, 1] of least cross-entropy, by bisection on its derivative; ½ without samples."""
    if not len(y):
        return 0.5
    base, way = general.double(), small.double() - general.double()

    def slope(alpha: float) -> float:
        p = torch.softmax(base + alpha * way, 1)
        return float(((p * way).sum(1) - way.gather(1, y[:, None])[:, 0]).mean())

    if slope(0.0) >= 0:
        return 0.5 if slope(1.0) == 0 == slope(0.0) else 0.0
    if slope(1.0) <= 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return (low + high) / 2


def fit(
    general: Tensor, small: Tensor, y: Tensor, draws: Draws, *, per_sample: bool, steps: int = 200, lr: float = 1e-2
) -> Module:
    """A gate for logits (N, C) of held-out samples; the branches are not touched.

    ``per_sample`` fits :class:`SampleGate` by Adam on four fifths of them and keeps the step that is best on the
    rest, if that beats the best constant fitted on the same four fifths; else, and where it is off, the constant.
    """
    if not per_sample or len(y) < HELD_OUT:
        return ConstantGate(constant(general, small, y))
    order = tensor_of(draws.order(len(y)))
    judge, learn = order[::HELD_OUT], torch.ones(len(y), dtype=torch.bool)
    learn[judge] = False
    best, floor = None, _loss(ConstantGate(constant(general[learn], small[learn], y[learn])), general, small, y, judge)
    gate = SampleGate(general.shape[1])
    bound = (2 * general.shape[1] + 3) ** -0.5
    for value in gate.hidden.parameters():
        with torch.no_grad():
            value.copy_(tensor_of(bound * (2 * draws.uniform(*value.shape) - 1)))
    optimizer = torch.optim.Adam(gate.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        z = mixed(general[learn], small[learn], gate(general[learn], small[learn]))
        F.cross_entropy(z, y[learn]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        now = _loss(gate, general, small, y, judge)
        if now < floor:
            best, floor = deepcopy(gate), now
    return ConstantGate(constant(general, small, y)) if best is None else best


def _loss(gate: Module, general: Tensor, small: Tensor, y: Tensor, index: Tensor) -> float:
    with torch.no_grad():
        alpha = gate(general[index], small[index])
        return float(F.cross_entropy(mixed(general[index], small[index], alpha), y[index]))
