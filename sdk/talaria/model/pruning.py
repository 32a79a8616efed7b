"""Pruning of a torch module: where its parts meet.

:func:`layout` finds the channel groups, :func:`importance` scores them, :func:`choose` picks
(:mod:`talaria.model.importance`), :func:`compact` removes physically, :func:`expand` goes back.
"""

from __future__ import annotations

from torch.nn import Module

from talaria.model import importance as scores
from talaria.model.compaction import compact, expand
from talaria.model.importance import Kind, choose, widths
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.prunability import Survey, layout, survey
from talaria.model.state import array_of, state_of
from talaria.model.widths import aligned
from talaria.tensors import Array, Tensors

__all__ = ["Survey", "aligned", "choose", "compact", "expand", "importance", "layout", "survey", "widths"]


def importance(
    model: Module,
    layout: ChannelLayout,
    kind: Kind = "l1",
    mask: ChannelMask | None = None,
    gradients: Tensors | None = None,
) -> dict[str, Array]:
    """:func:`talaria.model.importance.importance` of a module; ``gradients`` are those in ``.grad`` where none are
    given."""
    parameters = dict(model.named_parameters())
    if kind == "taylor" and gradients is None:
        gradients = {key: array_of(weight.grad) for key, weight in parameters.items() if weight.grad is not None}
    return scores.importance(state_of(model), parameters, layout, kind, mask, gradients)
