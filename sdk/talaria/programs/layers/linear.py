"""Linear layers over rows of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.nn import Linear, Module

from talaria.programs.layers.base import Map, Pullback, Step


def linear(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """x W^T + b."""
    own, draft, (x,) = cast(Linear, module), step.draft, given
    out = own.out_features if layer == step.head else layer
    weight = step.weight(layer, "weight", own.weight, (out, x.channels))
    bias = step.weight(layer, "bias", own.bias, (out,))
    assert weight is not None
    y = draft.op("Gemm", x.value, weight, *([bias] if bias else []), transB=1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        step.trained(own, layer, "weight", lambda: draft.product(g, x.value, rank=2, turn_a=True))
        step.trained(own, layer, "bias", lambda: step.summed(g, x.lead))
        return [draft.op("MatMul", g, weight) if wanted[0] else None]

    return Map(y, out, (), x.lead), back
