"""How much the sub-models of different devices have in common."""

from collections.abc import Mapping
from typing import Any

import torch

from talaria.model.masks import ChannelMask


def mask_overlap(masks: Mapping[str, ChannelMask]) -> dict[str, Any]:
    """The ``overlap`` entry of a summary: for each pair of masks the channels that both keep, of those either keeps.

    The Jaccard index over all channel groups together: 1.0 for equal masks, 0.0 for disjoint ones.
    """
    kept = torch.stack([_bits(mask) for mask in masks.values()]) if masks else torch.zeros(0, 0)
    both = kept @ kept.T
    sizes = kept.sum(1)
    either = sizes[:, None] + sizes - both
    return {"names": list(masks), "matrix": torch.where(either > 0, both / either, 1.0).tolist()}


def pair_overlap(masks: Mapping[str, ChannelMask]) -> dict[str, float] | None:
    """``mean``, ``least`` and ``most`` of :func:`mask_overlap` over all pairs of two; None where there is no pair."""
    if len(masks) < 2:
        return None
    matrix = torch.tensor(mask_overlap(masks)["matrix"], dtype=torch.float64)
    pairs = matrix[tuple(torch.triu_indices(len(masks), len(masks), 1))]
    return {"mean": float(pairs.mean()), "least": float(pairs.min()), "most": float(pairs.max())}


def _bits(mask: ChannelMask) -> torch.Tensor:
    """float64 (channels of all groups,): 1 where kept."""
    bits = []
    for group, size in sorted(mask.layout.sizes.items()):
        line = torch.zeros(size, dtype=torch.float64)
        line[list(mask.kept[group])] = 1
        bits.append(line)
    return torch.cat(bits) if bits else torch.zeros(0, dtype=torch.float64)
