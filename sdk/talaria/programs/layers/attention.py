"""Attention of a sequence to itself, or to another one.

Source: Vaswani et al. 2017; the layout of the weights is torch.nn.MultiheadAttention's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import cast

from torch.nn import Module, MultiheadAttention

from talaria.model.attention import heads_of
from talaria.model.inside import base_of
from talaria.programs.graph import Draft, times
from talaria.programs.layers.base import Map, Pullback, Step, refused
from talaria.programs.layers.matrices import Matrices
from talaria.programs.layers.parameters import Weight
from talaria.programs.layers.sequence import sizes
from talaria.programs.layers.shares import seen
from talaria.programs.layers.weighing import Weighing


def attention(
    step: Step, layer: str, module: Module, given: Sequence[Map], *, mask: Weight | None = None
) -> tuple[Map, Pullback]:
    """What ``layer(query, key, value)[0]`` is, of rows; a fourth map is the padding mask.

    ``mask`` (queries, keys) is the same for each sample: numbers that are added, or where keys are hidden.
    """
    own, draft = cast(MultiheadAttention, base_of(module)), step.draft
    weights = Matrices(step, layer, module)
    _known(step, layer, own, given)
    (queries,), (keys,) = given[0].lead, given[1].lead
    if mask is not None and mask.shape != (queries, keys):
        raise refused(layer, f"has an attn_mask of {mask.shape}", "make it (length, length), the same for each sample")
    wide, each = own.embed_dim, own.head_dim
    joint = weights.value("in_proj_weight", (times(layer, 3), wide))
    shift = weights.value("in_proj_bias", (times(layer, 3),))
    out = weights.value("out_proj.weight", (wide, layer))  # a mask may take heads
    bias = weights.value("out_proj.bias", (wide,))
    assert joint is not None
    assert out is not None
    one = len({x.value for x in given[:3]}) == 1
    (q, k, v), projected = (_of_one if one else _of_three)(step, weights, given[:3], joint, shift, each)
    scale = draft.constant(1 / sqrt(each))
    scaled = draft.op("Mul", q, scale)
    met = draft.op("MatMul", _turned(draft, scaled), k)
    if mask is not None and mask.is_mask:
        over = draft.op("Greater", mask.value(step), draft.constant(0.5))
        met = draft.op("Where", over, draft.constant(float("-inf")), met)
    elif mask is not None:
        met = draft.op("Add", met, mask.value(step))
    if len(given) > 3:
        met = _hidden(draft, met, given[3].value, keys)
    hides = mask is not None or len(given) > 3
    share = seen(draft, met, 3) if hides else draft.op("Softmax", met, axis=3)
    draw = _drawn(step, weights.place, own, share, queries, keys) if own.training and own.dropout else None
    kept = share if draw is None else draft.op("Mul", share, draw)
    mixed = draft.op("MatMul", v, _turned(draft, kept))
    flat = _together(draft, mixed)
    y = draft.op("Gemm", flat, out, *([bias] if bias else []), transA=1, transB=1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        weights.trained("out_proj.weight", lambda: draft.product(g, flat, rank=2, turn_a=True, turn_b=True))
        weights.trained("out_proj.bias", lambda: step.summed(g, given[0].lead))
        before = draft.product(out, g, rank=2, turn_a=True, turn_b=True)
        slope = _by_heads(step, before, each, queries)
        # what a softmax takes off, the sum over share * (slope^T v), is that over the shorter columns of the output
        # and is taken off inside of the product, as one more channel: a pass of its own takes as long as the product.
        # It is added up before heads stand behind the batch: that takes a fifth
        both = draft.op("Reshape", draft.op("Mul", before, flat), _apart(step, each, queries))
        met = draft.op("Unsqueeze", draft.sum(both, 1), draft.ints(2))
        if draw is None:
            less = draft.op("Pad", v, draft.ints(0, 0, 0, 0, 0, 0, 1, 0), draft.constant(-1.0))
            towards = draft.op("MatMul", _turned(draft, draft.op("Concat", slope, met, axis=2)), less)
        else:
            each_kept = draft.op("Mul", draft.op("MatMul", _turned(draft, slope), v), draw)
            towards = draft.op("Sub", each_kept, _turned(draft, met))
        scores = draft.op("Mul", share, towards)
        if mask is not None and mask.trains:
            mask.train(step, draft.sum(scores, 0, 1))
        dq = draft.op("Mul", draft.op("MatMul", k, _turned(draft, scores)), scale)
        dk = draft.op("MatMul", scaled, scores)
        dv = draft.op("MatMul", slope, kept)
        return [*projected((dq, dk, dv), wanted[:3]), *[None] * (len(given) - 3)]

    return Map(y, wide, (), given[0].lead), back


_Slopes = Callable[[Sequence[str], Sequence[bool]], Sequence[str | None]]
"""``the slopes of queries, keys and values, which inputs want theirs -> those of the inputs``."""


def _of_one(
    step: Step, weights: Matrices, given: Sequence[Map], joint: str, shift: str | None, each: int
) -> tuple[Sequence[str], _Slopes]:
    """Queries, keys and values (heads, batch, each, length) of one sequence, by one product."""
    draft, x, (length,) = step.draft, given[0], given[0].lead
    # channels first, (channels, batch x length): what is turned to heads and back then has the length together
    held = Weighing(step, x, joint, shift)
    three = draft.op("Gemm", held.matrix, x.value, *held.column(), transB=1)
    apart = _thirds(draft, _by_heads(step, three, each, length))

    def back(slopes: Sequence[str], wanted: Sequence[bool]) -> Sequence[str | None]:
        whole = _together(draft, draft.op("Concat", *slopes, axis=0))
        product, total = draft.op("Gemm", whole, x.value), draft.sum(whole, 1)
        weights.trained("in_proj_weight", lambda: held.gradient(product, total))
        weights.trained("in_proj_bias", lambda: total)
        held.train(product, total)
        # x is read as query, key and value: one of them carries the whole gradient
        return [draft.product(whole, held.back, rank=2, turn_a=True) if wanted[0] else None, None, None]

    return apart, back


def _of_three(
    step: Step, weights: Matrices, given: Sequence[Map], joint: str, shift: str | None, each: int
) -> tuple[Sequence[str], _Slopes]:
    """Queries, keys and values of sequences that need not be the same."""
    draft = step.draft
    matrices, shifts = _thirds(draft, joint), (None,) * 3 if shift is None else _thirds(draft, shift)
    held, found = list[Weighing](), list[str]()
    for x, matrix, own in zip(given, matrices, shifts, strict=True):
        held.append(Weighing(step, x, matrix, own))
        one = draft.op("Gemm", held[-1].matrix, x.value, *held[-1].column(), transB=1)
        found.append(_by_heads(step, one, each, *x.lead))

    def back(slopes: Sequence[str], wanted: Sequence[bool]) -> Sequence[str | None]:
        whole = [_together(draft, slope) for slope in slopes]
        products = [draft.op("Gemm", one, x.value) for one, x in zip(whole, given, strict=True)]
        totals = [draft.sum(one, 1) for one in whole]
        triples = list(zip(held, products, totals, strict=True))
        weights.trained(
            "in_proj_weight", lambda: draft.op("Concat", *(w.gradient(p, t) for w, p, t in triples), axis=0)
        )
        weights.trained("in_proj_bias", lambda: draft.op("Concat", *totals, axis=0))
        for one, product, total in triples:
            one.train(product, total)
        ways = zip(whole, held, wanted, strict=True)
        return [draft.product(g, one.back, rank=2, turn_a=True) if want else None for g, one, want in ways]

    return found, back


def _thirds(draft: Draft, three: str) -> tuple[str, ...]:
    return draft.several("Split", 3, three, axis=0, num_outputs=3)


def _hidden(draft: Draft, met: str, mask: str, keys: int) -> str:
    """Products of queries and keys (heads, batch, queries, keys), of which ``mask`` (batch, keys) hides keys."""
    over = draft.op("Greater", draft.reshape(mask, 1, -1, 1, keys), draft.constant(0.5))
    return draft.op("Where", over, draft.constant(float("-inf")), met)


def _known(step: Step, layer: str, own: MultiheadAttention, given: Sequence[Map]) -> None:
    """Refuse what is no attention of torch's usual form."""
    for mask in given[3:]:
        if not step.draft.compared(mask.value) or sizes(mask) != given[1].lead:
            what = "has a key_padding_mask that is no comparison, or of another length"
            raise refused(layer, what, "make it of the sample, (batch, length), as in x == 0")
    if any(len(one.lead) != 1 for one in given[:3]):
        raise refused(layer, "reads sequences of another form", "give it (batch, length, width)")
    if own.in_proj_weight is None or own.bias_k is not None or own.add_zero_attn:
        raise refused(layer, "has kdim, vdim, add_bias_kv or add_zero_attn", "leave them out")


