"""Reads an ONNX file's wire format, with nothing but Python, and refuses what a bundle must not carry.

ONNX Runtime would follow a tensor's path to another file and would call operators of other libraries. This walk over
the protobuf message happens before ONNX Runtime sees a byte. It bounds the tensors too: each must hold exactly the
bytes that its shape announces, and all that the graph makes and computes of them is bounded (:mod:`.graph_cost`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from typing import Any

from talaria.errors import BundleError
from talaria_export.bundle.graph_cost import measure
from talaria_export.bundle.operators.rule import KNOWN_VALUES, Node, Shape, Value

DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
"""Operator sets that ONNX Runtime itself brings."""

# Bytes per element by TensorProto.DataType; strings (8) and complex numbers are absent, hence refused.
_WIDTH = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2, 21: 0.5, 22: 0.5}
_TYPED = {4: 4, 5: None, 7: None, 10: 8, 11: None}  # float_data, int32_data, int64_data, double_data, uint64_data
_MODEL_PLAIN = {1, 2, 3, 4, 5, 6, 14}
_NUMBERS = {1: "f", 6: "i", 7: "q"}
"""Types whose numbers may become a shape."""
_MOST_NODES, _MOST_NAME = 1 << 16, 4096
AGAIN = "; export the model again"
"""The mend that ends each refusal of a file."""
MANY = 64
"""Inputs at once for which a graph is measured a second time, as its work must grow no faster than they do."""


def inspect_onnx(
    name: str, data: bytes | memoryview, *, element_limit: int = 1 << 29, shapes: tuple[Shape, ...] | None = None
) -> None:
    """Raises :class:`~talaria.errors.BundleError` unless ``data`` is an ONNX model that stands on its own.

    Refused: data outside the file, operators that no bundle needs, function bodies, graphs inside operators, tensors
    whose bytes do not match their shape or that have more than ``element_limit`` elements, graphs that make or compute
    more than :mod:`.graph_cost` allows, and bytes that do not parse. ``shapes`` are what the model takes for one input
    and for :data:`MANY` of them; without, the file's own declaration counts.
    """
    walk = _Walk(name, element_limit)
    walk.model(memoryview(data))
    walk.measured(shapes)


class _Walk:
    def __init__(self, name: str, element_limit: int) -> None:
        self.name = name
        self.element_limit = element_limit
        self.nodes: list[Node] = []
        self.known: dict[str, Value] = {}
        self.inputs: dict[str, list[int]] = {}

    def refuse(self, why: str) -> BundleError:
        return BundleError(f"{self.name}: {why}{AGAIN}")

    def fields(self, view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
        at, end = 0, len(view)
        while at < end:
            key, at = self.varint(view, at)
            field, kind = key >> 3, key & 7
            if kind == 0:
                value, at = self.varint(view, at)
                yield field, value
                continue
            if kind == 2:
                length, at = self.varint(view, at)
            elif kind in (1, 5):
                length = 8 if kind == 1 else 4
            else:
                raise self.refuse(f"not an ONNX model (wire type {kind})")
            if length > end - at:
                raise self.refuse("not an ONNX model (a field runs past the end)")
            yield field, view[at : at + length]
            at += length

    def varint(self, view: memoryview, at: int) -> tuple[int, int]:
        value = shift = 0
        while at < len(view) and shift < 64:
            byte = view[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (1 << 64) - 1, at
            shift += 7
        raise self.refuse("not an ONNX model (a number runs past the end)")

    def nested(self, value: int | memoryview) -> memoryview:
        if isinstance(value, int):
            raise self.refuse("not an ONNX model (a number where a message belongs)")
        return value

    def number(self, content: memoryview) -> float:
        if len(content) != 4:
            raise self.refuse(f"not an ONNX model (a number of {len(content)} bytes)")
        (found,) = struct.unpack("<f", content)
        return float(found)

    def text(self, value: int | memoryview) -> str:
        """A name, whole and to the byte: two that only look alike here would be two values for ONNX Runtime."""
        content = self.nested(value)
        if len(content) > _MOST_NAME:
            raise self.refuse(f"has a name of {len(content)} bytes, at most {_MOST_NAME}")
        try:
            return str(content, "utf-8")
        except UnicodeDecodeError:
            raise self.refuse("has a name that is no text in UTF-8") from None

    def model(self, view: memoryview) -> None:
        graphs = 0
        for field, value in self.fields(view):
            if field == 7:
                graphs += 1
                self.graph(self.nested(value))
            elif field == 8:
                self.domain(self.nested(value))
            elif field == 20:
                raise self.refuse("carries training information")
            elif field == 25:
                raise self.refuse("carries function bodies")
            elif field not in _MODEL_PLAIN:
                raise self.refuse(f"not an ONNX model that this version knows (field {field})")
        if graphs != 1:
            raise self.refuse(f"holds {graphs} graphs instead of one")

    def domain(self, opset: memoryview) -> None:
        for field, value in self.fields(opset):
            if field == 1 and self.text(value) not in DOMAINS:
                raise self.refuse(f"needs operators of {self.text(value)!r}, which ONNX Runtime does not bring")

    def graph(self, view: memoryview) -> None:
        for field, value in self.fields(view):
            if field == 1:
                if len(self.nodes) == _MOST_NODES:
                    raise self.refuse(f"has more than {_MOST_NODES} operators")
                self.nodes.append(self.node(self.nested(value)))
            elif field == 5:
                name, tensor = self.tensor(self.nested(value))
                if name in self.known:
                    raise self.refuse(f"holds two tensors of the name {name[:80]!r}")
                self.known[name] = tensor
            elif field == 11:
                self.input(self.nested(value))
            elif field == 15:
                raise self.refuse("carries sparse tensors")

    def input(self, view: memoryview) -> None:
        """Name and declared sizes of an input, 0 for those that are free."""
        name, sizes = "", list[int]()
        for field, value in self.fields(view):
            if field == 1:
                name = self.text(value)
            elif field == 2:
                for _, tensor in self.fields(self.nested(value)):
                    for part, shape in self.fields(self.nested(tensor)):
                        if part == 2:
                            sizes = [self.size(self.nested(dim)) for _, dim in self.fields(self.nested(shape))]
        self.inputs[name] = sizes

    def size(self, dim: memoryview) -> int:
        return next((value for field, value in self.fields(dim) if field == 1 and isinstance(value, int)), 0)

    def measured(self, shapes: tuple[Shape, ...] | None) -> None:
        """Refuses what the graph would make and compute beyond the limits."""
        given = [name for name in self.inputs if name not in self.known]
        if len(given) != 1:
            raise self.refuse(f"has {len(given)} inputs instead of one")
        declared = self.inputs[given[0]]
        one, many = shapes or tuple(tuple(size or free for size in declared) for free in (1, MANY))
        for shape, count in ((one, 1), (many, MANY)):
            if shapes and (
                len(shape) != len(declared) or any(d not in (0, n) for d, n in zip(declared, shape, strict=True))
            ):
                raise self.refuse(f"takes inputs of shape {declared}, its manifest says {list(shape)}")
            try:
                measure(self.nodes, {**self.known, given[0]: Value(shape)}, count)
            except BundleError as why:
                raise self.refuse(str(why)) from None

    def node(self, view: memoryview) -> Node:
        """An operator, with the attributes that decide shapes."""
        inputs, outputs, kind, domain = list[str](), list[str](), "", ""
        attributes: dict[str, Any] = {}
        for field, value in self.fields(view):
            if field == 1:
                inputs.append(self.text(value))
            elif field == 2:
                outputs.append(self.text(value))
            elif field == 4:
                kind = self.text(value)
            elif field == 7:
                domain = self.text(value)
                if domain not in DOMAINS:
                    raise self.refuse(f"uses operators of {domain!r}, which ONNX Runtime does not bring")
            elif field == 5:
                name, found = self.attribute(self.nested(value))
                if name in attributes:  # ONNX Runtime takes the first
                    raise self.refuse(f"says the attribute {name[:80]!r} of an operator twice")
                attributes[name] = found
        return Node(kind, domain, tuple(inputs), tuple(outputs), attributes)

    def attribute(self, view: memoryview) -> tuple[str, Any]:
        name, many = "", list[float]()
        found: Any = None
        for field, value in self.fields(view):
            if field == 1:
                name = self.text(value)
            elif field == 2:
                found = self.number(self.nested(value))
            elif field == 3 and isinstance(value, int):
                found = _signed(value)
            elif field == 4:
                found = bytes(self.nested(value)[:200])
            elif field == 7:
                content = self.nested(value)
                many += struct.unpack(f"<{len(content) // 4}f", content[: len(content) // 4 * 4])
            elif field == 8:
                many += map(_signed, [value] if isinstance(value, int) else self.packed(value))
            elif field in (5, 10):
                found = self.tensor(self.nested(value))[1]
            elif field in (6, 11):
                raise self.refuse("nests a graph inside an operator")
            elif field in (22, 23):
                raise self.refuse("carries sparse tensors")
        return name, many or found

    def tensor(self, view: memoryview) -> tuple[str, Value]:
        """Checks a tensor; gives its name and shape, with its numbers where it could be a shape."""
        dims: list[int] = []
        kind, raw, typed, label = 0, None, 0, ""
        content = memoryview(b"")
        values: list[float] = []
        for field, value in self.fields(view):
            if field == 1:
                dims += [value] if isinstance(value, int) else self.packed(value)
            elif field == 2:
                kind = value if isinstance(value, int) else 0
            elif field == 8:
                label = self.text(value)
            elif field == 9:
                content = self.nested(value)
                raw = len(content)
            elif field == 13 or (field == 14 and value != 0):
                raise self.refuse("keeps tensor data in another file")
            elif field in _TYPED:
                width = _TYPED[field]
                if isinstance(value, int):
                    typed += 1
                    values.append(_signed(value))
                elif width is None:
                    found = self.packed(value)
                    typed += len(found)
                    values += map(_signed, found)
                else:
                    typed += len(value) // width
                    if field == 4 and len(value) % 4 == 0 and typed <= KNOWN_VALUES:
                        values += struct.unpack(f"<{len(value) // 4}f", value)
        if kind not in _WIDTH:
            raise self.refuse(f"tensor {label!r} has the unknown data type {kind}")
        if len(dims) > 8 or any(d > self.element_limit for d in dims) or prod(dims) > self.element_limit:
            raise self.refuse(f"tensor {label!r} is larger than {self.element_limit} elements")
        count = prod(dims)
        if raw is not None and raw != -int(-count * _WIDTH[kind] // 1):
            raise self.refuse(f"tensor {label!r} of shape {dims} holds {raw} bytes")
        if raw is None and typed != count:
            raise self.refuse(f"tensor {label!r} of shape {dims} holds {typed} values")
        if count > KNOWN_VALUES or kind not in _NUMBERS:
            return label, Value(tuple(dims))
        numbers = struct.unpack(f"<{count}{_NUMBERS[kind]}", content) if raw is not None else tuple(values)
        return label, Value(tuple(dims), tuple(numbers) if len(numbers) == count else None)

    def packed(self, view: memoryview) -> list[int]:
        out, at = [], 0
        while at < len(view):
            value, at = self.varint(view, at)
            out.append(value)
        return out


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
