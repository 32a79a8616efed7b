"""Partitions: disjoint, complete, deterministic, and as skewed as asked."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.data import partition
from talaria.data.partition import Indices
from talaria.errors import ConfigError

LABELS = np.random.default_rng(7).integers(0, 10, 2000)

CUTS: dict[str, Callable[[int], list[Indices]]] = {
    "dirichlet": lambda seed: partition.dirichlet(LABELS, 13, 0.3, seed, min_samples=5),
    "mixed": lambda seed: partition.mixed(LABELS, np.full((13, 10), 0.1), 50, seed),
}


@pytest.mark.parametrize("name", CUTS)
def test_disjoint_deterministic_and_seeded(name: str) -> None:
    parts = CUTS[name](1)
    joined = np.concatenate(parts)
    assert len(parts) == 13
    assert len(np.unique(joined)) == len(joined)
    assert all(p.dtype == np.int64 and len(p) for p in parts)
    assert all(np.array_equal(a, b) for a, b in zip(parts, CUTS[name](1), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, CUTS[name](2), strict=True))
    if name != "mixed":
        assert len(joined) == 2000


@given(
    st.lists(st.integers(0, 4), min_size=30, max_size=150),
    st.integers(1, 10),
    st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_dirichlet_gives_each_client_its_least_and_loses_nothing(
    labels: list[int], clients: int, alpha: float, least: int, seed: int
) -> None:
    parts = partition.dirichlet(np.array(labels), clients, alpha, seed, min_samples=least)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert min(map(len, parts)) >= least


def test_small_alpha_skews_and_large_alpha_does_not() -> None:
    def skew(alpha: float) -> float:
        parts = partition.dirichlet(LABELS, 10, alpha, 0, min_samples=5)
        return float(partition.mixes_of(LABELS, parts, 10).max(1).mean())

    assert skew(0.05) > 0.5
    assert skew(1000.0) < 0.2


def test_mixed_follows_the_mixes_in_every_prefix() -> None:
    labels = np.repeat(np.arange(4), 5000)
    mixes = np.array([[0.7, 0.3, 0, 0], [0, 0, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25]])
    parts = partition.mixed(labels, mixes, 2000)
    for prefix in (500, 2000):
        got = partition.mixes_of(labels, [p[:prefix] for p in parts], 4)
        assert np.abs(got - mixes).max() < 0.06


def test_mixed_fills_in_when_a_label_runs_out() -> None:
    labels = np.repeat(np.arange(3), 10)
    parts = partition.mixed(labels, np.array([[1.0, 0, 0], [1.0, 0, 0], [0.5, 0.5, 0]]), 10)
    assert labels[parts[0]].tolist() == [0] * 10
    assert sorted(np.concatenate(parts).tolist()) == list(range(30))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=120), st.floats(0, 0.4), st.floats(0.05, 0.95))
def test_stratified_is_a_cut_with_the_asked_shares(labels: list[int], val: float, test: float) -> None:
    y = np.array(labels)
    parts = partition.stratified(y, val, test, np.random.default_rng(0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))
    train, checked, tested = parts
    assert len(train) >= 1
    assert len(tested) == min(max(1, round(test * len(y))), len(y) - 1)
    assert len(checked) <= round(val * len(y))
    for label in set(labels):
        fair = len(tested) * (y == label).mean()
        assert abs((y[tested] == label).sum() - fair) < 1 + 1e-9


@given(st.integers(1, 300), st.data())
def test_spread_picks_distinct_positions(count: int, data: st.DataObject) -> None:
    picked = data.draw(st.integers(0, count))
    at = partition.spread(count, picked)
    assert len(set(at.tolist())) == picked
    assert all(0 <= i < count for i in at)


def test_bad_requests_name_the_value() -> None:
    with pytest.raises(ConfigError, match=r"clients=0 must be in 1..100"):
        partition.dirichlet(LABELS[:100], 0, 1.0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"alpha={alpha}"):
            partition.dirichlet(LABELS, 5, alpha)
    with pytest.raises(ConfigError, match=r"clients=20 must be in 1..10"):
        partition.dirichlet(LABELS[:100], 20, 1.0, min_samples=10)
    with pytest.raises(ConfigError, match="min_samples=0"):
        partition.dirichlet(LABELS, 5, 1.0, min_samples=0)
    with pytest.raises(ConfigError, match="3 clients x 10 samples exceed the 20"):
        partition.mixed(np.zeros(20, dtype=int), np.ones((3, 1)), 10)
