"""Zeros for each sample, with which recurrent layers and cells begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from talaria.programs.layers.base import Map, Step
from talaria.programs.layers.parameters import fixed, for_each


@dataclass(frozen=True)
class Zeros:
    """Zeros of a ``shape`` in which the batch is not the first dimension."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class ZeroMap(Map):
    """A map of zeros, known to be that."""


def zeros_like(step: Step, x: Map) -> ZeroMap:
    """Zeros as wide as a mask leaves ``x``."""
    none = step.draft.op("Expand", step.draft.constant(0.0), step.draft.op("Shape", x.value))
    return ZeroMap(none, x.channels, x.space, x.lead, single=x.single)


def zeros(step: Step, layer: str, shape: Sequence[int], many: int) -> Zeros | ZeroMap:
    """Zeros of a ``shape``, in which the batch's size is ``many``: a map where it comes first."""
    if tuple(shape[:1]) != (many,) or len(shape) < 2 or many in shape[1:]:
        return Zeros(tuple(shape))
    found, _ = for_each(step, layer, fixed(torch.zeros(1)), shape[1:])
    return ZeroMap(found.value, found.channels, found.space, found.lead)
