"""Features at several depths of any model, their class means, and HEART-PFL's alignment with them in two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from talaria.errors import ModelError
from talaria.model.split import Split
from talaria.tensors import Array, Tensors
from talaria.training.engine import looking
from talaria.training.interface import Task
from talaria.training.objectives import LOGITS, MEAN, Slopes, cross_entropy
from talaria.types import Samples

DEPTHS = 4
RESNET = tuple(f"layer{k}" for k in range(1, DEPTHS + 1))
LEAST = 1e-8
"""The least length of a feature in a cosine."""


def stages(split: Split) -> tuple[str, ...]:
    """The dotted names of up to four modules whose outputs are the features, from input to output.

    A ResNet's ``layer1`` to ``layer4``. In any other model: the modules with weights of the body on one level, the
    first level down the tree with at least two of them, cut into up to four equal runs; the last module of each run.
    A layer and its adapter are one module. Raises :class:`~talaria.errors.ModelError` where the body has no such one.
    """
    body = split.parameters("body", "adapters")
    if all(any(k.startswith(f"{name}.") for k in body) for name in RESNET):
        return RESNET
    adapted = {layer for layer, inside, _ in (key.partition(".adapter.") for key in body) if inside}
    found = _children("", body)
    while len(found) == 1 and found[0] not in adapted and len(deeper := _children(found[0] + ".", body)) > 0:
        found = deeper
    if not found:
        raise ModelError("heart_pfl: the body has no module with weights, so there are no features to align")
    runs = min(DEPTHS, len(found))
    return tuple(found[(k + 1) * len(found) // runs - 1] for k in range(runs))


def _children(prefix: str, body: Sequence[str]) -> list[str]:
    """The modules right below ``prefix``, as the names of their weights tell."""
    rest = [key.removeprefix(prefix) for key in body if key.startswith(prefix)]
    return list(dict.fromkeys(prefix + key.partition(".")[0] for key in rest if "." in key))


def features(task: Task, state: Tensors, names: Sequence[str]) -> Callable[[Array], list[Array]]:
    """``x (N, ...) -> per stage its features (N, channels)``, averaged over their places, in eval mode."""
    look = looking(task, state, [MEAN + name for name in names])
    return lambda x: list(look(x).values())


def class_means(f: Array, y: Array, classes: int) -> Array:
    """(classes, d): the mean of ``f`` (N, d) per label; rows of absent classes are 0 and never looked up."""
    total = np.zeros((classes, f.shape[1]), f.dtype)
    np.add.at(total, y, f)
    total /= np.maximum(np.bincount(y, minlength=classes), 1).astype(f.dtype)[:, None]
    return total


def prototypes(task: Task, state: Tensors, names: Sequence[str], samples: Samples) -> list[Array]:
    """Per stage, the class means (classes, d) of ``samples`` in eval mode."""
    return [class_means(f, samples.y, task.classes) for f in features(task, state, names)(samples.x)]


def alignment(own: Sequence[Array], wanted: Sequence[Array]) -> tuple[float, list[Array]]:
    """L_HDA = 1/(L B) Σ_b [Σ_early (1 − cos(f, p)) + Σ_deep mean_d (f − p)²] over L stages of features (B, d), and its
    gradient by ``own``; it is the same function of both.

    The first half of the stages (rounded down) is aligned by direction, the rest by value.
    """
    early, terms = len(own) // 2, []
    for k, (f, p) in enumerate(zip(own, wanted, strict=True)):
        terms.append(_by_direction(f, p) if k < early else _by_value(f, p))
    return sum(loss for loss, _ in terms) / len(own), [slope / np.asarray(len(own), slope.dtype) for _, slope in terms]


def _by_direction(f: Array, p: Array) -> tuple[float, Array]:
    """The mean of 1 − cos(f, p) over samples (B, d), and its gradient by f."""
    lengths = [np.sqrt((one * one).sum(1, keepdims=True)) for one in (f, p)]
    a, b = (np.maximum(length, np.asarray(LEAST, f.dtype)) for length in lengths)
    cosine = (f * p).sum(1, keepdims=True) / (a * b)
    turn = p / (a * b) - np.where(lengths[0] > LEAST, cosine / (a * a), 0).astype(f.dtype) * f
    return float((1 - cosine).mean()), -turn / np.asarray(len(f), f.dtype)


def _by_value(f: Array, p: Array) -> tuple[float, Array]:
    """The mean of (f − p)² over samples and dimensions (B, d), and its gradient by f."""
    away = f - p
    return float((away * away).mean()), 2 * away / np.asarray(away.size, f.dtype)


@dataclass(frozen=True)
class Aligned:
    """CE + ``weight`` · L_HDA for the personal model; an :class:`~talaria.training.objectives.Objective`.

    Variant A draws the personal features to the ``fixed`` class means of the global model. B compares what ``other``,
    the global model, makes of a batch with the class means of the personal features within it.
    """

    at: Sequence[str]
    weight: float
    smoothing: float
    classes: int
    fixed: Sequence[Array]
    other: Callable[[Array], list[Array]] | None
    own: Sequence[str] = ()

    @property
    def taps(self) -> Sequence[str]:
        """The logits and the features."""
        return (LOGITS, *(MEAN + name for name in self.at))

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        loss, slope = cross_entropy(seen[LOGITS], y, self.smoothing)
        mine = [seen[MEAN + name] for name in self.at]
        if self.other is None:
            far, slopes = alignment(mine, [p[y] for p in self.fixed])
        else:
            far, slopes = alignment([class_means(f, y, self.classes)[y] for f in mine], self.other(x))
            slopes = [class_means(g, y, self.classes)[y] for g in slopes]  # each sample's share in its class's mean
        aligned = {MEAN + name: np.asarray(self.weight * g, g.dtype) for name, g in zip(self.at, slopes, strict=True)}
        return Slopes(loss + self.weight * far, {LOGITS: slope, **aligned})


def aligned(task: Task, state: Tensors, weight: float, variant: str) -> Aligned | None:
    """What the personal model minimizes beside the global ``state``; None for cross-entropy alone."""
    if not weight:
        return None
    at = stages(task.split)
    fixed = prototypes(task, state, at, task.train) if variant == "A" else []
    other = features(task, state, at) if variant == "B" else None
    return Aligned(at, weight, task.recipe.smoothing, task.classes, fixed, other)
