"""The cost of a graph (values held, products computed), worked out from its shapes before a runtime allocates
anything.

Only operators that `talaria export` and ONNX Runtime's optimizer write are known; every other one is refused. A shape
that the graph computes (for windows of a recording) is worked out here from its few numbers; one that depends on the
values of an input is refused. Needs nothing but Python.

It is longer than 500 lines because each operator says in a few of its own what it makes: apart, they would be as many
files that nobody reads alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from talaria.errors import BundleError

MOST_ELEMENTS = 1 << 27
"""Numbers that all values of a graph may hold together, for one input."""
MOST_PRODUCTS = 1 << 35
"""Products that a graph may compute for one input."""
KNOWN_VALUES = 4096
"""Most numbers of a value that are followed, because they may become a shape."""

Shape = tuple[int, ...]
Number = int | float


@dataclass(frozen=True)
class Value:
    """A tensor's shape and, where it is small and known, its numbers in order."""

    shape: Shape
    numbers: tuple[Number, ...] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Node:
    """An operator as it stands in the file."""

    kind: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Unknown(Exception):  # noqa: N818 - caught by `measure` alone
    """A shape that cannot be told, with the reason."""


def measure(nodes: Sequence[Node], known: Mapping[str, Value], inputs: int = 1) -> tuple[int, int]:
    """``(elements, products)`` of a graph whose input and weights are ``known``; ``inputs`` scales the limits.

    Raises :class:`~talaria.errors.BundleError`, without the name of the file, where they are beyond the limits, an
    operator has no place in a bundle, or a shape cannot be told.
    """
    values, elements, products = dict(known), 0, 0
    for node in nodes:
        rule = _RULES.get((node.domain.removeprefix("ai.onnx"), node.kind))
        if rule is None:
            raise BundleError(f"uses the operator {node.kind!r}, which no bundle needs")
        try:
            given = [values[name] if name else Value(()) for name in node.inputs]
            found, work = rule(node, given)
        except Unknown as why:
            raise BundleError(f"{node.kind!r} makes a size that cannot be told ({why})") from None
        except (KeyError, IndexError, ValueError, TypeError, OverflowError, ZeroDivisionError, AttributeError) as odd:
            raise BundleError(f"{node.kind!r} does not fit what it is given ({type(odd).__name__}: {odd})") from None
        for name, value in zip(node.outputs, [*found, *[Value(())] * len(node.outputs)], strict=False):
            if len(value.shape) > 8 or any(size < 0 for size in value.shape):
                raise BundleError(f"{node.kind!r} makes a tensor of shape {value.shape}")
            elements += value.count
            values[name] = value
        products += max(work, sum(value.count for value in found))
        if elements > MOST_ELEMENTS * inputs or products > MOST_PRODUCTS * inputs:
            raise BundleError(
                f"makes {elements} numbers with {products} products for {inputs} inputs, more than "
                f"{MOST_ELEMENTS} and {MOST_PRODUCTS} each"
            )
    return elements, products


Found = tuple[list[Value], int]
Rule = Callable[[Node, list[Value]], Found]


def _one(shape: Sequence[int], work: int = 0, numbers: tuple[Number, ...] | None = None) -> Found:
    return [Value(tuple(shape), numbers)], work


def _numbers(value: Value, what: str = "it is computed from the input") -> tuple[Number, ...]:
    if value.numbers is None:
        raise Unknown(what)
    return value.numbers


def _ints(value: Value) -> list[int]:
    return [int(n) for n in _numbers(value)]


def _list(node: Node, given: list[Value], name: str, place: int) -> list[int] | None:
    """What older operators say as an attribute and newer ones as an input."""
    if len(given) > place and node.inputs[place]:
        return _ints(given[place])
    found = node.attributes.get(name)
    return None if found is None else list(found)


def _alike(node: Node, given: list[Value]) -> Found:
    return _one(given[0].shape, 0, given[0].numbers if node.kind in ("Identity", "Cast") else None)


