"""The derivative of a whole graph along some of its inputs, operator by operator: of a gradient, the Hessian's product.

Where a function has a kink (ReLU, a maximum) the side that its value lies on is followed, as torch does when it
differentiates twice. Source: forward-mode differentiation over a reverse-mode graph (Pearlmutter, 1994).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from talaria.errors import ModelError
from talaria.programs.graph import EDGE, INT, STEEP, Draft, Graph, Node, Port

ALONG = "along/"
"""What stands between the kind and the key of a port that is the derivative of another's."""
_FIRST = ("Reshape", "Transpose", "Slice", "Gather", "Expand", "Unsqueeze", "Flatten", "ReduceSum", "ReduceMean")
"""Linear in their first input, whose shape decides all else."""
_NONE = ("And", "Ceil", "Equal", "Floor", "Greater", "Less", "Not", "OneHot", "Round", "Shape", "Sign")
"""Constant wherever they can be differentiated."""


def along(port: str) -> str:
    """The name of the derivative of a port: ``weight/head.bias`` has ``weight/along/head.bias``."""
    kind, _, key = port.partition("/")
    return f"{kind}/{ALONG}{key}"


def tangent(
    graph: Graph, moving: Sequence[str], shapes: Mapping[str, Sequence[int]], padding: Mapping[str, int] = {}
) -> Graph:
    """``graph`` with, for each input in ``moving``, another one of the same shape: the way it moves (:func:`along`);
    and with, for each output that follows, the way that this one moves.

    ``shapes`` has the shape of each value at some sizes, of which only spatial ones are read: they are the same at
    all. ``padding`` names rows of tables that do not move, whatever is given. Raises
    :class:`~talaria.errors.ModelError` for an operator that has no rule here.
    """
    made = _Made(Draft(), shapes, padding)
    draft = made.draft
    for port in graph.inputs:
        made.value[port.name] = draft.input(port.name, port.shape, port.dtype)
    for name in moving:
        port = next(one for one in graph.inputs if one.name == name)
        made.moved[name] = draft.input(along(name), port.shape)
    for name, array in graph.constants.items():
        made.value[name] = draft.constant(array, array.dtype.name)
    for node in graph.nodes:
        given = [made.value[name] for name in node.inputs]
        made.value |= made.several(node, given)
        if any(name in made.moved for name in node.inputs) and not _stands(node):
            made.moved |= _moved(made, node, given)
    ports = [(port, made.value[port.name]) for port in graph.outputs]
    follow = [port for port in graph.outputs if port.name in made.moved]
    ports += [(Port(along(port.name), port.dtype, port.shape), made.moved[port.name]) for port in follow]
    return draft.finish(ports)


@dataclass
class _Made:
    """What has been written: each value of the first graph by its name, and how it moves where it does."""

    draft: Draft
    shapes: Mapping[str, Sequence[int]]
    padding: Mapping[str, int]
    value: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    def op(self, kind: str, *given: str, **attributes: Any) -> str:
        return self.draft.op(kind, *given, **attributes)

    def several(self, node: Node, given: Sequence[str]) -> dict[str, str]:
        """What ``node`` gives of other inputs, by the names of its outputs."""
        made = self.draft.several(node.kind, len(node.outputs), *given, **dict(node.attributes))
        return dict(zip(node.outputs, made, strict=True))

    def number(self, value: float) -> str:
        return self.draft.constant(value)

    def still(self, name: str) -> str:
        """Zeros in the shape of a value."""
        return self.op("Mul", self.value[name], self.number(0.0))

    def ways(self, name: str) -> str:
        """How a value moves, zeros where it does not."""
        return self.moved.get(name) or self.still(name)

    def shaped(self, way: str, out: str) -> str:
        """``way`` in the shape of a value that it may be broadcast to."""
        return self.op("Expand", way, self.op("Shape", self.value[out])) if self.shapes[out] else way


_Rule = Callable[[_Made, Node, str], str]


def _moved(made: _Made, node: Node, given: Sequence[str]) -> dict[str, str]:
    """How all that ``node`` gives moves."""
    if node.kind == "Split":  # of the first input's parts, as the others are sizes
        return made.several(node, [made.moved[node.inputs[0]], *given[1:]])
    rule = _RULES.get(node.kind)
    if rule is None:
        raise ModelError(f"program: {node.kind} cannot be differentiated twice; use differences of gradients")
    (out,) = node.outputs
    return {out: rule(made, node, out)}


def _first(made: _Made, node: Node, out: str) -> str:
    if node.inputs[0] not in made.moved:
        raise ModelError(f"program: {node.kind} moves by what is no value; use differences of gradients")
    rest = [made.value[name] for name in node.inputs[1:]]
    return made.op(node.kind, made.moved[node.inputs[0]], *rest, **dict(node.attributes))


