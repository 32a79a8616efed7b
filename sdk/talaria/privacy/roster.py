"""The cohort of a secure round as each half sees it: who takes part, by keys that the fleet's authority vouches for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgpack
import numpy as np

from talaria.errors import ModelError, WireError
from talaria.model import masks
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.privacy import keystream
from talaria.privacy.blocks import Blocks, blocks
from talaria.privacy.coordinates import Coordinates, Places
from talaria.privacy.messages import Advert, Cohort, decode
from talaria.privacy.neighbours import graph
from talaria.privacy.terms import Terms
from talaria.tensors import Array
from talaria.wire.badge import Badge


@dataclass(frozen=True)
class Roster:
    """Adverts that were checked, by name in order; ``digest`` is that of the :class:`Cohort` that holds them."""

    terms: Terms
    coordinates: Coordinates = field(repr=False)
    digest: bytes
    adverts: Mapping[str, Advert] = field(repr=False)
    masks: Mapping[str, ChannelMask | None] = field(repr=False)
    neighbours: Mapping[str, tuple[str, ...]] = field(repr=False)

    @staticmethod
    def of(terms: Terms, coordinates: Coordinates, cohort: Cohort, authority: bytes) -> Roster:
        """The roster of ``cohort``; ``authority`` is the fleet's public key.

        Raises :class:`WireError` for a cohort of a wrong size, out of order, with a key that comes twice, or with an
        advert that :func:`read_advert` refuses.
        """
        found: dict[str, Advert] = {}
        kept = {}
        known: dict[bytes, ChannelMask | None] = {}  # classes of devices have one mask: it is read and digested once
        for data in cohort.adverts:
            advert, mask = read_advert(terms, coordinates, data, authority, known)
            if found and advert.device <= next(reversed(found)):
                raise WireError("secure: the cohort must be sorted, each device once")
            found[advert.device], kept[advert.device] = advert, mask
        size = len(found)
        if not terms.threshold <= size <= terms.most or 2 * terms.threshold <= size:
            raise WireError(
                f"secure: a cohort of {size} does not fit threshold={terms.threshold}, which must be more than half of "
                f"it, nor more than it, and most={terms.most}"
            )
        if len({key for one in found.values() for key in one.keys}) != 3 * size:
            raise WireError("secure: a key comes twice in the cohort")
        digest = cohort.digest()
        return Roster(terms, coordinates, digest, found, kept, graph(list(found), terms.degree, digest))

    def holders(self, owner: str) -> tuple[str, ...]:
        """Who holds shares of ``owner``'s secrets, itself among them; the first has share 1."""
        return tuple(sorted((*self.neighbours[owner], owner)))

    @property
    def own_threshold(self) -> int:
        """Shares that give a secret."""
        everybody = all(len(others) == len(self.adverts) - 1 for others in self.neighbours.values())
        return self.terms.threshold if everybody else self.terms.own_threshold

    def blocks(self, members: Sequence[str]) -> Blocks:
        """Who of ``members`` holds what."""
        return blocks(self.terms, self.coordinates, {name: self.masks[name] for name in members}, self.neighbours)

    def members_digest(self, members: Sequence[str]) -> bytes:
        """What stands for this cohort and those of it who shared their secrets."""
        return hashlib.sha256(b"talaria/members/1\x00" + msgpack.packb([self.digest, list(members)])).digest()


def read_advert(
    terms: Terms,
    coordinates: Coordinates,
    data: bytes,
    authority: bytes,
    known: dict[bytes, ChannelMask | None] | None = None,
) -> tuple[Advert, ChannelMask | None]:
    """The advert in ``data``, and its mask, of ``known`` ones where it came before. Raises :class:`WireError` where it
    is of another round, not signed by the device, or its identity not vouched for by ``authority``, and for a mask that
    does not fit."""
    advert = decode(data, 1 << 17)
    if not isinstance(advert, Advert) or advert.terms != terms.digest:
        raise WireError("secure: this is no advert for this round")
    if not vouched(terms.fleet, authority, data):
        raise WireError(
            f"secure: the keys of {advert.device!r} are not signed by it, or the fleet's authority did not enrol it"
        )
    read = {} if known is None else known
    if advert.mask not in read:
        read[advert.mask] = mask_of(coordinates.layout, advert.mask)
    return advert, read[advert.mask]


@lru_cache(maxsize=4096)
def vouched(fleet: str, authority: bytes, data: bytes) -> bool:
    """True where the advert in ``data`` is signed by its device, and its badge by ``authority``. Raises
    :class:`WireError` for a key that anybody can agree with: all others would stumble over it."""
    advert = decode(data, 1 << 17)
    for key in (advert.mask_key, advert.share_key) if isinstance(advert, Advert) else ():
        keystream.agreeing(bytes(32))(key)
    badge = isinstance(advert, Advert) and Badge(advert.identity, advert.badge)
    return (
        isinstance(advert, Advert)
        and isinstance(badge, Badge)
        and enrolled(badge, authority, fleet, advert.device)
        and advert.signed_by(advert.identity)
    )


@lru_cache(maxsize=4096)
def enrolled(badge: Badge, authority: bytes, fleet: str, device: str) -> bool:
    """Whether ``authority`` issued the badge: for as long as a device has its key, which is many rounds."""
    return badge.genuine(authority, fleet, device)


def packed(mask: ChannelMask | None) -> bytes:
    """A mask as an advert has it: :func:`talaria.model.masks.pack`, nothing for one that keeps all."""
    return b"" if mask is None or mask.is_full else masks.pack(mask)


def mask_of(layout: ChannelLayout | None, data: bytes) -> ChannelMask | None:
    """What :func:`packed` wrote. Raises :class:`WireError` where it does not fit ``layout``."""
    if not data:
        return None
    if layout is None:
        raise WireError(f"secure: a mask of {len(data)} bytes does not fit this model")
    try:
        return masks.unpack(layout, data)
    except ModelError as why:
        raise WireError(f"secure: a mask is refused: {why}") from None


def seed_key(seed: bytes, members: bytes) -> bytes:
    """The key of a device's own mask over one tier, from its seed; of ``members`` alone, so that a seed never masks
    what another cohort adds up."""
    return keystream.derived(seed, members, "own")


def pair_key(agreed: bytes, members: bytes, purpose: str, one: str, other: str) -> bytes:
    """The key of the mask that two devices share, for ``purpose`` (``values`` or ``side``)."""
    return keystream.derived(agreed, members, "pair", purpose, *sorted((one, other)))


def sign(total: Array, at: Places, mask: Array, *, plus: bool) -> None:
    """Add or subtract ``mask`` modulo the dtype, in place: everywhere, or at the places ``at``."""
    add = np.add if plus else np.subtract
    if at is None:
        add(total, mask, out=total)
    elif isinstance(at, tuple):
        start = 0
        for run in at:
            here, stop = total[run], start + run.stop - run.start
            add(here, mask[start:stop], out=here)
            start = stop
    else:
        total[at] = add(total[at], mask)


def cover(total: Array, at: Places, keys: Sequence[tuple[bytes, bool]], count: int) -> None:
    """Add the key streams of ``keys``, ``count`` numbers of each, to ``total`` at the places ``at``: they are added up
    first, and put in place once."""
    if at is None:
        keystream.mask(total, keys)
    else:
        sign(total, at, keystream.summed(keys, count, total.dtype), plus=True)


def taken(values: Array, at: Places) -> Array:
    """The values at the places ``at``, never a view."""
    if at is None:
        return values.copy()
    return np.concatenate([values[run] for run in at]) if isinstance(at, tuple) else values[at]
