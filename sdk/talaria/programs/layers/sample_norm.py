"""LayerNorm as a function and over several dimensions, RMSNorm, and GroupNorm and InstanceNorm as functions: what each
sample has there is normalized by itself, and scaled and shifted by parameters of the module (Ba et al. 2016; Zhang and
Sennrich 2019; Wu and He 2018; Ulyanov et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

import torch
from torch.nn import LayerNorm, Module, RMSNorm

from talaria.programs.layers import normalization
from talaria.programs.layers.activation import Slope
from talaria.programs.layers.base import Map, Pullback, Step, chained, refused
from talaria.programs.layers.normalization import even, through
from talaria.programs.layers.parameters import Weight, joined, stored
from talaria.programs.layers.sequence import closed, on_rows, opened, sizes

Scale = Weight | None
_Rows = Callable[[Step, str, int, float], tuple[str, Slope]]
"""``step, rows, their width, eps -> the normalized rows, and the way back``."""


def layer_norm(
    step: Step,
    layer: str,
    x: Map,
    normalized_shape: Sequence[int],
    weight: Scale = None,
    bias: Scale = None,
    eps: float = 1e-5,
) -> tuple[Map, Pullback]:
    """F.layer_norm: mean 0 and variance 1 over the dimensions at the end."""
    return _normalized(step, layer, x, normalized_shape, weight, bias, eps, _even)


def rms_norm(
    step: Step,
    layer: str,
    x: Map,
    normalized_shape: Sequence[int],
    weight: Scale = None,
    eps: float | None = None,
) -> tuple[Map, Pullback]:
    """F.rms_norm: a mean square of 1 over the dimensions at the end."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _normalized(step, layer, x, normalized_shape, weight, None, eps, _level)


def group_norm(
    step: Step,
    layer: str,
    input: Map,
    num_groups: int,
    weight: Scale = None,
    bias: Scale = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> tuple[Map, Pullback]:
    """F.group_norm: mean 0 and variance 1 over each group of neighbouring channels."""
    channels, *space = (step.known(one) for one in sizes(input))
    rows = _flat(step, input, channels // num_groups * prod(space), eps, _even)
    return _scaled(step, layer, rows, *(_of_channels(one, len(space)) for one in (weight, bias)))


def instance_norm(
    step: Step,
    layer: str,
    input: Map,
    running_mean: None = None,
    running_var: None = None,
    weight: Scale = None,
    bias: Scale = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Map, Pullback]:
    """F.instance_norm: mean 0 and variance 1 over each channel."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise refused(layer, "keeps running statistics", "leave them out, or use BatchNorm")
    _, *space = (step.known(one) for one in sizes(input))
    rows = _flat(step, input, prod(space), eps, _even)
    return _scaled(step, layer, rows, *(_of_channels(one, len(space)) for one in (weight, bias)))


def of_layer_norm(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """nn.LayerNorm; over the last dimension alone its own rule, whose scale and shift weights may take in."""
    own, (x,) = cast(LayerNorm, module), given
    if len(own.normalized_shape) == 1 and (isinstance(x.channels, int) or not x.space):
        return on_rows(normalization.layer_norm)(step, layer, module, given)
    scale, shift = (_held(layer, name, own) for name in ("weight", "bias"))
    return layer_norm(step, layer, x, own.normalized_shape, scale, shift, own.eps)


def of_rms_norm(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """nn.RMSNorm."""
    own = cast(RMSNorm, module)
    return rms_norm(step, layer, given[0], own.normalized_shape, _held(layer, "weight", own), own.eps)


def _held(layer: str, name: str, own: Module) -> Scale:
    return None if getattr(own, name) is None else stored(layer, name, own)


def _normalized(
    step: Step,
    layer: str,
    x: Map,
    shape: Sequence[int],
    scale: Scale,
    shift: Scale,
    eps: float,
    rows: _Rows,
) -> tuple[Map, Pullback]:
    shape, known = tuple(shape), tuple(step.known(one) for one in sizes(x))
    if not shape or known[-len(shape) :] != shape:
        raise refused(layer, f"normalizes {shape} of {known}", "name the sizes at the end, without the batch")
    return _scaled(step, layer, _flat(step, x, prod(shape), eps, rows), scale, shift)


def _flat(step: Step, x: Map, wide: int, eps: float, rows: _Rows) -> tuple[Map, Pullback]:
    """x whose values, in torch's order, are normalized ``wide`` by ``wide``."""
    draft = step.draft
    as_they_stand = not x.space and wide == step.known(x.channels)

    def flat(value: str) -> str:
        return value if as_they_stand else draft.reshape(opened(step, value, x), -1, wide)

    def whole(value: str) -> str:
        if as_they_stand:
            return value
        return closed(step, draft.op("Reshape", value, draft.op("Shape", opened(step, x.value, x))), x)

    y, slope = rows(step, flat(x.value), wide, eps)
    return x.like(whole(y)), lambda g, wanted: [whole(slope(flat(g))) if wanted[0] else None]


def _scaled(
    step: Step, layer: str, normalized: tuple[Map, Pullback], scale: Scale, shift: Scale
) -> tuple[Map, Pullback]:
    out, *ways = normalized
    for kind, weight in (("Mul", scale), ("Add", shift)):
        if weight is not None:
            out, way = joined(step, layer, kind, out, weight)
            ways.append(way)
    return out, chained(*ways)


def _of_channels(weight: Scale, behind: int) -> Scale:
    """A value of each channel, as it meets maps of so many dimensions behind them."""
    return None if weight is None else weight.turned("reshape", (-1, *(1,) * behind))


def _even(step: Step, rows: str, wide: int, eps: float) -> tuple[str, Slope]:
    y, rate = even(step, rows, wide, eps)
    return y, lambda g: through(step.draft, g, y, rate, 1)


def _level(step: Step, rows: str, wide: int, eps: float) -> tuple[str, Slope]:
    draft = step.draft
    square = draft.mean(draft.op("Mul", rows, rows), 1, keep=True)
    rate = draft.op("Reciprocal", draft.op("Sqrt", draft.op("Add", square, draft.constant(eps))))
    y = draft.op("Mul", rows, rate)

    def slope(g: str) -> str:
        along = draft.op("Mul", y, draft.mean(draft.op("Mul", g, y), 1, keep=True))
        return draft.op("Mul", draft.op("Sub", g, along), rate)

    return y, slope
