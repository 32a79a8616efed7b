"""The order in which a model gives up its channels: a chain of widths, each within the one before, in whole blocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np

from talaria.errors import ModelError
from talaria.model.masks import ChannelLayout
from talaria.model.widths import whole
from talaria.planning.anatomy import Anatomy
from talaria.tensors import Array

Widths = dict[str, int]
UNCUT = "all channels are kept: the unpruned model keeps the budget"
"""Why a plan gives up none."""


def evenly(parts: Anatomy, block: int) -> list[Widths]:
    """Widths at falling shares of the channels, from all of them to one block per group, each different."""
    cuts: list[Widths] = []
    for percent in range(100, -1, -1):
        keep = max(percent / 100, 1e-9)
        widths = {g: whole(parts.layout, g, keep * n, block) for g, n in parts.layout.sizes.items()}
        if not cuts or widths != cuts[-1]:
            cuts.append(widths)
    return cuts


def by_worth(parts: Anatomy, block: int, worth: Mapping[str, Array], price: Callable[[Widths], float]) -> list[Widths]:
    """Widths that give up, one after another, the block of channels that is worth least for what it saves.

    ``worth[group]`` scores each channel, float64 (channels,), comparable between groups
    (:func:`talaria.model.sensitivity.worth`); ``price`` is what widths cost, such as milliseconds. The greedy answer to
    the knapsack of Shen et al. 2022 (arXiv:2110.10811). Raises :class:`~talaria.errors.ModelError` for other groups or
    sizes than the model's.
    """
    sizes = parts.layout.sizes
    odd = sorted(g for g in {*sizes, *worth} if g not in sizes or g not in worth or len(worth[g]) != sizes[g])
    if odd:
        raise ModelError(f"worth: {odd[:4]} do not fit the model's channel groups; score this very architecture")
    lost: dict[str, list[float]] = {g: [0.0, *np.sort(worth[g]).cumsum().tolist()] for g in sizes}
    now: Widths = dict(sizes)
    cuts = [dict(now)]

    def step(group: str, cost: float) -> float | None:
        """Worth per unit of cost that the group's next block gives up, or None where one block is left."""
        less = _below(now[group], parts.layout.block(group, block))
        if less is None:
            return None
        saved = cost - price({**now, group: less})
        given = lost[group][sizes[group] - less] - lost[group][sizes[group] - now[group]]
        return given / max(saved, 1e-12)

    cost = price(now)
    queue = [(ratio, g) for g in sorted(sizes) if (ratio := step(g, cost)) is not None]
    heapq.heapify(queue)
    while queue:
        _, group = heapq.heappop(queue)
        # What a block saves shrinks as its neighbours shrink, so an old ratio is too low: weigh it again.
        ratio = step(group, cost)
        if ratio is None:
            continue
        if queue and (ratio, group) > queue[0]:
            heapq.heappush(queue, (ratio, group))
            continue
        now[group] = _below(now[group], parts.layout.block(group, block)) or now[group]
        cost = price(now)
        cuts.append(dict(now))
        following = step(group, cost)
        if following is not None:
            heapq.heappush(queue, (following, group))
    return cuts


def bought_back(widths: Widths, layout: ChannelLayout, block: int, keeps: Callable[[Widths], bool]) -> Widths:
    """``widths`` with one block more in every group that it fits in, those that lost most first."""
    for group in sorted(widths, key=lambda g: (widths[g] / layout.sizes[g], g)):
        more = {**widths, group: whole(layout, group, widths[group] + 1, block)}
        if more[group] > widths[group] and keeps(more):
            widths = more
    return widths


def _below(width: int, block: int) -> int | None:
    """The next smaller whole number of blocks, or None."""
    less = (-(-width // block) - 1) * block
    return less if less > 0 else None
