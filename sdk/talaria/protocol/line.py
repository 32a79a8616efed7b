""":class:`Line`: what is to be said over one link, each in its turn, and how the chunks of it are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from talaria.protocol.actions import Publish, SendChunks
from talaria.protocol.transfer import Known, chunk_frames
from talaria.wire.mqtt import Transport

Sent = Callable[[int], None]


class Line:
    """A chunk stands in line once, however often it is asked for: who waits for its turn asks again after a while, and
    a line that is long would only grow."""

    def __init__(self) -> None:
        self._actions: asyncio.Queue[Publish | SendChunks] = asyncio.Queue()
        self._standing: set[str] = set()

    def put(self, action: Publish | SendChunks) -> Publish | SendChunks | None:
        """Put ``action`` in line. Returns what of it did not stand there already, None for nothing."""
        if isinstance(action, SendChunks):
            new = tuple(index for index in action.indices if _name(action, index) not in self._standing)
            if not new:
                return None
            action = replace(action, indices=new)
            self._standing.update(_name(action, index) for index in new)
        self._actions.put_nowait(action)
        return action

    async def next(self) -> Publish | SendChunks:
        """Whose turn it is; it is to be told when it is :meth:`done`."""
        return await self._actions.get()

    def done(self, action: Publish | SendChunks) -> None:
        """``action`` was sent, or is left."""
        if isinstance(action, SendChunks):
            self._standing.difference_update(_name(action, index) for index in action.indices)
        self._actions.task_done()

    async def empty(self) -> None:
        """Wait until all is done."""
        await self._actions.join()


async def send(
    link: Transport,
    action: SendChunks,
    read: Callable[[int, int], bytes | memoryview],
    sent: Sent,
    *,
    known: Known | None,
) -> None:
    """Send the chunks of ``action``, which ``read(offset, length)`` gives, until the link is down. What is on its way
    is not sent twice: over a thin link it is asked for again. ``sent`` is told the bytes of each, topic and payload; of
    ``known`` bytes and what it raises see :func:`~talaria.protocol.transfer.chunk_frames`."""
    new = tuple(index for index in action.indices if not link.flying(_name(action, index)))
    frames = chunk_frames(replace(action, indices=new), read, known=known)
    for index, (topic, payload) in zip(new, frames, strict=True):
        if not await link.publish(topic, payload, name=_name(action, index)):
            break
        sent(len(topic) + len(payload))


def _name(action: SendChunks, index: int) -> str:
    return "/".join(map(str, (action.kind, action.device, action.xfer, action.boot, action.attempt, index)))
