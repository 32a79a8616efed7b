""":func:`make_bundle`: converts a personal model, measures every variant, and seals the bundle."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from talaria import inputs, tasks, valid
from talaria.data.federated import require_inputs
from talaria.errors import BundleError, ConfigError, DataError, ModelError
from talaria.foreign import shown
from talaria.inputs import Parts
from talaria.model.weights import Model, Served
from talaria.tensors import Array
from talaria.types import Samples
from talaria_export.build import selection
from talaria_export.bundle.bundle import array_bytes, read_bundle, save, seal
from talaria_export.bundle.manifest import LONGEST, VARIANTS, check_names
from talaria_export.bundle.onnx_validator import AGAIN
from talaria_export.bundle.preprocess import ELEMENTS, Preprocessing, preprocessing
from talaria_export.bundle.report import Check, Report
from talaria_export.convert import served
from talaria_export.convert.names import INPUT, OUTPUT
from talaria_export.convert.passes.preprocessing import prefixed_bytes
from talaria_export.convert.passes.rewrites import hollow_bytes, slim_opsets
from talaria_export.convert.quantize import Gate, Made, make_variants
from talaria_export.runtime import cpu
from talaria_export.runtime.parity_inputs import drawn_as, over, spread
from talaria_export.runtime.session import Session, optimized

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import Tensor
    from torch.nn import Module

TOLERANCE = 1e-4
"""Largest difference to the model itself that its fp32 file may show, absolute; relative to the largest logit above
10."""


def make_bundle(
    path: str | os.PathLike[str],
    model: Model,
    *,
    example: Tensor | Array,
    samples: Samples | tuple[Any, Any] | None = None,
    calibration: Tensor | Array | None = None,
    labels: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
    normalize: tuple[object, object] | None = None,
    stride: int | None = None,
    dense: Module | bytes | None = None,
    variants: Sequence[str] = VARIANTS,
    gate: Gate = Gate(),
    optimize: bool = False,
    executorch: bool = False,
    keep_samples: bool = False,
    probes: int = 16,
    seed: int = 0,
    signing_key: bytes | None = None,
    created: str | None = None,
    seconds: float = 0.5,
    precision: str = "fp32",
    task: str = tasks.CLASSIFICATION,
) -> Report:
    """Writes the bundle of a personal model and reports what was measured.

    ``model`` is a torch module, or what a device without torch serves (:class:`~talaria.model.weights.Served`).
    ``example`` is a float32 batch (N, ...), a tensor or an array; ``samples`` are the user's held-out samples, on which
    variants are judged; ``calibration`` are other inputs of the user, for static int8 (without them, every second
    held-out sample is used and judged on none of the others). ``labels`` name the classes; ``meta`` becomes the model
    card. ``dense`` is the unpruned model, or its file from ``export_onnx(..., plain=True)``, that latency is compared
    with. With ``optimize`` the bundle also holds the chosen variant as ONNX Runtime rewrote it for this machine's class
    of CPU: it loads in half the time there, and every other machine takes the portable file. With ``executorch`` it
    holds the fp32 model as a program for phones too (extra ``talaria[executorch]``).

    ``normalize`` is (mean, std), numbers or one per channel, that the model's training data were normalized with, and
    ``stride`` the steps from one window to the next: both go into the graph, so that the bundle takes raw numbers, or
    one whole recording (time, channels). All that is given *here* stays as the model takes it, normalized and cut.

    With ``keep_samples`` the first ``probes`` held-out inputs travel in the bundle; else parity is proven on inputs
    drawn from ``seed``, and nothing of the user's recordings is in the file. ``signing_key`` is a raw Ed25519 key.
    With ``precision="fp16"`` the bundle is to be half as large: the fp32 form is only what others are measured against,
    and is neither chosen nor kept where another passed the gate.
    ``seconds`` of CPU time go into measuring latency; with 0 it is not measured, and the smallest variant that passes
    the gate is chosen. ``task`` is what the model says of an input (:mod:`talaria.tasks`); variants are judged by its
    own score and decisions (:class:`~talaria_export.convert.quantize.Gate`).

    Raises :class:`~talaria.errors.ModelError` where the model gives NaN or infinity, or its export differs from torch,
    and whatever :func:`~talaria_export.convert.onnx.export_onnx` and :func:`~talaria_export.bundle.bundle.save` raise.
    Nothing is written then.
    """
    valid.path("bundle", "path", path)
    check_names(variants)
    if precision not in ("fp32", "fp16"):
        raise ConfigError(f"precision={precision!r} must be 'fp32' or 'fp16'")
    task = task if tasks.of(task).name == "regression" else tasks.of(task).name  # how classes were learned stays out
    _require_options(meta, gate, seconds, seed, probes, created)
    held, example = _held_out(samples, task), inputs.array_of(example, "example")
    if example.dtype != np.float32 or example.ndim < 2 or not len(example):
        raise DataError(
            f"example: need a float32 batch (N, ...), got {example.dtype} of shape {example.shape}; convert it with "
            "numpy.float32, and add the batch dimension with x[None]"
        )
    if held is not None and held.x.shape[1:] != example.shape[1:]:
        sizes = ", ".join(map(str, example.shape[1:]))
        raise DataError(f"samples: x has shape {held.x.shape}, and the model takes (N, {sizes}); give such as it takes")
    steps = preprocessing(example.shape[1:], normalize, stride)
    if executorch:
        from talaria_export.convert.executorch import needed

        needed()
    proto, parts = _converted(model, example), model.parts if isinstance(model, Served) else _parts_of(model)
    if held is not None:
        inputs.require_alike("samples:", held.parts, parts, example.shape[1:])
    given, source = _probes(model, example, held, steps, keep_samples, probes, seed)
    x = steps.apply(given)
    expected = _finite(_run(model, x))
    wanted = 3 if tasks.of(task).name == "per_step" else 2
    if expected.ndim != wanted:
        form = "(N, steps, classes)" if wanted == 3 else "(N, classes)"
        raise ModelError(
            f"model: gives {expected.shape} for a batch of {len(x)}; for task={task!r} it must give {form}"
        )
    names = _labels(labels, expected.shape[-1])
    if held is not None and len(held):
        tasks.of(task).require("samples:", held.y, expected.shape[-1])
    calibrated, judged = _roles(held, calibration, x)
    reference = _reference(dense, example, steps)

    made = make_variants(proto, variants, calibrated, judged[0], gate, task)
    every = x if held is None else np.concatenate([x, held.x])
    difference = _apart(made[0], every, _finite(_run(model, every)))
    rows = [selection.judge(one, made[0], judged, gate, x, expected, task) for one in made]
    if not steps.empty:
        made = [_ready(one, steps, row) for one, row in zip(made, rows, strict=True)]
        difference = max(difference, _apart(made[0], given, expected))
    if seconds > 0:
        selection.time(made, rows, reference, given[: steps.inputs(1)[0]], seconds)
    smaller = [row for row in rows if row["passed"] and row["name"] != "fp32"]
    default = selection.choose(smaller if precision == "fp16" and smaller else rows, gate)
    inside = {default} if precision == "fp16" else {"fp32", default}

    members = {"parity/outputs.npy": array_bytes(expected)}
    if keep_samples:
        members["parity/inputs.npy"] = array_bytes(given)
    if reference is not None:
        members["reference/dense.onnx"] = hollow_bytes(reference)
    for one, row in zip(made, rows, strict=True):
        if one.data is not None and one.name in inside:
            row["file"] = f"models/{one.name}.onnx"
            members[row["file"]] = one.data
        if one.data is not None and optimize and one.name == default:
            name = f"optimized/{one.name}.onnx"
            members[name] = slim_opsets(optimized(one.data))
            row["optimized"] = {"file": name, "cpu": cpu.cpu_class(), "onnxruntime": cpu.device()["onnxruntime"]}
    manifest = {
        "created": created,
        "card": dict(meta or {}),
        "input": {"name": INPUT, "shape": list(example.shape[1:]), "dtype": "float32", **steps.to_json()}
        | _named(parts, example.shape[1:]),
        "output": {"name": OUTPUT, "labels": names} | ({} if task == tasks.CLASSIFICATION else {"task": task}),
        "variants": rows,
        "default": default,
        "gate": {"agreement": gate.agreement, "accuracy_drop": gate.accuracy_drop}
        | ({"distance": gate.distance} if tasks.of(task).name == "regression" else {}),
        "parity": {"inputs": source, "outputs": "parity/outputs.npy", "tolerance": tolerance(expected)},
        "reference": None if reference is None else {"file": "reference/dense.onnx", "bytes": len(reference)},
        "device": cpu.device(),
    }
    if executorch:
        manifest["programs"] = [_program(model, x, steps, members)]
    data = seal(manifest, members, signing_key)
    try:
        read_bundle(data)  # nothing is written that would not open again
    except BundleError as error:
        why = str(error).removesuffix(AGAIN)
        raise ModelError(f"model: no bundle may hold it ({why}); use another layer or function there") from None
    save(path, data)
    by = "the device's own graph" if isinstance(model, Served) else "torch"
    return _report(Path(path), manifest, data, (difference, by), reference)


def _require_options(
    meta: object, gate: object, seconds: object, seed: object, probes: object, created: object
) -> None:
    """Raise :class:`~talaria.errors.ConfigError` for options that are none."""
    if meta is not None and not isinstance(meta, Mapping):
        raise ConfigError(f"meta={shown(meta)} must be a table by names, which becomes the model card")
    if not isinstance(gate, Gate):
        raise ConfigError(f"gate={shown(gate)} must be a Gate, such as Gate(agreement=0.98)")
    valid.number("bundle", "seconds", seconds, "at least 0, the CPU time that measuring takes", low=0)
    valid.whole("bundle", "seed", seed, 0)
    valid.whole("bundle", "probes", probes, 1, 4096)
    if created is not None and not isinstance(created, str):
        raise ConfigError(f"created={shown(created)} must be a text, such as '2026-01-31'")


def _held_out(samples: object, task: str) -> Samples | None:
    if samples is None or isinstance(samples, Samples):
        return samples
    if not isinstance(samples, tuple | list) or len(samples) != 2:
        raise DataError(f"samples: need Samples, or a pair (x, y) of arrays, got {type(samples).__name__}")
    x, y = samples
    return Samples.of(x, y, task=task)


def _named(parts: Parts, shape: tuple[int, ...]) -> dict[str, Any]:
    """The inputs by name that stand side by side in the one array that the file takes; nothing for a single one."""
    if (inputs.size_of(parts),) != shape:
        return {}
    return {"parts": [{"name": name, "shape": list(size)} for name, size in parts.items()]}


def _parts_of(model: Module) -> Parts:
    """Those of a module, or of the first within it where an algorithm serves two as one."""
    from talaria.model.several import Several

    return next((one.parts for one in model.modules() if isinstance(one, Several)), {})


def _converted(model: Model, example: Array) -> ModelProto:
    if isinstance(model, Served):
        return served.convert(model)
    from talaria.model.state import tensor_of
    from talaria_export.convert import onnx

    return onnx.convert(model, tensor_of(example))


def _finite(outputs: Array) -> Array:
    """``outputs`` as they are; a model that gives NaN or infinity is refused."""
    if not np.isfinite(outputs).all():
        raise ModelError(
            "model: gives NaN or infinity, as after a training that diverged; lower the learning rate, or scale the "
            "samples"
        )
    return outputs


def _apart(fp32: Made, given: Array, expected: Array) -> float:
    """The largest difference between ``expected`` and what the file gives; too large a one is refused."""
    difference = float(np.abs(Session(fp32.data or b"")(given) - expected).max())
    if not difference <= tolerance(expected):
        raise ModelError(
            f"model: its ONNX form differs from torch by {difference:.2e}, more than {tolerance(expected):.0e}; "
            "it depends on something that an export cannot hold, such as the batch or a random draw"
        )
    return difference


def tolerance(outputs: Array) -> float:
    """The largest difference to ``outputs`` that rounding explains."""
    return max(TOLERANCE, 1e-5 * float(np.abs(outputs).max()))


def _probes(
    model: Model, example: Array, held: Samples | None, steps: Preprocessing, keep: bool, count: int, seed: int
) -> tuple[Array, dict[str, Any]]:
    """What parity is proven on, as the bundle takes it, and how a reader of the bundle finds it again."""
    if math.prod(steps.inputs(count)) > ELEMENTS:
        raise ConfigError(f"probes={count} have more than {ELEMENTS} numbers together; take fewer")
    if keep:
        if held is None or len(held) == 0:
            raise ConfigError("keep_samples=True needs samples to keep; give samples=(x, y)")
        return steps.joined(steps.raw(held.x[:count])), {"file": "parity/inputs.npy"}
    kinds = _vocabulary(model)
    shift, scale = over(kinds) if kinds else spread(example if held is None else held.x)
    source: dict[str, Any] = {"seed": seed, "count": count, "shift": shift, "scale": scale}
    source |= {"normalized": True} if steps.mean else {}
    return drawn_as(source, steps), source


def _vocabulary(model: Model) -> int:
    """Kinds of tokens that a model reads; 0 where it reads numbers, as every model without torch does."""
    if isinstance(model, Served):
        return 0
    from talaria.model.tokens import vocabulary

    return vocabulary(model)


def _reference(dense: Module | bytes | None, example: Array, steps: Preprocessing) -> bytes | None:
    """The dense model as torch exports it, behind the same steps."""
    if dense is not None and not isinstance(dense, bytes):
        from talaria.model.state import tensor_of
        from talaria_export.convert.onnx import export_onnx

        return export_onnx(dense, tensor_of(example), plain=True, steps=steps)
    return dense if dense is None or steps.empty else prefixed_bytes(dense, steps)


def _ready(one: Made, steps: Preprocessing, row: dict[str, Any]) -> Made:
    """A variant with the steps before its model."""
    if one.data is None or row["bytes"] is None:
        return one
    data = prefixed_bytes(one.data, steps)
    row["bytes"] = len(data)
    return replace(one, data=data)


def _program(model: Model, example: Array, steps: Preprocessing, members: dict[str, bytes]) -> dict[str, Any]:
    """The manifest's row of the program for phones, which is added to ``members``."""
    from talaria.model.state import tensor_of
    from talaria_export.convert.executorch import program

    made = program(model, tensor_of(example), steps)
    members["programs/xnnpack.pte"] = made.data
    row = {"name": "xnnpack", "file": "programs/xnnpack.pte", "bytes": len(made.data), "runtime": made.runtime}
    return {**row, "takes": [1, *steps.shape], "max_abs_diff": made.difference}


