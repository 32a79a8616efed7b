"""What a bench found beside its peers and limits, as bars in one SVG: for every bench that is told ``--plot``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from talaria.errors import ConfigError


def place(path: Path | None) -> Path | None:
    """``path``, in a folder that is there: of each ``--plot``, and so said before minutes are measured. Raises
    :class:`ConfigError` where nothing can be drawn."""
    if path is not None:
        why = f"--plot {path}: cannot be written; name a file in a folder of yours"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(why) from error
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(why)
    return path


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
    with pyplot.rc_context({"svg.hashsalt": "talaria", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
