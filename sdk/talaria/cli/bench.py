"""``talaria bench``: the benchmarks that ship, from the entry-point group ``talaria.benches``."""

from importlib.metadata import entry_points

import typer

GROUP = "talaria.benches"

app = typer.Typer(
    help="Measure this machine: ratios within one run, on thread CPU time. Each has --help and --json.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def bench() -> None:
    """Measure this machine: ratios within one run, on thread CPU time. Each has --help and --json."""


for _entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
    app.command(_entry.name)(_entry.load())
