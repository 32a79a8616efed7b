"""Whether counts keep a limit that was written as a share: 3 of 300 lost keeps 0.01, whatever floats make of it."""

from __future__ import annotations

from fractions import Fraction


def at_most(count: float, of: int, share: float) -> bool:
    """Whether ``count`` of ``of`` is at most ``share``, which counts as the decimal number that it is printed as.

    >>> at_most(3, 300, 0.01), at_most(29, 100, 0.29), at_most(4, 300, 0.01)
    (True, True, False)
    """
    return count <= Fraction(repr(float(share))) * of


def at_least(count: int, of: int, share: float) -> bool:
    """Whether ``count`` of ``of`` is at least ``share``."""
    return count >= Fraction(repr(float(share))) * of
