"""What is minimized, in plain arrays: a loss looks at a model at taps, and gives what a batch costs, and its slope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from talaria.errors import ModelError
from talaria.tasks.base import Goal
from talaria.tasks.classification import cross_entropy, cross_entropy_bent, log_softmax
from talaria.tensors import Array, Tensors

__all__ = ["Aimed", "CrossEntropy", "cross_entropy", "log_softmax", "share_of"]

LOGITS, INTO, MEAN = "logits", "into ", "mean "
"""Names of taps, the places where an objective looks at a model: ``"logits"``, what the model gives, (N, outputs) or
(N, steps, outputs); ``"into LAYER"``, what enters the module of that dotted name (N, ...); ``"mean LAYER"``, what
leaves it, averaged over all its places (N, channels): those behind the channels, of a sequence those before."""


def uncalled(tap: str) -> ModelError:
    """The error for a tap at a layer that no pass calls."""
    layer = tap.partition(" ")[2]
    return ModelError(f"layer {layer!r} is looked at, but no pass calls it; call it, or take it out of the model")


def unknown(tap: str) -> ModelError:
    """The error for a tap that a model has not."""
    return ModelError(f"the model has no {tap!r}; name {LOGITS!r}, or {INTO!r} or {MEAN!r} and a layer")


def of_parts(tap: str) -> ModelError:
    """The error for a tap at what reads a batch of parts of samples."""
    layer = tap.partition(" ")[2]
    what = f"layer {layer!r} reads several parts of each sample one by one, and what enters it is looked at"
    return ModelError(f"{what}; part the batch before it, as in x.view(batch, -1, width).mean(1)")


def of_none(tap: str) -> ModelError:
    """The error for a tap at what is the same for every sample, such as an embedding of places."""
    layer = tap.partition(" ")[2]
    return ModelError(
        f"layer {layer!r} gives the same for every sample, of which each one's mean is looked at; let a parameter hold "
        "it, as in self.places = nn.Parameter(...), or take another algorithm"
    )


@dataclass(frozen=True)
class Slopes:
    """A loss of one batch and its gradients: by what a model had at its ``taps``, and by an objective's ``own``
    tensors, by name."""

    loss: float
    taps: Tensors
    own: Tensors = field(default_factory=dict)


class Objective(Protocol):
    """What is minimized, in plain arrays, so that any engine can: it looks at the model at ``taps`` (:data:`LOGITS` and
    what follows there), and may have tensors of its ``own`` in the state beside the model's, which are trained too."""

    @property
    def taps(self) -> Sequence[str]: ...

    @property
    def own(self) -> Sequence[str]: ...

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        """The loss of a batch ``x`` (N, ...), ``y`` (N,), as a mean over its samples, at what the model made of it."""
        ...


class Curved(Objective, Protocol):
    """An objective of :data:`LOGITS` alone that is known to the second derivative, so that a
    :class:`~talaria.training.interface.Walk` may bend."""

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """By how much the slope at the outputs ``out`` of a batch turns where these move along ``way``."""
        ...


@dataclass(frozen=True)
class Pull:
    """The gradient ``strength * (w - anchor)`` of a proximal term ``strength/2 * ||w - anchor||²``."""

    anchor: Tensors
    strength: float


def slopes_of(objective: Objective, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
    """What ``objective``, which may be another package's, gives for a batch, each slope in the dtype of its tap.
    Raises :class:`~talaria.errors.ModelError` where it is not a slope of each tap, or has another shape."""
    found, what = objective(seen, own, x, y), f"objective {type(objective).__name__}: gave"
    if not isinstance(found, Slopes):
        raise ModelError(f"{what} a {type(found).__name__}; give Slopes(loss, {{tap: slope}})")
    if missing := [tap for tap in seen if tap not in found.taps]:
        raise ModelError(f"{what} no slope of {missing[0]!r}; give the slope of every tap")
    return Slopes(found.loss, _fitted(what, found.taps, seen), _fitted(what, found.own, own))


def _fitted(what: str, slopes: Tensors, at: Tensors) -> Tensors:
    fitted: Tensors = {}
    for name, slope in slopes.items():
        if name not in at:
            raise ModelError(f"{what} a slope of {name!r}, at which it does not look; name it in taps or own")
        fitted[name] = np.asarray(slope, at[name].dtype)
        if fitted[name].shape != at[name].shape:
            raise ModelError(f"{what} {fitted[name].shape} as the slope of {name!r}, which is {at[name].shape}")
    return fitted


def share_of(objective: Objective | None, ys: Array, y: Array) -> float:
    """What the mean loss of a slice, of targets ``ys``, counts in that of its batch, of targets ``y``."""
    if not isinstance(objective, Aimed):
        return len(ys) / len(y)
    return objective.goal.count(ys) / max(1, objective.goal.count(y))


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy of the logits, with label ``smoothing``; an :class:`Objective`."""

    smoothing: float = 0.0
    taps: Sequence[str] = (LOGITS,)
    own: Sequence[str] = ()

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        loss, slope = cross_entropy(seen[LOGITS], y, self.smoothing)
        return Slopes(loss, {LOGITS: slope})

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """See :class:`Curved`."""
        return cross_entropy_bent(out, way)


@dataclass(frozen=True)
class Aimed:
    """A task's own loss of what the model gives; an :class:`Objective`."""

    goal: Goal
    taps: Sequence[str] = (LOGITS,)
    own: Sequence[str] = ()

    def __call__(self, seen: Tensors, own: Tensors, x: Array, y: Array) -> Slopes:
        loss, slope = self.goal.loss(seen[LOGITS], y)
        return Slopes(loss, {LOGITS: slope})

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """See :class:`Curved`."""
        return self.goal.bent(out, y, way)
