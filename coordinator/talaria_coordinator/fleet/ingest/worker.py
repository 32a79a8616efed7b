""":class:`Worker`: the part of a coordinator that takes up the bytes of updates, and gives out those of the global
model, in a process of its own.

It remembers nothing that matters: chunks lie in files, complete updates among the blobs, and who may upload what the
coordinator says again to whoever comes after a worker that died. Chunks carry no signature: each must have the sha256
that its device signed in its offer. Whatever else comes is handed on as it came, after all that came before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from talaria import time
from talaria.errors import StateError, TalariaError, WireError
from talaria.protocol.actions import Counted, SendChunks
from talaria.protocol.coordinator.state import credit_of
from talaria.protocol.line import Line, send
from talaria.protocol.transfer import Known, Receiver
from talaria.wire.chunks import Cut
from talaria.wire.frames import MAX_FRAME, decode_frame
from talaria.wire.messages import CHUNK
from talaria.wire.mqtt import Arrival, LinkDown, LinkUp, Mqtt, NotTaken
from talaria.wire.topics import Topic, parse, upload_filter
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.deaf_link import QUIET_S, Hearing, deaf
from talaria_coordinator.fleet.hands import insist
from talaria_coordinator.fleet.ingest.words import (
    Alive,
    Came,
    Check,
    Drop,
    Fold,
    Follow,
    Has,
    Kept,
    Linked,
    Odd,
    Order,
    Send,
    Sent,
    Sum,
    Take,
    Torn,
    Trouble,
    Unfit,
    Word,
    require,
)
from talaria_coordinator.fleet.uploads import Uploads, check

logger = logging.getLogger(__name__)

SOON_S = 0.05
"""Chunks of less than half a window are told after so long."""
BEAT_S = 5.0
"""So often it says that it goes on."""


@dataclass(frozen=True)
class _Beginning:
    model_digest: str
    server: str
    round: int
    spent: None = None


@dataclass
class _Upload:
    receiver: Receiver
    news: list[int] = field(default_factory=list)
    size: int = 0


class Worker:
    """Number ``number`` of ``fleet``'s; ``say`` tells the coordinator, without waiting, and ``room`` waits until it has
    heard enough of it."""

    def __init__(
        self,
        fleet: str,
        number: int,
        uploads: Uploads,
        learning: Learning,
        say: Callable[[Word], None],
        room: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._fleet, self._number, self._uploads, self._learning = fleet, number, uploads, learning
        self._say, self._room = say, room
        self._open: dict[tuple[str, str], _Upload] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._up, self._hearing = False, Hearing(2 * QUIET_S)
        self._line = Line()
        self._leaving = asyncio.Event()
        self._model: tuple[bytes, bytes] = b"", b""
        self._echo = Topic(fleet, "up", "echo", str(number))

    @property
    def filters(self) -> tuple[str, ...]:
        """What it subscribes to at first: what it says to itself."""
        return (str(self._echo),)

    async def run(self, link: Mqtt, orders: AsyncIterator[Word]) -> None:
        """Work over ``link``, which is started, until ``orders`` end."""
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(work(link)) for work in (self._listen, self._look, self._send)]
            beside.append(group.create_task(self._beat()))
            async for order in orders:
                require(order, *get_args(Order))
                match order:
                    case Follow():
                        await link.follow(upload_filter(self._fleet, order.device))
                    case Take():
                        await link.follow(upload_filter(self._fleet, order.device))
                        await self._take(order)
                    case Check():
                        group.create_task(self._check(order))
                    case Fold():
                        group.create_task(self._fold(order))
                    case Send():
                        self._line.put(self._chunks(order))
                    case Drop():
                        self._open.pop((order.device, order.xfer), None)
                        self._uploads.drop((order.device, order.xfer))
            self._leaving.set()
            for task in beside:
                task.cancel()

    # -- orders

    async def _take(self, order: Take) -> None:
        key = order.device, order.xfer
        try:
            found = await asyncio.to_thread(self._uploads.found, key, order.cut)
        except StateError as error:  # the disk refuses: what comes does not stay, and is asked for again
            self._say(Trouble(order.device, str(error)))
            found = frozenset()
        self._open[key] = _Upload(Receiver(order.cut, set(found)))
        self._say(Has(*key, sorted(found)))

    async def _check(self, order: Check) -> None:
        key = order.device, order.xfer
        upload = self._open.get(key)
        if upload is None:
            return  # dropped meanwhile
        with self._uploads.take(key, upload.receiver.cut) as part:
            verdict = await insist(
                lambda: check(part, order.device, order.round, order.base_digest, self._learning),
                lambda error: self._say(Trouble(order.device, error)),
                self._leaving,
            )
        if isinstance(verdict, frozenset):
            upload.receiver.have = set(verdict)
            self._say(Torn(*key, sorted(verdict)))
        elif isinstance(verdict, WireError):
            self._say(Unfit(*key, str(verdict)))
        else:
            self._say(Kept(*key, verdict))

    async def _fold(self, order: Fold) -> None:
        counted = [Counted(*entry) for entry in order.counted]
        beginning = _Beginning(order.model, order.server, order.round)
        try:
            made = await asyncio.to_thread(self._learning.fold, beginning, counted)
        except Exception as error:  # the coordinator folds it again, and finds out the same
            trace = None if isinstance(error, TalariaError) else error
            logger.error("a fold is left to the coordinator: %s", error, exc_info=trace)
            self._say(Sum("", ""))
        else:
            self._say(Sum("", "") if made.left else Sum(made.model_digest, made.server))

    async def _send(self, link: Mqtt) -> None:
        """Send what stands in line. What does not get through, its device asks for again."""
        known = Known()
        while True:
            action = await self._line.next()
            if isinstance(action, SendChunks):
                try:
                    data, gone = await self._read(action.cut.sha256), list[int]()
                    await send(link, action, partial(_piece, data), gone.append, known=known)
                    self._say(Sent(sum(gone)))
                except StateError as error:
                    self._say(Trouble(action.device, str(error)))
            self._line.done(action)

    def _chunks(self, order: Send) -> SendChunks:
        cut = Cut(order.size, order.chunk, order.sha256, b"")
        return SendChunks(self._fleet, order.device, order.xfer, order.epoch, 0, cut, tuple(order.indices), kind="dn")

    async def _read(self, sha256: bytes) -> bytes:
        """The blob; the last one is kept, since nearly all ask for the same."""
        if self._model[0] != sha256:
            self._model = sha256, await asyncio.to_thread(self._learning.blobs.get, sha256.hex())
        return self._model[1]

    # -- what comes from the broker

    async def _listen(self, link: Mqtt) -> None:
        while True:
            item = await link.receive()
            self._hearing.heard(time.monotonic())
            match item:
                case LinkUp():
                    self._up = True
                    self._say(Linked(True))
                case LinkDown():
                    self._up = False
                    self._say(Linked(False, item.reason))
                case NotTaken():
                    self._say(Trouble("", item.reason))
                case Arrival() if item.payload:  # without: what was retained is cleared, or it is our own
                    self._arrived(item)
                    await self._room()

    def _arrived(self, item: Arrival) -> None:
        try:
            topic = parse(item.topic)
            key = topic.device, topic.xfer
            if not item.retained and self._is_new(topic, item):
                return
        except WireError:
            pass
        else:
            self._tell(key)
        # One byte more than may come is enough to be refused for its length.
        self._say(Odd(item.topic, item.payload[: MAX_FRAME + 1], item.retained))

    def _is_new(self, topic: Topic, item: Arrival) -> bool:
        """Whether it is a chunk that is wanted, which is kept then."""
        key = topic.device, topic.xfer
        upload = self._open.get(key)
        if upload is None or upload.receiver.whole:
            return False
        frame = decode_frame(item.payload)
        header = frame.header
        if (header.type, header.fleet, header.device, header.xfer) != (CHUNK, self._fleet, *key):
            return False
        if not upload.receiver.take(frame, 0.0):
            upload.news.append(header.idx)  # it is asked for although it is here: whoever asks has not heard of it
            return False
        try:
            self._uploads.part(key, upload.receiver.cut).put(header.idx, frame.payload, known=True)
        except StateError as error:
            # The upload's whole sha256 will not fit, and what is missing is asked for again.
            self._say(Trouble(topic.device, str(error)))
        upload.news.append(header.idx)
        upload.size += len(item.topic) + len(item.payload)
        # With half of a window here, the next ones are asked for.
        if upload.receiver.whole or len(upload.news) >= credit_of(upload.receiver.cut.chunk) // 2:
            self._tell(key)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON_S, self._tell_all)
        return True

    def _tell(self, key: tuple[str, str]) -> None:
        upload = self._open.get(key)
        if upload is not None and upload.news:
            self._say(Came(*key, upload.news, upload.size))
            upload.news, upload.size = [], 0

    def _tell_all(self) -> None:
        self._timer = None
        for key in self._open:
            self._tell(key)

    async def _beat(self) -> None:
        while True:
            self._say(Alive())
            await asyncio.sleep(BEAT_S)

    async def _look(self, link: Mqtt) -> None:
        """See to it that the link delivers."""
        while True:
            await asyncio.sleep(QUIET_S / 2)
            if not self._up:
                continue
            match self._hearing.next(time.monotonic()):
                case "ask":
                    await link.publish(str(self._echo), b"")
                case "renew":
                    self._hearing.heard(time.monotonic())
                    link.renew(deaf(f"fl/1/{self._fleet}/d/+/up/+"))


def _piece(data: bytes, offset: int, length: int) -> bytes:
    return data[offset : offset + length]
