"""Scores over amounts of labels as one SVG, a panel for each data set."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from talaria_bench.people.studies import METHODS

COLOURS = {"alone": "#77808a", "fleet": "#c77700", "dense": "#7a4fb0", "personal": "#00796b"}
WIDTH, HEIGHT, LEFT, TOP, FOOT = 330, 270, 44, 30, 64


def picture(found: Mapping[str, Mapping[str, Any]]) -> str:
    """``found``: by data set the ``figure``'s name and ``amounts`` as :func:`talaria_bench.people.figures.told` gives
    them. Bars are the intervals."""
    panels = [_panel(name, one, index * WIDTH) for index, (name, one) in enumerate(found.items())]
    keys = [
        f'<circle cx="{LEFT + 190 * i}" cy="{HEIGHT + 14}" r="5" fill="{COLOURS[key]}"/>'
        f'<text x="{LEFT + 190 * i + 10}" y="{HEIGHT + 18}">{escape(title)}</text>'
        for i, (key, title) in enumerate(METHODS.items())
    ]
    width = max(WIDTH * len(found), LEFT + 190 * len(METHODS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 30}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="#fff"/>{"".join(panels)}{"".join(keys)}</svg>\n'
    )


def _panel(name: str, one: Mapping[str, Any], x: int) -> str:
    amounts = one["amounts"]
    ends = [
        value
        for amount in amounts.values()
        for method in amount["methods"].values()
        for value in (method["mean"], *method["interval"])
    ]
    # Learning alone from next to nothing can be worse than any scale that shows the others.
    low, high = max(min(ends), -0.5), max(ends)
    span = (high - low) or 1.0

    def up(value: float) -> float:
        return float(HEIGHT - FOOT - (max(value, low) - low) / span * (HEIGHT - FOOT - TOP))

    step = (WIDTH - LEFT - 30) / max(1, len(amounts) - 1)
    parts = [f'<g transform="translate({x} 0)"><text x="{LEFT}" y="16" font-weight="bold">{escape(name)}</text>']
    for tick in (low, low + span / 2, high):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{up(tick):.1f}" y2="{up(tick):.1f}" stroke="#e2e0d9"/>'
            f'<text x="{LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:.2f}</text>'
        )
    for i, (amount, facts) in enumerate(amounts.items()):
        parts.append(
            f'<text x="{LEFT + 8 + i * step:.1f}" y="{HEIGHT - FOOT + 20}" text-anchor="middle">{escape(amount)}</text>'
            f'<text x="{LEFT + 8 + i * step:.1f}" y="{HEIGHT - FOOT + 34}" text-anchor="middle" fill="#5c6670">'
            f"{amount_of(facts)}</text>"
        )
    for shift, (key, colour) in enumerate(COLOURS.items()):
        points = []
        for i, facts in enumerate(amounts.values()):
            if key not in facts["methods"]:
                continue
            method = facts["methods"][key]
            at, (least, most) = LEFT + 2 + 4 * shift + i * step, method["interval"]
            points.append(f"{at:.1f},{up(method['mean']):.1f}")
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{up(least):.1f}" y2="{up(most):.1f}" stroke="{colour}"/>'
                f'<circle cx="{at:.1f}" cy="{up(method["mean"]):.1f}" r="3.5" fill="{colour}">'
                f"<title>{escape(METHODS[key])}, {amount_of(facts)}: {method['mean']:.3f}</title></circle>"
            )
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="#5c6670">{escape(one["figure"])}</text></g>')
    return "".join(parts)


def amount_of(facts: Mapping[str, Any]) -> str:
    """How many labels, in words."""
    return f"{facts['labels']:.0f} labels"
