"""LayerNorm, GroupNorm, InstanceNorm, and BatchNorm in both modes.

In train mode BatchNorm takes a batch of one sample as in eval mode, as the loop does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

import numpy as np
from torch.nn import GroupNorm, InstanceNorm2d, LayerNorm, Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from talaria.programs.graph import INT, Draft
from talaria.programs.layers.base import Affine, Map, Pullback, Step, no_way_back, refused

SHORT = 64
"""Width up to which a row's mean is taken off by a product with a matrix: .85 against .90 of a transformer's step."""
NARROW = 64
"""Width up to which a number of each row is written beside all of its values before these are multiplied with it: 4.2
us in place of 7.3 for 512 x 32, 7.3 and 9.1 for 512 x 64, but 13.8 and 11.8 for 512 x 128."""


def batch_norm(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """(x - mean) / sqrt(var + eps) * weight + bias, with statistics of the batch or the running ones."""
    own, draft, (x,) = cast(_BatchNorm, module), step.draft, given
    mean, var, scale, shift = (
        step.weight(layer, name, getattr(own, name), (x.channels,))
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    assert mean is not None
    assert var is not None
    if not own.training:
        return _standing(step, layer, own, x, (mean, var), (scale, shift))
    flat = draft.reshape(x.value, 0, -1) if x.space else x.value
    axis = 1 if x.space else 0
    running_mean, running_var = mean, var
    mean = draft.op("Where", step.several, draft.mean(flat, axis), running_mean)
    centred = draft.op("Sub", flat, _beside(draft, x, mean))
    var = draft.mean(draft.op("Mul", centred, centred), axis)
    var = draft.op("Where", step.several, var, running_var)
    _follow(step, layer, own, x, (running_mean, mean), (running_var, var))
    rate = draft.op("Reciprocal", draft.op("Sqrt", draft.op("Add", var, draft.constant(own.eps))))
    factor = _beside(draft, x, rate if scale is None else draft.op("Mul", scale, rate))
    y = draft.op("Mul", centred, factor)
    y = y if shift is None else draft.op("Add", y, _beside(draft, x, shift))
    y = draft.reshape(y, 0, -1, *x.space) if x.space else y

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        flat_g = draft.reshape(g, 0, -1) if x.space else g
        total = draft.sum(flat_g, axis)
        along = draft.op("Mul", draft.sum(draft.op("Mul", flat_g, centred), axis), rate)
        step.trained(own, layer, "weight", lambda: along)
        step.trained(own, layer, "bias", lambda: total)
        if not wanted[0]:
            return [None]
        share = draft.op("Div", draft.constant(1.0), step.entries(x))
        share = draft.op("Where", step.several, share, draft.constant(0.0))
        slope = draft.op("Mul", draft.op("Mul", along, rate), share)
        flat_g = draft.op("Sub", flat_g, draft.op("Mul", centred, _beside(draft, x, slope)))
        flat_g = draft.op("Sub", flat_g, _beside(draft, x, draft.op("Mul", total, share)))
        dx = draft.op("Mul", flat_g, factor)
        return [draft.reshape(dx, 0, -1, *x.space) if x.space else dx]

    return x.like(y), back


def layer_norm(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """Each row by its own mean and variance, over the channels at the end (Ba et al. 2016)."""
    own, draft, (x,) = cast(LayerNorm, module), step.draft, given
    wide = step.known(x.channels)  # which no mask narrows: it would change the mean
    if tuple(own.normalized_shape) != (wide,):
        raise refused(layer, f"goes over {tuple(own.normalized_shape)}", "normalize the last dimension alone")
    scale = step.weight(layer, "weight", own.weight, (wide,))
    shift = step.weight(layer, "bias", own.bias, (wide,))
    flat, rate = even(step, x.value, wide, own.eps)
    if step.folds:
        affine = Affine(layer, own, scale, shift)
        return Map(flat, wide, x.space, x.lead, affine), lambda g, wanted: [_level(draft, g, flat, rate, wide)]
    y = flat if scale is None else draft.op("Mul", flat, scale)
    y = y if shift is None else draft.op("Add", y, shift)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        met = draft.op("Mul", g, flat)
        step.trained(own, layer, "weight", lambda: step.summed(met, x.lead))
        step.trained(own, layer, "bias", lambda: step.summed(g, x.lead))
        if not wanted[0]:
            return [None]
        if wide > SHORT:
            return [through(draft, g if scale is None else draft.op("Mul", g, scale), flat, rate, 1)]
        # one product scales and takes the mean off, in place of three passes
        share = np.full((wide, wide), 1 / wide)
        off, mean = draft.constant(np.eye(wide) - share), draft.constant(share[:1])
        if scale is not None:
            off, mean = draft.op("Mul", draft.reshape(scale, -1, 1), off), draft.op("Mul", scale, mean)
        return [_less(draft, draft.op("MatMul", g, off), flat, (met, mean), rate, wide)]

    return Map(y, wide, x.space, x.lead), back


def _level(draft: Draft, g: str, even: str, rate: str, wide: int) -> str:
    """The gradient by rows that were made even, where the slope ``g`` of these has no mean already."""
    mean = draft.constant(np.full((1, wide), 1 / wide))
    return _less(draft, g, even, (draft.op("Mul", g, even), mean), rate, wide)


def _less(draft: Draft, g: str, even: str, along: tuple[str, str], rate: str, wide: int) -> str:
    """``rate (g - even m)``, where a row's ``m`` is what it has of ``along``: rows, and by what their numbers (1, wide)
    are added up."""
    rows, weights = along
    # as the product of a row with all of them: as that of all with a column it takes four times as long
    many = draft.product(weights, rows, rank=2, turn_b=True)
    rest = draft.op("Sub", g, draft.op("Mul", even, _across(draft, many, wide, turned=True)))
    return draft.op("Mul", rest, _across(draft, rate, wide))


def _across(draft: Draft, each: str, wide: int, turned: bool = False) -> str:
    """A number of each row, (rows, 1), or ``turned`` (1, rows), so that it stands beside rows of ``wide``."""
    if wide > NARROW:
        return draft.reshape(each, -1, 1) if turned else each
    return draft.op("Gemm", each, draft.constant(np.ones((1, wide))), transA=int(turned))


def even(step: Step, rows: str, wide: int, eps: float, axis: int = 1) -> tuple[str, str]:
    """Rows (..., wide) with mean 0 and variance 1 along ``axis``, the last one, and by what each was multiplied
    (..., 1)."""
    draft = step.draft
    if not step.twice:
        flat, _, rate = draft.several(
            "LayerNormalization", 3, rows, draft.constant(np.ones(wide)), axis=axis, epsilon=float(eps)
        )
        return flat, rate
    centred = draft.op("Sub", rows, draft.mean(rows, axis, keep=True))
    var = draft.mean(draft.op("Mul", centred, centred), axis, keep=True)
    rate = draft.op("Reciprocal", draft.op("Sqrt", draft.op("Add", var, draft.constant(eps))))
    return draft.op("Mul", centred, rate), rate


def group_norm(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """Each sample's groups of channels by their own mean and variance (Wu and He 2018); a mask takes whole groups."""
    own = cast(GroupNorm, module)
    return _grouped(step, layer, own, given, own.num_channels // own.num_groups)


def instance_norm(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """Each sample's channels one by one, as groups of one (Ulyanov et al. 2016)."""
    own, (x,) = cast(_InstanceNorm, module), given
    if own.track_running_stats:
        raise refused(layer, "keeps running statistics", "leave out track_running_stats, or use BatchNorm")
    if len(x.space) != (2 if isinstance(own, InstanceNorm2d) else 1):
        raise refused(layer, f"reads maps of {x.space}", "give (batch, channels, length), or a plane to InstanceNorm2d")
    many = step.known(x.channels)
    if many != own.num_features:  # which torch lets pass where there is no scale
        raise refused(layer, f"has num_features={own.num_features} and reads {many}", f"use num_features={many}")
    return _grouped(step, layer, own, given, 1)


def _grouped(
    step: Step, layer: str, own: GroupNorm | _InstanceNorm, given: Sequence[Map], each: int
) -> tuple[Map, Pullback]:
    """Groups of ``each`` neighbouring channels."""
    draft, (x,) = step.draft, given
    scale, shift = (step.weight(layer, name, getattr(own, name), (x.channels,)) for name in ("weight", "bias"))

    def apart(value: str) -> str:
        """(batch, groups, what one holds), however many groups a mask leaves."""
        if x.space and not step.looks:
            value = draft.transpose(value, 1, 0, *range(2, 2 + len(x.space)))
        return draft.reshape(value, 0, -1, each * prod(x.space))

    def together(value: str) -> str:
        value = draft.reshape(value, 0, -1, *x.space)
        return draft.transpose(value, 1, 0, *range(2, 2 + len(x.space))) if x.space and not step.looks else value

    def beside(value: str) -> str:
        ones = [1] * len(x.space)
        return draft.reshape(value, *([-1, *ones] if step.looks else [-1, 1, *ones])) if x.space else value

    rows = apart(x.value)
    flat, rate = even(step, rows, each * prod(x.space), own.eps, axis=2)
    y = together(flat)
    y = y if scale is None else draft.op("Mul", y, beside(scale))
    y = y if shift is None else draft.op("Add", y, beside(shift))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        over = [1, *range(2, 2 + len(x.space))] if x.space else [0]
        step.trained(own, layer, "weight", lambda: draft.sum(draft.op("Mul", g, together(flat)), *over))
        step.trained(own, layer, "bias", lambda: draft.sum(g, *over))
        if not wanted[0]:
            return [None]
        met = g if scale is None else draft.op("Mul", g, beside(scale))
        return [together(through(draft, apart(met), flat, rate, 2))]

    return x.like(y), back


def through(draft: Draft, g: str, even: str, rate: str, axis: int) -> str:
    """The gradient by what was made even (mean 0, variance 1) along ``axis``."""
    along = draft.op("Mul", even, draft.mean(draft.op("Mul", g, even), axis, keep=True))
    rest = draft.op("Sub", draft.op("Sub", g, draft.mean(g, axis, keep=True)), along)
    return draft.op("Mul", rest, rate)


def _standing(
    step: Step, layer: str, own: _BatchNorm, x: Map, running: tuple[str, str], affine: tuple[str | None, str | None]
) -> tuple[Map, Pullback]:
    """With the running statistics: one product and one sum."""
    draft, (mean, var), (scale, shift) = step.draft, running, affine
    rate = draft.op("Reciprocal", draft.op("Sqrt", draft.op("Add", var, draft.constant(own.eps))))
    factor = rate if scale is None else draft.op("Mul", scale, rate)
    away = draft.op("Mul", mean, factor)
    rest = draft.op("Neg", away) if shift is None else draft.op("Sub", shift, away)
    if step.looks and x.space:
        each = (draft.reshape(one, 1, -1, *(1 for _ in x.space)) for one in (factor, rest))
        return x.like(draft.op("Add", draft.op("Mul", x.value, next(each)), next(each))), no_way_back
    flat = draft.reshape(x.value, 0, -1) if x.space else x.value
    axis = 1 if x.space else 0
    wide = _beside(draft, x, factor)
    y = draft.op("Add", draft.op("Mul", flat, wide), _beside(draft, x, rest))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        flat_g = draft.reshape(g, 0, -1) if x.space else g

        def along() -> str:
            met = draft.op("Mul", flat_g, draft.op("Sub", flat, _beside(draft, x, mean)))
            return draft.op("Mul", draft.sum(met, axis), rate)

        step.trained(own, layer, "weight", along)
        step.trained(own, layer, "bias", lambda: draft.sum(flat_g, axis))
        dx = draft.op("Mul", flat_g, wide)
        return [draft.reshape(dx, 0, -1, *x.space) if x.space else dx]

    return x.like(draft.reshape(y, 0, -1, *x.space) if x.space else y), back


def _beside(draft: Draft, x: Map, value: str) -> str:
    """A number of each channel so that it stands beside a flat map. They are reckoned with as vectors: a number without
    dimensions takes four times as long with 128 x 1."""
    return draft.op("Unsqueeze", value, draft.ints(1)) if x.space else value


def _follow(step: Step, layer: str, own: _BatchNorm, x: Map, mean: tuple[str, str], var: tuple[str, str]) -> None:
    """The running statistics after this batch: old and new, with the unbiased variance, as torch keeps them."""
    draft = step.draft
    rate, rest = _rate(step, layer, own)
    count = step.entries(x)
    less = draft.op("Max", draft.op("Sub", count, draft.constant(1.0)), draft.constant(1.0))
    unbiased = draft.op("Mul", var[1], draft.op("Div", count, less))
    for name, first, new in (("running_mean", *mean), ("running_var", var[0], unbiased)):
        old = step.buffers.get(f"{layer}.{name}", first)  # of a layer that is called again, what its last call left
        moved = draft.op("Add", draft.op("Mul", old, rest), draft.op("Mul", new, rate))
        step.buffers[f"{layer}.{name}"] = draft.op("Where", step.several, moved, old)
    counter = _counted(step, layer, own)
    if counter is not None:
        step.buffers[f"{layer}.num_batches_tracked"] = counter


def _rate(step: Step, layer: str, own: _BatchNorm) -> tuple[str, str]:
    """By how much the statistics of this call move the running ones, and what of these stays: of each call alike where
    they are means of all calls so far."""
    draft, one = step.draft, step.draft.constant(1.0)
    counter = _counted(step, layer, own) if own.momentum is None or (step.rate and layer in step.again) else None
    if counter is None and not step.rate:
        return draft.constant(float(own.momentum or 0.0)), draft.constant(1 - float(own.momentum or 0.0))
    rate = step.rate or one if counter is None else draft.op("Reciprocal", draft.op("Cast", counter, to=1))
    return rate, draft.op("Sub", one, rate)


def _counted(step: Step, layer: str, own: _BatchNorm) -> str | None:
    """How many batches a layer has seen after this call."""
    counter = step.weight(layer, "num_batches_tracked", own.num_batches_tracked, (), INT)
    if counter is None:
        return None
    before = step.buffers.get(f"{layer}.num_batches_tracked", counter)
    return step.draft.op("Add", before, step.draft.op("Cast", step.several, to=7))
