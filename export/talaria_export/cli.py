"""``talaria export``, ``talaria verify`` and ``talaria predict``."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria.errors import ConfigError, DataError
from talaria.foreign import printed

if TYPE_CHECKING:
    from talaria.types import Samples
    from talaria_export.bundle.report import Report
    from talaria_export.runtime.predictor import Prediction

ARRAY_LIMIT = 1 << 30
"""Most bytes of samples that a command reads."""


def export(
    spec: Annotated[Path | None, typer.Option(help="Model spec as JSON: name, input_shape, classes, adapters.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The personal model's weights (.safetensors), compact where pruned.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Instead of both: the state folder of a device's agent that finished a run.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle to write.")] = Path("me.talaria"),
    of_run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="Instead of all these: the folder of a simulation that --save kept. The bundle then takes numbers as "
            "they were before that scaled them: pixels 0 to 255.",
        ),
    ] = None,
    client: Annotated[str, typer.Option(help="With --run: whose model, a member's or newcomer's.")] = "",
    mask: Annotated[
        Path | None, typer.Option(help="Kept channels (.safetensors with mask/<group>) of a pruned model.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Held-out samples as the model takes them: .npz with x, y and, where it holds more, split (1: these). "
            "Variants are judged on them."
        ),
    ] = None,
    labels: Annotated[str, typer.Option(help="Names of the classes, with commas between.")] = "",
    card: Annotated[Path | None, typer.Option(help="JSON to put into the bundle as its model card.")] = None,
    normalize: Annotated[
        Path | None,
        typer.Option(
            help="JSON with the mean and std that training data were normalized with, numbers or one per channel: "
            "the bundle then takes raw numbers."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Steps from one window to the next: the bundle then takes a whole recording (time, channels) and cuts "
            "it itself."
        ),
    ] = None,
    variants: Annotated[str, typer.Option(help="Variants to try, with commas between.")] = "fp32,fp16,int8,int8-linear",
    agreement: Annotated[float, typer.Option(help="Least agreement with fp32 that a variant must reach.")] = 0.99,
    accuracy_drop: Annotated[
        float, typer.Option(help="Most accuracy, or of the task's score, that a variant may lose.")
    ] = 0.01,
    distance: Annotated[
        float, typer.Option(help="Of a regression: how far from fp32 a variant may lie, as a share of the spread.")
    ] = 0.05,
    task: Annotated[
        str | None,
        typer.Option(
            help="classification | regression | multilabel | per_step; default: what --state or --run learned."
        ),
    ] = None,
    keep_samples: Annotated[bool, typer.Option(help="Put a few of the samples into the bundle, for parity.")] = False,
    executorch: Annotated[
        bool, typer.Option(help="Also put an ExecuTorch program for phones (XNNPACK) into the bundle.")
    ] = False,
    pte: Annotated[Path | None, typer.Option(help="Also write an ExecuTorch program for phones here.")] = None,
    optimize: Annotated[
        bool, typer.Option(help="Also keep the model as rewritten for this machine's class of CPU: loads faster.")
    ] = False,
    sign: Annotated[Path | None, typer.Option(help="File with a raw Ed25519 private key to sign with.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE", help="A package whose models the spec or state may name. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Turn a personal model into one verified file.

    The model is converted to ONNX, compared with torch, tried in every variant (half precision, int8), measured
    against the unpruned model on this machine, and written with the fastest variant that passes the gate.
    """
    from talaria import tasks
    from talaria_export.build import build, inputs
    from talaria_export.bundle.preprocess import preprocessing
    from talaria_export.convert.quantize import Gate

    facts: dict[str, Any] = {}
    moments = None if normalize is None else inputs.moments(normalize)
    held = None
    if of_run is not None and client and state is spec is weights is mask is None:
        found = inputs.load_run(of_run, client)
        model, dense, example, facts, held = found.model, found.dense, found.example, found.facts, found.held
        moments = moments or found.moments
    elif state is not None and not client and of_run is spec is weights is mask is None:
        model, dense, example, facts = inputs.load_state(state, allow or ())
    elif spec is not None and weights is not None and not client and of_run is state is None:
        model, dense, example = inputs.load_model(spec, weights, mask, allow or ())
    else:
        raise ConfigError("export: give --spec and --weights (and --mask), --state alone, or --run and --client alone")
    goal = task or str(facts.get("task") or tasks.CLASSIFICATION)
    if spec is None and tasks.of(goal).name != (learned := tasks.of(facts.get("task") or tasks.CLASSIFICATION).name):
        raise ConfigError(f"--task {goal}: {of_run or state} learned {learned}; leave --task out")
    if keep_samples and data is None and held is None:
        raise ConfigError("--keep-samples puts samples of --data into the bundle; give --data as well")
    names = [name.strip() for name in labels.split(",")] if labels else facts.get("labels") or None
    report = build.make_bundle(
        out,
        model,
        example=example,
        samples=held if data is None else _held_out(data, goal, names),
        labels=names,
        meta=facts.get("card", {}) if card is None else inputs.read_json(card),
        normalize=moments,
        stride=stride,
        dense=dense,
        variants=[name.strip() for name in variants.split(",") if name.strip()],
        gate=Gate(agreement=agreement, accuracy_drop=accuracy_drop, distance=distance),
        task=goal,
        optimize=optimize,
        executorch=executorch,
        keep_samples=keep_samples,
        signing_key=None if sign is None else _read(sign),
        precision=inputs.precision_of(facts),
    )
    if pte is not None:
        from talaria_export.convert.executorch import export_pte

        export_pte(model, example, pte, steps=preprocessing(example.shape[1:], moments, stride))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
        return
    for row in report.figures["variants"]:
        chosen = "*" if row["name"] == report.figures["default"] else " "
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1000:.1f} kB"
        time = f"{row['latency_ms']:.3f} ms" if "latency_ms" in row else "-"
        typer.echo(f"{chosen} {row['name']:12} {size:>12} {time:>12}  {row['why'] or 'passed'}")
    typer.echo(f"{out}: {report.figures['bytes']} bytes, default {report.figures['default']}")


