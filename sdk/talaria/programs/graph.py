"""An ONNX graph as plain values, and a draft that grows one: equal operators are made once, unread ones fall away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import numpy as np

from talaria.tensors import Array

Attribute = Union[int, float, tuple[int, ...], str, "Graph"]
"""What an operator's attribute may be here; no tensor, and a graph only in what is made where it runs
(:mod:`talaria.programs.follow`)."""
Size = int | str
"""A size that is known, or one that each call decides: a name, a name times a number (a flattened map, half of one), or
a sum of these and of ``#`` numbers (maps side by side), such as ``conv2*8+#4``: layers may be named by numbers."""

FLOAT, INT, BOOL = "float32", "int64", "bool"

MOVES = ("Flatten", "Identity", "Reshape", "Slice", "Transpose", "Unsqueeze")
"""Operators that move the values of their first input, and change none."""

STEEP = 3e38
"""What a HardSigmoid multiplies with that is a step: it gives 0 for zero and 1 for what is above 1e-38."""
EDGE = 2.0**100
"""The same for a step anywhere: its products with a bound are exact, so that the bound itself gives 0."""


def size_of(label: Size, sizes: Mapping[str, int]) -> int:
    """A size as a number, by the sizes of its names. Raises KeyError for a name that is not among them, ValueError for
    what is no size."""
    if isinstance(label, int):
        return label
    if label in sizes:
        return sizes[label]
    if "+" in label:
        return sum(size_of(one, sizes) for one in label.split("+"))
    if label.startswith("#"):
        return int(label[1:])
    name, _, factor = label.rpartition("*")
    size = sizes[name] * float(factor)
    if not 0 < size < 2**53:
        raise ValueError(f"{label[:40]!r} is no size")
    return round(size)


def times(label: Size, factor: int) -> Size:
    """A size so many times."""
    if isinstance(label, int):
        return label * factor
    if factor == 1:
        return label
    return "+".join(_each(one, factor) for one in label.split("+"))


def _each(one: str, factor: int) -> str:
    if one.startswith("#"):
        return f"#{int(one[1:]) * factor}"
    name, star, before = one.rpartition("*")
    if not star:
        return f"{one}*{factor}"
    many = float(before) * factor
    return f"{name}*{round(many) if many.is_integer() else many}"


def added(labels: Sequence[Size]) -> Size:
    """The sum of sizes."""
    whole = all(isinstance(one, int) for one in labels)
    if whole:
        return sum(one for one in labels if isinstance(one, int))
    return "+".join(f"#{one}" if isinstance(one, int) else one for one in labels)


@dataclass(frozen=True)
class Port:
    """One input or output: its name, its dtype (``float32`` or ``int64``) and its sizes."""

    name: str
    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Node:
    """One operator of ONNX's default domain; ``attributes`` in the order of their names."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute ``name``, or ``default``."""
        return next((value for key, value in self.attributes if key == name), default)


