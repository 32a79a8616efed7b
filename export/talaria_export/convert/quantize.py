"""Smaller and faster forms of one model. None is trusted: each is measured against fp32 before it is chosen."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from talaria import tasks
from talaria.errors import ConfigError, DataError
from talaria.tensors import Array
from talaria_export.bundle.manifest import check_names
from talaria_export.convert.passes.nchwc import tell_batches
from talaria_export.convert.passes.rewrites import file_of, set_nodes, strip
from talaria_export.convert.quiet import quiet_root
from talaria_export.runtime.cpu import has_vnni
from talaria_export.runtime.likeness import likeness
from talaria_export.runtime.session import Session

PREFIXES = (0, 1, 3, 6, 9)
"""How many of the first layers static int8 may leave in fp32, tried in this order."""


@dataclass(frozen=True)
class Gate:
    """What a variant must keep, against fp32 on held-out inputs.

    ``agreement`` is the least share of equal decisions (the likeliest class, of each step where there are steps; each
    label said or not); of a regression ``distance`` is the most that its numbers may lie apart, root mean square, as a
    share of the spread of what fp32 gives. ``accuracy_drop`` is the most that may be lost of the accuracy, or of the
    task's score (R², F1, steps right); ``latency_gain`` the share of time within which two variants count as equally
    fast (the smaller file wins).
    """

    agreement: float = 0.99
    accuracy_drop: float = 0.01
    latency_gain: float = 0.05
    distance: float = 0.05

    def __post_init__(self) -> None:
        for name in ("agreement", "accuracy_drop", "latency_gain", "distance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"gate: {name}={getattr(self, name)} must be in [0, 1]")


@dataclass(frozen=True)
class Made:
    """A variant's file, or the reason why there is none."""

    name: str
    data: bytes | None
    why: str = ""
    settings: dict[str, Any] | None = None


def make_variants(
    fp32: ModelProto,
    wanted: Sequence[str],
    calibration: Array | None,
    held_out: Array,
    gate: Gate,
    task: str = tasks.CLASSIFICATION,
) -> list[Made]:
    """The wanted variants of ``fp32``, which comes first whether wanted or not.

    ``calibration`` (N, ...) float32 sets the ranges of static int8; ``held_out`` (N, ...) decides how many of its
    first layers stay in fp32. Raises :class:`~talaria.errors.ConfigError` on an unknown name.
    """
    check_names(wanted)
    made = [Made("fp32", file_of(fp32))]
    if "fp16" in wanted:
        made.append(Made("fp16", file_of(half(fp32))))
    if "int8" in wanted:
        made.append(_static(fp32, calibration, held_out, gate, task))
    if "int8-linear" in wanted:
        made.append(_linear(fp32))
    return made


def half(model: ModelProto) -> ModelProto:
    """Weights stored in half precision and cast back at load: half the file, the speed of fp32.

    A weight beyond the range of half precision keeps its tensor in fp32.
    """
    out = ModelProto()
    out.CopyFrom(model)
    casts = []
    for tensor in out.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(list(tensor.dims)) < 32:
            continue
        value = numpy_helper.to_array(tensor)
        if np.abs(value).max() > np.finfo(np.float16).max:
            continue
        stored = f"{tensor.name}_16"
        casts.append(helper.make_node("Cast", [stored], [tensor.name], to=TensorProto.FLOAT))
        with np.errstate(under="ignore"):  # also where an app has numpy raise for it: such a weight becomes 0
            tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float16), stored))
    set_nodes(out, [*casts, *out.graph.node])
    return out


def _static(fp32: ModelProto, calibration: Array | None, held_out: Array, gate: Gate, task: str) -> Made:
    if calibration is None or len(calibration) == 0:
        return Made("int8", None, "needs samples of the user to calibrate on")
    layers = _layers(fp32)
    # Numbers in units of their own, side by side in one tensor, are nothing that 256 steps could hold.
    last = layers[-1:] if tasks.of(task).name == "regression" else []
    expected = Session(file_of(fp32))(held_out)
    best: Made | None = None
    best_agreement, refused = -1.0, "has no layer to quantize"
    for prefix in PREFIXES:
        if prefix >= len(layers) - len(last):
            break
        data = static_int8(fp32, calibration, keep=[*layers[:prefix], *last], reduce_range=not has_vnni())
        try:
            found = Session(data)(held_out)
        except DataError as error:  # as where one tensor is an embedding's table and a linear layer's weight
            refused = f"does not run in 8 bits: {error}"
            continue
        alike = likeness(task, found, expected)
        if alike.agreement > best_agreement:
            best_agreement = alike.agreement
            best = Made("int8", data, settings={"fp32_layers": prefix, "reduce_range": not has_vnni()})
        if not alike.why_not(gate.agreement, gate.distance):
            break
    return best or Made("int8", None, refused)


def _linear(fp32: ModelProto) -> Made:
    if not any(node.op_type in ("Gemm", "MatMul") for node in fp32.graph.node):
        return Made("int8-linear", None, "has no linear layer")
    return Made("int8-linear", linear_int8(fp32))


def static_int8(model: ModelProto, calibration: Array, *, keep: Sequence[str], reduce_range: bool) -> bytes:
    """Activations in unsigned and weights in signed 8 bits, per channel (QDQ), ranges from ``calibration``.

    ``keep`` names layers that stay in fp32. ``reduce_range`` gives weights 7 bits: without VNNI instructions, sums of
    two products of 8-bit numbers saturate.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches: Iterator[Array] = iter(np.array_split(calibration, -(-len(calibration) // 32)))

        def get_next(self) -> Any:
            batch = next(self.batches, None)
            return None if batch is None else {"input": batch}  # None ends the calibration

    named = _named(model)
    # ONNX Runtime has no transposed convolution in 8 bits, and its quantizer fails at one of several groups, and at a
    # normalization over several dimensions.
    several = {one.name for one in named.graph.initializer if len(one.dims) > 1}
    floats = [
        node.name
        for node in named.graph.node
        if node.op_type == "ConvTranspose"
        or (node.op_type == "LayerNormalization" and not several.isdisjoint(node.input[1:]))
    ]
    with tempfile.TemporaryDirectory() as folder, quiet_root(), np.errstate(invalid="ignore"):  # of a mask's -inf
        path = Path(folder, "int8.onnx")
        quantize_static(
            named,
            path,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=[*keep, *floats],
            extra_options=_FLOATS,
        )
        return _stripped(path)


def linear_int8(model: ModelProto) -> bytes:
    """Weights of the linear layers in 8 bits, activations quantized as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, quiet_root():
        path = Path(folder, "int8.onnx")
        quantize_dynamic(
            _named(model),
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=not has_vnni(),
            weight_type=QuantType.QInt8,
            extra_options=_FLOATS,
        )
        return _stripped(path)


_FLOATS = {"DefaultTensorType": TensorProto.FLOAT}
"""What a product gives where shapes are not known ahead, as those of a network that makes zeros for its batch."""


def _layers(model: ModelProto) -> list[str]:
    return [node.name for node in _named(model).graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]


def _named(model: ModelProto) -> ModelProto:
    """The quantizer addresses operators by name."""
    out = copy.deepcopy(model)
    for number, node in enumerate(out.graph.node):
        node.name = f"n{number}"
    return out


def _stripped(path: Path) -> bytes:
    model = onnx.load(path)
    strip(model)
    tell_batches(model)
    return file_of(model)
