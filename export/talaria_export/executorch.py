"""The same model for phones: an ExecuTorch program (``.pte``) on XNNPACK, where the package is installed."""

from __future__ import annotations

import logging
import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from talaria.errors import ConfigError, ModelError
from talaria_export.onnx import prepared

TOLERANCE = 1e-4
"""Largest difference to torch that a program may show."""


def export_pte(model: Module, example: Tensor, path: str | os.PathLike[str] | None = None) -> bytes:
    """The model as an ExecuTorch program for one input at a time; also written to ``path`` where one is given.

    ``example`` is a float32 batch (N, ...); its first input is run through both and must agree within 1e-4, else this
    is a :class:`~talaria.errors.ModelError`. Without the package it is a :class:`~talaria.errors.ConfigError`.
    """
    if find_spec("executorch") is None:
        raise ConfigError("executorch: the package is not installed; pip install 'talaria[executorch]'")
    own, batch = prepared(model, example)
    one = batch[:1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations, none of them ours
        data = _lowered(own, one)
        answer = _run(data, one)
    with torch.no_grad():
        difference = float((answer - own(one)).abs().max())
    if not difference <= TOLERANCE:
        raise ModelError(f"model: its ExecuTorch form differs from torch by {difference:.2e}; use the ONNX file")
    if path is not None:
        from talaria_export.bundle import save

        save(path, data)
    return data


def _lowered(model: Module, one: Tensor) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        program = torch.export.export(model, (one,))
        lowered: Any = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        return bytes(lowered.to_executorch().buffer)
    finally:
        logging.disable(before)


def _run(data: bytes, one: Tensor) -> Tensor:
    from executorch.runtime import Runtime

    method: Any = Runtime.get().load_program(data).load_method("forward")
    answer: Tensor = method.execute([one])[0]
    return answer
