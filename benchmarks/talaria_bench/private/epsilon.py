"""``talaria bench epsilon``: what a privacy budget costs in accuracy, over cohorts of different sizes.

Every device is in every round, and noise keeps epsilon for all of them. For each cohort and epsilon the clip is the one
of ``clips`` with which FedAvg's members do best on their validation samples with the first seed; test samples decide
nothing. That choice itself looks at data and is not counted in epsilon. Other algorithms take FedAvg's clip.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria.errors import ConfigError
from talaria.privacy.accounting import noise_for
from talaria_bench import bars
from talaria_bench.folders import kept_in
from talaria_bench.private.cells import Study, cell

EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
DELTA = 1e-5


@dataclass(frozen=True)
class Cohort:
    """Who learns, with which algorithms, and which budgets and clips are tried."""

    study: Study
    algorithms: tuple[str, ...] = ("fedavg",)
    epsilons: tuple[float, ...] = EPSILONS
    clips: tuple[float, ...] = (0.1, 0.3, 1.0)
    alone: bool = False
    """Whether each device also learns alone, which tells nobody anything."""


IMAGES: Mapping[str, Any] = {"epochs": 2, "batch": 16, "lr": 0.05, "momentum": 0.0}


def _drawn(devices: int) -> Study:
    """Fashion-MNIST among many: 48 images each."""
    options = {"clients": devices, "alpha": 1.0, "columns": 48, "validation": 8, "tests": 9}
    return Study("fashion-mnist", 10, options, "mlp", IMAGES)


COHORTS: Mapping[str, Cohort] = {
    "smartwatch": Cohort(Study("smartwatch", 8), ("fedavg", "fedper"), alone=True),
    "fashion-mnist": Cohort(
        Study("fashion-mnist", 10, model="mlp", recipe=IMAGES, partition=True), ("fedavg", "fedper"), alone=True
    ),
    "fashion-mnist-100": Cohort(_drawn(100), clips=(0.3, 1.0)),
    "fashion-mnist-300": Cohort(_drawn(300), clips=(0.3, 1.0)),
    "fashion-mnist-1000": Cohort(_drawn(1000), epsilons=(1.0,), clips=(1.0,)),
}


def epsilon(
    cohorts: Annotated[
        list[str] | None, typer.Option("--cohort", help=f"Repeatable; by default all: {', '.join(COHORTS)}.")
    ] = None,
    partition: Annotated[
        Path | None,
        typer.Option(help="Fashion-MNIST's 20 clients; without it, they are left out.", exists=True, dir_okay=False),
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Repeatable; 0, 1 and 2 by default.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder that keeps every run; what lies there is not done again.", callback=kept_in)
    ] = Path("runs/private"),
    plot: Annotated[Path | None, typer.Option(help="Write the curves here, as SVG.", callback=bars.place)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure accuracy over epsilon: what noise for a privacy budget costs, by the size of the cohort."""
    names = cohorts or [name for name, one in COHORTS.items() if partition is not None or not one.study.partition]
    found = measure(names, seeds or [0, 1, 2], out, partition, lambda line: typer.echo(line, err=True))
    if plot is not None:
        from talaria_bench.private.plot import draw

        draw(found, plot)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(
        "| cohort | devices | algorithm | epsilon | clip | noise's length | accuracy | least to most | lost, points |"
    )
    typer.echo("|---" * 9 + "|")
    for one in found:
        for row in one["rows"]:
            typer.echo(
                f"| {one['cohort']} | {one['devices']} | {one['algorithm']} | {row['epsilon'] or 'none'} "
                f"| {row['clip'] or ''} | {row['length']:.1f} | {row['mean']:.4f} "
                f"| {min(row['accuracy']):.3f} to {max(row['accuracy']):.3f} | {row['lost']:.1f} |"
            )


def measure(
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    partition: Path | None,
    tell: Callable[[str], object] = str,
    cohorts: Mapping[str, Cohort] = COHORTS,
) -> list[dict[str, Any]]:
    """A curve for each cohort and algorithm. ``length`` is that of a round's noise on the mean, as its expected L2
    length over all values, in lengths of the clip that no device's part exceeds; ``alone`` are the accuracies of
    devices that learn alone.

    Raises :class:`ConfigError` for a cohort that is not known, or lacks its partition.
    """
    found = []
    for name in names:
        if name not in cohorts:
            raise ConfigError(f"epsilon: cohort={name!r} is unknown; choose among {', '.join(cohorts)}")
        found += _curves(name, cohorts[name], seeds, out, partition, tell)
    return found


def _curves(
    name: str, cohort: Cohort, seeds: Sequence[int], out: Path, partition: Path | None, tell: Callable[[str], object]
) -> list[dict[str, Any]]:
    study = cohort.study.at(partition)

    def run(algorithm: str, seed: int, budget: float | None = None, clip: float | None = None) -> dict[str, Any]:
        asked = None if budget is None else {"epsilon": budget, "clip": clip, "delta": DELTA}
        one = cell(study, algorithm, seed, asked, out)
        tell(f"{name} {algorithm} seed {seed} epsilon {budget} clip {clip}: {one['accuracy']:.4f} ({one['cpu_s']} s)")
        return one

    clips = {}
    for budget in cohort.epsilons:
        scores = {clip: run("fedavg", seeds[0], budget, clip)["validation"] for clip in cohort.clips}
        clips[budget] = max(scores, key=scores.__getitem__)
    alone = [run("local", seed)["accuracy"] for seed in seeds] if cohort.alone else None
    found = []
    for algorithm in cohort.algorithms:
        usual = [run(algorithm, seed) for seed in seeds]
        devices, values = usual[0]["devices"], usual[0]["values"]
        rows = [_row(usual, usual)]
        for budget, clip in clips.items():
            noise = noise_for(budget, study.rounds, DELTA)
            about = {"epsilon": budget, "clip": clip, "noise": noise, "length": noise * math.sqrt(values) / devices}
            rows.append(_row([run(algorithm, seed, budget, clip) for seed in seeds], usual) | about)
        found.append(
            {
                "cohort": name,
                "data": study.data,
                "algorithm": algorithm,
                "devices": devices,
                "values": values,
                "rounds": study.rounds,
                "delta": DELTA,
                "seeds": list(seeds),
                "alone": alone,
                "rows": rows,
            }
        )
    return found


def _row(ran: Sequence[Mapping[str, Any]], usual: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    accuracy = [one["accuracy"] for one in ran]
    mean = statistics.fmean(accuracy)
    return {
        "epsilon": None,
        "clip": None,
        "noise": 0.0,
        "length": 0.0,
        "accuracy": accuracy,
        "mean": mean,
        "lost": 100 * (statistics.fmean(one["accuracy"] for one in usual) - mean),
        "diverged": sum(one["diverged"] for one in ran),
    }
