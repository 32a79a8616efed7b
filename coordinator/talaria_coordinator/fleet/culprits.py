"""Finds which few of many make something fail, by leaving some out; who came first decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def culprits(items: Sequence[T], works: Callable[[Sequence[T]], bool]) -> tuple[T, ...]:
    """The few without which the rest works, though not with any one of them; empty where nobody can be named.

    All are suspects at first, and come back in halves, quarters, and one by one, as long as it works. Who is taken
    back first decides between two that do not go together: so both orders are tried, and the smaller set is named,
    where it is a minority and there is no other of its size, or one half, which fails alone where the other does not.
    ``works`` is asked of items in the order that they have, and must be true of nothing; one culprit is found by a few
    times as many questions as halvings.
    """

    def together(places: Sequence[int]) -> bool:
        return works([items[place] for place in sorted(places)])

    places = range(len(items))
    found = sorted((sorted(_without(order, together)) for order in (places, places[::-1])), key=len)
    few = found[0] if found[0] == found[1] or len(found[0]) < len(found[1]) else []
    half = 2 * len(few) == len(items) and not together(few)
    return tuple(items[place] for place in few) if half or 2 * len(few) < len(items) else ()


def _without(places: Sequence[int], works: Callable[[Sequence[int]], bool]) -> list[int]:
    suspects = list(places)
    size = len(places)
    while size > 1:
        size = -(-size // 2)
        for chunk in [suspects[at : at + size] for at in range(0, len(suspects), size)]:
            left = [one for one in suspects if one not in chunk]
            if works([one for one in places if one not in left]):
                suspects = left
    return suspects
