""":class:`Footing`: decides when a link fails so often that the broker itself is to be checked."""

from __future__ import annotations

from dataclasses import dataclass, field

LOST, WITHIN_S = 3, 60.0
"""A link that was lost so often in so many seconds does not hold."""


@dataclass
class Footing:
    """A link that stays away for ``patience`` seconds does not hold either."""

    patience: float
    _down: float | None = None
    _lost: list[float] = field(default_factory=list)

    def up(self) -> None:
        """The link is there."""
        self._down = None

    def lost(self, now: float) -> None:
        """The link is gone, or did not come back."""
        if self._down is None:
            self._down = now
            self._lost = [then for then in self._lost if now - then < WITHIN_S] + [now]

    def failing(self, now: float) -> bool:
        """Whether to look at the broker now; it has its time again from then on."""
        away = self._down is not None and now - self._down >= self.patience
        if not away and len(self._lost) < LOST:
            return False
        self._lost = []
        self._down = None if self._down is None else now
        return True
