"""Puts the steps before the model into its ONNX graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from talaria_export.bundle.preprocess import Preprocessing
from talaria_export.convert.passes.rewrites import file_of, set_nodes

_RAW = "given"  # the name of the input while the graph is being built; afterwards it has the old one again


def prefixed(model: ModelProto, steps: Preprocessing) -> ModelProto:
    """A copy of ``model`` that takes what ``steps`` begin with. Its weights, variant and answers stay the same."""
    if steps.empty:
        return model
    out = ModelProto()
    out.CopyFrom(model)
    graph = out.graph
    name = graph.input[0].name
    build = _Prefix(out)
    value = _RAW
    if steps.mean:
        trailing = 0 if steps.stride is not None else len(steps.shape) - 1
        for operator, moments in (("Sub", steps.mean), ("Div", steps.std)):
            value = build(operator, value, build.constant(np.array(moments, np.float32).reshape(-1, *[1] * trailing)))
    if steps.stride is not None:
        value = _cut(build, value, steps.shape[1], steps.stride)
        batch, channels = graph.input[0].type.tensor_type.shape.dim[0], steps.shape[0]
        del graph.input[0].type.tensor_type.shape.dim[1:]
        batch.dim_param = "time"
        graph.input[0].type.tensor_type.shape.dim.add(dim_value=channels)
        graph.output[0].type.tensor_type.shape.dim[0].dim_param = "windows"
    for node in graph.node:  # the model's own operators read the end of the prefix
        node.input[:] = [value if found == name else found for found in node.input]
    for node in build.nodes:
        node.input[:] = [name if found == _RAW else found for found in node.input]
    set_nodes(out, [*build.nodes, *graph.node])
    return out


def prefixed_bytes(data: bytes, steps: Preprocessing) -> bytes:
    """:func:`prefixed` from file to file."""
    return file_of(prefixed(onnx.load_from_string(data), steps))


class _Prefix:
    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.nodes: list[NodeProto] = []

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"prefix_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        name = f"prefix_constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name


def _cut(build: _Prefix, recording: str, size: int, stride: int) -> str:
    """(time, channels) -> (windows, channels, size): the steps of every window, gathered."""

    def whole(number: int) -> str:
        return build.constant(np.array(number, np.int64))

    nil, one, axis = whole(0), whole(1), build.constant(np.array([1], np.int64))
    time = build("Squeeze", build("Shape", recording, start=0, end=1))
    beyond = build("Div", build("Sub", time, whole(size)), whole(stride))
    begins = build("Mul", build("Range", nil, build("Add", beyond, one), one), whole(stride))
    steps = build("Range", nil, whole(size), one)
    places = build("Add", build("Unsqueeze", begins, axis), steps)
    return build("Transpose", build("Gather", recording, places, axis=0), perm=[0, 2, 1])
