"""Class statistics as sums: the pool of a fleet whose devices nobody sees is the pool of the same devices seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria import tensors
from talaria.aggregate.class_statistics import ALL, COUNT, MEAN, SENT, Pool, PooledStatistics, bare, empty, require
from talaria.aggregate.fedopt import ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.pfedgm import gaussian
from talaria.errors import AggregationError
from talaria.privacy import class_sums
from talaria.privacy.rule import Privacy, PrivateMean, inner_of, private
from talaria.tensors import Tensors
from talaria.types import Update

CLASSES, DIM, MOST = 4, 6, 512


def shared_of(diagonal: bool, seed: int = 0) -> Tensors:
    """As after some rounds: means that devices' are near."""
    rng = np.random.default_rng(seed)
    body = {"w": rng.normal(size=(5, 3)).astype(np.float32)}
    known = {MEAN: rng.normal(0, 3, (CLASSES, DIM)).astype(np.float32)}
    return body | empty(CLASSES, DIM, diagonal=diagonal) | known


def updates_of(shared: Tensors, devices: int, seed: int, diagonal: bool) -> list[Update]:
    """Devices of unlike sizes, each without one of the classes; the last class is nobody's."""
    rng, out = np.random.default_rng(seed), []
    for number in range(devices):
        held = [c for c in range(CLASSES - 1) if c != number % (CLASSES - 1)]
        y = rng.choice(held, int(rng.integers(5, 300)))
        z = shared[MEAN][y] + rng.normal(0, 0.7, (len(y), DIM)) + rng.normal(0, 0.3, DIM)
        stats = gaussian.collect(z, y, CLASSES, diagonal=diagonal, at_least=2)
        values = dict(zip(SENT, (stats.count, stats.mean, stats.scatter), strict=True))
        sent = {k: np.asarray(values.get(k, np.zeros_like(shared[k])), np.float32) for k in ALL}
        sent["w"] = shared["w"] + rng.normal(0, 0.1, (5, 3)).astype(np.float32)
        out.append(Update(sent, float(len(y) + 3), f"d{number:02}"))
    return out


def seen(shared: Tensors, updates: list[Update]) -> Pool:
    pool = Pool(CLASSES, DIM, shared["stats/within"].shape)
    for one in updates:
        pool.add(*require(shared, one))
    return pool


@pytest.mark.parametrize("diagonal", [False, True])
@given(devices=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_exact_sums_are_the_pool(diagonal: bool, devices: int, seed: int) -> None:
    shared = shared_of(diagonal)
    updates = updates_of(shared, devices, seed, diagonal)
    sums: Tensors = {}
    for one in updates:
        part = class_sums.brought(shared, one, one.weight, MOST)
        assert {k: v.shape for k, v in part.items()} == class_sums.shapes({k: v.shape for k, v in shared.items()})
        assert all(np.abs(part[k]).max() <= 1 for k in class_sums.SHARES), "within the bound of shares"
        sums = {k: sums.get(k, 0) + v * (one.weight / MOST) for k, v in part.items()}
    want, got = seen(shared, updates), class_sums.pooled(shared, sums, MOST)
    assert np.array_equal(got.n, want.n)
    assert np.array_equal(got.holders, want.holders)
    held = want.n > 0
    assert np.allclose(got.n_squared, want.n_squared, rtol=1e-9)
    assert np.allclose(got.mean[held], want.mean[held], rtol=0, atol=1e-9)
    assert np.allclose(got.between, want.between, rtol=1e-7, atol=1e-7)
    assert np.allclose(got.within, want.within, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("inner", [MaskedMean(), ServerMomentum(inner=MaskedMean())], ids=["mean", "momentum"])
@pytest.mark.parametrize("diagonal", [False, True])
def test_the_protocol_changes_no_byte_and_the_grid_little(inner: MaskedMean | ServerMomentum, diagonal: bool) -> None:
    shared, plain = shared_of(diagonal), PooledStatistics(inner=inner)
    updates, both = updates_of(shared, 7, 3, diagonal), []
    for secure in (True, False):
        rule = private(plain, Privacy(secure=secure, most_weight=MOST))
        both.append(rule.apply(shared, rule.init(shared), updates))
    assert tensors.equal(both[0][0], both[1][0])
    assert tensors.equal(both[0][1], both[1][1])
    want = plain.apply(shared, plain.init(shared), updates)[0]
    assert np.array_equal(both[0][0][COUNT], want[COUNT])
    # A device's value is off by half a step of 1024 / unit times 512 samples; the rest divides by hundreds of them.
    for name in ALL:
        assert np.abs(both[0][0][name].astype(np.float64) - want[name]).max() < 2e-2 * np.abs(want[name]).max(), name
    assert not tensors.equal({k: both[0][0][k] for k in ALL}, {k: shared[k] for k in ALL})


def test_a_device_above_the_largest_weight_counts_as_so_many_samples() -> None:
    shared = shared_of(False)
    (one,) = updates_of(shared, 1, 5, False)
    part = class_sums.brought(shared, one, 10.0, 10)
    pool, whole = class_sums.pooled(shared, part, 10), seen(shared, [one])
    assert pool.n.sum() <= 10
    held = whole.n > 0
    assert np.array_equal(pool.holders > 0, held)
    share = 10.0 / one.weight
    assert np.allclose(pool.within, whole.within * share)
    assert np.abs(pool.n - whole.n * share).max() <= 0.5


def test_statistics_that_are_none_are_refused() -> None:
    shared = shared_of(False)
    updates = updates_of(shared, 4, 5, False)
    rule = inner_of(private(PooledStatistics(inner=MaskedMean()), Privacy(secure=True)))
    assert isinstance(rule, PrivateMean)
    with pytest.raises(AggregationError, match="is missing"):
        rule.apply(shared, {}, [*updates[:3], bare(updates[3])])
    spoilt = updates[3].but(tensors={**updates[3].tensors, COUNT: updates[3].tensors[COUNT] + np.float32(0.5)})
    with pytest.raises(AggregationError, match="whole numbers"):
        rule.apply(shared, {}, [*updates[:3], spoilt])
