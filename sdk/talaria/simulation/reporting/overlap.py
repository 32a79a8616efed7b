"""How much the sub-models of different devices have in common."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from talaria.model.masks import ChannelMask
from talaria.tensors import Array


def mask_overlap(masks: Mapping[str, ChannelMask]) -> dict[str, Any]:
    """The ``overlap`` entry of a summary: for each pair of masks the channels that both keep, of those either keeps.

    The Jaccard index over all channel groups together: 1.0 for equal masks, 0.0 for disjoint ones.
    """
    kept = np.stack([_bits(mask) for mask in masks.values()]) if masks else np.zeros((0, 0))
    both = kept @ kept.T
    sizes = kept.sum(1)
    either = sizes[:, None] + sizes - both
    return {"names": list(masks), "matrix": np.divide(both, either, out=np.ones_like(both), where=either > 0).tolist()}


def pair_overlap(masks: Mapping[str, ChannelMask]) -> dict[str, float] | None:
    """``mean``, ``least`` and ``most`` of :func:`mask_overlap` over all pairs of two; None where there is no pair."""
    if len(masks) < 2:
        return None
    matrix = np.array(mask_overlap(masks)["matrix"])
    pairs = matrix[np.triu_indices(len(masks), 1)]
    return {"mean": float(pairs.mean()), "least": float(pairs.min()), "most": float(pairs.max())}


def _bits(mask: ChannelMask) -> Array:
    """float64 (channels of all groups,): 1 where kept."""
    bits = []
    for group, size in sorted(mask.layout.sizes.items()):
        line = np.zeros(size)
        line[list(mask.kept[group])] = 1
        bits.append(line)
    return np.concatenate(bits) if bits else np.zeros(0)