def _looked_up(made: _Made, node: Node, out: str) -> str:
    way, (table, at) = _first(made, node, out), node.inputs
    if table not in made.padding:
        return way
    here = made.op("Equal", made.value[at], made.draft.constant(made.padding[table], INT))
    return made.op("Where", made.op("Unsqueeze", here, made.draft.ints(1)), made.number(0.0), way)


def _sum(made: _Made, node: Node, out: str) -> str:
    ways = [made.moved.get(name) for name in node.inputs]
    if node.kind == "Sub" and ways[1] is not None:
        ways[1] = made.op("Neg", ways[1])
    live = [way for way in ways if way is not None]
    return made.shaped(made.draft.total(live) if len(live) == 2 else live[0], out)


def _product(made: _Made, node: Node, out: str) -> str:
    """Linear in each of the first two inputs; a third is added."""
    a, b, *rest = node.inputs
    attributes, parts = dict(node.attributes), []
    if a in made.moved:
        parts.append(made.op(node.kind, made.moved[a], made.value[b], **attributes))
    if b in made.moved:
        parts.append(made.op(node.kind, made.value[a], made.moved[b], **attributes))
    if rest and rest[0] in made.moved:
        added = made.moved[rest[0]]
        if node.kind != "Gemm":  # a bias of channels
            added = made.draft.reshape(added, 1, -1, *(1 for _ in made.shapes[out][2:]))
        parts.append(made.shaped(added, out))
    return made.draft.total(parts)


def _quotient(made: _Made, node: Node, out: str) -> str:
    a, b = node.inputs
    parts = [made.op("Div", made.moved[a], made.value[b])] if a in made.moved else []
    if b in made.moved:
        parts.append(made.op("Neg", made.op("Div", made.op("Mul", made.value[out], made.moved[b]), made.value[b])))
    return made.draft.total([made.shaped(part, out) for part in parts])


def _power(made: _Made, node: Node, out: str) -> str:
    """A number above zero gains by its power too, where that moves."""
    a, b = node.inputs
    x, exponent = made.value[a], made.value[b]
    parts = list[str]()
    if a in made.moved:
        steep = made.op("Mul", exponent, made.op("Pow", x, made.op("Sub", exponent, made.number(1.0))))
        parts.append(made.op("Mul", steep, made.moved[a]))
    if b in made.moved:
        above = made.op("Greater", x, made.number(0.0))
        steep = made.op("Where", above, made.op("Mul", made.value[out], made.op("Log", x)), made.number(0.0))
        parts.append(made.op("Mul", steep, made.moved[b]))
    return made.draft.total([made.shaped(part, out) for part in parts])


def _each(slope: Callable[[_Made, str, str], str]) -> _Rule:
    """A function of each value alone, whose ``slope`` follows from what goes in and what comes out."""

    def rule(made: _Made, node: Node, out: str) -> str:
        (x,) = node.inputs[:1]
        return made.op("Mul", made.moved[x], slope(made, made.value[x], made.value[out]))

    return rule


def _logistic(made: _Made, x: str, y: str) -> str:
    return made.op("Mul", y, made.op("Sub", made.number(1.0), y))


def _error(made: _Made, x: str, y: str) -> str:
    bell = made.op("Exp", made.op("Neg", made.op("Mul", x, x)))
    return made.op("Mul", bell, made.number(2 / math.sqrt(math.pi)))


def _above(made: _Made, x: str, y: str) -> str:
    return made.op("Cast", made.op("Greater", x, made.number(0.0)), to=1)


def _between(made: _Made, node: Node, out: str) -> str:
    x, low, high = (made.value[name] for name in node.inputs)
    return _inside(made, x, low, high, made.moved[node.inputs[0]])


def _inside(made: _Made, x: str, low: str, high: str, way: str) -> str:
    inside = made.op("And", made.op("Greater", x, low), made.op("Less", x, high))
    return made.op("Where", inside, way, made.number(0.0))


def _stands(node: Node) -> bool:
    """Whether an operator is constant wherever it can be differentiated."""
    return node.kind in _NONE or (node.kind == "HardSigmoid" and abs(node.get("alpha")) in (EDGE, STEEP))


def _sloping(made: _Made, node: Node, out: str) -> str:
    """A line between 0 and 1: its steepness there, and nothing beyond."""
    way = made.op("Mul", made.moved[node.inputs[0]], made.number(node.get("alpha")))
    return _inside(made, made.value[out], made.number(0.0), made.number(1.0), way)


def _extreme(made: _Made, node: Node, out: str) -> str:
    a, b = node.inputs
    first = "Greater" if node.kind == "Max" else "Less"
    return made.op("Where", made.op(first, made.value[a], made.value[b]), made.ways(a), made.ways(b))


