"""Reads an ONNX file's wire format, with nothing but Python, and refuses what a bundle must not carry.

ONNX Runtime would follow a tensor's path to another file and would call operators of other libraries. This walk over
the protobuf message happens before ONNX Runtime sees a byte. It bounds the tensors too: each must hold exactly the
bytes that its shape announces.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from talaria.errors import BundleError

DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
"""Operator sets that ONNX Runtime itself brings."""

REFUSED = frozenset({"Loop", "Scan", "If", "SequenceMap", "RandomNormal", "RandomUniform", "RandomNormalLike"})
"""Operators without a place in a personal model: unbounded work, or outputs that cannot be verified."""

# Bytes per element by TensorProto.DataType; strings (8) and complex numbers are absent, hence refused.
_WIDTH = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2, 21: 0.5, 22: 0.5}
_TYPED = {4: 4, 5: None, 7: None, 10: 8, 11: None}  # float_data, int32_data, int64_data, double_data, uint64_data
_MODEL_PLAIN = {1, 2, 3, 4, 5, 6, 14}
_MAX_DEPTH = 12
# Operator -> the inputs that say how large its output is.
_GROWING = {"ConstantOfShape": slice(0, 1), "Expand": slice(1, 2), "Tile": slice(1, 2), "Range": slice(0, 3)}


def inspect_onnx(name: str, data: bytes | memoryview, *, element_limit: int = 1 << 29) -> None:
    """Raises :class:`~talaria.errors.BundleError` unless ``data`` is an ONNX model that stands on its own.

    Refused: data outside the file, operators from unknown domains, function bodies, control flow, tensors whose bytes
    do not match their shape or that have more than ``element_limit`` elements, and bytes that do not parse.
    """
    walk = _Walk(name, element_limit)
    walk.model(memoryview(data))


class _Walk:
    def __init__(self, name: str, element_limit: int) -> None:
        self.name = name
        self.element_limit = element_limit

    def refuse(self, why: str) -> BundleError:
        return BundleError(f"{self.name}: {why}; export the model again")

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

    def text(self, value: int | memoryview) -> str:
        return str(bytes(self.nested(value)[:200]), "utf-8", "replace")

    def model(self, view: memoryview) -> None:
        graphs = 0
        for field, value in self.fields(view):
            if field == 7:
                graphs += 1
                self.graph(self.nested(value), 0)
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

    def graph(self, view: memoryview, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise self.refuse("nests graphs too deeply")
        growing: list[str] = []
        sizes: dict[str, int] = {}
        for field, value in self.fields(view):
            if field == 1:
                growing += self.node(self.nested(value), depth)
            elif field == 5:
                name, size = self.tensor(self.nested(value))
                sizes[name] = size
            elif field == 15:
                raise self.refuse("carries sparse tensors")
        for name in growing:
            if sizes.get(name, 0) > self.element_limit:
                raise self.refuse(f"makes a tensor of {sizes[name]} elements")

    def node(self, view: memoryview, depth: int) -> list[str]:
        """Checks a node; gives the inputs that set the size of its output, for the operators that can grow."""
        inputs, kind = [], ""
        for field, value in self.fields(view):
            if field == 1:
                inputs.append(self.text(value))
            elif field == 4:
                kind = self.text(value)
            if field == 4 and kind in REFUSED:
                raise self.refuse(f"uses the operator {kind!r}, which a bundle does not allow")
            if field == 7 and self.text(value) not in DOMAINS:
                raise self.refuse(f"uses operators of {self.text(value)!r}, which ONNX Runtime does not bring")
            if field == 5:
                for part, inner in self.fields(self.nested(value)):
                    if part in (5, 10):
                        self.tensor(self.nested(inner))
                    elif part in (6, 11):
                        self.graph(self.nested(inner), depth + 1)
                    elif part in (22, 23):
                        raise self.refuse("carries sparse tensors")
        return inputs[_GROWING.get(kind, slice(0))]

    def tensor(self, view: memoryview) -> tuple[str, int]:
        """Checks a tensor; gives its name, and the product of its values where it could be a shape, else too many."""
        dims: list[int] = []
        kind, raw, typed, label = 0, None, 0, ""
        values: list[int] = []
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
                if raw <= 64:
                    values = [int.from_bytes(content[at : at + 8], "little", signed=True) for at in range(0, raw, 8)]
            elif field == 13 or (field == 14 and value != 0):
                raise self.refuse("keeps tensor data in another file")
            elif field in _TYPED:
                width = _TYPED[field]
                if isinstance(value, int):
                    typed += 1
                    values = [*values[:8], value]
                elif width is None:
                    found = self.packed(value)
                    typed += len(found)
                    values = [*values, *found][:8]
                else:
                    typed += len(value) // width
        if kind not in _WIDTH:
            raise self.refuse(f"tensor {label!r} has the unknown data type {kind}")
        if len(dims) > 8 or any(d > self.element_limit for d in dims) or prod(dims) > self.element_limit:
            raise self.refuse(f"tensor {label!r} is larger than {self.element_limit} elements")
        count = prod(dims)
        if raw is not None and raw != -int(-count * _WIDTH[kind] // 1):
            raise self.refuse(f"tensor {label!r} of shape {dims} holds {raw} bytes")
        if raw is None and typed != count:
            raise self.refuse(f"tensor {label!r} of shape {dims} holds {typed} values")
        could = kind == 7 and count <= 8
        return label, prod(max(abs(value), 1) for value in values) if could else self.element_limit + 1

    def packed(self, view: memoryview) -> list[int]:
        out, at = [], 0
        while at < len(view):
            value, at = self.varint(view, at)
            out.append(value)
        return out
