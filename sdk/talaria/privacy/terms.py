"""What all devices of one secure round agree on; pure data, whose digest every key, signature and share is bound to."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import hypot
from typing import Any

import msgpack

from talaria import valid
from talaria.errors import ConfigError, WireError
from talaria.foreign import reading
from talaria.privacy.clipping import WITHIN
from talaria.privacy.fixed_point import Grid
from talaria.wire.frames import unpack

MOST_DEVICES = 1024
MOST_METRICS = 32
MOST_TIERS = 16
LARGEST_NUMBER = 1e30
LARGEST = 8 * 1024
"""Bytes of the terms at most."""


def require_bounds(what: str, told: Any) -> None:
    """Raise :class:`~talaria.errors.ConfigError`, beginning with ``what``, unless values, statistics and metrics of
    ``told`` are cut at numbers above 0."""
    rule = f"above 0, at most {LARGEST_NUMBER:g}"
    for name in ("bound", "statistics_bound", "metric_bound"):
        valid.number(what, name, getattr(told, name), rule, low=1e-30, high=LARGEST_NUMBER)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """One attempt at one round of secure aggregation.

    - ``threshold``: devices that must be there until the end, and shares that give a secret; more than half of the
      cohort. Fewer than ``2 threshold - cohort`` devices may collude with the coordinator.
    - ``holders``: a coordinate opens only where so many devices hold it; None: ``threshold``.
    - ``most``: devices that one round may have; it decides how fine values are.
    - ``degree``: neighbours that a device shares masks with (even), 0 for all others; then ``own_threshold`` is how
      many of a device's ``degree + 1`` holders give its secrets.
    - ``bits``: of one value that travels, 16 or 32. ``bound``: a trained value's difference is cut there,
      ``statistics_bound``: one of BatchNorm's running statistics.
    - ``most_weight``: the largest weight of a device; 0: all weigh the same, and no weights travel.
    - ``tiers``: into how many parts the coordinates are cut that open together; see :mod:`talaria.privacy.blocks`.
    - ``metrics``: what the devices report, each within ``metric_bound``, of which the mean alone opens;
      ``metric_noise``: standard deviation of what a device adds to whether its difference was cut.
    - ``clip``: the L2 length that a device cuts its whole difference to; 0: it does not.
    - ``noise``: standard deviation of what a device adds to each of its values, after it cut them; 0: it adds none.
    - ``nonce``: bytes that no other attempt has: nothing of one can be taken for another's, also where a fleet's record
      was restored and counts its attempts once more.
    - ``coordinates``: :attr:`~talaria.privacy.coordinates.Coordinates.digest`.
    """

    fleet: str
    round: int
    attempt: int
    coordinates: bytes
    threshold: int
    most: int
    holders: int | None = None
    degree: int = 0
    own_threshold: int = 0
    bits: int = 32
    bound: float = 4.0
    statistics_bound: float = 1024.0
    most_weight: int = 0
    tiers: int = 4
    metrics: tuple[str, ...] = ()
    metric_bound: float = 1024.0
    clip: float = 0.0
    noise: float = 0.0
    nonce: bytes = b""
    metric_noise: float = 0.0

    def __post_init__(self) -> None:
        what = "secure"
        if not isinstance(self.fleet, str) or not 1 <= len(self.fleet) <= 36:
            raise ConfigError(f"{what}: fleet must be a name of at most 36 letters")
        for name, low, high in (
            ("round", 0, 2**53),
            ("attempt", 0, 2**53),
            ("most", 2, MOST_DEVICES),
            ("threshold", 2, self.most),
            ("degree", 0, MOST_DEVICES),
            ("most_weight", 0, (1 << 31) // self.most - 1),
            ("tiers", 1, MOST_TIERS),
        ):
            valid.whole(what, name, getattr(self, name), low, high)
        valid.whole(what, "holders", self.holders, 2, self.most, none=True)
        require_bounds(what, self)
        if self.clip:
            valid.number(what, "clip", self.clip, "a number above 0", low=1e-12, high=LARGEST_NUMBER)
        for name in ("noise", "metric_noise"):
            valid.number(what, name, getattr(self, name), "a number of at least 0", low=0, high=LARGEST_NUMBER)
        if self.noise and not self.clip:
            raise ConfigError(f"{what}: noise={self.noise:g} hides what is cut to a length; give clip too")
        if not isinstance(self.nonce, bytes) or len(self.nonce) > 32:
            raise ConfigError(f"{what}: nonce must be at most 32 bytes")
        if self.degree:
            if self.degree % 2:
                raise ConfigError(f"{what}: degree={self.degree} must be even")
            # More than half of the holders, or two groups of them could give both secrets of one device.
            valid.whole(what, "own_threshold", self.own_threshold, self.degree // 2 + 1, self.degree + 1)
        elif self.own_threshold:
            raise ConfigError(f"{what}: own_threshold={self.own_threshold} goes with a degree; leave it at 0")
        if not isinstance(self.coordinates, bytes) or len(self.coordinates) != 32:
            raise ConfigError(f"{what}: coordinates must be a digest of 32 bytes")
        valid.names(what, "metrics", self.metrics, MOST_METRICS)
        if self.noise and (self.most_weight or {*self.metrics} - {WITHIN}):
            raise ConfigError(f"{what}: noise={self.noise:g} is on values alone; leave most_weight and metrics out")
        _ = self.grid

    @property
    def grid(self) -> Grid:
        """How values are encoded."""
        return Grid(self.bits, self.most)

    @property
    def side(self) -> Grid:
        """How weights and metrics are encoded, beside the values."""
        return Grid(32, self.most)

    @property
    def needed(self) -> int:
        """Holders that a coordinate needs to open."""
        return self.threshold if self.holders is None else self.holders

    @property
    def together(self) -> int:
        """Devices in the smallest sum of weights and metrics that may open: with neighbours alone a part of their ring,
        which a coordinator that lies about who left can tell from the others."""
        return min(self.threshold, self.needed) if self.degree else self.threshold

    @property
    def noise_by_devices(self) -> float:
        """Noise on all that a sum tells of a device, in the lengths that it can change it by: as private as so much on
        its values alone."""
        if not self.noise or (WITHIN in self.metrics and not self.metric_noise):
            return 0.0
        beside = 0.5 / self.metric_noise / self.together**0.5 if WITHIN in self.metrics else 0.0
        return 1 / hypot(self.clip / self.noise / self.needed**0.5, beside)

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the terms."""
        return hashlib.sha256(b"talaria/terms/1\x00" + self.encode()).digest()

    def encode(self) -> bytes:
        """The terms as msgpack; equal terms, equal bytes."""
        values = asdict(self) | {"metrics": list(self.metrics)}
        if not self.metric_noise:  # terms without it are those of before
            del values["metric_noise"]
        packed: bytes = msgpack.packb(values)
        return packed

    @staticmethod
    def decode(data: bytes) -> Terms:
        """What :meth:`encode` wrote. Raises :class:`WireError` for all else."""
        if len(data) > LARGEST:
            raise WireError(f"secure: terms of {len(data)} bytes are above {LARGEST}")
        with reading("secure: terms"):
            found: Any = unpack(data, "terms")
            if not isinstance(found, dict) or {*found, "metric_noise"} != {f.name for f in fields(Terms)}:
                raise WireError("secure: these are no terms of this version")
            try:
                return Terms(**{**found, "metrics": tuple(found["metrics"])})
            except ConfigError as error:
                raise WireError(str(error)) from None


def majority(devices: int) -> int:
    """The usual threshold: more than two thirds, so that fewer than a third may collude and as many may leave."""
    return 2 * devices // 3 + 1
