"""``talaria bench people``: everybody a newcomer once, over amounts of labels, with intervals over the subjects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria.errors import ConfigError
from talaria_bench import bars
from talaria_bench.folders import kept_in

if TYPE_CHECKING:
    from talaria_bench.people.studies import Study


def people(
    data: Annotated[
        list[str] | None, typer.Option(help="smartwatch, vowels, glucose; repeatable, all by default.")
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Repeatable; 0 by default.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder that keeps every fold; what lies there is not done again.", callback=kept_in)
    ] = Path("runs/people"),
    rounds: Annotated[int, typer.Option(help="Rounds of each fleet; 0: each study's own.", min=0)] = 0,
    subjects: Annotated[int, typer.Option(help="Leave out only so many subjects; 0: everybody in turn.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Write the curve over labels here, as SVG.", callback=bars.place)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure what a fleet is worth to people whom it never met: alone, its model, fine-tuned, personal."""
    from talaria_bench.people.plot import picture
    from talaria_bench.people.studies import METHODS

    found = measure(data, seeds or [0], out, rounds, subjects, lambda line: typer.echo(line, err=True))
    if plot is not None:
        plot.write_text(picture(found))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, one in found.items():
        typer.echo(
            f"\n{name}, {one['figure']}, seeds {one['seeds']}, {one['subjects']} subjects; latency of the small model"
        )
        typer.echo(f"{one['latency_ratio']:.2f} of the dense one's, parameters {one['parameters_ratio']:.2f}")
        for amount, facts in one["amounts"].items():
            typer.echo(
                f"\n| {amount} ({facts['labels']:.0f} labels) | mean | 95 % | worst tenth | worst |\n|---"
                + "|---" * 4
                + "|"
            )
            for key, row in facts["methods"].items():
                low, high = row["interval"]
                typer.echo(
                    f"| {METHODS[key]} | {row['mean']:.3f} | {low:.3f} to {high:.3f} | {row['worst_tenth']:.3f} "
                    f"| {row['worst']:.3f} |"
                )
            for key, row in facts["above"].items():
                low, high = row["interval"]
                typer.echo(f"| personal above {METHODS[key]} | {row['mean']:+.3f} | {low:+.3f} to {high:+.3f} | | |")


def measure(
    data: list[str] | None, seeds: list[int], out: Path, rounds: int = 0, subjects: int = 0, tell: Any = lambda _: None
) -> dict[str, Any]:
    """All figures by data set, as plain values. Raises :class:`ConfigError` for data that is not known."""
    import torch

    from talaria_bench.people.figures import told
    from talaria_bench.people.folds import fold
    from talaria_bench.people.studies import STUDIES

    torch.set_num_threads(1)
    found = {}
    for name in data or list(STUDIES):
        if name not in STUDIES:
            raise ConfigError(f"people: data={name!r} is unknown; choose among {', '.join(STUDIES)}")
        study = STUDIES[name]()
        left_out = study.subjects[: subjects or None]
        rows = [
            row
            for seed in seeds
            for one in left_out
            for row in fold(study, out, one, seed, rounds or study.rounds, tell)
        ]
        found[name] = {
            "figure": study.figure,
            "seeds": seeds,
            "subjects": len(left_out),
            "rounds": rounds or study.rounds,
            **_small(study),
            "amounts": told(rows),
        }
    return found


def _small(study: Study) -> dict[str, float]:
    """Latency (measured now, side by side in ONNX Runtime on one thread) and parameters of the small model, as shares
    of the dense one's."""
    import torch

    from talaria.data import presets, registry
    from talaria.model import pruning, zoo
    from talaria.model.spec import ModelSpec
    from talaria.planning import latency_model, onnx_runtime

    data, default = registry.load(study.data), presets.default_of(study.data)
    if default.model is None:
        raise ConfigError(f"people: {study.data!r} has no model of its own; add one to talaria.data.presets")
    spec = ModelSpec(default.model, data.input_shape, data.classes)
    whole = latency_model.lively(zoo.build(spec))
    layout = zoo.layout(spec)
    scores = pruning.importance(whole, layout)
    mask = pruning.choose(scores, layout.full(), widths=dict(study.widths), block=1)
    small = pruning.compact(whole, mask).eval()
    x = torch.zeros(1, *data.input_shape)
    export = onnx_runtime.exporter()
    took, _ = latency_model.side_by_side({"dense": export(whole, x), "small": export(small, x)}, x)
    ms = latency_model.milliseconds(took)
    sizes = [sum(weight.numel() for weight in one.parameters()) for one in (whole, small)]
    return {"latency_ratio": ms["small"] / ms["dense"], "parameters_ratio": sizes[1] / sizes[0]}
