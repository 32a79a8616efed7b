"""The extractor and navigator of a Gaussian classifier: the model up to its last linear layer, a fixed projection of
its features, and learnable class anchors in that space.

Masks: a device's compact features are the kept columns of its last layer, so that the projection's columns are
gathered by the same indices; the projected space has one size on all devices, and nothing in it is masked.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential

from talaria.errors import ModelError
from talaria.types import ChannelMask, Split

EXTRACTOR = "extractor."
"""Prefix of the model's own keys inside :class:`Navigated`."""
ANCHORS, SCALE = "anchors", "log_scale"


class Navigated(Module):
    """``extractor`` (the model with a projection for its last layer) gives z (N, k); ``anchors`` (C, k)."""

    def __init__(self, extractor: Module, anchors: Tensor) -> None:
        super().__init__()
        self.extractor = extractor
        self.anchors = Parameter(anchors)
        self.log_scale = Parameter(torch.zeros((), dtype=anchors.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Features z (N, k)."""
        z: Tensor = self.extractor(x)
        return z

    def scores(self, z: Tensor) -> Tensor:
        """``−||z − V_c||² / (2 s²)``, (N, C), without the term in ||z||² that all classes share."""
        half = 0.5 * self.anchors.square().sum(1)
        return (z @ self.anchors.T - half) * torch.exp(-2 * self.log_scale)


def spread_apart(anchors: Tensor, margin: float) -> Tensor:
    """Mean over pairs of ``relu(margin − ||V_c − V_c'||)²``, with a gradient of 0 where two anchors coincide."""
    first, second = torch.triu_indices(len(anchors), len(anchors), 1)
    squared = (anchors[first] - anchors[second]).square().sum(1)
    distance = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt() * (squared > 0)
    return torch.relu(margin - distance).square().mean()


class Projection(Module):
    """A fixed linear map; not part of the state, since every device can make it."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, d) to (N, k)."""
        return x @ self.get_buffer("matrix").T


class Quadratic(Module):
    """``log N(z; μ_c, Σ_c) + log π_c``: ``factors`` (C, k, k) whiten per class; ``means`` (C, k), ``bias`` (C,)."""

    def __init__(self, factors: Tensor, means: Tensor, bias: Tensor) -> None:
        super().__init__()
        classes, dim, _ = factors.shape
        self.register_buffer("weight", factors.reshape(classes * dim, dim))
        self.register_buffer("shift", torch.einsum("cij,cj->ci", factors, means).reshape(-1))
        self.register_buffer("bias", bias)

    def forward(self, z: Tensor) -> Tensor:
        """Logits (N, C)."""
        bias = self.get_buffer("bias")
        white = z @ self.get_buffer("weight").T - self.get_buffer("shift")
        return bias - 0.5 * white.square().reshape(len(z), len(bias), -1).sum(2)


def last_linear(model: Module, split: Split) -> str:
    """The dotted name of the head's last linear layer. Raises :class:`~talaria.errors.ModelError` without one."""
    owners = [key.rpartition(".")[0] for key in split.parameters("head") if key.endswith(".weight")]
    linear = [name for name in owners if type(model.get_submodule(name)) is Linear]
    if not linear or linear[-1] != owners[-1]:
        raise ModelError(
            f"pfedgm: the head {sorted(set(owners))} does not end in a plain linear layer; "
            f"name one as the model's head, since the Gaussian head is exported in its place"
        )
    return linear[-1]


def projection(features: int, columns: int, dtype: torch.dtype) -> Tensor:
    """(k, d) with orthonormal rows, times √(d/k) so that lengths are kept on average; the identity for d ≤ k."""
    if columns <= features:
        return torch.eye(columns, dtype=dtype)
    draws = torch.Generator().manual_seed(features * 1_000_003 + columns)
    rows = torch.linalg.qr(torch.randn(columns, features, generator=draws, dtype=torch.float64))[0].T
    scaled: Tensor = rows * (columns / features) ** 0.5
    return scaled.to(dtype)


def projection_for(model: Module, layer: str, mask: ChannelMask | None, features: int) -> Tensor:
    """The columns of the projection that this (compact) model's features need, (k, d_compact)."""
    linear = model.get_submodule(layer)
    if not isinstance(linear, Linear):
        raise ModelError(f"pfedgm: {layer!r} is not a linear layer")
    key, dense, kept = f"{layer}.weight", linear.in_features, None
    if mask is not None and key in mask.layout.axes:
        axis = mask.layout.axes[key][1]
        dense = sum(mask.layout.sizes[g] * repeat for g, repeat in axis) if axis else dense
        kept = mask.indices[key][1]
    matrix = projection(features, dense, linear.weight.dtype)
    return matrix if kept is None else matrix[:, kept]


def replaced(model: Module, layer: str, new: Module) -> Module:
    """A copy of ``model`` with ``new`` in the place of ``layer``."""
    if not layer:
        return new
    out = deepcopy(model)
    parent, _, leaf = layer.rpartition(".")
    setattr(out.get_submodule(parent), leaf, new)
    return out


def linear_of(weight: Tensor, bias: Tensor) -> Linear:
    """A linear layer of these values."""
    layer = Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def quadratic_of(matrix: Tensor, factors: Tensor, means: Tensor, bias: Tensor) -> Module:
    """The projection followed by one Gaussian score per class."""
    kind = matrix.dtype
    return Sequential(Projection(matrix), Quadratic(factors.to(kind), means.to(kind), bias.to(kind)))
