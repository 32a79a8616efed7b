"""Taking channels out of a network for good, and putting them back where they were.

No graph is needed for it: each tensor is cut to the kept indices of its layout, and each layer is told its new size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from talaria.errors import ModelError
from talaria.model import attention, recurrent
from talaria.model.cloning import clone
from talaria.model.dependency_groups import CONVS, INSTANCES, NORMS, is_depthwise
from talaria.model.masks import ChannelMask, gather, scatter, shrink
from talaria.model.state import fill, state_of, to_arrays


def compact(model: Module, mask: ChannelMask, held: ChannelMask | None = None) -> Module:
    """A copy of ``model`` without the channels that ``mask`` drops; the keys of its state keep names and order.

    ``held`` is the mask of a ``model`` that is already compact; ``mask`` must then lie within it. Parameters are
    new objects, so optimizers start anew; train mode and ``requires_grad`` stay as they were. Raises
    :class:`~talaria.errors.ModelError` where the shapes do not fit the mask.
    """
    own = {key: value for key, value in _named(model).items() if key in mask.layout.axes}
    lost = sorted(set(mask.layout.axes) - set(own))
    if lost:
        raise ModelError(f"mask: the model has no tensor {lost[0]!r}; the mask belongs to another model")
    dense = to_arrays(own)
    small = gather(dense, mask) if held is None else shrink(dense, held, mask)
    memo: dict[int, object] = {}
    for key, value in small.items():
        old, new = own[key], torch.from_numpy(value.copy() if value is dense[key] else value).to(own[key].device)
        memo[id(old)] = Parameter(new, requires_grad=old.requires_grad) if isinstance(old, Parameter) else new
    out = clone(model, memo)
    touched = {key.rpartition(".")[0] for key in small}
    for name, layer in out.named_modules():
        if name in touched:
            _resize(layer)
    attention.walk_through(out)
    return out


def expand(model: Module, mask: ChannelMask, like: Module) -> Module:
    """The inverse of :func:`compact`: a copy of the dense ``like`` whose kept positions hold ``model``'s values."""
    out = clone(like)
    fill(out.state_dict(), scatter(state_of(model), mask, state_of(like)))
    return out


def _named(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _resize(layer: Module) -> None:
    """Makes a layer's own record of its size agree with its tensors."""
    if isinstance(layer, CONVS):
        if is_depthwise(layer):
            layer.groups = layer.in_channels = layer.out_channels = layer.weight.shape[0]
        else:
            layer.out_channels, layer.in_channels = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.MultiheadAttention):
        attention.resize(layer)
    elif isinstance(layer, nn.RNNBase):
        recurrent.resize(layer)
    elif isinstance(layer, nn.GroupNorm):
        each, layer.num_channels = layer.num_channels // layer.num_groups, layer.weight.shape[0]
        layer.num_groups = layer.num_channels // each
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = layer.weight.shape[0]
    elif isinstance(layer, (*NORMS, *INSTANCES)):
        known = next(t for t in (layer.weight, layer.running_mean) if t is not None)
        layer.num_features = known.shape[0]
