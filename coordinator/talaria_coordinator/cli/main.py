"""``talaria coordinator``: serve a fleet, see how it does, and take care of its store."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria_coordinator.cli import maintenance, orders, report
from talaria_coordinator.cli.options import AsJson, Config

app = typer.Typer(
    help="The fleet's coordinator: gives out the shared model, receives updates, keeps count.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

EXAMPLE = """
A fleet.toml:

\b
    [fleet]
    name = "watch"
    devices = 4                 # learn once so many have come
    [broker]
    url = "auto"                # Mosquitto where installed, else amqtt; or mqtt://host:1883
    [api]
    port = 8420                 # dashboard, API and metrics on this machine; leave out for none
    [run]
    algorithm = "hermes"
    rounds = 30
    [run.spec]
    name = "imu_cnn"
    input_shape = [6, 100]
    classes = 7
    [run.recipe]                # how a device trains; left out, as here, in simulation too
    epochs = 2
    batch = 16
    lr = 0.02
    momentum = 0.9

\b
With defaults = "smartwatch" under [run], model, recipe and the algorithm's options are those of
`talaria simulate -d smartwatch`. `talaria simulate ... --write-fleet DIR` writes what it simulates as a fleet.
"""


@app.command(epilog=EXAMPLE)
def serve(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="FLEET.TOML...", help="The settings of each fleet, or folders that hold them."),
    ],
    as_json: AsJson = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve beyond this machine without TLS or keys. Not on a network.")
    ] = False,
) -> None:
    """Serve a fleet, or several in one process, until stopped with Ctrl-C or SIGTERM.

    Starts a broker where none is named, waits for the devices, and runs the rounds. It may be killed at any
    time: started again, it goes on where it was. Events go to stdout, one a line.
    """
    import asyncio
    import logging

    from talaria import malloc

    malloc.settle()
    from talaria.event_log import EventLog, let_go
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.server.server import configs_in, serve_all

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    loaded = [load_config(path) for path in configs_in(configs)]
    asyncio.run(serve_all(loaded, EventLog(sys.stdout, as_json), insecure=insecure))
    let_go()


@app.command()
def status(
    config: Config,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")] = False,
) -> None:
    """Show rounds, devices and quarantine, from the store; the coordinator may be running or not."""
    from talaria_coordinator.cli.status import read_status, render
    from talaria_coordinator.config.fleet import load_config

    loaded = load_config(config)
    while True:
        found: dict[str, Any] = read_status(loaded)
        if as_json:
            typer.echo(json.dumps(found))
        else:
            render(found, clear=watch)
        if not watch:
            return
        time.sleep(2)


for order in (
    orders.pause, orders.resume, orders.abort, orders.extend,
    orders.retire, orders.readmit, orders.quarantine, orders.release,
):  # fmt: skip
    app.command()(order)
app.command("next")(orders.next_run)
app.command()(report.report)
for upkeep in (maintenance.backup, maintenance.restore, maintenance.fsck, maintenance.gc):
    app.command()(upkeep)