def _labels(labels: Sequence[str] | None, classes: int) -> list[str]:
    names = [str(i) for i in range(classes)] if labels is None else [str(label) for label in labels]
    if len(names) != classes:
        raise ConfigError(f"labels: {len(names)} names for {classes} classes; give one per class")
    if not all(names):
        raise ConfigError(f"labels: {names.index('')} has no name; give one per class")
    if too_long := [name for name in names if len(name) > LONGEST]:
        raise ConfigError(f"labels: {shown(too_long[0])} has {len(too_long[0])} characters; use at most {LONGEST}")
    valid.different("labels", names)
    return names


def _roles(
    held: Samples | None, calibration: Tensor | Array | None, probes: Array
) -> tuple[Array | None, tuple[Array, Array | None]]:
    """Inputs to calibrate on, and (x, y) to judge by: never the same ones."""
    given = None if calibration is None else inputs.array_of(calibration, "calibration")
    if given is not None and given.dtype != np.float32:
        raise DataError(f"calibration: need float32 inputs, got {given.dtype}; convert them first")
    if given is not None:
        require_inputs("calibration", given, probes.shape[1:])
    if held is None or len(held) == 0:
        return given, (probes, None)
    x, y = held.x, held.y
    if given is not None or len(held) == 1:
        return given, (x, y)
    return x[::2], (x[1::2], y[1::2])


