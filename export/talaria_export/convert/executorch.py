"""The same model for phones: an ExecuTorch program (``.pte``) on XNNPACK, where the package is installed.

A program takes one input at a time and knows no recordings: where a bundle cuts them, an app that runs the program
cuts its windows itself. Normalization is inside.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from talaria.errors import ConfigError, ModelError
from talaria.seeds import ALONE
from talaria_export.bundle.preprocess import Preprocessing
from talaria_export.convert.onnx import prepared, take_a_gradient

TOLERANCE = 1e-4
"""Largest difference to torch that a program may show."""


@dataclass(frozen=True)
class Program:
    """``data`` is the file; ``difference`` the largest to torch, as it ran here; ``runtime`` names what ran it."""

    data: bytes
    difference: float
    runtime: str


def export_pte(
    model: Module,
    example: Tensor,
    path: str | os.PathLike[str] | None = None,
    *,
    steps: Preprocessing | None = None,
) -> bytes:
    """The model as an ExecuTorch program for one input at a time; also written to ``path`` where one is given.

    ``example`` is a float32 batch (N, ...); its first inputs are run through both and must agree within 1e-4, else
    this is a :class:`~talaria.errors.ModelError`. Without the package it is a :class:`~talaria.errors.ConfigError`.
    With ``steps`` that normalize, the program takes raw numbers; ``example`` stays what the model takes.
    """
    data = program(model, example, steps).data
    if path is not None:
        from talaria_export.bundle.bundle import save

        save(path, data)
    return data


def needed() -> None:
    """Raises :class:`~talaria.errors.ConfigError` where the package is not installed."""
    if find_spec("executorch") is None:
        raise ConfigError("executorch: the package is not installed; pip install 'talaria[executorch]'")


def program(model: Module, example: Tensor, steps: Preprocessing | None = None) -> Program:
    """:func:`export_pte` with what was measured; ``example`` is what the model takes, the program takes it raw."""
    needed()
    own, _ = prepared(model, example)
    batch = example.detach().cpu()[:4]
    with torch.no_grad():
        expected = own(batch)
    if steps is not None and steps.mean:
        own = Normalized(own, steps)
        batch = torch.from_numpy(steps.raw(batch.numpy()))
    one = batch[:1]
    with ALONE, warnings.catch_warnings():  # two that turned warnings off and on would leave them off
        warnings.simplefilter("ignore")  # its own deprecations, none of them ours
        data = _lowered(own, one)
        answer = _run(data, batch)
    difference = float((answer - expected).abs().max())
    if not difference <= max(TOLERANCE, 1e-5 * float(expected.abs().max())):
        raise ModelError(f"model: its ExecuTorch form differs from torch by {difference:.2e}; use the ONNX file")
    return Program(data, difference, f"executorch {version('executorch')}")


class Normalized(Module):
    """``model((x - mean) / std)``."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Module, steps: Preprocessing) -> None:
        super().__init__()
        self.model = model
        shape = [-1, *[1] * (len(steps.shape) - 1)]
        self.register_buffer("mean", torch.tensor(steps.mean).reshape(shape))
        self.register_buffer("std", torch.tensor(steps.std).reshape(shape))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model((x - self.mean) / self.std)
        return out


def _lowered(model: Module, one: Tensor) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        take_a_gradient()
        program = torch.export.export(model, (one,))
        lowered: Any = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        return bytes(lowered.to_executorch().buffer)
    finally:
        logging.disable(before)


def _run(data: bytes, batch: Tensor) -> Tensor:
    from executorch.runtime import Runtime

    method: Any = Runtime.get().load_program(data).load_method("forward")
    return torch.cat(
        [method.execute([one])[0].clone() for one in torch.split(batch, 1)]
    )  # its outputs share one buffer
