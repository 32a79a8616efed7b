"""Who holds what, and what may open: every half comes to the same from the same masks.

A block is the rows that the same devices hold. A block that fewer than ``holders`` devices of the cohort hold is not
sent at all. The others are cut into tiers, by how many hold them; each device masks each tier with a seed of its own.
A tier opens where, among those who survived, enough hold each of its blocks: then all its blocks are sums of at least
so many devices. Otherwise its seeds stay unknown, and the tier is never read.

"Hold" counts those who share masks with each other: with neighbours instead of all, the smallest connected part of a
block's holders, since such parts open one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from talaria.model.masks import ChannelMask, key_of
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.neighbours import bitsets, smallest_part
from talaria.privacy.terms import Terms
from talaria.tensors import Array


@dataclass(frozen=True)
class Blocks:
    """Who of ``members`` (sorted) holds which rows.

    ``kept[c]`` (bool, rows) are the rows of mask class ``c``, ``classes[i]`` the class of member ``i``. ``tier`` is
    int8 (rows,), -1 for a row that is not sent. ``pattern`` (rows,) numbers the sets of holders ``holders`` (bits).
    """

    terms: Terms
    members: tuple[str, ...]
    classes: tuple[int, ...]
    kept: Array = field(repr=False)
    edges: tuple[int, ...] = field(repr=False)
    pattern: Array = field(repr=False)
    holders: tuple[int, ...] = field(repr=False)
    tier: Array = field(repr=False)

    @property
    def sent(self) -> Array:
        """bool (rows,): the rows that travel."""
        return np.asarray(self.tier >= 0)

    @cached_property
    def class_of(self) -> dict[str, int]:
        """By member, its mask class."""
        return dict(zip(self.members, self.classes, strict=True))

    def of(self, member: str) -> Array:
        """bool (rows,): the rows that ``member`` sends."""
        return np.asarray(self.kept[self.class_of[member]] & self.sent)

    def open_tiers(self, survivors: Collection[str]) -> tuple[int, ...]:
        """The tiers that may open where these survived; ``terms.tiers`` stands for weights and metrics."""
        alive = sum(1 << at for at, name in enumerate(self.members) if name in survivors)
        needed, tiers = self.terms.needed, []
        if len(survivors) < self.terms.threshold or smallest_part(alive, self.edges) < needed:
            return ()
        for tier in range(self.terms.tiers):
            found = np.unique(self.pattern[self.tier == tier]).tolist()
            if found and all(smallest_part(self.holders[p] & alive, self.edges) >= needed for p in found):
                tiers.append(tier)
        return (*tiers, self.terms.tiers)

    def left(self, survivors: Collection[str]) -> Array:
        """int64 (rows,): how many of ``survivors`` hold each row."""
        alive = sum(1 << at for at, name in enumerate(self.members) if name in survivors)
        counts = np.array([(bits & alive).bit_count() for bits in self.holders], np.int64)
        return np.asarray(counts[self.pattern])


def blocks(
    terms: Terms,
    coordinates: Coordinates,
    masks: Mapping[str, ChannelMask | None],
    edges: Mapping[str, Sequence[str]],
) -> Blocks:
    """What the devices ``masks`` (by name) hold, where ``edges`` are each one's neighbours."""
    members = tuple(sorted(masks))
    distinct = {id(one): one for one in masks.values()}  # devices of a class share one
    of_mask = {at: key_of(one) for at, one in distinct.items()}
    keys = [of_mask[id(masks[name])] for name in members]
    order = sorted(set(keys))
    by_key = dict(zip(keys, members, strict=True))
    kept = np.stack([coordinates.rows(masks[by_key[key]]) for key in order])
    classes = tuple(order.index(key) for key in keys)
    of_class = [sum(1 << i for i, c in enumerate(classes) if c == at) for at in range(len(order))]
    first, pattern = _patterns(kept)
    holders = tuple(sum(of_class[c] for c in np.flatnonzero(kept[:, row]).tolist()) for row in first.tolist())
    bits = tuple(bitsets(edges, members))
    size = np.array([smallest_part(one, bits) for one in holders], np.int64)
    tier = _tiers(terms, size, len(members))[pattern]
    return Blocks(terms, members, classes, kept, bits, pattern, holders, tier)


def _patterns(kept: Array) -> tuple[Array, Array]:
    """The distinct columns of ``kept`` (bool, classes x rows): where each stands first, and which one each row has."""
    packed = np.ascontiguousarray(np.packbits(kept, axis=0).T)
    width = packed.shape[1]
    seen = packed[:, 0] if width == 1 else packed.view(np.dtype((np.void, width)))[:, 0]  # bytes are sorted sooner
    _, first, pattern = np.unique(seen, return_index=True, return_inverse=True)
    return first, pattern


def _tiers(terms: Terms, size: Array, members: int) -> Array:
    """The tier of blocks with ``size`` holders: the most in tier 0, -1 below what is needed."""
    steps = members - terms.needed + 1
    tier = (members - size) * min(terms.tiers, steps) // max(1, steps)
    return np.asarray(np.where(size < terms.needed, -1, tier)).astype(np.int8)
