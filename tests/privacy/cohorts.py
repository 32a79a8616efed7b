"""Cohorts for the tests of secure rounds: small models, masks, updates, and a round that is disturbed all along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

import numpy as np

from talaria.errors import AggregationError, WireError
from talaria.model.masks import ChannelLayout, ChannelMask, gather
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.coordinator import CoordinatorHalf, Opened
from talaria.privacy.device import DeviceHalf, Identity
from talaria.privacy.in_process import Contribution, identities
from talaria.privacy.messages import decode
from talaria.privacy.terms import Terms
from talaria.wire.signing import Signer

LAYOUT = ChannelLayout(
    {"a": 5, "b": 4},
    {"conv": ((("a", 1),), (("b", 1),), ()), "bias": ((("a", 1),),), "flat": ((("b", 2),), (("a", 1),))},
)
SHAPES = {"conv": (5, 4, 3), "bias": (5,), "flat": (8, 5), "head": (7,)}
COORDINATES = Coordinates(SHAPES, LAYOUT)
NAMES = tuple(f"d{i}" for i in range(9))
AUTHORITY = Signer.of(bytes(range(32)))


@lru_cache(maxsize=1)
def who() -> Mapping[str, Identity]:
    return identities("fleet", NAMES, AUTHORITY)


def terms_of(threshold: int, **more: object) -> Terms:
    how = {"fleet": "fleet", "round": 1, "attempt": 1, "most": 9, "coordinates": COORDINATES.digest, **more}
    return Terms(threshold=threshold, **how)  # type: ignore[arg-type]


def mask(rng: np.random.Generator) -> ChannelMask:
    keep = {g: rng.choice(n, int(rng.integers(1, n + 1)), replace=False) for g, n in LAYOUT.sizes.items()}
    return ChannelMask(LAYOUT, {g: tuple(sorted(kept.tolist())) for g, kept in keep.items()})


def contributions(names: Sequence[str], seed: int, terms: Terms, kinds: int = 3) -> dict[str, Contribution]:
    """Updates of ``names``, who have one of ``kinds`` masks or none, some values beyond the bounds."""
    rng = np.random.default_rng(seed)
    masks = [None, *(mask(rng) for _ in range(kinds))]
    out = {}
    for name in names:
        dense = {k: rng.normal(0, 3, s).astype(np.float32) for k, s in SHAPES.items()}
        own = masks[int(rng.integers(len(masks)))]
        weight = float(rng.integers(1, terms.most_weight + 1)) if terms.most_weight else 1.0
        metrics = {key: float(rng.normal()) for key in terms.metrics}
        out[name] = Contribution(dense if own is None else gather(dense, own), own, weight, metrics)
    return out


def device(terms: Terms, name: str, one: Contribution, kind: type[DeviceHalf] = DeviceHalf) -> DeviceHalf:
    return kind.begin(
        terms, COORDINATES, who()[name], one.tensors, mask=one.mask, weight=one.weight, metrics=one.metrics, least=2
    )


def disturbed(
    terms: Terms,
    given: Mapping[str, Contribution],
    leaving: Mapping[str, Sequence[str]],
    chance: Random,
    strays: Sequence[bytes] = (),
) -> tuple[Opened, list[bytes]]:
    """A round in which messages are doubled, reordered and lost with the answer, ``strays`` of other rounds come, and
    both sides are killed at any time; devices in ``leaving[phase]`` are gone when ``phase`` is collected."""
    devices = {name: device(terms, name, one) for name, one in given.items()}
    coordinator = CoordinatorHalf(terms, COORDINATES, AUTHORITY.public)
    ups = [half.advert().encode() for half in devices.values()]
    seen: list[bytes] = []
    gone: set[str] = set()
    while True:
        seen += ups
        waiting = ups + [data for data in ups if chance.random() < 0.3]
        chance.shuffle(waiting)
        for data in waiting:
            if strays and chance.random() < 0.3:
                _refused(coordinator, chance.choice(strays))
            if chance.random() < 0.2:
                coordinator = CoordinatorHalf.load(coordinator.save(), terms, COORDINATES, AUTHORITY.public)
            coordinator.receive(decode(data))
            if seen and chance.random() < 0.2:
                assert not coordinator.receive(decode(data))
        if coordinator.phase == "openings":
            coordinator.proceed()
            return coordinator.opened(), seen
        down = coordinator.proceed()
        gone |= set(leaving.get(coordinator.phase, ()))
        if chance.random() < 0.3:
            assert coordinator.again() == down
            coordinator = CoordinatorHalf.load(coordinator.save(), terms, COORDINATES, AUTHORITY.public)
        ups = []
        for name, message in down.items():
            if name in gone:
                continue
            saved = devices[name].save()
            said = devices[name].receive(decode(message.encode())).encode()
            if chance.random() < 0.3:  # killed before it had saved: it says the same
                devices[name] = DeviceHalf.load(saved, terms, COORDINATES, who()[name])
                assert devices[name].receive(message).encode() == said
            if chance.random() < 0.3:  # and after
                devices[name] = DeviceHalf.load(devices[name].save(), terms, COORDINATES, who()[name])
                assert devices[name].receive(message).encode() == said
            ups.append(said)


def _refused(coordinator: CoordinatorHalf, stray: bytes) -> None:
    try:
        assert not coordinator.receive(decode(stray))
    except (WireError, AggregationError):
        return
