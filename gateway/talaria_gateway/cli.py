"""``talaria gateway``: a site's coordinator that forwards one weighted partial sum."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="A site's coordinator that is one member of a fleet, and forwards one weighted partial sum.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

EXAMPLE = """
A site.toml:

\b
    [fleet]
    name = "site-a"
    devices = 3                 # learn once so many have come
    [upstream.device]
    id = "site-a"               # the fleet above has it in its [gateways]
    [upstream.fleet]
    name = "watch"
    broker = "mqtt://127.0.0.1:1883"
"""


@app.callback()
def gateway() -> None:
    """A site's coordinator that is one member of a fleet, and forwards one weighted partial sum."""


@app.command(epilog=EXAMPLE)
def run(
    config: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="The site's settings; see below.")],
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines instead of text.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept brokers and devices beyond this machine without TLS or keys.")
    ] = False,
) -> None:
    """Serve a site, and take part for it in the fleet above, until the run is over.

    What its devices learn is checked and added up here; one update goes up. It may be killed at any time: started
    again, it goes on where it was.
    """
    import asyncio
    import logging

    from talaria import malloc

    malloc.settle()
    from talaria.event_log import EventLog, let_go
    from talaria_gateway.config import load_config
    from talaria_gateway.program import run_gateway

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(run_gateway(load_config(config), EventLog(sys.stdout, as_json), insecure=insecure))
    let_go()
