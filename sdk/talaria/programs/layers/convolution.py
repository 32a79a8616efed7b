"""Convolutions as one matrix product over what lies under the taps, dense, grouped and depthwise.

That is made once, for the forward pass and the weight gradient. Few channels lie as columns, as their weight does; many
are looked up as rows, for which weights are turned. The input gradient is a convolution too, phase by phase. Grouped
products have the groups as a third dimension in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, cast

from torch.nn import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Module

from talaria.programs.graph import Draft, Size
from talaria.programs.layers import depthwise
from talaria.programs.layers.base import Map, Pullback, Step, no_way_back, refused
from talaria.programs.layers.padding import padded
from talaria.programs.layers.windows import Phase, Tap, Windows

SPREAD = 4
"""Places for each input channel from which on ONNX Runtime's transposed convolution gives a map's gradient in less time
than rows or columns of the slope do: .46 for 32 x 32, 16 channels and 3 x 3, 1.06 for 8 x 8 and 32 channels."""
WIDE = 16
"""Channels from which on a tap is looked up as one row: a row costs 7 ns, however short."""
WORTH = 20
"""Outputs whose weights are turned, there and back, in the time that a position of 16 samples saves as rows."""
PLACES = 1 << 16
"""Places that are looked up for one layer, at most: half a megabyte of memory, and no more are followed by value in
:mod:`talaria.programs.shapes`."""


@dataclass(frozen=True)
class _Form:
    """How channels stand in the products: of one group, of each its own, or of several with known sizes."""

    draft: Draft
    groups: int
    inputs: int
    outputs: int
    """Channels of each group, of which a mask may leave out some where ``groups`` is 1."""

    @property
    def dense(self) -> bool:
        return self.groups == 1

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.inputs == self.outputs == 1

    @property
    def rank(self) -> int:
        return 2 if self.dense else 3

    def by_rows(self, positions: int, taps: int, channels: int) -> bool:
        """Whether so many channels under so many taps are looked up as rows."""
        return self.dense and taps > 1 and channels >= WIDE and positions * taps <= PLACES

    def rows(self, value: str, channels: int) -> str:
        """(channels, batch, *space) as the rows of a product."""
        if self.dense:
            return self.draft.reshape(value, 0, -1)
        if self.depthwise:
            return self.draft.op("Unsqueeze", self.draft.reshape(value, 0, -1), self.draft.ints(1))
        return self.draft.reshape(value, self.groups, channels, -1)

    def under(self, pieces: Sequence[str], channels: int) -> str:
        """What lies under the taps, below each other as a weight has them: all taps of a channel together."""
        if len(pieces) == 1 or not self.dense:
            return self.columns(pieces, channels)
        below = self.draft.reshape(self.draft.op("Concat", *pieces, axis=1), 0, len(pieces), -1)
        return self.draft.op("Flatten", below, axis=2)

    def columns(self, pieces: Sequence[str], channels: int) -> str:
        """All channels of each tap together."""
        if len(pieces) == 1:
            return self.rows(pieces[0], channels)
        if self.dense:
            return self.draft.reshape(self.draft.op("Concat", *pieces, axis=0), 0, -1)
        return self.draft.op("Concat", *(self.rows(piece, channels) for piece in pieces), axis=1)

    def map(self, value: str, space: tuple[int, ...], channels: int) -> str:
        """The rows of a product as (channels, batch, *space)."""
        first = 0 if self.dense or self.depthwise else self.groups * channels
        return self.draft.reshape(value, first, -1, *space)

    def forward(self, weight: str, taps: int) -> str:
        """The weight (outputs, inputs, *kernel) against what lies under the taps."""
        if self.dense:
            return self.draft.reshape(weight, 0, -1)
        if self.depthwise:
            return self.draft.reshape(weight, 0, 1, taps)
        turned = self.draft.transpose(
            self.draft.reshape(weight, self.groups, self.outputs, self.inputs, taps), 0, 1, 3, 2
        )
        return self.draft.reshape(turned, self.groups, self.outputs, taps * self.inputs)

    def weight(self, value: str, kernel: tuple[int, ...]) -> str:
        """The inverse of :meth:`forward`."""
        if self.dense:
            return self.draft.reshape(value, 0, -1, *kernel)
        if self.depthwise:
            return self.draft.reshape(value, 0, 1, *kernel)
        value = self.draft.reshape(value, self.groups, self.outputs, prod(kernel), self.inputs)
        turned = self.draft.transpose(value, 0, 1, 3, 2)
        return self.draft.reshape(turned, self.groups * self.outputs, self.inputs, *kernel)

    def backward(self, weight: str, kernel: tuple[int, ...], taps: Sequence[Tap]) -> str:
        """The weight of ``taps`` from outputs to inputs, against the columns of a gradient."""
        many = prod(kernel)
        if self.dense:
            turned, axis = self.draft.transpose(self.draft.reshape(weight, 0, 0, many), 1, 2, 0), 1
        elif self.depthwise:
            turned, axis = self.draft.reshape(weight, 0, 1, many), 2
        else:
            apart = self.draft.reshape(weight, self.groups, self.outputs, self.inputs, many)
            turned, axis = self.draft.transpose(apart, 0, 2, 3, 1), 2
        if len(taps) < many:
            at = [sum(k * prod(kernel[i + 1 :]) for i, k in enumerate(tap)) for tap in taps]
            turned = self.draft.op("Gather", turned, self.draft.ints(*at), axis=axis)
        if self.depthwise:
            return turned
        if self.dense:
            return self.draft.reshape(turned, 0, -1)
        return self.draft.reshape(turned, self.groups, self.inputs, len(taps) * self.outputs)


class _Under(Protocol):
    """What lies under the taps of all windows."""

    def met(self, weight: str) -> str:
        """Its product with a weight (outputs, inputs, *kernel), a row for each output."""

    def slope(self, rows: str) -> str:
        """The gradient of that weight, from one of the product."""


@dataclass(frozen=True)
class _Columns:
    """Below each other, as a weight has them."""

    form: _Form
    kernel: tuple[int, ...]
    value: str

    def met(self, weight: str) -> str:
        return self.form.draft.op("MatMul", self.form.forward(weight, prod(self.kernel)), self.value)

    def slope(self, rows: str) -> str:
        product = self.form.draft.product(rows, self.value, rank=self.form.rank, turn_b=True)
        return self.form.weight(product, self.kernel)


@dataclass(frozen=True)
class _Rows:
    """Beside each other, all channels of a tap together: what a weight is turned for."""

    draft: Draft
    kernel: tuple[int, ...]
    value: str

    def met(self, weight: str) -> str:
        turned = self.draft.transpose(self.draft.reshape(weight, 0, 0, prod(self.kernel)), 0, 2, 1)
        return self.draft.product(self.draft.reshape(turned, 0, -1), self.value, rank=2, turn_b=True)

    def slope(self, rows: str) -> str:
        product = self.draft.reshape(self.draft.op("MatMul", rows, self.value), 0, prod(self.kernel), -1)
        return self.draft.reshape(self.draft.transpose(product, 0, 2, 1), 0, 0, *self.kernel)


def _under(form: _Form, windows: Windows, value: str) -> _Under:
    """As rows where that takes less time than the weight's two turns."""
    many = prod(windows.out)
    if form.by_rows(many, prod(windows.kernel), form.inputs) and many * WORTH > form.outputs:
        return _Rows(form.draft, windows.kernel, windows.rows(form.draft, value))
    return _Columns(form, windows.kernel, form.under(windows.under(form.draft, value), form.inputs))


