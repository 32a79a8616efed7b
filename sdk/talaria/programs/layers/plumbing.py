"""What moves values without weighing them: flatten, identity, sums of two branches, dropout by a given draw."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

from torch.nn import Dropout, Flatten, Module

from talaria.programs.layers.base import Map, Pullback, Step, refused


def flatten(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """(batch, all the rest), in torch's order."""
    draft, (x,) = step.draft, given
    if isinstance(module, Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        raise refused(layer, f"flattens {module.start_dim}..{module.end_dim}", "use Flatten() as it is by default")
    if not x.space:
        return x, lambda g, wanted: [g]
    rank, size = len(x.space) + 2, prod(x.space)
    order = (1, 0, *range(2, rank))
    wide = x.channels * size if isinstance(x.channels, int) else x.channels if size == 1 else f"{x.channels}*{size}"
    y = draft.reshape(draft.transpose(x.value, *order), 0, -1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        return [draft.transpose(draft.reshape(g, 0, -1, *x.space), *order)]

    return Map(y, wide), back


def identity(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """What comes in."""
    return given[0], lambda g, wanted: [g]


def add(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The sum of two branches of one shape."""
    a, b = given
    if a.space != b.space:
        raise refused(layer, f"adds maps of {a.space} and {b.space}", "bring both branches to one shape")
    return a.like(step.draft.op("Add", a.value, b.value)), lambda g, wanted: [g, g]


def dropout(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """x times a draw, an input of the program: 0 where a value falls away, 1/(1-p) elsewhere."""
    own, draft, (x,) = cast(Dropout, module), step.draft, given
    if not own.training or own.p == 0:
        return identity(step, layer, module, given)
    if step.draft.has(f"draw/{layer}"):
        raise refused(layer, "is used twice", "give each place a dropout of its own")
    draw = draft.input(f"draw/{layer}", ("N", x.channels, *x.space))
    if x.space:
        draw = draft.transpose(draw, 1, 0, *range(2, 2 + len(x.space)))
    return x.like(draft.op("Mul", x.value, draw)), lambda g, wanted: [draft.op("Mul", g, draw)]
