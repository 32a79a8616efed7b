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
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from talaria.model.spec import ModelSpec
    from talaria.types import Samples, Task

MODELS = ("imu_cnn", "resnet18", "mobilenet_v3_small", "efficientnet_lite0")


def export(
    models: Annotated[str, typer.Option(help="Zoo models, with commas between.")] = ",".join(MODELS),
    keep: Annotated[float, typer.Option(help="Share of the channels that pruning keeps.")] = 0.5,
    epochs: Annotated[int, typer.Option(help="Epochs of training before and after pruning.")] = 4,
    size: Annotated[int, typer.Option(help="Height and width of images.")] = 64,
    seconds: Annotated[float, typer.Option(help="CPU seconds of latency measurement per model.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure export: the chosen variant of a pruned model against the dense model as torch exports it.

    Each model is trained briefly on a small task (smartwatch windows, or scanned digits), pruned, trained again,
    exported and timed. Times are CPU time of one thread, interleaved; read the ratios.
    """
    figures = measure([name for name in models.split(",") if name], keep, epochs, size, seconds)
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    columns = ("default", "latency_ratio", "size_ratio", "accuracy", "accuracy_fp32", "file_to_raw", "export_cpu_s")
    typer.echo("".join(f"{title:>20}" for title in ("model", *columns)))
    for name, row in figures["models"].items():
        cells = [row[column] for column in columns]
        texts = [cell if isinstance(cell, str) else f"{cell:.3f}" for cell in cells]
        typer.echo("".join(f"{text:>20}" for text in (name, *texts)))
    imports = figures["import_cpu_s"]
    typer.echo(f"import: {imports['predictor']:.2f} CPU s, of which onnxruntime and numpy {imports['onnxruntime']:.2f}")


def measure(
    models: Sequence[str], keep: float = 0.5, epochs: int = 4, size: int = 64, seconds: float = 3.0
) -> dict[str, Any]:
    """The figures of every model, and the cost of importing the predictor; plain data."""
    import torch

    from talaria_export import cpu

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = {name: _measure(name, keep, epochs, size, seconds) for name in models}
    finally:
        torch.set_num_threads(before)
    return {"device": cpu.device(), "keep": keep, "models": rows, "import_cpu_s": import_cost()}


def _measure(name: str, keep: float, epochs: int, size: int, seconds: float) -> dict[str, Any]:
    from talaria import local
    from talaria.model import pruning, zoo
    from talaria_export import Predictor, make_bundle, verify_bundle
    from talaria_export.onnx import export_onnx

    spec, train, test = _data(name, size)
    dense = zoo.build(spec)
    layout = zoo.layout(spec)
    task = _task(spec, dense, train, epochs)
    dense = local.served(task, local.calibrate(task, local.train(task, local.state_of(dense))))
    scores = pruning.importance(dense, layout)
    small = pruning.compact(dense, pruning.choose(scores, layout.full(), keep=keep))
    task = _task(spec, small, train, epochs)
    small = local.served(task, local.calibrate(task, local.train(task, local.state_of(small))))

    export_onnx(small, train.x[:2])  # the first export of a process also pays for its imports
    begin = time.process_time()
    portable = export_onnx(small, train.x[:2])
    export_s = time.process_time() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.talaria")
        report = make_bundle(
            path, small, example=train.x[:2], samples=test, calibration=train.x[:256], dense=dense, seconds=seconds
        )
        begin = time.process_time()
        Predictor(path)
        open_s = time.process_time() - begin
        verified = verify_bundle(path, samples=(test.x.numpy(), test.y.numpy()), seconds=0)
        whole = make_bundle(
            path, dense, example=train.x[:2], samples=test, calibration=train.x[:256], dense=dense, seconds=seconds / 2
        )
    rows = {row["name"]: row for row in report.figures["variants"]}
    parameters = sum(p.numel() * p.element_size() for p in small.parameters())
    return {
        "default": report.figures["default"],
        "latency_ratio": report.figures["latency_ratio"],
        "latency_ms": report.figures["latency_ms"],
        "size_ratio": report.figures["model_bytes"] / report.figures["dense_bytes"],
        "accuracy": report.figures["accuracy"],
        "accuracy_fp32": rows["fp32"]["accuracy"],
        "max_abs_diff": report.figures["max_abs_diff"],
        "file_to_raw": len(portable) / parameters,
        "export_cpu_s": export_s,
        "open_cpu_s": open_s,
        "verified": verified.ok,
        "variants": list(rows.values()),
        "dense_variants": whole.figures["variants"],
    }


def _data(name: str, size: int) -> tuple[ModelSpec, Samples, Samples]:
    """A model's spec, and training and held-out samples of a small real task that it can learn in a minute."""
    import torch

    from talaria.errors import ConfigError
    from talaria.model.spec import ModelSpec
    from talaria.simulate.data import catalog
    from talaria.types import Samples

    if name == "imu_cnn":
        clients = list(catalog.load("smartwatch").clients.values())
        train = Samples(torch.cat([c.train.x for c in clients]), torch.cat([c.train.y for c in clients]))
        test = Samples(torch.cat([c.test.x for c in clients]), torch.cat([c.test.y for c in clients]))
        classes = int(max(int(train.y.max()), int(test.y.max()))) + 1
        return ModelSpec(name, tuple(train.x.shape[1:]), classes), train, test
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("bench: images need scikit-learn; pip install scikit-learn") from None
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    x = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear").repeat(1, 3, 1, 1).contiguous()
    y = torch.from_numpy(digits.target).long()
    return ModelSpec(name, (3, size, size), 10), Samples(x[:1200], y[:1200]), Samples(x[1200:], y[1200:])


def _task(spec: ModelSpec, model: Any, train: Samples, epochs: int) -> Task:
    from talaria.model import zoo
    from talaria.types import Recipe, Task

    recipe = Recipe(epochs=epochs, batch=32, lr=0.05, momentum=0.9)
    return Task(model, zoo.split(spec, model), train, train, recipe, spec.classes)


def import_cost(repeats: int = 5) -> dict[str, float]:
    """CPU seconds that a fresh interpreter spends on importing the predictor, and on what it needs."""
    scripts = {
        "onnxruntime": "import numpy, onnxruntime",
        "predictor": "import talaria_export.predictor",
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
