"""Channels by the size of their weights, without torch: what a plan's widths keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from talaria.errors import ModelError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import Array, Tensors


def importance(state: Tensors, parameters: Collection[str], layout: ChannelLayout) -> dict[str, Array]:
    """A score per channel of each group of the unpruned model, float64 (channels,): what
    :func:`talaria.model.pruning.importance` gives with ``kind="l1"``, up to rounding.

    ``parameters`` are the keys of ``state`` that training may change. Raises :class:`~talaria.errors.ModelError` for a
    state of another model.
    """
    members: dict[str, list[Array]] = {group: [] for group in layout.sizes}
    for key, axes in layout.axes.items():
        if key not in parameters or state[key].ndim < 2:
            continue
        value = np.abs(state[key].astype(np.float64))
        for dim, axis in enumerate(axes):
            line, at = value.sum(tuple(d for d in range(value.ndim) if d != dim)), 0
            want = sum(layout.sizes[group] * repeat for group, repeat in axis)
            if axis and len(line) != want:
                raise ModelError(f"importance: {key!r} has {len(line)} channels in dimension {dim}, not {want}")
            for group, repeat in axis:
                count = layout.sizes[group]
                score = line[at : at + count * repeat].reshape(count, repeat).sum(1)
                at += count * repeat
                mean = score.mean()
                members[group].append(score / mean if mean > 0 else score)
    return {g: np.mean(members[g], axis=0) if members[g] else np.zeros(n) for g, n in layout.sizes.items()}


def kept(scores: Mapping[str, Array], layout: ChannelLayout, widths: Mapping[str, int]) -> ChannelMask:
    """The mask that keeps the ``widths`` best channels of each group (a group that is not named: all); between equal
    scores the lower index."""
    odd = sorted(set(widths) - set(layout.sizes))
    if odd:
        raise ModelError(f"pruning: groups {odd[:4]} do not match the model's, which are {sorted(layout.sizes)[:8]}")
    chosen = {}
    for group, size in layout.sizes.items():
        score = scores[group]
        if np.isnan(score).any():
            raise ModelError(f"pruning: scores of {group!r} hold NaN; the weights are damaged")
        best = np.argsort(-score, kind="stable")[: min(size, max(1, widths.get(group, size)))]
        chosen[group] = tuple(sorted(best.tolist()))
    return ChannelMask(layout, chosen)
