"""Weights that are computed from a direction and a length (:mod:`talaria.model.weight_norm`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.nn import Module

from talaria.programs.graph import Size
from talaria.programs.layers.base import Map, Pullback, Rule, Step, key


@dataclass(frozen=True)
class NormedWeight:
    """The weight g v / |v| of the layer called ``layer``, which owns the tensors g and v; |v| goes over all dimensions
    but ``kept`` (None: over all)."""

    layer: str
    owner: Module
    kept: int | None

    def value(self, step: Step, shape: Sequence[Size]) -> str:
        """The weight of this ``shape``."""
        _, direction, rate = self._parts(step, shape)
        return step.draft.op("Mul", direction, rate)

    def train(self, step: Step, gradient: Callable[[], str]) -> None:
        """Keep the gradients of g and v, given that of the weight."""
        shape = next(port.shape for port in step.draft.inputs if port.name == f"weight/{key(self._place, _V)}")
        length, direction, rate = self._parts(step, shape)
        draft, axes = step.draft, self._axes(len(shape))

        def met() -> str:
            return draft.sum(draft.op("Mul", gradient(), direction), *axes, keep=True)

        def of_length() -> str:
            found = draft.op("Div", met(), length)
            return draft.reshape(found) if self.kept is None else found

        def of_direction() -> str:
            along = draft.op("Mul", direction, draft.op("Div", met(), draft.op("Mul", length, length)))
            return draft.op("Mul", rate, draft.op("Sub", gradient(), along))

        step.trained(self.owner, self._place, _G, of_length)
        step.trained(self.owner, self._place, _V, of_direction)

    def _parts(self, step: Step, shape: Sequence[Size]) -> tuple[str, str, str]:
        """|v|, v, and g / |v|."""
        draft, own = step.draft, cast(Any, self.owner)
        sizes = () if self.kept is None else tuple(n if i == self.kept else 1 for i, n in enumerate(shape))
        g, v = step.weight(self._place, _G, own.original0, sizes), step.weight(self._place, _V, own.original1, shape)
        assert g is not None
        assert v is not None
        length = draft.op("Sqrt", draft.sum(draft.op("Mul", v, v), *self._axes(len(shape)), keep=True))
        return length, v, draft.op("Div", g, length)

    def _axes(self, rank: int) -> list[int]:
        return [axis for axis in range(rank) if axis != self.kept]

    @property
    def _place(self) -> str:
        return key(self.layer, "parametrizations.weight")


_G, _V = "original0", "original1"


def weight_normed(rule: Rule) -> Rule:
    """``rule`` of a layer whose weight is computed so."""

    def normed(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        (owner,) = cast(Any, module).parametrizations.values()
        dim = int(owner[0].dim)
        kept = None if dim == -1 else dim % owner.original1.dim()
        step.computed[key(layer, "weight")] = NormedWeight(layer, owner, kept)
        return rule(step, layer, module, given)

    return normed
