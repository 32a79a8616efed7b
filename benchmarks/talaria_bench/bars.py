"""What a bench found beside its peers and limits, as bars in one SVG: for every bench that is told ``--plot``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def draw(panels: Mapping[str, Mapping[str, float]], label: str, path: Path) -> None:
    """One panel of bars for each of ``panels``, each over its own names; ``label`` says what a bar measures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.35 * max(len(bars) for bars in panels.values()) + 1.2
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.0 * len(panels), height), sharey=True, layout="constrained", squeeze=False
    )
    for panel, (title, bars) in zip(axes[0], panels.items(), strict=True):
        names = list(bars)[::-1]
        panel.bar_label(panel.barh(names, [bars[name] for name in names], color="#4477aa"), fmt="%.3g", padding=3)
        panel.margins(x=0.15)
        panel.set_title(title)
        panel.set_xlabel(label)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context({"svg.hashsalt": "talaria", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
