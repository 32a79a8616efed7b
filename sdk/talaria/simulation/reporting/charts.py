"""Plots as inline SVG: no library, no script, no network; colours come from the page's style sheet.

Each function returns one ``<svg>`` element. Every mark has a tooltip, and the page repeats the figures in a table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise

Row = tuple[str, Mapping[str, float]]
"""A label and its values by series."""

_WIDTH = 840
_LONGEST = 24
_GLYPHS = {"local": "square", "scratch": "square", "fedavg": "up", "zero_shot": "up", "fedavg_ft": "diamond"}
_SHAPES = {"square": "M-5-5H5V5H-5Z", "up": "M0-7 6.5 5H-6.5Z", "diamond": "M0-7 7 0 0 7-7 0Z"}


def glyph(series: str, x: float = 0.0, y: float = 0.0, tip: str = "") -> str:
    """The mark of a series: its shape tells it apart without its colour."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    place = f'class="mark {escape(series)}" transform="translate({x:.1f} {y:.1f})"'
    if series in _GLYPHS:
        return f'<path {place} d="{_SHAPES[_GLYPHS[series]]}">{title}</path>'
    return f'<circle {place} r="6.5">{title}</circle>'


def legend_mark(series: str) -> str:
    """A small picture of the series' mark, for a legend in the text."""
    return f'<svg class="key" viewBox="-8 -8 16 16" width="14" height="14" aria-hidden="true">{glyph(series)}</svg>'


def dots(rows: Sequence[Row], sums: Sequence[Row], titles: Mapping[str, str], label: str) -> str:
    """One line per row with a mark per series on a common scale up to 1; a thin bar spans lowest to highest. What lies
    below the scale (-1 at least) is marked at its end.

    ``sums`` are rows of the same kind (a mean, a worst tenth) set off below the others.
    """
    left, right, top, step = _margin([*rows, *sums]), 24, 26, 24
    width, height = _WIDTH, top + step * (len(rows) + len(sums)) + 22
    low = _floor([*rows, *sums])
    line = top + step * len(rows) + 5

    def at(value: float) -> float:
        return left + (max(value, low) - low) / (1 - low) * (width - left - right)

    parts = [_vertical_grid(_ticks(low), at, top - 6, height - 8)]
    if sums:
        parts.append(f'<line class="rule" x1="0" x2="{width - right}" y1="{line}" y2="{line}"/>')
    for i, (name, values) in enumerate([*rows, *sums]):
        y = top + step * i + step / 2 + (10 if i >= len(rows) else 0)
        style = "name sum" if i >= len(rows) else "name"
        parts.append(f'<text class="{style}" x="{left - 14}" y="{y + 4:.1f}" text-anchor="end">{_label(name)}</text>')
        if values:
            span = (at(min(values.values())), at(max(values.values())))
            parts.append(f'<line class="span" x1="{span[0]:.1f}" x2="{span[1]:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts += [
            glyph(series, at(value), y, f"{name}, {titles.get(series, series)}: {value:.3f}")
            for series, value in values.items()
        ]
    return _svg(width, height, label, parts)


def bars(rows: Sequence[Row], titles: Mapping[str, str], label: str, reference: float = 1.0) -> str:
    """A group of bars per row, each with its value in figures, and a line at ``reference``."""
    left, right, top, thick, gap = _margin(rows), 64, 26, 15, 16
    counts = [len(values) for _, values in rows]
    width, height = _WIDTH, top + sum(n * (thick + 3) + gap for n in counts) + 4
    most = max([reference, *(v for _, values in rows for v in values.values())])

    def at(value: float) -> float:
        return left + value / most * (width - left - right)

    ticks = [t for t in (0, 0.25, 0.5, 0.75, 1.0, 1.5, 2, 3, 4) if t <= most]
    parts = [_vertical_grid(ticks, at, top - 6, height - 6)]
    figures = []  # above the line at the reference, and so after it
    y = float(top)
    for name, values in rows:
        middle = y + len(values) * (thick + 3) / 2
        parts.append(f'<text class="name" x="{left - 14}" y="{middle + 3:.1f}" text-anchor="end">{_label(name)}</text>')
        for series, value in values.items():
            tip = f"{name}, {titles.get(series, series)}: {value:.3f} of dense FedAvg"
            parts.append(
                f'<rect class="bar {escape(series)}" x="{left}" y="{y:.1f}" width="{max(1.0, at(value) - left):.1f}" '
                f'height="{thick}" rx="2"><title>{escape(tip)}</title></rect>'
            )
            figures.append(f'<text class="value" x="{at(value) + 6:.1f}" y="{y + thick - 3.5:.1f}">{value:.2f}</text>')
            y += thick + 3
        y += gap
    parts.append(f'<line class="reference" x1="{at(reference):.1f}" x2="{at(reference):.1f}" y1="{top - 6}" y2="{y}"/>')
    return _svg(width, height, label, [*parts, *figures])


