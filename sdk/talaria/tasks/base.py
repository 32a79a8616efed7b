"""What every task says: its targets, its loss with the slope, its figures, and what its targets are scaled by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from talaria.tensors import Array

WORST = -1e6
"""The score of a model that gives NaN or infinity, and the lowest that any has."""


@dataclass(frozen=True)
class Scale:
    """A device's own targets: ``mean`` and ``sd`` float32 (K,) of its training samples. They never leave it."""

    mean: Array = field(repr=False)
    sd: Array = field(repr=False)

    def scaled(self, y: Array) -> Array:
        """Targets (N, K) or (N,) in units of this device's own spread."""
        rows = y.reshape(len(y), self.mean.size)  # not -1, which no sample at all leaves open
        return np.asarray((rows - self.mean) / self.sd, np.float32).reshape(y.shape)


class Goal(Protocol):
    """One task. ``out`` is what a model gives of N samples, float32; ``y`` are their targets as ``require`` takes
    them."""

    name: ClassVar[str]
    figures: ClassVar[tuple[str, str]]
    """What the two numbers of :meth:`measured` are called; of both, more is better."""
    lowest: ClassVar[float]
    """The lowest score there is."""
    fewest: ClassVar[int]
    """Outputs that a model needs at least."""
    answer: ClassVar[tuple[str, ...]]
    """The dimensions of what a model gives of N samples."""

    def require(self, where: str, y: Array, outputs: int) -> None:
        """Raise :class:`~talaria.errors.DataError`, beginning with ``where``, for targets that a model of so many
        outputs cannot learn."""
        ...

    def fitted(self, y: Array) -> Goal:
        """This task for a device whose training targets are ``y``: itself, unless its loss weighs by them."""
        ...

    def loss(self, out: Array, y: Array) -> tuple[float, Array]:
        """The mean loss of a batch and its gradient by ``out``, in its dtype."""
        ...

    def count(self, y: Array) -> int:
        """How many of these targets the mean of :meth:`loss` goes over."""
        ...

    def bent(self, out: Array, y: Array, way: Array) -> Array:
        """By how much that gradient turns where ``out`` moves along ``way``: the loss's second derivative times it."""
        ...

    def measured(self, out: Array, y: Array) -> tuple[float, float]:
        """The score, and a second figure beside it."""
        ...

    def decided(self, out: Array) -> Array | None:
        """What is decided by these outputs, one entry for each decision; None where they are numbers themselves."""
        ...

    def scale(self, y: Array) -> Scale | None:
        """What training targets are scaled by on their device, or None where they are learned as they are."""
        ...

    def strata(self, y: Array) -> Array:
        """A class (N,) for each sample, by which samples are cut into alike parts."""
        ...

    def example(self, shape: tuple[int, ...]) -> Array:
        """Made-up targets of samples of which a model gives answers of this ``shape``, (N, ...)."""
        ...
