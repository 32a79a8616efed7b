"""``talaria bench planner``: is latency predicted well, are budgets kept as measured, and is smaller ever slower?

Everything is CPU time of one thread, candidates side by side, as ratios in one run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria_bench import bars

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from talaria.model.spec import ModelSpec
    from talaria.planning.latency_model import Cost
    from talaria.planning.onnx_runtime import Resizer
    from talaria.planning.profile import Profile

FAMILIES: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("imu_cnn", (6, 100), 7),
    ("mobilenet_v3_small", (3, 224, 224), 1000),
    ("resnet18", (3, 224, 224), 1000),
    ("efficientnet_lite0", (3, 224, 224), 1000),
)
HELD_OUT = 20
"""Architectures per family that the fit does not see."""
BUDGETS = 10
"""Random latency budgets per family: 40 in all."""
SHARES = (0.3, 0.5, 0.7)
"""Shares of the channels that are taken away."""
STEADY = 0.07
"""How much the dense model's time may change between planning and checking. A machine whose other tenants came or went
in between is another machine, on which small models may be 10 % faster or slower to the dense one."""
ATTEMPTS = 5
"""Times that budgets are planned and checked at most until the machine is steady."""


def planner(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios here, as SVG.", callback=bars.place)] = None,
    families: Annotated[str | None, typer.Option(help="Which models, by name, comma-separated.")] = None,
) -> None:
    """Measure the planner on this machine: prediction error on unseen widths, budgets kept, latency after pruning."""
    import json

    from talaria.errors import ConfigError
    from talaria.planning.profile import cached

    known = [spec[0] for spec in FAMILIES]
    asked = known if families is None else families.split(",")
    if not set(asked) <= set(known):
        raise ConfigError(f"--families {families!r} must be names among {', '.join(known)}, with commas between")
    device = cached()
    chosen = [spec for spec in FAMILIES if spec[0] in asked]
    rows = []
    for number, spec in enumerate(chosen, 1):
        typer.echo(f"{spec[0]}, {number} of {len(chosen)}: exporting and timing, about a minute", err=True)
        rows.append(family(spec, device.block))
    if plot is not None:
        panels = {
            f"{100 * share:.0f} % of the channels away": {row["model"]: row["pruned"][str(share)] for row in rows}
            for share in SHARES
        }
        bars.draw(panels, "of the dense model's time", plot)
    kept = sum(row["budgets"]["kept"] for row in rows)
    document = {
        "device": {"cpu": device.cpu, "block": device.block, "machine": device.machine},
        "families": rows,
        "budgets": {"kept": kept, "of": BUDGETS * len(rows)},
    }
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    typer.echo(
        f"{'model':20} {'dense':>9}  {'error':>6} {'worst':>6}  {'budgets':>7}  {'30 %':>5} {'50 %':>5} {'70 %':>5}  "
        f"{'spare':>6} {'noise':>6}"
    )
    for row in rows:
        cut = " ".join(f"{row['pruned'][str(share)]:5.2f}" for share in SHARES)
        typer.echo(
            f"{row['model']:20} {row['dense_ms']:6.3f} ms  {row['mean_error']:6.1%} {row['worst_error']:6.1%}  "
            f"{row['budgets']['kept']:3}/{BUDGETS:<3}  {cut}  {row['margin']:6.1%} {row['noise']:6.1%}"
        )
    typer.echo(f"{kept} of {BUDGETS * len(rows)} latency budgets kept as measured")


def family(named: tuple[str, tuple[int, ...], int], block: int) -> dict[str, Any]:
    """All figures of one model family.

    Everything is timed in use (:mod:`~talaria.planning.cpu_timer`) but ``pruned``: in its bursts of 6 ms the first
    calls count, which are slowed by what the last model left in the caches. ``pruned_warm`` is the same without them.
    """
    from talaria import seeds
    from talaria.model import zoo
    from talaria.model.spec import ModelSpec
    from talaria.planning import cpu_timer, latency_model
    from talaria.planning.layer_stats import anatomy
    from talaria.planning.onnx_runtime import Resizer, exporter
    from talaria.planning.profile import cached

    spec = ModelSpec(*named)
    parts, example = anatomy(spec), zoo.example(spec)
    begin = time.thread_time()
    file = exporter()(latency_model.lively(zoo.build(spec)), zoo.example(spec, 2))
    export_s = time.thread_time() - begin
    resizer = Resizer(file, parts)
    draws = seeds.generator(1, "bench", 0, "planner")
    full = parts.full()

    # Probes and held-out architectures in the same rounds, so that whatever slows the machine slows all.
    probes = latency_model.samples(parts, latency_model.PROBES, block)
    unseen = [latency_model.randomly(parts, block, 0.15 + 0.85 * i / HELD_OUT, draws) for i in range(HELD_OUT)]
    taken, seconds = _milliseconds([*probes, *unseen], resizer, example, latency_model.SECONDS / len(probes))
    told = latency_model.explained(resizer, probes, taken[: len(probes)], block, seconds)
    errors = [told.latency_ms(parts, w) / t - 1 for w, t in zip(unseen, taken[len(probes) :], strict=True)]

    cuts = {str(share): _without(share, full, block) for share in SHARES}
    pruned = {}
    for name, how in {"pruned": {"burst": cpu_timer.BURST, "warm": 0}, "pruned_warm": {}}.items():
        (dense, *found), _ = _milliseconds([full, *cuts.values()], resizer, example, latency_model.SECONDS / 4, **how)
        pruned[name] = {share: t / dense for share, t in zip(cuts, found, strict=True)}

    device = replace(cached(), block=block)
    for _ in range(ATTEMPTS):
        fitted = latency_model.fit(parts, file, example, probes, block)
        wanted, planned = _plans(spec, device, fitted, draws)
        (dense, *found), _ = _milliseconds([full, *planned], resizer, example, latency_model.SECONDS / len(probes))
        met = [t / dense for t in found]
        if abs(dense / fitted.dense_ms - 1) <= STEADY:
            break
    return {
        "model": spec.name,
        "input_shape": list(spec.input_shape),
        "dense_ms": fitted.dense_ms,
        "probes": fitted.probes,
        "measuring_s": fitted.seconds,
        "export_s": export_s,
        "mean_error": mean(abs(e) for e in errors),
        "worst_error": max(abs(e) for e in errors),
        "margin": fitted.margin,
        "noise": fitted.noise,
        "budgets": {
            "kept": sum(got <= want for got, want in zip(met, wanted, strict=True)),
            "wanted": wanted,
            "measured": met,
            "speed": fitted.dense_ms / dense,
        },
        "channels_removed": {share: 1 - sum(cut.values()) / sum(full.values()) for share, cut in cuts.items()},
        **pruned,
    }


def _plans(
    spec: ModelSpec, device: Profile, fitted: Cost, draws: Generator
) -> tuple[list[float], list[dict[str, int]]]:
    """Random latency ratios that can be kept, and the widths planned for each."""
    import torch

    from talaria.errors import BudgetError
    from talaria.planning import planner
    from talaria.planning.budget import Budget
    from talaria.planning.layer_stats import anatomy

    full = anatomy(spec).full()
    wanted: list[float] = []
    planned: list[dict[str, int]] = []
    while len(wanted) < BUDGETS:
        ratio = 0.2 + 0.75 * float(torch.rand((), generator=draws))
        try:
            made = planner.plan(spec, Budget(latency_ratio=ratio), device, fitted)
        except BudgetError:
            continue  # not feasible: another one
        wanted.append(ratio)
        planned.append({**full, **made.widths})
    return wanted, planned


def _without(share: float, full: dict[str, int], block: int) -> dict[str, int]:
    """Widths without at least ``share`` of all channels: the nearest whole block in each group, and then one more from
    the group that kept most, until it is enough."""
    from talaria.model.pruning import aligned

    widths = {g: min(n, aligned((1 - share) * n - block / 2, block)) for g, n in full.items()}
    while sum(widths.values()) > (1 - share) * sum(full.values()):
        most = max((g for g, w in widths.items() if w > block), key=lambda g: widths[g] / full[g])
        widths[most] = max(block, widths[most] - block)
    return widths


def _milliseconds(
    widths: Sequence[dict[str, int]], resizer: Resizer, example: Tensor, each: float, **how: Any
) -> tuple[list[float], float]:
    """CPU time of the model at each of ``widths``, all side by side, in ``each`` seconds of measuring per model; and
    the seconds that it took in all. ``how`` is said to :func:`~talaria.planning.latency_model.side_by_side`."""
    from talaria.planning import latency_model

    files = {str(i): resizer.at(w) for i, w in enumerate(widths)}
    took, seconds = latency_model.side_by_side(files, example, limit=each * len(widths), **how)
    return list(latency_model.milliseconds(took).values()), seconds
