"""Products of maps: of matrices, and attention as a function of queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from talaria.programs.layers import projection
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.einsum import einsum
from talaria.programs.layers.masking import hidden
from talaria.programs.layers.parameters import Weight, each, require_met
from talaria.programs.layers.sequence import closed, filled, opened, shaped, sizes
from talaria.programs.layers.shares import seen


def matmul(step: Step, layer: str, a: Map | Weight, b: Map | Weight) -> tuple[Map, Pullback]:
    """a b, of which one may be a parameter."""
    if isinstance(a, Weight):
        if isinstance(b, Map):
            wide = tuple(step.held(one) for one in sizes(b))
            if len(wide) != 2 or isinstance(wide[0], str):
                mend = "let it go along a dimension that no mask narrows, of maps of two dimensions"
                raise refused(layer, f"multiplies {a.shape} by {wide}", mend)
        return einsum(step, layer, "nm,bmc->bnc", a, b)
    if isinstance(b, Weight):
        return projection.matmul(step, layer, a, b)
    draft, (left, right) = step.draft, ([step.known(one) for one in sizes(x)] for x in (a, b))
    if len(left) != len(right) or len(left) < 2 or left[:-2] != right[:-2] or left[-1] != right[-2]:
        raise refused(layer, f"multiplies {left} by {right}", "multiply matrices of the same batch")
    rows, columns = (step.held(one) for one in (sizes(a)[0], sizes(b)[-1]))  # as many as a mask leaves
    both = isinstance(rows, str) and isinstance(columns, str)
    out = shaped(step, layer, [*left[:-1], right[-1]] if both else [rows, *left[1:-1], columns])
    last = 1 + len(left)
    swap = (*range(last - 2), last - 1, last - 2)
    first, second = (opened(step, x.value, x) for x in (a, b))
    y = filled(step, draft.op("MatMul", first, second), out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = opened(step, g, out)
        da = closed(step, draft.op("MatMul", slope, draft.transpose(second, *swap)), a) if wanted[0] else None
        db = closed(step, draft.op("MatMul", draft.transpose(first, *swap), slope), b) if wanted[-1] else None
        return [da, db]

    return y, back


def attend(
    step: Step,
    layer: str,
    query: Map,
    key: Map,
    value: Map,
    attn_mask: Map | Weight | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Map, Pullback]:
    """Scaled products of (..., length, width), under a mask that says which keys are seen, or has numbers to add."""
    draft = step.draft
    if dropout_p:
        raise refused(layer, "drops attention weights", "leave out dropout_p")
    wide = [step.known(one) for one in sizes(query)]
    last = 1 + len(wide)
    swap = (*range(last - 2), last - 1, last - 2)
    if len(wide) < 2 or any(step.known(sizes(x)[-1]) != wide[-1] for x in (key,)):
        raise refused(layer, f"attends over {wide}", "give (batch, ..., length, width)")
    factor = draft.constant(1 / sqrt(wide[-1]) if scale is None else scale)
    q, k, v = (opened(step, x.value, x) for x in (query, key, value))
    scaled = draft.op("Mul", q, factor)
    products = draft.op("MatMul", scaled, draft.transpose(k, *swap))
    if is_causal:
        later = np.triu(np.full((wide[-2], step.known(sizes(key)[-2])), -np.inf), 1)
        products = draft.op("Add", products, draft.constant(later))
    if attn_mask is not None:
        products = _masked(step, layer, products, [*wide[:-1], step.known(sizes(key)[-2])], attn_mask)
    share = draft.op("Softmax", products, axis=last - 1) if attn_mask is None else seen(draft, products, last - 1)
    out = shaped(step, layer, [*wide[:-1], step.held(sizes(value)[-1])])
    mixed = draft.op("MatMul", share, v)
    y = filled(step, mixed, out)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        slope = opened(step, g, out)
        met = draft.sum(draft.op("Mul", slope, mixed), last - 1, keep=True)
        scores = draft.op("Mul", share, draft.op("Sub", draft.op("MatMul", slope, draft.transpose(v, *swap)), met))
        dq = draft.op("Mul", draft.op("MatMul", scores, k), factor)
        dk = draft.op("MatMul", draft.transpose(scores, *swap), scaled)
        dv = draft.op("MatMul", draft.transpose(share, *swap), slope)
        if isinstance(attn_mask, Weight):
            attn_mask.train(step, each(step, scores, attn_mask.shape, len(wide)))
        found = [closed(step, one, x) for one, x in ((dq, query), (dk, key), (dv, value))]
        return [*found, None][: len(wanted)]

    return y, back


def _masked(step: Step, layer: str, products: str, wide: Sequence[int], mask: Map | Weight) -> str:
    """Products of queries and keys of these sizes behind the batch, under a mask."""
    draft = step.draft
    if isinstance(mask, Map) and not draft.compared(mask.value):
        raise refused(layer, "has an attn_mask of each sample that is no comparison", "give one such as x != 0")
    if isinstance(mask, Map) or mask.is_mask:
        seen = hidden(step, layer, wide, mask)
        return draft.op("Where", seen, products, draft.constant(float("-inf")))
    require_met(layer, mask, wide, "adds")
    return draft.op("Add", products, mask.value(step))
