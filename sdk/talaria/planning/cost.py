"""The latency model of one family on one device: prices of what layers compute and move, fitted on probes.

Needs no torch; :mod:`talaria.planning.latency_model` measures with it, and a device without torch by its kit's graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from talaria import valid
from talaria.errors import ConfigError, ModelError
from talaria.planning.anatomy import FEATURES, Anatomy, Widths
from talaria.tensors import Array

DRIFT = 0.03
"""How much a model's time, as a share of the unpruned one's, changes on a quiet machine from minute to minute, as seen.
Beside busy neighbours it changes more; then what was measured counts."""

MOST_SPARE = 0.25
"""The most that is kept in hand: on a machine that changes more than that, no plan is worth its prediction."""


@dataclass(frozen=True)
class Cost:
    """The latency model of one family on one device.

    ``milliseconds[i]`` is the price of feature ``i``; ``error`` the root mean square, over the probes, of the relative
    error of a fit that did not see the probe; ``graph_bytes`` the size of the exported file without its weights;
    ``block`` what widths are rounded up to, as this device computes them. ``noise`` is how much the probes' times, as
    shares of the unpruned model's, changed while they were measured (:func:`changed`).
    """

    milliseconds: tuple[float, ...]
    dense_ms: float
    error: float
    block: int
    graph_bytes: int
    probes: int
    seconds: float
    noise: float = 0.0

    def __post_init__(self) -> None:
        good = len(self.milliseconds) == len(FEATURES) and all(0 <= price < math.inf for price in self.milliseconds)
        if not good or not 0 < self.dense_ms < math.inf:
            raise ConfigError(f"cost: need {len(FEATURES)} prices that are not negative and dense_ms above 0")
        for name in ("error", "noise", "seconds"):
            valid.number("cost", name, getattr(self, name), "a number from 0", low=0)
        for name in ("block", "graph_bytes", "probes"):
            valid.whole("cost", name, getattr(self, name), 0 if name == "graph_bytes" else 1)

    @property
    def margin(self) -> float:
        """The share of latency to keep in hand, so that a planned model keeps its limit when it is measured."""
        return min(MOST_SPARE, self.drift + 2 * self.error)

    @property
    def drift(self) -> float:
        """How much times are expected to change until a plan is checked: twice what they changed while they were
        measured, at least :data:`DRIFT`."""
        return max(DRIFT, 2 * self.noise)

    @property
    def why_margin(self) -> str:
        """What :attr:`margin` is and what it is for, in words."""
        if self.drift + 2 * self.error > MOST_SPARE:
            held = f"{self.margin:.1%} to spare, the most that is kept"
        else:
            held = (
                f"{self.margin:.1%} to spare ({2 * self.error:.1%} for what the prediction may miss, {self.drift:.1%} "
            )
            held += "for what this machine may change)"
        if self.drift > DRIFT:
            held += f", because times changed by {self.noise:.1%} while they were measured: the machine is busy"
        return held

    @classmethod
    def explaining(
        cls,
        parts: Anatomy,
        widths: Sequence[Widths],
        took: Mapping[str, Sequence[float]],
        block: int,
        graph_bytes: int,
        seconds: float,
    ) -> Cost:
        """What explains the CPU seconds that each of ``widths``, the unpruned model first, ``took`` in each round."""
        return cls.of(parts, widths, list(milliseconds(took).values()), block, graph_bytes, seconds, changed(took))

    @classmethod
    def of(
        cls,
        parts: Anatomy,
        widths: Sequence[Widths],
        measured: Sequence[float],
        block: int,
        graph_bytes: int,
        seconds: float,
        noise: float = 0.0,
    ) -> Cost:
        """What explains the milliseconds ``measured`` at each of ``widths``, in ``seconds`` in all, while they changed
        by ``noise``."""
        rows, taken = np.array([parts.features(w, block) for w in widths]), np.array(measured)
        return cls(
            milliseconds=tuple(float(p) for p in prices(rows, taken)),
            dense_ms=float(taken[0]),
            error=unseen_error(rows, taken),
            block=block,
            graph_bytes=graph_bytes,
            probes=len(widths),
            seconds=seconds,
            noise=noise,
        )

    def latency_ms(self, parts: Anatomy, widths: Widths) -> float:
        """CPU milliseconds for one input on one core."""
        found = zip(parts.features(widths, self.block), self.milliseconds, strict=True)
        return sum(amount * price for amount, price in found)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the inverse."""
        return {**vars(self), "milliseconds": dict(zip(FEATURES, self.milliseconds, strict=True))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cost:
        """What :meth:`to_json` wrote. Raises :class:`~talaria.errors.ConfigError` for anything else."""
        try:
            prices = data["milliseconds"]
            return cls(**{**data, "milliseconds": tuple(float(prices[name]) for name in FEATURES)})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"cost: not a measured cost ({error}); measure this family again") from None


