"""LayerNorm as a function and over several dimensions, and RMSNorm: what each sample has there is normalized by itself,
and scaled and shifted by parameters of the module (Ba et al. 2016; Zhang and Sennrich 2019)."""

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
from talaria.programs.layers.parameters import Weight, joined
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
    return None if getattr(own, name) is None else Weight(layer, name, own)


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
    draft, shape = step.draft, tuple(shape)
    known = [step.known(one) for one in sizes(x)]
    if not shape or tuple(known[-len(shape) :]) != shape:
        raise refused(layer, f"normalizes {shape} of {tuple(known)}", "name the sizes at the end, without the batch")
    as_rows = len(shape) == 1 and not x.space  # as they stand

    def flat(value: str) -> str:
        return value if as_rows else draft.reshape(opened(step, value, x), -1, prod(shape))

    def whole(value: str) -> str:
        if as_rows:
            return value
        return closed(step, draft.op("Reshape", value, draft.op("Shape", opened(step, x.value, x))), x)

    y, slope = rows(step, flat(x.value), prod(shape), eps)
    out, ways = x.like(whole(y)), list[Pullback]()
    ways.append(lambda g, wanted: [whole(slope(flat(g))) if wanted[0] else None])
    for kind, weight in (("Mul", scale), ("Add", shift)):
        if weight is not None:
            out, way = joined(step, layer, kind, out, weight)
            ways.append(way)
    return out, chained(*ways)


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
