"""Updates side by side, one row per client: what the robust rules read. Memory is O(clients x model)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from talaria import tensors
from talaria.aggregate.arithmetic import cast
from talaria.aggregate.masked_sum import Counters, Kept, indicator, rows
from talaria.aggregate.validation import check_count, checked, is_finite, is_statistic, not_below, positions, trained
from talaria.errors import AggregationError, ConfigError
from talaria.tensors import Array, Tensors
from talaria.types import Update

Keep = Literal["holders", "all"]

_SLAB = 1 << 18
"""Coordinates worked on at once: bounds the scratch memory beside the rows."""


@dataclass(frozen=True)
class Rows:
    """``n`` clients in order of their names.

    ``values[k]``: (n, *shape of k), 0 where a client does not hold the coordinate. ``held[k]``: bool, the same
    rank, size 1 along dimensions that no mask touches. ``weights``: float64 (n,). Values are new values or, where
    ``delta``, differences; every rule here treats both alike, as it moves with its inputs.
    """

    clients: tuple[str, ...]
    weights: Array
    values: Tensors
    held: Tensors
    delta: bool

    def __len__(self) -> int:
        return len(self.clients)

    def slabs(self, name: str) -> Iterator[tuple[slice, Array, Array]]:
        """``name`` flattened and cut to bound scratch memory: (where, values float64 (n, s), held bool (n, s))."""
        x = self.values[name].reshape(len(self), -1)
        h = np.broadcast_to(self.held[name], self.values[name].shape).reshape(len(self), -1)
        for start in range(0, x.shape[1], _SLAB):
            part = slice(start, start + _SLAB)
            yield part, x[:, part].astype(np.float64), h[:, part]

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")
    def by_column(self, name: str, rule: Callable[[Array, Array], Array]) -> Array:
        """``rule`` over ``name`` slab by slab, float64 in the tensor's shape; 0 where nobody holds a coordinate."""
        shape = self.values[name].shape[1:]
        out = np.zeros(prod(shape))
        for part, x, h in self.slabs(name):
            out[part] = np.where(h.any(0), rule(x, h), 0.0)
        return out.reshape(shape)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors."""
        return tuple(self.values)

    @property
    def weighty(self) -> tuple[str, ...]:
        """The tensors that are weights, not running statistics: distances are taken over these alone."""
        return tuple(k for k in self.values if not is_statistic(k))


@runtime_checkable
class RowRule(Protocol):
    """A rule over :class:`Rows`. :func:`settle` does the rest: checks, support, counters, what stays."""

    @property
    def f(self) -> int:
        """Wrong clients to survive."""
        ...

    @property
    def min_holders(self) -> int | None:
        """Holders that a coordinate needs to move; None for ``2f+1``."""
        ...

    @property
    def keep(self) -> Keep:
        """``"all"`` moves only coordinates that all rows hold."""
        ...

    @property
    def least(self) -> int:
        """The fewest rows under which ``f`` wrong ones cannot win."""
        ...

    def init(self, shared: Tensors) -> Tensors: ...

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]: ...

    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """``(centre, state)``: one tensor per name of ``rows``; anything where nobody holds a coordinate."""
        ...


@dataclass(frozen=True, kw_only=True)
class RobustRule(ABC):
    """A :class:`RowRule` of Talaria's own, whose class says the ``centre``.

    - ``f``: how many wrong clients to survive. Fewer than ``least`` updates are refused.
    - ``min_holders``: a coordinate that fewer hold (by default fewer than ``2f+1``) stays: its sole keeper would own
      it. ``keep="all"`` moves only coordinates that all hold. Which channels enough clients kept is said as
      ``mask/<group>``.
    """

    owner: ClassVar[str]
    """How errors call the rule."""
    f: int = 1
    min_holders: int | None = None
    keep: Keep = "holders"

    def __post_init__(self) -> None:
        check_count(self.owner, "f", self.f, 0)
        if self.min_holders is not None:
            check_count(self.owner, "min_holders", self.min_holders, 1)
        if self.keep not in ("holders", "all"):
            raise ConfigError(f"{self.owner}: keep={self.keep!r} is unknown; use 'holders' or 'all'")

    @property
    def least(self) -> int:
        """``2f+1``."""
        return 2 * self.f + 1

    @property
    def leaves(self) -> bool:
        """Whether coordinates that some hold may stay."""
        return self.keep == "all" or _needed(self) > 1

    def init(self, shared: Tensors) -> Tensors:
        """No state."""
        return {}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state; order of clients does not matter."""
        return settle(self, shared, state, gather(shared, updates))

    @abstractmethod
    def centre(self, shared: Tensors, state: Tensors, rows: Rows) -> tuple[Tensors, Tensors]:
        """``(centre, state)``, as :meth:`RowRule.centre` has it."""


