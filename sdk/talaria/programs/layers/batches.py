"""Batch and time as one, and apart again: each sample's places, one by one, are a batch of their own for the layers
between the two, as for convolutions over each frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from talaria.programs.layers.base import Map, Pullback, Step
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes


def together(x: Tensor) -> Tensor:
    """(batch, many, *rest) as (batch x many, *rest)."""
    return x.flatten(0, 1)


def apart(x: Tensor, many: int) -> Tensor:
    """(batch x many, *rest) as (batch, many, *rest)."""
    return x.reshape(-1, many, *x.shape[1:])


def joined(step: Step, layer: str, x: Map) -> tuple[Map, Pullback]:
    """What :func:`together` does."""
    if len(x.lead) > 0:  # whose rows stand so already
        return Map(x.value, x.channels, (), x.lead[1:]), lambda g, wanted: [g]
    many, *rest = (step.known(one) for one in sizes(x))
    out = Map("", rest[0], tuple(rest[1:])) if rest else shaped(step, layer, ())
    y = filled(step, step.draft.reshape(opened(step, x.value, x), -1, *rest), out)
    whole = (-1, many, *rest)
    return y, lambda g, wanted: [closed(step, step.draft.reshape(opened(step, g, out), *whole), x)]


def parted(step: Step, layer: str, x: Map, many: int) -> tuple[Map, Pullback]:
    """What :func:`apart` does."""
    if not x.space and not x.single:
        return Map(x.value, x.channels, (), (many, *x.lead)), lambda g, wanted: [g]
    out, rest = shaped(step, layer, [many, *sizes(x)]), [step.known(one) for one in sizes(x)]
    y = filled(step, step.draft.reshape(opened(step, x.value, x), -1, many, *rest), out)
    return y, lambda g, wanted: [closed(step, step.draft.reshape(opened(step, g, out), -1, *rest), x)]


CALLS: Mapping[Callable[..., Any] | str, Callable[..., tuple[Map, Pullback]]] = {together: joined, apart: parted}
"""By the function."""
