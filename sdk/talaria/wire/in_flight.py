"""Messages that a broker has not acknowledged yet, and when its silence means that it never will."""

from __future__ import annotations


class InFlight:
    """What was published with QoS 1 over one connection, by message number, in order.

    A broker that is flooded may drop its acknowledgements and keep the connection (Mosquitto does): what waits for
    them would wait for ever. A slow link is no such silence: there each message is acknowledged in its turn.
    """

    def __init__(self, patience: float, now: float) -> None:
        """``patience``: seconds without an answer that are too long."""
        self.patience, self._heard, self._overtaken = patience, now, False
        self._sent: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def sent(self, number: int, now: float) -> None:
        """``number`` was handed to the link."""
        self._sent[number] = now

    def acknowledged(self, number: int, now: float) -> None:
        """The broker has ``number``."""
        first = next(iter(self._sent), number)
        self._heard = now
        if self._sent.pop(number, None) is not None:
            self._overtaken = number != first

    def forgotten(self, now: float) -> bool:
        """Whether an acknowledgement is lost: the oldest message waited longer than the patience, while nothing was
        acknowledged or a later message was."""
        oldest = next(iter(self._sent.values()), now)
        late = now - self.patience
        return oldest < late and (self._overtaken or self._heard < late)
