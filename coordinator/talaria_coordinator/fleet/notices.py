"""Messages from a service's tasks to its event loop."""

from __future__ import annotations

from dataclasses import dataclass

from talaria_coordinator.fleet.aggregation import LeftOut


@dataclass(frozen=True)
class Folded:
    """A round's new global model is committed."""

    number: int
    counted: int
    missing: tuple[str, ...]
    left: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class FoldFailed:
    """Nothing can be made of a round's updates; ``left`` are those that are to blame, or lost."""

    number: int
    reason: str
    left: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class CaughtUp:
    """The rounds after ``round`` that a fleet above learned without this site are entered."""

    round: int


@dataclass(frozen=True)
class Enrolled:
    """The list of enrolled devices has changed."""


@dataclass(frozen=True)
class Stop:
    """Leave in good order."""