def _drawn(step: Step, place: str, own: MultiheadAttention, share: str, queries: int, keys: int) -> str:
    """Draws for the weights (heads, batch, queries, keys): for all heads that there were, of which those that a mask
    leaves take the first ones."""
    draft, draw = step.draft, step.drawn(place, (heads_of(own), queries, keys))
    left = draft.op("Shape", share, start=0, end=1)
    ends = (draft.ints(0), left, draft.ints(0), draft.ints(1))
    return draft.op("Slice", draft.transpose(draw, 1, 0, 2, 3), *ends)


def _by_heads(step: Step, value: str, each: int, length: int) -> str:
    """(heads x each, batch x length) as (heads, batch, each, length), however many heads a mask leaves."""
    draft = step.draft
    return draft.transpose(draft.op("Reshape", value, _apart(step, each, length)), 0, 2, 1, 3)


def _apart(step: Step, each: int, length: int) -> str:
    """The sizes (heads, each, batch, length), however many heads a mask leaves."""
    return step.draft.op("Concat", step.draft.ints(-1, each), step.batch, step.draft.ints(length), axis=0)


def _together(draft: Draft, value: str) -> str:
    """(heads, batch, each, length) as (heads x each, batch x length)."""
    return draft.op("Flatten", draft.transpose(value, 0, 2, 1, 3), axis=2)


def _turned(draft: Draft, value: str) -> str:
    return draft.transpose(value, 0, 1, 3, 2)
