"""The server rule of a private round: the mean that devices' whole numbers come to, by the protocol or in the open.

It stands where :class:`~talaria.aggregate.masked.MaskedMean` stands, within the same wrappers, and moves the same
coordinates; :func:`private` puts it there. Differences travel, never values. What it computes from a sum does not
depend on how the sum was made, so that ``secure`` changes no byte; but with neighbours instead of all, coordinates
whose few holders the ring parts stay as they were.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite, nan
from typing import Any

import numpy as np

from talaria import seeds, tensors, valid
from talaria.aggregate.arithmetic import cast, lerp
from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import PooledStatistics, bare
from talaria.aggregate.fedopt import ServerAdam, ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.validation import checked, not_below
from talaria.errors import AggregationError, ConfigError
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.privacy import class_sums
from talaria.privacy.accounting import Ledger, ledger_in
from talaria.privacy.clipping import COUNT_NOISE, WITHIN, as_tensors, clip_in, clipped, length, next_clip, on_values
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.coordinator import Opened
from talaria.privacy.fixed_point import require_bits
from talaria.privacy.forms import FORMS
from talaria.privacy.in_process import Contribution, identities, plain_sum, secure_sum
from talaria.privacy.terms import (
    LARGEST_NUMBER,
    MOST_DEVICES,
    MOST_METRICS,
    MOST_TIERS,
    Terms,
    majority,
    require_bounds,
)
from talaria.tensors import Array, Tensors
from talaria.types import Update, as_delta

_FAR = 8.0
"""Standard deviations of a device's noise that still fit between the bounds."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What a run asks for.

    - ``secure``: sums are made by the protocol; else in the open, of the same numbers.
    - ``threshold``, ``holders``, ``bits``, ``bound``, ``statistics_bound``, ``tiers``: as in
      :class:`~talaria.privacy.terms.Terms`; ``threshold=None`` is more than two thirds of those who come.
    - ``degree``: neighbours that a device shares masks with (even), of whom more than half give its secrets where it
      left; 0, and in a round of no more devices: all others.
    - ``most_weight``: the largest weight of a device; None: the power of two above the weights that come, as only a
      simulation can know it.
    - ``clip``: the L2 length that a device's whole difference is cut to. All devices then weigh the same. With
      ``quantile`` it is the first one, and moves to where that share of the differences is not cut, by ``clip_rate``
      (:mod:`talaria.privacy.clipping`).
    - ``noise``: standard deviation of the Gaussian noise on the sum, in lengths of ``clip``; ``epsilon``: the budget at
      ``delta`` that no round may exceed. With a budget alone the noise is the least that keeps it for all rounds.
    - ``noise_by``: ``"coordinator"`` adds it to the sum that it sees; ``"devices"`` each add a part of it before they
      mask their updates: where just so many hold a coordinate as must for it to open, their parts come to ``noise``.
    - ``metrics``: what every device tells beside its update, cut at ``metric_bound``, of which the mean alone opens. No
      noise is on it, so that it goes with no budget.
    """

    secure: bool = False
    threshold: int | None = None
    holders: int | None = None
    degree: int = 0
    bits: int = 32
    bound: float = 4.0
    statistics_bound: float = 1024.0
    tiers: int = 4
    most_weight: int | None = None
    clip: float | None = None
    quantile: float | None = None
    clip_rate: float = 0.2
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    noise_by: str = "coordinator"
    metrics: tuple[str, ...] = ()
    metric_bound: float = 1024.0

    def __post_init__(self) -> None:
        what = "privacy"
        valid.flag(what, "secure", self.secure)
        valid.whole(what, "threshold", self.threshold, 2, none=True)
        valid.whole(what, "holders", self.holders, 2, none=True)
        valid.whole(what, "degree", self.degree, 0, MOST_DEVICES)
        if self.degree % 2:
            raise ConfigError(f"privacy: degree={self.degree} must be even: half of the neighbours stand on each side")
        require_bits(what, self.bits)
        valid.whole(what, "tiers", self.tiers, 1, MOST_TIERS)
        require_bounds(what, self)
        valid.whole(what, "most_weight", self.most_weight, 1, 1 << 24, none=True)
        for name in ("clip", "epsilon"):
            if getattr(self, name) is not None:
                valid.number(what, name, getattr(self, name), "a number above 0", low=1e-12, high=LARGEST_NUMBER)
        if self.noise is not None:
            valid.number(what, "noise", self.noise, "a number of at least 0", low=0, high=LARGEST_NUMBER)
        if self.quantile is not None:
            valid.number(what, "quantile", self.quantile, "in (0, 1)", low=1e-6, high=1 - 1e-6)
            if self.clip is None:
                raise ConfigError("privacy: quantile moves clip, the length to begin with; set clip too")
        valid.number(what, "clip_rate", self.clip_rate, "above 0, at most 10", low=1e-6, high=10)
        valid.among(what, "noise_by", self.noise_by, tuple(FORMS))
        object.__setattr__(self, "metrics", valid.names(what, "metrics", self.metrics, MOST_METRICS))
        if self.metrics and (self.noise or self.epsilon is not None):
            raise ConfigError(
                f"privacy: metrics={list(self.metrics)} would be told without noise, and noise and epsilon promise "
                "that all that is told has it; leave one of them out"
            )
        valid.number(what, "delta", self.delta, "in (0, 1), below one over the number of devices", low=1e-300, high=0.5)
        if self.clip is None and (self.noise is not None or self.epsilon is not None):
            raise ConfigError("privacy: noise and epsilon need clip, the length that each device's update is cut to")
        if self.clip is not None and self.most_weight is not None:
            raise ConfigError("privacy: with clip all devices weigh the same; leave most_weight out")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Privacy:
        """The settings that ``values`` name. Raises :class:`ConfigError` for others."""
        valid.only("privacy", values, [f.name for f in fields(Privacy)])
        return Privacy(**values)


@dataclass(frozen=True, kw_only=True)
class PrivateMean:
    """``G[j] + sum_h n_k d_k[j] / sum_h n_k`` over the holders ``h`` of ``j``, of whole numbers, where enough hold it.

    ``like`` says the weighting, ``min_holders`` and ``blend``; ``statistics`` how class statistics are renewed, where
    the run pools them. Integer tensors stay as they are: the largest is no sum. Raises :class:`AggregationError` where
    fewer devices come than the threshold, or the budget is spent.
    """

    privacy: Privacy
    like: MaskedMean = field(default_factory=MaskedMean)
    statistics: PooledStatistics | None = None
    seed: int = 0
    """Of the noise, which a simulation repeats."""

    def init(self, shared: Tensors) -> Tensors:
        """An empty ledger, where devices cut their differences, and the length that they begin with."""
        asked = self.privacy
        if asked.clip is None:
            return {}
        ledger = Ledger(asked.noise or 0.0, asked.delta).as_tensors()
        return ledger if asked.quantile is None else ledger | as_tensors(asked.clip)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state, and the ledger with this round."""
        given = {u.client: u for u in updates}
        held = {u.client: u for u in checked(shared, map(bare, given.values()) if self.statistics else given.values())}
        if not held:
            return tensors.copied(shared), tensors.copied(state)
        layout = next((u.mask.layout for u in held.values() if u.mask is not None), None)
        coordinates = Coordinates.of(shared, layout)
        terms = self._terms(coordinates, held.values(), clip_in(state) if self.privacy.quantile else None)
        kept = [one.mask for one in held.values()]
        paid = self._paid(state, held)
        paid.require(self.privacy.epsilon)
        parts = {
            name: contribution(
                shared, coordinates, terms, one, seeds.draws(self.seed, name, paid.version, "privacy noise")
            )
            for name, one in given.items()
        }
        if self.privacy.secure:
            called = {f"{at:04}": parts[name] for at, name in enumerate(sorted(parts))}  # clients' names may be longer
            opened = secure_sum(terms, coordinates, called, identities(terms.fleet, list(called)), least=2)
            opened = replace(opened, survivors=tuple(sorted(parts)))
        else:
            opened = plain_sum(terms, coordinates, parts)
        return self.moved(shared, state, coordinates, opened, kept)

    def moved(
        self,
        shared: Tensors,
        state: Tensors,
        coordinates: Coordinates,
        opened: Opened,
        kept: Sequence[ChannelMask | None],
    ) -> tuple[Tensors, Tensors]:
        """The new shared state that ``opened`` gives, whose survivors keep what ``kept`` says, and the ledger with this
        round. Raises :class:`AggregationError` where the budget is spent."""
        ledger = self._paid(state, opened.survivors)
        ledger.require(self.privacy.epsilon)
        new = self._moved(shared, coordinates, opened, ledger)
        new |= _bitmaps(shared, kept, opened.blocks.terms.needed)
        own = ledger.as_tensors() if ledger_in(state) is not None else {}
        return new, tensors.copied(state) | own | self._next_clip(opened, ledger)

    def _next_clip(self, opened: Opened, ledger: Ledger) -> Tensors:
        """The length for the next round, where it moves."""
        asked, terms = self.privacy, opened.blocks.terms
        if asked.quantile is None or WITHIN not in opened.metrics:
            return {}
        share = opened.metrics[WITHIN] + 0.5
        if not terms.noise:
            draws = seeds.draws(self.seed, "", ledger.version, "privacy clip")
            share += COUNT_NOISE * ledger.noise / len(opened.survivors) * float(draws.normal(1)[0])
        return as_tensors(next_clip(terms.clip, share, asked.quantile, asked.clip_rate))

    def _paid(self, state: Tensors, devices: Iterable[str]) -> Ledger:
        """The ledger when a round of ``devices`` is opened; an empty one where none is kept."""
        ledger = ledger_in(state)
        return Ledger(0.0, self.privacy.delta) if ledger is None else ledger.after(devices)

    def _terms(self, coordinates: Coordinates, updates: Iterable[Update], clip: float | None) -> Terms:
        found = list(updates)
        most_weight = 0
        if self.weighted:
            largest = int(max(one.weight for one in found))
            most_weight = self.privacy.most_weight or 1 << largest.bit_length()
        return self.terms(coordinates, len(found), most_weight, clip, fleet="simulation", round=0, attempt=0)

    def terms(
        self, coordinates: Coordinates, count: int, most_weight: int, clip: float | None = None, **about: Any
    ) -> Terms:
        """The terms of a round of ``count`` devices; ``clip`` is the length that has moved, ``about`` are its fleet,
        numbers and nonce. Raises :class:`AggregationError` for fewer devices than hide each other."""
        asked = self.privacy
        threshold = threshold_of(asked, count)
        holders = max(asked.holders or threshold, self.like.min_holders)
        if count < (least := max(3, threshold, holders)):
            raise AggregationError(f"privacy: {count} devices came, {least} must be there to hide each other; ask more")
        degree = asked.degree if asked.degree < count - 1 else 0
        terms = Terms(
            coordinates=coordinates.digest,
            degree=degree,
            own_threshold=degree // 2 + 1 if degree else 0,
            threshold=threshold,
            most=count,
            holders=holders,
            bits=asked.bits,
            bound=asked.bound,
            statistics_bound=asked.statistics_bound,
            tiers=asked.tiers,
            most_weight=most_weight,
            clip=clip or asked.clip or 0.0,
            metrics=asked.metrics if asked.quantile is None else (*asked.metrics, WITHIN),
            metric_bound=asked.metric_bound,
            **about,
        )
        return self._noisy(coordinates, terms) if asked.noise_by == "devices" and asked.noise else terms

    def _noisy(self, coordinates: Coordinates, terms: Terms) -> Terms:
        """These terms with each device's part of the noise, and bounds that it fits between."""
        parts, noise = terms.needed**0.5, self.privacy.noise or 0.0
        far = terms.clip + _FAR * self._deviation(coordinates, terms, noise) / parts
        far = max(far, terms.clip / (1 - _FAR / terms.grid.unit))  # also of a step of its grid, see :func:`_added`
        wide = replace(terms, bound=max(terms.bound, far), statistics_bound=max(terms.statistics_bound, far))
        wide = replace(wide, noise=self._deviation(coordinates, wide, noise) / parts)
        if self.privacy.quantile is None:
            return wide
        # All survivors tell whether they were cut, and the count of so many of them may be seen alone.
        own = COUNT_NOISE * noise / terms.together**0.5 * (1 + 1 / terms.side.unit)
        return replace(wide, metric_noise=own, metric_bound=0.5 + _FAR * own)

    @property
    def weighted(self) -> bool:
        """Whether devices weigh by their samples."""
        return self.like.weighting == "samples" and self.privacy.clip is None

    @np.errstate(divide="ignore", invalid="ignore")
    def _moved(self, shared: Tensors, coordinates: Coordinates, opened: Opened, ledger: Ledger) -> Tensors:
        terms, grid = opened.blocks.terms, opened.blocks.terms.grid
        weight, bounds = opened.weight(), coordinates.bounds(terms.bound, terms.statistics_bound)
        total = sum(opened.weights) / terms.most_weight if terms.most_weight else float(len(opened.survivors))
        open_, each = coordinates.values(opened.rows), np.repeat(weight, coordinates.widths)
        self._require_within(coordinates, opened, each)
        deviation = 0.0 if terms.noise else self._deviation(coordinates, terms, ledger.noise)
        draws = seeds.draws(self.seed, "", ledger.version, "privacy noise")
        new = {name: np.array(value, order="C") for name, value in shared.items()}
        sums: dict[str, Array] = {}
        for name, part in coordinates.slices.items():
            step = grid.decode(opened.sums[part], bounds[name])
            if name.startswith(class_sums.PREFIX):
                sums[name] = step.reshape(coordinates.shapes[name])
                continue
            here, old = open_[part], shared[name].reshape(-1)
            if deviation:
                step = step + deviation * draws.normal(len(step))
            mean = not_below(name, old.astype(np.float64) + step / each[part])
            if self.like.blend:
                mean = lerp(old.astype(np.float64), mean, each[part] / total)
            new[name] = np.where(here, cast(mean, old.dtype), old).reshape(shared[name].shape)
            if not np.isfinite(new[name]).all():
                raise AggregationError(f"tensor {name!r}: the aggregate left the range of {old.dtype}; lower bound")
        if self.statistics is not None:
            new |= self.statistics.renewed(shared, class_sums.pooled(shared, sums, terms.most_weight))
        return new

    def _require_within(self, coordinates: Coordinates, opened: Opened, each: Array) -> None:
        """Raise :class:`AggregationError` for a sum that no devices within their bounds come to: one sent garbage.

        A value is at most its share of ``unit``, and half a step that rounding adds; and where devices cut their
        differences, all together are no longer than the sum of their lengths and what they added as noise.
        """
        terms, most = opened.blocks.terms, opened.blocks.terms.grid.unit
        limit = each * (most * (1 + 1e-9)) + 0.5 * np.repeat(opened.holders, coordinates.widths)
        signed = terms.grid.signed(opened.sums)
        beyond = int((np.abs(signed) > limit).sum())
        if beyond:
            raise AggregationError(
                f"privacy: {beyond} of {len(signed)} sums are beyond what {len(opened.survivors)} devices can send "
                "within their bounds; one of them sent garbage, and which one is not known: the round is not used"
            )
        if not terms.clip:
            return
        bounds = coordinates.bounds(terms.bound, terms.statistics_bound)
        parts = (terms.grid.decode(opened.sums[part], bounds[name]) for name, part in coordinates.slices.items())
        length = float(sum(float(np.square(part).sum()) for part in parts) ** 0.5)
        count = len(opened.survivors)
        added = _added(coordinates, terms)
        squares = sum((part.stop - part.start) * added[name] ** 2 for name, part in coordinates.slices.items())
        noise = count**0.5 * (squares**0.5 + _FAR * max(added.values()))
        longest = count * (terms.clip + self._rounding(coordinates, terms)) + noise
        if length > longest * (1 + 1e-9):
            raise AggregationError(
                f"privacy: the sum is {length:.4g} long, and {count} differences of at most {terms.clip:g} come to "
                f"{longest:.4g}; one of them was not cut, and which one is not known: the round is not used"
            )

    def _rounding(self, coordinates: Coordinates, terms: Terms) -> float:
        """The L2 length that rounding to the grid may add to a difference."""
        bounds = coordinates.bounds(terms.bound, terms.statistics_bound)
        squares = (
            (part.stop - part.start) * (0.5 * bounds[name] / terms.grid.unit) ** 2
            for name, part in coordinates.slices.items()
        )
        return float(sum(squares) ** 0.5)

    def _deviation(self, coordinates: Coordinates, terms: Terms, noise: float) -> float:
        """Standard deviation of the noise on each coordinate of the sum: ``noise``, which the ledger counts with, times
        the longest difference that can come, ``clip`` and what rounding to the grid may add to it; and wider where
        devices tell too whether they were cut."""
        if not terms.clip or not noise:
            return 0.0
        wide = noise if self.privacy.quantile is None else on_values(noise)
        return float(wide * (terms.clip + self._rounding(coordinates, terms)))


