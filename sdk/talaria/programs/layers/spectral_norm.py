"""Weights divided by their largest singular value, as torch.nn.utils.parametrizations.spectral_norm has it (Miyato et
al. 2018): in training each call brings two vectors nearer to those of that value, and nothing is learned by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

from torch.nn import Module

from talaria.programs.graph import Size, times
from talaria.programs.layers.base import Map, Pullback, Rule, Step, key, refused


class SpectralWeight:
    """The weight W / (u W v) of a layer called ``layer``, which ``owner`` has as W, with rows along its first
    dimension."""

    def __init__(self, layer: str, owner: Any) -> None:
        self._place, self._owner, self._norm = key(layer, "parametrizations.weight"), owner, owner[0]
        self._found: tuple[str, str, str, str] | None = None

    def value(self, step: Step, shape: Sequence[Size]) -> str:
        """The weight of this ``shape``."""
        if self._found is None:
            self._found = self._parts(step, shape)
        weight, _, _, value = self._found
        return step.draft.op("Div", weight, value)

    def train(self, step: Step, gradient: Callable[[], str]) -> None:
        """Keep the gradient of W, given that of the weight."""
        assert self._found is not None
        draft, (weight, left, right, value) = step.draft, self._found

        def of_weight() -> str:
            g, axes = gradient(), range(self._owner.original.dim())
            met = draft.sum(draft.op("Mul", g, draft.op("Div", weight, value)), *axes, keep=True)
            outer = draft.op("Reshape", draft.op("MatMul", left, right), draft.op("Shape", weight))
            return draft.op("Div", draft.op("Sub", g, draft.op("Mul", met, outer)), value)

        step.trained(self._owner, self._place, "original", of_weight)

    def _parts(self, step: Step, shape: Sequence[Size]) -> tuple[str, str, str, str]:
        """W, u as a column, v as a row, and u W v as a number of as many dimensions as W."""
        draft, place, wide = step.draft, f"{self._place}.0", times(shape[1], prod(map(step.known, shape[2:])))
        weight = step.weight(self._place, "original", self._owner.original, shape)
        left = step.weight(place, "_u", self._norm._u, (shape[0],))
        right = step.weight(place, "_v", self._norm._v, (wide,))
        assert weight is not None
        assert left is not None
        assert right is not None
        matrix, column, row = draft.reshape(weight, 0, -1), draft.reshape(left, -1, 1), draft.reshape(right, 1, -1)
        if self._norm.training:
            for _ in range(self._norm.n_power_iterations):
                column = self._even(step, draft.product(matrix, row, rank=2, turn_b=True))
                row = self._even(step, draft.product(column, matrix, rank=2, turn_a=True))
            for name, old, new in (("_u", left, column), ("_v", right, row)):
                step.buffers[f"{place}.{name}"] = draft.op("Reshape", new, draft.op("Shape", old))
        value = draft.product(draft.product(column, matrix, rank=2, turn_a=True), row, rank=2, turn_b=True)
        return weight, column, row, draft.reshape(value, *(1 for _ in shape))

    def _even(self, step: Step, vector: str) -> str:
        """A vector of length 1."""
        draft = step.draft
        length = draft.op("Sqrt", draft.sum(draft.op("Mul", vector, vector), 0, 1, keep=True))
        return draft.op("Div", vector, draft.op("Max", length, draft.constant(float(self._norm.eps))))


def spectral_normed(rule: Rule) -> Rule:
    """``rule`` of a layer whose weight is computed so."""

    def normed(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        (owner,) = cast(Any, module).parametrizations.values()
        if owner[0].dim != 0:
            raise refused(layer, f"is normed along dimension {owner[0].dim}", "norm it along the first, dim=0")
        if owner[0].training and (layer in step.again or step.twice):
            what = "norms its weight anew in each of several calls" if layer in step.again else "learns nothing twice"
            raise refused(layer, what, "call it once, and differentiate once")
        step.computed[key(layer, "weight")] = SpectralWeight(layer, owner)
        return rule(step, layer, module, given)

    return normed
