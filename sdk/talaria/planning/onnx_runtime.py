"""ONNX Runtime, for measuring: a session, the form its optimizer gives a graph, and a graph at other widths.

The one file of the sdk that knows onnx and onnxruntime; both belong to the extra ``talaria[export]`` and are imported
when asked for.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Module

from talaria import plugins
from talaria.errors import ConfigError, ModelError
from talaria.planning.anatomy import Anatomy, Widths
from talaria.planning.io_binding import Bound
from talaria.tensors import Array

Exporter = Callable[[Module, Tensor], bytes]
"""``(module, example batch) -> ONNX file``, in the form in which the model is deployed."""

EXPORTERS = "talaria.exporters"
"""Entry-point group in which an installed exporter makes itself known."""

NEEDS = "install the extra: pip install 'talaria[export]'"


def exporter() -> Exporter:
    """The installed exporter. Raises :class:`~talaria.errors.ConfigError` where there is none."""
    why = "latency is measured on the exported model"
    found: Exporter = plugins.installed(EXPORTERS, why, f"{why}, and no exporter is installed", NEEDS)
    return found


class Session:
    """``model`` ready to run on the calling thread alone: one input, one output."""

    def __init__(self, model: bytes) -> None:
        ort = _onnxruntime()
        self._call = Bound(ort.InferenceSession(model, _options(ort), providers=["CPUExecutionProvider"]))

    def __call__(self, x: Array) -> Array:
        """The output for a batch."""
        return self._call(x)


def caller(model: bytes, x: Array) -> Callable[[], object]:
    """A call that runs ``model`` on ``x`` once, on the calling thread alone."""
    return partial(Session(model), x)


def forms(model: bytes) -> Counter[str]:
    """How ONNX Runtime would run the operators of ``model`` here: ``domain:type`` -> count after its optimizer."""
    ort, onnx = _onnxruntime(), _onnx()
    with tempfile.TemporaryDirectory() as folder:
        options = _options(ort)
        options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        graph = onnx.load(options.optimized_model_filepath).graph
    return Counter(f"{node.domain or 'ai.onnx'}:{node.op_type}" for node in graph.node)


def convolutions(model: bytes) -> tuple[int, int]:
    """``(blocked, all)``: convolutions that run in the fast blocked form here, and all of them."""
    found = forms(model)
    blocked = found["com.microsoft.nchwc:Conv"]
    return blocked, blocked + sum(
        n
        for name, n in found.items()
        if name.split(":")[1] in ("Conv", "FusedConv") and not name.startswith("com.microsoft.nchwc")
    )


class Graph:
    """One exported model, and what it is made of."""

    def __init__(self, model: bytes, anatomy: Anatomy) -> None:
        self.onnx = _onnx()
        self.anatomy = anatomy
        self.proto = self.onnx.load_from_string(model)
        self.tensors = {t.name: t for t in self.proto.graph.initializer}


class Resizer(Graph):
    """One exported graph at other widths, in milliseconds and with arbitrary weights: it takes as long as the real
    one. Raises :class:`~talaria.errors.ModelError` where the graph does not show whose weights are whose, or reshapes
    to more than rows."""

    def __init__(self, model: bytes, anatomy: Anatomy) -> None:
        super().__init__(model, anatomy)
        self.keys = {name: key for name in self.tensors if (key := self._key(name)) is not None}
        noise = np.random.Generator(np.random.PCG64(0)).standard_normal(1 << 16)
        self.noise = noise.astype(np.float32)
        owned = {key for name, key in self.keys.items() if self.tensors[name].dims}
        lost = [f"{layer.name}.weight" for layer in anatomy.layers if not owned & set(_names(layer.name))]
        if lost:
            raise ModelError(f"the exported graph has no weights named {lost[0]!r}; its widths cannot be told")
        for node in self.proto.graph.node:
            if node.op_type == "Reshape" and list(
                self.tensors[node.input[1]].dims if node.input[1] in self.tensors else ()
            ) != [2]:
                raise ModelError(f"the exported graph reshapes to more than rows ({node.name or node.output[0]!r})")

    def _key(self, name: str) -> str | None:
        """The state-dict tensor that an initializer is, with or without a height of 1."""
        for key in (name, name.removesuffix("_2d")):
            if key in self.anatomy.shapes:
                return key
        return None

    def at(self, widths: Widths) -> bytes:
        """The file at ``widths``."""
        out = self.onnx.ModelProto()
        out.CopyFrom(self.proto)
        changed: dict[str, tuple[int, ...]] = {}
        for node in out.graph.node:
            if node.op_type == "Reshape":  # its shape becomes (batch as it is, all the rest)
                del node.attribute[:]
            if node.op_type not in ("Conv", "Gemm") or node.input[1] not in self.keys:
                continue
            shape = self._shape(node.input[1], widths)
            changed[node.input[1]] = shape
            if len(node.input) > 2 and node.input[2]:
                changed[node.input[2]] = shape[:1]
            if node.op_type == "Conv":
                self._regroup(node, shape)
        flat = {node.input[1] for node in out.graph.node if node.op_type == "Reshape"}
        for tensor in out.graph.initializer:
            if tensor.name in flat and list(tensor.dims) == [2]:
                tensor.CopyFrom(self.onnx.numpy_helper.from_array(np.array([0, -1], np.int64), tensor.name))
            elif tensor.data_type == self.onnx.TensorProto.FLOAT:
                shape = changed.get(tensor.name) or self._other(tensor, widths)
                if shape:
                    values = np.resize(self.noise, shape) * np.float32(1 / math.sqrt(max(1, math.prod(shape[1:]))))
                    tensor.CopyFrom(self.onnx.numpy_helper.from_array(values, tensor.name))
        data: bytes = out.SerializeToString()
        return data

    def _shape(self, name: str, widths: Widths) -> tuple[int, ...]:
        own = self.anatomy.shape(self.keys[name], widths)
        return own if len(own) == len(self.tensors[name].dims) else (*own[:2], 1, *own[2:])

    def _other(self, tensor: Any, widths: Widths) -> tuple[int, ...]:
        """The shape of a channel-wise tensor that is neither a weight nor a bias of a layer (an unfolded norm)."""
        return self._shape(tensor.name, widths) if tensor.name in self.keys else ()

    def _regroup(self, node: Any, shape: tuple[int, ...]) -> None:
        for attribute in node.attribute:
            if attribute.name == "group" and attribute.i > 1 and shape[1] == 1:
                attribute.i = shape[0]


def _names(layer: str) -> tuple[str, str]:
    return f"{layer}.weight", f"{layer}.base.weight"


def _options(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    return options


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(f"onnxruntime cannot be imported ({error}); {NEEDS}") from error
    return onnxruntime


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ConfigError(f"onnx cannot be imported ({error}); {NEEDS}") from error
    return onnx


def versions() -> Mapping[str, str]:
    """Versions of what latency depends on; empty where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("onnxruntime", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def chain(channels: int, layers: Sequence[tuple[int, int, int]], size: int) -> bytes:
    """Convolutions ``(outputs, kernel, groups)`` with ReLU between, on ``channels`` maps of ``size`` squared."""
    onnx = _onnx()
    nodes, tensors, value, width = [], [], "x", channels
    for number, (out, kernel, groups) in enumerate(layers):
        weight = np.full((out, width // groups, kernel, kernel), 0.01, np.float32)
        tensors.append(onnx.numpy_helper.from_array(weight, f"w{number}"))
        pads = [kernel // 2] * 4
        nodes.append(onnx.helper.make_node("Conv", [value, f"w{number}"], [f"c{number}"], group=groups, pads=pads))
        nodes.append(onnx.helper.make_node("Relu", [f"c{number}"], [f"r{number}"]))
        value, width = f"r{number}", out
    return _graph(onnx, nodes, tensors, (channels, size, size), value)


def product(width: int) -> bytes:
    """One linear layer of ``width`` inputs and outputs."""
    onnx = _onnx()
    tensors = [onnx.numpy_helper.from_array(np.full((width, width), 0.01, np.float32), "w")]
    return _graph(onnx, [onnx.helper.make_node("Gemm", ["x", "w"], ["y"])], tensors, (width,), "y")


def _graph(onnx: Any, nodes: Any, tensors: Any, shape: tuple[int, ...], output: str) -> bytes:
    kind = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info("x", kind, [1, *shape])]
    outputs = [onnx.helper.make_tensor_value_info(output, kind, None)]
    graph = onnx.helper.make_graph(nodes, "probe", inputs, outputs, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    data: bytes = model.SerializeToString()
    return data
