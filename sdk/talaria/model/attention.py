"""Whole heads of torch's attention as the survey sees them, and attention that has fewer than it was made with.

A head's rows of queries, keys and values and its columns of the output go at once. With all of these at zero a head
adds nothing: whatever it attends to, its values are 0.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention, TransformerEncoder
from torch.nn import functional as F

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
        if attn_mask is not None and attn_mask.dim() != 2:
            raise ValueError("attn_mask: a mask for each head does not fit fewer heads; give one (length, length)")
        q, k, v = (self._apart(x) for x in self._projected(query, key, value))
        hidden = None if attn_mask is None else _added(attn_mask, q)
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, q)[..., None, None, :]
            hidden = padding if hidden is None else hidden + padding
        dropped = self.dropout if self.training else 0.0
        if not need_weights:
            return self._together(F.scaled_dot_product_attention(q, k, v, hidden, dropped)), None
        met = q * sqrt(1 / self.head_dim) @ k.transpose(-2, -1)
        share = F.dropout((met if hidden is None else met + hidden).softmax(-1), dropped)
        return self._together(share @ v), share.mean(-3) if average_attn_weights else share

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if query is key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        shifts = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(*part) for part in zip((query, key, value), weight.chunk(3), shifts, strict=True))

    def _apart(self, x: Tensor) -> Tensor:
        """(..., length, channels) as (..., heads, length, head_dim); the length comes first without batch_first."""
        heads = x.reshape(*x.shape[:-1], self.num_heads, self.head_dim)
        return heads.transpose(-3, -2) if self.batch_first or x.dim() == 2 else heads.permute(1, 2, 0, 3)

    def _together(self, x: Tensor) -> Tensor:
        heads = x.transpose(-3, -2) if self.batch_first or x.dim() == 3 else x.permute(2, 0, 1, 3)
        return F.linear(heads.flatten(-2), self.out_proj.weight, self.out_proj.bias)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added, minus infinity where it hides."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


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