def _same(node: Node, given: list[Value]) -> Found:
    """All outputs as large as the first input: normalizations, and the three of dynamic quantization."""
    small = Value(())
    return [Value(given[0].shape), small, small], 8 * given[0].count


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    out = []
    for sizes in zip(*([1] * (rank - len(s)) + list(s) for s in shapes), strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise ValueError(f"shapes {shapes} do not go together")
        out.append(wide.pop() if wide else 1)
    return tuple(out)


_FOLDS: dict[str, Callable[[Number, Number], Number]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: int(a / b) if isinstance(a, int) and isinstance(b, int) else a / b,
}


def _together(node: Node, given: list[Value]) -> Found:
    shape = _broadcast([value.shape for value in given])
    fold = _FOLDS.get(node.kind)
    if fold is None or len(given) != 2 or math.prod(shape) > KNOWN_VALUES:
        return _one(shape)
    a, b = (value.numbers for value in given)
    if a is None or b is None or not {len(a), len(b)} <= {1, math.prod(shape)}:
        return _one(shape)
    count = math.prod(shape)
    pairs = zip(a * (count if len(a) == 1 else 1), b * (count if len(b) == 1 else 1), strict=True)
    numbers = tuple(fold(x, y) for x, y in pairs)
    if any(isinstance(n, int) and abs(n) >= 1 << 63 for n in numbers):
        raise OverflowError("a number beyond 64 bits")
    return _one(shape, 0, numbers)


def _quantized_pair(node: Node, given: list[Value]) -> Found:
    """QLinearAdd and QLinearMul: (A, its scale and zero, B, ...)."""
    return _one(_broadcast([given[0].shape, given[3].shape]))


def _last(node: Node, shape: Shape) -> Shape:
    """``shape`` with its channels second, where the operator keeps them last."""
    return (shape[0], shape[-1], *shape[1:-1]) if node.attributes.get("channels_last") else shape


def _back(node: Node, shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1]) if node.attributes.get("channels_last") else shape


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
        return _one(_back(node, shape), math.prod(shape) * max(1, math.prod(w[1:])))

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
    return _one((x[0], w[1] * groups, *wide), math.prod(x) * math.prod(w[1:]))


def _pool(node: Node, given: list[Value]) -> Found:
    x = _last(node, given[0].shape)
    kernel = node.attributes["kernel_shape"]
    shape = (*x[:2], *_window(node, x[2:], kernel))
    return [Value(_back(node, shape)), Value(_back(node, shape))][: len(node.outputs)], math.prod(shape) * math.prod(
        kernel
    )


def _whole_pool(node: Node, given: list[Value]) -> Found:
    x = _last(node, given[0].shape)
    return _one(_back(node, (*x[:2], *[1] * (len(x) - 2))), given[0].count)


def _product(first: int, second: int) -> Rule:
    """A matrix product of the inputs at these places."""

    def rule(node: Node, given: list[Value]) -> Found:
        a, b = given[first].shape, given[second].shape
        if node.attributes.get("transA"):
            a = (*a[:-2], a[-1], a[-2])
        if node.attributes.get("transB"):
            b = (*b[:-2], b[-1], b[-2])
        left, right = a if len(a) > 1 else (1, *a), b if len(b) > 1 else (*b, 1)
        if left[-1] != right[-2]:
            raise ValueError(f"{a} times {b}")
        shape = (*_broadcast([left[:-2], right[:-2]]), *([left[-2]] if len(a) > 1 else []))
        shape = (*shape, *([right[-1]] if len(b) > 1 else []))
        return _one(shape, math.prod(shape) * left[-1])

    return rule


def _named(node: Node, given: list[Value]) -> Found:
    """Sums of products by the names of dimensions."""
    left, _, out = node.attributes["equation"].decode().replace(" ", "").partition("->")
    sizes = dict[str, int]()
    for names, value in zip(left.split(","), given, strict=True):
        for name, size in zip(names, value.shape, strict=True):
            if not name.isalpha() or sizes.setdefault(name, size) != size:
                raise ValueError(f"{left} of {[one.shape for one in given]}")
    return _one([sizes[name] for name in out], math.prod(sizes.values()))