def _chosen(made: _Made, node: Node, out: str) -> str:
    which, a, b = node.inputs
    ways = [made.moved.get(name) or made.number(0.0) for name in (a, b)]
    return made.shaped(made.op("Where", made.value[which], *ways), out)


def _joined(made: _Made, node: Node, out: str) -> str:
    return made.op("Concat", *(made.ways(name) for name in node.inputs), **dict(node.attributes))


def _padded(made: _Made, node: Node, out: str) -> str:
    return made.op("Pad", made.moved[node.inputs[0]], made.value[node.inputs[1]], made.number(0.0))


def _scattered(made: _Made, node: Node, out: str) -> str:
    table, at, rows = node.inputs
    none = made.moved.get(table) or made.value[table]  # which is zeros, as programs have it
    return made.op("ScatterND", none, made.value[at], made.ways(rows), reduction="add")


def _shares(made: _Made, node: Node, out: str) -> str:
    """Softmax and its logarithm: what a value gains beyond the mean gain."""
    y, way, axis = made.value[out], made.moved[node.inputs[0]], node.get("axis")
    shares = made.op("Exp", y) if node.kind == "LogSoftmax" else y
    beyond = made.op("Sub", way, made.draft.sum(made.op("Mul", shares, way), axis, keep=True))
    return beyond if node.kind == "LogSoftmax" else made.op("Mul", y, beyond)


def _largest_along(made: _Made, node: Node, out: str) -> str:
    """The mean way of the places that have the maximum."""
    x, axes = made.value[node.inputs[0]], made.value[node.inputs[1]]
    most = made.op("ReduceMax", x, axes, keepdims=1)
    hit, keep = made.op("Cast", made.op("Equal", x, most), to=1), node.get("keepdims", 1)
    total = made.op("ReduceSum", made.op("Mul", hit, made.moved[node.inputs[0]]), axes, keepdims=keep)
    return made.op("Div", total, made.op("ReduceSum", hit, axes, keepdims=keep))


def _largest(made: _Made, node: Node, out: str) -> str:
    """Under each window the way of the first value that is the maximum."""
    x, y, way = made.value[node.inputs[0]], made.value[out], made.moved[node.inputs[0]]
    kernel, stride = node.get("kernel_shape"), node.get("strides")
    rank, sizes = len(kernel), made.shapes[out][2:]
    pads = node.get("pads") or (0,) * 2 * rank
    edges = made.draft.ints(0, 0, *pads[:rank], 0, 0, *pads[rank:])
    whole = [made.op("Pad", one, edges, made.number(fill)) for one, fill in ((x, float("-inf")), (way, 0.0))]
    parts, left = list[str](), ""
    for place in itertools.product(*map(range, kernel)):
        ends = [start + (n - 1) * s + 1 for start, n, s in zip(place, sizes, stride, strict=True)]
        axes = range(2, 2 + rank)
        cut = [made.draft.ints(*numbers) for numbers in (place, ends, axes, stride)]
        under, moves = (made.op("Slice", one, *cut) for one in whole)
        hit = made.op("Equal", under, y)
        mine = made.op("And", hit, left) if left else hit
        parts.append(made.op("Where", mine, moves, made.number(0.0)))
        left = made.op("And", left, made.op("Not", hit)) if left else made.op("Not", hit)
    return made.draft.total(parts)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys((*_FIRST, "AveragePool", "Identity", "Neg"), _first),
    "Gather": _looked_up,
    **dict.fromkeys(("Add", "Sub"), _sum),
    **dict.fromkeys(("Mul", "MatMul", "Gemm", "Conv", "ConvTranspose"), _product),
    "Div": _quotient,
    "Exp": _each(lambda made, x, y: y),
    "Sin": _each(lambda made, x, y: made.op("Cos", x)),
    "Cos": _each(lambda made, x, y: made.op("Neg", made.op("Sin", x))),
    "Log": _each(lambda made, x, y: made.op("Reciprocal", x)),
    "Pow": _power,
    "Sqrt": _each(lambda made, x, y: made.op("Div", made.number(0.5), y)),
    "Reciprocal": _each(lambda made, x, y: made.op("Neg", made.op("Mul", y, y))),
    "Relu": _each(_above),
    "Sigmoid": _each(_logistic),
    "Tanh": _each(lambda made, x, y: made.op("Sub", made.number(1.0), made.op("Mul", y, y))),
    "Erf": _each(_error),
    "Softplus": _each(lambda made, x, y: made.op("Sigmoid", x)),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _shares),
    "Clip": _between,
    "HardSigmoid": _sloping,
    **dict.fromkeys(("Max", "Min"), _extreme),
    "Where": _chosen,
    "Concat": _joined,
    "Pad": _padded,
    "ScatterND": _scattered,
    "MaxPool": _largest,
    "ReduceMax": _largest_along,
}
