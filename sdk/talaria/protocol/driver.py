"""What coordinator and device do alike with their machines: one inbox of events, one line of what is to be said, the
tasks of one life, and a goodbye. What the events mean and how the actions are carried out is the program's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from talaria import time
from talaria.errors import WireError
from talaria.protocol.actions import Publish, SendChunks
from talaria.protocol.events import Connected, Received
from talaria.protocol.line import Line, Sent, send
from talaria.protocol.transfer import Known
from talaria.wire.chunks import Cut
from talaria.wire.mqtt import Arrival, LinkDown, LinkUp, NotTaken, Transport

logger = logging.getLogger(__name__)

Read = Callable[[Cut], bytes]
Work = Coroutine[Any, Any, None]
GOODBYE_S = 5.0


class Driver:
    """``read`` gives the bytes behind a cut (``b""`` where they are gone), ``known`` to be what was cut where they lie
    in memory; ``sent`` is told how many bytes went out, topic and payload together. What came in is for the reader of
    the events to count, in their order. At most ``inbox`` events wait; who puts more waits too."""

    def __init__(self, read: Read, sent: Sent = lambda size: None, *, inbox: int, known: bool = False) -> None:
        self._read, self._sent, self._known = read, sent, Known() if known else None
        self.inbox: asyncio.Queue[object] = asyncio.Queue(inbox)
        self._line = Line()
        self._beside: list[asyncio.Task[None]] = []
        self.last_word: Callable[[], tuple[str, bytes] | None] = lambda: None
        """Topic and payload of what is said before the link is closed; None for nothing."""

    async def run(self, life: Work) -> None:
        """``life``, which reads the inbox, and all that it spawns, to the end. The first that raises ends the others;
        its error is raised."""
        unread: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await life
                unread = asyncio.create_task(self._let_go())
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            if unread is not None:
                unread.cancel()

    async def _let_go(self) -> None:
        """Whoever works still is not to wait for room: nobody reads what it puts."""
        while True:
            await self.inbox.get()

    def spawn(self, work: Work) -> None:
        """Do this too; :meth:`run` waits for it."""
        self._tasks.create_task(work)

    def beside(self, work: Work) -> None:
        """Do this for as long as the link is held, at most."""
        self._beside.append(self._tasks.create_task(work))

    @asynccontextmanager
    async def linked(
        self, transport: Transport, start: Work, changed: Callable[[LinkUp | LinkDown | NotTaken], None]
    ) -> AsyncIterator[None]:
        """Hold the link that ``start`` opens, and close it in the end; ``changed`` is told when it goes up or down, and
        what the broker refuses. The ``last_word`` is said before, also by a program that is stopped: nobody is to wait
        for it."""
        try:
            await start
            try:
                self.beside(self._listen(transport, changed))
                self.beside(self._send(transport))
                try:
                    yield
                except asyncio.CancelledError:
                    await self._say_last(transport)
                    raise
                await self._say_last(transport)
            finally:
                for task in self._beside:
                    task.cancel()
        finally:
            await transport.close()

    async def _say_last(self, transport: Transport) -> None:
        if (word := self.last_word()) is not None:
            await self.say_goodbye(transport, *word)

    def say(self, action: Publish | SendChunks) -> Publish | SendChunks | None:
        """Put something in line; chunks are read only when their turn comes. Returns what of it did not stand there
        already, None for nothing."""
        return self._line.put(action)

    async def said(self, transport: Transport, timeout: float) -> None:
        """Wait until the line is empty and the broker has it all; ``timeout`` seconds for each at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may lose that its task is cancelled
                await self._line.empty()
        await transport.flush(timeout)

    async def say_goodbye(self, transport: Transport, topic: str, payload: bytes) -> None:
        """The last word, which the broker keeps for whoever comes later."""
        self.say(Publish(topic, payload, retain=True))
        await self.said(transport, GOODBYE_S)

    async def _listen(self, transport: Transport, changed: Callable[[LinkUp | LinkDown | NotTaken], None]) -> None:
        while True:
            item = await transport.receive()
            if isinstance(item, Arrival):
                await self.inbox.put(Received(time.monotonic(), item.topic, item.payload, item.retained))
                continue
            changed(item)
            if isinstance(item, LinkUp):
                await self.inbox.put(Connected(time.monotonic()))

    async def _send(self, transport: Transport) -> None:
        """Send what stands in line. While the link is down it is dropped: a machine says again what still waits for
        an answer."""
        while True:
            action = await self._line.next()
            try:
                if isinstance(action, Publish):
                    if await transport.publish(action.topic, action.payload, retain=action.retain):
                        self._sent(len(action.topic) + len(action.payload))
                else:
                    await send(transport, action, _slices(self._read(action.cut)), self._sent, known=self._known)
            except WireError as error:
                logger.info("not sent on: %s", error)
            finally:
                self._line.done(action)


def _slices(data: bytes) -> Callable[[int, int], memoryview]:
    view = memoryview(data)
    return lambda offset, length: view[offset : offset + length]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
