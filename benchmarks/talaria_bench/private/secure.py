"""``talaria bench secure``: is a run whose sums open only as sums as accurate as the plain one?

The same runs, seeds and rounds, once as usual and once with secure sums: whole numbers, cut at the bound, in place of
float32. Nothing else differs, so that what does is what their rounding makes of a training.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria_bench import bars
from talaria_bench.folders import kept_in
from talaria_bench.private.cells import Study, cell

STUDIES: Mapping[str, tuple[Study, tuple[str, ...]]] = {
    "smartwatch": (Study("smartwatch", 20), ("fedavg", "hermes")),
    "fashion-mnist": (Study("fashion-mnist", 15, partition=True), ("fedavg", "fedper")),
}
AIM = 0.2
"""Points that the mean over the seeds may differ by."""


def secure(
    partition: Annotated[
        Path | None,
        typer.Option(help="Fashion-MNIST's clients; without it, smartwatch alone.", exists=True, dir_okay=False),
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Repeatable; 0, 1 and 2 by default.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder that keeps every run; what lies there is not done again.", callback=kept_in)
    ] = Path("runs/private"),
    plot: Annotated[Path | None, typer.Option(help="Draw both accuracies here, as SVG.", callback=bars.place)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure the accuracy of secure sums beside plain ones, after the same rounds."""
    names = [name for name, (study, _) in STUDIES.items() if partition is not None or not study.partition]
    found = measure(names, seeds or [0, 1, 2], out, partition, lambda line: typer.echo(line, err=True))
    if plot is not None:
        panels = {
            f"{one['data']}, {one['algorithm']}": {kind: statistics.fmean(one[kind]) for kind in ("plain", "secure")}
            for one in found
        }
        bars.draw(panels, "accuracy", plot)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(
        "| data | algorithm | rounds | plain | secure | secure above plain, points | by seed |\n" + "|---" * 7 + "|"
    )
    for one in found:
        each = ", ".join(f"{value:+.2f}" for value in one["points"])
        typer.echo(
            f"| {one['data']} | {one['algorithm']} | {one['rounds']} | {statistics.fmean(one['plain']):.4f} "
            f"| {statistics.fmean(one['secure']):.4f} | {one['difference']:+.2f} | {each} |"
        )


def measure(
    names: Sequence[str], seeds: Sequence[int], out: Path, partition: Path | None, tell: Callable[[str], object] = str
) -> list[dict[str, Any]]:
    """A row for each study and algorithm: accuracies by seed, and their differences in points."""
    found = []
    for name in names:
        study, algorithms = STUDIES[name]
        for algorithm in algorithms:
            rows: dict[str, list[float]] = {"plain": [], "secure": []}
            for seed in seeds:
                for kind, privacy in (("plain", None), ("secure", {"secure": True})):
                    one = cell(study.at(partition), algorithm, seed, privacy, out)
                    rows[kind].append(one["accuracy"])
                    tell(f"{name} {algorithm} seed {seed} {kind}: {one['accuracy']:.4f} ({one['cpu_s']} s)")
            points = [100 * (b - a) for a, b in zip(rows["plain"], rows["secure"], strict=True)]
            found.append(
                {"data": name, "algorithm": algorithm, "rounds": study.rounds, "seeds": list(seeds), **rows}
                | {
                    "points": points,
                    "difference": statistics.fmean(points),
                    "kept": abs(statistics.fmean(points)) <= AIM,
                }
            )
    return found