@dataclass(frozen=True)
class Graph:
    """Operators in an order in which each finds its inputs made; ``constants`` are part of the file."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]


def held(graph: Graph, values: Mapping[str, Array]) -> Graph:
    """``graph`` with the inputs that ``values`` names as constants: ONNX Runtime then works out once what follows from
    them, folds BatchNorm into convolutions, and lays their weights out in blocks. Depthwise convolutions take the width
    of their weights, which a mask may have narrowed."""
    nodes = tuple(_as_wide(node, values) for node in graph.nodes)
    inputs = tuple(port for port in graph.inputs if port.name not in values)
    names = {port.name for port in graph.inputs}
    own = {name: value for name, value in values.items() if name in names}
    return Graph(inputs, graph.outputs, nodes, {**graph.constants, **own})


def _as_wide(node: Node, values: Mapping[str, Array]) -> Node:
    if node.kind != "Conv" or node.get("group", 1) == 1 or node.inputs[1] not in values:
        return node
    wide, inputs = values[node.inputs[1]].shape[:2]
    if inputs != 1 or wide % node.get("group") == 0:
        return node
    return replace(node, attributes=tuple((k, wide if k == "group" else v) for k, v in node.attributes))


@dataclass
class Draft:
    """A graph that is being written; each method gives the name of a value."""

    inputs: list[Port] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    _made: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    _maker: dict[str, Node] = field(default_factory=dict)
    _rows: set[str] = field(default_factory=set)

    def input(self, name: str, shape: Sequence[Size], dtype: str = FLOAT) -> str:
        """A value that each call brings."""
        self.inputs.append(Port(name, dtype, tuple(shape)))
        return name

    def has(self, name: str) -> bool:
        """Whether there is an input of this name."""
        return any(port.name == name for port in self.inputs)

    def constant(self, value: Any, dtype: str = FLOAT) -> str:
        """A value that stands in the file."""
        array = np.asarray(value, dtype)
        key = ("constant", array.tobytes(), array.dtype.str, array.shape)
        if key not in self._made:
            self._made[key] = (f"c{len(self.constants)}",)
            self.constants[self._made[key][0]] = array
        return self._made[key][0]

    def number(self, value: float | str, rank: int) -> str:
        """A number, constant or given, with as many dimensions as what it meets: where that ends in sizes of 1, ONNX
        Runtime takes forty times as long to meet a number without dimensions (1.01 against .022 ms for 144 x 576 x 1 x
        1). Matrices and vectors do not."""
        shape = (1,) * rank if rank > 2 else ()
        if isinstance(value, str):
            return self.reshape(value, *shape) if shape else value
        return self.constant(np.full(shape, value))

    def ints(self, *values: int) -> str:
        """A constant int64 vector: shapes, axes, pads."""
        return self.constant(values, INT)

    def op(self, kind: str, *inputs: str, **attributes: Attribute) -> str:
        """The one output of an operator; the same operator over the same inputs is made once."""
        return self.several(kind, 1, *inputs, **attributes)[0]

    def several(self, kind: str, many: int, *inputs: str, **attributes: Attribute) -> tuple[str, ...]:
        """The ``many`` outputs of an operator, likewise."""
        own = tuple(sorted(attributes.items()))
        key = (kind, inputs, own)
        if key not in self._made:
            first = f"v{len(self.nodes)}"
            node = Node(kind, inputs, (first, *(f"{first}.{i}" for i in range(1, many))), own)
            self.nodes.append(node)
            self._made[key] = node.outputs
            self._maker |= dict.fromkeys(node.outputs, node)
        return self._made[key]

    def whole(self, value: str) -> bool:
        """Whether a value is whole numbers: a cast, and what only moves one."""
        made = self._before_moves(value)
        return made is not None and made.kind == "Cast" and made.get("to") == 7

    def compared(self, value: str) -> bool:
        """Whether a value is 1 where something is so and 0 elsewhere."""
        made = self._before_moves(value)
        before = None if made is None or made.kind != "Cast" else self._maker.get(made.inputs[0])
        return before is not None and before.kind in ("Equal", "Greater", "Less", "Not")

    def places(self, value: str) -> bool:
        """Whether a value is numbers that each call brings, as they are, or stands in the file, as sums of such do."""
        while (made := self._maker.get(value)) is not None and made.kind in (*MOVES, "Cast"):
            value = made.inputs[0]
        return made is None or self._stands(value)

    def _stands(self, value: str) -> bool:
        made = self._maker.get(value)
        return value in self.constants or (
            made is not None and made.kind == "Add" and all(map(self._stands, made.inputs))
        )

    def _before_moves(self, value: str) -> Node | None:
        made = self._maker.get(value)
        while made is not None and made.kind in (*MOVES, "Expand"):
            made = self._maker.get(made.inputs[0])
        return made

    def reshape(self, value: str, *shape: int) -> str:
        """``value`` in another shape: 0 keeps a size, -1 is what remains."""
        return self.op("Reshape", value, self.ints(*shape))

    def transpose(self, value: str, *order: int) -> str:
        """``value`` with its dimensions in ``order``; what only undoes another transposition is not made."""
        made = self._maker.get(value)
        if made is not None and made.kind == "Transpose":
            before = made.get("perm")
            value, order = made.inputs[0], tuple(before[i] for i in order)
        return value if order == tuple(range(len(order))) else self.op("Transpose", value, perm=order)

    def sum(self, value: str, *axes: int, keep: bool = False) -> str:
        """The sum over ``axes``."""
        return self.op("ReduceSum", value, self.ints(*axes), keepdims=int(keep))

    def mean(self, value: str, *axes: int, keep: bool = False) -> str:
        """The mean over ``axes``."""
        return self.op("ReduceMean", value, self.ints(*axes), keepdims=int(keep))

    def total(self, values: Iterable[str | None]) -> str:
        """The sum of one or more values of one shape, of those that there are."""
        out, *rest = (value for value in values if value is not None)
        for value in rest:
            out = self.op("Add", out, value)
        return out

    def product(self, a: str, b: str, *, rank: int, turn_a: bool = False, turn_b: bool = False) -> str:
        """The matrix product of ``a`` and ``b``, either of them turned; a batch of products where ``rank`` is 3."""
        if rank == 2 and (turn_a or turn_b):
            return self.op("Gemm", a, b, transA=int(turn_a), transB=int(turn_b))
        a = self.transpose(a, 0, 2, 1) if turn_a else a
        b = self.transpose(b, 0, 2, 1) if turn_b else b
        return self.op("MatMul", a, b)

    def row(self, ones: str, value: str) -> str:
        """The sum over the rows of ``value`` (n, columns) as its product with ``ones`` (1, n), (1, columns)."""
        made = self.op("Gemm", ones, value)
        self._rows.add(made)
        return made

    def grown(self, gradient: str, held: str, rate: float, rank: int) -> str:
        """``rate`` x ``held`` + ``gradient``, as one operator where the gradient is a plain matrix product, or one
        whose rows became a tensor's first dimension (``rank`` > 2), or whose one row a vector; as two where it is a
        product and something else."""
        made = self._maker.get(gradient)
        moved = made if made is not None and made.kind == "Reshape" and self._by_rows(made, rank) else None
        product = self._maker.get(moved.inputs[0]) if moved else made
        if product is None or product.kind != "Gemm" or (moved and len(product.inputs) > 2):
            kept = held if rate == 1 else self.op("Mul", held, self.number(rate, rank))
            return self.op("Add", kept, gradient)
        if len(product.inputs) > 2:
            *factors, other = product.inputs
            return self.op("Add", self.op("Gemm", *factors, held, **dict(product.attributes), beta=rate), other)
        flat = self.reshape(held, 0, -1) if rank > 2 else held
        grown = self.op("Gemm", *product.inputs, flat, **dict(product.attributes), beta=rate)
        return self.op("Reshape", grown, moved.inputs[1]) if moved else grown

    def _by_rows(self, moved: Node, rank: int) -> bool:
        if rank > 2:
            shape = self.constants.get(moved.inputs[1])
            return shape is not None and bool(shape[0] == 0)  # the first size stays
        return rank == 1 and moved.inputs[0] in self._rows

    def finish(self, outputs: Sequence[tuple[Port, str]]) -> Graph:
        """The graph whose ``outputs`` are these values under the names of their ports; nothing unread stays."""
        named: dict[str, str] = {}
        copies = []
        for port, value in outputs:
            if value in self._maker and value not in named:
                named[value] = port.name
            else:  # an input, or given under two names
                copies.append(Node("Identity", (value,), (port.name,)))
        kept = read_of([renamed(node, named) for node in (*self.nodes, *copies)], [port.name for port, _ in outputs])
        read = {name for node in kept for name in node.inputs}
        constants = {name: value for name, value in self.constants.items() if name in read}
        inputs = tuple(port for port in self.inputs if port.name in read)
        return Graph(inputs, tuple(port for port, _ in outputs), tuple(kept), constants)


def read_of(nodes: Sequence[Node], outputs: Iterable[str]) -> list[Node]:
    """Those of which something is read for these outputs, in their order."""
    read, kept = set(outputs), list[Node]()
    for node in reversed(nodes):
        if read.intersection(node.outputs):
            kept.append(node)
            read.update(node.inputs)
    return kept[::-1]


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """``node`` with the names of its inputs and outputs that ``names`` has replaced."""
    inputs, outputs = (tuple(names.get(one, one) for one in some) for some in (node.inputs, node.outputs))
    return replace(node, inputs=inputs, outputs=outputs)