@dataclass(frozen=True, kw_only=True)
class OpenedMean(PrivateMean):
    """The private mean of a sum that a fleet's devices opened among themselves; ``kept`` are its survivors' masks."""

    coordinates: Coordinates
    opened: Opened
    kept: tuple[ChannelMask | None, ...]

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """As :meth:`PrivateMean.apply`; there are no updates to look at."""
        return self.moved(shared, state, self.coordinates, self.opened, self.kept)


def threshold_of(privacy: Privacy, devices: int) -> int:
    """How many of ``devices`` must stay until the end of a secure round."""
    return majority(devices) if privacy.threshold is None else privacy.threshold


def contribution(
    shared: Tensors, coordinates: Coordinates, terms: Terms, update: Update, draws: seeds.Draws | None = None
) -> Contribution:
    """What a device brings to a private round of the update that it made from ``shared``.

    Differences, cut to the L2 length ``terms.clip`` where there is one; a weight above ``terms.most_weight`` counts as
    that. Its part of the noise comes from ``draws``, which a simulation repeats, or from a seed that nobody keeps."""
    weight = min(update.weight, terms.most_weight) if terms.most_weight else update.weight
    plain = bare(update)
    steps = as_delta(plain, masks.gathered(shared, plain.tensors, plain.mask)).tensors
    if class_sums.COUNTS in coordinates.shapes:
        steps = steps | class_sums.brought(shared, update, weight, terms.most_weight)
    steps = {name: steps[name] for name in coordinates.shapes}
    draws = draws or seeds.Draws(secrets.randbits(128))
    metrics = told(update, [name for name in terms.metrics if name != WITHIN])
    if WITHIN in terms.metrics:
        metrics[WITHIN] = 0.5 if length(steps) <= terms.clip else -0.5
    if terms.clip:
        steps = clipped(steps, terms.clip)
    if terms.noise:
        added = _added(coordinates, terms)
        steps = {name: step + added[name] * draws.normal(step.size).reshape(step.shape) for name, step in steps.items()}
    if terms.metric_noise:
        metrics[WITHIN] += terms.metric_noise * float(draws.normal(1)[0])
    return Contribution(steps, update.mask, weight, metrics)