def _run(model: Model, x: Array) -> Array:
    """What the model itself gives, in eval mode, in batches of at most 256; it is left as it was."""
    if isinstance(model, Served):
        return model.predict(x)
    import torch

    from talaria.model.cloning import clone

    own = clone(model).cpu().eval()
    with torch.no_grad():
        parts = [own(part) for part in torch.split(torch.from_numpy(x), 256)]
    return np.asarray(torch.cat(parts).numpy(), dtype=np.float32)


def _report(
    path: Path, manifest: Mapping[str, Any], data: bytes, measured: tuple[float, str], dense: bytes | None
) -> Report:
    rows = {row["name"]: row for row in manifest["variants"]}
    chosen = rows[manifest["default"]]
    figures: dict[str, Any] = {
        "bytes": len(data),
        "default": manifest["default"],
        "max_abs_diff": measured[0],
        "model_bytes": chosen["bytes"],
        "dense_bytes": None if dense is None else len(dense),
        "accuracy": chosen.get("accuracy"),
        "latency_ms": chosen.get("latency_ms"),
        "latency_ratio": chosen.get("latency_ratio") if dense is not None else None,
        "variants": list(rows.values()),
    }
    checks = [Check("parity", True, f"largest difference to {measured[1]} {measured[0]:.1e}")]
    checks += [Check(f"variant {name}", True, row["why"] or "passed the gate") for name, row in rows.items()]
    return Report(str(path), tuple(checks), figures)
