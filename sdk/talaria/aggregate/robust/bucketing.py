"""Bucketing: average within random buckets before a robust rule (Karimireddy et al., ICLR 2022)."""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from talaria import tensors
from talaria.aggregate.arithmetic import cast
from talaria.aggregate.base import Aggregator
from talaria.aggregate.robust.stacked_updates import Gathered, RowRule, Rows, gather, settle
from talaria.aggregate.validation import check_count
from talaria.aggregate.wrappers import INNER, chain
from talaria.errors import ConfigError
from talaria.tensors import Array, Tensors
from talaria.types import Update

KEY, ROUND = "bucket/key", "bucket/round"


@dataclass(frozen=True, kw_only=True)
class Bucketed:
    """``inner`` over the means of random buckets of ``size`` rows; ``size=1`` would be ``inner``, and is refused.

    Within a bucket each coordinate is the mean of its holders, and the bucket holds what any of its rows does. Use it
    where clients differ and attackers are few: ``f`` of them can spoil ``f`` buckets of only ``n / size``, and
    ``inner`` refuses fewer buckets than its ``f`` needs.

    The buckets of each round derive from a key in the state (``bucket/key``, 32 bytes): secret, so that attackers
    cannot choose their bucket, and kept, so that a round can be repeated. ``seed`` fixes the key; without one, ``init``
    draws it from the operating system, and a simulation takes its run's seed (:func:`repeatable`).
    """

    inner: RowRule
    size: int = 2
    seed: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, RowRule):
            raise ConfigError(
                f"bucketed: inner={self.inner!r} does not compare rows; use median, trimmed_mean, krum, multi_krum, "
                f"rfa or centered_clip"
            )
        check_count("bucketed", "size", self.size, 2)
        if self.seed is not None:
            check_count("bucketed", "seed", self.seed, 0)

    def init(self, shared: Tensors) -> Tensors:
        """The key, a round counter, and the state of ``inner`` under ``inner/``."""
        secret = np.frombuffer(bytearray(secrets.token_bytes(32)), np.uint8)
        own: Tensors = {KEY: secret if self.seed is None else _key(self.seed), ROUND: np.array(0, np.int64)}
        return own | tensors.prefixed(self.inner.init(shared), INNER)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state; order of clients does not matter."""
        gathered = gather(shared, updates)
        state = tensors.copied(state)
        if not len(gathered.rows):
            return tensors.copied(shared), state
        order = permutation(state, len(gathered.rows))
        buckets = bucketed(gathered.rows, order, self.size, whole=self.inner.keep == "all")
        few = Gathered(buckets, gathered.counters, gathered.kept)
        new, inner = settle(self.inner, shared, tensors.under(state, INNER), few)
        own = {KEY: state[KEY], ROUND: np.asarray(state[ROUND] + 1)}
        return new, own | tensors.prefixed(inner, INNER)


def repeatable(rule: Aggregator, state: Tensors, seed: int) -> Tensors:
    """The first ``state`` of ``rule``, its key from ``seed`` where it would be a secret: for a simulation, which hides
    its buckets from nobody and is the same one whenever it is run."""
    if not any(isinstance(one, Bucketed) and one.seed is None for one in chain(rule)):
        return state
    return {name: _key(seed) if name.endswith(KEY) else value for name, value in state.items()}


def _key(seed: int) -> Array:
    return np.frombuffer(bytearray(hashlib.sha256(f"bucket {seed}".encode()).digest()), np.uint8)


def permutation(state: Tensors, n: int) -> list[int]:
    """The order of ``n`` rows in the round that ``state`` stands before."""
    text = bytes(state[KEY].tolist()) + f"|{int(state[ROUND])}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
    return shuffled(n, seed)


def shuffled(n: int, seed: int) -> list[int]:
    """``0..n-1`` shuffled by Fisher and Yates with the Mersenne Twister: the order that ``torch.randperm`` draws from
    a generator of this seed, of which both take the lower 32 bits."""
    # RandomState's stream is frozen (numpy's NEP 19), so that a round can be repeated for good.
    draws = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, n, dtype=np.uint32).tolist()
    order = list(range(n))
    for i in range(n - 1):
        j = i + draws[i] % (n - i)
        order[i], order[j] = order[j], order[i]
    return order


def bucketed(rows: Rows, order: list[int], size: int, *, whole: bool = False) -> Rows:
    """The mean rows of ``ceil(n / size)`` buckets; the weight of a bucket is the sum of its rows'.

    A bucket holds what any of its rows holds, or, where ``whole``, what all of them do.
    """
    cuts = [order[i : i + size] for i in range(0, len(order), size)]
    means = {k: [_mean(rows.values[k][cut], rows.held[k][cut]) for cut in cuts] for k in rows.names}
    return replace(
        rows,
        clients=tuple(f"bucket {i}" for i in range(len(cuts))),
        weights=np.array([rows.weights[cut].sum() for cut in cuts]),
        values={k: np.stack(v) for k, v in means.items()},
        held={k: np.stack([_held(h[cut], whole) for cut in cuts]) for k, h in rows.held.items()},
    )


def _held(held: Array, whole: bool) -> Array:
    return np.asarray(held.all(0) if whole else held.any(0))


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def _mean(values: Array, held: Array) -> Array:
    total = np.where(held, values, 0.0).astype(np.float64).sum(0)
    return cast(np.where(held.any(0), total / held.sum(0), 0.0), values.dtype)
