"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="FLEET.TOML", help="The fleet's settings.")]
Device = Annotated[str, typer.Argument(metavar="DEVICE", help="The device's id: 1 to 36 of a-z, 0-9 and '-'.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
