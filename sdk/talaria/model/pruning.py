"""Which channels stay: scores, and a choice that only ever shrinks a mask.

The parts of pruning meet here: :func:`layout` finds the channel groups, :func:`importance` scores them,
:func:`choose` picks, :func:`compact` removes physically, :func:`expand` goes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from talaria.errors import ConfigError, ModelError, some_of
from talaria.model.compaction import compact, expand
from talaria.model.dependency_groups import NORMS
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.prunability import Survey, layout, survey
from talaria.model.state import array_of
from talaria.model.widths import aligned
from talaria.tensors import Array, Tensors

__all__ = ["Survey", "aligned", "choose", "compact", "expand", "importance", "layout", "survey", "widths"]

Kind = Literal["l1", "bn", "taylor"]


def importance(
    model: Module,
    layout: ChannelLayout,
    kind: Kind = "l1",
    mask: ChannelMask | None = None,
    gradients: Tensors | None = None,
) -> dict[str, Array]:
    """A score per channel of each group: float64 (channels of the unpruned model,), higher is more important.

    ``l1`` is the mean over all weights coupled in the group (rows of those that write the channel, columns of those
    that read it) of the channel's L1 norm, each divided by its mean over the group's channels. ``taylor`` takes
    ``|weight * gradient|`` in its place (first-order Taylor, Molchanov et al. 2019, summed over weights), from
    ``gradients`` by name or from ``.grad``. ``bn`` is the mean ``|gamma|`` of the group's BatchNorm layers (Liu et
    al. 2017); a group without one falls back to ``l1``.

    With ``mask`` the model is compact and channels that are gone score ``-inf``. Raises
    :class:`~talaria.errors.ModelError` for a model that does not fit, or whose gradients are missing.
    """
    if kind not in ("l1", "bn", "taylor"):
        raise ConfigError(f"importance: kind={kind!r} is unknown; use 'l1', 'bn' or 'taylor'")
    now = mask if mask is not None else layout.full()
    norms = {f"{name}.weight" if name else "weight" for name, m in model.named_modules() if isinstance(m, NORMS)}
    members: dict[str, list[Tensor]] = {g: [] for g in layout.sizes}
    gammas: dict[str, list[Tensor]] = {g: [] for g in layout.sizes}
    parameters = dict(model.named_parameters())
    for key, axes in layout.axes.items():
        weight = parameters.get(key)
        if weight is None or (weight.dim() < 2 and (kind != "bn" or key not in norms)):
            continue
        value = weight.detach().double().abs()
        if weight.dim() < 2:
            for group, score in _fold(key, value, 0, layout, now):
                gammas[group].append(score)
            continue
        if kind == "taylor":
            slope = gradients.get(key) if gradients is not None else weight.grad
            if slope is None:
                raise ModelError(f"importance: {key!r} has no gradient; run a backward pass first or use kind='l1'")
            value = value * torch.as_tensor(slope).detach().double().abs()
        for dim in (d for d, axis in enumerate(axes) if axis):
            for group, score in _fold(key, value, dim, layout, now):
                mean = score.mean()
                members[group].append(score / mean if float(mean) > 0 else score)
    out = {}
    for group, size in layout.sizes.items():
        parts = gammas[group] or members[group]
        scores = torch.full((size,), -torch.inf, dtype=torch.float64)
        scores[list(now.kept[group])] = (
            torch.stack(parts).mean(0) if parts else torch.zeros(len(now.kept[group])).double()
        )
        out[group] = array_of(scores)
    return out


def _fold(key: str, value: Tensor, dim: int, layout: ChannelLayout, mask: ChannelMask) -> Iterator[tuple[str, Tensor]]:
    line = value.sum([d for d in range(value.dim()) if d != dim]) if value.dim() > 1 else value
    axis = layout.axes[key][dim]
    want = sum(len(mask.kept[g]) * r for g, r in axis)
    if len(line) != want:
        raise ModelError(f"importance: {key!r} has {len(line)} channels in dimension {dim}, the mask keeps {want}")
    at = 0
    for group, repeat in axis:
        count = len(mask.kept[group])
        yield group, line[at : at + count * repeat].view(count, repeat).sum(1)
        at += count * repeat


def widths(mask: ChannelMask, keep: float, block: int = 8) -> dict[str, int]:
    """Channels per group when the share ``keep`` of those in ``mask`` stays, in whole blocks, never more than now."""
    if not 0 < keep <= 1:
        raise ConfigError(f"pruning: keep={keep} must be above 0 and at most 1: the share of channels that stays")
    return {g: min(len(k), aligned(keep * len(k), block)) for g, k in mask.kept.items()}


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
        want = min(len(now), aligned(wanted.get(group, len(now)), block))
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
