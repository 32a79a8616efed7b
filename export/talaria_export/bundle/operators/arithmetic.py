"""Operators that compute: number by number, products of matrices, recurrent layers, and sums over axes."""

from __future__ import annotations

import math
from collections.abc import Callable

from talaria.einsum import named
from talaria_export.bundle.operators.rule import (
    KNOWN_VALUES,
    Found,
    Node,
    Number,
    Rule,
    Rules,
    Unknown,
    Value,
    broadcast,
    group,
    ints,
    listed,
    single,
)


def _alike(node: Node, given: list[Value]) -> Found:
    return single(given[0].shape, 0, given[0].numbers if node.kind in ("Identity", "Cast") else None)


def _same(node: Node, given: list[Value]) -> Found:
    """All outputs as large as the first input: normalizations, and the three of dynamic quantization."""
    small = Value(())
    return [Value(given[0].shape), small, small], 8 * given[0].count


_FOLDS: dict[str, Callable[[Number, Number], Number]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: int(a / b) if isinstance(a, int) and isinstance(b, int) else a / b,
}


def _together(node: Node, given: list[Value]) -> Found:
    shape = broadcast([value.shape for value in given])
    fold = _FOLDS.get(node.kind)
    if fold is None or len(given) != 2 or math.prod(shape) > KNOWN_VALUES:
        return single(shape)
    a, b = (value.numbers for value in given)
    if a is None or b is None or not {len(a), len(b)} <= {1, math.prod(shape)}:
        return single(shape)
    count = math.prod(shape)
    pairs = zip(a * (count if len(a) == 1 else 1), b * (count if len(b) == 1 else 1), strict=True)
    numbers = tuple(fold(x, y) for x, y in pairs)
    if any(isinstance(n, int) and abs(n) >= 1 << 63 for n in numbers):
        raise OverflowError("a number beyond 64 bits")
    return single(shape, 0, numbers)


def _quantized_pair(node: Node, given: list[Value]) -> Found:
    """QLinearAdd and QLinearMul: (A, its scale and zero, B, ...)."""
    return single(broadcast([given[0].shape, given[3].shape]))


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
        shape = (*broadcast([left[:-2], right[:-2]]), *([left[-2]] if len(a) > 1 else []))
        shape = (*shape, *([right[-1]] if len(b) > 1 else []))
        return single(shape, math.prod(shape) * left[-1])

    return rule


def _named(node: Node, given: list[Value]) -> Found:
    """Sums of products by the names of dimensions."""
    equation = named(node.attributes["equation"].decode(), [len(one.shape) for one in given])
    left, _, out = equation.partition("->")
    sizes = dict[str, int]()
    for names, value in zip(left.split(","), given, strict=True):
        for name, size in zip(names, value.shape, strict=True):
            if not name.isalpha() or sizes.setdefault(name, size) != size:
                raise ValueError(f"{left} of {[one.shape for one in given]}")
    return single([sizes[name] for name in out], math.prod(sizes.values()))


def _recurrent(node: Node, given: list[Value]) -> Found:
    (time, batch, size), (ways, gates, _) = given[0].shape, given[1].shape
    hidden = node.attributes["hidden_size"]
    if node.attributes.get("layout"):
        raise Unknown("its batch comes first")
    end = Value((ways, batch, hidden))
    return [Value((time, ways, batch, hidden)), end, end], time * batch * ways * gates * (size + hidden)


def _reduce(node: Node, given: list[Value]) -> Found:
    x, axes = given[0].shape, listed(node, given, "axes", 1)
    gone = set(range(len(x))) if not axes else {axis % len(x) for axis in axes}
    keep = node.attributes.get("keepdims", 1)
    return single([1 if i in gone else n for i, n in enumerate(x) if keep or i not in gone], given[0].count)


def _chosen(node: Node, given: list[Value]) -> Found:
    """ArgMax and ArgMin."""
    x, axis = list(given[0].shape), node.attributes.get("axis", 0)
    x[axis] = 1
    if not node.attributes.get("keepdims", 1):
        del x[axis]
    return single(x, given[0].count)


def _top(node: Node, given: list[Value]) -> Found:
    x, axis = list(given[0].shape), node.attributes.get("axis", -1)
    x[axis] = min(x[axis], ints(given[1])[0])
    return [Value(tuple(x)), Value(tuple(x))], 32 * given[0].count


RULES: Rules = {
    **group(
        _alike,
        "Abs Acos Asin Atan Cast Ceil Celu Clip Cos CumSum DequantizeLinear Elu Erf Exp Floor Gelu "
        "HardSigmoid HardSwish Hardmax Identity IsInf IsNaN LeakyRelu Log LogSoftmax LRN LpNormalization "
        "MeanVarianceNormalization Mish Neg Not QuantizeLinear Reciprocal Relu Round Selu Sigmoid Sign Sin "
        "Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Trilu ms:BiasGelu ms:DequantizeLinear "
        "ms:FastGelu ms:Gelu ms:QLinearLeakyRelu ms:QLinearSigmoid ms:QLinearSoftmax ms:QuantizeLinear "
        "ms:QuickGelu ms:BiasSoftmax ms:BiasAdd ms:BiasSplitGelu",
    ),
    **group(
        _same,
        "BatchNormalization Dropout DynamicQuantizeLinear GroupNormalization InstanceNormalization "
        "LayerNormalization ms:GroupNorm ms:SkipLayerNormalization SimplifiedLayerNormalization "
        "ms:SkipSimplifiedLayerNormalization",
    ),
    **group(
        _together,
        "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or PRelu Pow Sub Sum Where Xor",
    ),
    **group(_quantized_pair, "ms:QLinearAdd ms:QLinearMul"),
    **group(
        _product(0, 1),
        "Gemm MatMul MatMulInteger ms:DynamicQuantizeMatMul ms:FusedGemm ms:FusedMatMul "
        "ms:MatMulIntegerToFloat ms:TransposeMatMul",
    ),
    **group(_named, "Einsum"),
    **group(_product(0, 3), "QLinearMatMul ms:QGemm"),
    **group(
        _reduce,
        "ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare",
    ),
    **group(_chosen, "ArgMax ArgMin"),
    **group(_recurrent, "GRU LSTM RNN"),
    **group(_top, "TopK"),
}
