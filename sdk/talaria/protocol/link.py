"""Between a machine and its transport: what arrives becomes events, what is to be said waits in line.

It starts no task: a program runs :meth:`Link.listen` and :meth:`Link.send` beside its own loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from talaria import time
from talaria.errors import WireError
from talaria.protocol.actions import Publish, SendChunks
from talaria.protocol.events import Connected, Received
from talaria.protocol.transfer import chunk_frames
from talaria.wire.chunks import Cut
from talaria.wire.mqtt import Arrival, LinkDown, LinkUp, Transport

logger = logging.getLogger(__name__)

Read = Callable[[Cut], bytes]
Sent = Callable[[int], None]


class Link:
    """``read`` gives the bytes behind a cut (``b""`` where they are gone); ``sent`` is told how many bytes went out,
    topic and payload together. What came in is for the reader of the events to count, in their order."""

    def __init__(self, read: Read, sent: Sent = lambda size: None) -> None:
        self._read, self._sent = read, sent
        self._line: asyncio.Queue[Publish | SendChunks] = asyncio.Queue()

    def say(self, action: Publish | SendChunks) -> None:
        """Put something in line; chunks are read only when their turn comes."""
        self._line.put_nowait(action)

    async def said(self, timeout: float) -> bool:
        """Wait until the line is empty; False after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._line.join(), timeout)
        except TimeoutError:
            return False
        return True

    async def listen(
        self,
        transport: Transport,
        put: Callable[[object], Awaitable[None]],
        changed: Callable[[LinkUp | LinkDown], None],
    ) -> None:
        """Pass on what arrives as events; ``changed`` is told when the link goes up or down."""
        while True:
            item = await transport.receive()
            if isinstance(item, Arrival):
                await put(Received(time.monotonic(), item.topic, item.payload, item.retained))
                continue
            changed(item)
            if isinstance(item, LinkUp):
                await put(Connected(time.monotonic()))

    async def send(self, transport: Transport) -> None:
        """Send what stands in line. While the link is down it is dropped: a machine says again what still waits for
        an answer."""
        while True:
            action = await self._line.get()
            try:
                if isinstance(action, Publish):
                    await self._publish(transport, action.topic, action.payload, action.retain)
                    continue
                for topic, payload in chunk_frames(action, _slices(self._read(action.cut))):
                    if not await self._publish(transport, topic, payload, False):
                        break
            except WireError as error:
                logger.info("not sent on: %s", error)
            finally:
                self._line.task_done()

    async def _publish(self, transport: Transport, topic: str, payload: bytes, retain: bool) -> bool:
        sent = await transport.publish(topic, payload, retain=retain)
        if sent:
            self._sent(len(topic) + len(payload))
        return sent


def _slices(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]
