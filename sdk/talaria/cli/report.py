"""``talaria report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from talaria import durable
from talaria.errors import ConfigError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of `talaria simulate --save`; with --out, 1 to 4.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write an HTML page of them here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Set saved runs side by side: accuracy, worst tenth, newcomers, parameters and bytes.

    The page (--out) has every client and, of runs that were measured on the way (--evaluate-every), the curves.
    """
    from rich.console import Console
    from rich.table import Table

    from talaria.simulation.reporting import compare

    if fleets := [path for path in runs if path.suffix == ".toml"]:
        raise ConfigError(
            f"report: {fleets[0]} is a fleet, and no run that was saved; what it has lived through tells `talaria "
            f"coordinator report {fleets[0]}`"
        )
    found = compare.compared(runs, page=out is not None)
    if out is not None:
        durable.write_as("--out", out, compare.page(found).encode("utf-8", "backslashreplace"), mode=0o644)
        typer.echo(f"report: {out}", err=True)
    if as_json:
        typer.echo(json.dumps({run.name: compare.figures(run) for run in found}, indent=2))
        return
    heads, body = compare.rows(found)
    most = len(compare.SERIES)
    for begin in range(0, len(body), most):
        some = body[begin : begin + most]
        table = Table("", *(cells[0] for cells in some))  # a column for each run: so many figures fit no terminal
        for number, head in enumerate(heads[1:], 1):
            table.add_row(head, *(cells[number] for cells in some))
        Console(markup=False, emoji=False).print(table)
