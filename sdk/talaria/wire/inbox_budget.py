"""How much may wait to be received, shared by the network thread and the event loop."""

from __future__ import annotations

import threading

EACH = 16 * 1024


class Budget:
    """Bytes that may wait in the inbox. Each message counts for :data:`EACH` more: a flood of small ones is held back
    at the broker, instead of being worked off long after."""

    def __init__(self, most: int, patience: float) -> None:
        self._most, self._left, self._patience, self._room = most, most, patience, threading.Condition()
        self.dropped = 0

    def take(self, size: int) -> bool:
        """Called by the network thread: wait for room, but not for long."""
        cost = self._cost(size)
        with self._room:
            if not self._room.wait_for(lambda: self._left >= cost, self._patience):
                self.dropped += 1
                return False
            self._left -= cost
            return True

    def give(self, size: int) -> None:
        with self._room:
            self._left += self._cost(size)
            self._room.notify()

    def _cost(self, size: int) -> int:
        return min(size + EACH, max(size, self._most))
