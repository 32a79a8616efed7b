""":class:`Leaving`: decides when a coordinator with ``stay = false`` ends, and for which members it waits until
then."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

LINGER_S = 600.0
AWAY_RETRIES = 30
AWAY_S = 15.0
"""Longer than the longest pause of a device whose link breaks again and again."""


@dataclass
class Leaving:
    """Members say goodbye when they have their models. One that has been offline for thirty times ``retry`` seconds
    (and :data:`AWAY_S`) is not waited for (it said so to a coordinator since killed, or is gone), and nobody for more
    than ten minutes."""

    retry: float
    _done: set[str] = field(default_factory=set, init=False)
    _missed: dict[str, float] = field(default_factory=dict, init=False)

    def done(self, device: str) -> None:
        """This member has all it came for."""
        self._done.add(device)

    def over(self, since: float, members: Collection[str], online: Collection[str]) -> bool:
        """Whether to leave, ``since`` seconds after the end."""
        waiting = {name for name in members if name not in self._done}
        self._missed = {name: self._missed.get(name, since) for name in waiting if name not in online}
        gone = {name for name, when in self._missed.items() if since - when >= max(AWAY_S, AWAY_RETRIES * self.retry)}
        return waiting <= gone or since >= LINGER_S
