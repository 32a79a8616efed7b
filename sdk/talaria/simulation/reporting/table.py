"""The report for the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from talaria.simulation.reporting.summary import (
    MEMBER_METHODS,
    NEWCOMER_METHODS,
    RATIOS,
    TITLES,
    Story,
    User,
    mean_ratio,
    read,
)

SHORT = {
    "fedavg_ft": "fedavg,\ntuned",
    "personal": "per-\nsonal",
    "params_ratio": "para-\nmeters",
    "bundle_ratio": "bundle\nsize",
    "latency_ratio": "lat-\nency",
    "upload_ratio": "up-\nload",
    "download_ratio": "down-\nload",
}
"""Headings that would otherwise be too wide for a terminal of 80 columns, which cuts words and names."""


def print_table(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the summary of a run: each user, the mean and the worst tenth, then the newcomers."""
    (console or Console(markup=False, emoji=False)).print(render(read(summary)))


def render(story: Story) -> Group:
    """The same as something that rich can print."""
    parts: list[Table | Text] = [_table("Members", story.members, MEMBER_METHODS, story.accuracy, story.worst_tenth)]
    if story.newcomers:
        parts.append(
            _table("Newcomers", story.newcomers, NEWCOMER_METHODS, story.newcomer_accuracy, story.newcomer_worst)
        )
    ratios = ", ".join(f"{TITLES[k].lower()} {v:.2f}" for k, v in story.ratios.items())
    if ratios:
        parts.append(Text(f"Against dense FedAvg: {ratios}."))
    if story.parity is not None:
        parts.append(Text(f"ONNX against torch: at most {story.parity:.1e}."))
    parts.append(Text(f"{story.rounds} rounds, seed {story.seed}, broker {story.broker}."))
    return Group(*parts)


def _table(
    title: str,
    users: Iterable[User],
    methods: tuple[str, ...],
    mean: Mapping[str, float],
    worst: Mapping[str, float],
) -> Table:
    users = tuple(users)
    shown = [m for m in methods if m in mean or any(m in u.accuracy for u in users)]
    ratios = [r for r in RATIOS if any(r in u.ratios for u in users)]
    table = Table(title=title, title_justify="left", padding=0)
    table.add_column("user", no_wrap=True)
    table.add_column("device", no_wrap=True)
    for key in (*shown, *ratios):
        heading = SHORT.get(key, TITLES[key].lower())
        table.add_column(heading, justify="right", style="bold" if key == "personal" else None)
    for user in users:
        figures = [_figure(user.accuracy.get(m), 3) for m in shown] + [_figure(user.ratios.get(r), 2) for r in ratios]
        table.add_row(user.name, user.device, *figures)
    table.add_section()
    means = [mean_ratio(users, r) for r in ratios]
    table.add_row("mean", "", *[_figure(mean.get(m), 3) for m in shown], *[_figure(v, 2) for v in means])
    table.add_row("worst tenth", "", *[_figure(worst.get(m), 3) for m in shown], *[""] * len(ratios))
    return table


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
