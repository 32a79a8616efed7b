"""A partial sum: what a site's updates weigh in a round, as one value that is folded where all of them would have been.

It holds, of each coordinate, the weighted mean over the site's clients that kept it, and of each distinct mask the
summed weight and the number of clients. By these the weight of a coordinate is exact, and mean times weight is the sum:
a mean has the size and the dtype of an update's value, and clients who agree give back their values bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from talaria.aggregate.arithmetic import cast
from talaria.aggregate.base import Aggregator
from talaria.aggregate.fedopt import ServerAdam, ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.masked_sum import Counters, Fold
from talaria.aggregate.validation import checked, counters, is_finite, trained
from talaria.aggregate.wrappers import chain
from talaria.errors import AggregationError, ConfigError
from talaria.model import masks
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.tensors import Array, Tensors, copied, difference
from talaria.types import Update


@dataclass(frozen=True)
class MaskClass:
    """The clients of one mask: their summed ``weight``, in samples, and how many ``clients`` they are."""

    mask: ChannelMask | None = field(repr=False)
    weight: float
    clients: int

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf or self.clients < 1:
            raise ConfigError(
                f"partial sum: a class of weight={self.weight:g} and clients={self.clients}; need a finite weight "
                "above 0 and at least one client"
            )


@dataclass(frozen=True)
class PartialSum:
    """The updates of a site's clients, folded once.

    ``means`` are compact under ``union``, the channels that any of them kept (None: all): a trained tensor is its
    weighted mean over the holders, and 0 where there is none; a counter its largest value. ``classes`` are one for each
    distinct mask, in the order in which their first clients came. The other fields are those of an
    :class:`~talaria.types.Update`; ``client`` is the gateway.
    """

    means: Tensors = field(repr=False)
    union: ChannelMask | None = field(repr=False)
    classes: tuple[MaskClass, ...]
    client: str
    base_version: int = 0
    kind: Literal["value", "delta"] = "value"

    def __post_init__(self) -> None:
        if not self.classes:
            raise ConfigError(f"partial sum of {self.client!r}: it has no class; give at least one update")
        keys = [masks.key_of(one.mask) for one in self.classes]
        if len(set(keys)) != len(keys):
            raise ConfigError(f"partial sum of {self.client!r}: two of its classes have one mask; add them up")
        for one in self.classes:
            if self.union is not None and (one.mask is None or not one.mask.within(self.union)):
                raise ConfigError(
                    f"partial sum of {self.client!r}: a class keeps channels that its union lacks; give the union of "
                    "all masks"
                )

    @property
    def weight(self) -> float:
        """The weight of all its clients, in samples."""
        return sum(one.weight for one in self.classes)

    @property
    def clients(self) -> int:
        """How many clients are in it."""
        return sum(one.clients for one in self.classes)

    @property
    def whole(self) -> Update:
        """The means under their union, as one update with the weight of all."""
        return Update(self.means, self.weight, self.client, self.base_version, self.kind, self.union)

    def updates(self) -> Iterator[Update]:
        """One update for each class: the means as that mask keeps them, with the class's weight. Folded by a rule that
        :func:`require_summable` takes, they are to it as the site's updates are: where a coordinate has the classes
        ``c`` as holders, they add ``sum_c w_c`` times its mean."""
        for one in self.classes:
            tensors = self.means
            if one.mask is not None:
                tensors = (
                    masks.gather(tensors, one.mask)
                    if self.union is None
                    else masks.shrink(tensors, self.union, one.mask)
                )
            yield Update(tensors, one.weight, self.client, self.base_version, self.kind, one.mask)


def require_summable(rule: Aggregator) -> None:
    """Raise :class:`~talaria.errors.ConfigError` unless ``rule`` needs no more than weighted sums and weights: then a
    partial sum stands for its updates."""
    for one in chain(rule):
        if type(one) in (ServerMomentum, ServerAdam):
            continue  # they see the mean alone
        if type(one) is not MaskedMean:
            raise ConfigError(
                f"gateway: {type(one).__name__} looks at each update by itself, and a partial sum hides them; let the "
                "devices stand at the coordinator, or choose the mean"
            )
        for name, value, need in (
            ("mode", one.mode, "holders"),
            ("weighting", one.weighting, "samples"),
            ("min_holders", one.min_holders, 1),
        ):
            if value != need:
                raise ConfigError(
                    f"gateway: {name}={value!r} of the mean does not fit partial sums; set it to {need!r}"
                )


def partial_sum(shared: Tensors, updates: Iterable[Update], client: str) -> PartialSum:
    """The partial sum of ``updates``, at least one, all from one version of ``shared`` (dense) and in order of client;
    ``client`` is who sends it. Memory is that of a fold (:class:`~talaria.aggregate.masked_sum.Fold`) and a model.

    Raises :class:`~talaria.errors.AggregationError` for an update that does not fit, and where there is none.
    """
    fold, most = Fold(shared, trained(shared), count=False), Counters(shared)
    classes: dict[str, MaskClass] = {}
    first: Update | None = None
    for update in checked(shared, updates, finite=False):  # the fold looks at its sums instead
        first = update if first is None else first
        if update.base_version != first.base_version:
            raise AggregationError(
                f"update of client {update.client!r}: from version {update.base_version}, but client {first.client!r} "
                f"began from {first.base_version}; add up updates of one version at a time"
            )
        fold.add(update, update.weight)
        most.add(update)
        key = masks.key_of(update.mask)
        held = classes.get(key)
        weight, clients = (0.0, 0) if held is None else (held.weight, held.clients)
        classes[key] = MaskClass(update.mask if key else None, weight + update.weight, clients + 1)
    if first is None:
        raise AggregationError("partial sum: no update; give at least one")
    means = {name: _mean(fold, name) for name in fold.names}
    for name in counters(shared):
        largest = most.values.get(name, shared[name])
        means[name] = difference(largest, shared[name]) if first.kind == "delta" else np.asarray(largest)
    union = _union([one.mask for one in classes.values()])
    if union is not None:
        means = masks.gather(means, union)
    return PartialSum(copied(means), union, tuple(classes.values()), client, first.base_version, first.kind)


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def _mean(fold: Fold, name: str) -> Array:
    old, view = fold.shared[name], fold.view(name)
    mean = np.empty((view.rows, view.columns, view.width), old.dtype)
    for tile in fold.tiles(name):
        by = tile.weight[..., None]
        mean[tile.rows] = cast(np.where(by > 0, tile.sums / by, 0.0), old.dtype)
        if not is_finite(mean[tile.rows]):
            fold.blame(name)
            raise AggregationError(f"tensor {name!r}: the mean left the range of {old.dtype}; clip the updates")
    return mean.reshape(old.shape)


def _union(every: list[ChannelMask | None]) -> ChannelMask | None:
    """What any of the masks keeps; None for all channels."""
    found: list[ChannelMask] = [mask for mask in every if mask is not None]
    if len(found) < len(every):
        return None
    layout: ChannelLayout = found[0].layout
    kept = {g: tuple(sorted(set().union(*(mask.kept[g] for mask in found)))) for g in layout.sizes}
    union = ChannelMask(layout, kept)
    return None if union.is_full else union
