"""BatchNorm in both modes. In train mode a batch of one sample is normalized as in eval mode, as the loop does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from talaria.programs.graph import INT
from talaria.programs.layers.base import Map, Pullback, Step, no_way_back, refused


def batch_norm(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """(x - mean) / sqrt(var + eps) * weight + bias, with statistics of the batch or the running ones."""
    own, draft, (x,) = cast(_BatchNorm, module), step.draft, given
    if own.running_mean is None or own.running_var is None or own.momentum is None:
        raise refused(layer, "keeps no running mean", "give it track_running_stats=True and a momentum")
    wide = (x.channels,)
    mean, var = (
        _beside(step, x, step.weight(layer, name, getattr(own, name), wide)) for name in ("running_mean", "running_var")
    )
    assert mean is not None
    assert var is not None
    scale = _beside(step, x, step.weight(layer, "weight", own.weight, wide))
    shift = _beside(step, x, step.weight(layer, "bias", own.bias, wide))
    if not own.training:
        return _standing(step, layer, own, x, (mean, var), (scale, shift))
    flat = draft.reshape(x.value, 0, -1) if x.space else x.value
    axis = 1 if x.space else 0
    running_mean, running_var = mean, var
    mean = draft.op("Where", step.several, draft.mean(flat, axis, keep=True), running_mean)
    centred = draft.op("Sub", flat, mean)
    var = draft.mean(draft.op("Mul", centred, centred), axis, keep=True)
    var = draft.op("Where", step.several, var, running_var)
    _follow(step, layer, own, x, (running_mean, mean), (running_var, var))
    rate = draft.op("Reciprocal", draft.op("Sqrt", draft.op("Add", var, draft.constant(own.eps))))
    factor = rate if scale is None else draft.op("Mul", scale, rate)
    y = draft.op("Mul", centred, factor)
    y = y if shift is None else draft.op("Add", y, shift)
    y = draft.reshape(y, 0, -1, *x.space) if x.space else y

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        flat_g = draft.reshape(g, 0, -1) if x.space else g
        total = draft.sum(flat_g, axis, keep=True)
        along = draft.op("Mul", draft.sum(draft.op("Mul", flat_g, centred), axis, keep=True), rate)
        step.trained(own, layer, "weight", lambda: draft.reshape(along, -1))
        step.trained(own, layer, "bias", lambda: draft.reshape(total, -1))
        if not wanted[0]:
            return [None]
        share = draft.op("Div", draft.constant(1.0), step.entries(x))
        share = draft.op("Where", step.several, share, draft.constant(0.0))
        slope = draft.op("Mul", draft.op("Mul", along, rate), share)
        flat_g = draft.op("Sub", flat_g, draft.op("Mul", centred, slope))
        flat_g = draft.op("Sub", flat_g, draft.op("Mul", total, share))
        dx = draft.op("Mul", flat_g, factor)
        return [draft.reshape(dx, 0, -1, *x.space) if x.space else dx]

    return x.like(y), back


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
    y = draft.op("Add", draft.op("Mul", flat, factor), rest)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        flat_g = draft.reshape(g, 0, -1) if x.space else g

        def along() -> str:
            met = draft.op("Mul", flat_g, draft.op("Sub", flat, mean))
            return draft.reshape(draft.op("Mul", draft.sum(met, axis, keep=True), rate), -1)

        step.trained(own, layer, "weight", along)
        step.trained(own, layer, "bias", lambda: draft.sum(flat_g, axis))
        dx = draft.op("Mul", flat_g, factor)
        return [draft.reshape(dx, 0, -1, *x.space) if x.space else dx]

    return x.like(draft.reshape(y, 0, -1, *x.space) if x.space else y), back


def _beside(step: Step, x: Map, value: str | None) -> str | None:
    """A value of each channel so that it stands beside a flat map."""
    return value if value is None or not x.space else step.draft.op("Unsqueeze", value, step.draft.ints(1))


def _follow(step: Step, layer: str, own: _BatchNorm, x: Map, mean: tuple[str, str], var: tuple[str, str]) -> None:
    """The running statistics after this batch: old and new, with the unbiased variance, as torch keeps them."""
    draft = step.draft
    rate = step.rate or draft.constant(float(own.momentum or 0.0))
    rest = draft.op("Sub", draft.constant(1.0), rate) if step.rate else draft.constant(1 - float(own.momentum or 0.0))
    count = step.entries(x)
    less = draft.op("Max", draft.op("Sub", count, draft.constant(1.0)), draft.constant(1.0))
    unbiased = draft.op("Mul", var[1], draft.op("Div", count, less))
    for name, old, new in (("running_mean", *mean), ("running_var", var[0], unbiased)):
        moved = draft.op("Add", draft.op("Mul", old, rest), draft.op("Mul", new, rate))
        kept = draft.op("Where", step.several, moved, old)
        step.buffers[f"{layer}.{name}"] = draft.reshape(kept, -1)
    counter = step.weight(layer, "num_batches_tracked", own.num_batches_tracked, (), INT)
    if counter is not None:
        more = draft.op("Cast", step.several, to=7)
        step.buffers[f"{layer}.num_batches_tracked"] = draft.op("Add", counter, more)
