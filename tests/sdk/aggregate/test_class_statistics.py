"""What class statistics must be: every honest scatter passes, and whatever passes can be factored on a device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.aggregate import class_statistics as pooled
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.pfedgm import gaussian
from talaria.errors import AggregationError
from talaria.types import Update

C, RULE = 3, pooled.PooledStatistics(inner=MaskedMean())


def sent(z, y, diagonal=False, **changes):
    """The update of a device with these features."""
    found = gaussian.collect(z.numpy(), y.numpy(), C, diagonal=diagonal)
    shared = pooled.empty(C, z.shape[1], diagonal=diagonal)
    tensors = shared | {k: np.zeros_like(shared[k]) for k in pooled.ANSWERED}
    values = {pooled.COUNT: found.count, pooled.MEAN: found.mean, pooled.WITHIN: found.scatter}
    found = {k: np.asarray(v, np.float32) for k, v in (values | changes).items()}
    return shared, Update(tensors=tensors | found, weight=len(y))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([1, 4, 32, 128]), st.sampled_from([1e-6, 1.0, 1e3]))
def test_every_honest_scatter_passes_and_what_is_pooled_can_be_factored(seed, count, dim, scale):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(count, dim, generator=g) * scale + torch.randn(dim, generator=g) * scale
    shared, update = sent(z, torch.randint(C, (count,), generator=g))
    after, _ = RULE.apply(shared, {}, [update, update.but(client="other")])
    np.linalg.cholesky(gaussian.regular(after[pooled.WITHIN].astype(np.float64)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: np.put(s, [1, 4], 1e5), "eigenvalue"),
        (lambda s: np.put(s, [1], 9.0), "not symmetric"),
        (lambda s: np.fill_diagonal(s, -1.0), "a variance of -1"),
        (lambda s: np.negative(s, out=s), "variance"),
    ],
)
def test_a_scatter_that_is_no_covariance_is_refused_as_a_whole(spoil, message):
    z = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    shared, update = sent(z, torch.arange(30) % C)
    spoil(update.tensors[pooled.WITHIN])
    with pytest.raises(AggregationError, match=message):
        RULE.apply(shared, {}, [update])


@pytest.mark.parametrize("count", [-3.0, 0.5, 1e-30])
def test_counts_are_whole_numbers_and_none_is_negative(count):
    shared, update = sent(torch.randn(6, 2), torch.arange(6) % C)
    update.tensors[pooled.COUNT][0] = count
    with pytest.raises(AggregationError, match="whole numbers"):
        RULE.apply(shared, {}, [update])
