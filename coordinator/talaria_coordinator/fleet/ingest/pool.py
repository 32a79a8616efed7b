""":class:`Pool`: the coordinator's side of its ingest workers. It says whose each device is, says again to a worker
that was started anew what the one before was told, and tells the protocol's machine what they tell."""

from __future__ import annotations

import asyncio
import subprocess
import zlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any

from talaria import time
from talaria.errors import WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.line import Sent
from talaria.wire.chunks import Cut
from talaria_coordinator.fleet.hands import Hands
from talaria_coordinator.fleet.ingest import words as w
from talaria_coordinator.storage.records import Worker, storable

AGAIN_S = (0.2, 30.0)
"""Seconds until a worker that died is started again, at first and at most."""
WELL_S = 30.0
"""One that lived so long did not die of its start."""

BEGIN_S, STILL_S = 300.0, 60.0
"""One that does not say its first word within so long, or then nothing for so long, stands still, and holds up its
devices: it is replaced."""

LONGEST = 200
"""Characters that are kept of a worker's last word."""

Key = tuple[str, str]


@dataclass(frozen=True)
class Colleague:
    """A worker that was started: its process, and our end of the socket."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


Recruit = Callable[[int], Coroutine[Any, Any, Colleague]]
"""Starts the worker of this number."""


def owner(device: str, workers: int) -> int:
    """Which of ``workers``, from 0, owns ``device``: the same in every process and after every start."""
    return zlib.crc32(device.encode()) % workers


class Pool:
    """The ingest workers of one service, as many as ``seats``."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.seats, self._turn = tuple(seats), 0

    def follow(self, device: str) -> None:
        """This device is here: whatever it uploads, its worker hears."""
        self._of(device).follow(device)

    def take(self, device: str, xfer: str, cut: Cut) -> None:
        """Let its worker take the chunks of this upload."""
        self._of(device).take((device, xfer), cut)

    async def checked(self, upload: a.Complete, round: int, base_digest: str) -> w.Verdict | None:
        """What a complete upload is found to be; None where its worker died, which the machine hears of otherwise."""
        return await self._of(upload.device).checked((upload.device, upload.xfer), round, base_digest)

    def sends(self, action: a.SendChunks) -> bool:
        """Whether its worker is here, and sends a device these chunks, of a blob."""
        return self._of(action.device).sends(action)

    async def folded(self, model: str, server: str, round: int, counted: Sequence[a.Counted]) -> tuple[str, str] | None:
        """The digests of the next global model and server state, worked out by each worker in turn; None where that is
        left to the coordinator."""
        self._turn += 1
        return await self.seats[self._turn % len(self.seats)].folded(model, server, round, counted)

    def drop(self, device: str, xfer: str) -> None:
        """Forget an upload."""
        self._of(device).drop((device, xfer))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """How each worker is now."""
        return tuple(seat.worker for seat in self.seats)

    def _of(self, device: str) -> Seat:
        return self.seats[owner(device, len(self.seats))]


