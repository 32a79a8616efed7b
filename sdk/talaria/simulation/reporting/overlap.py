"""How much the sub-models of different devices have in common."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from talaria.model.masks import ChannelMask
from talaria.tensors import Array

ROWS = 256
"""So many masks are compared with all others at once: the pairs of thousands take gigabytes."""


def mask_overlap(masks: Mapping[str, ChannelMask]) -> dict[str, Any]:
    """The ``overlap`` entry of a summary: for each pair of masks the channels that both keep, of those either keeps.

    The Jaccard index over all channel groups together: 1.0 for equal masks, 0.0 for disjoint ones.
    """
    kept = np.stack([_bits(mask) for mask in masks.values()]) if masks else np.zeros((0, 0))
    return {"names": list(masks), "matrix": _shares(kept, kept).tolist()}


def pair_overlap(masks: Mapping[str, ChannelMask]) -> dict[str, float] | None:
    """``mean``, ``least`` and ``most`` of :func:`mask_overlap` over all pairs of two; None where there is no pair."""
    if len(masks) < 2:
        return None
    kept = np.stack([_bits(mask) for mask in masks.values()])
    total, least, most = 0.0, 1.0, 0.0
    for start in range(0, len(kept) - 1, ROWS):
        rows = _shares(kept[start : start + ROWS], kept[start:])
        pairs = rows[np.triu_indices(len(rows), 1, rows.shape[1])]
        total += float(pairs.sum())
        least, most = min(least, float(pairs.min())), max(most, float(pairs.max()))
    return {"mean": total / (len(kept) * (len(kept) - 1) / 2), "least": least, "most": most}


def _shares(some: Array, others: Array) -> Array:
    """float64: of each of ``some`` bits and each of ``others`` those that both have, of those that either has."""
    both = some @ others.T
    either = some.sum(1)[:, None] + others.sum(1) - both
    shares: Array = np.divide(both, either, out=np.ones_like(both), where=either > 0)
    return shares


def _bits(mask: ChannelMask) -> Array:
    """float64 (channels of all groups,): 1 where kept."""
    bits = []
    for group, size in sorted(mask.layout.sizes.items()):
        line = np.zeros(size)
        line[list(mask.kept[group])] = 1
        bits.append(line)
    return np.concatenate(bits) if bits else np.zeros(0)
