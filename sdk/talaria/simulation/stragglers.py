"""How long simulated devices take: drawn from (run, client, round), so that the same run has the same stragglers.

A device is slow or fast by nature, by a factor that is log-normal around 1; each of its trainings takes that factor
times something between a half and, seldom, several. Times are in units of a typical training.
"""

from functools import lru_cache

import torch

from talaria.seeds import generator

SPREAD = 0.7
"""Standard deviation of the factor's logarithm: one device in forty is four times slower than the typical one."""


def delay(run: int, client: str, round: int) -> float:
    """From being asked to the update's arrival, above 0; ``run`` is the run's seed.

    >>> delay(0, "anna", 3) == delay(0, "anna", 3)
    True
    """
    draw = torch.rand((), generator=generator(run, client, round, "delay"), dtype=torch.float64)
    return _pace(run, client) * (0.5 - 0.5 * float(torch.log1p(-draw)))


@lru_cache(maxsize=4096)
def _pace(run: int, client: str) -> float:
    normal = torch.randn((), generator=generator(run, client, 0, "pace"), dtype=torch.float64)
    return float(torch.exp(SPREAD * normal))
