"""Draws accuracy lost against latency, from the rows of benchmarks that plan for a budget.

    python benchmarks/budget_curve.py smartwatch=rows.json CIFAR-100=rows.json --out docs/figures

A file holds a list of rows with ``latency`` (to the dense twin's) and ``accuracy`` (0..1); the row at latency 1 is the
dense twin. Rows of several seeds or algorithms lie on a line of their own.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

NAME = "accuracy_at_budget.png"
AIM = (0.5, 1.0)
"""At half of the latency at most one point is lost."""

Rows = Sequence[Mapping[str, Any]]


def lines(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """Per algorithm (and seed, where there are several): (latency, accuracy above the dense twin's in points)."""
    dense = {row.get("seed", 0): row for row in rows if row["budget"] == 1}
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        seed = row.get("seed", 0)
        if row["budget"] < 1:
            name = f"{row.get('algorithm', '')} seed {seed}" if len(dense) > 1 else str(row.get("algorithm", ""))
            found[name] += [(row["latency"], 100 * (row["accuracy"] - dense[seed]["accuracy"]))]
    return {name: [(1.0, 0.0), *sorted(points, reverse=True)] for name, points in found.items()}


def draw(curves: Mapping[str, Rows], path: Path) -> None:
    """One picture of all curves, by the name of their data."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    marks = cycle("os^vD")
    for data, rows in curves.items():
        for name, points in lines(rows).items():
            axes.plot(*zip(*points, strict=True), marker=next(marks), label=f"{data}, {name}" if name else data)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.axhline(-AIM[1], color="k", linestyle="--", linewidth=0.9, label="aim at half of the latency: at most 1 lost")
    axes.axvline(AIM[0], color="k", linestyle=":", linewidth=0.9)
    axes.set(xlabel="latency, share of the dense model's", ylabel="accuracy against the dense twin, points")
    axes.set_xlim(1.03, 0.2)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="+", metavar="NAME=ROWS.json")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    asked = parser.parse_args()
    curves = {}
    for one in asked.curves:
        name, _, path = one.partition("=")
        curves[name] = json.loads(Path(path).read_text())
    draw(curves, asked.out / NAME)
    print(asked.out / NAME)


if __name__ == "__main__":
    main()
