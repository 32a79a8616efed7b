"""Weights that read a normalized map: its scale and shift stand inside of them, which spares two passes over the map.

With W' = W scale and b' = b + W shift a layer gives W (scale x + shift) + b of x alone, and all gradients follow from
that by W': those of scale and shift too, as sums over a small matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from talaria.programs.layers.base import Map, Step

WIDEST = 4
"""Outputs to a sequence's length up to which weights take the scale in: those of a batch of sixteen are then a quarter
of its rows. A transformer's step takes .97 of the time so (width 32, length 32); wide weights would outweigh that."""


@dataclass(frozen=True)
class Weighing:
    """A layer's weight (outputs, channels) and bias (outputs,), as they meet the map ``x``."""

    step: Step
    x: Map
    weight: str
    bias: str | None

    @property
    def matrix(self) -> str:
        """What the map is multiplied with."""
        scale = self.x.affine.scale if self.x.affine else None
        return self.weight if scale is None else self.step.draft.op("Mul", self.weight, scale)

    def row(self) -> list[str]:
        """What is added to rows of outputs, if anything."""
        draft, bias = self.step.draft, [self.bias] if self.bias else []
        shift = self._shift(1, -1)
        return [draft.op("Gemm", shift, self.weight, *bias, transB=1)] if shift else bias

    def column(self) -> list[str]:
        """What is added to columns of outputs, if anything."""
        draft = self.step.draft
        bias = [draft.reshape(self.bias, -1, 1)] if self.bias else []
        shift = self._shift(-1, 1)
        return [draft.op("Gemm", self.weight, shift, *bias)] if shift else bias

    def gradient(self, met: str, total: str) -> str:
        """The gradient of the weight: ``met`` is the slope's product with the map, ``total`` the slope's sum."""
        draft, affine = self.step.draft, self.x.affine
        met = met if affine is None or affine.scale is None else draft.op("Mul", met, affine.scale)
        shift = self._shift(1, -1)
        return draft.op("Gemm", draft.reshape(total, -1, 1), shift, met) if shift else met

    def train(self, met: str, total: str) -> None:
        """Keep the gradients of the map's scale and shift."""
        draft, affine = self.step.draft, self.x.affine
        if affine is None:
            return
        along = lambda: draft.sum(draft.op("Mul", met, self.weight), 0)  # noqa: E731
        self.step.trained(affine.module, affine.layer, "weight", along)
        self.step.trained(affine.module, affine.layer, "bias", lambda: draft.op("MatMul", total, self.weight))

    @property
    def back(self) -> str:
        """What a slope is multiplied with on its way to the map; the slope of a normalized row has no mean then."""
        draft, matrix = self.step.draft, self.matrix
        if self.x.affine is None:
            return matrix
        wide = self.step.known(self.x.channels)
        share = draft.constant(np.full((wide, 1), 1 / wide))
        return draft.op("Sub", matrix, draft.op("MatMul", matrix, share))

    def _shift(self, *shape: int) -> str | None:
        shift = self.x.affine.shift if self.x.affine else None
        return None if shift is None else self.step.draft.reshape(shift, *shape)
