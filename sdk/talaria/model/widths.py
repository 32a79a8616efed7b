"""How wide a compact model is, and in which steps widths go."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from talaria.errors import ConfigError, ModelError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import Tensors


def widths_of(layout: ChannelLayout, state: Tensors) -> dict[str, int]:
    """The number of channels that each group of ``layout`` has in ``state``, a compact model's tensors.

    Raises :class:`~talaria.errors.ModelError` where a group's own tensors are missing or do not agree.
    """
    found: dict[str, int] = {}
    for key, axes in layout.axes.items():
        for dim, axis in enumerate(axes):
            if len(axis) != 1 or key not in state:
                continue
            ((group, repeat),) = axis
            size = state[key].shape[dim] if dim < state[key].ndim else 0
            if size % repeat or not 0 < size // repeat <= layout.sizes[group]:
                raise ModelError(f"widths: {key!r} has shape {state[key].shape}, which is not of this model")
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


def whole(layout: ChannelLayout, group: str, width: float, block: int) -> int:
    """``width`` channels of ``group`` rounded up to whole blocks of ``block`` positions (:func:`aligned`; a head that
    spans as many is a block), at most all."""
    return min(layout.sizes[group], aligned(width, layout.block(group, block)))


def aligned(width: float, block: int) -> int:
    """``width`` channels rounded up to whole blocks, at least one.

    Always up: a count that is rounded down can reach 0, and odd counts can run slower than the dense model.

    >>> aligned(9.6, 8), aligned(0, 8), aligned(5, 1)
    (16, 8, 5)
    """
    if block < 1:
        raise ConfigError(f"block={block} must be at least 1")
    return max(1, ceil(width / block - 1e-9)) * block
