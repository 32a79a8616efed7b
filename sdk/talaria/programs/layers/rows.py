"""Rows at whole numbers that are the same for each sample: a bias by how far places are apart, channels in an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from talaria.programs.graph import INT, Draft
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes


@dataclass(frozen=True)
class Rows:
    """Which rows of a tensor stand where: their numbers one after the other, of a table of this ``shape``."""

    places: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(table: Tensor, many: int) -> Rows:
        """The whole numbers in a ``table``, of ``many`` rows. Raises ValueError for one beyond these."""
        places = tuple(range(many)[one] if -many <= one < many else -1 for one in table.flatten().tolist())
        if table.dtype not in (torch.int64, torch.int32) or not places or min(places) < 0:
            raise ValueError(f"whole numbers below {many}")
        return Rows(places, tuple(table.shape))


def scattered(draft: Draft, g: str, places: Sequence[int], shape: str) -> str:
    """The slope of a tensor of this ``shape``, given that of its rows at ``places``; what the same row gets adds up."""
    none = draft.op("Expand", draft.constant(0.0), shape)
    return draft.op("ScatterND", none, draft.constant([[one] for one in places], INT), g, reduction="add")


def chosen(step: Step, layer: str, x: Map, axis: int, table: Tensor) -> tuple[Map, Pullback]:
    """The places of a dimension that a ``table`` of whole numbers names."""
    wide, draft = list(sizes(x)), step.draft
    size = step.held(wide[axis - 1])
    if table.dim() != 1 or not isinstance(size, int):
        raise refused(layer, f"takes places by a table of {tuple(table.shape)} from {size}", "take a list of places")
    try:
        rows = Rows.of(table, size)
    except ValueError as why:
        raise refused(layer, f"takes {table.tolist()} of {size}"[:120], f"take {why}") from None
    wide[axis - 1] = len(rows.places)
    out = shaped(step, layer, wide)
    y = filled(step, draft.op("Gather", opened(step, x.value, x), draft.ints(*rows.places), axis=axis), out)
    order = [axis, *(i for i in range(1 + len(wide)) if i != axis)]

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        first = draft.transpose(opened(step, g, out), *order)
        shape = draft.op("Shape", draft.transpose(opened(step, x.value, x), *order))
        whole = scattered(draft, first, rows.places, shape)
        return [closed(step, draft.transpose(whole, *(order.index(i) for i in range(len(order)))), x)]

    return y, back