def _added(coordinates: Coordinates, terms: Terms) -> dict[str, float]:
    """By tensor, the standard deviation of what a device adds: ``terms.noise``, and no less than a step of the grid.
    From there on rounded Gaussian numbers hide as unrounded ones do (their means err by 1e-9 of a step); smaller ones
    are rounded away."""
    bounds = coordinates.bounds(terms.bound, terms.statistics_bound)
    return {name: max(terms.noise, bound / terms.grid.unit) if terms.noise else 0.0 for name, bound in bounds.items()}


def told(update: Update, names: Sequence[str]) -> dict[str, float]:
    """The metrics of an update that a sum takes. Raises :class:`AggregationError` where the device has none of a name:
    a mean over those who have would tell of them alone."""
    missing = [name for name in names if not isfinite(update.metrics.get(name, nan))]
    if missing:
        raise AggregationError(
            f"privacy: this device does not tell {', '.join(missing)}, which the fleet's [privacy] metrics ask of all; "
            f"it tells {', '.join(sorted(update.metrics)) or 'nothing'}"
        )
    return {name: update.metrics[name] for name in names}


def private(
    rule: Aggregator, privacy: Privacy, seed: int = 0, statistics: PooledStatistics | None = None
) -> Aggregator:
    """``rule`` with the private mean in the place of its masked mean, which renews ``statistics`` too.

    Raises :class:`ConfigError`, with the reason, for a rule that is no mean of sums.
    """
    if isinstance(rule, MaskedMean):
        if rule.mode == "intersection":
            raise ConfigError(
                "privacy: mode='intersection' moves only what all devices keep, also when one comes late; use "
                "mode='holders', and privacy's holders for how many must keep a coordinate"
            )
        found = PrivateMean(privacy=privacy, like=rule, statistics=statistics, seed=seed)
        if statistics is not None and not (found.weighted and privacy.bits == 32):
            raise ConfigError(
                "privacy: class statistics are sums of samples' features, which clip and noise do not cover; they need "
                "weights by samples and bits=32: leave clip, noise and epsilon out"
            )
        return found
    if isinstance(rule, ServerMomentum | ServerAdam):
        return replace(rule, inner=private(rule.inner, privacy, seed, statistics))
    if isinstance(rule, PooledStatistics) and statistics is None:
        return private(rule.inner, privacy, seed, rule)
    name = type(rule).__name__
    why = _REASONS.get(name, "is no mean whose sums could be made in private")
    raise ConfigError(f"privacy: {name} {why}; use mean, server_momentum or server_adam")


