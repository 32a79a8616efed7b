"""A failing history made as short as it gets: faults are left out as long as it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shortened(faults: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """The fewest of ``faults``, in their order, that still fail: none can be left out (Zeller and Hildebrandt 2002,
    "Simplifying and Isolating Failure-Inducing Input": ddmin). ``fails`` is known to be true of all.

    >>> shortened(range(10), lambda some: {3, 7} <= set(some))
    [3, 7]
    """
    left, parts = list(faults), 2
    while left:
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            if fails(rest):
                left, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), 2 * parts)
    return left
