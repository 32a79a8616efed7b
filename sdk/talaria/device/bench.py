"""``talaria bench planner``: is latency predicted well, are budgets kept as measured, and is smaller ever slower?

Everything is CPU time of one thread, candidates side by side, as ratios in one run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Annotated, Any

import typer

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
SIDE_BY_SIDE = 11
"""Models in one round: with many more, each finds the caches filled by the others and their spread grows."""


def planner(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    families: Annotated[str | None, typer.Option(help="Which models, by name, comma-separated.")] = None,
) -> None:
    """Measure the planner on this machine: prediction error on unseen widths, budgets kept, latency after pruning."""
    import json

    from talaria.device.profile import cached
    from talaria.errors import ConfigError

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
        f"{'model':20} {'dense':>9}  {'error':>6} {'worst':>6}  {'budgets':>7}  {'30 %':>5} {'50 %':>5} {'70 %':>5}"
    )
    for row in rows:
        cut = " ".join(f"{row['pruned'][str(share)]:5.2f}" for share in SHARES)
        typer.echo(
            f"{row['model']:20} {row['dense_ms']:6.3f} ms  {row['mean_error']:6.1%} {row['worst_error']:6.1%}  "
            f"{row['budgets']['kept']:3}/{BUDGETS:<3}  {cut}"
        )
    typer.echo(f"{kept} of {BUDGETS * len(rows)} latency budgets kept as measured")


def family(named: tuple[str, tuple[int, ...], int], block: int) -> dict[str, Any]:
    """All figures of one model family."""
    import torch

    from talaria import seeds
    from talaria.device import cost, planner
    from talaria.device.anatomy import anatomy
    from talaria.device.budget import Budget
    from talaria.device.profile import cached
    from talaria.device.runtime import Resizer, exporter
    from talaria.errors import BudgetError
    from talaria.model import zoo
    from talaria.model.pruning import aligned
    from talaria.model.spec import ModelSpec

    spec = ModelSpec(*named)
    parts, example = anatomy(spec), zoo.example(spec)
    begin = time.thread_time()
    file = exporter()(cost.lively(zoo.build(spec)), zoo.example(spec, 2))
    export_s = time.thread_time() - begin
    fitted = cost.fit(parts, file, example, cost.samples(parts, cost.PROBES, block), block)
    resizer = Resizer(file, parts)
    draws = seeds.generator(1, "bench", 0, "planner")
    full = parts.full()

    unseen = [cost.randomly(parts, block, 0.15 + 0.85 * i / HELD_OUT, draws) for i in range(HELD_OUT)]
    measured = _ratios([full, *unseen], resizer, example)
    errors = [fitted.latency_ms(parts, w) / fitted.dense_ms / r - 1 for w, r in zip(unseen, measured[1:], strict=True)]

    device = replace(cached(), block=block)
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
    met = _ratios([full, *planned], resizer, example)[1:]

    # The nearest whole block, so that what is taken away is closest to its name.
    cuts = [{g: min(n, aligned((1 - s) * n - block / 2, block)) for g, n in full.items()} for s in SHARES]
    pruned = _ratios([full, *cuts], resizer, example)[1:]
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
        "budgets": {
            "kept": sum(got <= want for got, want in zip(met, wanted, strict=True)),
            "wanted": wanted,
            "measured": met,
        },
        "channels_removed": {
            str(s): 1 - sum(cut.values()) / sum(full.values()) for s, cut in zip(SHARES, cuts, strict=True)
        },
        "pruned": {str(s): r for s, r in zip(SHARES, pruned, strict=True)},
    }


def _ratios(widths: Sequence[dict[str, int]], resizer: Any, example: Any) -> list[float]:
    """Latency of each to the first, which is measured anew beside every few of them."""
    from talaria.device import cost

    first, rest = widths[0], widths[1:]
    out = [1.0]
    for begin in range(0, len(rest), SIDE_BY_SIDE - 1):
        some = {"dense": first} | {str(i): w for i, w in enumerate(rest[begin : begin + SIDE_BY_SIDE - 1])}
        took, _ = cost.timed({name: resizer.at(w) for name, w in some.items()}, example)
        out += [took[name] / took["dense"] for name in some if name != "dense"]
    return out
