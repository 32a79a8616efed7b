"""Whole heads of torch's attention as the survey sees them, and attention that has fewer than it was made with.

A head's rows of queries, keys and values and its columns of the output go at once. With all of these at zero a head
adds nothing: whatever it attends to, its values are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention, TransformerEncoder
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from talaria.model.masks import Axis

_OWN = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}


def prunable(layer: Module) -> bool:
    """Whether ``layer`` is torch's own attention, with plain weights, one for queries, keys and values of one width."""
    if not isinstance(layer, MultiheadAttention) or type(layer) not in (MultiheadAttention, FewerHeads):
        return False
    held = {*layer.state_dict()}
    return "in_proj_weight" in held and held <= _OWN and not layer.add_zero_attn


def axes_of(name: str, layer: MultiheadAttention, heads: Axis) -> dict[str, tuple[Axis, ...]]:
    """The axes of the layer's tensors, where ``heads`` rule its heads."""
    wide = tuple((group, repeat * layer.head_dim) for group, repeat in heads)
    out: dict[str, tuple[Axis, ...]] = {"in_proj_weight": (wide * 3, ()), "out_proj.weight": ((), wide)}
    if layer.in_proj_bias is not None:
        out["in_proj_bias"] = (wide * 3,)
    return {f"{name}.{key}" if name else key: axes for key, axes in out.items()}


class FewerHeads(MultiheadAttention):
    """Attention whose heads keep their ``head_dim``, however few they are; of torch's own they fill ``embed_dim``.

    Weights of attention are those of the heads that there are. Raises ValueError for a mask of each head's own.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's; ``is_causal`` says no more than ``attn_mask`` does."""
        q, k, v, hidden = _before(self, query, key, value, key_padding_mask, attn_mask)
        dropped = self.dropout if self.training else 0.0
        if not need_weights:
            return _together(self, F.scaled_dot_product_attention(q, k, v, hidden, dropped)), None
        share = F.dropout(_shares(q, k, hidden), dropped)
        return _together(self, share @ v), share.mean(-3) if average_attn_weights else share


Drop = Callable[[Tensor], Tensor]
"""Weights of attention (N, heads, queries, keys) without those that fall away."""


def dropping(layer: MultiheadAttention, drop: Drop) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The pass of ``layer`` (:func:`prunable`) by plain products, of whose weights ``drop`` takes some away; a mask for
    each head is torch's own pass, and drops as that does."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not layer.training or (attn_mask is not None and attn_mask.dim() != 2):
            given = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return type(layer).forward(layer, *given)
        q, k, v, hidden = _before(layer, query, key, value, key_padding_mask, attn_mask)
        share = drop(_shares(q, k, hidden))
        weights = share.mean(-3) if average_attn_weights else share
        return _together(layer, share @ v), weights if need_weights else None

    return forward


def heads_of(layer: MultiheadAttention) -> int:
    """How many heads ``layer`` was made with."""
    return int(layer.embed_dim // layer.head_dim)


def _before(
    layer: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys and values by heads, and what is added to their products."""
    if attn_mask is not None and attn_mask.dim() != 2:
        raise ValueError("attn_mask: a mask for each head does not fit fewer heads; give one (length, length)")
    q, k, v = (_apart(layer, x) for x in _projected(layer, query, key, value))
    hidden = None if attn_mask is None else _added(attn_mask, q)
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, q)[..., None, None, :]
        hidden = padding if hidden is None else hidden + padding
    return q, k, v, hidden


def _shares(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    met = q * sqrt(1 / q.shape[-1]) @ k.transpose(-2, -1)
    return met.softmax(-1) if hidden is None else seen(met + hidden)


def seen(met: Tensor) -> Tensor:
    """The softmax of products of queries and keys (..., keys), of which masks hide some by minus infinity; of a query
    that sees no key nothing, as torch's own pass has it where nobody asks for its weights."""
    none = (met == -torch.inf).all(-1, keepdim=True)
    return met.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)


def _projected(layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    weight, bias = layer.in_proj_weight, layer.in_proj_bias
    if query is key is value:
        return F.linear(query, weight, bias).chunk(3, -1)
    shifts = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(*part) for part in zip((query, key, value), weight.chunk(3), shifts, strict=True))


def _apart(layer: MultiheadAttention, x: Tensor) -> Tensor:
    """(..., length, channels) as (..., heads, length, head_dim); the length comes first without batch_first."""
    heads = x.reshape(*x.shape[:-1], layer.num_heads, layer.head_dim)
    return heads.transpose(-3, -2) if layer.batch_first or x.dim() == 2 else heads.permute(1, 2, 0, 3)


def _together(layer: MultiheadAttention, x: Tensor) -> Tensor:
    heads = x.transpose(-3, -2) if layer.batch_first or x.dim() == 3 else x.permute(2, 0, 1, 3)
    return F.linear(heads.flatten(-2), layer.out_proj.weight, layer.out_proj.bias)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added, minus infinity where it hides."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)


class MasksAsWide(TorchFunctionMode):
    """Inside this context attention reads masks, as all else, in the dtype of its queries. A network that makes a mask
    makes it in float32, and beside queries in float64 some of torch's kernels read that as other numbers (torch 2.15 on
    processors without AVX-512), and say nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            like = args[0] if args else kwargs["query"]
            args = tuple(_wide(one, like) for one in args)
            kwargs = {name: _wide(one, like) for name, one in kwargs.items()}
        return func(*args, **kwargs)


def _wide(given: Any, like: Tensor) -> Any:
    return given.to(like.dtype) if isinstance(given, Tensor) and given.is_floating_point() else given


def resize(layer: MultiheadAttention) -> None:
    """Makes the layer's own record of its heads agree with its tensors."""
    wide = layer.out_proj.weight.shape[1]
    layer.num_heads = wide // layer.head_dim
    layer.out_proj.in_features = wide
    if wide != layer.embed_dim:
        layer.__class__ = FewerHeads
        layer._qkv_same_embed_dim = False  # torch's encoder layers then call it, and read no weights past it


def walk_through(model: Module) -> None:
    """Torch's encoders nest padded sequences for kernels of their own, which fewer heads do not have."""
    for owner in model.modules():
        if isinstance(owner, TransformerEncoder) and any(isinstance(part, FewerHeads) for part in owner.modules()):
            owner.use_nested_tensor = False
