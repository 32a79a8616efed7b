"""Layers whose weight is computed from a direction and a length, as torch.nn.utils.parametrizations.weight_norm has it
(Salimans and Kingma 2016)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode


def is_weight_normed(module: Module) -> bool:
    """Whether a module's weight, and nothing else of it, is computed so."""
    held: Any = module.parametrizations if is_parametrized(module) else {}
    return list(held) == ["weight"] and [type(one) for one in held["weight"]] == [_WeightNorm]


class TwiceDifferentiable(TorchFunctionMode):
    """Inside this context such weights are computed by plain operators. Torch's own takes the lengths for constants
    where it is differentiated a second time, so that what comes of that is wrong (torch 2.14)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_weight if func is torch._weight_norm else func)(*args, **(kwargs or {}))


def _weight(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))
