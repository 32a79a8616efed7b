"""A whole secure round in one process, every message as bytes, and the plain sum of the same numbers beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from talaria.errors import AggregationError
from talaria.model.masks import ChannelMask
from talaria.privacy.blocks import blocks
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.coordinator import CoordinatorHalf, Opened
from talaria.privacy.device import DeviceHalf, Identity, begun
from talaria.privacy.messages import Message, decode
from talaria.privacy.roster import sign
from talaria.privacy.terms import Terms
from talaria.tensors import Tensors
from talaria.wire.badge import Badge
from talaria.wire.signing import Signer


@dataclass(frozen=True)
class Contribution:
    """What one device brings: differences (compact under ``mask``), weight and metrics."""

    tensors: Tensors = field(repr=False)
    mask: ChannelMask | None = field(default=None, repr=False)
    weight: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Traffic:
    """Bytes of messages, by device."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)


def identities(fleet: str, names: Sequence[str], authority: Signer | None = None) -> dict[str, Identity]:
    """Identities for a fleet that lives in this process, by an authority made for it."""
    authority = authority or Signer.generate()
    out = {}
    for name in names:
        signer = Signer.generate()
        badge = Badge.issued(authority, fleet, name, signer.public)
        out[name] = Identity(name, signer, badge, authority.public)
    return out


def secure_sum(
    terms: Terms,
    coordinates: Coordinates,
    contributions: Mapping[str, Contribution],
    who: Mapping[str, Identity],
    *,
    leaving: Mapping[str, Collection[str]] | None = None,
    least: int = 3,
    traffic: Traffic | None = None,
) -> Opened:
    """What the protocol opens of ``contributions``. ``leaving`` names who is gone from a phase on (``shares``,
    ``masked``, ``agreed``, ``openings``).

    Raises what the halves raise: :class:`AggregationError` where too few stay.
    """
    counted = Traffic() if traffic is None else traffic
    devices = {
        name: DeviceHalf.begin(
            terms,
            coordinates,
            who[name],
            one.tensors,
            mask=one.mask,
            weight=one.weight,
            metrics=one.metrics,
            least=least,
        )
        for name, one in contributions.items()
    }
    authority = next(iter(who.values())).authority
    coordinator = CoordinatorHalf(terms, coordinates, authority)
    for name in sorted(devices):
        coordinator.receive(_up(name, devices[name].advert(), counted))
    gone: set[str] = set()
    while coordinator.phase != "done":
        out = coordinator.proceed()
        if coordinator.phase == "openings":
            coordinator.require_holders()
        gone |= set((leaving or {}).get(coordinator.phase, ()))
        written: dict[int, bytes] = {}  # most phases say the same to all
        for name, message in out.items():
            if name in gone:
                continue
            data = written.setdefault(id(message), b"") or message.encode()
            written[id(message)] = data
            counted.down[name] = counted.down.get(name, 0) + len(data)
            coordinator.receive(_up(name, devices[name].receive(decode(data)), counted))
    return coordinator.opened()


def _up(name: str, message: Message, counted: Traffic) -> Message:
    data = message.encode()
    counted.up[name] = counted.up.get(name, 0) + len(data)
    return decode(data)


def plain_sum(
    terms: Terms,
    coordinates: Coordinates,
    contributions: Mapping[str, Contribution],
    *,
    members: Collection[str] | None = None,
    survivors: Collection[str] | None = None,
) -> Opened:
    """The same sum without any secrecy: of ``survivors`` among ``members`` (all by default), over the coordinates that
    the terms let open where all share masks with all."""
    names = tuple(sorted(contributions if members is None else members))
    alive = tuple(sorted(names if survivors is None else survivors))
    if len(alive) < terms.threshold:
        raise AggregationError(f"secure: {len(alive)} devices, {terms.threshold} must be there")
    everybody = {name: tuple(other for other in names if other != name) for name in names}
    found = blocks(terms, coordinates, {name: contributions[name].mask for name in names}, everybody)
    rows = np.isin(found.tier, [tier for tier in found.open_tiers(alive) if tier < terms.tiers])
    dtype, every = terms.grid.dtype, np.ones(len(rows), bool)
    sums = np.zeros(int(coordinates.widths.sum()), dtype)
    weights, metrics = [0] * (len(found.kept) if terms.most_weight else 0), np.zeros(len(terms.metrics), np.int64)
    for name in alive:
        one = contributions[name]
        state = begun(terms, coordinates, one.tensors, one.mask, one.weight, one.metrics)
        kept = found.kept[found.class_of[name]]
        values = np.frombuffer(state.values, dtype.newbyteorder("<"))
        sign(sums, coordinates.places(every, kept), values, plus=True)
        if weights:
            weights[found.class_of[name]] += state.weight
        metrics += np.array(state.metrics, np.int64)
    sums[~coordinates.values(rows)] = 0
    mean = metrics * (terms.metric_bound / terms.side.unit) / len(alive)
    told = dict(zip(terms.metrics, mean.tolist(), strict=True))
    return Opened(found, alive, rows, sums, np.where(rows, found.left(alive), 0), tuple(weights), told)