@dataclass
class Seat:
    """The place of one worker, whoever has it just now."""

    number: int
    recruit: Recruit
    hands: Hands
    sent: Sent
    _devices: dict[str, None] = field(default_factory=dict)
    _uploads: dict[Key, Cut] = field(default_factory=dict)
    _checks: dict[Key, asyncio.Future[w.Verdict | None]] = field(default_factory=dict)
    _now: Colleague | None = None
    _linked: bool = False
    _sum: asyncio.Future[w.Sum | None] | None = None
    _since: float = field(default_factory=time.time)
    _updates: int = 0
    _heard: tuple[float, str] = field(default_factory=lambda: (time.time(), "it is being started"))

    @property
    def worker(self) -> Worker:
        """Who sits here, and how that goes."""
        pid, (heard, word) = None if self._now is None else self._now.process.pid, self._heard
        return Worker(
            number=self.number, pid=pid, since=self._since, connected=self._linked, devices=len(self._devices),
            updates=self._updates, heard=heard, word=word,
        )  # fmt: skip

    def follow(self, device: str) -> None:
        """Own this device."""
        if device not in self._devices:
            self._devices[device] = None
            self._say(w.Follow(device))

    def take(self, key: Key, cut: Cut) -> None:
        """Take the chunks of this upload."""
        self._devices[key[0]] = None
        self._uploads[key] = cut
        self._say(w.Take(*key, cut.size, cut.chunk, cut.sha256, cut.hashes))

    async def checked(self, key: Key, round: int, base_digest: str) -> w.Verdict | None:
        """The worker's verdict; None where it died first, or the upload was dropped: of that it says nothing more."""
        if self._now is None or key not in self._uploads:
            return None  # the next one is told of the upload, and tells what it has of it
        answer: asyncio.Future[w.Verdict | None] = asyncio.get_running_loop().create_future()
        self._checks[key] = answer
        self._say(w.Check(*key, round, base_digest))
        try:
            return await answer
        finally:
            if self._checks.get(key) is answer:
                del self._checks[key]

    def sends(self, action: a.SendChunks) -> bool:
        """Whether these chunks are sent."""
        if not self._linked:
            return False
        cut = action.cut
        word = w.Send(
            action.device, action.xfer, action.boot, cut.size, cut.chunk, cut.sha256, list(action.indices)
        )  # fmt: skip
        self._say(word)
        return True

    async def folded(self, model: str, server: str, round: int, counted: Sequence[a.Counted]) -> tuple[str, str] | None:
        """What comes of these updates, all of them; None where this worker cannot say, or died."""
        if self._now is None or self._sum is not None:
            return None
        self._sum = asyncio.get_running_loop().create_future()
        self._say(w.Fold(model, server, round, [list(astuple(entry)) for entry in counted]))
        try:
            word = await self._sum
        finally:
            self._sum = None
        return None if word is None or not word.model else (word.model, word.server)

    def drop(self, key: Key) -> None:
        """Forget this upload."""
        self._uploads.pop(key, None)
        self._tell_verdict(key, None)
        self._say(w.Drop(*key))

    async def live(self) -> None:
        """Have a worker here, always."""
        wait = AGAIN_S[0]
        while True:
            began, why = time.monotonic(), ""
            try:
                colleague = await self.recruit(self.number)
            except OSError as error:
                why = f"cannot be started: {error.strerror}"
            else:
                why = await self._work_with(colleague)
            if time.monotonic() - began >= WELL_S:
                wait = AGAIN_S[0]
            self.hands.tell("ingest-lost", worker=self.number, reason=why, again_in_s=wait)
            self._since = time.time()
            self._note(why)
            await asyncio.sleep(wait)
            wait = min(2 * wait, AGAIN_S[1])

    async def _work_with(self, colleague: Colleague) -> str:
        self._now, why, patience = colleague, "", BEGIN_S
        self._since, self._updates = time.time(), 0
        self.hands.tell("ingest", worker=self.number, pid=colleague.process.pid)
        for device in self._devices:
            self._say(w.Follow(device))
        for key, cut in self._uploads.items():
            self._say(w.Take(*key, cut.size, cut.chunk, cut.sha256, cut.hashes))
        try:
            async with asyncio.timeout(patience) as still:
                async for word in w.words(colleague.reader):
                    still.reschedule(None)  # who waits for us is not still
                    await self._hear(word)
                    patience = STILL_S
                    still.reschedule(asyncio.get_running_loop().time() + patience)
        except WireError as error:
            why = str(error)
        except TimeoutError:
            why = f"it said nothing for {patience:g} s"
        finally:
            self._now, self._linked = None, False
            if self._sum is not None and not self._sum.done():
                self._sum.set_result(None)
            for key in tuple(self._checks):
                self._tell_verdict(key, None)
            colleague.writer.close()
            colleague.process.kill()
            status = await asyncio.to_thread(colleague.process.wait)
        return why or f"ended with status {status}"

    async def _hear(self, word: w.Word) -> None:
        now = time.monotonic()
        if isinstance(word, w.Alive):
            return
        self._note(w.told(word))
        match word:
            case w.Linked():
                self._linked = word.up
                kind = "ingest-connected" if word.up else "ingest-disconnected"
                self.hands.tell(kind, worker=self.number, **({} if word.up else {"error": word.reason}))
            case w.Has():
                await self.hands.put(e.Listening(now, word.device, word.xfer, frozenset(word.chunks)))
            case w.Came():
                await self.hands.put(e.ChunksCame(now, word.device, word.xfer, frozenset(word.chunks), word.size))
            case w.Odd():
                await self.hands.put(e.Received(now, word.topic, word.payload, word.retained))
            case w.Kept() | w.Unfit() | w.Torn():
                key = word.device, word.xfer
                self._updates += isinstance(word, w.Kept)
                # Whoever comes next has nothing to do with it; what nobody waits for is of one that was dropped.
                if key in self._checks and not isinstance(word, w.Torn):
                    self._uploads.pop(key, None)
                self._tell_verdict(key, word)
            case w.Sum():
                if self._sum is not None and not self._sum.done():
                    self._sum.set_result(word)
            case w.Sent():
                self.sent(word.size)
            case w.Trouble():
                who = {"device": word.device} if word.device else {"worker": self.number}
                self.hands.tell("error", **who, error=word.error)
            case _:
                raise WireError(f"ingest: {type(word).__name__} is not for a worker to say")

    def _tell_verdict(self, key: Key, verdict: w.Verdict | None) -> None:
        answer = self._checks.pop(key, None)
        if answer is not None and not answer.done():
            answer.set_result(verdict)

    def _note(self, text: str) -> None:
        self._heard = time.time(), storable(text[:LONGEST])

    def _say(self, word: w.Word) -> None:
        if self._now is not None:
            with suppress(ConnectionError, RuntimeError):  # it has just ended
                self._now.writer.write(w.packed(word))
