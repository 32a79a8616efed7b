"""A gate that weighs two models' logits per sample, z = (1 − α) z_G + α z_P, fitted on samples that neither was
trained on: on its own training data an over-fitted branch looks better than it is.

Reconstructed for Thorki; no public text gives the fusion network. The constant gate's cross-entropy is convex in α
(the log-sum-exp of an affine map), so its fitted value is never worse than either branch on the fitting samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from talaria import seeds
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors
from talaria.training.engine import looking
from talaria.training.interface import Task
from talaria.training.objectives import LOGITS, cross_entropy, log_softmax
from talaria.types import Samples

HIDDEN = 16
HELD_OUT = 5
"""Every fifth sample decides when to stop fitting the per-sample gate."""
BETAS, LEAST = (0.9, 0.999), 1e-8
"""Of Adam (Kingma and Ba, 2015)."""


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


def label_shift(task: Task) -> Array:
    """log π_i float32 (C,): the device's label frequencies, with one sample's weight spread over all classes."""
    count = np.bincount(task.train.y, minlength=task.classes).astype(np.float32)
    return np.asarray(np.log((count + 1 / task.classes) / (count.sum() + 1)), np.float32)


@dataclass(frozen=True)
class ConstantGate:
    """The same ``alpha`` for every sample."""

    alpha: float

    def __call__(self, general: Array, small: Array) -> Array:
        """α, which broadcasts to (N, 1); the logits (N, C) are not looked at."""
        return np.array(self.alpha, np.float32)


@dataclass(frozen=True)
class SampleGate:
    """α(x) = σ(MLP(u)) from the 2C + 3 numbers of :func:`evidence`, all float32: ``hidden`` (16, 2C + 3) and ``offset``
    (16,), then ``out`` (1, 16) and ``lift`` (1,); ½ everywhere until it is fitted."""

    hidden: Array
    offset: Array
    out: Array
    lift: Array

    @staticmethod
    def drawn(classes: int, draws: Draws) -> SampleGate:
        """A gate whose hidden layer is drawn, and whose last one is zero."""
        wide = 2 * classes + 3
        first, second = (wide**-0.5 * (2 * draws.uniform(*shape) - 1) for shape in ((HIDDEN, wide), (HIDDEN,)))
        out, lift = np.zeros((1, HIDDEN), np.float32), np.zeros(1, np.float32)
        return SampleGate(first.astype(np.float32), second.astype(np.float32), out, lift)

    def __call__(self, general: Array, small: Array) -> Array:
        """α (N, 1) for the two branches' logits (N, C)."""
        return self._seen(evidence(general, small))[1]

    def slopes(self, general: Array, small: Array, seen: Array, y: Array) -> Tensors:
        """The gradient of the fused cross-entropy by each of its tensors; ``seen`` is the :func:`evidence`."""
        hidden, alpha = self._seen(seen)
        _, slope = cross_entropy(mixed(general, small, alpha), y)
        rise = (slope * (small - general)).sum(1, keepdims=True) * alpha * (1 - alpha)
        back = (rise @ self.out) * (hidden > 0)
        return {"hidden": back.T @ seen, "offset": back.sum(0), "out": rise.T @ hidden, "lift": rise.sum(0)}

    def _seen(self, seen: Array) -> tuple[Array, Array]:
        hidden = np.maximum(seen @ self.hidden.T + self.offset, 0)
        lifted = hidden @ self.out.T + self.lift
        return hidden, 0.5 * (1 + np.tanh(0.5 * lifted))  # the logistic function, which cannot overflow so


Gate = ConstantGate | SampleGate


def named(gate: Gate) -> Tensors:
    """The gate's tensors by the keys of the module that torch serves."""
    if isinstance(gate, ConstantGate):
        return {"alpha": np.array(gate.alpha, np.float32)}
    return {"hidden.weight": gate.hidden, "hidden.bias": gate.offset, "out.weight": gate.out, "out.bias": gate.lift}


def mixed(general: Array, small: Array, alpha: Array | float) -> Array:
    """``(1 − α) general + α small``."""
    found: Array = (1 - alpha) * general + alpha * small
    return found


