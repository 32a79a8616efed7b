"""Maps with their channels last, as Linear, LayerNorm, attention and recurrent layers read them, and what turns, cuts
and averages dimensions.

Such a map is kept as rows, (batch x lead, channels): whatever weighs channels is then one product, whatever goes value
by value sees two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from torch.nn import Module

from talaria.programs.graph import Draft, Size
from talaria.programs.layers.base import Map, Pullback, Rule, Step, refused

Dims = int | Sequence[int] | None
"""One dimension of a map as torch counts them, the batch being 0, or some."""


def sizes(x: Map) -> tuple[Size, ...]:
    """The sizes behind the batch, in torch's order."""
    if x.single:
        return ()
    return (x.channels, *x.space) if x.space else (*x.lead, x.channels)


def opened(step: Step, value: str, x: Map) -> str:
    """``value``, which stands as ``x`` does, as torch has it: (batch, *sizes)."""
    draft = step.draft
    if x.space:
        return value if step.looks else draft.transpose(value, 1, 0, *range(2, 2 + len(x.space)))
    if not x.lead:
        return draft.reshape(value, -1) if x.single else value
    if isinstance(x.channels, int):
        return draft.reshape(value, -1, *x.lead, x.channels)
    for _ in x.lead:  # so that the width, which a mask may narrow, has a place from which it is kept
        value = draft.op("Unsqueeze", value, draft.ints(1))
    return draft.reshape(value, -1, *x.lead, 0)


def closed(step: Step, value: str, x: Map) -> str:
    """The inverse of :func:`opened`."""
    draft = step.draft
    if x.space:
        return value if step.looks else draft.transpose(value, 1, 0, *range(2, 2 + len(x.space)))
    if not x.lead:
        return draft.reshape(value, -1, 1) if x.single else value
    if isinstance(x.channels, int):
        return draft.reshape(value, -1, x.channels)
    return draft.op("Flatten", value, axis=1 + len(x.lead))


def shaped(step: Step, layer: str, wide: Sequence[Size]) -> Map:
    """A map of these sizes, without a value: rows where all but the last are numbers, else with channels in front."""
    if not wide:
        return Map("", 1, single=True)
    if any(isinstance(one, str) for one in wide[1:-1]) or (isinstance(wide[0], str) and isinstance(wide[-1], str)):
        wide = [step.held(one) for one in wide]
    if all(isinstance(one, int) for one in wide[:-1]):
        return Map("", wide[-1], (), tuple(one for one in wide[:-1] if isinstance(one, int)))
    if not all(isinstance(one, int) for one in wide[1:]):
        what = f"gives {tuple(wide)}, in which what a mask may narrow is neither first nor last alone"
        raise refused(layer, what, "keep one width at a time")
    return Map("", wide[0], tuple(one for one in wide[1:] if isinstance(one, int)))


def filled(step: Step, value: str, x: Map) -> Map:
    """``x`` with ``value``, which stands as torch has it."""
    return x.like(closed(step, value, x))


def on_rows(rule: Rule) -> Rule:
    """``rule`` over a map whose channels come last, whatever it was given."""
    return _converted(rule, lambda step, layer, x: _as_rows(layer, x) if x.space else x)


def on_maps(rule: Rule) -> Rule:
    """``rule`` over a map whose channels come first, whatever it was given."""
    return _converted(rule, lambda step, layer, x: _as_map(step, x) if x.lead else x)