def predicted(figures: Mapping[str, float], spare: float) -> dict[str, float]:
    """``figures`` by their names in a budget as a plan tells them, to four digits: latencies without ``spare``, the
    share of them that is kept in hand."""
    apart = dict.fromkeys(("latency_ms", "latency_ratio"), 1 + spare)
    return {name: float(f"{value / apart.get(name, 1):.4g}") for name, value in figures.items()}


def milliseconds(took: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Milliseconds of each file, from the seconds that it ``took`` in each round.

    Times are ratios to the first file within each round, times its median: drift of the machine cancels out.
    """
    base = took[next(iter(took))]
    return {name: 1e3 * median(base) * _share(own, base) for name, own in took.items()}


def changed(took: Mapping[str, Sequence[float]]) -> float:
    """How much the files' times, as shares of the first one's, changed from the first half of the rounds to the second:
    the root mean square over the files of the relative change. 0 where there is nothing to compare."""
    first, *others = took
    base = took[first]
    half = len(base) // 2
    if not others or not half:
        return 0.0
    moved = [_share(took[n][half:], base[half:]) / _share(took[n][:half], base[:half]) - 1 for n in others]
    return float(np.sqrt(np.mean(np.square(moved))))


def _share(own: Sequence[float], base: Sequence[float]) -> float:
    """The median, over the rounds, of one file's time to the first one's."""
    return median(a / b for a, b in zip(own, base, strict=True))


def prices(rows: Array, taken: Array) -> Array:
    """Coefficients, none negative, with the least squared relative error (Lawson and Hanson 1974, chapter 23)."""
    A = rows / taken[:, None]
    scale = np.maximum(np.abs(A).max(0), 1e-12)
    A = A / scale
    goal = np.ones(len(A))
    x = np.zeros(A.shape[1])
    used: list[int] = []
    for _ in range(3 * A.shape[1]):
        slope = A.T @ (goal - A @ x)
        free = [j for j in range(len(x)) if j not in used and slope[j] > 1e-10]
        if not free:
            break
        used.append(max(free, key=lambda j: slope[j]))
        while True:
            best = np.linalg.lstsq(A[:, used], goal, rcond=None)[0]
            if best.min() > 0:
                break
            # Go towards the free solution until the first coefficient reaches zero, and leave that one out.
            now = x[used]
            short = [i for i in range(len(used)) if best[i] <= 0]
            reach = min(now[i] / (now[i] - best[i]) if now[i] > best[i] else 0.0 for i in short)
            x[used] = now + reach * (best - now)
            gone = [j for i, j in enumerate(used) if x[j] <= 1e-12]
            x[gone] = 0.0
            used = [j for j in used if j not in gone]
        x[:] = 0.0
        x[used] = best
    return np.asarray(x / scale)


def unseen_error(rows: Array, taken: Array) -> float:
    """Root mean square of the relative error at each probe, from the fit to all others."""
    if len(rows) < 3:
        raise ModelError(f"cost: {len(rows)} probes cannot tell a price from noise; give at least 3")
    missed = []
    for i in range(len(rows)):
        others = np.arange(len(rows)) != i
        missed.append(float(rows[i] @ prices(rows[others], taken[others]) / taken[i] - 1))
    return float(np.sqrt(np.mean(np.square(missed))))
