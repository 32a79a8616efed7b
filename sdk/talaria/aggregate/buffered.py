"""FedBuff: asynchronous training with a buffer (Nguyen et al., AISTATS 2022)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

import torch

from talaria import tree
from talaria.aggregate import entries
from talaria.aggregate.base import Aggregator
from talaria.aggregate.bucketing import Bucketed
from talaria.aggregate.checks import check, check_count, check_range, is_finite, not_below, same_layout, trained
from talaria.aggregate.mean import Mean
from talaria.aggregate.rows import RowRule
from talaria.aggregate.wrap import (
    INNER,
    VERSION,
    Wrapper,
    as_delta,
    check_inner,
    check_weighing,
    discount,
    gathered,
    staleness,
)
from talaria.errors import AggregationError, ConfigError
from talaria.types import ChannelLayout, Tensors, Update

BUFFER, SEEN, LAYOUT, STALE, REPEATED = "buffer/", "seen/", "layout", "dropped/stale", "dropped/repeated"


@dataclass(frozen=True, kw_only=True)
class FedBuff:
    """Updates wait in a buffer; when ``capacity`` clients are in it, ``inner`` folds them into one step.

    - ``a``: an update that trained ``late`` versions ago counts ``s = (1 + late)^-a``; 0 turns that off.
    - ``normalise``: ``"damped"``, as in the paper, ``sum(s n D) / sum(n)``, so that an old buffer moves less; or
      ``"convex"``, ``sum(s n D) / sum(s n)``. Under a robust ``inner``, damped scales the rows and convex the weights,
      which only a rule with ``weighting="samples"`` uses (RFA wants that form).
    - ``max_staleness``: an update further behind is dropped.
    - ``lr``: server learning rate; the step of ``inner`` times it.

    Updates are differences to the version that the device had downloaded (:func:`~talaria.aggregate.wrap.as_delta`);
    values are taken only from clients at the present version. A client has one entry: what trained on the same or a
    newer version replaces it. A message that comes again, while its update waits or right after it was folded, changes
    nothing. A buffer folds in order of client names.

    State: ``version`` (changes of the shared state so far, 0 at first; a client's ``base`` is the version that it
    downloaded), the buffer, the last
    folded digest per client, ``dropped/stale`` and ``dropped/repeated``, and ``inner``'s. All are plain tensors, so
    that a buffer survives a restart.

    Raises :class:`~talaria.errors.ConfigError` where ``capacity`` is smaller than ``inner``'s ``f`` needs: fast
    attackers fill a buffer first.
    """

    inner: Aggregator = field(default_factory=Mean)
    capacity: int = 10
    a: float = 0.5
    normalise: Literal["damped", "convex"] = "damped"
    max_staleness: int = 20
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_inner("fedbuff", self.inner)
        check_count("fedbuff", "capacity", self.capacity, 1)
        check_range("fedbuff", "a", self.a, 0, 10)
        check_count("fedbuff", "max_staleness", self.max_staleness, 0)
        check_range("fedbuff", "lr", self.lr, 0, float("inf"), "()")
        if self.normalise not in ("damped", "convex"):
            raise ConfigError(f"fedbuff: normalise={self.normalise!r} is unknown; use 'damped' or 'convex'")
        if self.normalise == "convex" and self.a > 0:
            check_weighing("fedbuff with normalise='convex'", self.inner)
        need = least(self.inner)
        if self.capacity < need:
            raise ConfigError(f"fedbuff: capacity={self.capacity} must be at least {need}, which inner's f needs")

    def init(self, shared: Tensors) -> Tensors:
        """An empty buffer at version 0."""
        own = {name: torch.tensor(0) for name in (VERSION, STALE, REPEATED)}
        return own | tree.prefixed(self.inner.init(shared), INNER)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """Take in each update in order of arrival; the shared state changes whenever the buffer fills."""
        shared, state = tree.copied(shared), dict(state)
        for update in updates:
            check(shared, update)
            shared, state = self._arrive(shared, state, update)
        return shared, state

    def fold(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """One step from just these updates, in order of clients, one of each: for a coordinator that keeps the buffer
        itself, durably, and counts exactly once. As :meth:`apply` of as many as ``capacity``, but one update is in
        memory at a time where ``inner`` allows it.

        Raises :class:`~talaria.errors.AggregationError` for a second update of a client, for one too old, and where
        there is none at all: a version must come of it.
        """
        version, count, last = int(state[VERSION]), 0, ""

        def rows() -> Iterator[Update]:
            nonlocal count, last
            for update in updates:
                check(shared, update)
                late = staleness(update, version)
                if late > self.max_staleness:
                    raise AggregationError(
                        f"update of client {update.client!r}: {late} versions behind; "
                        f"at most {self.max_staleness} count"
                    )
                if count and update.client <= last:
                    raise AggregationError(
                        f"update of client {update.client!r} came after {last!r}; sort them, one of each client"
                    )
                count, last = count + 1, update.client
                yield self._weighed(_compared(shared, update, version), late)

        new, inner = self.inner.apply(shared, tree.under(state, INNER), rows())
        if not count:
            raise AggregationError("fedbuff: no update to fold; wait until the buffer holds some")
        kept = tree.without(dict(state), INNER) | {VERSION: torch.tensor(version + 1)}
        return self._paced(shared, new), kept | tree.prefixed(inner, INNER)

    def flush(self, shared: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Fold what is in the buffer, full or not (before a shutdown); an empty one changes nothing.

        Raises :class:`~talaria.errors.AggregationError` where a robust ``inner`` has too few rows.
        """
        return self._fold(tree.copied(shared), dict(state)) if occupied(state) else (tree.copied(shared), dict(state))

    def _arrive(self, shared: Tensors, state: Tensors, update: Update) -> tuple[Tensors, Tensors]:
        version = int(state[VERSION])
        if staleness(update, version) > self.max_staleness:
            return shared, _counted(state, STALE)
        mark = entries.raw(entries.digest(update))
        who = quote(update.client, safe="")
        slot = BUFFER + who + "/"
        waiting = tree.under(state, slot)
        folded = state.get(SEEN + who)
        if (waiting and torch.equal(waiting["mark"], mark)) or (folded is not None and torch.equal(folded[8:], mark)):
            return shared, _counted(state, REPEATED)
        if waiting and entries.unpack(waiting, _layout(state)).base > update.base:
            return shared, _counted(state, STALE)
        update = _compared(shared, update, version)
        if update.mask is not None:
            layout = _layout(state)
            if layout is not None and not same_layout(layout, update.mask.layout):
                raise AggregationError(
                    f"update of client {update.client!r}: its mask belongs to another model than the buffered ones; "
                    f"build every mask of a run from one layout"
                )
            state[LAYOUT] = entries.pack_layout(update.mask.layout)
        state = tree.without(state, slot) | tree.prefixed(entries.pack(update) | {"mark": mark}, slot)
        return self._fold(shared, state) if len(occupied(state)) >= self.capacity else (shared, state)

    def _fold(self, shared: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        version, layout = int(state[VERSION]), _layout(state)
        waiting = {slot: entries.unpack(tree.under(state, slot), layout) for slot in occupied(state)}
        rows = sorted(waiting.values(), key=lambda u: u.client)
        rows = [self._weighed(u, staleness(u, version)) for u in rows]
        new, inner = self.inner.apply(shared, tree.under(state, INNER), rows)
        new = self._paced(shared, new)
        seen = {
            SEEN + slot[len(BUFFER) : -1]: torch.cat((entries.raw(u.base.to_bytes(8, "big")), state[slot + "mark"]))
            for slot, u in waiting.items()
        }
        kept = tree.without(tree.without(state, BUFFER), INNER) | seen
        # A digest whose base is too old to be taken guards nothing any more.
        oldest = version + 1 - self.max_staleness
        kept = {k: v for k, v in kept.items() if not k.startswith(SEEN) or _base(v) >= oldest}
        return new, kept | {VERSION: torch.tensor(version + 1)} | tree.prefixed(inner, INNER)

    def _paced(self, shared: Tensors, new: Tensors) -> Tensors:
        if self.lr == 1.0:
            return new
        return new | {k: _scaled(k, shared[k], new[k], self.lr) for k in trained(shared)}

    def _weighed(self, update: Update, late: int) -> Update:
        s = discount(late, self.a)
        if self.normalise == "convex":
            return update.but(weight=update.weight * s)
        floats = {k: v * s for k, v in update.tensors.items() if v.is_floating_point()}
        return update.but(tensors=update.tensors | floats)


def occupied(state: Tensors) -> list[str]:
    """The prefixes of the buffer's entries."""
    return sorted(k.removesuffix("mark") for k in state if k.startswith(BUFFER) and k.endswith("/mark"))


def least(aggregator: Aggregator) -> int:
    """The fewest updates that ``aggregator`` folds without an error."""
    if isinstance(aggregator, Bucketed):
        return (aggregator.inner.least - 1) * aggregator.size + 1
    if isinstance(aggregator, Wrapper) and not isinstance(aggregator, FedBuff):
        return least(aggregator.inner)
    return aggregator.least if isinstance(aggregator, RowRule) else 1


def _compared(shared: Tensors, update: Update, version: int) -> Update:
    """The update as a difference to what the device had downloaded."""
    if update.kind == "value" and update.base != version:
        raise AggregationError(
            f"update of client {update.client!r}: values of version {update.base} cannot be compared with "
            f"version {version}; send kind='delta', the difference to what was downloaded"
        )
    return as_delta(update, gathered(shared, update.tensors, update.mask) if update.kind == "value" else {})


def _layout(state: Tensors) -> ChannelLayout | None:
    return entries.unpack_layout(state[LAYOUT]) if LAYOUT in state else None


def _counted(state: Tensors, name: str) -> Tensors:
    return state | {name: state[name] + 1}


def _base(seen: torch.Tensor) -> int:
    return int.from_bytes(bytes(seen[:8].tolist()), "big")


def _scaled(name: str, old: torch.Tensor, new: torch.Tensor, lr: float) -> torch.Tensor:
    moved = not_below(name, old + lr * (new.to(torch.float64) - old)).to(old.dtype)
    if not is_finite(moved):
        raise AggregationError(f"tensor {name!r}: the step left the range of {old.dtype}; lower lr")
    return torch.where(new == old, old, moved)
