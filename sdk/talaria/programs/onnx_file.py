"""A graph as the bytes of an ONNX file and back, in one form only: what is read must be what would be written.

So nothing can hide between the fields: no function, subgraph, other domain, external tensor or unknown field survives
the comparison. Needs neither onnx nor onnxruntime. Source of the field numbers: onnx.proto3 of ONNX 1.15.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from talaria.errors import WireError
from talaria.programs.graph import Attribute, Graph, Node, Port, Size
from talaria.tensors import Array

IR, OPSET = 9, 18
"""Understood by ONNX Runtime since 1.17."""
NOTE = "talaria.program"
_TYPES = {"float32": 1, "int64": 7, "bool": 9}
_DTYPES = {number: name for name, number in _TYPES.items()}
_MOST_DIMS = 8


def write(graph: Graph, note: str) -> bytes:
    """The ONNX file of ``graph``; ``note`` is kept as text under the metadata :data:`NOTE`."""
    metadata = _text(1, NOTE) + _text(2, note)
    opset = _text(1, "") + _number(2, OPSET)
    return _number(1, IR) + _message(7, _graph(graph)) + _message(8, opset) + _message(14, metadata)


def read(data: bytes) -> tuple[Graph, str]:
    """The graph and the note of a file that :func:`write` wrote. Raises :class:`~talaria.errors.WireError`."""
    try:
        graph, note = _model(data)
        same = write(graph, note) == data
    except (ValueError, KeyError, IndexError, struct.error, OverflowError, TypeError) as why:
        raise WireError(f"program: no file that `talaria programs build` wrote ({why}); build it again") from None
    if not same:
        raise WireError("program: holds more than a program may, or in another form; build it again")
    return graph, note


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _graph(graph: Graph) -> bytes:
    body = b"".join(_message(1, _node(node)) for node in graph.nodes)
    body += _text(2, "step")
    body += b"".join(_message(5, _tensor(name, value)) for name, value in graph.constants.items())
    body += b"".join(_message(11, _port(port)) for port in graph.inputs)
    return body + b"".join(_message(12, _port(port)) for port in graph.outputs)


def _node(node: Node) -> bytes:
    out = b"".join(_text(1, name) for name in node.inputs) + b"".join(_text(2, name) for name in node.outputs)
    return out + _text(4, node.kind) + b"".join(_message(5, _attribute(*one)) for one in node.attributes)


def _attribute(name: str, value: Attribute) -> bytes:
    out = _text(1, name)
    if isinstance(value, float):
        return out + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)
    if isinstance(value, int):
        return out + _number(3, value) + _number(20, 2)
    if isinstance(value, str):
        return out + _text(4, value) + _number(20, 3)
    if isinstance(value, Graph):
        return out + _message(6, _graph(value)) + _number(20, 5)
    return out + b"".join(_number(8, one) for one in value) + _number(20, 7)


def _tensor(name: str, value: Array) -> bytes:
    out = b"".join(_number(1, size) for size in value.shape) + _number(2, _TYPES[value.dtype.name])
    return out + _text(8, name) + _message(9, value.astype(value.dtype.newbyteorder("<")).tobytes())


def _port(port: Port) -> bytes:
    dims = b"".join(_message(1, _text(2, one) if isinstance(one, str) else _number(1, one)) for one in port.shape)
    tensor = _number(1, _TYPES[port.dtype]) + _message(2, dims)
    return _text(1, port.name) + _message(2, _message(1, tensor))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """``(field, value)`` of one message: whole numbers, floats and bytes."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        if key & 7 == 0:
            value: Any
            value, at = _read_varint(data, at)
        elif key & 7 == 2:
            length, at = _read_varint(data, at)
            if length > len(data) - at:
                raise ValueError("a field runs past the end")
            value, at = data[at : at + length], at + length
        elif key & 7 == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            raise ValueError("unknown wire type")
        yield key >> 3, value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number runs past 64 bits")


def _many(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for field, value in _fields(data):
        found.setdefault(field, []).append(value)
    return found


def _one(found: dict[int, list[Any]], field: int) -> Any:
    (value,) = found[field]
    return value


def _words(values: list[bytes]) -> tuple[str, ...]:
    return tuple(str(value, "utf-8") for value in values)


def _model(data: bytes) -> tuple[Graph, str]:
    model = _many(data)
    graph = _many(_one(model, 7))
    constants = dict(map(_read_tensor, graph.get(5, [])))
    ports = [tuple(map(_read_port, graph.get(field, []))) for field in (11, 12)]
    nodes = tuple(map(_read_node, graph.get(1, [])))
    return Graph(ports[0], ports[1], nodes, constants), str(_one(_many(_one(model, 14)), 2), "utf-8")


def _read_node(data: bytes) -> Node:
    found = _many(data)
    attributes = tuple(map(_read_attribute, found.get(5, [])))
    return Node(str(_one(found, 4), "utf-8"), _words(found.get(1, [])), _words(found.get(2, [])), attributes)


def _read_attribute(data: bytes) -> tuple[str, Attribute]:
    found = _many(data)
    name, kind = str(_one(found, 1), "utf-8"), _one(found, 20)
    if kind == 1:
        return name, float(_one(found, 2))
    if kind == 2:
        return name, _signed(_one(found, 3))
    if kind == 3:
        return name, str(_one(found, 4), "utf-8")
    if kind == 7:
        return name, tuple(map(_signed, found.get(8, [])))
    raise ValueError(f"an attribute of kind {kind}")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _read_tensor(data: bytes) -> tuple[str, Array]:
    found = _many(data)
    dims, dtype = found.get(1, []), np.dtype(_DTYPES[_one(found, 2)]).newbyteorder("<")
    if len(dims) > _MOST_DIMS:
        raise ValueError(f"a constant of {len(dims)} dimensions")
    value = np.frombuffer(_one(found, 9), dtype).reshape(dims)  # fails unless there are as many bytes as it says
    return str(_one(found, 8), "utf-8"), value.astype(dtype.newbyteorder("="))


def _read_port(data: bytes) -> Port:
    found = _many(data)
    tensor = _many(_one(_many(_one(found, 2)), 1))
    sizes = tuple(map(_read_size, _many(_one(tensor, 2)).get(1, [])))
    if len(sizes) > _MOST_DIMS:
        raise ValueError(f"a port of {len(sizes)} dimensions")
    return Port(str(_one(found, 1), "utf-8"), _DTYPES[_one(tensor, 1)], sizes)


def _read_size(data: bytes) -> Size:
    ((field, value),) = _fields(data)
    return str(value, "utf-8") if field == 2 else int(value)
