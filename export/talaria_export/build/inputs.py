"""The inputs of an export: a model's spec, its weights, and the channels it kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module

from talaria.errors import ConfigError, ModelError, StateError
from talaria.model import compaction, masks, zoo
from talaria.model.spec import ModelSpec
from talaria.model.state import to_arrays
from talaria.model.widths import first_of, widths_of
from talaria.planning.plan import Plan
from talaria.simulation import checkpoint
from talaria.simulation.resume import resume
from talaria.types import Samples


def load_model(
    spec: Path, weights: Path, mask: Path | None, allow: Sequence[str] = ()
) -> tuple[Module, Module, Tensor]:
    """The personal model, the dense model it came from, and an example batch of zeros. ``allow`` are the packages
    beside Talaria whose models the spec may name.

    Raises :class:`~talaria.errors.ConfigError` on a spec, :class:`~talaria.errors.StateError` on files and
    :class:`~talaria.errors.ModelError` on weights that do not fit.
    """
    described = _known(ModelSpec.from_json(read_json(spec)), allow)
    dense = zoo.build(described)
    model = zoo.build(described)
    if mask is not None:
        model = compaction.compact(model, masks.from_tensors(zoo.layout(described), to_arrays(_tensors(mask))))
    state = {k: v for k, v in _tensors(weights).items() if not k.startswith("mask/")}
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        reason = " ".join(str(problem).split())[:300]
        raise ModelError(f"{weights}: does not fit {described.name} ({reason}); give its --mask if pruned") from None
    return model, dense, torch.zeros(2, *described.input_shape)


def load_state(folder: Path, allow: Sequence[str] = ()) -> tuple[Module, Module, Tensor, dict[str, Any]]:
    """What :func:`load_model` gives, from the state folder of a device's agent, and the facts beside the weights.

    The folder's ``personal.safetensors`` holds the personal model's tensors and, as JSON under ``talaria`` in its
    metadata, ``facts``: JSON text of an object with ``labels`` and ``card``, which names the ``model``. The channels
    that were pruned are told by the tensors' shapes. Raises as :func:`load_model` does.
    """
    path = folder / "personal.safetensors"
    tensors = _tensors(path)
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(json.loads(file.metadata()["talaria"])["facts"])
        described = ModelSpec.from_json(facts["card"]["model"])
    except (KeyError, TypeError, ValueError, RecursionError) as problem:
        raise StateError(
            f"{path}: does not tell its model ({problem}); let the device finish its run with this version of talaria"
        ) from None
    _known(described, allow)
    dense, layout = zoo.build(described), zoo.layout(described)
    try:
        model = compaction.compact(zoo.build(described), first_of(layout, widths_of(layout, to_arrays(tensors))))
        model.load_state_dict(tensors)
    except (RuntimeError, ModelError) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise ModelError(
            f"{path}: is no plain {described.name} ({reason}); take the bundle that the agent makes ([device] bundle)"
        ) from None
    return model, dense, torch.zeros(2, *described.input_shape), facts


@dataclass(frozen=True)
class OfRun:
    """The personal model of one client of a simulation, and what its bundle needs beside it."""

    model: Module
    dense: Module
    example: Tensor
    """(1, *input_shape): one of the client's own samples."""
    held: Samples
    """What the client validates on."""
    facts: dict[str, Any]
    """``task``, ``labels`` and ``card``, as a device tells them."""
    moments: tuple[object, object] | None
    """What the data set scaled the samples by, mean and spread; None where it left them as they were, or in a way that
    a bundle cannot repeat."""


def load_run(folder: Path, client: str) -> OfRun:
    """The personal model of ``client``, a member or newcomer of the simulation that ``--save`` kept in ``folder``.

    Raises :class:`~talaria.errors.ConfigError` for a client that it has not, and where its data or model was an object;
    :class:`~talaria.errors.StateError` for what is no run, or one that is not over.
    """
    planned = checkpoint.experiment(folder).get("plans")
    if not (folder / checkpoint.RESULT).exists():
        raise StateError(f"{folder}: this run is not over; go on with it first: talaria simulate --resume {folder}")
    result = resume(folder)
    model, run, data = result.model(client), result.run, result.data
    own = data.everyone[client]
    samples = {"train": len(own.train), "validation": len(own.val)}
    card = {
        "device": client,
        "algorithm": run.algorithm,
        "rounds": run.rounds,
        "seed": run.seed,
        "model": run.spec.to_json(),
        "samples": samples,
        "plan": planned.get(client) if isinstance(planned, dict) else None,
    }
    return OfRun(
        model,
        zoo.build(run.spec),
        torch.from_numpy(own.train.x[:1]),
        own.val,
        {"task": run.task, "labels": list(data.labels), "card": card},
        _scaled_by(data.meta),
    )


def precision_of(facts: Mapping[str, Any]) -> str:
    """How the plan by which the model was learned, where there is one, has its bundle stored."""
    plan = facts["card"].get("plan") if "card" in facts else None
    return "fp32" if plan is None else Plan.from_json(plan).precision


def _scaled_by(meta: Mapping[str, Any]) -> tuple[object, object] | None:
    if meta.get("scaled") == "divided by 255":
        return 0.0, 255.0
    if meta.get("scaled") == "z-scored" and {"mean", "sd"} <= {*meta}:
        return meta["mean"], meta["sd"]
    return None


def _known(spec: ModelSpec, allow: Sequence[str]) -> ModelSpec:
    zoo.GROUP.require_allowed(spec.name, allow, "add --allow {package} where you trust it")
    return spec


def moments(path: Path) -> tuple[object, object]:
    """(mean, std) from a JSON object that holds both."""
    found = read_json(path)
    if not {"mean", "std"} <= set(found):
        raise ConfigError(f"{path}: needs mean and std, got {', '.join(found) or 'nothing'}")
    return found["mean"], found["std"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 1 MiB."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read((1 << 20) + 1)[: 1 << 20])
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}; check the path") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path}: is not JSON ({problem}); correct it there, or name another file") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object, got {type(found).__name__}")
    return found


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except OSError as problem:
        raise StateError(f"cannot read {path}: {problem}; check the path") from None
    except SafetensorError as problem:
        raise StateError(f"{path}: is damaged or not safetensors ({problem})") from None
