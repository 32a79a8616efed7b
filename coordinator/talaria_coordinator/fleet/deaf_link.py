""":class:`Hearing`: detects a link that delivers nothing. Mosquitto 2.0 can go on to answer pings and deliver
nothing, once a flood has filled its queue for a client; only a new link mends that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QUIET_S = 5.0


def deaf(topics: str) -> str:
    """What is told of a link that should hear these ``topics``. A broker whose access list gives them to nobody takes
    the subscription all the same."""
    return f"deaf: the broker delivers nothing; where it goes on so, let its access list (ACL) give {topics} to be read"


@dataclass
class Hearing:
    """After a silence of ``quiet`` seconds the coordinator sends itself a message; where that does not arrive within as
    long again, the link is deaf."""

    quiet: float
    _heard: float = 0.0
    _asked: float | None = None

    def heard(self, now: float) -> None:
        """Something came in, or a new link is up."""
        self._heard, self._asked = now, None

    def next(self, now: float) -> Literal["wait", "ask", "renew"]:
        """What to do at ``now``, on a link that is up."""
        if self._asked is not None:
            return "renew" if now - self._asked >= self.quiet else "wait"
        if now - self._heard < self.quiet:
            return "wait"
        self._asked = now
        return "ask"
