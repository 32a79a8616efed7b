"""What each channel is worth to the loss, in one unit across all groups, so that a planner can trade them.

The scores of :func:`talaria.model.pruning.importance` order the channels within a group; these compare groups too.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention
from torch.nn import functional as F

from talaria.errors import DataError, ModelError
from talaria.model.dependency_groups import NORMS
from talaria.model.masks import ChannelLayout
from talaria.model.state import array_of
from talaria.tensors import Array


def worth(model: Module, layout: ChannelLayout, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Array]:
    """Per group, float64 (channels,): the squared first-order change of the loss if the channel were gone.

    A gate of 1 on a channel has the gradient ``gamma * dL/dgamma + beta * dL/dbeta`` of its BatchNorm; the score is
    the mean of its square over ``batches`` of (inputs, labels), summed over the layers of the group (Molchanov et al.
    2019, arXiv:1906.10771, equation 8, gates behind BatchNorm). A group without BatchNorm is gated at the layers that
    write it, a head of attention at its values. The loss is cross-entropy in eval mode; ``model`` is unpruned and keeps
    its state and modes.

    Raises :class:`~talaria.errors.DataError` without batches, and :class:`~talaria.errors.ModelError` where the model
    does not fit ``layout``.
    """
    norms = {name for name, m in model.named_modules() if isinstance(m, NORMS)}
    attention = {name for name, m in model.named_modules() if isinstance(m, MultiheadAttention)}
    parameters = dict(model.named_parameters())
    shapes: dict[str, tuple[int, int, int]] = {}
    gates: dict[str, dict[str, list[str]]] = {group: {} for group in layout.sizes}
    for key, axes in layout.axes.items():
        if key in parameters and len({*axes[0]}) == 1 and axes[0][0][1] == layout.spans[axes[0][0][0]]:
            group, wide = axes[0][0]
            shapes[key] = len(axes[0]), layout.sizes[group], wide  # in a row of blocks: gates, groups, q and k and v
            want = prod(shapes[key])
            if parameters[key].shape[0] != want:
                raise ModelError(f"worth: {key!r} has {parameters[key].shape[0]} rows, {group!r} {want}")
            gates[group].setdefault(_layer(key), []).append(key)
    chosen = {}
    for group, layers in gates.items():
        normed = {layer: keys for layer, keys in layers.items() if layer in norms}
        chosen[group] = list((normed or layers).values())

    wanted = [key for members in chosen.values() for keys in members for key in keys]
    if not wanted:
        raise ModelError("worth: no layer writes a channel group; the layout belongs to another model")
    total = {group: torch.zeros(size, dtype=torch.float64) for group, size in layout.sizes.items()}
    modes = {m: m.training for m in model.modules()}
    frozen = {key: p.requires_grad for key, p in parameters.items()}
    count = 0
    try:
        model.eval()
        asked = set(wanted)
        for key, parameter in parameters.items():
            parameter.requires_grad_(key in asked)
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            slopes = dict(zip(wanted, torch.autograd.grad(loss, [parameters[k] for k in wanted]), strict=True))
            for group, members in chosen.items():
                for keys in members:
                    rows = (_rows(parameters[k].detach(), slopes[k], shapes[k]) for k in keys)
                    gate = sum(one[-1] if _layer(keys[0]) in attention else one.sum(0) for one in rows)
                    total[group] += torch.as_tensor(gate).cpu().square()
            count += 1
    finally:
        for module, mode in modes.items():
            module.training = mode
        for key, parameter in parameters.items():
            parameter.requires_grad_(frozen[key])
    if not count:
        raise DataError("worth: there are no batches to measure on; give some labelled samples")
    return {group: array_of(value / count) for group, value in total.items()}


def _layer(key: str) -> str:
    """The layer that a parameter is of."""
    return key.rpartition(".")[0]


def _rows(weight: Tensor, slope: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The gradient of a gate on each channel of a tensor in each block of its rows, (blocks, channels)."""
    rows = (weight.double() * slope.double()).flatten(1).sum(1) if weight.dim() > 1 else weight.double() * slope
    return rows.reshape(shape).sum(2)
