"""The passes of torchvision's Swin transformer (Liu et al. 2021) in which the batch stays whole: windows stand in a
dimension behind it, where torchvision puts them into it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from talaria.programs.layers.base import refused


def attention(own: Any, x: Any) -> Any:
    """The pass of ShiftedWindowAttention: each place of x (N, height, width, channels) looks at those of its window."""
    if own.attention_dropout or own.dropout:
        raise refused("ShiftedWindowAttention", "drops values", "leave out attention_dropout and dropout")
    many, high, wide, channels = x.shape
    a, b = own.window_size
    x = F.pad(x, (0, 0, 0, -wide % b, 0, -high % a))
    tall, broad = high + -high % a, wide + -wide % b
    turns = zip(own.shift_size, (a, b), (tall, broad), strict=True)
    down, right = (0 if size >= whole else by for by, size, whole in turns)
    x = torch.roll(x, (-down, -right), (1, 2)) if down or right else x
    rows, columns = tall // a, broad // b
    x = x.reshape(many, rows, a, columns, b, channels).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(many, rows * columns, a * b, channels)
    each = channels // own.num_heads
    q, k, v = own.qkv(x).reshape(many, rows * columns, a * b, 3, own.num_heads, each).permute(3, 0, 1, 4, 2, 5)
    bias = own.relative_position_bias_table[own.relative_position_index].view(a * b, a * b, -1).permute(2, 0, 1)
    met = q * each**-0.5 @ k.transpose(-2, -1) + bias
    if down or right:
        met = met + _apart(tall, broad, (a, b), (down, right))
    x = own.proj((met.softmax(-1) @ v).transpose(2, 3).reshape(many, rows * columns, a * b, channels))
    x = x.reshape(many, rows, columns, a, b, channels).permute(0, 1, 3, 2, 4, 5).reshape(many, tall, broad, channels)
    x = torch.roll(x, (down, right), (1, 2)) if down or right else x
    return x[:, :high, :wide]


def _apart(tall: int, broad: int, window: tuple[int, int], shift: tuple[int, int]) -> torch.Tensor:
    """What is added to products of places (windows, 1, places, places) that only the turning brought together."""
    sides = []
    for whole, size, by in zip((tall, broad), window, shift, strict=True):
        at = torch.arange(whole)
        sides.append((at >= whole - size).int() + (at >= whole - by).int() if by else (at >= whole - size).int())
    part = sides[0][:, None] * 3 + sides[1][None]
    part = part.view(tall // window[0], window[0], broad // window[1], window[1])
    part = part.permute(0, 2, 1, 3).reshape(-1, 1, window[0] * window[1])
    return (part.unsqueeze(-1) != part.unsqueeze(-2)).float() * -100


def merging(own: Any, x: Any) -> Any:
    """The pass of PatchMerging: four neighbours become one place."""
    high, wide = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, wide % 2, 0, high % 2))
    parts = [x[:, down::2, right::2] for right in range(2) for down in range(2)]
    return own.reduction(own.norm(torch.cat(parts, -1)))
