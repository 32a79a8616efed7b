"""``talaria bench engines``: a training step as a program in ONNX Runtime, against the same step in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria_bench import bars
from talaria_bench.steps import torch_step

if TYPE_CHECKING:
    from talaria.model.split import Part

CASES: tuple[tuple[str, tuple[int, ...], int, int, str, float], ...] = (
    ("imu_cnn", (6, 100), 7, 16, "all", 1.0),
    ("imu_cnn", (6, 100), 7, 16, "all", 0.5),
    ("imu_cnn", (6, 100), 7, 16, "head", 1.0),
    ("mlp", (20,), 4, 16, "all", 1.0),
    ("fmnist_cnn", (1, 28, 28), 10, 10, "all", 1.0),
    ("mobilenet_v3_small", (3, 64, 64), 10, 8, "all", 1.0),
    ("resnet18", (3, 64, 64), 10, 8, "all", 1.0),
    ("talaria_bench.sequences:transformer", (6, 32), 7, 16, "all", 1.0),
    ("talaria_bench.sequences:gru", (6, 32), 7, 16, "all", 1.0),
)
"""Model, input, classes, batch, what is trained, share of the channels that is kept."""
AIMS = {"imu_cnn all 1.0": 0.75, "imu_cnn all 0.5": 0.75, "mlp all 1.0": 0.14}
AIMS |= {"fmnist_cnn all 1.0": 1.0, "mobilenet_v3_small all 1.0": 1.0, "resnet18 all 1.0": 1.2}
AIMS |= {"talaria_bench.sequences:transformer all 1.0": 0.35, "talaria_bench.sequences:gru all 1.0": 0.3}
TRAININGS: tuple[tuple[str, tuple[int, ...], int, tuple[Part, ...], str | None], ...] = (
    ("imu_cnn", (6, 100), 7, ("head",), None),
    ("fmnist_cnn", (1, 28, 28), 10, ("head",), None),
    ("efficientnet_lite0", (3, 128, 128), 10, ("adapters", "head"), "lowrank"),
)
"""Model, input, classes, parts that are trained on kept features, adapters."""
TRAINING_AIMS = {"head": ("ratio", 0.3), "adapters,head": ("kept_ratio", 0.66)}
"""Of which ratio by what is trained: a head to torch's whole training, adapters to torch's on kept features too."""
SAMPLES, EPOCHS = 64, 10
ALONE = """
import resource, sys
from talaria.programs import vector
from talaria.programs.program import Program
program = Program.open(sys.argv[1])
feed = vector.inputs(program.graph, program.manifest)
weights = {name.removeprefix("weight/"): value for name, value in feed.items() if name.startswith("weight/")}
momentum = program.momentum(weights)
weights, momentum, _ = program.step(weights, momentum, feed["x"], feed["y"], lr=0.01)
used = resource.getrusage(resource.RUSAGE_SELF)
first = used.ru_utime + used.ru_stime
for _ in range(100):
    weights, momentum, _ = program.step(weights, momentum, feed["x"], feed["y"], lr=0.01)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(first, int(peak.split()[1]) / 1024, "torch" in sys.modules)
"""


def engines(
    rounds: Annotated[int, typer.Option(help="Rounds in which both engines run side by side.", min=1)] = 15,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios here, as SVG.", callback=bars.place)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure a step of SGD with momentum on both engines: thread CPU time, interleaved, as ratios in one run.

    Torch's step is the training loop's own, in its memory layout; the program's is `Training.step`, in buffers that
    stay, and in JSON `Program.step`, on new arrays each time; both with all checks. A process of its own says what the
    program takes where torch is never imported.
    """
    figures = measure(rounds)
    if plot is not None:
        names = [f"{one['model'].rpartition(':')[2]}, {one['trained']}, {one['keep']} kept" for one in figures["steps"]]
        ratios = [one["ratio"] for one in figures["steps"]]
        bars.draw({"a step": dict(zip(names, ratios, strict=True))}, "the program's CPU to torch's", plot)
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    typer.echo(
        f"{'model':20}{'trains':>8}{'kept':>6}{'batch':>7}{'bytes':>8}{'torch ms':>10}{'ms':>8}{'ratio':>7}{'aim':>6}"
    )
    for row in figures["steps"]:
        typer.echo(
            f"{row['model'].rpartition(':')[2]:20}{row['trained']:>8}{row['keep']:>6}{row['batch']:>7}{row['bytes']:>8}"
            f"{row['torch_ms']:>10.3f}{row['program_ms']:>8.3f}{row['ratio']:>7.2f}{row['aim'] or '':>6}"
        )
    typer.echo(f"\n{EPOCHS} epochs of {SAMPLES} samples in the upper part, programs to torch: whole, on kept features")
    for row in figures["trainings"]:
        which, aim = row["aim"]
        told = f"aim {aim} of {'the first' if which == 'ratio' else 'the second'}"
        typer.echo(f"{row['model']:20}{row['trained']:>14}{row['ratio']:>7.2f}{row['kept_ratio']:>7.2f}  {told}")
    alone = figures["process"]
    typer.echo(f"a process without torch: first step after {alone['cpu_s']:.2f} CPU s, peak {alone['peak_mb']:.0f} MiB")


