"""A model where there is no torch: its weights by state-dict key, and what they make of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from talaria.inputs import Parts
from talaria.tensors import Array, Tensors

_AT_ONCE = 256


@dataclass(frozen=True)
class Weights:
    """The whole ``state`` of a model, as narrow as a mask says."""

    state: Tensors = field(repr=False)


@dataclass(frozen=True)
class Served(Weights):
    """What a device runs: ``logits`` gives float32 (N, classes) of inputs (N, ...), ``parameters`` are the weights that
    training may change."""

    logits: Callable[[Array], Array] = field(repr=False)
    parameters: frozenset[str] = field(default=frozenset(), repr=False)
    graph: Callable[[], Any] | None = field(default=None, repr=False)
    """The same as one graph (:class:`talaria.programs.graph.Graph`, from ``x`` to logits) with its weights inside, of
    which a bundle is made; None where there is none."""
    parts: Parts = field(default_factory=dict, repr=False)
    """The named inputs that stand side by side in ``x``; empty where it is one."""

    def predict(self, x: Array, batch: int = _AT_ONCE) -> Array:
        """Logits float32 (N, classes) of ``x`` float32 (N, ...), ``batch`` samples at once."""
        return np.concatenate([self.logits(x[start : start + batch]) for start in range(0, max(1, len(x)), batch)])

    @property
    def size(self) -> int:
        """Numbers among the weights that training may change."""
        return sum(value.size for key, value in self.state.items() if key in self.parameters)


Model = Any
"""What an engine runs: a torch module or, where there is no torch, :class:`Weights`."""
