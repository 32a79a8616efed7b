"""Softmax, softmin and their logarithms, along any dimension behind the batch: in a network, or at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.nn import Identity, LogSoftmax, Module, Softmax, Softmin

from talaria.programs.graph import Draft
from talaria.programs.layers.activation import Of, Slope, rule_of
from talaria.programs.layers.base import Map, Pullback, Step, chained, refused
from talaria.programs.layers.elementwise import negated
from talaria.programs.layers.sequence import closed, filled, opened, sizes


def softmax(
    step: Step, layer: str, x: Map, dim: int | None = None, _stacklevel: int = 3, dtype: None = None
) -> tuple[Map, Pullback]:
    """Values above zero that add up to 1 along ``dim``; None is what torch takes it for."""
    _plain(layer, dtype)
    return _along(step, layer, "Softmax", x, dim)


def log_softmax(
    step: Step, layer: str, x: Map, dim: int | None = None, _stacklevel: int = 3, dtype: None = None
) -> tuple[Map, Pullback]:
    """The logarithms of these. Of cross-entropy, which begins with the same, they change nothing."""
    _plain(layer, dtype)
    return _along(step, layer, "LogSoftmax", x, dim)


def softmin(
    step: Step, layer: str, input: Map, dim: int | None = None, _stacklevel: int = 3, dtype: None = None
) -> tuple[Map, Pullback]:
    """Softmax of the values below zero that they are above."""
    turned, turn = rule_of(negated)(step, layer, Identity(), [input])
    y, back = softmax(step, layer, turned, dim, dtype=dtype)
    return y, chained(turn, back)


def of_module(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """As the module says."""
    function = _FUNCTIONS[type(module)]
    return function(step, layer, given[0], cast(Any, module).dim)


_FUNCTIONS: Mapping[type[Module], Callable[..., tuple[Map, Pullback]]] = {
    Softmax: softmax,
    LogSoftmax: log_softmax,
    Softmin: softmin,
}


def _plain(layer: str, dtype: object) -> None:
    if dtype is not None:
        raise refused(layer, f"gives {dtype}", "leave dtype out")


def softened(draft: Draft, g: str, y: str, axis: int) -> str:
    """The gradient by what entered a softmax whose output is ``y``."""
    met = draft.sum(draft.op("Mul", g, y), axis, keep=True)
    return draft.op("Mul", y, draft.op("Sub", g, met))


def seen(draft: Draft, met: str, axis: int) -> str:
    """The softmax of products of queries and keys, of which masks hide some by minus infinity; a query that sees no key
    takes nothing of any, as in torch."""
    none = draft.op("Equal", draft.op("ReduceMax", met, draft.ints(axis), keepdims=1), draft.constant(float("-inf")))
    return draft.op("Where", none, draft.constant(0.0), draft.op("Softmax", met, axis=axis))


def _along(step: Step, layer: str, kind: str, x: Map, dim: int | None) -> tuple[Map, Pullback]:
    draft, rank = step.draft, 1 + len(sizes(x))
    axis = dim % rank if dim is not None else 0 if rank == 3 else 1
    if axis == 0:
        raise refused(layer, f"goes along dim={dim} of {rank} dimensions", "use dim=-1")
    rows = axis == rank - 1 and not x.space  # as they stand
    at = 1 if rows else axis
    y, slope = shared(kind, at)(draft, x.value if rows else opened(step, x.value, x), Identity())

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        return [slope(g) if rows else closed(step, slope(opened(step, g, x)), x)]

    return x.like(y) if rows else filled(step, y, x), back


def shared(kind: str, axis: int) -> Of:
    """Softmax or LogSoftmax of values along an ``axis``."""

    def of(draft: Draft, x: str, module: Module) -> tuple[str, Slope]:
        y = draft.op(kind, x, axis=axis)

        def slope(g: str) -> str:
            if kind == "Softmax":
                return softened(draft, g, y, axis)
            whole = draft.sum(g, axis, keep=True)
            return draft.op("Sub", g, draft.op("Mul", draft.op("Exp", y), whole))

        return y, slope

    return of
