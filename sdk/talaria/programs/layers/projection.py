"""Layers as functions, whose weights are parameters of the module or made of some: ``F.linear``, ``x @ self.weight``,
``F.conv1d`` and ``F.conv2d``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.nn import Conv1d, Conv2d, Module

from talaria.programs.graph import Size
from talaria.programs.layers import convolution
from talaria.programs.layers.base import Map, Pullback, Step, chained, key, no_way_back, refused, spread
from talaria.programs.layers.parameters import Weight, joined
from talaria.programs.layers.sequence import on_maps, on_rows, picked, sizes


def linear(step: Step, layer: str, input: Map, weight: Weight, bias: Weight | None = None) -> tuple[Map, Pullback]:
    """F.linear: x W^T + b along the last dimension."""
    wide = step.known(sizes(input)[-1])
    if not isinstance(weight, Weight) or len(weight.shape) != 2 or weight.shape[1] != wide:
        held = weight.shape if isinstance(weight, Weight) else "a map"
        raise refused(layer, f"weighs {wide} channels by {held}", "give it a parameter (outputs, channels)")

    def rule(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        draft, (x,) = step.draft, given
        out = _width(step, weight)
        matrix = weight.value(step, (out, x.channels))
        y = draft.op("Gemm", x.value, matrix, transB=1)

        def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
            weight.train(step, draft.product(g, x.value, rank=2, turn_a=True))
            return [draft.op("MatMul", g, matrix) if wanted[0] else None]

        return Map(y, out, (), x.lead), no_way_back if step.looks else back

    y, back = on_rows(rule)(step, layer, Module(), [input])
    if bias is None:
        return y, back
    shifted, shift = joined(step, layer, "Add", y, bias)
    return shifted, chained(back, shift)


def matmul(step: Step, layer: str, x: Map, matrix: Weight) -> tuple[Map, Pullback]:
    """x times a matrix (channels, outputs), before which sizes of 1 may stand, or a vector (channels,)."""
    shape = matrix.shape
    if len(shape) == 1:
        y, back = linear(step, layer, x, matrix.turned("reshape", (1, *shape)))
        one, apart = picked(step, layer, y, len(sizes(y)), 0)
        return one, chained(back, apart)
    if prod(shape[:-2]) == 1 and len(shape) <= 1 + len(sizes(x)):
        matrix = matrix.turned("reshape", shape[-2:]).turned("permute", (1, 0))
    return linear(step, layer, x, matrix)


@dataclass(frozen=True)
class _Given:
    """A weight that a layer has of others; a :class:`~talaria.programs.layers.base.Computed`."""

    weight: Weight
    names: Mapping[str, Size]
    """What sizes are called outside of the layer."""

    def value(self, step: Step, shape: Sequence[Size]) -> str:
        """The weight of this ``shape``."""
        return self.weight.value(step, [self.names.get(str(one), one) for one in shape])

    def train(self, step: Step, gradient: Callable[[], str]) -> None:
        """Keep the gradients of what it is made of."""
        if self.weight.trains:
            self.weight.train(step, gradient())


def _width(step: Step, weight: Weight) -> Size:
    """The outputs of a weight: a name where a mask may take some."""
    return weight.shape[0] if weight.layer in (None, step.head) else str(weight.layer)


def convolved(kind: Callable[..., Conv1d | Conv2d], rank: int) -> Callable[..., tuple[Map, Pullback]]:
    """F.conv1d or F.conv2d, as the module of its arguments."""

    def call(
        step: Step,
        layer: str,
        input: Map,
        weight: Weight,
        bias: Weight | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> tuple[Map, Pullback]:
        if not isinstance(weight, Weight) or len(weight.shape) != 2 + rank or not isinstance(input, Map):
            what = f"convolves by {weight.shape}" if isinstance(weight, Weight) else "convolves by a map"
            raise refused(layer, what, "give it a map and a parameter (outputs, inputs, *kernel)")
        outputs, inputs, *kernel = weight.shape
        wide = step.known(sizes(input)[0])
        if wide != inputs * groups:
            raise refused(layer, f"weighs {wide} channels by {weight.shape} in {groups} groups", "let them fit")
        options = (spread(one, rank) if not isinstance(one, str) else one for one in (stride, padding, dilation))
        own = kind(wide, outputs, tuple(kernel), *options, groups, bias is not None, device="meta")
        place = f"{layer}()"  # which no layer is called
        names = {place: _width(step, weight)}
        for name, one in (("weight", weight), ("bias", bias)):
            if one is not None:
                step.computed[key(place, name)] = _Given(one, names)
        y, back = on_maps(convolution.convolution)(step, place, own, [input])
        return Map(y.value, names.get(str(y.channels), y.channels), y.space), back

    return call