@dataclass(frozen=True)
class Gathered:
    """The rows of one fold, and what is no matter of rows."""

    rows: Rows
    counters: Tensors
    kept: Kept


def gather(shared: Tensors, updates: Iterable[Update]) -> Gathered:
    """Check the updates and lay them out as rows, in order of client names."""
    most, kept = Counters(shared), Kept()
    every: list[Update] = []
    for update in checked(shared, updates):
        most.add(update)
        kept.add(update.mask)
        every.append(update)
    every.sort(key=lambda u: u.client)
    values, held = {}, {}
    for name in trained(shared) if every else ():
        values[name], held[name] = _laid_out(name, shared[name], every)
    weights = np.array([u.weight for u in every], np.float64)
    clients = tuple(u.client for u in every)
    return Gathered(Rows(clients, weights, values, held, any(u.kind == "delta" for u in every)), most.values, kept)


def _laid_out(name: str, dense: Array, updates: list[Update]) -> tuple[Array, Array]:
    values = np.zeros((len(updates), *dense.shape), dense.dtype)
    held = []
    for i, update in enumerate(updates):
        value = cast(update.tensors[name], dense.dtype)
        where = positions(name, update.mask)
        if where is None:
            values[i] = value
            held.append(np.ones((1,) * dense.ndim, np.bool_))
        else:
            index, width = rows(dense.shape, where)
            values[i].reshape(-1, width)[index] = value.reshape(-1, width)
            held.append(indicator(dense.shape, where).astype(np.bool_))
    widest = [max(sizes) for sizes in zip(*(h.shape for h in held), strict=True)]
    return values, np.stack([np.broadcast_to(h, widest) for h in held])


def _needed(rule: RowRule) -> int:
    """So many holders a coordinate needs to move."""
    return rule.min_holders or 2 * rule.f + 1


def settle(rule: RowRule, shared: Tensors, state: Tensors, gathered: Gathered) -> tuple[Tensors, Tensors]:
    """``apply`` of a row rule: coordinates with too few holders stay, the others move to the rule's centre."""
    new, rows = tensors.copied(shared), gathered.rows
    if not rows.names:
        return new | gathered.counters, tensors.copied(state)
    owner = type(rule).__name__
    if len(rows) < rule.least:
        raise AggregationError(
            f"{owner}(f={rule.f}) got {len(rows)} rows and needs {rule.least} to outvote {rule.f} wrong ones; "
            f"wait for more clients, or lower f (of multi_krum also m)"
        )
    need = len(rows) if rule.keep == "all" else _needed(rule)
    moves = {k: np.asarray(h.sum(0) >= need) for k, h in rows.held.items()}
    # A coordinate that will stay takes no part in distances: a lone liar could stretch them at will.
    if not all(m.all() for m in moves.values()):
        rows = replace(
            rows,
            held={k: h & moves[k] for k, h in rows.held.items()},
            values={k: v * moves[k] for k, v in rows.values.items()},
        )
    centre, state = rule.centre(shared, state, rows)
    for name, z in centre.items():
        old = shared[name]
        new[name] = np.where(moves[name], cast(_reached(name, z, old) if rows.delta else z, old.dtype), old)
        if not is_finite(new[name]):
            raise AggregationError(f"tensor {name!r}: the aggregate left the range of {old.dtype}; clip the updates")
    new |= gathered.counters
    if need > 1:
        new |= gathered.kept.bitmaps(shared, gathered.kept.clients if rule.keep == "all" else need)
    return new, state


@np.errstate(over="ignore", invalid="ignore")
def _reached(name: str, step: Array, old: Array) -> Array:
    return not_below(name, np.asarray(step.astype(np.float64) + old))
