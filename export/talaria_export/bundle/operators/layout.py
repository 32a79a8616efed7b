"""Operators that compute nothing: they lay numbers out otherwise, pick some of them, or tell of shapes."""

from __future__ import annotations

import math

from talaria_export.bundle.operators.rule import (
    KNOWN_VALUES,
    Found,
    Node,
    Rules,
    Unknown,
    Value,
    broadcast,
    group,
    ints,
    listed,
    numbers_of,
    single,
)


def _reshape(node: Node, given: list[Value]) -> Found:
    asked, x = ints(given[1]), given[0]
    if not node.attributes.get("allowzero"):
        asked = [x.shape[i] if size == 0 else size for i, size in enumerate(asked)]
    if asked.count(-1) == 1:
        rest = math.prod(size for size in asked if size != -1)
        asked = [x.count // rest if size == -1 else size for size in asked]
    if math.prod(asked) != x.count:
        raise ValueError(f"{x.shape} as {asked}")
    return single(asked, 0, x.numbers)


def _flatten(node: Node, given: list[Value]) -> Found:
    x, axis = given[0].shape, node.attributes.get("axis", 1)
    return single((math.prod(x[:axis]), math.prod(x[axis:])))


def _transpose(node: Node, given: list[Value]) -> Found:
    x = given[0].shape
    order = node.attributes.get("perm") or list(range(len(x)))[::-1]
    if sorted(order) != list(range(len(x))):
        raise ValueError(f"order {order}")
    return single([x[i] for i in order])


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
    return single(shape, 0, numbers)


def _split(node: Node, given: list[Value]) -> Found:
    x, axis = list(given[0].shape), node.attributes.get("axis", 0)
    sizes = listed(node, given, "split", 1)
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
    x, axes = given[0].shape, listed(node, given, "axes", 1)
    gone = {i for i, size in enumerate(x) if size == 1} if axes is None else {axis % len(x) for axis in axes}
    if any(x[i] != 1 for i in gone):
        raise ValueError(f"axes {axes} of {x}")
    return single([size for i, size in enumerate(x) if i not in gone], 0, given[0].numbers)


def _unsqueeze(node: Node, given: list[Value]) -> Found:
    axes = listed(node, given, "axes", 1) or []
    if len(axes) > 8:
        raise ValueError(f"{len(axes)} axes")
    shape, rank = list(given[0].shape), len(given[0].shape) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        shape.insert(axis, 1)
    return single(shape, 0, given[0].numbers)


def _gather(node: Node, given: list[Value]) -> Found:
    x, at = given[0], given[1]
    axis = node.attributes.get("axis", 0) % len(x.shape)
    numbers = None
    if len(x.shape) == 1 and x.numbers is not None and at.numbers is not None:
        numbers = tuple(x.numbers[int(i)] for i in at.numbers)
    return single((*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]), 0, numbers)


def _gather_nd(node: Node, given: list[Value]) -> Found:
    """Pieces at places that are told by several numbers each, as maps between places are read."""
    x, at, beside = given[0].shape, given[1].shape, node.attributes.get("batch_dims", 0)
    return single((*at[:-1], *x[beside + at[-1] :]))


def _gather_elements(node: Node, given: list[Value]) -> Found:
    return single(given[1].shape)


def _slice(node: Node, given: list[Value]) -> Found:
    x = list(given[0].shape)
    starts, ends = listed(node, given, "starts", 1) or [], listed(node, given, "ends", 2) or []
    axes = listed(node, given, "axes", 3) or list(range(len(starts)))
    steps = listed(node, given, "steps", 4) or [1] * len(starts)
    numbers = given[0].numbers
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        kept = range(x[axis])[slice(start, end, step)]
        if numbers is not None:
            numbers = numbers[slice(start, end, step)] if len(x) == 1 else None
        x[axis] = len(kept)
    return single(x, 0, numbers)


def _pad(node: Node, given: list[Value]) -> Found:
    x, pads = list(given[0].shape), listed(node, given, "pads", 1) or []
    axes = ints(given[3]) if len(given) > 3 and node.inputs[3] else list(range(len(x)))
    if len(pads) != 2 * len(axes):
        raise ValueError(f"{len(pads)} pads for {len(axes)} axes")
    for i, axis in enumerate(axes):
        x[axis] += pads[i] + pads[i + len(axes)]
    return single(x)


def _expand(node: Node, given: list[Value]) -> Found:
    return single(broadcast([given[0].shape, tuple(ints(given[1]))]))


def _tile(node: Node, given: list[Value]) -> Found:
    return single([size * times for size, times in zip(given[0].shape, ints(given[1]), strict=True)])


def _filled(node: Node, given: list[Value]) -> Found:
    return single(ints(given[0]))


def _shape_of(node: Node, given: list[Value]) -> Found:
    sizes = given[0].shape[slice(node.attributes.get("start", 0), node.attributes.get("end"))]
    return single((len(sizes),), 0, tuple(sizes))


def _range(node: Node, given: list[Value]) -> Found:
    start, limit, delta = (numbers_of(value)[0] for value in given)
    count = max(0, math.ceil((limit - start) / delta))
    whole = all(isinstance(n, int) for n in (start, limit, delta))
    numbers = tuple(range(int(start), int(limit), int(delta))) if whole and count <= KNOWN_VALUES else None
    return single((count,), 0, numbers)


def _constant(node: Node, given: list[Value]) -> Found:
    value = node.attributes.get("value")
    if not isinstance(value, Value):
        raise Unknown("a constant of this kind is not written by talaria")
    return [value], 0


RULES: Rules = {
    **group(_concat, "Concat ms:QLinearConcat"),
    **group(_reshape, "Reshape"),
    **group(_flatten, "Flatten"),
    **group(_transpose, "Transpose"),
    **group(_split, "Split"),
    **group(_squeeze, "Squeeze"),
    **group(_unsqueeze, "Unsqueeze"),
    **group(_gather, "Gather"),
    **group(_gather_nd, "GatherND"),
    **group(_gather_elements, "GatherElements"),
    **group(_slice, "Slice"),
    **group(_pad, "Pad"),
    **group(_expand, "Expand"),
    **group(_tile, "Tile"),
    **group(_filled, "ConstantOfShape"),
    **group(_shape_of, "Shape"),
    **group(_range, "Range"),
    **group(_constant, "Constant"),
}
