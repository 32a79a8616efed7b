"""The navigated model: a network up to its last linear layer, a fixed projection of its features, and learnable class
anchors in that space (the navigator); how a task and its state turn into that model, and back.

Masks: a device's compact features are the kept columns of its last layer, so that the projection's columns are
gathered by the same indices; the projected space has one size on all devices, and nothing in it is masked.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from talaria.errors import ModelError
from talaria.model.masks import ChannelMask
from talaria.model.split import Part, Split
from talaria.model.state import state_of, tensor_of, to_arrays
from talaria.tensors import Array, Tensors, prefixed, under
from talaria.training.engine import served
from talaria.types import Task

EXTRACTOR = "extractor."
"""Prefix of the model's own keys inside :class:`Navigated`."""
ANCHORS, SCALE = "anchors", "log_scale"
NAVIGATOR = "navigator/"
"""Prefix of anchors and scale among the shared tensors."""


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
    return matrix if kept is None else matrix[:, tensor_of(kept)]


def projection_of(task: Task, features: int) -> Tensor:
    """The projection (k, d_compact) of the task's model."""
    return projection_for(task.model, last_linear(task.model, task.split), task.mask, features)


def replaced(model: Module, layer: str, new: Module) -> Module:
    """A copy of ``model`` with ``new`` in the place of ``layer``."""
    if not layer:
        return new
    out = deepcopy(model)
    out.set_submodule(layer, new)
    return out


def start(weight: Array, features: int) -> Tensors:
    """The first anchors, as they travel: the rows of the last layer's ``weight`` (C, d), projected."""
    rows = tensor_of(weight)
    anchors = rows @ projection(features, weight.shape[1], rows.dtype).T
    return prefixed(to_arrays({ANCHORS: anchors, SCALE: torch.zeros((), dtype=rows.dtype)}), NAVIGATOR)


def task_of(task: Task, shared: Tensors, features: int) -> Task:
    """``task`` with the navigated model for its own, and the split that belongs to it."""
    layer = last_linear(task.model, task.split)
    extractor = replaced(task.model, layer, Projection(projection_of(task, features)))
    keys = set(extractor.state_dict())

    def named(part: Part) -> tuple[str, ...]:
        return tuple(EXTRACTOR + k for k in task.split.of(part) if k in keys)

    split = Split(
        named("body"),
        named("adapters"),
        (*named("head"), ANCHORS, SCALE),
        frozenset(EXTRACTOR + k for k in task.split.statistics),
        frozenset(EXTRACTOR + k for k in task.split.counters),
        task.split.buffers,
    )
    return task.but(model=Navigated(extractor, tensor_of(shared[NAVIGATOR + ANCHORS]).clone()), split=split)


def enter(task: Task, shared: Tensors, private: Tensors) -> Tensors:
    """The state of the navigated model, from the device's shared and private tensors."""
    keys = set(task.split.keys)
    own = {k: v for k, v in {**shared, **private}.items() if k in keys}
    return {**prefixed(own, EXTRACTOR), **under(shared, NAVIGATOR)}


def leave(state: Tensors) -> Tensors:
    """The tensors of the navigated model under the names that are shared and kept."""
    return {**under(state, EXTRACTOR), **prefixed({k: state[k] for k in (ANCHORS, SCALE)}, NAVIGATOR)}


def serve(task: Task, state: Tensors, head: Module) -> Module:
    """The task's model with the navigated ``state`` and ``head`` for its last linear layer: what a device runs."""
    layer = last_linear(task.model, task.split)
    filler = prefixed(state_of(task.model.get_submodule(layer)), f"{layer}.")
    module = served(task, {**under(state, EXTRACTOR), **filler})
    return replaced(module, layer, head).requires_grad_(False).eval()
