"""The ``talaria`` command. Its subcommands come from the entry-point group ``talaria.commands``.

What runs for months on a small device does not carry what reads command lines for people: a command of the group
``talaria.straight`` reads its plain words itself. What it does not take, help and mistakes too, goes the usual way.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from talaria import plugins
from talaria.errors import ConfigError, TalariaError
from talaria.foreign import printed

if TYPE_CHECKING:
    import typer

GROUP = "talaria.commands"
STRAIGHT = "talaria.straight"
"""Entry points named by two words, functions of the words after them that say whether they took them."""
_IN_EXTRA = re.compile(r"""(?P<package>[A-Za-z0-9._-]+).*extra == ["'](?P<extra>[a-z0-9-]+)["']""")


def app(words: Sequence[str] = ()) -> typer.Typer:
    """The command line. Where ``words`` begins with a subcommand, only that one is loaded."""
    import typer

    main = typer.Typer(
        help="Hardware-aware on-device personalization: every device its own small, fast model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    shown = typer.Option(False, "--version", is_eager=True, callback=_version, help="Show the version and exit.")

    def talaria(version: bool = shown) -> None:
        """Hardware-aware on-device personalization: every device its own small, fast model."""

    main.callback()(talaria)
    entries = sorted(entry_points(group=GROUP), key=lambda e: e.name)
    chosen = [e for e in entries if words and e.name == words[0]]
    for entry in chosen or entries:
        _add(main, entry)
    return main


def _version(asked: bool) -> None:
    import typer

    if asked:
        typer.echo(f"talaria {version('talaria')}")
        raise typer.Exit


def _add(main: typer.Typer, entry: EntryPoint) -> None:
    """A Typer becomes a group, a function a command; one whose packages are missing says what to install."""
    import typer

    try:
        command = entry.load()
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0].startswith("talaria"):
            raise
        command = _unavailable(entry.name, missing.name or "?")
    if isinstance(command, typer.Typer):
        main.add_typer(command, name=entry.name)
    else:
        main.command(entry.name)(command)


def _unavailable(name: str, package: str) -> object:
    advice = _install(package, name) or f"pip install {package}"

    def command() -> None:
        raise ConfigError(f"`talaria {name}` needs the package {package!r}: {advice}")

    command.__doc__ = f"Not installed: {advice}."
    return command


def _install(module: str, command: str) -> str | None:
    """What installs ``module`` for ``command``, by the first extra of Talaria that has its package; None where none
    has."""
    package = _plain(module.partition(".")[0])
    if command in ("export", "plan") and package in ("torch", "onnx", "onnxscript"):
        return "pip install 'talaria[export]'"  # these need all three; the first extra that has one lacks the others
    for line in requires("talaria") or ():
        wanted = _IN_EXTRA.match(line)
        if wanted and _plain(wanted["package"]) == package:
            return f"pip install 'talaria[{wanted['extra']}]'"
    return None


def _plain(package: str) -> str:
    return package.lower().replace("_", "-")


def main() -> None:
    """Run; an error made for people, or a package that is missing, is one message on stderr and exit status 1, never a
    traceback."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        # A crash below Python tells where it was, in the log of whoever runs this. Only the thread that crashed stands
        # still: a dump of the others, which run on, now and then falls over them and ends before it comes to that one.
        faulthandler.enable(sys.__stderr__, all_threads=False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a dash, all lack names of other bytes
        with suppress(OSError):  # of a fork whose output was a file, and is a pipe now
            sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.flags.safe_path:
        try:
            plugins.look_in(Path.cwd())
        except FileNotFoundError:
            _fail("the folder that this is run in was removed; change to one that is there (cd)")
    try:
        if not _straight(sys.argv[1:]):
            app(sys.argv[1:])()
    except TalariaError as error:
        _fail(str(error))
    except ModuleNotFoundError as missing:
        advice = _install(missing.name or "", sys.argv[1] if sys.argv[1:] else "")
        if advice is None:
            raise
        _fail(f"this command needs the package {missing.name!r}: {advice}")
    except PermissionError as error:  # also of whether a file is there, in a folder of somebody else's
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}; give its rights to this user, or run this as the user whose it is")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # whether such a file is there cannot be asked
            _fail(f"{str(error.filename)[:80]}...: {error.strerror}; give a shorter one")
        if error.errno == errno.ENOENT and error.filename is None:  # as tempfile says it
            _fail(f"{error.strerror}; free space in one of them, or set TMPDIR to a folder of yours")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        import tempfile  # which agents need not carry

        from talaria.event_log import let_go

        let_go()
        where = error.filename or f"a file in {tempfile.gettempdir()} (TMPDIR), or the output"
        _fail(f"{where}: {error.strerror}; free some, and try again")
    except KeyboardInterrupt:
        sys.exit(130)


def _straight(words: Sequence[str]) -> bool:
    """Whether the words were taken without Typer."""
    found = entry_points(group=STRAIGHT, name=" ".join(words[:2]))
    return any(entry.load()(words[2:]) for entry in found)


def _fail(message: str) -> None:
    from rich.console import Console

    said = "\n".join(map(printed, message.split("\n")))  # it may quote a file that somebody else made
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"talaria: {said}", markup=False, emoji=False)
    sys.exit(1)
