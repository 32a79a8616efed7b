"""How wide a compact model is, told from its tensors alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from talaria.errors import ModelError
from talaria.model.masks import ChannelLayout, ChannelMask


def widths_of(layout: ChannelLayout, state: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of channels that each group of ``layout`` has in ``state``, a compact model's tensors.

    Raises :class:`~talaria.errors.ModelError` where a group's own tensors are missing or do not agree.
    """
    found: dict[str, int] = {}
    for key, axes in layout.axes.items():
        for dim, axis in enumerate(axes):
            if len(axis) != 1 or key not in state:
                continue
            ((group, repeat),) = axis
            size = state[key].shape[dim] if dim < state[key].dim() else 0
            if size % repeat or not 0 < size // repeat <= layout.sizes[group]:
                raise ModelError(f"widths: {key!r} has shape {tuple(state[key].shape)}, which is not of this model")
            if found.setdefault(group, size // repeat) != size // repeat:
                raise ModelError(f"widths: tensors of group {group!r} have different widths, {key!r} among them")
    missing = sorted(set(layout.sizes) - set(found))
    if missing:
        raise ModelError(f"widths: no tensor tells the width of {missing[:4]}; these weights are of another model")
    return {group: found[group] for group in layout.sizes}


def first_of(layout: ChannelLayout, widths: Mapping[str, int]) -> ChannelMask:
    """The mask that keeps the first ``widths[group]`` channels: a model under it has the structure of any other of
    these widths."""
    return ChannelMask(layout, {g: tuple(range(widths.get(g, n))) for g, n in layout.sizes.items()})
