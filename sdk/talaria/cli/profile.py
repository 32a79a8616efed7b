"""``talaria profile``."""

from typing import Annotated, Any

import typer


def profile(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if this machine is known.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure what this device can do; the result is kept for this machine and its software.

    Rates are for one core, in CPU time. `block` is the number of channels that ONNX Runtime's convolutions are fast in
    multiples of. Battery, heat and load are read anew each time, where the machine tells them.
    """
    import json

    from talaria.planning import machine
    from talaria.planning import profile as profiles

    found = profiles.cached(fresh=fresh).to_json() | {"now": machine.load()}
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table(
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


def table(rows: dict[str, Any]) -> None:
    """Names and values in two columns."""
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:{width}}  {value}")