def evidence(general: Array, small: Array) -> Array:
    """(N, 2C + 3): both class distributions, the gap of their largest probabilities, and both entropies."""
    logs = [log_softmax(z) for z in (general, small)]
    probs = [np.exp(log) for log in logs]
    entropies = [-(p * log).sum(1, keepdims=True) for p, log in zip(probs, logs, strict=True)]
    gap = probs[0].max(1, keepdims=True) - probs[1].max(1, keepdims=True)
    return np.concatenate([*probs, gap, *entropies], 1)


def constant(general: Array, small: Array, y: Array) -> float:
    """The α in [0, 1] of least cross-entropy, by bisection on its derivative; ½ without samples."""
    if not len(y):
        return 0.5
    base, way = general.astype(np.float64), small.astype(np.float64) - general.astype(np.float64)
    right = way[np.arange(len(y)), y]

    def slope(alpha: float) -> float:
        p = np.exp(log_softmax(base + alpha * way))
        return float(((p * way).sum(1) - right).mean())

    if slope(0.0) >= 0:
        return 0.5 if slope(1.0) == 0 == slope(0.0) else 0.0
    if slope(1.0) <= 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return (low + high) / 2


def fitted(
    large: tuple[Task, Tensors],
    small: tuple[Task, Tensors],
    adapt: Samples,
    shift: Array | None,
    *,
    kind: str,
    steps: int,
    lr: float,
) -> Gate:
    """The gate fitted on both models' logits of ``adapt``, ``shift`` (C,) added to the large one's; the same seeds give
    the same gate. ``kind`` is "sample", "constant", or "auto": per sample from five samples a class on."""
    if not len(adapt):
        return ConstantGate(0.5)
    task, (z_g, z_p) = large[0], (looking(*model, [LOGITS])(adapt.x)[LOGITS] for model in (large, small))
    z_g = z_g if shift is None else z_g + shift
    per_sample = kind == "sample" or (kind == "auto" and len(adapt) >= 5 * task.classes)
    return fit(z_g, z_p, adapt.y, task.draws("gate"), per_sample=per_sample, steps=steps, lr=lr)


def fit(
    general: Array, small: Array, y: Array, draws: Draws, *, per_sample: bool, steps: int = 200, lr: float = 1e-2
) -> Gate:
    """A gate for logits (N, C) of held-out samples; the branches are not touched.

    ``per_sample`` fits :class:`SampleGate` by Adam on four fifths of them and keeps the step that is best on the
    rest, if that beats the best constant fitted on the same four fifths; else, and where it is off, the constant.
    """
    if not per_sample or len(y) < HELD_OUT:
        return ConstantGate(constant(general, small, y))
    judge = draws.order(len(y))[::HELD_OUT]
    learn = np.ones(len(y), bool)
    learn[judge] = False
    mine = general[learn], small[learn]
    best, floor = None, _loss(ConstantGate(constant(*mine, y[learn])), general, small, y, judge)
    gate, seen = SampleGate.drawn(general.shape[1], draws), evidence(*mine)
    moments: tuple[Tensors, Tensors] = ({}, {})
    for number in range(1, steps + 1):
        gate = _stepped(gate, gate.slopes(*mine, seen, y[learn]), moments, number, lr)
        now = _loss(gate, general, small, y, judge)
        if now < floor:
            best, floor = gate, now
    return ConstantGate(constant(general, small, y)) if best is None else best


def _stepped(gate: SampleGate, slopes: Tensors, moments: tuple[Tensors, Tensors], number: int, lr: float) -> SampleGate:
    """One step of Adam; ``moments`` are moved in place."""
    found = {}
    for name, slope in slopes.items():
        for moment, beta, value in zip(moments, BETAS, (slope, slope * slope), strict=True):
            moment[name] = beta * moment.get(name, np.zeros_like(slope)) + (1 - beta) * value
        mean, square = (moment[name] / (1 - beta**number) for moment, beta in zip(moments, BETAS, strict=True))
        found[name] = np.asarray(getattr(gate, name) - lr * mean / (np.sqrt(square) + LEAST), np.float32)
    return replace(gate, **found)


def _loss(gate: Gate, general: Array, small: Array, y: Array, index: Array) -> float:
    alpha = gate(general[index], small[index])
    return cross_entropy(mixed(general[index], small[index], alpha), y[index])[0]
