"""How alike a variant's answers are to those of fp32: by what the task decides, or, of numbers, by how far they lie
apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from talaria import shares, tasks
from talaria.tensors import Array

LEAST_SPREAD = 1e-12


@dataclass(frozen=True)
class Likeness:
    """Of ``count`` decisions ``same`` are those of fp32; of a task that says numbers ``distance`` is the root mean
    square difference to fp32 as a share of the spread of what fp32 gives, of the worst of its targets."""

    count: int
    same: int = 0
    distance: float | None = None

    @property
    def agreement(self) -> float:
        """From 0 to 1, the higher the more alike; of numbers 1 less their distance."""
        return self.same / max(1, self.count) if self.distance is None else max(0.0, 1 - self.distance)

    def why_not(self, agreement: float, distance: float) -> str:
        """Why they are not alike enough; empty where they are."""
        if self.distance is not None:
            if self.distance <= distance:
                return ""
            return (
                f"lies {self.distance:.3g} of the spread apart from fp32 on {self.count} inputs, at most {distance} is "
                "asked for"
            )
        if shares.at_least(self.same, self.count, agreement):
            return ""
        return f"agrees with fp32 on {self.same} of {self.count} inputs, a share of {agreement} is asked for"


def likeness(task: str, given: Array, exact: Array, y: Array | None = None) -> Likeness:
    """Of the outputs ``given`` to ``exact``, those of fp32 for the same inputs; steps whose label in ``y`` says that
    they are padding do not count."""
    goal = tasks.of(task)
    mine, theirs = goal.decided(given), goal.decided(exact)
    if mine is None or theirs is None:
        return _apart(given, exact, y)
    if goal.name == "per_step" and y is not None:
        known = y != -1
        mine, theirs = mine[known], theirs[known]
    return Likeness(int(mine.size), int((mine == theirs).sum()))


def _apart(given: Array, exact: Array, y: Array | None) -> Likeness:
    found, wanted = (one.reshape(len(one), -1).astype(np.float64) for one in (given, exact))
    if not np.isfinite(found).all():
        return Likeness(len(found), distance=float("inf"))
    spread = wanted.std(0)
    if y is not None:  # one input, or a model that says the same of all, has no spread of its own
        spread = np.maximum(spread, y.reshape(len(y), -1).astype(np.float64).std(0))
    spread = np.where(spread > LEAST_SPREAD, spread, np.maximum(np.abs(wanted).max(0), LEAST_SPREAD))
    return Likeness(len(found), distance=float((np.sqrt(((found - wanted) ** 2).mean(0)) / spread).max()))
