"""The ``talaria`` command. Its subcommands come from the entry-point group ``talaria.commands``."""

import sys
from importlib.metadata import EntryPoint, entry_points

import typer
from rich.console import Console

from talaria.errors import TalariaError

GROUP = "talaria.commands"


def app() -> typer.Typer:
    """The command with every installed subcommand: a Typer becomes a group, a function a command."""
    main = typer.Typer(
        help="Hardware-aware on-device personalization: every device its own small, fast model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        _add(main, entry)
    return main


def _add(main: typer.Typer, entry: EntryPoint) -> None:
    command = entry.load()
    if isinstance(command, typer.Typer):
        main.add_typer(command, name=entry.name)
    else:
        main.command(entry.name)(command)


def main() -> None:
    """Run; an error made for people is one message on stderr and exit status 1, never a traceback."""
    try:
        app()()
    except TalariaError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"talaria: {error}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
