"""What the service's own tasks tell its loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Folded:
    """A round's new body is committed."""

    number: int
    counted: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Enrolled:
    """The list of enrolled devices has changed."""


@dataclass(frozen=True)
class Stop:
    """Leave in good order."""
