"""Messages that a broker has not acknowledged yet, and when its silence means that it never will."""

from __future__ import annotations

from collections import Counter
from math import inf

ONWARD_S = 1.0
"""So long a broker may take to send on what it has acknowledged, and who asked for it meanwhile to be heard."""


class InFlight:
    """What was published with QoS 1 over one connection, by message number, in order.

    A broker that is flooded may drop its acknowledgements and keep the connection (Mosquitto does): what waits for
    them would wait for ever. A slow link is no such silence: there each message is acknowledged in its turn.
    """

    def __init__(self, patience: float, now: float) -> None:
        """``patience``: seconds without an answer that are too long."""
        self.patience, self._heard, self._overtaken = patience, now, False
        self._sent: dict[int, tuple[float, str]] = {}
        self._names: Counter[str] = Counter()
        self._there: dict[str, float] = {}
        """When the broker was heard to have what has a name, for a while."""

    def __len__(self) -> int:
        return len(self._sent)

    def sent(self, number: int, now: float, name: str = "") -> None:
        """``number`` was handed to the link, which is a message of this ``name``."""
        self._sent[number] = now, name
        if name:
            self._names[name] += 1

    def has(self, name: str, now: float) -> bool:
        """Whether a message of this name is on its way: to the broker, or, for a moment, on from there."""
        return self._names[name] > 0 or now - self._there.get(name, -inf) < ONWARD_S

    def acknowledged(self, number: int, now: float) -> None:
        """The broker has ``number``."""
        first = next(iter(self._sent), number)
        self._heard = now
        if (known := self._sent.pop(number, None)) is not None:
            self._overtaken = number != first
            if name := known[1]:
                self._names[name] -= 1
                self._there.pop(name, None)
                self._there[name] = now
            while self._there and now - next(iter(self._there.values())) >= ONWARD_S:
                gone = next(iter(self._there))
                del self._there[gone]
                if not self._names[gone]:
                    del self._names[gone]

    def forgotten(self, now: float) -> bool:
        """Whether an acknowledgement is lost: the oldest message waited longer than the patience, while nothing was
        acknowledged or a later message was."""
        oldest, _ = next(iter(self._sent.values()), (now, ""))
        late = now - self.patience
        return oldest < late and (self._overtaken or self._heard < late)
