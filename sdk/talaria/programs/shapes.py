"""What a program makes and computes, worked out from sizes alone before ONNX Runtime sees it.

Each operator that a program may use has one rule here, and this table is the allow list. A rule gives the shape of the
output and the multiply-adds; small whole numbers (shapes that are computed) are followed by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from talaria.errors import ModelError, TooLarge, WireError
from talaria.programs.graph import BOOL, FLOAT, INT, Graph, Node
from talaria.tensors import Array

Shape = tuple[int, ...]
_BYTES = {FLOAT: 4, INT: 8, BOOL: 1}
_FEW = 64
"""Most whole numbers that are followed by value: shapes, axes, pads."""
_PLACES = 1 << 16
"""Most of a sum or product of such numbers: the places that a convolution looks up."""


@dataclass(frozen=True)
class Value:
    """A value by its shape and dtype; ``numbers`` where they are few, whole and known."""

    shape: Shape
    dtype: str = FLOAT
    numbers: Array | None = None

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return math.prod(self.shape) * _BYTES[self.dtype]

    @property
    def forgotten(self) -> Value:
        """Itself without its numbers, if they are many."""
        many = self.numbers is not None and self.numbers.size > _FEW
        return Value(self.shape, self.dtype) if many else self


@dataclass(frozen=True)
class Limits:
    """What a program may be and do; a file or a call beyond them is refused before anything is allocated."""

    file_bytes: int = 4 << 20
    nodes: int = 20_000
    memory_bytes: int = 1 << 30
    """Of the values that live at once in one step, each given back when it was last read; what is given to it, and
    constants with what follows from them, are not."""
    multiply_adds: int = 10**12


@dataclass(frozen=True)
class Cost:
    """What one step takes at given sizes."""

    memory_bytes: int
    multiply_adds: int
    outputs: Mapping[str, Value]


def measure(graph: Graph, given: Mapping[str, Value], limits: Limits) -> Cost:
    """The cost of one step on inputs of these shapes.

    Raises :class:`~talaria.errors.WireError` for an operator that no program uses and for shapes that do not fit each
    other, :class:`~talaria.errors.TooLarge` beyond ``limits``, and :class:`~talaria.errors.ModelError` for an input of
    a dtype that no program has.
    """
    if odd := [f"{name!r} is {one.dtype}" for name, one in given.items() if one.dtype not in _BYTES]:
        raise ModelError(f"program: {odd[0]}; convert it to float32, or whole numbers to int64")
    values = {name: Value(c.shape, c.dtype.name, _whole(c)) for name, c in graph.constants.items()} | dict(given)
    last = {name: place for place, node in enumerate(graph.nodes) for name in node.inputs}
    last |= {port.name: len(graph.nodes) for port in graph.outputs}
    live = most = sum(value.bytes for value in values.values())
    work, known = 0, {*graph.constants}
    for place, node in enumerate(graph.nodes):
        rule = RULES.get(node.kind)
        if rule is None:
            raise WireError(f"program: uses the operator {node.kind[:40]!r}, which no program needs; build it again")
        odd = [name for name, _ in node.attributes if name not in _ATTRIBUTES.get(node.kind, ())]
        axis = node.get("axis", 0)
        if odd or not isinstance(axis, int) or axis < 0:
            raise WireError(f"program: {node.kind} with {odd or 'such an axis'} is unknown; build it again")
        try:
            found, extra = rule(node, [values[name] for name in node.inputs])
            made = found if isinstance(found, tuple) else (found,)
            named = list(zip(node.outputs, made, strict=True))
        except (KeyError, ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError) as why:
            raise WireError(f"program: {node.kind} does not fit its inputs ({why}); build it again") from None
        # What follows from the file alone, or from sizes, ONNX Runtime works out when it loads it, and holds all of it.
        if all(name in known or values[name].numbers is not None for name in node.inputs):
            known |= {*node.outputs}
        for name, out in named:
            if name in values or min(out.shape, default=1) < 1:
                raise WireError(f"program: {node.kind} gives {name[:40]!r} twice or of no size; build it again")
            values[name] = out
            live, work = live + out.bytes, work + math.prod(out.shape)
        most, work = max(most, live), work + extra
        for name in {*node.inputs, *node.outputs}:
            if last.get(name, place) == place:
                live -= 0 if name in known or name in given else values[name].bytes
                values[name] = values[name].forgotten
        if most > limits.memory_bytes or work > limits.multiply_adds:
            raise TooLarge(
                f"program: one step would take {most >> 20} MiB and {work:.1e} multiply-adds, limits are "
                f"{limits.memory_bytes >> 20} and {limits.multiply_adds:.1e}; give a smaller batch"
            )
    return Cost(most, work, values)


Found = tuple[Value | tuple[Value, ...], int]
Rule = Callable[[Node, list[Value]], Found]


def _whole(array: Array) -> Array | None:
    """Numbers that stand in the file, however many."""
    return array if array.dtype == np.int64 else None


def _numbers(value: Value) -> list[int]:
    if value.numbers is None or value.numbers.ndim > 1:
        raise ValueError("a shape that is not known")
    return [int(one) for one in np.atleast_1d(value.numbers)]


def _joined(values: list[Value]) -> Shape:
    return tuple(int(size) for size in np.broadcast_shapes(*(value.shape for value in values)))


def _alike(node: Node, given: list[Value]) -> Found:
    """One input, and an output like it."""
    (x,) = given
    return Value(x.shape, x.dtype), 0


def _together(node: Node, given: list[Value]) -> Found:
    a, b = given
    if a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} with {b.dtype}")
    shape = _joined(given)
    if a.numbers is None or b.numbers is None or node.kind not in ("Add", "Mul"):
        return Value(shape, a.dtype), 0
    if math.prod(shape) > _PLACES:
        raise ValueError(f"{shape} known numbers, most are {_PLACES}")
    return Value(shape, a.dtype, a.numbers + b.numbers if node.kind == "Add" else a.numbers * b.numbers), 0


def _compared(node: Node, given: list[Value]) -> Found:
    a, b = given
    if a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} with {b.dtype}")
    return Value(_joined(given), BOOL), 0


def _where(node: Node, given: list[Value]) -> Found:
    _, a, b = given
    if given[0].dtype != BOOL or a.dtype != b.dtype:
        raise ValueError("a choice between other types")
    return Value(_joined(given), a.dtype), 0


def _cast(node: Node, given: list[Value]) -> Found:
    return Value(given[0].shape, {1: FLOAT, 7: INT, 9: BOOL}[node.get("to")]), 0


def _clip(node: Node, given: list[Value]) -> Found:
    if any(value.shape for value in given[1:]):
        raise ValueError("bounds that are no numbers")
    return Value(given[0].shape), 0


def _product(node: Node, given: list[Value]) -> Found:
    a, b = given[0].shape, given[1].shape
    if node.kind == "Gemm":
        if len(a) != 2 or len(b) != 2:
            raise ValueError(f"{a} times {b}")
        a = a[::-1] if node.get("transA") else a
        b = b[::-1] if node.get("transB") else b
    if not a or len(b) < 2 or a[-1] != b[-2]:
        raise ValueError(f"{a} times {b}")
    shape = (*np.broadcast_shapes(a[:-2], b[:-2]), *a[-2:-1], b[-1])
    if len(given) > 2 and _joined([Value(shape), given[2]]) != shape:
        raise ValueError(f"{shape} plus {given[2].shape}")
    return Value(shape), math.prod(shape) * a[-1]


def _reduce(node: Node, given: list[Value]) -> Found:
    x = given[0].shape
    gone = {range(len(x))[axis] for axis in _numbers(given[1])}
    keep = node.get("keepdims", 1)
    shape = tuple(1 if i in gone else n for i, n in enumerate(x) if keep or i not in gone)
    return Value(shape, given[0].dtype), math.prod(x)


def _reshape(node: Node, given: list[Value]) -> Found:
    x, asked = given[0], _numbers(given[1])
    asked = [x.shape[i] if size == 0 else size for i, size in enumerate(asked)]
    if asked.count(-1) == 1:
        rest = math.prod(size for size in asked if size != -1)
        asked = [math.prod(x.shape) // rest if size == -1 else size for size in asked]
    if min(asked, default=1) < 0 or math.prod(asked) != math.prod(x.shape):
        raise ValueError(f"{x.shape} as {asked}")
    return Value(tuple(asked), x.dtype), 0


def _unsqueeze(node: Node, given: list[Value]) -> Found:
    (axis,) = _numbers(given[1])
    shape = list(given[0].shape)
    if not 0 <= axis <= len(shape):
        raise ValueError(f"axis {axis}")
    shape.insert(axis, 1)
    return Value(tuple(shape), given[0].dtype), 0


def _transpose(node: Node, given: list[Value]) -> Found:
    x, order = given[0], node.get("perm")
    if sorted(order) != list(range(len(x.shape))):
        raise ValueError(f"order {order}")
    return Value(tuple(x.shape[i] for i in order), x.dtype), 0


def _slice(node: Node, given: list[Value]) -> Found:
    x, (starts, ends, axes, steps) = list(given[0].shape), map(_numbers, given[1:])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x[axis] = len(range(x[axis])[slice(start, end, step)])
    return Value(tuple(x), given[0].dtype), 0


def _concat(node: Node, given: list[Value]) -> Found:
    axis, shape = node.get("axis"), list(given[0].shape)
    for other in given:
        rest = [*other.shape]
        rest[axis] = shape[axis]
        if rest != shape or other.dtype != given[0].dtype:
            raise ValueError("parts of different shapes")
    shape[axis] = sum(value.shape[axis] for value in given)
    known = [value.numbers for value in given if value.numbers is not None]
    few = len(shape) == 1 and len(known) == len(given) and shape[0] <= _FEW
    return Value(tuple(shape), given[0].dtype, np.concatenate(known) if few else None), 0


def _pad(node: Node, given: list[Value]) -> Found:
    x, pads = given[0].shape, _numbers(given[1])
    if len(pads) != 2 * len(x) or min(pads, default=0) < 0:
        raise ValueError(f"pads {pads}")
    return Value(tuple(n + pads[i] + pads[i + len(x)] for i, n in enumerate(x))), 0


def _gather(node: Node, given: list[Value]) -> Found:
    x, axis = given[0], node.get("axis", 0)
    if given[1].numbers is None:  # places that a batch brings: see :mod:`talaria.programs.lookups`
        if given[1].dtype != INT:
            raise ValueError("places that are no whole numbers")
        return Value((*x.shape[:axis], *given[1].shape, *x.shape[axis + 1 :]), x.dtype), 0
    at = given[1].numbers
    if not 0 <= at.min() <= at.max() < x.shape[axis]:
        raise ValueError(f"places {at.min()}..{at.max()} of {x.shape[axis]}")
    return Value((*x.shape[:axis], *given[1].shape, *x.shape[axis + 1 :]), x.dtype), 0


def _scattered(node: Node, given: list[Value]) -> Found:
    """Rows that are added to those of a table, at places that a batch brings."""
    table, at, rows = given
    fits = at.dtype == INT and at.shape == (*rows.shape[:1], 1) and table.shape[1:] == rows.shape[1:]
    if at.numbers is not None and not 0 <= at.numbers.min() <= at.numbers.max() < table.shape[0]:
        raise ValueError("places beyond the table")
    if not fits or table.dtype != FLOAT or rows.dtype != FLOAT or node.get("reduction") != "add":
        raise ValueError(f"{rows.shape} at {at.shape} in {table.shape}")
    return Value(table.shape), math.prod(rows.shape)


def _flatten(node: Node, given: list[Value]) -> Found:
    x, axis = given[0], node.get("axis")
    if not 0 < axis < len(x.shape):
        raise ValueError(f"axis {axis}")
    return Value((math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), x.dtype), 0


def _softmax(node: Node, given: list[Value]) -> Found:
    if not 0 <= node.get("axis") < len(given[0].shape):
        raise ValueError(f"axis {node.get('axis')}")
    return _alike(node, given)


def _normalized(node: Node, given: list[Value]) -> Found:
    """Over the last dimension: the values, their means, and one over their deviations."""
    x, *scales = given
    if not x.shape or node.get("axis") != len(x.shape) - 1 or any(one.shape != x.shape[-1:] for one in scales):
        raise ValueError(f"{x.shape} scaled by {[one.shape for one in scales]}")
    if any(one.dtype != FLOAT for one in given):
        raise ValueError("values that are no floats")
    each = Value((*x.shape[:-1], 1))
    return (Value(x.shape), each, each), 3 * math.prod(x.shape)


def _split(node: Node, given: list[Value]) -> Found:
    x, axis = given[0], node.get("axis")
    many = len(node.outputs)
    if node.get("num_outputs") != (many if len(given) == 1 else None):
        raise ValueError(f"{many} parts that are not as many as it says")
    sizes = _numbers(given[1]) if len(given) > 1 else [x.shape[axis] // many] * many
    if sum(sizes) != x.shape[axis] or min(sizes) < 1:
        raise ValueError(f"{x.shape} in {sizes}")
    return tuple(Value((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype) for size in sizes), 0


def _expand(node: Node, given: list[Value]) -> Found:
    return Value(_joined([given[0], Value(tuple(_numbers(given[1])))]), given[0].dtype), 0


def _shape_of(node: Node, given: list[Value]) -> Found:
    sizes = given[0].shape[slice(node.get("start", 0), node.get("end"))]
    return Value((len(sizes),), INT, np.array(sizes, np.int64)), 0


def _one_hot(node: Node, given: list[Value]) -> Found:
    (depth,) = _numbers(given[1])
    if given[0].dtype != INT or given[2].shape != (2,) or depth < 1:
        raise ValueError("labels that are none")
    return Value((*given[0].shape, depth)), 0


def _pool(node: Node, given: list[Value]) -> Found:
    x, kernel, stride = given[0].shape, node.get("kernel_shape"), node.get("strides")
    pads = node.get("pads", (0,) * 2 * len(kernel))
    if (
        len(kernel) != len(x) - 2
        or min((*kernel, *stride)) < 1
        or any(not 0 <= p < k for p, k in zip(pads, kernel * 2, strict=True))
    ):
        raise ValueError(f"windows {kernel}")
    out = [(n + pads[i] + pads[i + len(kernel)] - kernel[i]) // stride[i] + 1 for i, n in enumerate(x[2:])]
    return Value((*x[:2], *out)), math.prod((*x[:2], *out, *kernel))


def _convolved(node: Node, given: list[Value]) -> Found:
    x, w, bias = given[0].shape, given[1].shape, given[2:]
    groups, kernel, stride, pads = (node.get(name) for name in ("group", "kernel_shape", "strides", "pads"))
    holes = node.get("dilations", (1,) * len(kernel))
    fits = len(x) == len(w) and kernel == w[2:] and len(stride) == len(kernel) and len(pads) == 2 * len(kernel)
    if not fits or groups < 1 or x[1] != groups * w[1] or w[0] % groups or min(stride) < 1 or min(pads) < 0:
        raise ValueError(f"{x} with {w} in {groups} groups")
    if len(holes) != len(kernel) or min(holes) < 1:
        raise ValueError(f"holes {holes}")
    if bias and bias[0].shape != (w[0],):
        raise ValueError(f"{bias[0].shape} beside {w}")
    wide = [(k - 1) * hole + 1 for k, hole in zip(kernel, holes, strict=True)]
    out = [(n + pads[i] + pads[i + len(kernel)] - wide[i]) // stride[i] + 1 for i, n in enumerate(x[2:])]
    return Value((x[0], w[0], *out)), math.prod((x[0], *out)) * math.prod(w)


def _transposed(node: Node, given: list[Value]) -> Found:
    x, w = given[0].shape, given[1].shape
    pads, stride, groups = node.get("pads"), node.get("strides"), node.get("group", 1)
    more = node.get("output_padding", (0,) * (len(w) - 2))
    sizes = {len(x) - 2, len(w) - 2, len(stride), len(more), len(pads) // 2}
    if len(sizes) > 1 or x[1] != w[0] or node.get("kernel_shape") != w[2:] or groups < 1 or w[0] % groups:
        raise ValueError(f"{x} with {w}")
    if min(stride) < 1 or min(pads) < 0 or any(not 0 <= one < s for one, s in zip(more, stride, strict=True)):
        raise ValueError(f"steps {stride}, edges {pads} and {more}")
    rest = zip(x[2:], w[2:], stride, pads, pads[len(w) - 2 :], more, strict=False)
    out = [(n - 1) * s + k - low - high + extra for n, k, s, low, high, extra in rest]
    return Value((x[0], w[1] * groups, *out)), math.prod(x) * math.prod(w[1:])


_ALIKE = (
    "Ceil",
    "Cos",
    "Erf",
    "Exp",
    "Floor",
    "HardSigmoid",
    "Identity",
    "Log",
    "Neg",
    "Not",
    "Reciprocal",
    "Relu",
    "Round",
    "Sigmoid",
    "Sign",
    "Sin",
    "Softplus",
    "Sqrt",
    "Tanh",
)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ALIKE, _alike),
    **dict.fromkeys(("Add", "And", "Div", "Max", "Min", "Mul", "Pow", "Sub"), _together),
    **dict.fromkeys(("Equal", "Greater", "Less"), _compared),
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    **dict.fromkeys(("LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceSum"), _reduce),
    **dict.fromkeys(("AveragePool", "MaxPool"), _pool),
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _convolved,
    "ConvTranspose": _transposed,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "LayerNormalization": _normalized,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "ScatterND": _scattered,
    "Shape": _shape_of,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
"""Every operator that a program may use."""

_POOL = ("kernel_shape", "pads", "strides")
_ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "AveragePool": ("count_include_pad", *_POOL),
    "Cast": ("to",),
    "Concat": ("axis",),
    "Conv": ("dilations", "group", *_POOL),
    "ConvTranspose": ("group", "output_padding", *_POOL),
    "Flatten": ("axis",),
    "Gather": ("axis",),
    "Gemm": ("beta", "transA", "transB"),
    "HardSigmoid": ("alpha", "beta"),
    "LayerNormalization": ("axis", "epsilon"),
    "LogSoftmax": ("axis",),
    "MaxPool": _POOL,
    "ReduceMax": ("keepdims",),
    "ReduceMean": ("keepdims",),
    "ReduceSum": ("keepdims",),
    "ScatterND": ("reduction",),
    "Shape": ("end", "start"),
    "Softmax": ("axis",),
    "Split": ("axis", "num_outputs"),
    "Transpose": ("perm",),
}
