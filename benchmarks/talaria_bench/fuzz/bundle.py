"""Fuzz targets of bundles: the archive, its manifest, and the ONNX model in it."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from talaria.errors import BundleError
from talaria_bench.fuzz.target import Target
from talaria_export.bundle.archive import pack, unpack
from talaria_export.bundle.bundle import read_bundle
from talaria_export.bundle.onnx_validator import inspect_onnx


def targets() -> list[Target]:
    """All of them."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    model: bytes = onnx.ModelProto.SerializeToString(helper.make_model(graph))
    refused = (BundleError,)
    return [
        Target("archive", unpack, refused, [pack({"manifest.json": b"{}", "model.onnx": model})]),
        Target("bundle", read_bundle, refused, [pack({"manifest.json": b'{"files": {}}'})]),
        Target("manifest", lambda data: read_bundle(pack({"manifest.json": data})), refused, [b'{"files": {}}']),
        Target("onnx", lambda data: inspect_onnx("model.onnx", data), refused, [model]),
    ]
