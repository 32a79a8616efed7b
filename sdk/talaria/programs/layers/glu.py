"""Gated linear units: one half of a dimension, times the sigmoid of the other (Dauphin et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn
from torch.nn import Module

from talaria.programs.layers import plumbing
from talaria.programs.layers.activation import RULES
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.broadcast import cut
from talaria.programs.layers.sequence import sizes


def glu(step: Step, layer: str, input: Map, dim: int = -1) -> tuple[Map, Pullback]:
    """F.glu."""
    draft, axis = step.draft, dim % (1 + len(sizes(input)))
    many = 0 if axis == 0 else step.known(sizes(input)[axis - 1])
    if axis == 0 or many % 2:
        raise refused(layer, f"halves dimension {dim} of {sizes(input)}", "halve an even one behind the batch")
    one, from_one = cut(step, layer, input, axis, slice(0, many // 2))
    other, from_other = cut(step, layer, input, axis, slice(many // 2, many))
    gate, from_gate = RULES[nn.Sigmoid](step, layer, nn.Sigmoid(), [other])
    y, apart = plumbing.multiply(step, layer, Module(), [one, gate])

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        of_one, of_gate = apart(g, [True, True])
        assert of_one is not None
        assert of_gate is not None
        (of_other,) = from_gate(of_gate, [True])
        assert of_other is not None
        return [draft.total([*from_one(of_one, [True]), *from_other(of_other, [True])])]

    return y, back


def of_module(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """nn.GLU."""
    return glu(step, layer, given[0], cast(nn.GLU, module).dim)
