"""A broker in memory whose links take time, break, lose, double and reorder, as one draw says.

It keeps retained messages and last wills, matches filters, and lets a device speak on its own topics only, as the
broker of a fleet with keys does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from talaria.errors import TransportError
from talaria.wire.topics import matches
from talaria.wire.transport import Arrival, Incoming, LinkDown, LinkUp, Will

CALM_S = (0.001, 0.02)
"""Seconds that a message takes, at least and at most, while the weather is fair."""
SILENCE_S = 45.0
"""So long the broker waits for a client of which it hears nothing: one and a half keepalives."""
BACKOFF_S = (1.0, 60.0)
WINDOW_S = 0.002
LATER_S = 1e-6
"""Between two messages of one link: timers that are due at one time come in no order."""


@dataclass(frozen=True)
class Weather:
    """What the links do to each message: chances of loss and doubling, and at most so many seconds of delay."""

    lose: float = 0.0
    double: float = 0.0
    slow: float = CALM_S[1]


@dataclass
class Client:
    """One connection, as the broker holds it."""

    name: str
    filters: tuple[str, ...]
    deliver: Callable[[Incoming], None]
    will: Will | None
    last: float = 0.0
    """When the last message from it comes to the broker."""
    heard: float = 0.0
    """When the last message to it comes there."""
    alive: bool = True
    silent: bool = False


@dataclass
class Broker:
    """``witness`` sees each message as the broker takes it, with its sender; ``heard`` each that comes out."""

    loop: asyncio.AbstractEventLoop
    random: Random
    witness: Callable[[str, str, bytes], None] = lambda name, topic, payload: None
    heard: Callable[[str, Arrival], None] = lambda name, arrival: None
    weather: dict[int, Weather] = field(default_factory=dict)
    retained: dict[str, bytes] = field(default_factory=dict)
    clients: dict[str, Client] = field(default_factory=dict)
    up: bool = True

    def join(
        self, name: str, filters: tuple[str, ...], deliver: Callable[[Incoming], None], will: Will | None
    ) -> Client:
        """Connect; another client of this name is cut off, and its will is told."""
        if name in self.clients:
            self.cut(self.clients[name], "taken over by another client of the same name")
        client = self.clients[name] = Client(name, filters, deliver, will)
        self.recall(client)
        return client

    def recall(self, client: Client) -> None:
        """Tell a client what is retained for it."""
        for topic in sorted(self.retained):
            if any(matches(f, topic) for f in client.filters):
                self._carry(client, Arrival(topic, self.retained[topic], retained=True))

    def leave(self, client: Client) -> None:
        """A client says goodbye: its will is forgotten."""
        self._remove(client)

    def cut(self, client: Client, reason: str, after: float = 0.0) -> None:
        """The link breaks. The client learns of it now, the broker after so many seconds; then it tells the will."""
        if client.silent or not client.alive:
            return
        client.silent = True
        client.deliver(LinkDown(reason))
        if after:
            self.loop.call_later(after, self._lost, client)
        else:
            self._lost(client)

    def _lost(self, client: Client) -> None:
        if self._remove(client) and client.will is not None:
            self._take(client.name, client.will.topic, client.will.payload, client.will.retain)

    def _remove(self, client: Client) -> bool:
        alive, client.alive = client.alive, False
        if self.clients.get(client.name) is client:
            del self.clients[client.name]
        return alive

    def publish(self, client: Client, topic: str, payload: bytes, retain: bool) -> None:
        """A message sets out; it comes to the broker in order, or not at all."""
        if client.silent or not client.alive or self._lost_on_the_way():
            return
        for _ in range(2 if self.random.random() < self._now().double else 1):
            when = max(client.last + LATER_S, self.loop.time() + self._delay())
            client.last = when
            self.loop.call_at(when, self._come, client, topic, payload, retain)

    def plant(self, name: str, topic: str, payload: bytes, retain: bool = False) -> None:
        """What somebody beside the fleet's programs says."""
        self._take(name, topic, payload, retain)

    def fall(self, keeps: bool) -> None:
        """The broker dies: all links break and no will is told; without ``keeps`` it forgets what was retained."""
        self.up = False
        for client in list(self.clients.values()):
            self._remove(client)
            if not client.silent:
                client.silent = True
                client.deliver(LinkDown("the broker is gone"))
        if not keeps:
            self.retained.clear()

    def rise(self) -> None:
        """It is there again."""
        self.up = True

    def _come(self, client: Client, topic: str, payload: bytes, retain: bool) -> None:
        if client.alive:
            self._take(client.name, topic, payload, retain)

    def _take(self, name: str, topic: str, payload: bytes, retain: bool) -> None:
        self.witness(name, topic, payload)
        if retain:
            self.retained[topic] = payload
            if not payload:
                del self.retained[topic]
        for client in list(self.clients.values()):
            if any(matches(f, topic) for f in client.filters):
                self._carry(client, Arrival(topic, payload))

    def _carry(self, client: Client, arrival: Arrival) -> None:
        if self._lost_on_the_way():
            return
        for _ in range(2 if self.random.random() < self._now().double else 1):
            when = self.loop.time() + self._delay()
            if not self._now().lose:  # in fair weather in order
                when = client.heard = max(client.heard + LATER_S, when)
            self.loop.call_at(when, self._hand, client, arrival)

    def _hand(self, client: Client, arrival: Arrival) -> None:
        if client.alive and not client.silent:
            self.heard(client.name, arrival)
            client.deliver(arrival)

    def _now(self) -> Weather:
        return next(reversed(self.weather.values()), _FAIR)

    def _lost_on_the_way(self) -> bool:
        return self.random.random() < self._now().lose

    def _delay(self) -> float:
        return self.random.uniform(CALM_S[0], self._now().slow)


