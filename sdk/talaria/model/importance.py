"""Which channels stay: scores of weights, on every engine alike, and a choice that only ever shrinks a mask."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import numpy as np

from talaria.errors import ConfigError, ModelError, some_of
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.widths import whole
from talaria.tensors import Array, Tensors

Kind = Literal["l1", "bn", "taylor"]


def importance(
    state: Tensors,
    parameters: Collection[str],
    layout: ChannelLayout,
    kind: Kind = "l1",
    mask: ChannelMask | None = None,
    gradients: Tensors | None = None,
) -> dict[str, Array]:
    """A score per channel of each group: float64 (channels of the unpruned model,), higher is more important.

    ``l1`` is the mean over all weights coupled in the group (rows of those that write the channel, columns of those
    that read it) of the channel's L1 norm, each divided by its mean over the group's channels. ``taylor`` takes
    ``|weight * gradient|`` in its place (first-order Taylor, Molchanov et al. 2019, summed over weights). ``bn`` is the
    mean ``|gamma|`` of the group's BatchNorm layers (Liu et al. 2017), or other norms with a shift beside it; a group
    without one falls back to ``l1``.

    ``parameters`` are the keys of ``state`` that training may change. With ``mask`` the state is compact and channels
    that are gone score ``-inf``. Raises :class:`~talaria.errors.ModelError` for a state that does not fit, or whose
    gradients are missing.
    """
    if kind not in ("l1", "bn", "taylor"):
        raise ConfigError(f"importance: kind={kind!r} is unknown; use 'l1', 'bn' or 'taylor'")
    now = mask if mask is not None else layout.full()
    members: dict[str, list[Array]] = {group: [] for group in layout.sizes}
    gammas: dict[str, list[Array]] = {group: [] for group in layout.sizes}
    for key, axes in layout.axes.items():
        if key not in parameters or (state[key].ndim < 2 and not (kind == "bn" and _scales(key, state))):
            continue
        value = np.abs(state[key].astype(np.float64))
        if value.ndim < 2:
            for group, score in _fold(key, value, 0, layout, now):
                gammas[group].append(score)
            continue
        if kind == "taylor":
            if gradients is None or key not in gradients:
                raise ModelError(f"importance: {key!r} has no gradient; run a backward pass first or use kind='l1'")
            value = value * np.abs(gradients[key].astype(np.float64))
        for dim in (d for d, axis in enumerate(axes) if axis):
            for group, score in _fold(key, value, dim, layout, now):
                mean = score.mean()
                members[group].append(score / mean if mean > 0 else score)
    out = {}
    for group, size in layout.sizes.items():
        parts = gammas[group] or members[group]
        out[group] = np.full(size, -np.inf)
        out[group][list(now.kept[group])] = np.mean(parts, axis=0) if parts else 0.0
    return out


def _scales(key: str, state: Tensors) -> bool:
    """Whether ``key``, of one dimension, is a norm's gamma, which has a beta beside it: PReLU's slopes have none."""
    return key.endswith("weight") and key.removesuffix("weight") + "bias" in state


def _fold(key: str, value: Array, dim: int, layout: ChannelLayout, mask: ChannelMask) -> Iterator[tuple[str, Array]]:
    line = value.sum(tuple(d for d in range(value.ndim) if d != dim))
    axis = layout.axes[key][dim]
    want = sum(len(mask.kept[g]) * r for g, r in axis)
    if len(line) != want:
        raise ModelError(f"importance: {key!r} has {len(line)} channels in dimension {dim}, the mask keeps {want}")
    at = 0
    for group, repeat in axis:
        count = len(mask.kept[group])
        yield group, line[at : at + count * repeat].reshape(count, repeat).sum(1)
        at += count * repeat


def widths(mask: ChannelMask, keep: float, block: int = 8) -> dict[str, int]:
    """Channels per group when the share ``keep`` of those in ``mask`` stays, in whole blocks, never more than now."""
    if not 0 < keep <= 1:
        raise ConfigError(f"pruning: keep={keep} must be above 0 and at most 1: the share of channels that stays")
    return {g: min(len(k), whole(mask.layout, g, keep * len(k), block)) for g, k in mask.kept.items()}


def choose(
    scores: Mapping[str, Array],
    mask: ChannelMask,
    widths: Mapping[str, int] | None = None,
    keep: float | None = None,
    block: int = 8,
) -> ChannelMask:
    """The mask within ``mask`` that keeps the best channels of each group; between equal scores the lower index.

    Give either ``widths`` (channels to keep per group; groups not named stay, and none grows) or ``keep``, the share
    of the channels in ``mask`` that stays. Either is rounded up to whole blocks of ``block`` channels, never beyond
    what ``mask`` holds.
    """
    if (widths is None) == (keep is None):
        raise ConfigError("pruning: give either widths or keep, the share of channels that stays")
    if keep is not None:
        wanted: Mapping[str, int] = _widths(mask, keep, block)
    else:
        wanted = widths or {}
    odd = sorted(set(wanted) - set(mask.kept)) + sorted(set(mask.kept) - set(scores))
    if odd:
        known = some_of(sorted(mask.kept), 8)
        raise ModelError(f"pruning: groups {odd[:4]} do not match the model's, which are {known}")
    kept = {}
    for group, now in mask.kept.items():
        want = min(len(now), whole(mask.layout, group, wanted.get(group, len(now)), block))
        score = scores[group]
        if score.shape != (mask.layout.sizes[group],):
            raise ModelError(
                f"pruning: scores of {group!r} have shape {score.shape}, need ({mask.layout.sizes[group]},)"
            )
        here = score[list(now)]
        if np.isnan(here).any():
            raise ModelError(f"pruning: scores of {group!r} hold NaN; the weights or gradients are damaged")
        best = np.argsort(-here, kind="stable")[:want]
        kept[group] = tuple(sorted(now[i] for i in best.tolist()))
    return ChannelMask(mask.layout, kept)


_widths = widths
