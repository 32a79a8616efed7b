"""From what a device without torch serves to one self-contained ONNX file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from talaria.errors import ModelError
from talaria.model.weights import Served
from talaria.programs import onnx_file
from talaria.programs.graph import Graph
from talaria_export.convert.names import INPUT, OUTPUT

if TYPE_CHECKING:
    from onnx import ModelProto


def convert(model: Served, *, plain: bool = False) -> ModelProto:
    """The graph of what is served as a message that can be rewritten, from ``input`` (N, ...) to ``logits`` (N,
    classes), its weights inside. BatchNorm is folded and 1D convolutions become 2D ones of height 1, as in
    :func:`talaria_export.convert.onnx.convert`; ``plain`` leaves all as it is.

    Raises :class:`~talaria.errors.ModelError` where what is served is more than one graph.
    """
    import onnx

    from talaria_export.convert.passes import nchwc, rewrites

    if model.graph is None:
        raise ModelError("model: what is served here is more than one graph; its bundle is made where torch is")
    proto = onnx.load_from_string(onnx_file.write(_renamed(model.graph()), ""))
    del proto.metadata_props[:]
    _bound(proto)
    if not plain:
        rewrites.fold_batchnorm(proto)
        rewrites.lift_1d(proto)
    rewrites.strip(proto)
    if not plain:
        nchwc.keep_blocked(proto)
    rewrites.drop_unused(proto)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _bound(proto: ModelProto) -> None:
    """A token below 0 is looked up where a table has no entry, as in :mod:`talaria_export.convert.onnx`."""
    from onnx import helper, numpy_helper

    tables = {one.name: [*one.dims, 1][0] for one in proto.graph.initializer}
    nodes = [*proto.graph.node]
    del proto.graph.node[:]
    for node in nodes:
        if node.op_type == "Gather" and node.input[0] in tables and node.input[1] not in tables:
            places, at = node.input[1], f"{node.output[0]}/places"
            for name, end in (("first", 0), ("beyond", tables[node.input[0]])):
                proto.graph.initializer.append(numpy_helper.from_array(np.array(end, np.int64), f"{at}/{name}"))
            proto.graph.node.append(helper.make_node("Less", [places, f"{at}/first"], [f"{at}/below"]))
            proto.graph.node.append(helper.make_node("Where", [f"{at}/below", f"{at}/beyond", places], [at]))
            node.input[1] = at
        proto.graph.node.append(node)


def _renamed(graph: Graph) -> Graph:
    names = {graph.inputs[0].name: INPUT, graph.outputs[0].name: OUTPUT}
    nodes = tuple(
        replace(
            node,
            inputs=tuple(names.get(name, name) for name in node.inputs),
            outputs=tuple(names.get(name, name) for name in node.outputs),
        )
        for node in graph.nodes
    )
    inputs, outputs = (
        tuple(replace(port, name=names[port.name]) for port in many) for many in (graph.inputs, graph.outputs)
    )
    return Graph(inputs, outputs, nodes, graph.constants)