def _converted(rule: Rule, form: Callable[[Step, str, Map], Map]) -> Rule:
    def converted(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
        forms = [form(step, layer, x) for x in given]
        if all(own is x for own, x in zip(forms, given, strict=True)):
            return rule(step, layer, module, given)
        pairs = list(zip(forms, given, strict=True))
        y, pull = rule(step, layer, module, [filled(step, opened(step, x.value, x), own) for own, x in pairs])

        def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
            found = zip(pull(g, wanted), pairs, strict=True)
            return [None if one is None else closed(step, opened(step, one, own), x) for one, (own, x) in found]

        return y, back

    return converted


def _as_rows(layer: str, x: Map) -> Map:
    if not isinstance(x.channels, int):
        raise refused(layer, f"reads maps of {x.space} along their last dimension", "turn the channels to the end")
    return Map("", x.space[-1], (), (x.channels, *x.space[:-1]))


def _as_map(step: Step, x: Map) -> Map:
    first, *rest = (step.known(one) for one in sizes(x))
    return Map("", first, tuple(rest))


def turned(step: Step, layer: str, x: Map, order: Sequence[int]) -> tuple[Map, Pullback]:
    """The dimensions in another order; the batch stays first."""
    wide = sizes(x)
    if sorted(order) != list(range(1 + len(wide))) or order[0] != 0:
        raise refused(layer, f"orders dimensions as {tuple(order)}", "keep the batch first")
    out = shaped(step, layer, [wide[i - 1] for i in order[1:]])
    inverse = [list(order).index(i) for i in range(len(order))]
    draft = step.draft
    y = filled(step, draft.transpose(opened(step, x.value, x), *order), out)
    return y, lambda g, wanted: [closed(step, draft.transpose(opened(step, g, out), *inverse), x)]


def picked(step: Step, layer: str, x: Map, axis: int, place: int) -> tuple[Map, Pullback]:
    """One place of a dimension, such as the last moment of a sequence."""
    wide, draft = list(sizes(x)), step.draft
    size = step.known(wide.pop(axis - 1))
    if not -size <= place < size:
        raise refused(layer, f"takes place {place} of {size}", "take one that there is")
    place %= size
    out = shaped(step, layer, wide)
    begin, end, at, one = (draft.ints(n) for n in (place, place + 1, axis, 1))
    piece = draft.op("Slice", opened(step, x.value, x), begin, end, at, one)
    y = filled(step, without(step, piece, axis, wide), out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        many = 1 + len(sizes(x))
        low, high = [0] * many, [0] * many
        low[axis], high[axis] = place, size - 1 - place
        apart = draft.op("Unsqueeze", opened(step, g, out), draft.ints(axis))
        return [closed(step, draft.op("Pad", apart, draft.ints(*low, *high), draft.constant(0.0)), x)]

    return y, back


def along(step: Step, layer: str, x: Map, dim: Dims, keep: bool, does: str = "goes over") -> tuple[list[int], Map]:
    """The dimensions that ``dim`` names, in order, and a map of the sizes that stay; ``does`` is said where these are
    the batch, none, or all."""
    wide = sizes(x)
    named = () if dim is None or isinstance(dim, bool) else (dim,) if isinstance(dim, int) else dim
    gone = sorted({one % (1 + len(wide)) for one in named})
    if not gone or gone[0] == 0:
        raise refused(layer, f"{does} {dim} of {wide}", "name dimensions behind the batch")
    rest: list[Size] = [1 if i in gone else n for i, n in enumerate(wide, 1) if keep or i not in gone]
    return gone, shaped(step, layer, rest)


def apart(draft: Draft, value: str, gone: Sequence[int], keep: bool) -> str:
    """A value with sizes of 1 at ``gone``, if these were not kept."""
    for axis in () if keep else gone:
        value = draft.op("Unsqueeze", value, draft.ints(axis))
    return value


def averaged(
    step: Step, layer: str, x: Map, dim: Dims, keep: bool = False, whole: bool = False
) -> tuple[Map, Pullback]:
    """The mean over some dimensions behind the batch; their ``whole`` sum if it is asked for."""
    draft, (gone, out) = step.draft, along(step, layer, x, dim, keep, "adds up" if whole else "averages over")
    share = 1.0 if whole else 1 / prod(step.known(sizes(x)[axis - 1]) for axis in gone)
    full = opened(step, x.value, x)
    y = filled(step, (draft.sum if whole else draft.mean)(full, *gone, keep=keep), out)
    y = replace(y, affine=x.affine)  # only a mean of whole rows is asked for where there is one

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        each = opened(step, g if whole else draft.op("Mul", g, draft.number(share, 2 + len(out.space))), out)
        return [closed(step, draft.op("Expand", apart(draft, each, gone, keep), draft.op("Shape", full)), x)]

    return y, back


def without(step: Step, value: str, axis: int, rest: Sequence[Size]) -> str:
    """``value`` without a dimension of size 1; the sizes of ``rest`` stay behind the batch."""
    if len(rest) == 1:
        return step.draft.op("Flatten", value, axis=1)
    if not rest:
        return step.draft.reshape(value, -1)
    if all(isinstance(one, int) for one in rest):
        return step.draft.reshape(value, -1, *(one for one in rest if isinstance(one, int)))
    order = [i for i in range(2 + len(rest)) if i != axis]
    turned = step.draft.transpose(value, *order, axis)
    return step.draft.reshape(turned, *(0,) * (1 + len(rest)))
