"""``talaria bench``: the benchmarks that are installed, from the entry-point group ``talaria.benches``."""

import signal
import sys
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from talaria import stopping
from talaria.errors import ConfigError

GROUP = "talaria.benches"


class _Benches(TyperGroup):
    """The installed benchmarks; each is imported, with all that it measures, only where it is run or described."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(entry_points(group=GROUP).names) or ["install"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # of typer's own copy of click, or click's
        found = entry_points(group=GROUP)
        if found.names and cmd_name not in found.names:
            return None
        one = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        if found.names:
            one.command(cmd_name)(found[cmd_name].load())
        else:  # whichever it is, with whatever options
            one.command(cmd_name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(_missing)
        return typer.main.get_command(one)


app = typer.Typer(
    cls=_Benches,
    help="Measure this machine: ratios within one run, on thread CPU time. Each has --help and --json.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure this machine: ratios within one run, on thread CPU time. Each has --help and --json."""
    for name in set(stopping.asked_by()) - {signal.SIGINT}:  # as after Ctrl-C, its programs end and its folders go
        before = signal.signal(name, lambda number, _: sys.exit(128 + number))
        context.call_on_close(partial(signal.signal, name, before))


def _missing() -> None:
    """None is installed: run `pip install -e benchmarks` in a checkout of Talaria."""
    raise ConfigError("no benchmark is installed; they come with a checkout of Talaria: pip install -e benchmarks")
