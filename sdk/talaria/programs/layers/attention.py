"""Attention of a sequence to itself, and the softmax and products that it is made of.

Source: Vaswani et al. 2017; the layout of the weights is torch.nn.MultiheadAttention's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import cast

from torch.nn import Module, MultiheadAttention

from talaria.programs.graph import Draft
from talaria.programs.layers.base import Map, Pullback, Step, key, refused


def attention(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """What ``layer(x, x, x)[0]`` is, of rows."""
    own, draft, x = cast(MultiheadAttention, module), step.draft, given[0]
    _known(layer, own, given)
    wide, heads, (length,) = own.embed_dim, own.num_heads, x.lead
    each = wide // heads
    joint = step.weight(layer, "in_proj_weight", own.in_proj_weight, (3 * wide, wide))
    shift = step.weight(layer, "in_proj_bias", own.in_proj_bias, (3 * wide,))
    last, project = f"{layer}.out_proj", own.out_proj
    out = step.weight(last, "weight", project.weight, (wide, wide))
    bias = step.weight(last, "bias", project.bias, (wide,))
    assert joint is not None
    assert out is not None
    three = draft.op("Gemm", x.value, joint, *([shift] if shift else []), transB=1)
    apart = draft.transpose(draft.reshape(three, -1, length, 3, heads, each), 2, 0, 3, 1, 4)
    # (batch x heads, length, each): ONNX Runtime turns k inside of the product where it cannot see what lies before
    q, k, v = (draft.reshape(_cut(draft, apart, i), -1, length, each) for i in range(3))
    scale = draft.constant(1 / sqrt(each))
    scaled = draft.op("Mul", q, scale)
    share = draft.op("Softmax", draft.op("MatMul", scaled, _turned(draft, k)), axis=2)
    mixed = draft.op("MatMul", share, v)
    rows = draft.reshape(draft.transpose(draft.reshape(mixed, -1, heads, length, each), 0, 2, 1, 3), -1, wide)
    y = draft.op("Gemm", rows, out, *([bias] if bias else []), transB=1)

    def back(g: str, wanted: Sequence[bool]) -> Sequence[str | None]:
        step.trained(project, last, "weight", lambda: draft.product(g, rows, rank=2, turn_a=True))
        step.trained(project, last, "bias", lambda: draft.sum(g, 0))
        slope = draft.transpose(draft.reshape(draft.op("MatMul", g, out), -1, length, heads, each), 0, 2, 1, 3)
        slope = draft.reshape(slope, -1, length, each)
        # what a softmax takes off, the sum over share * (slope v^T), is that over the shorter rows of the output
        met = draft.sum(draft.op("Mul", slope, mixed), 2, keep=True)
        towards = draft.op("MatMul", slope, _turned(draft, v))
        scores = draft.op("Mul", share, draft.op("Sub", towards, met))
        dq = draft.op("Mul", draft.op("MatMul", scores, k), scale)
        dk = draft.op("MatMul", _turned(draft, scores), scaled)
        dv = draft.op("MatMul", _turned(draft, share), slope)
        whole = draft.reshape(draft.op("Concat", dq, dk, dv, axis=0), 3, -1, heads, length, each)
        flat = draft.reshape(draft.transpose(whole, 1, 3, 0, 2, 4), -1, 3 * wide)
        step.trained(own, layer, "in_proj_weight", lambda: draft.product(flat, x.value, rank=2, turn_a=True))
        step.trained(own, layer, "in_proj_bias", lambda: draft.sum(flat, 0))
        # x is read as query, key and value: one of them carries the whole gradient
        return [draft.op("MatMul", flat, joint) if wanted[0] else None, *[None] * (len(given) - 1)]

    return Map(y, wide, (), x.lead), back


def _known(layer: str, own: MultiheadAttention, given: Sequence[Map]) -> None:
    """Refuse what is not the attention of one sequence to itself."""
    if len(given) != 3 or len({one.value for one in given}) != 1:
        raise refused(layer, "attends from one sequence to another", "call it with the same query, key and value")
    if not own.batch_first or len(given[0].lead) != 1:
        raise refused(layer, "reads sequences in another order", "use batch_first=True, and (batch, length, width)")
    if own.in_proj_weight is None or own.bias_k is not None or own.add_zero_attn:
        raise refused(layer, "has kdim, vdim, add_bias_kv or add_zero_attn", "leave them out")
    if own.training and own.dropout:
        raise refused(layer, f"drops attention weights ({key(layer, 'dropout')}={own.dropout})", "set it to 0.0")


def softmax(step: Step, layer: str, module: Module, given: Sequence[Map]) -> tuple[Map, Pullback]:
    """Along the channels of rows."""
    draft, (x,) = step.draft, given
    if getattr(module, "dim", None) not in (-1, 1 + len(x.lead)):
        raise refused(layer, f"goes along dim={getattr(module, 'dim', None)}", "use dim=-1")
    y = draft.op("Softmax", x.value, axis=1)
    return x.like(y), lambda g, wanted: [softened(draft, g, y, 1)]


def softened(draft: Draft, g: str, y: str, axis: int) -> str:
    """The gradient by what entered a softmax whose output is ``y``."""
    met = draft.sum(draft.op("Mul", g, y), axis, keep=True)
    return draft.op("Mul", y, draft.op("Sub", g, met))


def _cut(draft: Draft, value: str, place: int) -> str:
    return draft.op("Slice", value, draft.ints(place), draft.ints(place + 1), draft.ints(0), draft.ints(1))


def _turned(draft: Draft, value: str) -> str:
    return draft.transpose(value, 0, 2, 1)
