"""What differential privacy has cost so far: a ledger by device, and epsilon by `dp-accounting`.

The guarantee is for one device's whole part in the learning (its update of a round, set to zero, in each round that it
took part in): Gaussian noise of ``noise`` times the bound on an update's length. Of a device that took part in k rounds
that is one Gaussian of ``noise / sqrt(k)``, exactly, and :func:`dp_accounting.get_epsilon_gaussian` has its epsilon in
closed form (Balle and Wang, 2018). The cohort's draw derives from the run's seed, which all know: it hides nobody, so
nothing is taken off for sampling; each device pays for the rounds that it was counted in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from talaria.errors import AggregationError, ConfigError, StateError
from talaria.foreign import parsed
from talaria.tensors import Array, Tensors

KEY = "privacy/ledger"
"""Name of the ledger in a server's state: uint8, the bytes of JSON."""


def epsilon(noise: float, rounds: int, delta: float) -> float:
    """Epsilon at ``delta`` of a device that was counted in ``rounds``; infinite without noise."""
    if rounds == 0:
        return 0.0
    if noise == 0:
        return math.inf
    return float(_library().get_epsilon_gaussian(noise / math.sqrt(rounds), delta))


def noise_for(budget: float, rounds: int, delta: float) -> float:
    """The least noise multiplier with which ``rounds`` cost a device at most ``budget``."""
    found = float(_library().get_sigma_gaussian(budget, delta)) * math.sqrt(max(1, rounds))
    while epsilon(found, rounds, delta) > budget:  # the last bit of the search
        found *= 1 + 1e-12
    return found


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError("privacy: epsilon needs dp-accounting: pip install 'talaria[privacy]'") from None
    return dp_accounting


@dataclass(frozen=True)
class Ledger:
    """In how many rounds each device was counted, with noise ``noise`` and at ``delta``."""

    noise: float
    delta: float
    rounds: Mapping[str, int] = field(default_factory=dict)
    version: int = 0
    """Rounds that were opened."""

    def after(self, devices: Iterable[str]) -> Ledger:
        """The ledger when a round of ``devices`` is opened, whatever becomes of what it opened."""
        counted = dict(self.rounds)
        for name in devices:
            counted[name] = counted.get(name, 0) + 1
        return Ledger(self.noise, self.delta, dict(sorted(counted.items())), self.version + 1)

    @property
    def epsilon(self) -> float:
        """That of the device that took part most."""
        return epsilon(self.noise, max(self.rounds.values(), default=0), self.delta)

    def require(self, budget: float | None) -> None:
        """Raise :class:`AggregationError` where this is beyond ``budget``."""
        if budget is not None and self.epsilon > budget:
            raise AggregationError(
                f"privacy: this round would cost epsilon {self.epsilon:.4g} of {budget:g}; it is not opened. End the "
                "run here, or begin one with more noise or a larger budget"
            )

    def with_past(self, rounds: Mapping[str, int], version: int) -> Ledger:
        """Where another record knows of more: by device, the larger count."""
        known = {**self.rounds, **{name: max(n, self.rounds.get(name, 0)) for name, n in rounds.items()}}
        return Ledger(self.noise, self.delta, dict(sorted(known.items())), max(self.version, version))

    def at(self, noise: float, delta: float) -> Ledger:
        """The same cost in rounds with another noise. Rounds of Gaussian noise add up as ``1 / noise^2``: each device
        counts as many as cost no less. What was counted without noise is not covered, and not counted."""
        if (noise, delta) == (self.noise, self.delta):
            return self
        share = (noise / self.noise) ** 2 if self.noise else 0.0
        rounds = {name: math.ceil(often * share * (1 - 1e-12)) for name, often in self.rounds.items()}
        return Ledger(noise, delta, {name: often for name, often in rounds.items() if often}, self.version)

    def within(self, state: Tensors) -> Tensors:
        """A server's state with this ledger in the place of its own."""
        mine = self.as_tensors()[KEY]
        return {name: mine if name.endswith(KEY) else value for name, value in state.items()}

    def as_tensors(self) -> Tensors:
        """The ledger as a server's state keeps it."""
        text = json.dumps(
            {"noise": self.noise, "delta": self.delta, "rounds": dict(self.rounds), "version": self.version},
            sort_keys=True,
        )
        return {KEY: np.frombuffer(text.encode(), np.uint8).copy()}


def ledger_in(state: Mapping[str, Array]) -> Ledger | None:
    """The ledger in a server's state, also of a rule around the one that keeps it; None without one.

    Raises :class:`StateError` where it is damaged.
    """
    found = next((value for name, value in state.items() if name.endswith(KEY)), None)
    if found is None:
        return None
    try:
        return Ledger(**parsed(found.tobytes()))
    except (ValueError, TypeError) as error:
        raise StateError(f"privacy: the ledger is damaged ({error}); restore the state") from None
