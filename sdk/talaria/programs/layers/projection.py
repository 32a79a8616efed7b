"""Products of a map with a matrix that is a parameter of the module: ``F.linear`` and ``x @ self.weight``."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module

from talaria.programs.layers.base import Map, Pullback, Step, chained, no_way_back, refused
from talaria.programs.layers.parameters import Weight, joined
from talaria.programs.layers.sequence import on_rows, sizes


def linear(step: Step, layer: str, input: Map, weight: Weight, bias: Weight | None = None) -> tuple[Map, Pullback]:
    """F.linear: x W^T + b along the last dimension."""
    wide = step.known(sizes(input)[-1])
    if not isinstance(weight, Weight) or len(weight.shape) != 2 or weight.shape[1] != wide:
        held = weight.shape if isinstance(weight, Weight) else "a map"
        raise refused(layer, f"weighs {wide} channels by {held}", "give it a parameter (outputs, channels)")

    def rule(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        draft, (x,) = step.draft, given
        matrix = weight.value(step)
        y = draft.op("Gemm", x.value, matrix, transB=1)

        def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
            weight.train(step, draft.product(g, x.value, rank=2, turn_a=True))
            return [draft.op("MatMul", g, matrix) if wanted[0] else None]

        return Map(y, weight.shape[0], (), x.lead), no_way_back if step.looks else back

    y, back = on_rows(rule)(step, layer, Module(), [input])
    if bias is None:
        return y, back
    shifted, shift = joined(step, layer, "Add", y, bias)
    return shifted, chained(back, shift)


def matmul(step: Step, layer: str, x: Map, matrix: Weight) -> tuple[Map, Pullback]:
    """x times a matrix (channels, outputs)."""
    return linear(step, layer, x, matrix.turned("permute", (1, 0)) if len(matrix.shape) == 2 else matrix)
