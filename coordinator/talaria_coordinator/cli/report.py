"""``talaria coordinator report``: what a fleet has lived through, as lines, as JSON or as a page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from talaria import durable
from talaria_coordinator.cli.options import AsJson, Config
from talaria_coordinator.fleet.chronicle import KINDS, Chronicle, Moment, chronicle, some, when

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 250, 34, 12, 44, 26
MARKS = {
    "next": ("another run", "M0-7 6.5 5H-6.5Z"),
    "trial": ("a run that some try first", "M0 7 6.5-5H-6.5Z"),
    "passed": ("its trial passed", "M-6-1-2 4 6-6"),
    "off": ("called off", "M-5-5 5 5M5-5-5 5"),
    "extend": ("more rounds", "M-6 0H6M0-6V6"),
    "restored": ("restored", "M0-7 7 0 0 7-7 0Z"),
    "pause": ("paused", "M-3-6V6M3-6V6"),
}
"""What stands above the time line: its words, and its shape, by which it is told apart without colour."""
STROKED = ("passed", "off", "extend", "pause")
STYLE = """
:root{--paper:#fbfaf7;--ink:#1d2329;--soft:#5c6670;--line:#e2e0d9;--area:#00796b}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e8eaec;--soft:#a0a9b2;--line:#313940;--area:#3ecfb8}}
body{margin:0 auto;max-width:960px;padding:40px 24px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
svg{display:block;width:100%;height:auto;overflow:visible}
text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--line)}.area{fill:var(--area);opacity:.18}.edge{fill:none;stroke:var(--area);stroke-width:2}
.still{fill:var(--soft);opacity:.18}.stem{stroke:var(--soft);stroke-dasharray:2 3}
.mark{fill:var(--ink)}.mark.stroked{fill:none;stroke:var(--ink);stroke-width:2.2}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;padding:0;list-style:none;font-size:.85rem}
.legend svg{display:inline-block;width:14px;height:14px;vertical-align:-2px;margin-right:5px}
table{border-collapse:collapse;width:100%;font-size:.85rem}
th,td{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
.n{text-align:right;font-variant-numeric:tabular-nums}
"""


def report(
    config: Config,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write an HTML page of it here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what the fleet has lived through: who came and left, runs that followed one another, trials, pauses and
    restores, on a time line. From the audit log; the coordinator may be running or not."""
    from talaria.errors import StateError
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.server.open_state import open_store

    loaded = load_config(config)
    with open_store(loaded, make=False) as store:
        if store.fleets.get(loaded.name) is None:
            raise StateError(f"report: the store holds no fleet {loaded.name!r}; serve it first")
        found = chronicle(store.audit.events(loaded.name, last=10**9, kinds=KINDS, without=("counted",)))
    if out is not None:
        durable.write_as("--out", out, page(loaded.name, found).encode(), mode=0o644)
        typer.echo(f"report: {out}", err=True)
    typer.echo(json.dumps({"fleet": loaded.name, **found.facts()}, indent=2) if as_json else lines(loaded.name, found))


def summary(found: Chronicle) -> str:
    """All of it in one sentence."""
    f = found.facts()
    owners = f", {f['left_by_owner']} of them by their owner's hand" if f["left_by_owner"] else ""
    return (
        f"{some(f['rounds'], 'round')} from {when(found.begin)} to {when(found.end)}; {some(f['members'], 'member')} "
        f"({f['joined']} came, {f['retired']} left for good{owners}, {f['readmitted']} came back); "
        f"{some(f['warm_starts'], 'warm start')}; {some(f['trials'], 'trial')}, {f['trials_passed']} passed, "
        f"{f['trials_called_off']} called off; "
        f"restored {_times(f['restores'])}, paused {_times(f['pauses'])}."
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def lines(fleet: str, found: Chronicle) -> str:
    """The story as text, a line for each moment."""
    told = [
        f"{when(m.at)}  round {m.round:>5}  {some(m.members, 'member'):>13}  {_plain(m.text)}" for m in found.moments
    ]
    return "\n".join((f"fleet {fleet}: {summary(found)}", *told))


def _plain(text: str) -> str:
    """Without what could steer a terminal: reasons may quote strangers."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def page(fleet: str, found: Chronicle) -> str:
    """The story as one self-contained page."""
    rows = "".join(
        f'<tr><td>{when(m.at)}</td><td class="n">{m.round}</td><td class="n">{m.members}</td>'
        f"<td>{escape(_plain(m.text))}</td></tr>"
        for m in found.moments
    )
    seen = {m.kind for m in found.moments}
    legend = "".join(
        f'<li><svg viewBox="-8 -8 16 16" aria-hidden="true">{_mark(kind)}</svg>{words}</li>'
        for kind, (words, _) in MARKS.items() if kind in seen
    )  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(fleet)}</title>'
        f"<style>{STYLE}</style></head><body><h1>Fleet {escape(fleet)}</h1><p>{escape(summary(found))}</p>"
        f'<figure style="margin:0">{line(found)}<ul class="legend">{legend}</ul></figure>'
        '<table><thead><tr><th>when</th><th class="n">round</th><th class="n">members</th><th>what</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
        "</body></html>\n"
    )


def _mark(kind: str, x: float = 0.0, y: float = 0.0, tip: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    style = "mark stroked" if kind in STROKED else "mark"
    return f'<path class="{style}" transform="translate({x:.1f} {y:.1f})" d="{MARKS[kind][1]}">{title}</path>'


def line(found: Chronicle) -> str:
    """Members over time, with what happened above them; grey where the fleet was paused."""
    span = max(found.end - found.begin, 1e-9)
    most = max((m.members for m in found.moments), default=0) or 1
    low, high = HEIGHT - BOTTOM, TOP

    def x(at: float) -> float:
        return LEFT + (at - found.begin) / span * (WIDTH - LEFT - RIGHT)

    def y(members: float) -> float:
        return low - members / most * (low - high)

    parts = []
    for n in sorted({0, most // 2, most}):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(n):.1f}" y2="{y(n):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(n) + 4:.1f}" text-anchor="end">{n}</text>')
    still: Moment | None = None
    for m in (*found.moments, Moment(found.end, found.rounds, 0, "resume", "")):
        if m.kind in ("resume", "next", "trial") and still is not None:
            width = max(1.0, x(m.at) - x(still.at))
            parts.append(
                f'<rect class="still" x="{x(still.at):.1f}" y="{high}" width="{width:.1f}" height="{low - high}"/>'
            )
            still = None
        if m.kind == "pause" and still is None:
            still = m
    path, now = f"M{x(found.begin):.1f} {low}", 0
    for m in found.moments:
        path += f"H{x(m.at):.1f}V{y(m.members):.1f}" if m.members != now else ""
        now = m.members
    path += f"H{x(found.end):.1f}"
    parts.append(f'<path class="area" d="{path}V{low}Z"/><path class="edge" d="{path}"/>')
    last, row = -100.0, 0
    for m in (m for m in found.moments if m.kind in MARKS):
        # Those that are close stand above one another, as far as there is room.
        row = (row + 1) % 3 if x(m.at) - last < 15 else 0
        last = x(m.at)
        parts.append(f'<line class="stem" x1="{last:.1f}" x2="{last:.1f}" y1="{high - 4}" y2="{low}"/>')
        parts.append(_mark(m.kind, last, high - 10 - 13 * row, f"{when(m.at)}, round {m.round}: {_plain(m.text)}"))
    ends = f"{when(found.end)}, round {found.rounds}"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{when(found.begin)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{ends}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="members over time">{"".join(parts)}</svg>'
