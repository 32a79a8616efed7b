"""``talaria programs``: training steps as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from talaria import durable
from talaria.errors import ConfigError

app = typer.Typer(
    help="Training steps as files: made where torch is, run with onnxruntime and numpy alone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def programs() -> None:
    """Training steps as files: made where torch is, run with onnxruntime and numpy alone."""


@app.command()
def build(
    model: Annotated[str, typer.Option(help="A model of the zoo, of an entry point, or module:factory.")],
    shape: Annotated[str, typer.Option(help="One input's sizes without the batch, such as 6,100.")],
    classes: Annotated[int, typer.Option(help="How many classes it tells apart.")],
    trained: Annotated[
        str, typer.Option(help="What is trained: all, or parts with commas between: body, adapters, head.")
    ] = "all",
    momentum: Annotated[float, typer.Option(help="Momentum of the recipe.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of the recipe.")] = 0.0,
    smoothing: Annotated[float, typer.Option(help="Label smoothing of the recipe.")] = 0.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("step.program"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Write one step of training as an ONNX graph for every mask and batch size, with its measured error.

    The step is compared with float64 and must err no more than twice as much as torch does in float32, or by sixteen
    of float32's roundings where that is more. Needs torch.
    """
    from talaria.model.spec import ModelSpec
    from talaria.programs.build import build as made
    from talaria.types import Recipe

    try:
        sizes = tuple(int(size) for size in shape.split(","))
    except ValueError:
        raise ConfigError(f"shape={shape[:80]!r} must be whole numbers with commas between, such as 6,100") from None
    recipe = Recipe(momentum=momentum, weight_decay=weight_decay, smoothing=smoothing)
    durable.write_as("--out", out, made(ModelSpec(model, sizes, classes), trained, recipe), mode=0o644)
    _shown(out, as_json)


@app.command()
def kit(
    fleet: Annotated[
        Path, typer.Argument(metavar="FLEET.TOML", help="The settings of the fleet that the device joins.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("run.kit"),
) -> None:
    """Write all that a device without torch needs for a run into one file, for `kit` in its device.toml.

    It holds where the model's private parts begin, its channels and parts, and every program that the run's
    algorithm asks of a device. Needs torch.
    """
    from talaria.federated import kit as kits
    from talaria.federated.make_kit import kit_of
    from talaria.federated.run_file import run_in

    data = kits.encode(kit_of(run_in(fleet)))
    durable.write_as("--out", out, data, mode=0o644)
    count = len(kits.decode(data).source.files)
    typer.echo(f"{out}: {len(data)} bytes, {count} programs and graphs")


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The program.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove a program on this machine: its bounds, its operators, and its test vector, replayed. Needs no torch.

    Exits with 1 where it deviates by more than its measured error allows.
    """
    if not _shown(file, as_json):
        raise typer.Exit(1)


def _shown(file: Path, as_json: bool) -> bool:
    from talaria.cli.profile import table
    from talaria.programs.verify import verify as proven

    report = proven(file)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
        return report.ok
    table(
        {
            "program": f"{report.model}, trains {report.trained}",
            "sha256": report.digest,
            "file": f"{report.file_bytes} bytes, {report.operators} operators",
            "step": f"at most {report.memory_bytes / 1e6:.1f} MB, {report.multiply_adds / 1e6:.1f} M multiply-adds at "
            "full width, for 5 samples",
            "error": f"{report.parity['program']:.1e} against float64 when made, torch {report.parity['torch']:.1e}",
            "here": f"deviates by {report.deviation:.1e}, at most {report.allowed:.1e}: "
            f"{'ok' if report.ok else 'FAILED'}",
        }
    )
    return report.ok
