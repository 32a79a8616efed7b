"""Rewrites of an exported ONNX graph that keep its numbers and make it smaller or faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from talaria.tensors import Array

_ALONE = frozenset(
    {"Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "Softplus", "Softsign", "Sigmoid"}
    | {"HardSigmoid", "HardSwish", "Tanh", "Erf", "Exp", "Sqrt", "Neg", "Abs", "Clip", "Cast", "Identity"}
    | {"BatchNormalization", "GlobalAveragePool", "GlobalMaxPool"}
)  # the first input decides the shape; the others are parameters that need no change
_TOGETHER = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "PRelu"})
_POOLS = frozenset({"MaxPool", "AveragePool"})


def lift_1d(model: ModelProto) -> int:
    """Turns 1D convolutions, and all between them, into 2D ones of height 1; returns how many.

    ONNX Runtime's fast blocked kernels know 2D only. A height of 1 changes no product and no sum, so the numbers stay
    the same bit by bit. A value keeps its third dimension until an operator needs it without; only there it is
    squeezed.
    """
    ranks = {name: len(sizes) for name, sizes in shapes(model).items()}
    lift = _Lift(model, ranks)
    if not any(node.op_type == "Conv" and ranks.get(node.input[0]) == 3 for node in model.graph.node):
        return 0
    for node in list(model.graph.node):
        lift.visit(node)
    lift.lower(output.name for output in model.graph.output)
    set_nodes(model, lift.nodes)
    drop_unused(model)
    return lift.convolutions


class _Lift:
    def __init__(self, model: ModelProto, ranks: dict[str, int]) -> None:
        self.graph = model.graph
        self.ranks = ranks
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.tall: dict[str, str] = {}  # value -> its name with height 1
        self.flat: set[str] = set()  # lifted values that exist without the height as well
        self.nodes: list[NodeProto] = []
        self.convolutions = 0
        self.axes: str | None = None

    def visit(self, node: NodeProto) -> None:
        done = False
        if node.domain in ("", "ai.onnx") and len(node.output) == 1:
            if node.op_type == "Conv":
                done = self.ranks.get(node.input[0]) == 3 and self.convolution(node)
            elif node.op_type in _POOLS and node.input[0] in self.tall:
                done = self.windowed(node, [])
            elif node.op_type in _ALONE and node.input[0] in self.tall:
                done = self.emit(node, [self.tall[node.input[0]], *node.input[1:]])
            elif node.op_type in _TOGETHER and any(name in self.tall for name in node.input):
                done = self.together(node)
            elif node.op_type == "Concat" and all(name in self.tall for name in node.input):
                done = self.concat(node)
            elif node.op_type == "ReduceMean" and node.input[0] in self.tall:
                done = self.mean(node)
            elif node.op_type in ("Reshape", "Flatten") and node.input[0] in self.tall:
                done = self.flatten(node)
        if not done:
            self.lower(node.input)
            self.nodes.append(node)

    def lower(self, names: Iterable[str]) -> None:
        """Makes the plain form of lifted values available."""
        for name in names:
            if name in self.tall and name not in self.flat:
                self.nodes.append(helper.make_node("Squeeze", [self.tall[name], self.height()], [name]))
                self.flat.add(name)

    def height(self) -> str:
        if self.axes is None:
            self.axes = self.constant("height_axis", np.array([-2], np.int64))
        return self.axes

    def constant(self, name: str, value: Array) -> str:
        if name not in self.constants:
            tensor = numpy_helper.from_array(value, name)
            self.graph.initializer.append(tensor)
            self.constants[name] = tensor
        return name

    def raised(self, name: str) -> str:
        """The name of a value with height 1."""
        if name in self.tall:
            return self.tall[name]
        if self.ranks[name] < 2:
            return name
        if name in self.constants:
            value = numpy_helper.to_array(self.constants[name])
            return self.constant(f"{name}_2d", np.expand_dims(value, -2))
        self.nodes.append(helper.make_node("Unsqueeze", [name, self.height()], [f"{name}_2d"]))
        self.tall[name] = f"{name}_2d"
        self.flat.add(name)
        return self.tall[name]

    def emit(self, node: NodeProto, inputs: list[str]) -> bool:
        lifted = NodeProto()
        lifted.CopyFrom(node)
        del lifted.input[:]
        lifted.input.extend(inputs)
        self.tall[node.output[0]] = lifted.output[0] = f"{node.output[0]}_2d"
        self.nodes.append(lifted)
        return True

    def convolution(self, node: NodeProto) -> bool:
        if node.input[1] not in self.constants:
            return False
        self.convolutions += 1
        return self.windowed(node, [self.raised(node.input[1]), *node.input[2:]])

    def windowed(self, node: NodeProto, rest: list[str]) -> bool:
        self.emit(node, [self.raised(node.input[0]), *rest])
        for attribute in self.nodes[-1].attribute:
            ints = list(attribute.ints)
            if attribute.name in ("kernel_shape", "strides", "dilations"):
                attribute.ints[:] = [1, *ints]
            elif attribute.name == "pads":
                attribute.ints[:] = [0, ints[0], 0, ints[1]]
        return True

    def together(self, node: NodeProto) -> bool:
        if self.ranks.get(node.output[0]) != 3 or any(name not in self.ranks for name in node.input):
            return False
        return self.emit(node, [self.raised(name) for name in node.input])

    def concat(self, node: NodeProto) -> bool:
        self.emit(node, [self.tall[name] for name in node.input])
        for attribute in self.nodes[-1].attribute:
            if attribute.name == "axis":
                attribute.i = {2: 3, -1: 3, -2: 1, -3: 0}.get(attribute.i, attribute.i)
        return True

    def flatten(self, node: NodeProto) -> bool:
        """The order of the values is the same with and without the height, so there is nothing to squeeze."""
        if node.op_type == "Reshape":
            shape = self.constants.get(node.input[1])
            literal = any(a.name == "allowzero" and a.i for a in node.attribute)
            if shape is None or 0 in numpy_helper.to_array(shape)[0 if literal else 2 :]:
                return False
        elif any(a.name == "axis" and a.i not in (0, 1, 2) for a in node.attribute):
            return False
        plain = NodeProto()
        plain.CopyFrom(node)
        plain.input[0] = self.tall[node.input[0]]
        self.nodes.append(plain)
        return True

    def mean(self, node: NodeProto) -> bool:
        """A mean over time: over height and time at once, so that nothing needs squeezing where it drops them."""
        axes = self.constants.get(node.input[1]) if len(node.input) == 2 else None
        if axes is None or numpy_helper.to_array(axes).tolist() not in ([2], [-1]):
            return False
        over = self.constant("height_and_time_axes", np.array([2, 3], np.int64))
        if keeps_dims(node):
            return self.emit(node, [self.tall[node.input[0]], over])
        self.nodes.append(NodeProto(op_type="ReduceMean", input=[self.tall[node.input[0]], over], output=node.output))
        self.nodes[-1].attribute.append(helper.make_attribute("keepdims", 0))
        return True


def shapes(model: ModelProto, kind: int | None = None) -> dict[str, list[int]]:
    """Sizes of every value whose rank is known, of those of ONNX's type ``kind`` alone where one is given; 0 where a
    size is not fixed, as the batch's."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    found = {tensor.name: list(tensor.dims) for tensor in inferred.initializer if kind in (None, tensor.data_type)}
    for value in [*inferred.input, *inferred.value_info, *inferred.output]:
        if value.type.tensor_type.HasField("shape") and kind in (None, value.type.tensor_type.elem_type):
            found[value.name] = [size.dim_value for size in value.type.tensor_type.shape.dim]
    return found


