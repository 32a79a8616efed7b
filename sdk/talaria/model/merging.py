"""Folding adapters into the layers they sit on, where the result is exactly the same function in eval mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Linear, Module, Parameter

from talaria.errors import ModelError
from talaria.model.adapters import ADAPTED, Factors, Heart, Parallel
from talaria.model.cloning import clone
from talaria.model.inside import Inside, matrices


def merge(model: Module) -> Module:
    """A copy of ``model`` without adapters that computes the same in eval mode (float64 sums, 1e-5 relative).

    Low-rank factors and residual adapters without ReLU fold into the weight; HEART's BatchNorm folds as it
    is in eval mode and can leave a bias behind. Raises :class:`~talaria.errors.ModelError` with the layer's name for
    a ReLU in the bottleneck, and for an adapter that mixes the channels of a grouped convolution.
    """
    out = clone(model)
    for name, layer in list(out.named_modules()):
        if not isinstance(layer, ADAPTED):
            continue
        base = layer.base
        with torch.no_grad():
            if isinstance(layer, Inside):
                for factors, key in matrices(base).items():
                    _add(base.get_parameter(key), layer.adapter.get_submodule(factors))
            elif not isinstance(base, (Conv1d, Conv2d, Linear)):
                raise ModelError(f"adapters: {name!r} sits on a {type(base).__name__}, which cannot take it up")
            elif isinstance(layer, Parallel):
                _add(base.weight, layer.adapter)
            else:
                _multiply(name, base, layer.adapter)
        if not name:
            return base
        out.set_submodule(name, base)
    return out


def _add(weight: Tensor, adapter: Module) -> None:
    """W + B A."""
    down, up = _wide(adapter, "down.weight"), _wide(adapter, "up.weight")
    extra = torch.tensordot(up.flatten(1), down, dims=1)
    weight.copy_((weight.double() + extra).to(weight.dtype))


def _multiply(name: str, base: Conv1d | Conv2d | Linear, adapter: Module) -> None:
    """(I + M) W and (I + M) b + M t, for an adapter ``y -> M (y + t)``."""
    if not isinstance(base, Linear) and base.groups > 1:
        raise ModelError(
            f"adapters: {name!r} mixes the channels of a convolution with groups={base.groups}; "
            f"that has no grouped form, so export this model unmerged"
        )
    if isinstance(adapter, Factors):
        if adapter.nonlinear:
            raise ModelError(f"adapters: {name!r} has a ReLU in its bottleneck; export this model unmerged")
        mix = _wide(adapter, "up.weight").flatten(1) @ _wide(adapter, "down.weight").flatten(1)
        shift = None
    elif isinstance(adapter, Heart):
        norm = dict(adapter.norm.named_buffers()) | dict(adapter.norm.named_parameters())
        scale = norm["weight"].double() / torch.sqrt(norm["running_var"].double() + adapter.norm.eps)
        conv = _wide(adapter, "conv.weight").flatten(1)
        shift = conv @ (norm["bias"].double() - norm["running_mean"].double() * scale)
        mix = conv * scale
    else:
        mix, shift = _wide(adapter, "weight").flatten(1), None
    mix = mix + torch.eye(len(mix), dtype=torch.float64, device=mix.device)
    dtype = base.weight.dtype
    base.weight.copy_(torch.tensordot(mix, base.weight.double(), dims=1).to(dtype))
    if base.bias is not None:
        shift = mix @ base.bias.double() + (0 if shift is None else shift)
    if shift is not None:
        base.bias = Parameter(shift.to(dtype), requires_grad=base.weight.requires_grad)


def _wide(module: Module, key: str) -> Tensor:
    return module.get_parameter(key).detach().double()
