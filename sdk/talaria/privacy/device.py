"""A device's half of secure aggregation: a state machine that decides and never sends.

Keep :meth:`DeviceHalf.save` on disk before what :meth:`DeviceHalf.receive` returns is sent. A device that was killed
then goes on from there and says the same again, to the byte: everything that it draws comes from one root secret, its
contribution is fixed from the beginning, and to each question of a round it has one answer. A device that lost its
state begins anew, with new keys; its masks are then others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import msgpack
import numpy as np

from talaria.errors import AggregationError, ConfigError, StateError, WireError
from talaria.foreign import shown
from talaria.model.masks import ChannelMask
from talaria.privacy import keystream, shamir
from talaria.privacy.blocks import Blocks
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.messages import (
    Advert,
    Agreed,
    Agreement,
    Cohort,
    Delivery,
    Masked,
    Message,
    Opening,
    Shares,
    Survivors,
    decode,
)
from talaria.privacy.roster import Roster, cover, packed, pair_key, seed_key, taken
from talaria.privacy.terms import Terms
from talaria.tensors import Array, Tensors
from talaria.wire.badge import Badge
from talaria.wire.signing import Signer

FORMAT = 1
LEAST = 3
"""Devices that a device wants beside each other in every sum, itself among them, unless its owner says otherwise."""


@dataclass(frozen=True)
class Identity:
    """Who a device is in its fleet: name, signing key, badge, and the key of the authority that vouches for others."""

    device: str
    signer: Signer
    badge: Badge
    authority: bytes


@dataclass
class _State:
    """What must outlive a kill; secret."""

    root: bytes
    mask: bytes
    values: bytes
    weight: int
    metrics: list[int]
    cohort: bytes = b""
    shares: bytes = b""
    members: list[str] = field(default_factory=list)
    received: dict[str, bytes] = field(default_factory=dict)
    masked: bytes = b""
    survivors: list[str] = field(default_factory=list)
    agreed: bytes = b""
    opening: bytes = b""


class DeviceHalf:
    """One device in one attempt at one round. See the module for what its owner must do."""

    def __init__(self, terms: Terms, coordinates: Coordinates, identity: Identity, state: _State) -> None:
        self.terms, self.coordinates, self.identity, self._state = terms, coordinates, identity, state

    @classmethod
    def begin(
        cls,
        terms: Terms,
        coordinates: Coordinates,
        identity: Identity,
        tensors: Tensors,
        *,
        mask: ChannelMask | None = None,
        weight: float = 1.0,
        metrics: Mapping[str, float] | None = None,
        least: int = LEAST,
    ) -> DeviceHalf:
        """A device that contributes ``tensors`` (differences, compact under ``mask``) with ``weight``.

        Values beyond the bounds are cut. Raises :class:`ConfigError` where the terms ask for less than the device's
        owner wants (``least`` devices in each sum), or are for other coordinates, and :class:`AggregationError` for
        tensors that do not fit, a weight out of bounds, and metrics that are not those of the terms.
        """
        require_terms(terms, coordinates, least)
        return cls(terms, coordinates, identity, begun(terms, coordinates, tensors, mask, weight, metrics or {}))

    @property
    def device(self) -> str:
        """Its name."""
        return self.identity.device

    def advert(self) -> Advert:
        """The first thing that it says."""
        return Advert(
            self.device,
            self.terms.digest,
            keystream.public_of(self._secret("mask key")),
            keystream.public_of(self._secret("share key")),
            self.identity.badge.key,
            self.identity.badge.proof,
            self._state.mask,
        ).signed(self.identity.signer)

    def receive(self, message: Message) -> Message:
        """What it says to ``message``; the same message again gets the same answer.

        Raises :class:`WireError` for what must not be answered: another cohort, other members or other survivors than
        before, a set of survivors without enough signatures, and what comes out of its turn.
        """
        if isinstance(message, Cohort):
            return self._share(message)
        if isinstance(message, Delivery):
            return self._mask(message)
        if isinstance(message, Survivors):
            return self._agree(message)
        if isinstance(message, Agreement):
            return self._open(message)
        raise WireError(f"secure: a device does not take {message.TYPE!r}")

    # Sharing: seeds and key, to each neighbour its shares.

    def _share(self, cohort: Cohort) -> Message:
        said = cohort.encode()
        if self._state.cohort:
            if said != self._state.cohort:
                raise WireError("secure: another cohort than before; one advert is good for one")
            return decode(self._state.shares)
        roster = Roster.of(self.terms, self.coordinates, cohort, self.identity.authority)
        if roster.adverts.get(self.device) != self.advert():
            raise WireError("secure: the cohort does not hold what this device said of itself")
        self._state.cohort = said
        self._roster = roster  # checked once, as long as this process lives
        self._state.shares = self._shares(roster).encode()
        return decode(self._state.shares)

    def _shares(self, roster: Roster) -> Shares:
        holders, each = roster.holders(self.device), self._own_shares(roster)
        boxes = []
        for at, name in enumerate(holders):
            if name != self.device:
                key, context = self._box_key(roster, self.device, name)
                boxes.append((name, keystream.sealed(key, each[at], context)))
        commitments = tuple(commitment(seed) for seed in self._seeds())
        shares = Shares(self.device, self.terms.digest, roster.digest, commitments, tuple(boxes))
        return shares.signed(self.identity.signer)

    def _own_shares(self, roster: Roster) -> list[bytes]:
        """By holder, in order: the share of the mask key, then of each seed, one after another."""
        count = len(roster.holders(self.device))
        parts = []
        for number, secret in enumerate([self._secret("mask key"), *self._seeds()]):
            entropy = self._secret("polynomial", roster.digest, bytes([number]))
            parts.append(shamir.split(secret, roster.own_threshold, count, entropy))
        return [b"".join(one) for one in zip(*parts, strict=True)]

    def _box_key(self, roster: Roster, source: str, target: str) -> tuple[bytes, bytes]:
        other = target if source == self.device else source
        common = self._common(roster.adverts[other].share_key)
        context = msgpack.packb(["box", self.terms.digest, roster.digest, source, target])
        return keystream.derived(common, roster.digest, "box", source, target), context

    def _common(self, public: bytes) -> bytes:
        """What this device's share key and another's ``public`` one agree on; there and back it is the same."""
        if public not in self._commons:
            self._commons[public] = self._agree_on_shares(public)
        return self._commons[public]

    @cached_property
    def _commons(self) -> dict[bytes, bytes]:
        return {}

    @cached_property
    def _agree_on_shares(self) -> Callable[[bytes], bytes]:
        return keystream.agreeing(self._secret("share key"))

    # Masking: the update, under its own masks and those shared with each neighbour.

    def _mask(self, delivery: Delivery) -> Message:
        self._after(self._state.cohort, "a delivery")
        if self._state.members:
            if list(delivery.members) != self._state.members:
                raise WireError("secure: other members than before; an update is masked once")
            return decode(self._state.masked)
        roster, members = self._roster, delivery.members
        strangers = [name for name in members if name not in roster.adverts]
        if strangers or self.device not in members or len(members) < self.terms.threshold:
            raise WireError(
                f"secure: members must be of the cohort, this device among them and {self.terms.threshold} at least; "
                f"got {shown(members)}"
            )
        received, size = {}, shamir.SHARE_BYTES * (self.terms.tiers + 2)
        for source, box in delivery.boxes:
            if source not in roster.neighbours[self.device] or source not in members:
                raise WireError(f"secure: a box of {source!r}, who shares nothing with this device")
            key, context = self._box_key(roster, source, self.device)
            try:
                plain = keystream.unsealed(key, box, context)
            except WireError:
                continue  # garbage: the others' shares must do
            if len(plain) == size:
                received[source] = plain
        masked = self._masked(roster, members)
        self._state.members, self._state.received = list(members), received
        self._state.masked = masked.encode()
        return masked

    def _masked(self, roster: Roster, members: tuple[str, ...]) -> Masked:
        blocks, digest = roster.blocks(members), roster.members_digest(members)
        values, side = self._plain(blocks)
        mine = blocks.kept[blocks.class_of[self.device]]
        sent = blocks.of(self.device)
        dtype = self.terms.grid.dtype
        by_rows: dict[bytes, tuple[Array, list[tuple[bytes, bool]]]] = {}  # nested masks share the same with many
        both = [sent & kept for kept in blocks.kept]
        beside = []
        agree = keystream.agreeing(self._secret("mask key"))
        for other in roster.neighbours[self.device]:
            if other in members:
                common, plus = agree(roster.adverts[other].mask_key), self.device < other
                key = pair_key(common, digest, "values", self.device, other)
                rows = both[blocks.class_of[other]]
                by_rows.setdefault(rows.tobytes(), (rows, []))[1].append((key, plus))
                beside.append((pair_key(common, digest, "side", self.device, other), plus))
        for rows, streams in by_rows.values():
            cover(values, self.coordinates.places(sent, rows), streams, self.coordinates.count(rows))
        seeds = self._seeds()
        for tier in range(self.terms.tiers):
            part = np.asarray(mine & (blocks.tier == tier))
            own = [(seed_key(seeds[tier], digest), True)]
            cover(values, self.coordinates.places(sent, part), own, self.coordinates.count(part))
        keystream.mask(side, [*beside, (seed_key(seeds[-1], digest), True)])
        little = values.astype(dtype.newbyteorder("<"), copy=False).tobytes()
        said = Masked(self.device, self.terms.digest, digest, little, side.astype("<u4").tobytes())
        return said.signed(self.identity.signer)

    def _plain(self, blocks: Blocks) -> tuple[Array, Array]:
        """The encoded values of the rows that are sent, and what stands beside them."""
        grid = self.terms.grid
        whole = np.frombuffer(self._state.values, grid.dtype.newbyteorder("<"))
        mine = blocks.kept[blocks.class_of[self.device]]
        values = taken(whole, self.coordinates.places(mine, blocks.of(self.device))).astype(grid.dtype, copy=False)
        weights = [0] * (len(blocks.kept) if self.terms.most_weight else 0)
        if weights:
            weights[blocks.class_of[self.device]] = self._state.weight
        side = np.array([*weights, *self._state.metrics], np.int64).astype(np.uint32)
        return values, side

    # Agreeing on who survived, and opening.

    def _agree(self, survivors: Survivors) -> Message:
        self._after(self._state.masked, "survivors")
        if self._state.survivors:
            if list(survivors.names) != self._state.survivors:
                raise WireError("secure: other survivors than before; a device agrees to one set")
            return decode(self._state.agreed)
        names = survivors.names
        if not {*names} <= {*self._state.members} or self.device not in names or len(names) < self.terms.threshold:
            raise WireError(
                f"secure: survivors must be members, this device among them and {self.terms.threshold} at least; got "
                f"{shown(names)}"
            )
        agreed = Agreed(
            self.device, self.terms.digest, self._roster.members_digest(self._state.members), survivors.digest()
        ).signed(self.identity.signer)
        self._state.survivors, self._state.agreed = list(names), agreed.encode()
        return agreed

    def _open(self, agreement: Agreement) -> Message:
        self._after(self._state.agreed, "an agreement")
        if not self._state.opening:
            require_agreement(self.terms, self._roster, self._state.members, self._state.survivors, agreement)
            self._state.opening = self._opening().encode()
        return decode(self._state.opening)

    def _opening(self) -> Opening:
        roster, survivors = self._roster, set(self._state.survivors)
        shares = dict(self._state.received)
        shares[self.device] = self._own_shares(roster)[roster.holders(self.device).index(self.device)]
        tiers = roster.blocks(self._state.members).open_tiers(survivors)
        size = shamir.SHARE_BYTES
        seeds, keys = [], []
        for owner in sorted(shares):
            cut = [shares[owner][i : i + size] for i in range(0, len(shares[owner]), size)]
            if owner in survivors:
                seeds.append((owner, b"".join(cut[1 + tier] for tier in tiers)))
            else:
                keys.append((owner, cut[0]))
        digest = roster.members_digest(self._state.members)
        said = Opening(self.device, self.terms.digest, digest, tuple(seeds), tuple(keys))
        return said.signed(self.identity.signer)

    # What is kept.

    def save(self) -> bytes:
        """Everything that :meth:`load` needs: secret, for a file that its owner alone can read."""
        kept = {f.name: getattr(self._state, f.name) for f in fields(_State)}
        whole: bytes = msgpack.packb({"format": FORMAT, "terms": self.terms.digest, "device": self.device, **kept})
        return whole

    @classmethod
    def load(cls, data: bytes, terms: Terms, coordinates: Coordinates, identity: Identity) -> DeviceHalf:
        """The device that :meth:`save` kept. Raises :class:`StateError` for what is damaged or of another round."""
        try:
            found: Any = msgpack.unpackb(data)
            about = [found.pop(name) for name in ("format", "terms", "device")]
            state = _State(**found)
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as error:
            raise StateError(f"secure: the saved state is damaged ({type(error).__name__}); begin anew") from None
        if about != [FORMAT, terms.digest, identity.device]:
            raise StateError("secure: the saved state is of another round, device or version; begin anew")
        return cls(terms, coordinates, identity, state)

    def _after(self, earlier: bytes, what: str) -> None:
        if not earlier:
            raise WireError(f"secure: {what} out of its turn")

    def _secret(self, *purpose: bytes | str) -> bytes:
        return keystream.derived(self._state.root, self.terms.digest, *purpose)

    def _seeds(self) -> list[bytes]:
        """One for each tier, and one for what stands beside the values; for this cohort alone."""
        cohort = hashlib.sha256(self._state.cohort).digest()
        return [self._secret("seed", cohort, bytes([tier])) for tier in range(self.terms.tiers + 1)]

    @cached_property
    def _roster(self) -> Roster:
        cohort = decode(self._state.cohort)
        if not isinstance(cohort, Cohort):
            raise StateError("secure: the saved state is damaged; begin anew")
        return Roster.of(self.terms, self.coordinates, cohort, self.identity.authority)


def require_terms(terms: Terms, coordinates: Coordinates, least: int = LEAST) -> None:
    """Raise :class:`ConfigError` where a device must not take part under ``terms``."""
    require_company(terms, least)
    if terms.coordinates != coordinates.digest:
        raise ConfigError("secure: the terms are for another model")


def require_company(terms: Terms, least: int) -> None:
    """Raise :class:`ConfigError` where a sum under ``terms`` may be of fewer than ``least`` devices, or fewer of them
    could give a device's secrets to the coordinator."""
    if min(terms.threshold, terms.needed) < least:
        raise ConfigError(
            f"secure: threshold={terms.threshold} and holders={terms.needed} hide a device among fewer than the "
            f"{least} that its owner asks for"
        )
    if terms.degree and terms.own_threshold < least:
        raise ConfigError(
            f"secure: with degree={terms.degree} neighbours own_threshold={terms.own_threshold} of them give a "
            f"device's secrets, fewer than the {least} that its owner asks for"
        )