def lines(series: Mapping[str, Sequence[tuple[int, float]]], titles: Mapping[str, str], label: str) -> str:
    """A score over rounds, one line per series, named at its right end; below the scale it runs along its foot."""
    left, right, top, bottom = 48, 150, 16, 40
    width, height = _WIDTH, 300
    low = _floor([("", {str(at): value for at, value in points}) for points in series.values()])
    first = min(r for points in series.values() for r, _ in points)
    last = max(r for points in series.values() for r, _ in points)

    def across(at: float) -> float:
        return left + (at - first) / max(1, last - first) * (width - left - right)

    def up(value: float) -> float:
        return height - bottom - (max(value, low) - low) / (1 - low) * (height - top - bottom)

    parts = []
    for tick in _ticks(low):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
            f'<text class="tick" x="{left - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>'
        )
    for tick in _round_ticks(first, last):
        parts.append(
            f'<text class="tick" x="{across(tick):.1f}" y="{height - bottom + 18}" text-anchor="middle">{tick}</text>'
        )
    middle = (left + width - right) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{height - 4}" text-anchor="middle">rounds</text>')
    ends = _apart({name: up(points[-1][1]) for name, points in series.items()}, 17, height - bottom)
    # Where a name does not stand at the end of its line, marks of their own say whose the names are.
    beside = all(points[-1][0] == last and abs(ends[name] - up(points[-1][1])) < 1 for name, points in series.items())
    for name, points in series.items():
        path = " ".join(f"{across(r):.1f},{up(v):.1f}" for r, v in points)
        title, (end, value) = titles.get(name, name), points[-1]
        parts.append(
            f'<polyline class="line {escape(name)}" points="{path}"><title>{escape(title)}</title></polyline>'
            + glyph(name, across(end), up(value), f"{title}, round {end}: {value:.3f}")
            + ("" if beside else glyph(name, across(last) + 20, ends[name]))
            + f'<text class="name" x="{across(last) + (13 if beside else 31):.1f}" y="{ends[name] + 4:.1f}">'
            + f"{_label(title, 17)}</text>"
        )
    return _svg(width, height, label, parts)


def matrix(names: Sequence[str], values: Sequence[Sequence[float]], label: str) -> str:
    """A square of shares between 0 and 1, each in figures on a shade that grows with it."""
    cell, left, top = 74, 110, 30
    width, height = left + cell * len(names) + 4, top + cell * len(names) + 4
    parts = []
    for i, name in enumerate(names):
        middle = top + cell * i + cell / 2
        parts.append(
            f'<text class="name" x="{left - 12}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<text class="name" x="{left + cell * i + cell / 2:.1f}" y="{top - 12}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
        for j, value in enumerate(values[i]):
            x, y = left + cell * j, top + cell * i
            parts.append(
                f'<rect class="cell" x="{x}" y="{y}" width="{cell - 3}" height="{cell - 3}" rx="4" '
                f'style="fill-opacity:{0.05 + 0.5 * max(0.0, min(1.0, value)):.2f}">'
                f"<title>{escape(f'{name} and {names[j]}: {value:.2f}')}</title></rect>"
                f'<text class="value" x="{x + (cell - 3) / 2}" y="{y + cell / 2 + 3}" text-anchor="middle">'
                f"{value:.2f}</text>"
            )
    return _svg(width, height, label, parts)


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width:.0f}px">{"".join(parts)}</svg>'
    )


def _label(name: str, most: int = _LONGEST) -> str:
    return escape(name if len(name) <= most else f"{name[: most - 1]}…")


def _margin(rows: Sequence[Row]) -> int:
    """The width that the longest label needs."""
    return max(96, 26 + 8 * min(_LONGEST, max((len(name) for name, _ in rows), default=0)))


def _floor(rows: Sequence[Row]) -> float:
    """Where the scale begins: a tenth below the lowest value, so that differences can be seen, and at -1 at the lowest:
    a model that is worse than the mean has an R² without bound."""
    lowest = min((v for _, values in rows for v in values.values()), default=0.0)
    return max(-1.0 if lowest < 0 else 0.0, min(0.9, math.floor(lowest * 10 - 0.5) / 10))


def _ticks(low: float) -> list[float]:
    step = 0.1 if low >= 0.4 else 0.2 if low >= -0.2 else 0.5
    count = round((1 - low) / step)
    return [round(1 - step * i, 6) for i in range(count + 1) if 1 - step * i >= low - 1e-9]


def _round_ticks(first: int, last: int) -> list[int]:
    least = max(1, (last - first) / 7)
    size = 10 ** int(math.log10(least))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= least)
    return [at for at in range(first, last + 1) if at % step == 0] or [first]


def _vertical_grid(ticks: Sequence[float], at: Callable[[float], float], top: float, bottom: float) -> str:
    return "".join(
        f'<line class="grid" x1="{at(t):.1f}" x2="{at(t):.1f}" y1="{top}" y2="{bottom}"/>'
        f'<text class="tick" x="{at(t):.1f}" y="{top - 6}" text-anchor="middle">{t:g}</text>'
        for t in ticks
    )


def _apart(heights: Mapping[str, float], least: float, most: float) -> dict[str, float]:
    """The same heights pushed down until labels no longer touch, and up again from below ``most``."""
    order = sorted(heights, key=lambda name: heights[name])
    out = dict(heights)
    for above, below in pairwise(order):
        out[below] = max(out[below], out[above] + least)
    for at, name in enumerate(reversed(order)):
        out[name] = min(out[name], most - at * least)
    return out