def _reshape(node: Node, given: list[Value]) -> Found:
    asked, x = _ints(given[1]), given[0]
    if not node.attributes.get("allowzero"):
        asked = [x.shape[i] if size == 0 else size for i, size in enumerate(asked)]
    if asked.count(-1) == 1:
        rest = math.prod(size for size in asked if size != -1)
        asked = [x.count // rest if size == -1 else size for size in asked]
    if math.prod(asked) != x.count:
        raise ValueError(f"{x.shape} as {asked}")
    return _one(asked, 0, x.numbers)


def _flatten(node: Node, given: list[Value]) -> Found:
    x, axis = given[0].shape, node.attributes.get("axis", 1)
    return _one((math.prod(x[:axis]), math.prod(x[axis:])))


def _transpose(node: Node, given: list[Value]) -> Found:
    x = given[0].shape
    order = node.attributes.get("perm") or list(range(len(x)))[::-1]
    if sorted(order) != list(range(len(x))):
        raise ValueError(f"order {order}")
    return _one([x[i] for i in order])


def _concat(node: Node, given: list[Value]) -> Found:
    if node.kind == "QLinearConcat":
        given = given[2::3]
    axis = node.attributes["axis"]
    shape = list(given[0].shape)
    for other in given:
        rest = list(other.shape)
        rest[axis] = shape[axis]
        if rest != shape:
            raise ValueError("parts of different shapes")
    shape[axis] = sum(value.shape[axis] for value in given)
    numbers = None
    if len(shape) == 1 and all(value.numbers is not None for value in given):
        numbers = tuple(n for value in given for n in value.numbers or ())
    return _one(shape, 0, numbers)


def _split(node: Node, given: list[Value]) -> Found:
    x, axis = list(given[0].shape), node.attributes.get("axis", 0)
    sizes = _list(node, given, "split", 1)
    if sizes is None:
        parts = len(node.outputs)
        each = -(-x[axis] // parts)
        sizes = [min(each, x[axis] - i * each) for i in range(parts)]
    if sum(sizes) != x[axis]:
        raise ValueError(f"parts {sizes} of {x[axis]}")
    out = []
    for size in sizes:
        x[axis] = size
        out.append(Value(tuple(x)))
    return out, 0


def _squeeze(node: Node, given: list[Value]) -> Found:
    x, axes = given[0].shape, _list(node, given, "axes", 1)
    gone = {i for i, size in enumerate(x) if size == 1} if axes is None else {axis % len(x) for axis in axes}
    if any(x[i] != 1 for i in gone):
        raise ValueError(f"axes {axes} of {x}")
    return _one([size for i, size in enumerate(x) if i not in gone], 0, given[0].numbers)


def _unsqueeze(node: Node, given: list[Value]) -> Found:
    axes = _list(node, given, "axes", 1) or []
    if len(axes) > 8:
        raise ValueError(f"{len(axes)} axes")
    shape, rank = list(given[0].shape), len(given[0].shape) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        shape.insert(axis, 1)
    return _one(shape, 0, given[0].numbers)


def _reduce(node: Node, given: list[Value]) -> Found:
    x, axes = given[0].shape, _list(node, given, "axes", 1)
    gone = set(range(len(x))) if not axes else {axis % len(x) for axis in axes}
    keep = node.attributes.get("keepdims", 1)
    return _one([1 if i in gone else n for i, n in enumerate(x) if keep or i not in gone], given[0].count)


def _chosen(node: Node, given: list[Value]) -> Found:
    """ArgMax and ArgMin."""
    x, axis = list(given[0].shape), node.attributes.get("axis", 0)
    x[axis] = 1
    if not node.attributes.get("keepdims", 1):
        del x[axis]
    return _one(x, given[0].count)


def _gather(node: Node, given: list[Value]) -> Found:
    x, at = given[0], given[1]
    axis = node.attributes.get("axis", 0) % len(x.shape)
    numbers = None
    if len(x.shape) == 1 and x.numbers is not None and at.numbers is not None:
        numbers = tuple(x.numbers[int(i)] for i in at.numbers)
    return _one((*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]), 0, numbers)


def _gather_nd(node: Node, given: list[Value]) -> Found:
    """Pieces at places that are told by several numbers each, as maps between places are read."""
    x, at, beside = given[0].shape, given[1].shape, node.attributes.get("batch_dims", 0)
    return _one((*at[:-1], *x[beside + at[-1] :]))


def _gather_elements(node: Node, given: list[Value]) -> Found:
    return _one(given[1].shape)


def _in_squares(node: Node, given: list[Value]) -> Found:
    (batch, channels, high, wide), by = given[0].shape, node.attributes["blocksize"]
    return _one((batch, channels // by**2, high * by, wide * by))


def _slice(node: Node, given: list[Value]) -> Found:
    x = list(given[0].shape)
    starts, ends = _list(node, given, "starts", 1) or [], _list(node, given, "ends", 2) or []
    axes = _list(node, given, "axes", 3) or list(range(len(starts)))
    steps = _list(node, given, "steps", 4) or [1] * len(starts)
    numbers = given[0].numbers
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        kept = range(x[axis])[slice(start, end, step)]
        if numbers is not None:
            numbers = numbers[slice(start, end, step)] if len(x) == 1 else None
        x[axis] = len(kept)
    return _one(x, 0, numbers)


def _pad(node: Node, given: list[Value]) -> Found:
    x, pads = list(given[0].shape), _list(node, given, "pads", 1) or []
    axes = _ints(given[3]) if len(given) > 3 and node.inputs[3] else list(range(len(x)))
    if len(pads) != 2 * len(axes):
        raise ValueError(f"{len(pads)} pads for {len(axes)} axes")
    for i, axis in enumerate(axes):
        x[axis] += pads[i] + pads[i + len(axes)]
    return _one(x)


def _resize(node: Node, given: list[Value]) -> Found:
    x = given[0].shape
    if len(given) > 3 and node.inputs[3]:
        shape = _ints(given[3])
    else:
        place = 1 if node.kind == "Upsample" else 2
        scales = node.attributes.get("scales") if node.domain.endswith("nchwc") else _numbers(given[place])
        if not scales or len(scales) != len(x) or not all(0 < scale <= 1 << 24 for scale in scales):
            raise ValueError("scales that are none")
        shape = [math.floor(size * scale) for size, scale in zip(x, scales, strict=True)]
    if len(shape) != len(x):
        raise ValueError(f"{x} as {shape}")
    return _one(shape, 16 * math.prod(shape))


def _expand(node: Node, given: list[Value]) -> Found:
    return _one(_broadcast([given[0].shape, tuple(_ints(given[1]))]))


def _tile(node: Node, given: list[Value]) -> Found:
    return _one([size * times for size, times in zip(given[0].shape, _ints(given[1]), strict=True)])


def _filled(node: Node, given: list[Value]) -> Found:
    return _one(_ints(given[0]))


def _shape_of(node: Node, given: list[Value]) -> Found:
    sizes = given[0].shape[slice(node.attributes.get("start", 0), node.attributes.get("end"))]
    return _one((len(sizes),), 0, tuple(sizes))


def _range(node: Node, given: list[Value]) -> Found:
    start, limit, delta = (_numbers(value)[0] for value in given)
    count = max(0, math.ceil((limit - start) / delta))
    whole = all(isinstance(n, int) for n in (start, limit, delta))
    numbers = tuple(range(int(start), int(limit), int(delta))) if whole and count <= KNOWN_VALUES else None
    return _one((count,), 0, numbers)


def _constant(node: Node, given: list[Value]) -> Found:
    value = node.attributes.get("value")
    if not isinstance(value, Value):
        raise Unknown("a constant of this kind is not written by talaria")
    return [value], 0


def _recurrent(node: Node, given: list[Value]) -> Found:
    (time, batch, size), (ways, gates, _) = given[0].shape, given[1].shape
    hidden = node.attributes["hidden_size"]
    if node.attributes.get("layout"):
        raise Unknown("its batch comes first")
    end = Value((ways, batch, hidden))
    return [Value((time, ways, batch, hidden)), end, end], time * batch * ways * gates * (size + hidden)


def _reorder_in(node: Node, given: list[Value]) -> Found:
    x = _last(node, given[0].shape)
    return _one((x[0], -(-x[1] // 32) * 32, *x[2:]))


def _reorder_out(node: Node, given: list[Value]) -> Found:
    x = given[0].shape
    return _one(_back(node, (x[0], node.attributes.get("channels", x[1]), *x[2:])))


def _top(node: Node, given: list[Value]) -> Found:
    x, axis = list(given[0].shape), node.attributes.get("axis", -1)
    x[axis] = min(x[axis], _ints(given[1])[0])
    return [Value(tuple(x)), Value(tuple(x))], 32 * given[0].count


def _group(rule: Rule, names: str) -> dict[tuple[str, str], Rule]:
    """The operators, of ONNX itself or of ``domain:``, that keep this rule."""
    out = {}
    for name in names.split():
        domain, _, kind = name.rpartition(":")
        out[{"ms": "com.microsoft", "nchwc": "com.microsoft.nchwc", "": ""}[domain], kind] = rule
    return out


_RULES: dict[tuple[str, str], Rule] = {
    **_group(
        _alike,
        "Abs Acos Asin Atan Cast Ceil Celu Clip Cos CumSum DequantizeLinear Elu Erf Exp Floor Gelu "
        "HardSigmoid HardSwish Hardmax Identity IsInf IsNaN LeakyRelu Log LogSoftmax LRN LpNormalization "
        "MeanVarianceNormalization Mish Neg Not QuantizeLinear Reciprocal Relu Round Selu Sigmoid Sign Sin "
        "Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Trilu ms:BiasGelu ms:DequantizeLinear "
        "ms:FastGelu ms:Gelu ms:QLinearLeakyRelu ms:QLinearSigmoid ms:QLinearSoftmax ms:QuantizeLinear "
        "ms:QuickGelu ms:BiasSoftmax ms:BiasAdd ms:BiasSplitGelu",
    ),
    **_group(
        _same,
        "BatchNormalization Dropout DynamicQuantizeLinear GroupNormalization InstanceNormalization "
        "LayerNormalization ms:GroupNorm ms:SkipLayerNormalization SimplifiedLayerNormalization "
        "ms:SkipSimplifiedLayerNormalization",
    ),
    **_group(
        _together,
        "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or PRelu Pow Sub Sum Where Xor",
    ),
    **_group(_quantized_pair, "ms:QLinearAdd ms:QLinearMul"),
    **_group(_convolve(1), "Conv ConvInteger ms:FusedConv ms:NhwcFusedConv nchwc:Conv"),
    **_group(_convolve_back, "ConvTranspose"),
    **_group(_convolve(3), "QLinearConv ms:QLinearConv"),
    **_group(
        _pool,
        "AveragePool LpPool MaxPool ms:NhwcMaxPool ms:QLinearAveragePool nchwc:AveragePool nchwc:MaxPool",
    ),
    **_group(
        _whole_pool,
        "GlobalAveragePool GlobalLpPool GlobalMaxPool ms:QLinearGlobalAveragePool nchwc:GlobalAveragePool "
        "nchwc:GlobalMaxPool",
    ),
    **_group(
        _product(0, 1),
        "Gemm MatMul MatMulInteger ms:DynamicQuantizeMatMul ms:FusedGemm ms:FusedMatMul "
        "ms:MatMulIntegerToFloat ms:TransposeMatMul",
    ),
    **_group(_named, "Einsum"),
    **_group(_product(0, 3), "QLinearMatMul ms:QGemm"),
    **_group(
        _reduce,
        "ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare",
    ),
    **_group(_chosen, "ArgMax ArgMin"),
    **_group(_resize, "Resize Upsample nchwc:Upsample"),
    **_group(_recurrent, "GRU LSTM RNN"),
    **_group(_concat, "Concat ms:QLinearConcat"),
    **_group(_reorder_in, "nchwc:ReorderInput"),
    **_group(_reorder_out, "nchwc:ReorderOutput"),
    **_group(_reshape, "Reshape"),
    **_group(_flatten, "Flatten"),
    **_group(_transpose, "Transpose"),
    **_group(_split, "Split"),
    **_group(_squeeze, "Squeeze"),
    **_group(_unsqueeze, "Unsqueeze"),
    **_group(_gather, "Gather"),
    **_group(_gather_nd, "GatherND"),
    **_group(_gather_elements, "GatherElements"),
    **_group(_in_squares, "DepthToSpace"),
    **_group(_slice, "Slice"),
    **_group(_pad, "Pad"),
    **_group(_expand, "Expand"),
    **_group(_tile, "Tile"),
    **_group(_filled, "ConstantOfShape"),
    **_group(_shape_of, "Shape"),
    **_group(_range, "Range"),
    **_group(_constant, "Constant"),
    **_group(_top, "TopK"),
}
