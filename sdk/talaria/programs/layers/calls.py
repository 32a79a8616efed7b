"""Functions that a module's own forward calls with more than maps: shapes, numbers, indices, parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn import functional as F

from talaria.model.functional_dropout import KINDS
from talaria.programs.graph import Size
from talaria.programs.layers import activation, arithmetic, batches, lengths, plumbing, pooling, projection, sample_norm
from talaria.programs.layers.base import Map, Pullback, Rule, Step, chained, listed, refused
from talaria.programs.layers.broadcast import cut, flipped, indexed, rolled, stretched, unsqueezed
from talaria.programs.layers.deviations import deviation, variance
from talaria.programs.layers.einsum import einsum
from talaria.programs.layers.gathering import gather, of_each
from talaria.programs.layers.glu import glu
from talaria.programs.layers.largest import larger, largest, logsumexp, smaller, smallest
from talaria.programs.layers.masking import compared, inverted, masked_fill, where
from talaria.programs.layers.padding import padded
from talaria.programs.layers.parameters import Places, Weight, for_each
from talaria.programs.layers.products import attend, matmul
from talaria.programs.layers.resizing import resized, shuffled
from talaria.programs.layers.sequence import (
    averaged,
    closed,
    filled,
    on_maps,
    opened,
    picked,
    shaped,
    sizes,
    turned,
)
from talaria.programs.layers.shares import log_softmax, softmax, softmin

Call = Callable[..., tuple[Map, Pullback]]
"""``(step, layer, *the function's arguments, with maps in their places) -> the map, and the slopes of its maps``."""


@dataclass(frozen=True)
class Batch:
    """The batch's size as a forward pass reads it from ``x.shape``: of no known value, and only for shapes; ``times``
    as large where so many of each sample stand in it."""

    times: int = 1

    def __mul__(self, other: int) -> Batch:
        return Batch(self.times * other) if isinstance(other, int) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Batch:
        fits = isinstance(other, int) and other > 0 and self.times % other == 0
        return Batch(self.times // other) if fits else NotImplemented


BATCH = Batch()
EACH_SAMPLE = Places(0, 0)
"""The numbers of all samples, however many these are: ``torch.arange(len(x))``."""


def _axis(x: Map, axis: int) -> int:
    return axis % (1 + len(sizes(x)))


def _transpose(step: Step, layer: str, x: Map, a: int, b: int) -> tuple[Map, Pullback]:
    order = list(range(1 + len(sizes(x))))
    a, b = _axis(x, a), _axis(x, b)
    order[a], order[b] = b, a
    return turned(step, layer, x, order)


def _permute(step: Step, layer: str, x: Map, *order: Any) -> tuple[Map, Pullback]:
    return turned(step, layer, x, [_axis(x, one) for one in listed(order)])


def _mean(step: Step, layer: str, x: Map, dim: Any, keepdim: bool = False) -> tuple[Map, Pullback]:
    return averaged(step, layer, x, dim, keepdim)


def _sum(step: Step, layer: str, x: Map, dim: Any, keepdim: bool = False) -> tuple[Map, Pullback]:
    return averaged(step, layer, x, dim, keepdim, whole=True)


def _item(step: Step, layer: str, x: Map, index: Any) -> tuple[Map, Pullback]:
    if isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], Map) and index[0] is EACH_SAMPLE:
        return of_each(step, layer, x, index[1])
    return indexed(step, layer, x, index if isinstance(index, tuple) else (index,))


def _squeeze(step: Step, layer: str, x: Map, dim: int | None = None) -> tuple[Map, Pullback]:
    if dim is None:
        return _reshape(step, layer, x, BATCH, *(n for one in sizes(x) if (n := step.known(one)) != 1))
    axis = _axis(x, dim)
    size = sizes(x)[axis - 1]
    if axis and isinstance(size, int) and size != 1:
        return x, lambda g, wanted: [g]  # as torch leaves it
    if axis == 0 or step.known(size) != 1:
        raise refused(layer, f"squeezes dimension {dim} of {sizes(x)}", "squeeze one of size 1 behind the batch")
    return picked(step, layer, x, axis, 0)


