"""A broker of a few lines in memory: whole fleets in one process.

It keeps retained messages and last wills and matches topic filters as MQTT does. By seed it can lose, double
and reorder what it carries, so that a protocol can be shown to stand that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from talaria.errors import ConfigError, TransportError
from talaria.wire.topics import matches
from talaria.wire.transport import Arrival, Incoming, LinkDown, LinkUp, Will


@dataclass(frozen=True)
class Faults:
    """How the hub mistreats messages: chances in 0..1, drawn from ``seed``."""

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"faults: {name}={getattr(self, name)} must be in [0, 1)")


@dataclass
class _Member:
    filters: tuple[str, ...]
    deliver: Callable[[Arrival], None]
    will: Will | None


@dataclass
class Hub:
    """The broker. Deliveries wait in line until :meth:`pump`; with ``eager`` each publish pumps at once."""

    faults: Faults = field(default_factory=Faults)
    eager: bool = False
    largest: int | None = None
    """Bytes of topic and payload; larger messages are dropped. None for no bound."""
    retained: dict[str, bytes] = field(default_factory=dict)
    published: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.faults.seed)
        self._members: dict[str, _Member] = {}
        self._line: deque[tuple[str, Arrival]] = deque()

    def join(self, name: str, filters: tuple[str, ...], deliver: Callable[[Arrival], None], will: Will | None) -> None:
        """Connect a client; one of the same name is cut off first, and its will is sent."""
        if name in self._members:
            self.cut(name)
        self._members[name] = _Member(filters, deliver, will)
        self.recall(name)

    def recall(self, name: str) -> None:
        """Tell a client what is retained for it."""
        filters = self._members[name].filters
        for topic in sorted(self.retained):
            if any(matches(f, topic) for f in filters):
                self._line.append((name, Arrival(topic, self.retained[topic], retained=True)))
        self._flow()

    def leave(self, name: str) -> None:
        """Disconnect in good order: no will."""
        self._members.pop(name, None)
        self._line = deque(entry for entry in self._line if entry[0] != name)

    def cut(self, name: str) -> None:
        """The link of ``name`` dies: what was on its way to it is lost and its will is sent."""
        member = self._members.get(name)
        self.leave(name)
        if member is not None and member.will is not None:
            self.publish(member.will.topic, member.will.payload, retain=member.will.retain)

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Take in one message. An empty retained one clears the topic."""
        self.published += 1
        if self.largest is not None and len(topic) + len(payload) > self.largest:
            return
        if retain:
            self.retained[topic] = payload
            if not payload:
                del self.retained[topic]
        for name, member in self._members.items():
            if any(matches(f, topic) for f in member.filters):
                self._enqueue(name, Arrival(topic, payload))
        self._flow()

    def pump(self, limit: int | None = None) -> int:
        """Deliver what waits in line, at most ``limit`` messages; how many were delivered."""
        done = 0
        while self._line and (limit is None or done < limit):
            name, arrival = self._line.popleft()
            member = self._members.get(name)
            if member is not None:
                member.deliver(arrival)
                done += 1
        return done

    def _flow(self) -> None:
        if self.eager:
            self.pump()

    def _enqueue(self, name: str, arrival: Arrival) -> None:
        chance, faults = self._random.random, self.faults
        if chance() < faults.drop:
            return
        for _ in range(2 if chance() < faults.duplicate else 1):
            if chance() < faults.reorder and self._line:
                self._line.insert(self._random.randrange(len(self._line)), (name, arrival))
            else:
                self._line.append((name, arrival))


class Loop:
    """A :class:`~talaria.wire.mqtt.Transport` over a hub in this process."""

    def __init__(
        self, hub: Hub, name: str, filters: tuple[str, ...], will: Callable[[], Will] | None = None, bound: int = 65536
    ) -> None:
        self._hub, self._name, self._filters, self._will = hub, name, filters, will
        self._inbox: asyncio.Queue[Incoming | None] = asyncio.Queue()
        self._bound = bound
        self._open = False

    @property
    def largest(self) -> int | None:
        """The hub's bound on a message."""
        return self._hub.largest

    async def start(self) -> None:
        """Join the hub."""
        self._open = True
        self._join()

    def _join(self) -> None:
        self._inbox.put_nowait(LinkUp())
        self._hub.join(self._name, self._filters, self._take, self._will() if self._will else None)

    def _take(self, arrival: Arrival) -> None:
        if self._inbox.qsize() < self._bound:
            self._inbox.put_nowait(arrival)

    def cut(self) -> None:
        """Break the link as a network would: the will is sent, and the link comes up again at once."""
        self._hub.cut(self._name)
        self._inbox.put_nowait(LinkDown("cut"))
        self._join()

    def renew(self, reason: str) -> None:
        """Leave in good order and come back at once."""
        self._hub.leave(self._name)
        self._inbox.put_nowait(LinkDown(reason))
        self._join()

    async def receive(self) -> Incoming:
        """The next thing that happened."""
        item = await self._inbox.get()
        if item is None:
            raise TransportError(f"{self._name} is closed; start a new transport")
        return item

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, name: str = "") -> bool:
        """Hand one message to the hub."""
        if not self._open:
            return False
        self._hub.publish(topic, payload, retain)
        if not self._hub.eager:
            self._hub.pump()
        await asyncio.sleep(0)
        return True

    def flying(self, name: str) -> bool:
        """Nothing is ever on its way here."""
        return False

    async def recall(self) -> None:
        """Hear again what the hub retains for us."""
        if self._open:
            self._hub.recall(self._name)

    async def flush(self, timeout: float) -> bool:
        """Nothing waits here."""
        return self._open

    async def close(self) -> None:
        """Leave the hub without a will."""
        if self._open:
            self._open = False
            self._hub.leave(self._name)
            self._inbox.put_nowait(None)
