"""Latency as a ratio, measured so that other work on the machine does not decide who wins.

Wall time on a shared machine misjudges candidates by up to three times. So each candidate runs on the calling thread
alone, in bursts of about 6 ms, in alternating order; the clock is the thread's own CPU time; and what is compared is
the median of the ratios within each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

BURST = 6e-3
"""Seconds of CPU time that a burst aims at."""


@dataclass(frozen=True)
class Timing:
    """``ms``: median CPU milliseconds per call. ``ratio``: to the first candidate, median over the rounds."""

    ms: float
    ratio: float


def interleaved(candidates: Mapping[str, Callable[[], object]], *, seconds: float = 0.5) -> dict[str, Timing]:
    """Times all candidates in the same run; the first is the yardstick. ``seconds`` of CPU time in all."""
    calls = {name: _calls_per_burst(run) for name, run in candidates.items()}
    per_round = sum(calls[name] * _once(run, calls[name]) for name, run in candidates.items())
    rounds = max(5, round(seconds / max(per_round, 1e-6)))
    names = list(candidates)
    took: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            took[name].append(_once(candidates[name], calls[name]))
    yardstick = took[names[0]]
    return {
        name: Timing(
            ms=1e3 * median(took[name]),
            ratio=median(own / base for own, base in zip(took[name], yardstick, strict=True)),
        )
        for name in names
    }


def _calls_per_burst(run: Callable[[], object]) -> int:
    for _ in range(3):
        run()
    return max(1, min(1000, round(BURST / _once(run, 3))))


def _once(run: Callable[[], object], calls: int) -> float:
    """CPU seconds per call over ``calls`` calls, never zero."""
    begin = time.thread_time_ns()
    for _ in range(calls):
        run()
    return max(time.thread_time_ns() - begin, 1) / calls / 1e9
