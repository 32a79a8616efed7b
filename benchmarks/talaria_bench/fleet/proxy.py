"""A bad link between programs and their broker: a TCP proxy that knows where one MQTT packet ends.

It cuts and delays any of it; PUBLISH packets it also doubles (as MQTT itself does after a cut: the same packet id, the
DUP flag set) and turns round (a packet is held back while later ones go on).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from talaria.errors import WireError

LARGEST = 1 << 20
CONNECT, PUBLISH, DUP = 1, 3, 0x08
HELD_S = (0.02, 0.3)
"""For how long a packet is held back, or its copy comes after it."""


@dataclass(eq=False)
class Trouble:
    """What goes wrong on the links of ``target`` (``"all"``: of everybody): ``kind`` is cut, delay, duplicate or
    reorder. It lasts ``seconds`` from the first packet that it ``touched``."""

    kind: str
    target: str
    seconds: float
    strength: float = 0.0
    touched: int = 0
    until: float | None = None

    def touch(self, now: float) -> None:
        """One more packet, or link, has met it."""
        self.touched += 1
        if self.until is None:
            self.until = now + self.seconds


@dataclass(eq=False)
class _Link:
    name: str
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    due: dict[int, float] = field(default_factory=lambda: {0: 0.0, 1: 0.0})
    """When the last packet in order leaves, by direction."""

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Listens on a free port of this machine and passes on to ``upstream``, the broker's port."""

    def __init__(self, upstream: int, seed: int) -> None:
        self.upstream, self.port = upstream, 0
        self.carried: Counter[str] = Counter()
        """Bytes carried to each client."""
        self.taken: Counter[str] = Counter()
        """Bytes taken from each client."""
        self._random = Random(f"proxy {seed}")
        self._links: set[_Link] = set()
        self._troubles: list[Trouble] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def open(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Cut all links and stop listening."""
        self._closing = True
        self._server.close()
        for link in list(self._links):
            link.cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def make(self, trouble: Trouble) -> None:
        """Let ``trouble`` come; a cut cuts what is there now and refuses new links while it lasts."""
        self._troubles.append(trouble)
        if trouble.kind == "cut":
            for link in [k for k in self._links if trouble.target in ("all", k.name)]:
                link.cut()
                trouble.touch(self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _of(self, name: str) -> Iterator[Trouble]:
        now = self._now()
        self._troubles = [t for t in self._troubles if t.until is None or now < t.until]
        yield from [t for t in self._troubles if t.target in ("all", name)]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        link: _Link | None = None
        try:
            hello = await read_packet(reader)
            name = client_of(hello)
            for trouble in self._of(name):
                if trouble.kind == "cut":
                    trouble.touch(self._now())
                    writer.transport.abort()
                    return
            back, front = await asyncio.open_connection("127.0.0.1", self.upstream)
            link = _Link(name, (front, writer))
            self._links.add(link)
            front.write(hello)
            done, waiting = await asyncio.wait(
                {asyncio.create_task(self._carry(link, 0, reader)), asyncio.create_task(self._carry(link, 1, back))},
                return_when=asyncio.FIRST_COMPLETED,
            )
            for pending in waiting:
                pending.cancel()
            await asyncio.gather(*done, *waiting, return_exceptions=True)
            # What was held back still goes out, as from the buffers of a router.
            await asyncio.sleep(max(0.0, max(link.due.values()) - self._now()))
        except (OSError, EOFError, WireError):
            pass
        except asyncio.CancelledError:
            if not self._closing:  # asyncio complains of a handler that was called off
                raise
        finally:
            if link is not None:
                self._links.discard(link)
                for one in link.writers:
                    one.close()
            writer.close()

    async def _carry(self, link: _Link, way: int, reader: asyncio.StreamReader) -> None:
        writer = link.writers[way]
        with suppress(OSError, EOFError, WireError):
            while True:
                packet = await read_packet(reader)
                (self.taken, self.carried)[way][link.name] += len(packet)
                self._pass(link, way, packet)
                await writer.drain()

    def _pass(self, link: _Link, way: int, packet: bytes) -> None:
        now, message = self._now(), packet[0] >> 4 == PUBLISH
        due, held, again = now, 0.0, False
        for trouble in self._of(link.name):
            if trouble.kind == "delay":
                due += trouble.strength
                trouble.touch(now)
            elif message and trouble.kind != "cut" and self._random.random() < trouble.strength:
                trouble.touch(now)
                if trouble.kind == "duplicate":
                    again = True
                else:
                    held = self._random.uniform(*HELD_S)
        if held:
            due += held
        else:
            # In order: never before the one that went before it.
            due = link.due[way] = max(due, link.due[way] + 1e-6)
        self._at(due, now, link.writers[way], packet)
        if again:
            later = due + self._random.uniform(*HELD_S)
            self._at(later, now, link.writers[way], bytes([packet[0] | DUP]) + packet[1:])

    def _at(self, due: float, now: float, writer: asyncio.StreamWriter, packet: bytes) -> None:
        if due <= now:
            _write(writer, packet)
        else:
            asyncio.get_running_loop().call_at(due, _write, writer, packet)


def _write(writer: asyncio.StreamWriter, packet: bytes) -> None:
    if not writer.is_closing():
        writer.write(packet)


async def read_packet(reader: asyncio.StreamReader) -> bytes:
    """One MQTT packet as it came. Raises :class:`~talaria.errors.WireError` for what is none."""
    head = bytearray(await reader.readexactly(1))
    length = 0
    for shift in (0, 7, 14, 21):
        byte = (await reader.readexactly(1))[0]
        head.append(byte)
        length |= (byte & 127) << shift
        if not byte & 128:
            break
    else:
        raise WireError("proxy: this is no MQTT packet")
    if length > LARGEST:
        raise WireError(f"proxy: an MQTT packet of {length} bytes is above {LARGEST}")
    return bytes(head) + await reader.readexactly(length)


def client_of(connect: bytes) -> str:
    """Who connects: the client id of a CONNECT packet after its last dot (``fleet.device``)."""
    try:
        if connect[0] >> 4 != CONNECT:
            raise WireError("proxy: the first packet is no CONNECT")
        at = 1 + next(i for i in range(1, 5) if not connect[i] & 128)
        at += 2 + int.from_bytes(connect[at : at + 2], "big")
        version = connect[at]
        at += 4
        if version >= 5:
            length = 0
            for shift in (0, 7, 14, 21):
                byte = connect[at]
                at += 1
                length |= (byte & 127) << shift
                if not byte & 128:
                    break
            at += length
        size = int.from_bytes(connect[at : at + 2], "big")
        name = connect[at + 2 : at + 2 + size].decode()
        if not 0 < size == len(name.encode()):
            raise WireError("proxy: the CONNECT packet names no client")
    except (IndexError, StopIteration, UnicodeDecodeError):
        raise WireError("proxy: the CONNECT packet is damaged") from None
    return name.rpartition(".")[2].removeprefix("_")  # of the coordinator, as no device is called