def inner_of(rule: Aggregator) -> PrivateMean:
    """The private mean within a rule that :func:`private` made."""
    while isinstance(rule, ServerMomentum | ServerAdam):
        rule = rule.inner
    if not isinstance(rule, PrivateMean):
        raise ConfigError(f"privacy: {type(rule).__name__} is no private rule")
    return rule


def with_sum(
    rule: Aggregator, coordinates: Coordinates, opened: Opened, kept: Sequence[ChannelMask | None], seed: int
) -> Aggregator:
    """``rule``, as :func:`private` made it, for one sum that is open; ``seed`` of the noise."""
    if isinstance(rule, ServerMomentum | ServerAdam):
        return replace(rule, inner=with_sum(rule.inner, coordinates, opened, kept, seed))
    mean = inner_of(rule)
    return OpenedMean(
        privacy=mean.privacy, like=mean.like, statistics=mean.statistics, seed=seed, coordinates=coordinates,
        opened=opened, kept=tuple(kept),
    )  # fmt: skip


_ROWS = "compares the updates of single devices, which nobody sees"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("Median", "TrimmedMean", "Krum", "MultiKrum", "RFA", "CenteredClip", "Bucketed"), _ROWS),
    "Clipped": "cuts the updates of single devices at the server; privacy's clip lets the devices do it",
    "FedBuff": "takes updates one by one as they come, and no cohort adds them up together",
    "Distilled": "teaches the server's model from single devices' models, which nobody sees",
}


def _bitmaps(shared: Tensors, kept: Iterable[ChannelMask | None], need: int) -> Tensors:
    """``mask/<group>``: uint8, 1 for a channel that at least ``need`` devices keep, as the masked mean says it."""
    found = list(kept)
    layout = next((mask.layout for mask in found if mask is not None), None)
    if layout is None:
        return {k: np.full_like(v, len(found) >= need) for k, v in shared.items() if k.startswith(masks.PREFIX)}
    counts: dict[str, Array] = {group: np.zeros(size, np.int64) for group, size in layout.sizes.items()}
    for mask in found:
        for group, size in layout.sizes.items():
            channels = np.arange(size) if mask is None else np.array(mask.kept[group])
            counts[group][channels] += 1
    return {masks.PREFIX + group: (count >= need).astype(np.uint8) for group, count in counts.items()}
