"""MQTT behind the small interface of :mod:`talaria.wire.transport`; the only door to paho.

The broker is taken for a lossy transport: it may drop what it acknowledged, double it or turn it round. So
each connection begins clean, nothing is queued while the link is down, and the protocol above asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.subscribeoptions import SubscribeOptions

from talaria import time
from talaria.errors import ConfigError, TransportError
from talaria.wire.backoff import Backoff
from talaria.wire.broker_url import Address, Tls
from talaria.wire.frames import MAX_FRAME
from talaria.wire.in_flight import InFlight
from talaria.wire.inbox_budget import Budget
from talaria.wire.lost import Lost, gone, unusable
from talaria.wire.mqtt_asyncio import Pump
from talaria.wire.mqtt_client import Client
from talaria.wire.post import Post
from talaria.wire.rights import Rights
from talaria.wire.transport import Arrival, Incoming, LinkDown, LinkUp, NotTaken, Transport, Will

__all__ = ["Address", "Arrival", "Incoming", "LinkDown", "LinkUp", "Mqtt", "NotTaken", "Tls", "Transport", "Will"]

UNANSWERED_S = 60.0
"""Seconds without the acknowledgement of a message that are too long."""
TOGETHER = 32
"""Filters that are asked for in one packet: below 4096 bytes."""
_Inbox = asyncio.Queue[Incoming | None]


class Mqtt:
    """A :class:`Transport` over paho: MQTT 5, or 3.1.1 where the broker knows no better. It has a thread of its own, or
    with ``threaded=False`` runs in the event loop, which suits many links with little to do.

    ``will`` is asked before each connection attempt. ``window`` bounds the messages in flight, ``inbox`` the
    bytes that wait to be received: beyond it the network thread waits, and after a third of ``keepalive``
    drops what it holds. ``as_published`` marks messages that the sender asked to retain also as they pass, where the
    broker speaks MQTT 5. ``backoff`` are the shortest and longest pause between attempts, in seconds. Each new reason
    why the link does not come back is told as a :class:`LinkDown` of its own.
    """

    def __init__(
        self,
        url: str,
        name: str,
        filters: tuple[str, ...],
        *,
        will: Callable[[], Will] | None = None,
        username: str | None = None,
        password: Callable[[], str] | None = None,
        tls: Tls | None = None,
        keepalive: int = 30,
        window: int = 32,
        inbox: int = 64 * 2**20,
        backoff: tuple[float, float] = (1.0, 60.0),
        timeout: float = 10.0,
        threaded: bool = True,
        as_published: bool = False,
    ) -> None:
        self.address = Address.parse(url)
        patient = keepalive >= 3 and 0 < backoff[0] <= backoff[1]
        if not (0 < len(name) <= 64 and window >= 1 and inbox >= MAX_FRAME and patient):
            raise ConfigError(f"transport {name!r}: keepalive, window, inbox or backoff is out of range")
        self._name, self._filters, self._known, self._will = name, filters, set(filters), will
        self._login = (username or self.address.username, password or (lambda: self.address.password or ""))
        self._tls = tls or Tls()
        self._context = self._tls.context() if self.address.tls else None
        self._keepalive, self._window, self._timeout, self._backoff = keepalive, window, timeout, backoff
        self._random = Random(name)
        self._largest: int | None = None
        self._protocol: MQTTProtocolVersion | None = None
        self._threaded, self._as_published = threaded, as_published
        self._budget = Budget(inbox, keepalive / 3 if threaded else 0.0)
        self._inbox: asyncio.Queue[Incoming | None] = asyncio.Queue()
        self._session: _Session | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def protocol(self) -> str:
        """``"5"`` or ``"3.1.1"``, as agreed with the broker."""
        return "5" if self._protocol == MQTTProtocolVersion.MQTTv5 else "3.1.1"

    @property
    def largest(self) -> int | None:
        """Bytes of one message, topic included, that the broker said it takes (MQTT 5); None where it did not say."""
        return self._largest

    @property
    def dropped(self) -> int:
        """Messages dropped because the inbox stayed full."""
        return self._budget.dropped

    async def start(self) -> None:
        """Connect; raises :class:`TransportError` that says what was tried and how to start a broker."""
        await self._connect()
        self._keeper = asyncio.create_task(self._keep(), name=f"mqtt {self._name}")
        self._keeper.add_done_callback(self._ended)

    async def _connect(self) -> None:
        if self._protocol is None:
            self._protocol = await self._agree()
        will = None if self._will is None else self._will()
        session, filters = self._new(self._protocol, will), self._filters
        await self._open(session, filters)
        self._session = session
        if len(self._filters) > len(filters):
            await session.follow(self._filters[len(filters) :])
        self._largest = session.largest
        session.begin()

    async def _agree(self) -> MQTTProtocolVersion:
        """Which MQTT the broker speaks, by a first connection without a will: amqtt refuses a plain MQTT 5 CONNECT
        in good order but hangs on one with a will."""
        probe = self._new(MQTTProtocolVersion.MQTTv5, None)
        try:
            await self._open(probe, ())
        except _OldBrokerError:
            return MQTTProtocolVersion.MQTTv311
        await probe.end()
        return MQTTProtocolVersion.MQTTv5

    def _new(self, protocol: MQTTProtocolVersion, will: Will | None) -> _Session:
        client = self._client(protocol, will)
        return _Session(client, self._inbox, self._budget, self._window, self._threaded, self._as_published)

    async def _open(self, session: _Session, filters: tuple[str, ...]) -> None:
        try:
            async with asyncio.timeout(self._timeout):  # wait_for of Python 3.11 may lose that its task is cancelled
                await session.open(self.address, self._keepalive, filters)
        except _OldBrokerError:
            self._protocol = None
            await session.end()
            raise
        except (OSError, TimeoutError, TransportError, UnicodeError) as why:  # the last of a name that is none
            if isinstance(why, TimeoutError):
                self._protocol = None  # another broker may be there by now, which speaks another MQTT
            await session.end()
            reason = str(why) or f"no answer within {self._timeout:g} s"
            raise TransportError(unusable(self.address, self._tls, self._name, reason)) from None
        except asyncio.CancelledError:
            await session.end()
            raise

    def _client(self, protocol: MQTTProtocolVersion, will: Will | None) -> Client:
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._name,
            protocol=protocol,
            clean_session=True if protocol == MQTTProtocolVersion.MQTTv311 else None,
            transport="websockets" if self.address.websocket else "tcp",
            reconnect_on_failure=False,
        )
        client.connect_timeout = self._timeout / 2  # of each of a host's addresses, of which one may be silent
        client.max_inflight_messages_set(self._window)
        client.max_queued_messages_set(2 * self._window)
        if self.address.websocket:
            client.ws_set_options(path=self.address.path)
        if self._context is not None:
            with contextlib.suppress(ConfigError):  # what is being replaced is read at a later attempt
                self._context = self._tls.context()
            client.tls_set_context(self._context)
        if self._login[0] is not None:
            client.username_pw_set(self._login[0], self._login[1]() or None)
        if will is not None:
            client.will_set(will.topic, will.payload, qos=1, retain=will.retain)
        return client

    async def _keep(self) -> None:
        """The one place that reconnects."""
        backoff, told, born = Backoff(*self._backoff), "", time.monotonic()
        while not self._closed:
            session = self._session
            if session is not None:
                told = await session.lost.wait_reason()
                self._session = None
                await session.end()
                self._inbox.put_nowait(LinkDown(told))
                backoff.lived(time.monotonic() - born)
            await asyncio.sleep(backoff.pause(self._random.random()))
            try:
                await self._connect()
            except TransportError as why:
                backoff.failed()
                if str(why) != told:
                    told = str(why)
                    self._inbox.put_nowait(LinkDown(told))
            born = time.monotonic()

    def _ended(self, keeper: asyncio.Task[None]) -> None:
        """The will's callback failed (a full disk, say): the reader must learn of it."""
        if not keeper.cancelled() and keeper.exception() is not None:
            self._failure = keeper.exception()
            self._inbox.put_nowait(None)

    async def receive(self) -> Incoming:
        """The next thing that happened. Raises what the will's callback raised, once it has: it knows the mend."""
        item = await self._inbox.get()
        if item is None:
            self._inbox.put_nowait(None)
            raise self._failure or TransportError(f"transport {self._name!r} is closed; start a new one")
        if isinstance(item, Arrival):
            self._budget.give(len(item.payload))
        return item

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, name: str = "") -> bool:
        """Hand one message to the link; False where it is down or the broker's queue is full."""
        return self._session is not None and await self._session.publish(topic, payload, retain, name)

    def flying(self, name: str) -> bool:
        """Whether a message of this name is on its way, on the present connection."""
        return self._session is not None and self._session.flying.has(name, time.monotonic())

    async def follow(self, *filters: str) -> None:
        """Subscribe to these too, on this connection and all later ones; returns once the broker has them, or where the
        link is down."""
        new = tuple(one for one in filters if one not in self._known)
        self._known.update(new)
        self._filters += new
        if new and self._session is not None:
            await self._session.follow(new)

    async def recall(self) -> None:
        """Ask the broker to tell again all that it retains for us."""
        if self._session is not None:
            self._session.subscribe(self._filters)

    async def flush(self, timeout: float) -> bool:
        """Wait for the broker's acknowledgement of all that was published."""
        session = self._session
        if session is None:
            return False
        try:
            async with asyncio.timeout(timeout):
                return await session.settled()
        except TimeoutError:
            return False

    def renew(self, reason: str) -> None:
        """End this connection; the next one asks for its last will anew."""
        if self._session is not None:
            self._session.lost.set(reason)

    async def close(self) -> None:
        """Say goodbye and end the thread."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        session, self._session = self._session, None
        if session is not None:
            await session.end()
        self._inbox.put_nowait(None)


class _OldBrokerError(TransportError):
    """The broker does not know MQTT 5."""

    def __init__(self) -> None:
        super().__init__("the broker does not know MQTT 5 any more; it is asked anew")


class _Errors(logging.Logger):
    """A log that only hears errors: by ``on_log`` paho would write out a line for each packet."""

    def __init__(self, session: _Session) -> None:
        super().__init__("mqtt", logging.ERROR)
        self._session = session

    def handle(self, record: logging.LogRecord) -> None:
        """Told to the session, and nobody else."""
        self._session.complain(record.getMessage())


class _Session:
    """One connection, from CONNECT to its end; never reused."""

    def __init__(
        self, client: Client, inbox: _Inbox, budget: Budget, window: int, threaded: bool, as_published: bool
    ) -> None:
        self._client, self._inbox, self._budget, self._window = client, inbox, budget, window
        self._as_published = as_published
        self._pump = None if threaded else Pump(client)
        self._loop = asyncio.get_running_loop()
        self.lost = Lost()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._early: list[Arrival] | None = []
        self.flying, self._rights = InFlight(UNANSWERED_S, time.monotonic()), Rights()
        self._moved = asyncio.Event()
        self._filters: tuple[str, ...] = ()
        self._first: set[int] = set()
        self._batches: dict[int, tuple[str, ...]] = {}
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._ending = False
        self._post = Post(self._loop).put
        self._complaint = ""
        self.largest: int | None = None
        client.enable_logger(_Errors(self))
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.told = self._told
        client.on_publish = self._on_publish
        client.on_disconnect = self._on_disconnect

    # -- called in the event loop --

    async def open(self, address: Address, keepalive: int, filters: tuple[str, ...]) -> None:
        self._filters = filters
        v5 = self._client.protocol == MQTTProtocolVersion.MQTTv5
        # No CONNECT properties: amqtt hangs on them instead of answering that it speaks 3.1.1 only.
        start = True if v5 else paho.MQTT_CLEAN_START_FIRST_ONLY
        connect = partial(self._client.connect, address.host, address.port, keepalive, clean_start=start)
        await asyncio.to_thread(connect)
        if self._pump is None:
            self._client.loop_start()
        else:
            self._pump.start()
        await self._ready

    def begin(self) -> None:
        """Tell the inbox that the link is up, then what came meanwhile."""
        self._inbox.put_nowait(LinkUp())
        for arrival in self._early or ():
            self._inbox.put_nowait(arrival)
        self._early = None

    async def publish(self, topic: str, payload: bytes, retain: bool, name: str) -> bool:
        while len(self.flying) >= self._window and not self.lost.is_set():
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.flying.patience / 4):
                    await self._moved.wait()
            self._require_answers()
        self._require_answers()
        if self.lost.is_set():
            return False
        sent = self._client.publish(topic, payload, qos=1, retain=retain)
        if sent.rc != paho.MQTT_ERR_SUCCESS:
            return False
        self.flying.sent(sent.mid, time.monotonic(), name)
        self._rights.asked(sent.mid, topic)
        return True

    def _require_answers(self) -> None:
        """A connection on which acknowledgements are lost is given up: the next one says again what is needed."""
        if self.flying.forgotten(time.monotonic()):
            self._gone(f"the broker left {len(self.flying)} messages unanswered for {self.flying.patience:g} s")

    async def settled(self) -> bool:
        while self.flying and not self.lost.is_set():
            self._moved.clear()
            await self._moved.wait()
        return not self.lost.is_set()

    async def end(self) -> None:
        self._ending = self._client.over = True
        self._client.disconnect()
        if self._pump is None:
            # The thread may end while loop_stop looks at it; paho then finds None where it was.
            with contextlib.suppress(AttributeError):
                await asyncio.to_thread(self._client.loop_stop)
            self._client.let_go()
        else:
            self._client.loop_write()
            self._pump.stop()
        self.lost.set("closed")
        self._moved.set()
        if not self._ready.done():
            self._ready.cancel()

    async def follow(self, filters: tuple[str, ...]) -> None:
        """Subscribe to more; returns once the broker has answered, or the link is lost."""
        answers = {number: self._loop.create_future() for number in self.subscribe(filters)}
        self._answers |= answers
        lost: asyncio.Future[Any] = self._loop.create_task(self.lost.wait_reason())
        await asyncio.wait([lost, asyncio.gather(*answers.values())], return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()

    def _subscribed(self, number: int, refused: tuple[str, ...]) -> None:
        if refused:
            problem = f"not authorized to subscribe to {', '.join(refused)}"
            self._opened(TransportError(problem))
            if number not in self._first:
                self._gone(problem)
        self._first.discard(number)
        if not self._first:
            self._opened(None)
        if (answer := self._answers.pop(number, None)) is not None:
            answer.set_result(None)

    def _opened(self, problem: Exception | None) -> None:
        if not self._ready.done() and problem is None:
            self._ready.set_result(None)
        elif not self._ready.done() and problem is not None:
            self._ready.set_exception(problem)
            self._ready.exception()  # who has stopped waiting leaves no word of it in the log

    def _arrived(self, arrival: Arrival) -> None:
        if self._early is None:
            self._inbox.put_nowait(arrival)
        else:
            self._early.append(arrival)

    def _acked(self, number: int, refused: str) -> None:
        self.flying.acknowledged(number, time.monotonic())
        if told := self._rights.answered(number, refused, time.monotonic()):
            self._inbox.put_nowait(NotTaken(told))
        self._moved.set()

    def _gone(self, reason: str) -> None:
        self._opened(TransportError(reason))
        self.lost.set(reason)
        self._moved.set()

    # -- called in the network thread --

    def subscribe(self, filters: tuple[str, ...]) -> list[int]:
        """Ask for these, in packets that any broker takes, whose numbers are returned; the broker then tells what it
        retains, each time. Either thread may call it."""
        options: Any = 1
        if self._client.protocol == MQTTProtocolVersion.MQTTv5:
            options = SubscribeOptions(qos=1, retainAsPublished=self._as_published)
        numbers = []
        for start in range(0, len(filters), TOGETHER):
            batch = filters[start : start + TOGETHER]
            _, number = self._client.subscribe([(one, options) for one in batch])
            if number is not None:  # else the link is lost
                self._batches[number] = batch
                numbers.append(number)
        return numbers

    def complain(self, text: str) -> None:
        """What paho says to its log alone: why a socket could not be read or written, such as an alert of TLS."""
        self._complaint = text

    def _on_connect(self, client: paho.Client, _data: Any, _flags: Any, code: Any, properties: Any = None) -> None:
        self.largest = getattr(properties, "MaximumPacketSize", None)
        if code.is_failure:
            old = code.value in (0x84, 0x01)
            self._post(self._opened, _OldBrokerError() if old else TransportError(str(code)))
        elif self._filters:
            self._first = set(self.subscribe(self._filters))
        else:
            self._post(self._opened, None)

    def _on_subscribe(self, _client: paho.Client, _data: Any, mid: int, codes: Any, _properties: Any = None) -> None:
        batch = self._batches.pop(mid, ())
        self._post(self._subscribed, mid, tuple(f for f, code in zip(batch, codes, strict=False) if code.is_failure))

    def _told(self, topic: str, payload: bytes, retained: bool) -> None:
        if self._budget.take(len(payload)):
            self._post(self._arrived, Arrival(topic, payload, retained))
        else:  # much else may have been read ahead, and each waits as long: the broker is told that we live
            self._client.loop_write()
            self._client.loop_misc()

    def _on_publish(self, _client: paho.Client, _data: Any, mid: int, code: Any = None, *_: Any) -> None:
        self._post(self._acked, mid, str(code) if getattr(code, "is_failure", False) else "")

    def _on_disconnect(self, _client: paho.Client, _data: Any, _flags: Any, code: Any, _properties: Any = None) -> None:
        if not self._ending:
            self._post(self._gone, gone(self._complaint, str(code)))
