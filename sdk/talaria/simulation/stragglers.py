"""How long simulated devices take: drawn from (run, client, round), so that the same run has the same stragglers.

A device is slow or fast by nature, by a factor that is log-normal around 1; each of its trainings takes that factor
times something between a half and, seldom, several. Times are in units of a typical training.
"""

import math
from functools import lru_cache
from statistics import NormalDist

from talaria.seeds import uniform

SPREAD = 0.7
"""Standard deviation of the factor's logarithm: one device in forty is four times slower than the typical one."""


def delay(run: int, client: str, round: int) -> float:
    """From being asked to the update's arrival, above 0; ``run`` is the run's seed.

    >>> delay(0, "anna", 3) == delay(0, "anna", 3)
    True
    """
    return _pace(run, client) * (0.5 - 0.5 * math.log1p(-uniform(run, client, round, "delay")))


@lru_cache(maxsize=4096)
def _pace(run: int, client: str) -> float:
    middle = max(uniform(run, client, 0, "pace"), 2**-53)
    return math.exp(SPREAD * NormalDist().inv_cdf(middle))