def keeps_dims(node: NodeProto) -> bool:
    """Whether a reduction leaves the dimensions that it reduces, with a size of 1."""
    return bool(next((a.i for a in node.attribute if a.name == "keepdims"), 1))


def set_nodes(model: ModelProto, nodes: Iterable[NodeProto]) -> None:
    """Makes ``nodes`` the operators of the graph, in their order."""
    chosen = list(nodes)
    del model.graph.node[:]
    model.graph.node.extend(chosen)


def fold_batchnorm(model: ModelProto) -> int:
    """Folds every BatchNorm that follows a convolution of its own into it; returns how many."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node if node.output}
    uses = Counter(name for node in graph.node for name in node.input) + Counter(o.name for o in graph.output)
    gone = []
    for node in graph.node:
        conv = makers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        if conv is None or conv.op_type != "Conv" or uses[conv.output[0]] != 1:
            continue
        names = [*node.input[1:5], *conv.input[1:]]
        if any(name not in constants for name in names) or uses[conv.input[1]] != 1:
            continue
        gamma, beta, mean, variance, weight, *bias = (
            numpy_helper.to_array(constants[name]).astype(np.float64) for name in names
        )
        epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        factor = gamma / np.sqrt(variance + epsilon)
        weight *= factor.reshape(-1, *[1] * (weight.ndim - 1))
        shift = beta + ((bias[0] if bias else 0.0) - mean) * factor
        name = f"{conv.output[0]}_bias"
        graph.initializer.append(numpy_helper.from_array(shift.astype(np.float32), name))
        constants[conv.input[1]].CopyFrom(numpy_helper.from_array(weight.astype(np.float32), conv.input[1]))
        conv.input[2:] = [name]
        conv.output[0] = node.output[0]
        gone.append(node)
    for node in gone:
        graph.node.remove(node)
    drop_unused(model)
    return len(gone)


def drop_unused(model: ModelProto) -> None:
    """Removes weights that no operator reads."""
    used = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def strip(model: ModelProto) -> None:
    """Drops what only a reader of the graph would miss: traces of the source code, comments and inner names."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]
    del graph.value_info[:]
    public = {value.name for value in [*graph.input, *graph.output]} | {t.name for t in graph.initializer}
    short: dict[str, str] = {}
    for node in graph.node:
        node.name = ""
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name and name not in public:
                    names[place] = short.setdefault(name, f"v{len(short)}")


