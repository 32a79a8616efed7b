""":class:`Parting`: repeats a device's goodbye until the coordinator answers, or for some seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Parting:
    """A goodbye each ``every`` seconds until it is ``answered``, or for ``patience`` seconds: the coordinator may have
    left itself."""

    every: float
    patience: float
    answered: bool = False
    _first: float = field(default=math.inf, init=False)
    _last: float = field(default=-math.inf, init=False)

    def due(self, now: float) -> bool:
        """Whether to say it (again)."""
        if self.answered or now - self._last < self.every:
            return False
        self._first, self._last = min(self._first, now), now
        return True

    def over(self, now: float) -> bool:
        """Whether to leave."""
        return self.answered or now - self._first >= self.patience
