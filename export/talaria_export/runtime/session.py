"""The one place where an ONNX Runtime session is made."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from talaria import valid
from talaria.errors import BundleError, ConfigError, DataError
from talaria.planning.io_binding import Bound
from talaria.planning.refusals import refusals, short
from talaria.tensors import Array
from talaria_export.bundle.bundle import Bundle
from talaria_export.runtime.cpu import cpu_class

CPU = "CPUExecutionProvider"
MOST_THREADS = 256
"""ONNX Runtime begins them all before it answers: 100,000 of them never do."""


class Session:
    """A model ready to run: one input, one output, float32 in and out. Safe to call from many threads."""

    def __init__(
        self, model: bytes, *, threads: int = 1, providers: Sequence[str] = (CPU,), optimize: bool = True
    ) -> None:
        valid.whole("session", "threads", threads, 1, MOST_THREADS)
        unknown = [name for name in providers if name not in onnxruntime.get_available_providers()]
        if unknown or not providers:
            here = ", ".join(onnxruntime.get_available_providers())
            raise ConfigError(f"providers={list(providers)}: {unknown} are not in this onnxruntime; it has {here}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Below this level convolutions lose their blocked layout and take 1.25 to 2.5 times as long.
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        try:
            session = onnxruntime.InferenceSession(model, options, providers=list(providers))
        except refusals() as problem:
            lacking = "NOT_IMPLEMENTED" in str(problem)  # as a convolution of float64
            mend = "give a model of float32 weights, or use another layer there" if lacking else "export it again"
            raise BundleError(f"model: ONNX Runtime cannot load it ({short(problem)}); {mend}") from None
        inputs, outputs = session.get_inputs(), session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1 or inputs[0].type != "tensor(float)":
            raise BundleError("model: must have one float32 input and one output; export it again")
        self._call = Bound(session)

    def __call__(self, x: Array) -> Array:
        """The outputs for a float32 batch."""
        try:
            return self._call(x)
        except refusals() as problem:
            raise DataError(f"x: ONNX Runtime refused an input of shape {x.shape} ({short(problem)})") from None


def optimized(model: bytes) -> bytes:
    """The model as ONNX Runtime rewrote it for the CPU class of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "optimized.onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(model, options, providers=[CPU])
        return path.read_bytes()


def session_of(
    bundle: Bundle, variant: str | None = None, *, threads: int = 1, providers: Sequence[str] = (CPU,)
) -> Session:
    """A session for a variant; of its optimized form where that was made for this machine's class and runtime."""
    ready = bundle.variant(variant).get("optimized")
    here = {"cpu": cpu_class(), "onnxruntime": onnxruntime.__version__}
    if ready is not None and {name: ready[name] for name in here} == here and tuple(providers) == (CPU,):
        return Session(bytes(bundle.members[ready["file"]]), threads=threads, optimize=False)
    return Session(bundle.model(variant), threads=threads, providers=providers)
