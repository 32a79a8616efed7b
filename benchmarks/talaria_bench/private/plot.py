"""Accuracy over epsilon as one SVG, a line for each cohort and algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """``found`` as :func:`talaria_bench.private.epsilon.measure` gives it. Bars go from the least to the most of the
    seeds; the rightmost point of a line is without noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets = sorted({row["epsilon"] for one in found for row in one["rows"] if row["epsilon"] is not None})
    places = {budget: place for place, budget in enumerate(budgets)} | {None: len(budgets)}
    groups = list(dict.fromkeys(one["data"] for one in found))
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(4.6 * len(groups), 4.0), sharey=True, layout="constrained", squeeze=False
    )
    for panel, group in zip(panels[0], groups, strict=True):
        for one in found:
            if one["data"] != group:
                continue
            rows = sorted(one["rows"], key=lambda row: places[row["epsilon"]])
            low = [row["mean"] - min(row["accuracy"]) for row in rows]
            high = [max(row["accuracy"]) - row["mean"] for row in rows]
            panel.errorbar(
                [places[row["epsilon"]] for row in rows],
                [row["mean"] for row in rows],
                yerr=[low, high],
                marker="o" if one["algorithm"] == "fedavg" else "s",
                linestyle="-" if one["algorithm"] == "fedavg" else "--",
                capsize=2,
                label=f"{one['devices']} devices, {one['algorithm']}",
            )
        for devices, alone in {one["devices"]: one["alone"] for one in found if one["data"] == group}.items():
            if alone is not None:
                mean = sum(alone) / len(alone)
                panel.axhline(mean, color="0.4", linestyle=":", label=f"{devices} devices, each alone")
        panel.set_title(group)
        panel.set_xticks(list(places.values()), [*(f"{budget:g}" for budget in budgets), "no noise"])
        panel.set_xlabel("epsilon for all rounds, at delta 1e-5")
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8)
    panels[0][0].set_ylabel("members' mean accuracy")
    with pyplot.rc_context({"svg.hashsalt": "talaria", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
