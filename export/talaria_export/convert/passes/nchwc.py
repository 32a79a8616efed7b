"""Rewrites that keep activations in the blocked form in which ONNX Runtime convolves, from the first layer to the last.

Between blocked operators nothing is reordered. Two habits of torch's exporter break the chain at every squeeze and
excite: its mean over positions, and its product of maps with one number per channel.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from talaria_export.convert.passes.rewrites import keeps_dims, set_nodes, shapes

_PASSES = frozenset({"Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Clip"})
"""Operators on single values, which leave the form as it is."""

_SCALES = "_gate_scales"
_NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}

Shapes = Mapping[str, list[int]]
"""What :func:`~talaria_export.convert.passes.rewrites.shapes` tells."""


def keep_blocked(model: ModelProto) -> None:
    """Both rewrites of what is float32, in place: ONNX Runtime pools no other numbers. Means are summed in another
    order (float32 rounding); all else is exact."""
    known = shapes(model, TensorProto.FLOAT)
    pool_means(model, known)
    spread_gates(model, known)


def pool_means(model: ModelProto, known: Shapes) -> None:
    """Turns means over all positions of maps (N, C, H, W) into average pools."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        axes = constants.get(node.input[1]) if node.op_type == "ReduceMean" and len(node.input) == 2 else None
        over = {int(axis) % 4 for axis in numpy_helper.to_array(axes)} if axes is not None else set()
        if over != {2, 3} or len(known.get(node.input[0], [])) != 4:
            nodes.append(node)
        elif keeps_dims(node):
            nodes.append(helper.make_node("GlobalAveragePool", node.input[:1], node.output))
        else:
            pooled = f"{node.output[0]}_pooled"
            nodes.append(helper.make_node("GlobalAveragePool", node.input[:1], [pooled]))
            nodes.append(helper.make_node("Flatten", [pooled], node.output))
    set_nodes(model, nodes)


def spread_gates(model: ModelProto, known: Shapes) -> None:
    """Spreads a gate (N, C, 1, 1) over the positions of the maps (N, C, H, W) that it scales.

    The blocked product wants two equal shapes.
    """
    graph = model.graph
    makers = {node.output[0]: node for node in graph.node if node.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        pair = sorted(node.input, key=lambda name: known.get(name, [])[2:]) if node.op_type == "Mul" else []
        if len(pair) == 2 and _is_gate(*(known.get(name, []) for name in pair)) and _convolved(pair, makers):
            gate, maps = pair
            scales, wide = f"{node.output[0]}{_SCALES}", f"{node.output[0]}_gate"
            graph.initializer.append(numpy_helper.from_array(np.array([1, 1, *known[maps][2:]], np.float32), scales))
            nodes.append(helper.make_node("Resize", [gate, "", scales], [wide], **_NEAREST))
            node.input[:] = [wide, maps]
        nodes.append(node)
    set_nodes(model, nodes)
    tell_batches(model)


def tell_batches(model: ModelProto) -> None:
    """Says of every spread gate that its batch is the model's.

    ONNX's shape inference loses it at ``Resize``, and ONNX Runtime would then not see that the shapes are equal.
    """
    graph = model.graph
    batch = graph.input[0].type.tensor_type.shape.dim[0].dim_param or None
    for node in graph.node:
        if node.op_type == "Resize" and node.input[2].endswith(_SCALES):
            told = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, [batch, None, None, None])
            graph.value_info.append(told)


def _is_gate(gate: list[int], maps: list[int]) -> bool:
    return len(gate) == len(maps) == 4 and gate[1:] == [maps[1], 1, 1] and min(maps[1:]) > 0 and max(maps[2:]) > 1


def _convolved(names: list[str], makers: dict[str, NodeProto]) -> bool:
    """Whether all come from convolutions; elsewhere nothing is blocked, and spreading would only cost."""
    found = [makers.get(name) for name in names]
    while any(maker and maker.op_type in _PASSES for maker in found):
        found = [makers.get(m.input[0]) if m and m.op_type in _PASSES else m for m in found]
    return all(maker and maker.op_type in ("Conv", "Add") for maker in found)
