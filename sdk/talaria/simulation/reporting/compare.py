"""Saved runs beside each other: who fares how under each, over the rounds, and for how many bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from talaria.errors import ConfigError, StateError
from talaria.foreign import parsed, shown
from talaria.simulation.reporting import charts
from talaria.simulation.reporting.style import document
from talaria.tasks import CLASSIFICATION, score_word
from talaria.training.evaluation import summarize

SERIES = ("personal", "fedavg", "fedavg_ft", "local")
"""The marks and colours that runs get, in their order: as many runs can be told apart on one page."""
MOST = 64
"""Runs that are set side by side in figures."""
EXPERIMENT, RESULT = "experiment.json", "result.json"


@dataclass(frozen=True)
class Saved:
    """One saved run that is whole. ``members`` and ``newcomers`` have each client's ``score``, at most 1; ``kept`` is
    the members' mean number of parameters, ``up`` all bytes that members sent, ``down`` those of the
    models that they downloaded (None where an older version learned)."""

    name: str
    algorithm: str
    dataset: str
    rounds: int
    seed: int
    score: str
    members: Mapping[str, float]
    newcomers: Mapping[str, float]
    curve: tuple[tuple[int, float], ...]
    kept: float
    up: int
    down: int | None
    data: str
    """Digest of the samples that it learned from."""


def saved(folder: Path) -> Saved:
    """What ``talaria simulate --save`` kept in ``folder``. :class:`StateError` where that is no whole run."""
    found, asked = _json(folder / RESULT, folder), _json(folder / EXPERIMENT, folder)
    try:
        newcomers = found["newcomers"] or {"clients": {}}
        return Saved(
            name=folder.name or str(folder),
            algorithm=str(found["algorithm"]),
            dataset=str(found["dataset"]),
            rounds=int(found["rounds"]),
            seed=int(found["seed"]),
            score=score_word(str(found.get("task", CLASSIFICATION))),
            members={str(name): float(one["accuracy"]) for name, one in sorted(found["clients"].items())},
            newcomers={str(name): float(one["accuracy"]) for name, one in sorted(newcomers["clients"].items())},
            curve=tuple((int(one["round"]), float(one["accuracy"])) for one in found["curve"]),
            kept=sum(int(one["parameters"]) for one in found["clients"].values()) / len(found["clients"]),
            up=int(found["bytes_up"]),
            down=None if found.get("bytes_down") is None else int(found["bytes_down"]),
            data=str(asked["fingerprint"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise StateError(f"{folder}/{RESULT}: damaged ({error!r}); run `talaria simulate --resume {folder}`") from None


def compared(folders: Sequence[Path], *, page: bool = False) -> list[Saved]:
    """The runs in ``folders``, each with a name of its own. :class:`ConfigError` for too many, or for more than the
    ``page`` that is wanted can tell apart."""
    if not 1 <= len(folders) <= MOST:
        raise ConfigError(f"report: {len(folders)} runs; name 1 to {MOST} folders of saved runs")
    if page and len(folders) > len(SERIES):
        raise ConfigError(f"report: {len(folders)} runs; a page (--out) tells {len(SERIES)} apart, figures take more")
    runs = [saved(folder) for folder in folders]
    names = [run.name for run in runs]
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise ConfigError(f"report: two runs are called {shown(doubled[0])}; give each folder a name of its own")
    return runs


def figures(run: Saved) -> dict[str, Any]:
    """The figures of one run that are set side by side, as plain values."""
    out: dict[str, Any] = {
        "score": run.score,
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "rounds": run.rounds,
        "seed": run.seed,
    }
    for part in ("members", "newcomers"):
        values = list(getattr(run, part).values())
        whole = summarize(values) if values else None
        out[part] = None if whole is None else {"mean": whole.mean, "worst_tenth": whole.worst_tenth}
    return out | {"parameters": run.kept, "bytes_up": run.up, "bytes_down": run.down}


def page(runs: Sequence[Saved]) -> str:
    """One HTML page without script: a table of the runs, the curves that were measured, and every client."""
    titles = {series: run.name for series, run in zip(SERIES, runs, strict=False)}
    legend = "".join(f"<li>{charts.legend_mark(s)}{escape(name)}</li>" for s, name in titles.items())
    score = escape(" or ".join(dict.fromkeys(run.score for run in runs)))
    parts = [f"<header><h1>{escape(' · '.join(titles.values()))}</h1></header>", _table(runs)]
    if len({run.data for run in runs}) > 1:
        parts.append("<section><h2>To know</h2><p>These runs did not learn from the same samples.</p></section>")
    curves = {series: run.curve for series, run in zip(SERIES, runs, strict=False) if run.curve}
    if curves:
        parts.append(
            f"<section><h2>Round by round</h2><p>Mean {score} of the members, where it was measured.</p>"
            f"<figure>{charts.lines(curves, titles, f'{score} over rounds')}</figure></section>"
        )
    for part, heading in (("members", "Those who trained together"), ("newcomers", "Those who came later")):
        of = {series: getattr(run, part) for series, run in zip(SERIES, runs, strict=False)}
        everyone = sorted({name for values in of.values() for name in values})
        if not everyone:
            continue
        rows = [(name, {s: values[name] for s, values in of.items() if name in values}) for name in everyone]
        told = {s: summarize(list(values.values())) for s, values in of.items() if values}
        sums = [
            ("mean", {s: one.mean for s, one in told.items()}),
            ("worst tenth", {s: one.worst_tenth for s, one in told.items()}),
        ]
        parts.append(
            f'<section><h2>{heading}</h2><ul class="legend">{legend}</ul>'
            f"<figure>{charts.dots(rows, sums, titles, heading)}</figure></section>"
        )
    return document(", ".join(titles.values()), parts)


def rows(runs: Sequence[Saved]) -> tuple[list[str], list[list[str]]]:
    """Headings and one row of text per run; what the members' scores are is a column where it is not accuracy."""
    odd = any(run.score != "accuracy" for run in runs)
    heads = [
        "run",
        "algorithm",
        "data",
        *["score"] * odd,
        "rounds",
        "seed",
        "members",
        "members' worst tenth",
        "newcomers",
        "newcomers' worst tenth",
        "parameters",
    ]
    body = []
    for run in runs:
        told = figures(run)
        accuracies = [
            "–" if told[part] is None else f"{told[part][word]:.3f}"
            for part in ("members", "newcomers")
            for word in ("mean", "worst_tenth")
        ]
        first = [run.name, run.algorithm, run.dataset, *[run.score] * odd, str(run.rounds), str(run.seed)]
        body.append([*first, *accuracies, f"{run.kept:,.0f}", f"{run.up / 1e6:.2f}"])
        body[-1].append("–" if run.down is None else f"{run.down / 1e6:.2f}")
    return [*heads, "MB up", "MB down"], body


def _table(runs: Sequence[Saved]) -> str:
    heads, body = rows(runs)
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    lines = "".join(
        f'<tr><th scope="row">{escape(cells[0])}</th>'
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells[1:])
        + "</tr>"
        for cells in body
    )
    return (
        "<section><h2>Side by side</h2>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></section>'
    )


def _json(path: Path, folder: Path) -> Mapping[str, Any]:
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        held = (folder / EXPERIMENT).exists()
        mend = f"its run is not whole; `talaria simulate --resume {folder}`" if held else (
            "name a folder that `talaria simulate --save` wrote"
        )  # fmt: skip
        raise StateError(f"report: {path} is missing; {mend}") from None
    except (OSError, ValueError) as error:
        raise StateError(f"report: {path} cannot be read ({error}); simulate it again") from None
    if not isinstance(found, dict):
        raise StateError(f"report: {path} holds no table; simulate it again")
    return found
