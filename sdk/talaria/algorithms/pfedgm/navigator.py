"""The navigator: a fixed projection of what enters a model's last linear layer, and learnable class anchors there.

Masks: a device's compact features are the kept columns of its last layer, so that the projection's columns are
gathered by the same indices; the projected space has one size on all devices, and nothing in it is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from talaria.errors import ModelError
from talaria.model.masks import ChannelMask
from talaria.model.split import Split
from talaria.model.weights import Weights
from talaria.seeds import Draws
from talaria.tensors import Array, Tensors
from talaria.training.interface import Task

if TYPE_CHECKING:
    from torch.nn import Module

NAVIGATOR = "navigator/"
"""Prefix of anchors and scale among the shared tensors, and beside the model's in training."""
ANCHORS, SCALE = f"{NAVIGATOR}anchors", f"{NAVIGATOR}log_scale"


def last_linear(model: Module, split: Split) -> str:
    """The dotted name of the head's last linear layer. Raises :class:`~talaria.errors.ModelError` without one; weights
    alone do not tell, and were looked at where they come from."""
    owners = _owners(split)
    if isinstance(model, Weights) and owners:
        return owners[-1]
    from torch.nn import Linear

    linear = [name for name in owners if type(model.get_submodule(name)) is Linear]
    if not linear or linear[-1] != owners[-1]:
        raise ModelError(
            f"pfedgm: the head {sorted(set(owners))} does not end in a plain linear layer; "
            f"name one as the model's head, since the Gaussian head is exported in its place"
        )
    return linear[-1]


def last_layer(split: Split) -> str:
    """The dotted name of the head's last layer, which :func:`last_linear` found to be linear."""
    return _owners(split)[-1]


def _owners(split: Split) -> list[str]:
    return [key.rpartition(".")[0] for key in split.parameters("head") if key.endswith(".weight")]


@dataclass(frozen=True)
class Projection:
    """From what enters the last layer of a device's model to z (N, k); ``kept`` are the columns of the unpruned model
    that it has, out of ``columns`` (None: all that there are)."""

    features: int
    columns: int | None = None
    kept: Array | None = None

    def matrix(self, width: int, dtype: np.dtype[np.generic] | type = np.float32) -> Array:
        """(k, width): what inputs of ``width`` columns are multiplied by."""
        whole = projection(self.features, width if self.columns is None else self.columns)
        found = whole if self.kept is None else whole[:, self.kept]
        return np.ascontiguousarray(found, dtype)

    def __call__(self, inputs: Array) -> Array:
        """z (N, k) of ``inputs`` (N, d), in their dtype."""
        found: Array = inputs @ self.matrix(inputs.shape[1], inputs.dtype).T
        return found


@lru_cache(maxsize=8)
def projection(features: int, columns: int) -> Array:
    """(k, d) float64, not to be written to, with orthonormal rows, times √(d/k) so that lengths are kept on average;
    the identity for d ≤ k."""
    made: Array = np.eye(columns)
    if columns > features:
        draws = Draws(features * 1_000_003 + columns)
        made = np.linalg.qr(draws.normal(columns, features))[0].T * (columns / features) ** 0.5
    made.flags.writeable = False
    return made


def projection_of(split: Split, mask: ChannelMask | None, features: int) -> Projection:
    """The projection of a device's model under its ``mask``."""
    key = f"{last_layer(split)}.weight"
    if mask is None or key not in mask.layout.axes:
        return Projection(features)
    axis = mask.layout.axes[key][1]
    columns = sum(mask.layout.sizes[g] * repeat for g, repeat in axis) if axis else None
    return Projection(features, columns, mask.indices[key][1])


def scores(z: Array, anchors: Array, log_scale: Array) -> Array:
    """``−||z − V_c||² / (2 s²)``, (N, C), without the term in ||z||² that all classes share."""
    half = 0.5 * np.square(anchors).sum(1)
    found: Array = (z @ anchors.T - half) * np.exp(-2 * log_scale)
    return found


def spread_apart(anchors: Array, margin: float) -> tuple[float, Array]:
    """Mean over pairs of ``relu(margin − ||V_c − V_c'||)²`` and its gradient, 0 where two anchors coincide."""
    first, second = np.triu_indices(len(anchors), 1)
    way = anchors[first] - anchors[second]
    distance = np.sqrt(np.square(way).sum(1))
    near = np.maximum(margin - distance, 0)
    pull = np.where(distance > 0, near / np.where(distance > 0, distance, 1), 0) * (-2 / max(1, len(first)))
    slope = np.zeros_like(anchors)
    np.add.at(slope, first, pull[:, None].astype(anchors.dtype) * way)
    np.add.at(slope, second, -pull[:, None].astype(anchors.dtype) * way)
    return float(np.square(near).sum() / max(1, len(first))), slope


def start(weight: Array, features: int) -> Tensors:
    """The first anchors, as they travel: the rows of the last layer's ``weight`` (C, d), projected."""
    return {ANCHORS: Projection(features)(weight), SCALE: np.zeros((), weight.dtype)}


def enter(task: Task, shared: Tensors, private: Tensors) -> Tensors:
    """The state that is trained: the model's without its last layer, and the navigator's."""
    keys = {*task.split.keys, ANCHORS, SCALE}
    return {k: v for k, v in {**shared, **private}.items() if k in keys}
