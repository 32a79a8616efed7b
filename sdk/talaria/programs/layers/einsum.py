"""torch.einsum of two tensors, as one product of matrices between transpositions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from talaria.einsum import named
from talaria.errors import ModelError
from talaria.programs.graph import Draft, Size
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.parameters import Weight
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes


def einsum(step: Step, layer: str, equation: str, *given: Map | Weight) -> tuple[Map, Pullback]:
    """Of two maps, or of a map and what is the same for each sample, in either order."""
    (one, other), out, (a, b) = _pair(layer, equation, given)
    pair = (one, other), (a, b)
    wide = _sizes(step, layer, equation, pair)
    known = {name: size for name, size in wide.items() if isinstance(size, int)}
    batch, theirs = one[0], other[1:] if isinstance(b, Map) else other
    kept = [name for name in one[1:] if name in theirs and name in out]
    met = [name for name in one[1:] if name in theirs and name not in out]
    rows, columns = [n for n in one[1:] if n not in theirs], [n for n in theirs if n not in one]
    if out[:1] != batch or sorted(out) != sorted([batch, *kept, *rows, *columns]) or batch in theirs:
        raise _refused(layer, equation)
    if len(known) < len(wide) and not len(rows) == len(met) == len(columns) == 1:
        raise _refused(layer, equation)  # only one dimension beside another keeps the width that a mask leaves
    draft, lead = step.draft, [batch, *kept]
    first = _Form(draft, known, one, lead, rows, met)
    second = _Form(draft, known, other, lead if isinstance(b, Map) else kept, met, columns)
    last = _Form(draft, known, out, lead, rows, columns)
    x = first.matrices(opened(step, a.value, a))
    w = second.matrices(opened(step, b.value, b) if isinstance(b, Map) else b.value(step))
    y = shaped(step, layer, [wide[name] for name in out[1:]])

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = last.matrices(opened(step, g, y))
        found = [closed(step, first.back(draft.op("MatMul", slope, second.turned(w))), a)]
        towards = draft.op("MatMul", first.turned(x), slope)
        if isinstance(b, Weight):
            b.train(step, second.back(draft.sum(towards, 0)))
            return found
        found.append(closed(step, second.back(towards), b))
        return found if given[0] is a else found[::-1]

    return filled(step, last.back(draft.op("MatMul", x, w)), y), back


@dataclass(frozen=True)
class _Form:
    """How a tensor whose dimensions have ``names`` stands in a product: those of ``lead`` apart and in front, then
    ``rows`` and ``columns``, each as one dimension. What has no size is the batch."""

    draft: Draft
    sizes: Mapping[str, int]
    names: str
    lead: Sequence[str]
    rows: Sequence[str]
    columns: Sequence[str]

    def matrices(self, value: str) -> str:
        """``value`` as the product has it."""
        order = [*self.lead, *self.rows, *self.columns]
        value = self.draft.transpose(value, *(self.names.index(name) for name in order))
        return self._grouped(value, [*self.lead, self.rows, self.columns])

    def back(self, value: str) -> str:
        """The inverse of :meth:`matrices`."""
        order = [*self.lead, *self.rows, *self.columns]
        return self.draft.transpose(self._grouped(value, order), *(order.index(name) for name in self.names))

    def turned(self, matrices: str) -> str:
        """Each of the matrices with its rows as columns."""
        last = len(self.lead) + 1
        return self.draft.transpose(matrices, *range(last - 1), last, last - 1)

    def _grouped(self, value: str, groups: Sequence[str | Sequence[str]]) -> str:
        if len(self.rows) == len(self.columns) == 1:
            return value
        return self.draft.reshape(value, *(prod(self.sizes.get(name, -1) for name in names) for names in groups))


def _pair(
    layer: str, equation: str, given: Sequence[Map | Weight]
) -> tuple[tuple[str, str], str, tuple[Map, Map | Weight]]:
    """The names of two tensors, a map first, those of what comes out, and the two."""
    if len(given) == 2 and equation.count(",") == 1:
        ranks = [1 + len(sizes(x)) if isinstance(x, Map) else len(x.shape) for x in given]
        left, _, out = named(equation, ranks).partition("->")
        first, second = left.split(",")
        if all(one.isalpha() and len({*one}) == len(one) for one in (first, second)):
            a, b = given
            if isinstance(a, Map):
                return (first, second), out, (a, b)
            if isinstance(b, Map):
                return (second, first), out, (b, a)
    raise _refused(layer, equation)


def _sizes(
    step: Step, layer: str, equation: str, pair: tuple[tuple[str, str], tuple[Map, Map | Weight]]
) -> dict[str, Size]:
    """The size of each name but the batch's."""
    found = dict[str, Size]()
    for names, x in zip(*pair, strict=True):
        wide = [step.held(one) for one in sizes(x)] if isinstance(x, Map) else list(x.shape)
        own = names[1:] if isinstance(x, Map) else names
        if len(own) != len(wide) or (isinstance(x, Map) and names[0] != pair[0][0][0]):
            raise _refused(layer, equation)
        if any(found.setdefault(name, size) != size for name, size in zip(own, wide, strict=True)):
            raise _refused(layer, equation)
    return found


def _refused(layer: str, equation: str) -> ModelError:
    mend = "name two tensors of known sizes and what comes out, the batch first, as in 'bld,de->ble'"
    return refused(layer, f"reckons {equation!r}"[:120], mend)
