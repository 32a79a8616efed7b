"""Latency of exported models as a ratio to another one's, timed side by side (:mod:`talaria.planning.cpu_timer`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from talaria.planning import cpu_timer

ROUNDS = 10_000
"""Most bursts per candidate; the time that may be spent ends sooner."""


@dataclass(frozen=True)
class Timing:
    """``ms``: median CPU milliseconds per call. ``ratio``: to the first candidate, median over the rounds."""

    ms: float
    ratio: float


def interleaved(candidates: Mapping[str, cpu_timer.Call], *, seconds: float = 0.5) -> dict[str, Timing]:
    """Times all candidates in the same run; the first is the yardstick. ``seconds`` of CPU time in all."""
    took = cpu_timer.interleaved(candidates, ROUNDS, seconds=seconds)
    ratios = cpu_timer.ratios(took, next(iter(candidates)))
    return {name: Timing(1e3 * median(times), ratios[name]) for name, times in took.items()}
