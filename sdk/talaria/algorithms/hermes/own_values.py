"""What a device keeps of the shared tensors, and goes on from where the server's rule left them alone."""

from collections.abc import Collection

import numpy as np

from talaria.model import masks
from talaria.model.split import Part
from talaria.tensors import Tensors, alike, only, prefixed, under, without

OWN, SEEN = "own/", "seen/"
"""Prefixes of what a device keeps of the shared tensors: as it trained them last, and as they had come down."""

PRIVATE: dict[str, tuple[Part, ...]] = {
    "none": (),
    "adapters": ("adapters",),
    "head": ("head",),
    "adapters,head": ("adapters", "head"),
}
"""Which parts never leave the device, by name."""


def assembled(shared: Tensors, private: Tensors) -> Tensors:
    """What was downloaded and what stayed, as one state, all compact under the device's mask.

    Where the rule says by its bitmaps that it leaves coordinates alone, each that still has the value of the last
    download has its own value here: nobody averaged it since, however many rounds went by without this device. A tensor
    that has another form in a run that follows is as it was downloaded."""
    values, own = without(shared, masks.PREFIX), under(private, OWN)
    seen = under(private, SEEN) if len(values) < len(shared) else {}
    same = (key for key, before in seen.items() if key in values and values[key].shape == before.shape)
    kept = {key: np.where(values[key] == seen[key], own[key], values[key]) for key in same}
    return {**values, **kept, **_stayed(private)}


def as_trained(shared: Tensors, private: Tensors) -> Tensors:
    """The device's state as it trained it last; nothing where it has not trained yet, or not this model."""
    own = under(private, OWN)
    return {**own, **_stayed(private)} if alike(own, without(shared, masks.PREFIX)) else {}


def kept(state: Tensors, names: Collection[str], downloaded: Tensors) -> Tensors:
    """The private tensors after a round: what never travels, the shared ``names`` as trained in ``state``, and
    ``downloaded``, compact under the same mask (empty where the server's rule averages everything)."""
    stays = {key: value for key, value in state.items() if key not in names}
    return {**stays, **prefixed(only(state, names), OWN), **prefixed(downloaded, SEEN)}


def _stayed(private: Tensors) -> Tensors:
    """What never travels: BatchNorm statistics and private parts."""
    return without(without(private, OWN), SEEN)
