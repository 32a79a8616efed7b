"""``talaria bench adapters``: what training a pretrained network costs with everything, adapters, or the head alone.

EfficientNet-Lite0 with its ImageNet weights, batch 16, 128 pixels, 10 classes, SGD with momentum. Times are CPU time
of one thread, side by side, as ratios; memory is what torch's tensors hold at the peak of a step, beyond the weights.
Adapters and head are the planner's default; what they train and send is counted for 100 classes too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria_bench import bars
from talaria_bench.steps import torch_step

if TYPE_CHECKING:
    from talaria.model.spec import ModelSpec
    from talaria.training.interface import Task

BATCH, PIXELS, RANK, CLASSES = 16, 128, 8, 10
MANY = 100
"""Classes for which shares are counted too."""


def adapters(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    rounds: Annotated[int, typer.Option(help="Side-by-side rounds.", min=3)] = 9,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios here, as SVG.", callback=bars.place)] = None,
) -> None:
    """Measure adapters, kept features and merging against full fine-tuning on EfficientNet-Lite0."""
    import json

    found = measure(rounds)
    if plot is not None:
        ways = found["ways"].items()
        gains = {"CPU": "time_gain", "memory": "memory_gain"}
        panels = {unit: {name: row[key] for name, row in ways} for unit, key in gains.items()}
        bars.draw(panels, "times less than everything trained", plot)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(f"{'trained':28} {'step':>10}  {'times less':>10}  {'memory':>10}  {'times less':>10}")
    for name, row in found["ways"].items():
        typer.echo(
            f"{name:28} {row['step_ms']:7.2f} ms  {row['time_gain']:9.1f}x  {row['memory_mb']:7.1f} MB  "
            f"{row['memory_gain']:9.1f}x"
        )
    typer.echo(f"frozen layers through ONNX Runtime: {found['prefix_gain']:.2f}x faster than torch")
    for row in (found, found["many_classes"]):
        typer.echo(
            f"{row['classes']} classes: {row['trained_share']:.2%} of the model trained, {row['upload_share']:.2%} "
            f"sent, {row['adapters_share']:.2%} where the head is private (head of rank {row['head_rank'] or 'full'})"
        )
    typer.echo(f"merged: {found['merged_latency']:.3f} of the base latency, {found['merged_error']:.1e} relative")


def measure(rounds: int = 9) -> dict[str, Any]:
    """All figures, as plain data."""
    import torch

    from talaria.model import zoo
    from talaria.model.spec import ModelSpec
    from talaria.model.state import load, state_of
    from talaria.planning import cpu_timer, latency_model, planner
    from talaria.planning.onnx_runtime import Session, exporter
    from talaria.training import frozen_features
    from talaria.training.interface import Task
    from talaria.types import Recipe, Samples

    torch.set_num_threads(1)
    spec = ModelSpec("efficientnet_lite0", (3, PIXELS, PIXELS), CLASSES, pretrained=True)
    tuned = replace(spec, adapters=planner.compact(spec, RANK))
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, *spec.input_shape, generator=draws)
    samples = Samples.of(x, torch.randint(0, spec.classes, (BATCH,), generator=draws))
    recipe = Recipe(epochs=1, batch=BATCH, lr=0.01, momentum=0.9)

    def task_of(which: ModelSpec) -> Task:
        model = zoo.build(which)
        split = zoo.split(which, model)
        return Task(model=model, split=split, train=samples, val=samples, recipe=recipe, classes=spec.classes)

    full, part = task_of(spec), task_of(tuned)
    ways = {
        "everything": _way(full, None),
        "adapters and head": _way(part, part.split.of("adapters", "head")),
        "adapters and head, kept": _way(part, part.split.of("adapters", "head"), keep=True),
        "head": _way(full, full.split.of("head")),
        "head, kept": _way(full, full.split.of("head"), keep=True),
    }
    took = cpu_timer.interleaved({name: step for name, (step, _) in ways.items()}, rounds, burst=0.05)
    ratios = cpu_timer.ratios(took, "everything")
    whole = ways["everything"][1]

    lower = frozen_features.halve(load(part.model, state_of(part.model)), part.split.of("adapters", "head"))
    if isinstance(lower, str):
        raise TypeError(lower)
    plain = frozen_features.torch_runner(lower.lower)
    fast = frozen_features.onnx_runner(lower.lower, samples.x[:2], exporter())
    prefix = cpu_timer.ratios(
        cpu_timer.interleaved({"ort": partial(fast, samples.x), "torch": partial(plain, samples.x)}, rounds), "ort"
    )

    adapted, base = zoo.build(tuned).eval(), zoo.build(spec).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if name.endswith("adapter.up.weight"):
                parameter.normal_(0, 0.02, generator=draws)
        expected = adapted(x)
    files = {"base": exporter()(base, x[:2]), "merged": exporter()(adapted, x[:2])}
    error = torch.from_numpy(Session(files["merged"])(samples.x)) - expected
    rounds_of_each, _ = latency_model.side_by_side(files, x[:1], 60)
    times = latency_model.milliseconds(rounds_of_each)
    return {
        "batch": BATCH,
        "pixels": PIXELS,
        "classes": CLASSES,
        "ways": {
            name: {
                "step_ms": 1e3 * sorted(took[name])[len(took[name]) // 2],
                "time_gain": 1 / ratios[name],
                "memory_mb": memory_ / 1e6,
                "memory_gain": whole / memory_,
            }
            for name, (_, memory_) in ways.items()
        },
        "prefix_gain": prefix["torch"],
        **shares(tuned),
        "many_classes": {"classes": MANY, **shares(_with(spec, MANY))},
        "merged_latency": times["merged"] / times["base"],
        "merged_error": float(error.abs().max() / expected.abs().max()),
    }


def shares(tuned: ModelSpec) -> dict[str, Any]:
    """What adapters and head of ``tuned`` train and send, as shares of the model without adapters."""
    from talaria.model import zoo

    model = zoo.build(tuned)
    split, state = zoo.split(tuned, model), model.state_dict()
    whole = sum(p.numel() for p in zoo.build(replace(tuned, adapters=None)).parameters())
    trained = {n: p.numel() for n, p in model.named_parameters() if n in set(split.of("adapters", "head"))}
    return {
        "head_rank": None if tuned.adapters is None else tuned.adapters.head,
        "trained_share": sum(trained.values()) / whole,
        "upload_share": sum(state[k].numel() for k in split.travels("adapters", "head")) / whole,
        "adapters_share": sum(state[k].numel() for k in split.travels("adapters")) / whole,
    }


def _with(spec: ModelSpec, classes: int) -> ModelSpec:
    from talaria.planning import planner

    bare = replace(spec, classes=classes, adapters=None)
    return replace(bare, adapters=planner.compact(bare, RANK))


def _way(task: Task, only: Collection[str] | None, keep: bool = False) -> tuple[Callable[[], object], int]:
    """One SGD step of the training loop, and the bytes that it holds beyond the weights."""
    import torch

    from talaria.model.state import load, state_of
    from talaria.planning import memory
    from talaria.training import frozen_features

    state = state_of(task.model)
    if keep:
        if only is None:
            raise TypeError("there is nothing to keep where everything trains")
        kept = frozen_features.cached(task, state, only)
        if kept.task is None:
            raise TypeError(kept.why)
        task = kept.task
        names = set(task.model.state_dict())
        state, only = {k: v for k, v in state.items() if k in names}, [k for k in only if k in names]
    model, step = torch_step(load(task.model, state), task.train, task.recipe, only)
    shape = tuple(task.train.x.shape[1:])
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    with torch.random.fork_rng(devices=[]):
        return step, memory.training(model, shape, BATCH) - weights