def measure(rounds: int = 15) -> dict[str, Any]:
    """The figures of every case and of a process alone; plain data."""
    import torch

    from talaria.planning.onnx_runtime import versions

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = [_row(*case, rounds=rounds) for case in CASES]
        trainings = [_training(*case, rounds=max(3, rounds // 3)) for case in TRAININGS]
    finally:
        torch.set_num_threads(before)
    return {
        "versions": versions(),
        "load": os.getloadavg()[0],
        "steps": steps,
        "trainings": trainings,
        "process": _alone(),
    }


def _row(
    model: str, shape: tuple[int, ...], classes: int, batch: int, trained: str, keep: float, rounds: int
) -> dict[str, Any]:
    import numpy as np

    from talaria.model import pruning, zoo
    from talaria.model.spec import ModelSpec
    from talaria.model.state import state_of
    from talaria.planning import cpu_timer
    from talaria.programs.build import build
    from talaria.programs.program import Program
    from talaria.programs.training import Training
    from talaria.types import Recipe, Samples

    typer.echo(f"a step of {model.rpartition(':')[2]}: {trained} is trained, {keep:g} kept", err=True)
    spec = ModelSpec(model, shape, classes)
    data, recipe = build(spec, trained), Recipe()
    layout, module = zoo.layout(spec), zoo.build(spec)
    scores = pruning.importance(module, layout)
    module = pruning.compact(module, pruning.choose(scores, layout.full(), keep=keep))
    only = None if trained == "all" else zoo.split(spec, module).of("head")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((batch, *shape), np.float32), rng.integers(0, classes, batch)
    weights = state_of(module)
    _, eager = torch_step(module, Samples(x, y), recipe, only)
    program = Program(data)
    momentum = program.momentum(weights)
    drawn = [port for port in program.graph.inputs if port.name.startswith("draw/")]
    draws = {
        port.name.removeprefix("draw/"): np.ones((batch, *map(program.manifest.size, port.shape[1:])), np.float32)
        for port in drawn
    }
    training = Training(program, weights, momentum)
    calls = {
        "torch": eager,
        "program": lambda: training.step(x, y, lr=recipe.lr, draws=draws),
        "single": lambda: program.step(weights, momentum, x, y, lr=recipe.lr, draws=draws),
    }
    took = cpu_timer.interleaved(calls, rounds=rounds, burst=0.03)
    return {
        "model": model,
        "trained": trained,
        "keep": keep,
        "batch": batch,
        "bytes": len(data),
        "torch_ms": median(took["torch"]) * 1e3,
        "program_ms": median(took["program"]) * 1e3,
        "ratio": cpu_timer.ratios(took, "torch")["program"],
        "single_ratio": cpu_timer.ratios(took, "torch")["single"],
        "aim": AIMS.get(f"{model} {trained} {keep}"),
        "parity": program.manifest.parity,
    }


def _training(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    parts: tuple[Part, ...],
    adapter: str | None,
    rounds: int,
) -> dict[str, Any]:
    import numpy as np

    from talaria.model import zoo
    from talaria.model.spec import AdapterSpec, ModelSpec
    from talaria.model.state import state_of
    from talaria.planning import cpu_timer
    from talaria.programs.engine import ProgramEngine
    from talaria.training import frozen_features, loop
    from talaria.training.interface import Task
    from talaria.types import Recipe, Samples

    typer.echo(f"{EPOCHS} epochs of {model}: {', '.join(parts)}", err=True)
    adapters = None if adapter is None else AdapterSpec(adapter, rank=4, where=zoo.tuned(model))
    spec = ModelSpec(model, shape, classes, adapters=adapters)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((SAMPLES, *shape), np.float32), rng.integers(0, classes, SAMPLES)
    samples, module = Samples(x, y), loop.in_fast_layout(zoo.build(spec))  # as a device has it
    recipe = Recipe(epochs=EPOCHS, batch=16)
    task = Task(module, zoo.split(spec, module), samples, samples, recipe, classes)
    state, only, engine = state_of(module), task.split.of(*parts), ProgramEngine(spec)
    calls = {
        "torch": lambda: loop.train(task, state, only=only),
        "kept": lambda: frozen_features.train(task, state, only=only),
        "programs": lambda: engine.train_upper(task, state, only=only),
    }
    took = cpu_timer.interleaved(calls, rounds=rounds, burst=0.03)
    return {
        "model": model,
        "trained": ",".join(parts),
        "torch_ms": median(took["torch"]) * 1e3,
        "ratio": cpu_timer.ratios(took, "torch")["programs"],
        "kept_ratio": cpu_timer.ratios(took, "kept")["programs"],
        "aim": TRAINING_AIMS[",".join(parts)],
    }


def _alone() -> dict[str, Any]:
    """What a process takes that runs the program of imu_cnn, and never imports torch."""
    from talaria.model.spec import ModelSpec
    from talaria.programs.build import build

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "imu_cnn.program")
        path.write_bytes(build(ModelSpec("imu_cnn", (6, 100), 7)))
        command = [sys.executable, "-c", ALONE, str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    cpu, peak, torch = done.stdout.split()
    return {"cpu_s": float(cpu), "peak_mb": float(peak), "torch_imported": torch == "True"}