def _reshape(step: Step, layer: str, x: Map, *shape: Any) -> tuple[Map, Pullback]:
    wanted = listed(shape)
    held = [step.known(one) for one in sizes(x)]
    if len(wanted) == 2 and wanted[1] == -1 and (wanted[0] is BATCH):
        return plumbing.flatten(step, layer, Module(), [x])
    behind = wanted[1:]
    whole = prod(held)
    if wanted in ([-1], [BATCH]) and whole == 1:
        return _apart(step, layer, x, [])
    if behind.count(-1) == 1:
        behind[behind.index(-1)] = whole // max(1, prod(one for one in behind if one != -1))
    numbers = all(isinstance(one, int) and one > 0 for one in behind) and bool(behind)
    first = wanted[0] is BATCH or (wanted[0] == -1 and -1 not in wanted[1:])
    if not numbers or not first or prod(behind) != whole:
        raise refused(layer, f"shapes {held} as {shape!r}"[:120], "keep the batch first: x.view(x.shape[0], ...)")
    return _apart(step, layer, x, behind)


def _expand(step: Step, layer: str, x: Map | Weight, *shape: Any) -> tuple[Map, Pullback]:
    wanted = listed(shape)
    held: list[Any] = list(x.shape) if isinstance(x, Weight) else [BATCH, *(step.known(one) for one in sizes(x))]
    held = [1] * (len(wanted) - len(held)) + held
    asked = [own if one == -1 else one for one, own in zip(wanted, held, strict=False)]
    if len(asked) != len(held) or asked[:1] != [BATCH] or not all(isinstance(one, int) for one in asked[1:]):
        raise refused(layer, f"stretches {held} to {wanted}", "keep the batch first: x.expand(x.shape[0], -1, -1)")
    if isinstance(x, Weight):
        return for_each(step, layer, x, asked[1:])
    return stretched(step, layer, x, asked[1:])


def _expand_as(step: Step, layer: str, x: Map | Weight, other: Map) -> tuple[Map, Pullback]:
    if isinstance(x, Weight):
        return for_each(step, layer, x, [step.known(one) for one in sizes(other)])
    return stretched(step, layer, x, sizes(other), other)


def _repeat(step: Step, layer: str, x: Map | Weight, *times: Any) -> tuple[Map, Pullback]:
    """As often as said, in dimensions of which there is one."""
    many = listed(times)
    held = list(x.shape) if isinstance(x, Weight) else [1, *(step.known(one) for one in sizes(x))]
    held = [1] * (len(many) - len(held)) + held
    if len(many) != len(held) or any(own != 1 and n != 1 for own, n in zip(held, many, strict=True)):
        raise refused(layer, f"repeats {held} by {many}", "repeat dimensions of size 1")
    first = BATCH if isinstance(x, Map) and many[0] == 1 else many[0]
    return _expand(step, layer, x, first, *(own if n == 1 else n for own, n in zip(held[1:], many[1:], strict=True)))


_COMPARED: Mapping[str, tuple[str, bool]] = {
    "eq": ("Equal", False),
    "ne": ("Equal", True),
    "gt": ("Greater", False),
    "lt": ("Less", False),
    "ge": ("Less", True),
    "le": ("Greater", True),
}
"""The operator of a comparison, and whether what it says is turned round."""


def _unflatten(step: Step, layer: str, x: Map, dim: int, parts: Sequence[int]) -> tuple[Map, Pullback]:
    held = [step.known(one) for one in sizes(x)]
    at = _axis(x, dim) - 1
    parts = list(parts)
    if parts.count(-1) == 1:
        parts[parts.index(-1)] = held[at] // -prod(parts)
    if at < 0 or prod(parts) != held[at]:
        raise refused(layer, f"unflattens {held} by {parts}", "split one dimension behind the batch")
    return _apart(step, layer, x, [*held[:at], *parts, *held[at + 1 :]])


def _apart(step: Step, layer: str, x: Map, behind: Sequence[int]) -> tuple[Map, Pullback]:
    """In another shape, in which what stays first or last stays as narrow as a mask leaves it."""
    draft, labels = step.draft, sizes(x)
    held = [step.known(one) for one in labels]
    wide: list[Size] = list(behind)
    ends = (0, -1) if labels and behind else ()
    end = next((e for e in ends if isinstance(labels[e], str) and behind[e] == held[e]), None)
    if end is not None:
        wide[end] = labels[end]
    out, whole = shaped(step, layer, wide), opened(step, x.value, x)
    if end is None:
        y = filled(step, draft.reshape(whole, -1, *behind), out)
        return y, lambda g, wanted: [closed(step, draft.reshape(opened(step, g, out), -1, *held), x)]
    batch, at = draft.op("Shape", whole, start=0, end=1), 1 if end == 0 else len(held)
    kept = draft.op("Shape", whole, start=at, end=at + 1)
    shape = [kept if isinstance(one, str) else draft.ints(one) for one in wide]
    y = filled(step, draft.op("Reshape", whole, draft.op("Concat", batch, *shape, axis=0)), out)
    back: Pullback = lambda g, wanted: [  # noqa: E731
        closed(step, draft.op("Reshape", opened(step, g, out), draft.op("Shape", whole)), x)
    ]
    return y, back