def verify(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Bundles to verify.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Samples as the bundle takes them, raw, to measure the accuracy on: .npz with x, y and, where "
            "it holds more, split (2: these)."
        ),
    ] = None,
    trust: Annotated[str | None, typer.Option(help="Public key, 64 hex digits, that must have signed them.")] = None,
    seconds: Annotated[float, typer.Option(help="CPU seconds of latency measurement each; 0: none.")] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """Prove bundles on this machine: hashes, signature, parity with torch, accuracy, latency against dense.

    Exits with 1 if any check of any bundle fails.
    """
    from talaria_export.runtime.verify import verify_bundle

    samples = None if data is None else _arrays(data, 2)
    reports = [verify_bundle(path, samples=samples, trust=trust, seconds=seconds) for path in bundles]
    if as_json:
        typer.echo(json.dumps([report.to_json() for report in reports], indent=1))
    else:
        _table(reports)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def predict(
    bundle: Annotated[Path, typer.Argument(help="The bundle to run.")],
    x: Annotated[
        Path,
        typer.Argument(
            help="One input or a batch of them, as .npy (or .csv for a single one); a recording, one row per step, "
            "where the bundle cuts its windows itself."
        ),
    ],
    variant: Annotated[str | None, typer.Option(help="Another variant than the bundle's default.")] = None,
    threads: Annotated[int, typer.Option(help="Cores that one prediction may use.")] = 1,
    trust: Annotated[str | None, typer.Option(help="Public key, 64 hex digits, that must have signed it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Answer recorded inputs with a bundle: a label and its probability each, or what another task says: numbers,
    labels, or a label for each step.

    Where the bundle cuts a recording, the step at which each window begins comes first.
    """
    from talaria_export.bundle.preprocess import of_file
    from talaria_export.runtime.predictor import Predictor

    predictor = Predictor(bundle, variant=variant, threads=threads, trust=trust)
    prediction = predictor(of_file(predictor.steps, _array(x)))
    if prediction.task != "classification":
        _tell_outputs(prediction, as_json=as_json)
        return
    probabilities, windows = prediction.probabilities, predictor.steps.windows
    if as_json:
        rows: list[dict[str, Any]] = [
            {"label": label, "probabilities": dict(zip(prediction.names, map(float, row), strict=True))}
            for label, row in zip(prediction.labels, probabilities, strict=True)
        ]
        if windows is not None:
            rows = [{"begin": number * windows[1], **row} for number, row in enumerate(rows)]
        typer.echo(json.dumps(rows, indent=1))
        return
    for number, (label, row) in enumerate(zip(prediction.labels, probabilities, strict=True)):
        begin = "" if windows is None else f"{number * windows[1]}\t"
        typer.echo(f"{begin}{printed(label)}\t{row.max():.3f}")


def _tell_outputs(prediction: Prediction, *, as_json: bool) -> None:
    """A line for each input, of a task that has more than one class to say."""
    kind = prediction.task.partition(":")[0]
    if kind == "regression":
        rows: Any = prediction.values.tolist()
    else:
        rows = prediction.said if kind == "multilabel" else prediction.steps
    if as_json:
        typer.echo(json.dumps({"task": prediction.task, "names": prediction.names, "outputs": rows}, indent=1))
        return
    for row in rows:
        typer.echo("\t".join(f"{one:g}" if isinstance(one, float) else printed(str(one)) for one in row))


def _table(reports: list[Report]) -> None:
    width = max(len(report.path) for report in reports)
    scores = {str(report.figures.get("score", "accuracy")).replace("_", " ") for report in reports}
    score = scores.pop() if len(scores) == 1 else "score"
    wide = max(8, len(score))
    typer.echo(f"{'bundle':{width}}  result  default      difference  {score:>{wide}}   latency  to dense")
    for report in reports:
        figures: dict[str, Any] = dict(report.figures)
        differences = figures.get("max_abs_diff", {})
        difference = differences.get("fp32", differences.get(figures.get("default")))
        default = printed(str(figures.get("default", "-")))
        typer.echo(
            f"{report.path:{width}}  {'ok' if report.ok else 'FAILED':6}  {default:11}  "
            f"{_figure(difference, '.1e'):>10}  {_figure(figures.get('accuracy'), '.3f'):>{wide}}  "
            f"{_figure(figures.get('latency_ms'), '.3f', ' ms'):>8}  {_figure(figures.get('latency_ratio'), '.2f'):>8}"
        )
        for check in report.failed:
            typer.echo(f"    {check.name}: {check.detail}")


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _held_out(path: Path, task: str, labels: list[str] | None) -> Samples:
    """The samples of a file that variants are judged on, as the model takes them; texts are names among ``labels``."""
    from talaria import inputs, recorded
    from talaria.types import Samples
    from talaria_export.runtime import verify

    x, y = _arrays(path, 1)
    if y.dtype.kind == "U":
        if labels is None:
            raise DataError(f"{path}: y holds names of classes; say by --labels in which order the model gives them")
        y = verify.class_numbers(y, labels)
    return Samples.of(recorded.scaled(inputs.array_of(x, "x")), y, task=task)


def _arrays(path: Path, part: int) -> tuple[Any, Any]:
    """``x`` and ``y`` of a file of samples (:mod:`talaria.recorded`), which may be called ``npz:FILE`` as elsewhere:
    those of the part, where it says parts."""
    from talaria import recorded

    path = Path(str(path).removeprefix("npz:"))
    found = recorded.read(path, ARRAY_LIMIT)
    if found.split is None:
        return found.x, found.y
    chosen = found.split == part
    if not chosen.any():
        raise DataError(f"{path}: no sample has split={part} ({recorded.PARTS[part]}); mark some, or leave split out")
    return found.x[chosen], found.y[chosen]


def _array(path: Path) -> Any:
    import numpy as np

    from talaria import npz

    if path.suffix.lower() == ".npz":
        raise DataError(f"{path}: holds arrays by name; give the one to answer for: numpy.save({path.stem!r}, x)")
    if path.suffix.lower() != ".csv":
        return npz.read_npy(path, ARRAY_LIMIT)
    try:
        if path.stat().st_size > ARRAY_LIMIT:
            raise DataError(f"{path}: more than {ARRAY_LIMIT} bytes; give fewer inputs")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an empty file is only warned of
            return np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2, encoding="utf-8-sig")
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}; check the path") from None
    except (ValueError, EOFError, UserWarning) as problem:
        if isinstance(problem, DataError):
            raise
        why = str(problem).partition("; use")[0].rstrip(".")[:200]
        raise DataError(f"{path}: {why}; write numbers alone, with commas between them and no line of names") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}; check the path") from None
