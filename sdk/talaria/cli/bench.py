"""``talaria bench``: the benchmarks that are installed, from the entry-point group ``talaria.benches``."""

from importlib.metadata import entry_points

import typer

from talaria.errors import ConfigError

GROUP = "talaria.benches"

app = typer.Typer(
    help="Measure this machine: ratios within one run, on thread CPU time. Each has --help and --json.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def bench() -> None:
    """Measure this machine: ratios within one run, on thread CPU time. Each has --help and --json."""


def _missing() -> None:
    """None is installed: run `pip install -e benchmarks` in a checkout of Talaria."""
    raise ConfigError("no benchmark is installed; they come with a checkout of Talaria: pip install -e benchmarks")


_found = sorted(entry_points(group=GROUP), key=lambda e: e.name)
for _entry in _found:
    app.command(_entry.name)(_entry.load())
if not _found:
    app.command("install")(_missing)