def convolution(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """A convolution of one or two dimensions, whatever it puts around its map."""
    own, (x,) = cast("Conv1d | Conv2d", module), given
    low, high = _edges(own)
    if own.padding_mode == "zeros":
        return _within(step, layer, own, x, low, high)
    pads = [one for pair in reversed([*zip(low, high, strict=True)]) for one in pair]
    around, cut = padded(step, layer, x, pads, own.padding_mode)
    y, pull = _within(step, layer, own, around, (0,) * len(low), (0,) * len(low))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        (slope,) = pull(g, wanted)
        return [None] if slope is None else cut(slope, wanted)

    return y, back


def _edges(own: Conv1d | Conv2d) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding at the beginning and at the end of each dimension; ``same`` puts what is odd at the end."""
    if own.padding == "valid":
        return (0,) * len(own.kernel_size), (0,) * len(own.kernel_size)
    if not isinstance(own.padding, str):
        return own.padding, own.padding
    whole = [d * (k - 1) for d, k in zip(own.dilation, own.kernel_size, strict=True)]
    return tuple(one // 2 for one in whole), tuple(one - one // 2 for one in whole)


def _within(
    step: Step, layer: str, own: Conv1d | Conv2d, x: Map, low: tuple[int, ...], high: tuple[int, ...]
) -> tuple[Map, Pullback]:
    """The convolution with so many zeros around the map."""
    draft = step.draft
    holes = () if set(own.dilation) == {1} else tuple(own.dilation)
    windows = Windows(x.space, own.kernel_size, own.stride, low, holes, () if low == high else high)
    form = _Form(draft, own.groups, own.in_channels // own.groups, own.out_channels // own.groups)
    kernel = own.kernel_size
    out: Size = layer if form.dense else x.channels if form.depthwise else own.out_channels
    held = x.channels if form.dense else form.inputs
    weight = step.weight(layer, "weight", own.weight, (out, held, *kernel))
    bias = step.weight(layer, "bias", own.bias, (out,))
    assert weight is not None
    if step.looks:
        given_bias = [bias] if bias else []
        pads = windows.padding + windows.end
        y = draft.op(
            "Conv", x.value, weight, *given_bias,
            group=own.groups, kernel_shape=kernel, pads=pads, strides=windows.stride,
            **({"dilations": holes} if holes else {}),
        )  # fmt: skip
        return Map(y, out, windows.out), no_way_back
    if form.depthwise and not holes and depthwise.fits(windows):
        y, pull = depthwise.convolved(step, layer, own, x, windows, weight)
    else:
        y, pull = _convolved(step, layer, own, x, windows, weight, form)
    if bias:
        y = draft.op("Add", y, draft.reshape(bias, -1, *[1] * (1 + len(x.space))))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        step.trained(own, layer, "bias", lambda: draft.sum(draft.reshape(g, 0, -1), 1))
        return pull(g, wanted)

    return Map(y, out, windows.out), back


def _convolved(
    step: Step, layer: str, own: Conv1d | Conv2d, x: Map, windows: Windows, weight: str, form: _Form
) -> tuple[str, Pullback]:
    """Without the bias."""
    draft, kernel, under = step.draft, windows.kernel, _under(form, windows, x.value)
    y = form.map(under.met(weight), windows.out, form.outputs)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        rows = form.rows(g, form.outputs)
        step.trained(own, layer, "weight", lambda: under.slope(rows))
        if not wanted[0]:
            return [None]
        if form.dense and windows.wide(SPREAD * form.inputs):
            pads, order = windows.padding + windows.end, (1, 0, *range(2, 2 + len(kernel)))
            turned, stride = draft.transpose(g, *order), windows.stride
            dx = draft.op("ConvTranspose", turned, weight, kernel_shape=kernel, pads=pads, strides=stride)
            return [draft.transpose(dx, *order)]
        return [windows.back(draft, x.value, lambda phase: _of(form, weight, windows, phase, g))]

    return y, back


def transposed(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """A transposed convolution: the input gradient of the convolution that leads from its output to its input."""
    own, draft, (x,) = cast("ConvTranspose1d | ConvTranspose2d", module), step.draft, given
    kernel, stride, padding, more = own.kernel_size, own.stride, own.padding, own.output_padding
    if set(own.dilation) != {1} or own.groups != 1 or own.padding_mode != "zeros" or isinstance(padding, str):
        raise refused(layer, f"has dilation={own.dilation} and groups={own.groups}", "use 1 of both")
    if any(k < s or extra >= s for k, s, extra in zip(kernel, stride, more, strict=True)):
        raise refused(
            layer, f"leaves places that no tap meets (stride={stride})", "use a kernel as large as its stride"
        )
    zipped = zip(x.space, kernel, stride, padding, more, strict=True)
    space = tuple((n - 1) * s - 2 * p + k + extra for n, k, s, p, extra in zipped)
    windows = Windows(space, kernel, stride, padding)
    form = _Form(draft, 1, own.out_channels, own.in_channels)
    weight = step.weight(layer, "weight", own.weight, (x.channels, layer, *kernel))
    bias = step.weight(layer, "bias", own.bias, (layer,))
    assert weight is not None
    if step.looks:
        y = draft.op(
            "ConvTranspose", x.value, weight, *([bias] if bias else []),
            kernel_shape=kernel, output_padding=tuple(more), pads=tuple(padding) * 2, strides=stride,
        )  # fmt: skip
        return Map(y, layer, space), no_way_back
    y = windows.back(draft, x.value, lambda phase: _of(form, weight, windows, phase, x.value))
    if bias:
        y = draft.op("Add", y, draft.reshape(bias, -1, *[1] * (1 + len(space))))

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        step.trained(own, layer, "bias", lambda: draft.sum(draft.reshape(g, 0, -1), 1))
        under = _under(form, windows, g)
        step.trained(own, layer, "weight", lambda: under.slope(form.rows(x.value, form.outputs)))
        return [form.map(under.met(weight), x.space, form.outputs) if wanted[0] else None]

    return Map(y, layer, space), back


def _of(form: _Form, weight: str, windows: Windows, phase: Phase, g: str) -> str:
    """The input gradient at the positions of one phase."""
    taps = list(phase.taps)
    if form.by_rows(prod(phase.sizes), len(taps), form.outputs):
        rows = phase.rows(form.draft, g, windows.out)
        turned = form.backward(weight, windows.kernel, taps)
        return form.map(form.draft.product(turned, rows, rank=2, turn_b=True), phase.sizes, form.inputs)
    columns = form.columns(phase.shifted(form.draft, g, windows.out, taps), form.outputs)
    product = form.draft.op("MatMul", form.backward(weight, windows.kernel, taps), columns)
    return form.map(product, phase.sizes, form.inputs)
