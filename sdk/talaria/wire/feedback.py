"""Error feedback: what a coarse codec leaves out of one update is added to the next (Seide et al. 2014; Karimireddy et
al. 2019, EF-SGD). It is private state: it never travels, and belongs to the device's mask.

Statistics travel raw with every codec: an update says what they are now, and there is nothing to add up.
"""

from __future__ import annotations

import numpy as np

from talaria.aggregate.validation import is_reserved, is_statistic
from talaria.errors import ConfigError
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.tensors import Tensors, is_float, only
from talaria.types import Update
from talaria.wire import strict_safetensors
from talaria.wire.tensor_codecs import Codec, TensorSpec, from_planes, to_planes

PREFIX = "left/"
"""Where a device keeps what its last update left out, among its private tensors."""


def is_coarse(codec: str) -> bool:
    """Whether ``codec`` leaves out so much that it must be fed back: int8 and top-k do; fp16 and bf16 round a
    difference by less than a hundredth of itself."""
    return Codec.parse(codec).name in ("int8", "topk")


def compensate(update: Update, left: Tensors) -> Update:
    """``update`` plus what the codec left out last time; names that ``left`` lacks start from zero.

    Raises :class:`~talaria.errors.ConfigError` unless the update holds differences.
    """
    if update.kind != "delta":
        raise ConfigError("error feedback adds up changes; it needs kind='delta', this update has 'value'")
    fresh = {k: np.asarray(v + left[k].astype(v.dtype)) for k, v in update.tensors.items() if k in left}
    return update.but(tensors={**update.tensors, **fresh})


def remainder(update: Update, codec: str) -> Tensors:
    """What ``codec`` leaves out of the trained tensors of ``update``: keep it for :func:`compensate`."""
    how = Codec.parse(codec)
    kept: Tensors = {}
    for name, value in update.tensors.items():
        if not is_float(value) or is_reserved(name) or is_statistic(name):
            continue
        entries, _ = strict_safetensors.unpack(strict_safetensors.pack(to_planes(name, value, how)), most=2)
        sent = from_planes(name, TensorSpec(tuple(value.shape), value.dtype), entries, float("inf"))
        kept[name] = np.asarray(value - sent)
    return kept


def within(left: Tensors, old: ChannelMask | None, new: ChannelMask | None, shared: Tensors) -> Tensors:
    """``left`` under mask ``old`` as it is under ``new``; channels that were not kept before start from zero.

    ``shared`` is the dense shared state, for its shapes."""
    left = only(left, [k for k in left if k in shared])
    if not left or old == new or (old is None and new is None):
        return left
    zeros = {k: np.zeros_like(shared[k]) for k in left}
    dense = left if old is None else masks.scatter(left, old, zeros)
    return dense if new is None else masks.gather(dense, new)
