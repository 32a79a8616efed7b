"""The plain weighted mean, the server half of FedAvg (McMahan et al., 2017)."""

from collections.abc import Iterable
from dataclasses import dataclass

from talaria.aggregate.checks import Weighting, check_weighting
from talaria.aggregate.masked import MaskedMean
from talaria.types import Tensors, Update


@dataclass(frozen=True, kw_only=True)
class Mean:
    """``G = sum_k n_k x_k / sum_k n_k``; under masks, over those who kept a coordinate (:class:`MaskedMean`)."""

    weighting: Weighting = "samples"

    def __post_init__(self) -> None:
        check_weighting("mean", self.weighting)

    def init(self, shared: Tensors) -> Tensors:
        """No state."""
        return {}

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> tuple[Tensors, Tensors]:
        """The new shared state; see :meth:`MaskedMean.apply`."""
        return MaskedMean(weighting=self.weighting).apply(shared, state, updates)
