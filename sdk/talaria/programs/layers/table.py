"""Which rule a layer follows. What stands in neither table is refused by its name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn import functional as F

from talaria.programs.layers import activation, convolution, linear, normalization, plumbing, pooling
from talaria.programs.layers.base import Rule

LAYERS: Mapping[type[Module], Rule] = {
    **activation.RULES,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), convolution.convolution),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), normalization.batch_norm),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d), pooling.max_pool),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d), pooling.average_pool),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), pooling.global_average),
    nn.Linear: linear.linear,
    nn.Flatten: plumbing.flatten,
    nn.Identity: plumbing.identity,
    nn.Dropout: plumbing.dropout,
    nn.ZeroPad2d: plumbing.zero_pad,
}
"""By the exact type of a module."""

NAMED: Mapping[str, Rule] = {"torchvision.ops.stochastic_depth.StochasticDepth": plumbing.stochastic_depth}
"""By the full name of a module's type, where its package may be missing."""

FUNCTIONS: Mapping[Callable[..., Any] | str, tuple[Rule, Module]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), (plumbing.add, nn.Identity())),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), (plumbing.multiply, nn.Identity())),
    **dict.fromkeys((torch.relu, F.relu, "relu", "relu_"), (activation.RULES[nn.ReLU], nn.ReLU())),
    **dict.fromkeys((torch.flatten, "flatten"), (plumbing.flatten, nn.Flatten())),
}
"""By the function, or the name of a tensor's method."""


def rule_of(module: Module) -> Rule | None:
    """The rule of a module, or None where it has none."""
    kind = type(module)
    return LAYERS.get(kind) or NAMED.get(f"{kind.__module__}.{kind.__qualname__}")
