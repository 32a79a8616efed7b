"""What moves values without weighing them: flatten, sums and products of two branches, given draws."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

from torch.nn import Dropout, Flatten, Module

from talaria.programs.graph import times
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.broadcast import both
from talaria.programs.layers.sequence import closed, filled, opened, sizes


def flatten(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """(batch, all the rest), in torch's order."""
    draft, (x,) = step.draft, given
    if isinstance(module, Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        raise refused(layer, f"flattens {module.start_dim}..{module.end_dim}", "use Flatten() as it is by default")
    if x.lead:
        return _flat_rows(step, x)
    if not x.space:
        return x, lambda g, wanted: [g]
    rank, size = len(x.space) + 2, prod(x.space)
    order = (1, 0, *range(2, rank))
    y = draft.reshape(x.value if step.looks else draft.transpose(x.value, *order), 0, -1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        return [draft.transpose(draft.reshape(g, 0, -1, *x.space), *order)]

    return Map(y, times(x.channels, size)), back


def _flat_rows(step: Step, x: Map) -> tuple[Map, Pullback]:
    size = prod(x.lead)
    y = step.draft.op("Flatten", opened(step, x.value, x), axis=1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        return [closed(step, step.draft.reshape(g, 0, *x.lead, -1), x)]

    return Map(y, times(x.channels, size)), back


def identity(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """What comes in."""
    return given[0], lambda g, wanted: [g]


def add(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The sum of two branches."""
    a, b = given
    if [step.known(one) for one in sizes(a)] != [step.known(one) for one in sizes(b)]:
        return both(step, layer, "Add", a, b)
    if (a.space, a.lead) != (b.space, b.lead):
        like = filled(step, opened(step, b.value, b), a)
        y = a.like(step.draft.op("Add", a.value, like.value))
        return y, lambda g, wanted: [g, closed(step, opened(step, g, a), b)]
    return a.like(step.draft.op("Add", a.value, b.value)), lambda g, wanted: [g, g]


def multiply(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """The product of two branches; one of them may hold one value a channel, as a gate does."""
    a, b = given
    draft, ones = step.draft, [one.space == (1,) * len(one.space) for one in given]
    odd = (
        a.lead != b.lead
        or a.single != b.single
        or len(a.space) != len(b.space)
        or (a.space != b.space and not any(ones))
    )
    if odd or step.known(a.channels) != step.known(b.channels):
        return both(step, layer, "Mul", a, b)
    space = b.space if ones[0] else a.space

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slopes: list[str | None] = []
        for one, other, want in ((a, b, wanted[0]), (b, a, wanted[1])):
            slope = draft.op("Mul", g, other.value) if want else None
            if slope is not None and one.space != space:
                slope = draft.sum(slope, *range(2, 2 + len(space)), keep=True)
            slopes.append(slope)
        return slopes

    return Map(draft.op("Mul", a.value, b.value), a.channels, space, a.lead, single=a.single), back


def stochastic_depth(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """x times a draw for each sample, an input of the program: 0 where its branch falls away, 1/(1-p) elsewhere."""
    own, draft, (x,) = cast(Any, module), step.draft, given
    if not own.training or own.p == 0:
        return identity(step, layer, module, given)
    if own.mode != "row":
        raise refused(layer, f"drops by mode={own.mode!r}", "use mode='row'")
    draw = step.drawn(layer, (1,))
    if x.lead:
        draw = draft.reshape(draw, -1, *(1,) * len(sizes(x)))
        value = draft.op("Mul", opened(step, x.value, x), draw)
        return filled(step, value, x), lambda g, wanted: [closed(step, draft.op("Mul", opened(step, g, x), draw), x)]
    draw = draft.reshape(draw, 1, -1, *(1 for _ in x.space)) if x.space else draw
    return x.like(draft.op("Mul", x.value, draw)), lambda g, wanted: [draft.op("Mul", g, draw)]


def dropout(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """x times a draw."""
    own, draft, (x,) = cast(Dropout, module), step.draft, given
    if not own.training or own.p == 0:
        return identity(step, layer, module, given)
    draw = closed(step, step.drawn(layer, sizes(x), second=step.second), x)
    return x.like(draft.op("Mul", x.value, draw)), lambda g, wanted: [draft.op("Mul", g, draw)]


def channel_dropout(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """As :func:`dropout`, with one draw for all places of a channel."""
    own, draft, (x,) = cast(Dropout, module), step.draft, given
    if not own.training or own.p == 0:
        return identity(step, layer, module, given)
    draw = step.drawn(layer, sizes(x)[:1])
    draw = draft.transpose(draw, 1, 0) if x.space else draw
    for axis in range(2, 1 + len(sizes(x))):
        draw = draft.op("Unsqueeze", draw, draft.ints(axis))
    if x.lead:
        value = draft.op("Mul", opened(step, x.value, x), draw)
        return filled(step, value, x), lambda g, wanted: [closed(step, draft.op("Mul", opened(step, g, x), draw), x)]
    return x.like(draft.op("Mul", x.value, draw)), lambda g, wanted: [draft.op("Mul", g, draw)]
