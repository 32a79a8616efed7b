"""Operators on maps: convolutions, pooling, and what makes maps larger or lays their channels out otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from talaria_export.bundle.operators.rule import Found, Node, Rule, Rules, Shape, Value, group, ints, numbers_of, single


def _keeps_last(node: Node) -> bool:
    """Whether the operator keeps channels last: by its attribute, or by what it is, as NhwcMaxPool."""
    return bool(node.attributes.get("channels_last")) or node.kind.startswith("Nhwc")


def _last(node: Node, shape: Shape) -> Shape:
    """``shape`` with its channels second, where the operator keeps them last."""
    return (shape[0], shape[-1], *shape[1:-1]) if _keeps_last(node) else shape


def _back(node: Node, shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1]) if _keeps_last(node) else shape


def _slid(node: Node, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads of a window."""
    rank, own = len(kernel), node.attributes
    strides, dilations = own.get("strides") or [1] * rank, own.get("dilations") or [1] * rank
    pads = own.get("pads") or [0] * (2 * rank)
    if min([*strides, *dilations, *kernel]) < 1 or max([*kernel, *dilations, *map(abs, pads)]) > 1 << 24:
        raise ValueError("a window that is none")
    return strides, dilations, pads


def _window(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Sizes behind a sliding window."""
    rank, own = len(sizes), node.attributes
    strides, dilations, pads = _slid(node, kernel)
    if own.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        return [-(-size // stride) for size, stride in zip(sizes, strides, strict=True)]
    out = []
    for i, size in enumerate(sizes):
        free = size + pads[i] + pads[i + rank] - dilations[i] * (kernel[i] - 1) - 1
        step = -(-free // strides[i]) if own.get("ceil_mode") else free // strides[i]
        out.append(max(0, step + 1))
    return out


def _convolve(weight: int) -> Rule:
    """A convolution whose weight is the input at this place."""

    def rule(node: Node, given: list[Value]) -> Found:
        x, w = _last(node, given[0].shape), given[weight].shape
        if len(w) != len(x) or len(x) < 3:
            raise ValueError(f"weight {w} for {x}")
        shape = (x[0], w[0], *_window(node, x[2:], w[2:]))
        return single(_back(node, shape), math.prod(shape) * max(1, math.prod(w[1:])))

    return rule


def _convolve_back(node: Node, given: list[Value]) -> Found:
    """A transposed convolution, which makes maps larger."""
    x, w, own = given[0].shape, given[1].shape, node.attributes
    rank = len(x) - 2
    if len(w) != len(x) or rank < 1 or "output_shape" in own or own.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise ValueError(f"weight {w} for {x}, or sizes that it does not say itself")
    strides, dilations, pads = _slid(node, w[2:])
    more, groups = own.get("output_padding") or [0] * rank, own.get("group", 1)
    if groups < 1 or max([*strides, *w, *more]) > 1 << 24:
        raise ValueError("a window that is none")
    wide = [
        strides[i] * (x[2 + i] - 1) + dilations[i] * (w[2 + i] - 1) + 1 + more[i] - pads[i] - pads[rank + i]
        for i in range(rank)
    ]
    return single((x[0], w[1] * groups, *wide), math.prod(x) * math.prod(w[1:]))


def _pool(node: Node, given: list[Value]) -> Found:
    x = _last(node, given[0].shape)
    kernel = node.attributes["kernel_shape"]
    shape = (*x[:2], *_window(node, x[2:], kernel))
    out = [Value(_back(node, shape))] * 2
    return out[: len(node.outputs)], math.prod(shape) * math.prod(kernel)


def _whole_pool(node: Node, given: list[Value]) -> Found:
    x = _last(node, given[0].shape)
    return single(_back(node, (*x[:2], *[1] * (len(x) - 2))), given[0].count)


def _resize(node: Node, given: list[Value]) -> Found:
    x = given[0].shape
    if len(given) > 3 and node.inputs[3]:
        shape = ints(given[3])
    else:
        place = 1 if node.kind == "Upsample" else 2
        scales = node.attributes.get("scales") if node.domain.endswith("nchwc") else numbers_of(given[place])
        if not scales or len(scales) != len(x) or not all(0 < scale <= 1 << 24 for scale in scales):
            raise ValueError("scales that are none")
        shape = [math.floor(size * scale) for size, scale in zip(x, scales, strict=True)]
    if len(shape) != len(x):
        raise ValueError(f"{x} as {shape}")
    return single(shape, 16 * math.prod(shape))


def _in_squares(node: Node, given: list[Value]) -> Found:
    (batch, channels, high, wide), by = given[0].shape, node.attributes["blocksize"]
    return single((batch, channels // by**2, high * by, wide * by))


def _reorder_in(node: Node, given: list[Value]) -> Found:
    x = _last(node, given[0].shape)
    return single((x[0], -(-x[1] // 32) * 32, *x[2:]))


def _reorder_out(node: Node, given: list[Value]) -> Found:
    x = given[0].shape
    return single(_back(node, (x[0], node.attributes.get("channels", x[1]), *x[2:])))


RULES: Rules = {
    **group(_convolve(1), "Conv ConvInteger ms:FusedConv ms:NhwcFusedConv nchwc:Conv"),
    **group(_convolve_back, "ConvTranspose"),
    **group(_convolve(3), "QLinearConv ms:QLinearConv"),
    **group(
        _pool,
        "AveragePool LpPool MaxPool ms:NhwcMaxPool ms:QLinearAveragePool nchwc:AveragePool nchwc:MaxPool",
    ),
    **group(
        _whole_pool,
        "GlobalAveragePool GlobalLpPool GlobalMaxPool ms:QLinearGlobalAveragePool nchwc:GlobalAveragePool "
        "nchwc:GlobalMaxPool",
    ),
    **group(_resize, "Resize Upsample nchwc:Upsample"),
    **group(_reorder_in, "nchwc:ReorderInput"),
    **group(_reorder_out, "nchwc:ReorderOutput"),
    **group(_in_squares, "DepthToSpace"),
}