def require_agreement(
    terms: Terms, roster: Roster, members: list[str], survivors: list[str], agreement: Agreement
) -> None:
    """Raise :class:`WireError` unless ``threshold`` of the survivors signed this very set."""
    digest, set_of = roster.members_digest(members), Survivors(tuple(survivors)).digest()
    signed = 0
    for name, signature in agreement.signatures:
        if name in survivors:
            word = Agreed(name, terms.digest, digest, set_of, signature)
            signed += word.signed_by(roster.adverts[name].identity)
        if signed == terms.threshold:
            return
    raise WireError(f"secure: {signed} signed these survivors, {terms.threshold} must; nothing is opened")


def commitment(seed: bytes) -> bytes:
    """What a device says of a seed before it is opened, so that a wrong share shows. It hides 256 random bits."""
    return hashlib.sha256(b"talaria/commitment/1\x00" + seed).digest()


def begun(
    terms: Terms,
    coordinates: Coordinates,
    tensors: Tensors,
    mask: ChannelMask | None,
    weight: float,
    metrics: Mapping[str, float],
) -> _State:
    """A device's state before it says anything: a root secret, and its contribution as whole numbers. Raises as
    :meth:`DeviceHalf.begin`."""
    grid, side = terms.grid, terms.side
    if set(metrics) != set(terms.metrics):
        raise AggregationError(f"secure: metrics {sorted(metrics)} are not those of the terms, {sorted(terms.metrics)}")
    share = whole = 1.0
    if terms.most_weight:
        whole = weight
        if not 1 <= whole <= terms.most_weight or whole != int(whole):
            raise AggregationError(
                f"secure: weight={weight} must be a whole number in 1..{terms.most_weight} (most_weight)"
            )
        share = whole / terms.most_weight
    bounds = coordinates.bounds(terms.bound, terms.statistics_bound)
    flat = coordinates.flat(tensors, mask)
    values, start = np.empty(sum(value.size for _, value in flat), grid.dtype.newbyteorder("<")), 0
    for name, value in flat:
        grid.encode(value, bounds[name], share, values[start : start + value.size])
        start += value.size
    told = [int(side.signed(side.encode(np.array([metrics[n]]), terms.metric_bound, 1.0))[0]) for n in terms.metrics]
    return _State(secrets.token_bytes(32), packed(mask), values.tobytes(), int(whole), told)
