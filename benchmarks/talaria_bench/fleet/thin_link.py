"""A link that lets few bytes a second through, and keeps few of them on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from talaria import time

ROOM = 4096
"""Bytes that the link itself keeps, each way, at most."""


@asynccontextmanager
async def thin(port: int, rate: float) -> AsyncIterator[int]:
    """The port of a link to ``port`` that lets ``rate`` bytes a second through, each way."""
    pipes = set[asyncio.Task[None]]()

    async def flow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        free = time.monotonic()
        try:
            while data := await reader.read(2048):
                free = max(free, time.monotonic()) + len(data) / rate
                await asyncio.sleep(free - time.monotonic())
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other, out = await asyncio.open_connection("127.0.0.1", port, limit=ROOM)
        for one in (writer, out):
            one.transport.set_write_buffer_limits(ROOM)
        pipes.update(asyncio.create_task(flow(*pair)) for pair in ((reader, out), (other, writer)))

    server = await asyncio.start_server(joined, "127.0.0.1", 0, limit=ROOM)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
