"""The small interface by which bytes travel, whatever carries them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Will:
    """What the broker says for us when the link dies."""

    topic: str
    payload: bytes = field(repr=False)
    retain: bool = True


@dataclass(frozen=True)
class Arrival:
    """A message that came in."""

    topic: str
    payload: bytes = field(repr=False)
    retained: bool = False


@dataclass(frozen=True)
class LinkUp:
    """The broker is reached and all filters are subscribed."""


@dataclass(frozen=True)
class LinkDown:
    """The link is gone, or could not be had again for another reason than told before; it is tried again by itself."""

    reason: str


@dataclass(frozen=True)
class NotTaken:
    """The broker refuses what is published on such a topic, as one of MQTT 5 says; the link stays."""

    reason: str


Incoming = Arrival | LinkUp | LinkDown | NotTaken


class Transport(Protocol):
    """A lossy way to send and receive. It reconnects by itself; what was in flight at a cut may be lost or doubled."""

    @property
    def largest(self) -> int | None:
        """Bytes of one message, topic included, that are taken; None where nothing is known of a bound."""
        ...

    async def start(self) -> None:
        """Connect for the first time and reconnect by itself from then on.

        Raises :class:`~talaria.errors.TransportError` where the broker cannot be reached or refuses.
        """
        ...

    async def receive(self) -> Incoming:
        """The next thing that happened; the first is :class:`LinkUp`. Raises TransportError after :meth:`close`."""
        ...

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, name: str = "") -> bool:
        """Hand one message (QoS 1) to the link, waiting while its window is full. False where the link is down. By its
        ``name`` it is known while it is on its way."""
        ...

    def flying(self, name: str) -> bool:
        """Whether a message of this name is on its way to the broker: over a thin link that takes long, and to send it
        again would take as long again."""
        ...

    async def recall(self) -> None:
        """Ask the broker to tell again all that it retains for us, in case some of it did not come through."""
        ...

    async def flush(self, timeout: float) -> bool:
        """Wait until the broker has acknowledged all that was published; False after ``timeout`` seconds."""
        ...

    def renew(self, reason: str) -> None:
        """End this connection, and begin another one with a new last will. No last will is sent."""
        ...

    async def close(self) -> None:
        """Say goodbye (no last will is sent) and end the thread."""
        ...
