"""How long to wait before a link is tried again: by how long it lived, not by whether it was reached."""

from __future__ import annotations

from dataclasses import dataclass

STEADY = 8
"""A link that lived this many times the shortest pause was worth having; the next attempt comes at once."""


@dataclass
class Backoff:
    """Pauses between ``shortest`` and ``longest`` seconds, each twice the one before it.

    A link that comes and breaks at once is tried at most every ``STEADY * shortest`` seconds, so that somebody who cuts
    it again and again neither keeps the broker busy nor keeps this side away for ``longest``.
    """

    shortest: float
    longest: float
    _tries: int = 0
    _reached: bool = False

    def lived(self, seconds: float) -> None:
        """A link was up for so long, and is gone."""
        self._reached = True
        if seconds >= STEADY * self.shortest:
            self._tries = 0

    def failed(self) -> None:
        """The other side was not reached."""
        self._reached = False

    def pause(self, share: float) -> float:
        """Seconds until the next attempt; ``share`` in [0, 1) spreads many of them over half of the time."""
        most = min(self.longest, STEADY * self.shortest) if self._reached else self.longest
        nominal = min(most, self.shortest * 2.0 ** min(self._tries, 32))
        self._tries += 1
        return nominal * (0.5 + share / 2)
