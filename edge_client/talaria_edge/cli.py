"""``talaria edge``: the agent on a device."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="The agent on a device: learns with a fleet, keeps what is private, deploys its own model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

EXAMPLE = """
A device.toml:

\b
    [device]
    id = "s01-left"
    bundle = "s01-left.talaria"   # where the personal model goes
    [fleet]
    name = "watch"
    broker = "mqtt://127.0.0.1:1883"
    [data]
    source = "smartwatch"         # or "npz" with path = "data.npz"
    client = "s01-left"
"""


@app.callback()
def edge() -> None:
    """The agent on a device: learns with a fleet, keeps what is private, deploys its own model."""


@app.command(epilog=EXAMPLE)
def run(
    configs: Annotated[list[Path], typer.Argument(metavar="DEVICE.TOML...", help="One file per agent.")],
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines instead of text.")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads that training may use; 0: as torch decides.", min=0)] = 0,
) -> None:
    """Take part in a fleet until its last round; then personalize, and write the bundle.

    Several agents may run in one process, each with its own file; they train one after another. An agent may be
    killed at any time: started again, it goes on where it was. What is private stays in its state folder.
    """
    import asyncio
    import logging

    import torch

    from talaria.journal import Journal
    from talaria_edge.agents import run_agents
    from talaria_edge.config import load_config

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if threads:
        torch.set_num_threads(threads)
    found = asyncio.run(run_agents([load_config(path) for path in configs], Journal(sys.stdout, as_json)))
    failed = {name: result["error"] for name, result in found.items() if "error" in result}
    for name, error in failed.items():
        typer.echo(f"talaria: {name}: {error}", err=True)
    if failed:
        raise typer.Exit(1)


@app.command()
def join(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where this device's keys go; a new folder.")],
    answer: Annotated[Path | None, typer.Option(help="The operator's answer to the request: the last step.")] = None,
) -> None:
    """Join a fleet: make this device's keys and a request, then (with --answer) take the operator's answer.

    The one-time code comes from `talaria fleet enroll`; it is asked for, or read from stdin, so that no list of
    processes shows it. Set [identity] folder in device.toml to FOLDER.
    """
    from talaria.wire.enrolment import Code
    from talaria_edge.join import ask, finish, read_answer

    if answer is not None:
        joined = finish(folder, read_answer(answer))
        typer.echo(f"{joined.device} belongs to fleet {joined.fleet}; its broker is {joined.broker}.")
        return
    asked = typer.prompt("Code", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline(256)
    path = ask(folder, Code.parse(asked))
    typer.echo(f"The request is {path}; it holds nothing secret. The operator runs `talaria fleet admit` with it.")


@app.command()
def result(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="The device's state folder.")],
) -> None:
    """Print what came of a device's last run: paths, traffic by round, what the bundle measured (JSON)."""
    from talaria.errors import StateError

    path = state / "result.json"
    if not path.exists():
        raise StateError(f"{path} is not there; the device has not finished a run yet, or this is another folder")
    typer.echo(json.dumps(json.loads(path.read_text()), indent=2))
