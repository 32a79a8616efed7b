"""The report as one self-contained HTML page: no script, no font, no picture from elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from talaria import durable
from talaria.simulation.reporting import charts
from talaria.simulation.reporting.style import document
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


def write_html(summary: Mapping[str, Any], path: Path) -> Path:
    """Write :func:`html` of ``summary`` to ``path``. Raises :class:`~talaria.errors.StateError` where it cannot be
    written."""
    durable.write_as("report:", path, html(summary).encode("utf-8", "backslashreplace"), mode=0o644)
    return path


def html(summary: Mapping[str, Any]) -> str:
    """The page of a summary. :class:`DataError` names a key that is missing or odd."""
    story = read(summary)
    parts = [_header(story), _tiles(story), _newcomers(story), _members(story), _cost(story), _rounds(story)]
    parts += [_shared(story), _everyone(story), _notes(story), _facts(story)]
    return document(story.title, parts)


def _header(story: Story) -> str:
    subtitle = f'<p class="lead">{escape(story.subtitle)}</p>' if story.subtitle else ""
    return f"<header><h1>{escape(story.title)}</h1>{subtitle}</header>"


def _tiles(story: Story) -> str:
    tiles = []
    if "personal" in story.newcomer_accuracy:
        tiles.append((f"{story.newcomer_accuracy['personal']:.3f}", f"newcomers' {story.score}, personal model"))
    if "personal" in story.accuracy:
        tiles.append((f"{story.accuracy['personal']:.3f}", f"members' {story.score}, personal model"))
    tiles += [(f"{v:.2f}\u2009×", f"{TITLES[k].lower()}, of dense FedAvg") for k, v in story.ratios.items()]
    if story.parity is not None:
        tiles.append((f"{story.parity:.0e}", "largest difference, ONNX to torch"))
    inner = "".join(f"<div><dd>{figure}</dd><dt>{escape(what)}</dt></div>" for figure, what in tiles)
    return f'<dl class="tiles">{inner}</dl>'


def _newcomers(story: Story) -> str:
    if not story.newcomers:
        return ""
    got = story.newcomer_accuracy
    rows = [(u.name, _only(u.accuracy, NEWCOMER_METHODS)) for u in story.newcomers]
    sums = [("mean", _only(got, NEWCOMER_METHODS))]
    told = [
        f"The fleet's model as it is reaches {got['zero_shot']:.3f} on them." if "zero_shot" in got else "",
        f"A model trained on their own few labels alone reaches {got['scratch']:.3f}." if "scratch" in got else "",
        f"The fleet's model, personalized on the same labels, reaches {got['personal']:.3f}"
        f" (worst {min(u.accuracy['personal'] for u in story.newcomers if 'personal' in u.accuracy):.3f})."
        if any("personal" in u.accuracy for u in story.newcomers) and "personal" in got
        else "",
    ]
    count = len(story.newcomers)
    words = f"{count} newcomer{'s' * (count > 1)} took no part in the training. " + " ".join(filter(None, told))
    return _section("Someone new comes", words, NEWCOMER_METHODS, (rows, sums), f"Newcomers' {story.score}")


def _members(story: Story) -> str:
    rows = [(u.name, _only(u.accuracy, MEMBER_METHODS)) for u in story.members]
    sums = [
        ("mean", _only(story.accuracy, MEMBER_METHODS)),
        ("worst tenth", _only(story.worst_tenth, MEMBER_METHODS)),
    ]
    words = (
        f"{_capital(story.score)} of the {len(story.members)} members after {story.rounds} rounds, on the test data of "
        "each. Personal is the model that the device exports."
    )
    label = f"Members' {story.score} by method"
    return _section("Those who trained together", words, MEMBER_METHODS, (rows, sums), label)


def _section(
    title: str, words: str, methods: Sequence[str], data: tuple[Sequence[charts.Row], Sequence[charts.Row]], label: str
) -> str:
    rows, sums = data
    shown = [m for m in methods if any(m in values for _, values in rows)]
    return (
        f"<section><h2>{escape(title)}</h2><p>{escape(words)}</p>{_legend(shown)}"
        f"<figure>{charts.dots(rows, sums, TITLES, label)}</figure></section>"
    )


def _legend(series: Sequence[str], mark: Callable[[str], str] = charts.legend_mark) -> str:
    items = "".join(f"<li>{mark(s)}{escape(TITLES.get(s, s))}</li>" for s in series)
    return f'<ul class="legend">{items}</ul>'


def _swatch(series: str) -> str:
    return f'<i class="swatch {series}"></i>'


def _cost(story: Story) -> str:
    everyone = (*story.members, *story.newcomers)
    rows = []
    for device in {u.device for u in everyone if u.ratios}:
        users = [u for u in everyone if u.device == device]
        rows.append((device or "all", {r: m for r in RATIOS if (m := mean_ratio(users, r)) is not None}))
    rows.sort(key=lambda row: (*row[1].values(), row[0]))
    if len(rows) < 2 and story.ratios:
        rows = [("all", {**(rows[0][1] if rows else {}), **story.ratios})]
    if not rows:
        return ""
    told = "Mean over the users of each device class" if len(rows) > 1 else "Mean over the users"
    timed = any("latency_ratio" in values for _, values in rows)
    clock = "; latency was measured in ONNX Runtime in the same run as the dense model" if timed else ""
    shown = [r for r in RATIOS if any(r in values for _, values in rows)]
    words = f"{told}, as a share of dense FedAvg (the line at 1). Shorter is better{clock}."
    return (
        f"<section><h2>What it costs</h2><p>{words}</p>{_legend(shown, _swatch)}"
        f"<figure>{charts.bars(rows, TITLES, 'Ratios to dense FedAvg')}</figure></section>"
    )


def _rounds(story: Story) -> str:
    if not story.curve:
        return ""
    return (
        f"<section><h2>Round by round</h2><p>Mean {escape(story.score)} of the members after each round.</p>"
        f"<figure>{charts.lines(story.curve, TITLES, f'{_capital(story.score)} over rounds')}</figure></section>"
    )


def _shared(story: Story) -> str:
    if story.overlap is None:
        return ""
    chart = charts.matrix(story.overlap.names, story.overlap.matrix, "Channels in common")
    some, every = len(story.overlap.names), len(story.members)
    return (
        "<section><h2>Channels in common</h2><p>Each keeps the channels that its hardware can afford, or that its "
        "algorithm leaves it. The share of channels that two both keep, of those that either keeps"
        f"{f' ({some} of {every} members)' if some < every else ''}:</p>"
        f"<figure>{chart}</figure></section>"
    )


def _everyone(story: Story) -> str:
    tables = _table(story.members, MEMBER_METHODS)
    if story.newcomers:
        tables += f"<h3>Newcomers</h3>{_table(story.newcomers, NEWCOMER_METHODS)}"
    several = len({method for u in (*story.members, *story.newcomers) for method in u.accuracy}) > 1
    best = " by method (each user's best in bold)" if several else ""
    ratios = ", and ratios to dense FedAvg" if any(u.ratios for u in (*story.members, *story.newcomers)) else ""
    words = f"{_capital(story.score)} on test data{best}{ratios}."
    return f"<section><h2>Every user</h2><p>{escape(words)}</p>{tables}</section>"


def _table(users: Sequence[User], methods: Sequence[str]) -> str:
    methods = [m for m in methods if any(m in u.accuracy for u in users)]
    ratios = [r for r in RATIOS if any(r in u.ratios for u in users)]
    sizes, parities = any(u.bundle_bytes is not None for u in users), any(u.parity is not None for u in users)
    classes = any(u.device for u in users)
    heads = ["User", *["Device"] * classes, *(TITLES[k] for k in (*methods, *ratios))]
    heads += ["Bundle, KiB"] * sizes + ["ONNX to torch"] * parities
    body = []
    for u in users:
        best = max((u.accuracy[m] for m in methods if m in u.accuracy), default=None)
        cells = [_cell(u.accuracy.get(m), ".3f", best=u.accuracy.get(m) == best) for m in methods]
        cells += [_cell(u.ratios.get(r), ".2f") for r in ratios]
        if sizes:
            cells.append(_cell(None if u.bundle_bytes is None else u.bundle_bytes / 1024, ".1f"))
        if parities:
            cells.append(_cell(u.parity, ".0e"))
        device = f"<td>{escape(u.device)}</td>" * classes
        body.append(f'<tr><th scope="row">{escape(u.name)}</th>{device}{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _cell(value: float | None, style: str, best: bool = False) -> str:
    text = "–" if value is None else format(value, style)
    return f'<td class="n">{f"<b>{text}</b>" if best else text}</td>'


def _notes(story: Story) -> str:
    if not story.notes:
        return ""
    return f"<section><h2>To know</h2>{''.join(f'<p>{escape(note)}</p>' for note in story.notes)}</section>"


def _facts(story: Story) -> str:
    facts = {"Rounds": story.rounds, "Seed": story.seed, "Broker": story.broker, **story.versions}
    inner = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items())
    return f'<footer><dl class="facts">{inner}</dl></footer>'


def _capital(word: str) -> str:
    return word[:1].upper() + word[1:]


def _only(values: Mapping[str, float], methods: Sequence[str]) -> dict[str, float]:
    return {m: values[m] for m in methods if m in values}
