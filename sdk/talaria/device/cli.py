"""``talaria profile`` and ``talaria plan``."""

from typing import Annotated, Any

import typer

from talaria.errors import ConfigError

SHAPES = {"imu_cnn": ((6, 100), 7), "fmnist_cnn": ((1, 28, 28), 10), "mlp": ((64,), 10)}
"""Input and classes of the small models where none are given; the others take 224 pixels and 1000 classes."""


def profile(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if this machine is known.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure what this device can do; the result is kept for this machine and its software.

    Rates are for one core, in CPU time. `block` is the number of channels that ONNX Runtime's convolutions are fast in
    multiples of. Battery, heat and load are read anew each time, where the machine tells them.
    """
    import json

    from talaria.device import probes
    from talaria.device import profile as profiles

    found = profiles.cached(fresh=fresh).to_json() | {"now": probes.load()}
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    _table(
        {
            "processor": f"{found['cpu']}, {found['cores']} cores ({' '.join(found['simd']) or 'features unknown'})",
            "memory": f"{found['memory_mb'] / 1000:.1f} GB, copied at {found['bandwidth_mbs'] / 1000:.1f} GB/s",
            "disk": f"{found['disk_mbs']:.0f} MB/s written",
            "training": f"{found['train_rate'] / 1e9:.1f} G multiply-adds/s of the forward pass",
            "matrix": f"{found['matrix_rate'] / 1e9:.1f} G multiply-adds/s",
            "block": f"{found['block']} channels",
            "layers": ", ".join(f"{k} {v:.3f} ms" for k, v in found["layers_ms"].items()) or "needs talaria[export]",
            "now": ", ".join(f"{k} {v}" for k, v in found["now"].items() if v is not None)
            or "the machine does not tell",
            "measured in": f"{found['seconds']:.1f} s",
        }
    )


def plan(
    model: Annotated[str, typer.Option("-m", "--model", help="A model of the zoo.")] = "imu_cnn",
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "-b",
            "--budget",
            help="NAME=NUMBER, repeatable: latency_ms, latency_ratio, run_memory_mb, "
            "train_memory_mb, bundle_mb, upload_mb, train_s, energy_j, accuracy_drop. Sizes also as _kb, _bytes.",
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Input without the batch, such as 3,224,224.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.", min=2)] = None,
    batch: Annotated[int, typer.Option(help="Samples per training step.", min=1)] = 32,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Start from published weights.")] = False,
    watts: Annotated[float | None, typer.Option(help="What training draws; needed for energy_j.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure this device and this model again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan and its model as one JSON document.")] = False,
) -> None:
    """Choose the largest model that keeps a budget on this device, and how it trains, with reasons.

    Latency is measured: the first plan for a model exports it and times it at 15 widths, once per machine. A budget
    that cannot be kept is refused with the nearest one that can.
    """
    import json
    from dataclasses import replace

    from talaria.device import planning
    from talaria.device import profile as profiles
    from talaria.device.budget import Budget
    from talaria.device.planner import adapted
    from talaria.model.spec import ModelSpec

    known_shape, known_classes = SHAPES.get(model, ((3, 224, 224), 1000))
    spec = ModelSpec(model, _dims(shape) or known_shape, classes or known_classes, pretrained=pretrained)
    device = profiles.cached(fresh=fresh)
    if watts is not None:
        device = replace(device, watts=watts)
    made = planning.plan(spec, Budget.parse(budget or []), profile=device, batch=batch, fresh=fresh)
    if as_json:
        document = {"model": adapted(spec, made).to_json(), "plan": made.to_json(), "machine": device.machine}
        typer.echo(json.dumps(document, indent=1))
        return
    rows: dict[str, Any] = {"model": f"{model} {'x'.join(map(str, spec.input_shape))}, {spec.classes} classes"}
    rows |= dict(made.reasons)
    rows |= {name: f"{value:g} predicted" for name, value in made.predicted.items()}
    _table(rows)
    for group, width in made.widths.items():
        typer.echo(f"  {group} = {width}")


def _table(rows: dict[str, Any]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:{width}}  {value}")


def _dims(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ConfigError(f"--shape {text!r} must be sizes such as 3,224,224") from None
