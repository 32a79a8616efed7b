"""What ``talaria simulate`` shows: progress while it learns, the figures when it is done."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from talaria import tasks
from talaria.data.federated import Federated
from talaria.errors import TalariaError
from talaria.foreign import shown
from talaria.simulation.device_ids import ids_of
from talaria.simulation.experiment import Experiment
from talaria.simulation.result import Result
from talaria.simulation.simulator import RoundFacts
from talaria.simulation.write_fleet import FLEET, NAMES, STATE, Written, write_fleet

LOOK_BACK = 600.0
"""Seconds over which the rate is taken: some rounds, also where one takes a minute."""


class Rate(ProgressColumn):
    """How fast rounds go by, once two were seen: a resumed run's first step is all that was kept."""

    def render(self, task: Task) -> Text:
        """Rounds a second, or a minute where they are slow."""
        speed = task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f} rounds/s" if speed >= 1 else f"{60 * speed:.1f} rounds/min")


@contextmanager
def shown_progress(
    title: str, rounds: int | None, *, quiet: bool, console: Console | None = None
) -> Iterator[Callable[[RoundFacts], None]]:
    """A bar on stderr, or on ``console``, that moves with each round: rounds done, their rate, time gone and left.

    ``rounds`` is how many there will be, None where that is not known: then nothing is said of the time left. After
    the last one it says that clients are measured, which takes a while where they are many.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console or Console(stderr=True),
        transient=True,
        disable=quiet,
        speed_estimate_period=LOOK_BACK,
    ) as progress:
        bar = progress.add_task(title, total=rounds)

        def step(facts: RoundFacts) -> None:
            now = f"{title}: measuring" if facts.round == rounds else title
            progress.update(bar, completed=facts.round, description=now)

        yield step


@contextmanager
def taken_back(folder: Path | None) -> Iterator[None]:
    """What was written down in ``folder`` goes again where its simulation is refused, and nobody serves it yet: what
    is mended then can be written there."""
    try:
        yield
    except TalariaError:
        if folder is not None and not (folder / STATE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            typer.echo(f"{folder} is taken back", err=True)
        raise


def write_down(asked: Experiment, folder: Path, *, quiet: bool) -> Experiment:
    """Write the fleet that is about to be simulated, and say what to type to learn it for real. What is to be simulated
    then has the names of the devices."""
    ids = ids_of((*asked.data.clients, *asked.data.newcomers))
    names = {device: client for client, device in ids.items() if client != device}
    asked = asked.as_fleet()
    write_fleet(
        folder,
        Written(
            run=asked.run,
            data=asked.data,
            plans=asked.plans,
            aggregator=asked.asked["aggregator"],
            over=asked.over,
            buffering=asked.buffering,
            engine=asked.engine,
            privacy=asked.privacy,
            names=names,
        ),
    )
    differs = None
    if asked.privacy is not None:
        differs = "Noise is drawn from a seed in the simulation and anew in the fleet"
    elif asked.buffering is not None or asked.over:
        differs = "Who comes first is drawn in the simulation and real in the fleet"
    typer.echo(next_steps(folder, asked.data, differs), err=quiet)
    if names:
        typer.echo(called(names, folder), err=quiet)
    return asked


def called(names: Mapping[str, str], folder: Path) -> str:
    """Which devices are called otherwise than their clients."""
    first = ", ".join(f"{shown(client)} is {device}" for device, client in list(names.items())[:6])
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"Devices have names of their own here and in what is simulated: {first}{more}; {folder / NAMES} has all."


def next_steps(folder: Path, data: Federated, differs: str | None) -> str:
    """What to type to learn for real what is simulated, and what ``differs``."""
    typed = shlex.quote(str(folder))
    lines = [
        f"{folder} holds the fleet. Serve it, and beside that run its devices:",
        f"  talaria coordinator serve {typed}/{FLEET}",
        f"  talaria edge run {typed}/*.toml",
    ]
    if data.newcomers:
        lines.append(f"then, for those who come later:\n  talaria edge run {typed}/newcomers/*.toml")
    if differs is not None:
        lines.append(f"{differs}, so their bytes will differ.")
    return "\n".join(lines)


def tell(result: Result, report: Path | None, beside: Mapping[str, Result] | None = None, *, as_json: bool) -> None:
    """Print the figures, as one JSON document or as a table; where ``report`` names a file, write the page there, with
    the runs ``beside`` it."""
    if report is not None:
        typer.echo(f"report: {result.report(report, beside)}", err=True)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    console, rounds = Console(markup=False, emoji=False), result.run.rounds
    score, second = (name.replace("_", " ") for name in tasks.of(result.run.task).figures)
    table = Table(title=f"{result.run.algorithm} on {result.asked['dataset']}: {score} after {rounds} rounds")
    for heading in ("client", score, second, "test samples"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for part, title in ((result.members, "members"), (result.newcomers, "newcomers")):
        if part is None:
            continue
        for name, metrics in part.clients.items():
            table.add_row(name, f"{metrics.accuracy:.3f}", _figure(metrics.macro_recall), str(metrics.samples))
        s = part.accuracy
        table.add_section()
        table.add_row(f"{title}: mean", f"{s.mean:.3f}", _figure(part.macro_recall.mean), "")
        table.add_row(f"{title}: worst tenth", f"{s.worst_tenth:.3f}", _figure(part.macro_recall.worst_tenth), "")
        table.add_section()
    console.print(table)
    figures = result.as_dict()
    if figures["overlap"] is not None:
        mean = figures["overlap"]["mean"]
        told = f"of the channels that either of two members keeps, both keep {mean:.0%} on average"
        console.print(told, highlight=False)
    kept = figures["privacy"]
    if kept is not None:
        console.print(_private(kept), highlight=False)
    console.print(_travelled(figures), highlight=False)


def _figure(value: float) -> str:
    """A score with three decimals; an error in small units with three digits that say something."""
    return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}"


def _travelled(figures: Mapping[str, Any]) -> str:
    """The bytes both ways, and their share of every shared value of every model and update as it is."""
    whole = figures["bytes_whole"]
    told = []
    for way, size in (("up", figures["bytes_up"]), ("down", figures["bytes_down"])):
        if size is not None:
            told.append(f"{size / 1e6:.2f} MB {way}" + (f" ({size / whole[way]:.2f})" if whole[way] else ""))
    told[-1] += "; in brackets the share of whole models and updates" if any(whole.values()) else ""
    return f"travelled: {', '.join(told)}"


def _private(kept: Mapping[str, Any]) -> str:
    """What privacy came to, in a sentence or two."""
    told = "updates were added up so that only sums opened" if kept["secure"] else "updates were added up in the open"
    if "clip_now" in kept:
        told += f", cut to {kept['clip_now']:.3g} in the end"
    if kept.get("epsilon") is None:
        return told
    budget = "" if kept["budget"] is None else f" of {kept['budget']:g}"
    return (
        f"{told}; epsilon {kept['epsilon']:.3g}{budget} at delta {kept['delta']:g} ({kept['form']}; it covers "
        f"{kept['covers']})"
    )
