"""CPU time of several candidates in one run, so that other work on the machine does not decide who wins.

Wall time on a shared machine misjudges candidates by up to three times. Each candidate runs on the calling thread
alone, in bursts, in an order that changes from round to round; the clock is the thread's own CPU time. Many short
bursts beat few long ones: a neighbour on the same core comes and goes within milliseconds, and does not slow all alike.

The caches hold what the last candidate left: a model's first call takes half as long again or more, and the next two
still take longer than the rest. They are not timed: what is measured is a model that is in use.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from statistics import median

BURST = 6e-3
"""Seconds of CPU time that a burst aims at."""

WARM_CALLS, WARM_SECONDS = 3, 40e-3
"""What goes before each burst and is not timed: so many calls, or fewer that take so long, but one at least."""

FEWEST = 5
"""Rounds that are measured whatever they take: a median of fewer says little."""

Call = Callable[[], object]


def seconds_of(call: Call, calls: int = 1) -> float:
    """CPU seconds per call, never zero."""
    begin = time.thread_time_ns()
    for _ in range(calls):
        call()
    return max(time.thread_time_ns() - begin, 1) / calls / 1e9


def interleaved(
    candidates: Mapping[str, Call],
    rounds: int = 9,
    burst: float = BURST,
    seconds: float = float("inf"),
    warm: int = WARM_CALLS,
) -> dict[str, list[float]]:
    """CPU seconds per call of each candidate in each round; all candidates of a round ran side by side.

    ``warm`` calls, or fewer where they are long, go before each burst untimed. After ``seconds`` of CPU time no further
    round begins, but there are :data:`FEWEST` where ``rounds`` allows.
    """
    begin = time.thread_time()
    calls, untimed = {}, {}
    for name, call in candidates.items():
        call()
        once = seconds_of(call, 2)
        calls[name] = max(1, min(1000, round(burst / once)))
        untimed[name] = min(warm, math.ceil(WARM_SECONDS / once))
    took: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for turn in range(rounds):
        if turn >= FEWEST and time.thread_time() - begin > seconds:
            break
        shuffle(order)  # a fixed order would let neighbours in it warm the caches for each other
        for name in order:
            for _ in range(untimed[name]):
                candidates[name]()
            took[name].append(seconds_of(candidates[name], calls[name]))
    return took


def ratios(took: Mapping[str, list[float]], to: str) -> dict[str, float]:
    """The median, over the rounds, of each candidate's time to that of ``to``."""
    base = took[to]
    return {name: median(a / b for a, b in zip(times, base, strict=True)) for name, times in took.items()}