def part(step: Step, layer: str, x: Map, many: int, place: int) -> tuple[Map, Pullback]:
    """One of ``many`` equal parts of the channels at the end."""
    draft, wide = step.draft, step.known(sizes(x)[-1])
    axis = len(sizes(x))
    if wide % many or not -many <= place < many:
        raise refused(layer, f"cuts {wide} channels in {many}", "cut them in equal parts")
    each, place = wide // many, place % many
    if "+" in str(sizes(x)[-1]):
        return cut(step, layer, x, axis, slice(place * each, (place + 1) * each))
    label = step.held(sizes(x)[-1])
    if isinstance(label, str) and "*" not in label:
        return _share(step, layer, x, label, many, place)
    rest: list[Size] = [*sizes(x)[:-1], each]
    out = shaped(step, layer, rest)
    ends = (draft.ints(n) for n in (place * each, (place + 1) * each, axis, 1))
    y = filled(step, draft.op("Slice", opened(step, x.value, x), *ends), out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        low, high = [0] * (1 + axis), [0] * (1 + axis)
        low[axis], high[axis] = place * each, wide - (place + 1) * each
        whole = draft.op("Pad", opened(step, g, out), draft.ints(*low, *high), draft.constant(0.0))
        return [closed(step, whole, x)]

    return y, back


def _share(step: Step, layer: str, x: Map, label: str, many: int, place: int) -> tuple[Map, Pullback]:
    """One of ``many`` equal parts of a width at the end from which a mask takes alike in each."""
    draft, before = step.draft, (0,) * len(sizes(x))
    out, axis = shaped(step, layer, [*sizes(x)[:-1], f"{label}*{1 / many}"]), len(before)
    parts = draft.reshape(opened(step, x.value, x), *before, many, -1)
    piece = draft.op("Slice", parts, *(draft.ints(n) for n in (place, place + 1, axis, 1)))
    y = filled(step, draft.reshape(piece, *before, -1), out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        low, high = [0] * (2 + axis), [0] * (2 + axis)
        low[axis], high[axis] = place, many - 1 - place
        slope = draft.op("Unsqueeze", opened(step, g, out), draft.ints(axis))
        whole = draft.op("Pad", slope, draft.ints(*low, *high), draft.constant(0.0))
        return [closed(step, draft.reshape(whole, *before, -1), x)]

    return y, back


def picked_and_turned(
    step: Step, layer: str, x: Map, axis: int, place: int, order: Sequence[int]
) -> tuple[Map, Pullback]:
    """One place of a dimension, and those that are left in another order."""
    one, way = picked(step, layer, x, axis, place)
    y, turn = turned(step, layer, one, order)
    return y, chained(way, turn)


def _same(step: Step, layer: str, x: Map, *_: Any) -> tuple[Map, Pullback]:
    return x, lambda g, wanted: [g]


def _detached(step: Step, layer: str, x: Map) -> tuple[Map, Pullback]:
    """The same, by which nothing is learned."""
    if step.twice:
        raise refused(layer, "lets nothing be learned of a map", "differentiate once, by differences of gradients")
    return x.like(x.value), lambda g, wanted: [None]


def _like(step: Step, layer: str, x: Map, other: Map) -> tuple[Map, Pullback]:
    return x, lambda g, wanted: [g, None]


def _whole(step: Step, layer: str, x: Map) -> tuple[Map, Pullback]:
    """Without what is behind the point, as tokens are read."""
    return x.like(step.draft.op("Cast", x.value, to=7)), lambda g, wanted: [None]


def _to(step: Step, layer: str, x: Map, kind: Any) -> tuple[Map, Pullback]:
    if kind in (torch.int64, torch.int32):
        return _whole(step, layer, x)
    if kind is not torch.float32:
        raise refused(layer, f"makes {kind} of a map", "use x.long() for tokens, and x.float() for a mask")
    return _float(step, layer, x)


def _float(step: Step, layer: str, x: Map) -> tuple[Map, Pullback]:
    return (x.like(step.draft.op("Cast", x.value, to=1)) if step.draft.whole(x.value) else x), lambda g, wanted: [g]


def _compared(kind: str, other_way: bool) -> Call:
    """1 where a value is so and 0 elsewhere, as a mask is made of tokens."""

    def call(step: Step, layer: str, x: Any, other: Any) -> tuple[Map, Pullback]:
        return compared(step, layer, kind, x, other, other_way)

    return call


def _flatten(step: Step, layer: str, x: Map, start_dim: int = 0, end_dim: int = -1) -> tuple[Map, Pullback]:
    """Some dimensions behind the batch as one."""
    first, last = _axis(x, start_dim), _axis(x, end_dim)
    wide = [step.known(one) for one in sizes(x)]
    if first == 0 and prod(wide[:last]) == 1:
        return _reshape(step, layer, x, BATCH, *wide[last:])
    if not 0 < first <= last:
        raise refused(layer, f"flattens dimensions {start_dim} to {end_dim}", "keep the batch first and whole")
    return _reshape(step, layer, x, BATCH, *wide[: first - 1], prod(wide[first - 1 : last]), *wide[last:])


def _max_pool(kind: type[Module]) -> Call:
    """A function of maxima, as the module of its arguments."""

    def call(
        step: Step,
        layer: str,
        x: Map,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> tuple[Map, Pullback]:
        own = kind(kernel_size, stride, padding, dilation, return_indices, ceil_mode)
        return on_maps(pooling.max_pool)(step, layer, own, [x])

    return call


def _average_pool(kind: type[Module]) -> Call:
    def call(
        step: Step,
        layer: str,
        x: Map,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> tuple[Map, Pullback]:
        own = kind(kernel_size, stride, padding, ceil_mode, count_include_pad)
        return on_maps(pooling.average_pool)(step, layer, own, [x])

    return call


def _adaptive_pool(kind: type[Module], rule: Rule) -> Call:
    def call(step: Step, layer: str, x: Map, output_size: Any, **more: bool) -> tuple[Map, Pullback]:
        return on_maps(rule)(step, layer, kind(output_size, **more), [x])

    return call


def _of_maps(call: Call) -> Call:
    """A function of maps with their channels first, whatever it is given."""

    def converted(step: Step, layer: str, x: Map, *args: Any, **named: Any) -> tuple[Map, Pullback]:
        rule: Rule = lambda step, layer, own, given: call(step, layer, given[0], *args, **named)  # noqa: E731
        return on_maps(rule)(step, layer, Module(), [x])

    return converted


def _activation(kind: type[Module]) -> Call:
    """A function, as the module of its arguments."""

    def call(step: Step, layer: str, x: Map, *args: Any, **named: Any) -> tuple[Map, Pullback]:
        return activation.RULES[kind](step, layer, kind(*args, **named), [x])

    return call


def _not_dropped(
    step: Step, layer: str, x: Map, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Map, Pullback]:
    """A call of dropout outside of training; in training the network has layers in its place."""
    if training and p:
        raise refused(layer, "drops otherwise than in the first pass", "use nn.Dropout")
    return _same(step, layer, x)


COMPARISONS: Mapping[Callable[..., Any] | str, Call] = {
    call: rule
    for name, how in _COMPARED.items()
    for rule in (_compared(*how),)
    for call in (getattr(operator, name), getattr(torch, name), name)
}
CONVOLUTIONS = projection.convolved(nn.Conv1d, 1), projection.convolved(nn.Conv2d, 2)

CALLS: Mapping[Callable[..., Any] | str, Call] = {
    **dict.fromkeys((torch.transpose, "transpose", "swapaxes"), _transpose),
    **dict.fromkeys((torch.permute, "permute"), _permute),
    **dict.fromkeys((torch.mean, "mean"), _mean),
    **dict.fromkeys((torch.squeeze, "squeeze"), _squeeze),
    **dict.fromkeys((torch.reshape, "view", "reshape"), _reshape),
    **dict.fromkeys((torch.unflatten, "unflatten"), _unflatten),
    "expand": _expand,
    "expand_as": _expand_as,
    "repeat": _repeat,
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add"), arithmetic.add),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), arithmetic.subtract),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), arithmetic.multiply),
    **dict.fromkeys((operator.truediv, torch.div, "div"), arithmetic.divide),
    **dict.fromkeys((torch.softmax, F.softmax, "softmax"), softmax),
    **dict.fromkeys((torch.log_softmax, F.log_softmax, "log_softmax"), log_softmax),
    **dict.fromkeys((operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"), matmul),
    operator.getitem: _item,
    **dict.fromkeys((torch.gather, "gather"), gather),
    **dict.fromkeys((torch.flip, "flip"), flipped),
    **dict.fromkeys((torch.roll, "roll"), rolled),
    **dict.fromkeys((torch.sum, "sum"), _sum),
    **dict.fromkeys((torch.unsqueeze, "unsqueeze"), unsqueezed),
    **dict.fromkeys((torch.clamp, torch.clip, "clamp", "clip"), arithmetic.clamp),
    **dict.fromkeys((torch.clamp_min, "clamp_min"), arithmetic.clamp_min),
    **dict.fromkeys((torch.clamp_max, "clamp_max"), arithmetic.clamp_max),
    F.linear: projection.linear,
    **dict.fromkeys((F.conv1d, torch.conv1d), CONVOLUTIONS[0]),
    **dict.fromkeys((F.conv2d, torch.conv2d), CONVOLUTIONS[1]),
    torch.einsum: einsum,
    F.scaled_dot_product_attention: attend,
    F.pad: padded,
    F.interpolate: _of_maps(resized),
    F.pixel_shuffle: _of_maps(shuffled),
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), _max_pool(nn.MaxPool1d)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool(nn.MaxPool2d)),
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    F.avg_pool1d: _average_pool(nn.AvgPool1d),
    F.avg_pool2d: _average_pool(nn.AvgPool2d),
    F.adaptive_avg_pool1d: _adaptive_pool(nn.AdaptiveAvgPool1d, pooling.adaptive_average),
    F.adaptive_avg_pool2d: _adaptive_pool(nn.AdaptiveAvgPool2d, pooling.adaptive_average),
    F.adaptive_max_pool1d: _adaptive_pool(nn.AdaptiveMaxPool1d, pooling.adaptive_max),
    F.adaptive_max_pool2d: _adaptive_pool(nn.AdaptiveMaxPool2d, pooling.adaptive_max),
    **dict.fromkeys((torch.amax, "amax"), largest),
    **dict.fromkeys((torch.amin, "amin"), smallest),
    **dict.fromkeys((torch.maximum, "maximum", torch.max, "max"), larger),
    **dict.fromkeys((torch.minimum, "minimum", torch.min, "min"), smaller),
    **dict.fromkeys((torch.logsumexp, "logsumexp"), logsumexp),
    F.softmin: softmin,
    F.cosine_similarity: lengths.cosine_similarity,
    F.glu: glu,
    **dict.fromkeys((torch.norm, "norm"), lengths.norm),
    torch.linalg.norm: lengths.linalg_norm,
    torch.linalg.vector_norm: lengths.vector_norm,
    F.normalize: lengths.normalize,
    **dict.fromkeys((torch.var, "var"), variance),
    **dict.fromkeys((torch.std, "std"), deviation),
    F.layer_norm: sample_norm.layer_norm,
    **dict.fromkeys((F.rms_norm, torch.rms_norm), sample_norm.rms_norm),
    **dict.fromkeys((F.group_norm, torch.group_norm), sample_norm.group_norm),
    F.instance_norm: sample_norm.instance_norm,
    **dict.fromkeys((operator.pow, torch.pow, "pow"), arithmetic.raised),
    **{function: _activation(kind) for function, kind in activation.FUNCTIONS.items()},
    **dict.fromkeys(("contiguous", "clone"), _same),
    "type_as": _like,
    **dict.fromkeys(KINDS, _not_dropped),
    **dict.fromkeys((operator.invert, torch.logical_not, "logical_not"), inverted),
    **dict.fromkeys((torch.masked_fill, "masked_fill"), masked_fill),
    torch.where: where,
    "float": _float,
    **dict.fromkeys(("long", "int"), _whole),
    **dict.fromkeys(("to", "type"), _to),
    **COMPARISONS,
    **dict.fromkeys(("detach", torch.detach), _detached),
    **batches.CALLS,
}
"""By the function, or the name of a tensor's method."""
WITH_PARAMETERS = (
    *(arithmetic.add, arithmetic.subtract, arithmetic.multiply, arithmetic.divide, arithmetic.raised),
    *(_expand, _expand_as, _repeat, projection.linear),
    *(sample_norm.layer_norm, sample_norm.rms_norm, sample_norm.group_norm, sample_norm.instance_norm),
    *CONVOLUTIONS,
    *COMPARISONS.values(),
    *(masked_fill, where, matmul, attend, einsum, larger, smaller, lengths.cosine_similarity),
)
"""Calls that may be given parameters of the module, and tables."""
