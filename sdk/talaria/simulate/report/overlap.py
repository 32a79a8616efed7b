"""How much the sub-models of different devices have in common."""

from collections.abc import Mapping
from typing import Any

from talaria.types import ChannelMask


def mask_overlap(masks: Mapping[str, ChannelMask]) -> dict[str, Any]:
    """The ``overlap`` entry of a summary: for each pair of masks the channels that both keep, of those either keeps.

    The Jaccard index over all channel groups together: 1.0 for equal masks, 0.0 for disjoint ones.
    """
    kept = {name: {(g, c) for g, channels in mask.kept.items() for c in channels} for name, mask in masks.items()}
    return {
        "names": list(kept),
        "matrix": [[len(a & b) / len(a | b) for b in kept.values()] for a in kept.values()],
    }
