"""Whose sources average uniformly can be told to do so; the default weighs devices by their samples."""

import numpy as np
import pytest

from talaria.algorithms import load
from talaria.errors import ConfigError


@pytest.mark.parametrize("name", ["apfl", "ditto", "fedprox", "fedrep", "fedbabu", "lg_fedavg", "perfedavg"])
@pytest.mark.parametrize(("weighting", "share"), [("samples", 4 / 24), ("uniform", 1 / 2)])
def test_devices_weigh_as_asked(tiny, name, weighting, share):
    algorithm = load(name, {"weighting": weighting})
    small, large = tiny(count=4, client="a"), tiny(count=20, client="b", seed=2)
    shared, private = algorithm.init(small.model, small.split)
    sent = [algorithm.fit(task, shared, private)[0] for task in (small, large)]
    mean, _ = algorithm.aggregator.apply(shared, {}, sent)
    for k in shared:
        want = share * sent[0].tensors[k].astype(np.float64) + (1 - share) * sent[1].tensors[k]
        np.testing.assert_allclose(mean[k], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["apfl", "ditto", "fedprox"])
def test_another_weighting_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}'?: weighting='even'"):
        load(name, {"weighting": "even"})
