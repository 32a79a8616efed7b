"""Makes the personal model a file that runs without torch, and deploys it where it does better than the one in
force."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from talaria import tasks
from talaria.errors import BundleError, DataError, StateError
from talaria.federated import run_model
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model, Served
from talaria.training.engine import predict
from talaria.types import Samples
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData
from talaria_edge.deployment import gate
from talaria_edge.storage import tensor_files

logger = logging.getLogger(__name__)

VARIANT_DROP = 0.01
"""Accuracy that a variant may lose against fp32 where the plan sets no limit."""


@dataclass(frozen=True)
class Candidate:
    """A personal model to deploy; ``card`` goes into its bundle, ``weights`` names it (32 hex digits), and ``spare`` is
    the accuracy that rounding it may cost."""

    model: Model = field(repr=False)
    spec: ModelSpec
    weights: str
    card: Mapping[str, Any] = field(repr=False)
    spare: float = VARIANT_DROP
    task: str = tasks.CLASSIFICATION
    dense: Served | None = field(default=None, repr=False)
    """The unpruned model, where there is no torch to make it of ``spec``."""


def deploy(config: DeviceConfig, candidate: Candidate, data: DeviceData) -> dict[str, Any]:
    """Make the bundle of the candidate, and deploy it where it beats the bundle in force on the validation data
    (:mod:`talaria_edge.deployment.gate`). Says what was measured; nothing where no bundle is asked for or export is
    missing.

    ``deployed`` and ``why`` tell the decision, ``worse`` whether the new one does worse (None: nobody can tell);
    ``accuracy`` has both bundles' shares of the validation samples labelled right, and ``report`` is of the new bundle.
    Its variants are judged on validation data as well. Where the device has test samples, the new file is measured on
    them: ``test.accuracy``, and ``test.max_abs_diff`` to torch. Weights that were rolled back by hand are not even
    exported, and those that wait to be installed not again: they are measured anew, without a ``report``.
    """
    path, folder = config.bundle, config.state
    if path is None:
        return {}
    if config.no_bundle:
        logger.warning("%s: %s", config.device, config.no_bundle)
        return {"bundle": None}
    if isinstance(candidate.model, Served) and candidate.model.graph is None:
        logger.warning("no bundle is written: what is served here is no one graph; where torch is, it is exported")
        return {"bundle": None}
    if candidate.weights == gate.adopt(folder, path).refused:
        why = "these weights were rolled back by hand; what runs stays until others come"
        return {"bundle": str(path), "deployed": False, "why": why, "worse": True}
    from talaria_export import make_bundle
    from talaria_export.bundle.manifest import VARIANTS
    from talaria_export.convert.quantize import Gate

    made, told = folder / "candidate.talaria", dict[str, Any]()
    asks = config.home_assistant is not None and config.home_assistant.ask
    waits = gate.waiting_bundle(folder, candidate.weights) if asks else None
    if waits is not None:
        tensor_files.write(made, waits)
    else:
        report = make_bundle(
            made,
            candidate.model,
            example=data.train.x[:1],
            samples=data.val if len(data.val) else data.train,
            calibration=data.train.x,
            labels=config.names_of(candidate.spec.classes) or None,
            variants=config.variants or VARIANTS,
            task=candidate.task,
            dense=dense_file(candidate.spec) if candidate.dense is None else _plain(candidate.dense),
            gate=Gate(accuracy_drop=candidate.spare),
            meta=candidate.card,
            precision="fp32" if config.plan is None else config.plan.precision,
        )
        told = {"report": report.to_json() | {"path": str(path)}}
    new = tensor_files.read(made, "the model is exported again")
    decision, accuracy = judged(folder, new, data.val, candidate.task)
    if decision and asks and gate.read(folder).current:
        gate.hold(folder, new, candidate.weights, decision.reason)
        decision = replace(decision, deploy=False, reason=f"waits to be installed; {decision.reason}")
    elif decision:
        gate.deploy(folder, new, path, candidate.weights)
    told = {
        "bundle": str(path),
        "deployed": decision.deploy,
        "why": decision.reason,
        "worse": decision.worse,
        "accuracy": accuracy,
        **told,
    }
    if data.test is not None and len(data.test):
        told["test"] = _measured(made, candidate.model, data.test, candidate.task)
    made.unlink()
    return told


def judged(
    folder: Path, new: bytes, held: Samples, task: str = tasks.CLASSIFICATION
) -> tuple[gate.Decision, dict[str, float | None]]:
    """Whether to put the bundle ``new`` in force, and the accuracies on ``held`` that say so. A bundle in force that is
    damaged, or takes other samples, is replaced."""
    mine, theirs = accuracy_of(new, held, task), None
    try:
        running = gate.in_force(folder)
        theirs = None if running is None else accuracy_of(running, held, task)
    except StateError as error:
        logger.warning("the bundle in force is not what was deployed: %s", error)
        theirs = math.nan
    told = {"new": _figure(mine, held), "in_force": _figure(theirs, held)}
    return gate.decide(mine, theirs, len(held), lowest=tasks.of(task).lowest), told


def _figure(accuracy: float | None, samples: Samples) -> float | None:
    return accuracy if accuracy is not None and len(samples) and math.isfinite(accuracy) else None


def accuracy_of(bundle: bytes, samples: Samples, task: str = tasks.CLASSIFICATION) -> float:
    """Share of ``samples`` that the bundle's default variant labels right, or its score in another task; 0 without
    samples; NaN where it is no bundle, or is for other samples or another task."""
    from talaria_export.bundle.bundle import read_bundle
    from talaria_export.runtime.session import session_of

    try:
        found = read_bundle(bundle)
        if not len(samples):
            return 0.0
        if tuple(samples.x.shape[1:]) != found.shape:
            raise DataError(f"samples of shape {tuple(samples.x.shape[1:])}, the bundle takes {found.shape}")
        if tasks.of(found.task).name != tasks.of(task).name:
            raise DataError(f"the bundle is for {found.task}, the run learns {task}")
        return tasks.of(task).measured(session_of(found)(samples.x), samples.y)[0]
    except (BundleError, DataError) as error:
        logger.warning("a bundle cannot be measured: %s", error)
        return math.nan


@lru_cache(maxsize=4)
def dense_file(spec: ModelSpec) -> bytes:
    """The unpruned model as torch exports it: what latency is compared with."""
    from talaria_export.convert.onnx import export_onnx

    return export_onnx(run_model.template(spec), zoo.example(spec), plain=True)


def _plain(dense: Served) -> bytes:
    """As :func:`dense_file`, of what the run's kit holds."""
    from talaria_export.convert.passes.rewrites import file_of
    from talaria_export.convert.served import convert

    return file_of(convert(dense, plain=True))


def _measured(path: Path, model: Model, test: Samples, task: str) -> dict[str, float]:
    from talaria_export.bundle.bundle import open_bundle
    from talaria_export.runtime.session import session_of

    bundle = open_bundle(path)
    outputs = session_of(bundle)(test.x)
    exact = session_of(bundle, "fp32" if "fp32" in bundle.variants else None)(test.x)
    difference = float(abs(exact - predict(model, test.x)).max())
    return {"accuracy": tasks.of(task).measured(outputs, test.y)[0], "max_abs_diff": difference}
