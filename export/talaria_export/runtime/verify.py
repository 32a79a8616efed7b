"""Proves a bundle on this machine: nothing in its manifest is taken on trust."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from talaria import shares, tasks, valid
from talaria.errors import BundleError, ConfigError, DataError, some_of
from talaria.inputs import array_of
from talaria.tensors import Array
from talaria.types import Samples
from talaria_export.bundle.archive import Limits
from talaria_export.bundle.bundle import Bundle, open_bundle
from talaria_export.bundle.preprocess import Preprocessing, inputs_of, of_file
from talaria_export.bundle.report import Check, Report
from talaria_export.runtime.likeness import likeness
from talaria_export.runtime.parity_inputs import drawn_as
from talaria_export.runtime.session import Session, session_of
from talaria_export.runtime.timing import interleaved


def verify_bundle(
    path: str | os.PathLike[str],
    *,
    samples: Samples | tuple[Any, Any] | None = None,
    trust: str | bytes | None = None,
    limits: Limits = Limits(),
    reference: bytes | None = None,
    seconds: float = 0.3,
) -> Report:
    """Opens, runs and times a bundle.

    Checked: integrity (form, sizes, SHA-256 of every member), the signature where ``trust`` names a public key, and
    parity: every model inside against the outputs that torch gave on the same inputs. With ``samples``, x (N, ...) as
    the bundle takes them (raw windows (N, channels, size) where it cuts recordings; uint8 are pixels, divided by 255
    for a bundle that does not normalize, as in a file to learn from) and y (N,), names or numbers of classes, also that
    the default variant agrees with fp32 as the bundle's gate asks; the accuracy is among the figures. Latency per input
    is measured against ``reference``, an ONNX file, or the dense model's shape inside the bundle, in the same run; it
    is a figure, not a check. ``seconds=0`` leaves it out.

    What is wrong with the bundle is in the report; only wrong arguments raise.
    """
    valid.path("bundle", "path", path)
    valid.number("verify", "seconds", seconds, "at least 0; with 0 no latency is measured", low=0)
    name = os.fspath(path)
    try:
        dense = None if reference is None else Session(reference)
    except BundleError as problem:  # an argument, of which the bundle is not to be blamed
        raise ConfigError(f"reference: {str(problem).removeprefix('model: ')}") from None
    try:
        bundle = open_bundle(path, limits, trust=trust)
    except BundleError as problem:
        return Report(name, (Check("integrity", False, str(problem).removeprefix(f"{name}: ")),))
    checks = [Check("integrity", True, f"{len(bundle.members)} members")]
    if bundle.signer is not None:
        checks.append(Check("signature", True, f"by {bundle.signer[:16]}..."))
    figures: dict[str, Any] = {
        "digest": bundle.digest,
        "default": bundle.manifest["default"],
        "bytes": sum(len(content) for content in bundle.members.values()),
        "model_bytes": len(bundle.model()),
    }
    try:
        sessions = {variant: session_of(bundle, variant) for variant in bundle.variants}
        inputs, expected = _parity_data(bundle)
        checks += list(_parity(bundle, sessions, inputs, expected, figures))
        if isinstance(samples, Samples):
            samples = samples.x, samples.y
        if samples is not None:
            checks += _accuracy(bundle, sessions, samples, figures)
        if seconds > 0:
            _latency(bundle, sessions, inputs[: bundle.steps.inputs(1)[0]], dense, seconds, figures)
    except BundleError as problem:
        checks.append(Check("runs", False, str(problem)))
    return Report(name, tuple(checks), figures)


def _parity_data(bundle: Bundle) -> tuple[Array, Array]:
    source = bundle.manifest["parity"]["inputs"]
    expected = bundle.array(bundle.manifest["parity"]["outputs"])
    steps = bundle.steps
    inputs = bundle.array(source["file"]) if "file" in source else drawn_as(source, steps)
    one = steps.inputs(1)
    answers = len(inputs) if steps.windows is None else (len(inputs) - one[0]) // steps.windows[1] + 1
    if inputs.shape[1:] != one[1:] or answers < 1 or not _fits(expected, answers, bundle):
        raise BundleError(f"parity: inputs {inputs.shape} and outputs {expected.shape} do not fit the model")
    return inputs, expected


def _fits(outputs: Array, count: int, bundle: Bundle) -> bool:
    """Whether outputs are ``count`` answers, of each label one number, and of each step in a task of steps."""
    rank = 3 if tasks.of(bundle.task).name == "per_step" else 2
    return outputs.ndim == rank and len(outputs) == count and outputs.shape[-1] == len(bundle.labels)


def _parity(
    bundle: Bundle, sessions: dict[str, Session], inputs: Array, expected: Array, figures: dict[str, Any]
) -> Iterator[Check]:
    """fp32 within the tolerance; other variants within twice the difference that their maker measured."""
    for variant, session in sessions.items():
        try:
            answer = session(inputs)
        except DataError as why:  # its own inputs, so that the model is to blame
            raise BundleError(f"parity: {variant} cannot be run on the bundle's own inputs ({why})") from None
        if answer.shape != expected.shape:
            raise BundleError(f"parity: {variant} gives {answer.shape}, the manifest promises {expected.shape}")
        difference = float(np.abs(answer - expected).max())
        allowed = bundle.manifest["parity"]["tolerance"]
        if variant != "fp32":
            allowed += 2 * float(bundle.variant(variant).get("max_abs_diff", 0.0))
        figures.setdefault("max_abs_diff", {})[variant] = difference
        yield Check(f"parity {variant}", bool(difference <= allowed), f"{difference:.1e}, at most {allowed:.1e}")


def _accuracy(
    bundle: Bundle, sessions: dict[str, Session], samples: tuple[Any, Any], figures: dict[str, Any]
) -> list[Check]:
    steps = bundle.steps
    x = inputs_of(Preprocessing(steps.shape), of_file(steps, array_of(samples[0], "x")))
    y = np.asarray(samples[1])
    if bundle.task != tasks.CLASSIFICATION:
        return _score(bundle, sessions, x, y, figures)
    if y.shape != (len(x),):
        raise DataError(f"samples: labels of shape {y.shape} for {len(x)} inputs; give one class for each")
    y = class_numbers(y, bundle.labels)
    default = bundle.manifest["default"]
    answers = _answers(sessions[default], steps, x).argmax(1)
    figures["accuracy"] = float((answers == y).mean())
    agree = int((answers == _answers(sessions["fp32"], steps, x).argmax(1)).sum()) if "fp32" in sessions else len(x)
    figures["agreement"] = agree / max(1, len(x))
    wanted = bundle.manifest["gate"]["agreement"]
    told = f"{default} with fp32 on {agree} of {len(x)}, a share of at least {wanted}"
    return [Check("agreement", shares.at_least(agree, len(x), wanted), told)]


def class_numbers(y: Array, labels: Sequence[str]) -> Array:
    """The class of each label of ``y`` (N,) as its place in ``labels``, int64 (N,). Each is one of these names (also
    as a number: 3 where the classes are 3, 7 and 100), else all are the numbers themselves. Raises
    :class:`~talaria.errors.DataError` where they are neither."""
    texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in y.tolist()]
    if set(texts) <= set(labels):
        places = {name: at for at, name in enumerate(labels)}
        return np.array([places[text] for text in texts], np.int64)
    odd = next((text for text, value in zip(texts, y.tolist(), strict=True) if value not in range(len(labels))), None)
    if odd is not None:
        raise DataError(
            f"samples: label {odd!r} is no class of the bundle; give its names ({some_of(labels, 12)}) or the numbers "
            f"0..{len(labels) - 1}"
        )
    return y.astype(np.int64)


def _score(bundle: Bundle, sessions: dict[str, Session], x: Array, y: Array, figures: dict[str, Any]) -> list[Check]:
    goal, default = tasks.of(bundle.task), bundle.manifest["default"]
    given = Samples.of(x, y, task=bundle.task)
    goal.require("samples:", given.y, len(bundle.labels))
    answers = _answers(sessions[default], bundle.steps, given.x)
    score, beside = goal.measured(answers, given.y)
    figures["accuracy"], figures["score"] = score, goal.figures[0]
    figures |= dict(zip(goal.figures, (score, beside), strict=True))
    found = [Check(goal.figures[0], score > goal.lowest, f"{score:.4f} on {len(x)} samples")]
    if default == "fp32" or "fp32" not in sessions or not len(given):
        return found
    gate = bundle.manifest["gate"]
    alike = likeness(bundle.task, answers, _answers(sessions["fp32"], bundle.steps, given.x), given.y)
    what = "agreement" if alike.distance is None else "distance"
    figures[what] = alike.agreement if alike.distance is None else alike.distance
    why = alike.why_not(gate["agreement"], gate.get("distance", 0.0))
    return [*found, Check(what, not why, f"{default}: {why or f'{figures[what]:.4g} with fp32'}")]


def _answers(session: Session, steps: Preprocessing, x: Array) -> Array:
    """What is said of every sample; where the bundle takes recordings, each window is one of its own."""
    if steps.windows is None:
        return session(x)
    return np.concatenate([session(np.ascontiguousarray(one.T)) for one in x])


def _latency(
    bundle: Bundle,
    sessions: dict[str, Session],
    x: Array,
    dense: Session | None,
    seconds: float,
    figures: dict[str, Any],
) -> None:
    default = bundle.manifest["default"]
    if dense is None and bundle.manifest["reference"] is not None:
        dense = Session(bytes(bundle.members[bundle.manifest["reference"]["file"]]))
    runs = {} if dense is None else {"dense": partial(dense, x)}
    found = interleaved(runs | {default: partial(sessions[default], x)}, seconds=seconds)
    figures["latency_ms"] = found[default].ms
    figures["latency_ratio"] = None if dense is None else found[default].ratio
