"""Where an exported model comes from: a spec, its weights, and the channels it kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module

from talaria.errors import ConfigError, ModelError, StateError
from talaria.model import masks, surgery, zoo
from talaria.model.spec import ModelSpec
from talaria.types import Samples, Tensors


def load_model(spec: Path, weights: Path, mask: Path | None) -> tuple[Module, Module, Tensor]:
    """The personal model, the dense model it came from, and an example batch of zeros.

    Raises :class:`~talaria.errors.ConfigError` on a spec, :class:`~talaria.errors.StateError` on files and
    :class:`~talaria.errors.ModelError` on weights that do not fit.
    """
    described = ModelSpec.from_json(read_json(spec))
    dense = zoo.build(described)
    model = zoo.build(described)
    if mask is not None:
        model = surgery.compact(model, masks.from_tensors(zoo.layout(described), _tensors(mask)))
    state = {k: v for k, v in _tensors(weights).items() if not k.startswith("mask/")}
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        reason = " ".join(str(problem).split())[:300]
        raise ModelError(f"{weights}: does not fit {described.name} ({reason}); give its --mask if pruned") from None
    return model, dense, torch.zeros(2, *described.input_shape)


def samples(x: Any, y: Any) -> Samples:
    """Arrays as labelled samples."""
    return Samples(torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.int64))


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
        raise ConfigError(f"{path}: is not JSON ({problem})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object, got {type(found).__name__}")
    return found


def _tensors(path: Path) -> Tensors:
    try:
        return dict(load_file(path))
    except OSError as problem:
        raise StateError(f"cannot read {path}: {problem}; check the path") from None
    except SafetensorError as problem:
        raise StateError(f"{path}: is damaged or not safetensors ({problem})") from None
