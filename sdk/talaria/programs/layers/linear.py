"""Linear layers over rows of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.nn import Linear, Module

from talaria.programs.layers.base import Map, Pullback, Step
from talaria.programs.layers.weighing import Weighing


def linear(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """x W^T + b."""
    own, draft, (x,) = cast(Linear, module), step.draft, given
    out = own.out_features if layer == step.head else layer
    weight = step.weight(layer, "weight", own.weight, (out, x.channels))
    bias = step.weight(layer, "bias", own.bias, (out,))
    assert weight is not None
    held = Weighing(step, x, weight, bias)
    y = draft.op("Gemm", x.value, held.matrix, *held.row(), transB=1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        met = draft.product(g, x.value, rank=2, turn_a=True)
        total = step.summed(g, x.lead)
        step.trained(own, layer, "weight", lambda: held.gradient(met, total))
        step.trained(own, layer, "bias", lambda: total)
        held.train(met, total)
        return [draft.op("MatMul", g, held.back) if wanted[0] else None]

    return Map(y, out, (), x.lead), back
