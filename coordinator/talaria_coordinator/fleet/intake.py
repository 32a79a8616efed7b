"""How updates come in: taken up by this process, or by its ingest workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from talaria.errors import StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.line import Sent
from talaria.wire.chunks import Cut
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.aggregation import Learning, Made
from talaria_coordinator.fleet.hands import Hands, insist
from talaria_coordinator.fleet.ingest.pool import Pool, Recruit, Seat
from talaria_coordinator.fleet.ingest.words import Kept, Torn
from talaria_coordinator.fleet.secure import Secure
from talaria_coordinator.fleet.uploads import Uploads, begun, enter, receive
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store

NOTED_S = 2.0
"""Seconds after which it is kept in the record how the workers are, where that has changed."""

Chunks = dict[tuple[str, str], frozenset[int]]
Answer = e.Stored | e.UpdateRejected | e.Damaged | e.WordRefused


class Intake(Protocol):
    """What takes up updates for a service."""

    relayed: bool
    """Whether chunks come to others."""

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """What is to be done beside the service, as long as its link is held."""
        ...

    def resume(self, transfers: Mapping[tuple[str, str], Cut]) -> Chunks:
        """The intact chunks of these uploads, as far as they are known; what is here of any other is removed."""
        ...

    def follow(self, device: str) -> None:
        """A device is here."""
        ...

    def expect(self, action: a.Expect) -> None:
        """Its chunks are to be taken."""
        ...

    def keep(self, action: a.KeepChunk) -> None:
        """A chunk came to this process."""
        ...

    def sends(self, action: a.SendChunks) -> bool:
        """Whether these chunks, of the blob with their sha256, are sent by others."""
        ...

    def drop(self, device: str, xfer: str) -> None:
        """An upload is not needed any more."""
        ...

    async def taken(self, upload: a.Complete) -> Answer | None:
        """Check a complete upload, make it durable, and only then return what the machine is to answer; None where it
        will be complete once more."""
        ...

    async def folded(self, fleet: Fleet, counted: Sequence[a.Counted]) -> Made | None:
        """What comes of these updates, where others fold them; None where that is left to the caller."""
        ...

    def close(self) -> None:
        """Let go of all files."""
        ...


class Here:
    """This process alone."""

    relayed = False

    def __init__(
        self, config: FleetConfig, learning: Learning, store: Store, secure: Secure | None, hands: Hands
    ) -> None:
        self._fleet, self._learning, self._store = config.name, learning, store
        self._secure, self._hands = secure, hands
        self._uploads = Uploads(config.state / "uploads", config.max_update)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        return []

    def resume(self, transfers: Mapping[tuple[str, str], Cut]) -> Chunks:
        return self._uploads.resume(transfers)

    def follow(self, device: str) -> None:
        pass

    def expect(self, action: a.Expect) -> None:
        raise StateError("ingest: this process takes all chunks itself")

    def keep(self, action: a.KeepChunk) -> None:
        try:
            self._uploads.part((action.device, action.xfer), action.cut).put(action.index, action.data, known=True)
        except StateError as error:
            # The upload's whole sha256 will not fit, and what is missing is asked for again.
            self._hands.tell("error", device=action.device, error=str(error))

    def sends(self, action: a.SendChunks) -> bool:
        return False

    def drop(self, device: str, xfer: str) -> None:
        self._uploads.drop((device, xfer))

    async def taken(self, upload: a.Complete) -> Answer:
        secure = self._secure if upload.secure else None
        with self._uploads.take((upload.device, upload.xfer), upload.cut) as part:
            return await insist(
                lambda: receive(self._fleet, upload, part, self._learning, self._store, secure),
                lambda error: _complain(self._hands, upload, error),
                self._hands.leaving,
            )

    async def folded(self, fleet: Fleet, counted: Sequence[a.Counted]) -> None:
        return None

    def close(self) -> None:
        self._uploads.close()


class Relayed:
    """Ingest workers, started by ``recruit``; what they find is entered here."""

    relayed = True

    def __init__(
        self, config: FleetConfig, learning: Learning, store: Store, hands: Hands, recruit: Recruit, sent: Sent
    ) -> None:
        self._fleet, self._blobs, self._store, self._hands = config.name, learning.blobs, store, hands
        self._uploads = Uploads(config.state / "uploads", config.max_update)
        # What draws noise, or trains, does so where it was set up to.
        self._plain = config.aggregator is None and config.privacy is None
        self._pool = Pool([Seat(number, recruit, hands, sent) for number in range(config.workers)])

    def work(self) -> list[Coroutine[Any, Any, None]]:
        return [self._note(), *(seat.live() for seat in self._pool.seats)]

    async def _note(self) -> None:
        """Keep in the record how the workers are: whoever asks for the fleet's status reads that."""
        known = None
        while True:
            now = self._pool.workers
            if now != known:
                note, known = partial(self._store.fleets.note_workers, self._fleet, now), now
                await insist(note, lambda error: self._hands.tell("error", error=error), self._hands.leaving)
            await asyncio.sleep(NOTED_S)

    def resume(self, transfers: Mapping[tuple[str, str], Cut]) -> Chunks:
        self._uploads.prepare()
        self._uploads.sweep(transfers)
        return {}

    def follow(self, device: str) -> None:
        self._pool.follow(device)

    def expect(self, action: a.Expect) -> None:
        self._pool.take(action.device, action.xfer, action.cut)

    def keep(self, action: a.KeepChunk) -> None:
        pass  # handed on by a worker, which has it already

    def sends(self, action: a.SendChunks) -> bool:
        return self._pool.sends(action)

    def drop(self, device: str, xfer: str) -> None:
        self._pool.drop(device, xfer)
        self._uploads.drop((device, xfer))  # a worker that is away does not

    async def taken(self, upload: a.Complete) -> Answer | None:
        async def insisted(work: Any) -> Any:
            return await insist(work, lambda error: _complain(self._hands, upload, error), self._hands.leaving)

        tried = await insisted(lambda: begun(self._fleet, upload, self._store))
        self._blobs.expect(upload.cut.sha256.hex())
        word = await self._pool.checked(upload, *tried)
        if word is None:
            return None
        match word:
            case Kept():
                verdict: str | WireError | frozenset[int] = word.found
            case Torn():
                verdict = frozenset(word.chunks)
            case _:
                verdict = WireError(word.reason)
        answer: Answer = await insisted(lambda: enter(self._fleet, upload, verdict, self._store))
        return answer

    async def folded(self, fleet: Fleet, counted: Sequence[a.Counted]) -> Made | None:
        if not self._plain:
            return None
        made = await self._pool.folded(fleet.model_digest, fleet.server, fleet.round, counted)
        for digest in made or ():
            self._blobs.expect(digest)
        return None if made is None else Made(*made, tuple(counted), ())

    def close(self) -> None:
        self._uploads.close()
        with suppress(StateError):  # the next start forgets them
            self._store.fleets.note_workers(self._fleet, ())


def _complain(hands: Hands, upload: a.Complete, error: str) -> None:
    hands.tell("error", attempt=upload.attempt, device=upload.device, error=error)