def hollow(model: ModelProto) -> ModelProto:
    """A copy whose weights are one constant each: it takes as long as the model, and is a few kilobytes.

    Each constant is one over the number of products that it is summed over, so that no activation runs away. The
    factors by which a map grows are no weights: sizes follow from them.
    """
    empty = ModelProto()
    empty.CopyFrom(model)
    makers, sizes = [], {name for node in empty.graph.node if node.op_type == "Resize" for name in node.input[1:]}
    for tensor in empty.graph.initializer:
        shape = list(tensor.dims)
        if tensor.data_type != TensorProto.FLOAT or np.prod(shape) <= 1 or tensor.name in sizes:
            continue
        value = helper.make_tensor("", TensorProto.FLOAT, [1], [len(shape) and shape[0] / np.prod(shape)])
        dims = f"{tensor.name}_dims"
        makers.append(helper.make_node("ConstantOfShape", [dims], [tensor.name], value=value))
        tensor.CopyFrom(numpy_helper.from_array(np.array(shape, np.int64), dims))
    set_nodes(empty, [*makers, *empty.graph.node])
    return empty


def slim_opsets(data: bytes) -> bytes:
    """Drops the operator sets that no operator uses; ONNX Runtime lists all it knows in the files that it writes."""
    model = onnx.load_from_string(data)
    used = {node.domain for node in model.graph.node} | {""}
    kept = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return file_of(model)


def hollow_bytes(data: bytes) -> bytes:
    """:func:`hollow` from file to file."""
    return file_of(hollow(onnx.load_from_string(data)))


def file_of(model: ModelProto) -> bytes:
    """The model's file; equal models give equal bytes."""
    data: bytes = model.SerializeToString(deterministic=True)
    return data