_FAIR = Weather()


class Wire:
    """A :class:`~talaria.wire.transport.Transport` to this broker, which reconnects as the one over MQTT does."""

    def __init__(self, broker: Broker, name: str, filters: tuple[str, ...], will: Callable[[], Will]) -> None:
        self._broker, self._name, self._filters, self._will = broker, name, filters, will
        self._inbox: asyncio.Queue[Incoming | None] = asyncio.Queue()
        self.client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._down = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def largest(self) -> int | None:
        """This broker bounds no message."""
        return None

    async def start(self) -> None:
        """Connect for the first time."""
        await self._connect()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())
        self._keeper.add_done_callback(self._ended)

    async def _connect(self) -> None:
        will = self._will()
        await asyncio.sleep(self._broker.random.uniform(*CALM_S))
        if not self._broker.up:
            raise TransportError("the broker does not answer; start it")
        self._down.clear()
        self._inbox.put_nowait(LinkUp())
        self.client = self._broker.join(self._name, self._filters, self._come, will)

    def _come(self, item: Incoming) -> None:
        if isinstance(item, LinkDown):
            self._down.set()
        self._inbox.put_nowait(item)

    async def _keep(self) -> None:
        attempt = 0
        while True:
            if self.client is not None:
                await self._down.wait()
                self.client, attempt = None, 0
            pause = min(BACKOFF_S[1], BACKOFF_S[0] * 2**attempt)
            await asyncio.sleep(pause * self._broker.random.uniform(0.5, 1.0))
            attempt = min(attempt + 1, 16)
            try:
                await self._connect()
            except TransportError:
                continue

    def _ended(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and keeper.exception() is not None:
            self._failure = keeper.exception()
            self._inbox.put_nowait(None)

    async def receive(self) -> Incoming:
        """The next thing that happened."""
        item = await self._inbox.get()
        if item is None:
            self._inbox.put_nowait(None)
            why = "is closed" if self._failure is None else f"stopped: {self._failure}"
            raise TransportError(f"{self._name} {why}; start a new transport") from self._failure
        return item

    def flying(self, name: str) -> bool:
        """Nothing is known to be on its way."""
        return False

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, name: str = "") -> bool:
        """Hand one message to the link."""
        client = self.client
        if client is None or client.silent:
            return False
        await asyncio.sleep(self._broker.random.uniform(0.0, WINDOW_S))
        self._broker.publish(client, topic, payload, retain)
        return not client.silent

    async def recall(self) -> None:
        """Hear again what the broker retains for us."""
        if self.client is not None:
            self._broker.recall(self.client)

    async def flush(self, timeout: float) -> bool:
        """What was sent is with the broker."""
        client = self.client
        if client is None:
            return False
        await asyncio.sleep(max(0.0, min(timeout, client.last - asyncio.get_running_loop().time())))
        return not client.silent

    def die(self, noticed: float) -> None:
        """The program is dead: no goodbye; the broker learns of it after ``noticed`` seconds."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self.client is not None:
            self._broker.cut(self.client, "dead", noticed)
            self.client = None

    def renew(self, reason: str) -> None:
        """Leave in good order, and come back with a new last will."""
        if self.client is not None:
            self._broker.leave(self.client)
            self._come(LinkDown(reason))

    async def close(self) -> None:
        """Say goodbye."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self.client is not None:
            self._broker.leave(self.client)
            self.client = None
        self._inbox.put_nowait(None)
