"""One fleet's coordinator: joins the link, the protocol machine, the store and the learning. The only file here that
starts tasks.

It may be killed at any point. What was promised is in the store before it is said, and a start reads all of it
again: the machine, the chunks on disk, the updates stored. The same updates then make the same body.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from talaria.errors import ConfigError, StateError, TalariaError
from talaria.protocol import events as e
from talaria.protocol.coordinator import CoordinatorState, Rules
from talaria.protocol.link import Count, Link
from talaria.wire.chunks import Cut, describe
from talaria.wire.transport import LinkDown, LinkUp, Will
from talaria_coordinator import select
from talaria_coordinator.blobs import Blobs
from talaria_coordinator.config import FleetConfig
from talaria_coordinator.control import Order, decide
from talaria_coordinator.learning import Learning
from talaria_coordinator.leaving import Leaving
from talaria_coordinator.members import Members
from talaria_coordinator.notices import Enrolled, Folded, Stop
from talaria_coordinator.store import Store
from talaria_coordinator.uplink import Open, over_mqtt
from talaria_coordinator.uploads import Uploads, receive
from talaria_coordinator.witness import witness

Report = Callable[[dict[str, Any]], None]
INBOX = 1024
GOODBYE_S = 5.0
SOON_S = 1.0
"""What may be saved soon is saved once for all that happens in this time: the machine of a large fleet is large."""
AGAIN_S = (2.0, 120.0)


class Service:
    """The coordinator of one fleet. :meth:`run` returns when it is stopped, or done and told not to stay."""

    def __init__(
        self,
        config: FleetConfig,
        store: Store,
        blobs: Blobs,
        *,
        report: Report = lambda event: None,
        open_transport: Open = over_mqtt,
        on_members: Callable[[], None] = lambda: None,
        observe: Callable[[object], None] = lambda item: None,
        count: Count = lambda way, size: None,
    ) -> None:
        """``report`` is told what happens; ``observe`` sees every event and action of the machine, and ``count``
        every byte on the link. None of them may wait."""
        self.config, self.store, self.blobs = config, store, blobs
        self._report, self._open, self._observe = report, open_transport, observe
        self._learning = Learning(config.run, blobs, config.aggregator, config.max_update)
        spec = config.run.to_json().encode()
        rules = Rules(
            retry=config.retry_s, max_update=config.max_update, stall=max(30.0, config.retry_s),
            max_bytes=max(Rules.max_bytes, config.max_update),
        )  # fmt: skip
        self._members, self._on_members = Members(config), on_members
        self._half = self._members.half(rules, spec)
        self._inbox: asyncio.Queue[object] = asyncio.Queue(INBOX)
        self._link = Link(self._read, count)
        self._uploads = Uploads(config.state / "uploads", config.max_update)
        self._body: tuple[Cut, bytes] | None = None
        self._not_before = 0.0
        self._failures = 0
        self._done_at: float | None = None
        self._leaving = Leaving(config.retry_s)
        self._stopped = False
        self._unsaved: float | None = None

    async def run(self, url: str) -> None:
        """Serve over the broker at ``url``. Raises :class:`~talaria.errors.TransportError` where it does not answer,
        and :class:`~talaria.errors.StateError` where the disk refuses or another coordinator took the fleet."""
        self._begin()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._live(url)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._uploads.close()

    def stop(self) -> None:
        """Leave in good order; call it in the event loop."""
        self._stopped = True
        if not self._inbox.full():
            self._inbox.put_nowait(Stop())

    # -- life

    def _begin(self) -> None:
        name, run = self.config.name, self.config.run.to_json()
        known = self.store.fleet(name)
        body, server = (known.body, known.server) if known else self._learning.first()
        self._fleet = self.store.enter(name, run, body, server)
        saved = self.store.machine(name)
        self._state = CoordinatorState.load(saved) if saved else CoordinatorState()

    async def _live(self, url: str) -> None:
        self._resume()
        transport = self._open(url, self.config, lambda: Will(*self._half.will(self._state)))
        try:
            await transport.start()
            helpers = [
                self._spawn(self._link.listen(transport, self._inbox.put, self._linked)),
                self._spawn(self._link.send(transport)),
                self._spawn(self._tick()),
            ]
            try:
                await self._serve()
                self._save()
                topic, payload = self._half.will(self._state)
                self._link.say(e.Publish(topic, payload, retain=True))
                await self._link.said(GOODBYE_S)
                await transport.flush(GOODBYE_S)
            finally:
                for helper in helpers:
                    helper.cancel()
        finally:
            await transport.close()

    async def _serve(self) -> None:
        while not self._stopped and not self._may_leave():
            event = await self._inbox.get()
            match event:
                case Folded():
                    self._folded(event)
                case Enrolled():
                    self._on_members()
                    self._settle_members()
                case Stop():
                    return
                case Order():
                    self._obey(event)
                case _:
                    self._feed(event)
            self._advance()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _resume(self) -> None:
        """Tell the machine what is on disk, and settle where machine and store were parted by a crash."""
        name, now = self.config.name, time.monotonic()
        chunks = self._uploads.resume(self._state.transfers())
        stored = {}
        for row in self.store.rounds(name):
            if row.closed is None:
                for update in self.store.updates(name, row.round):
                    if update.status == "stored":
                        stored[row.round, update.device] = bytes.fromhex(update.digest)
        kept = sum(map(len, chunks.values()))
        facts = {"epoch": self._fleet.epoch, "step": self._fleet.step, "rounds": self.config.run.rounds}
        self._tell("started", **facts, chunks=kept)
        self._feed(e.Start(now, self._fleet.epoch, chunks, stored))
        self._publish_body(multicast=False)
        self._settle_members()
        for row in self.store.rounds(name):
            machine = self._state.rounds.get(row.round)
            if row.closed is None and (machine is None or machine.phase == "failed"):
                self.store.fail_round(name, row.round, "the coordinator stopped before it was announced")

    def _settle_members(self) -> None:
        """Shut out who was revoked, and let in who was enrolled anew."""
        for change in self._members.changes(time.monotonic(), self._state.quarantined()):
            if isinstance(change, e.Release):
                self.store.quarantine(self.config.name, change.dev, None)
            self._feed(change)

    def _linked(self, change: LinkUp | LinkDown) -> None:
        if isinstance(change, LinkUp):
            self._tell("connected")
        else:
            self._tell("disconnected", error=change.reason)

    def _read(self, cut: Cut) -> bytes:
        """The bytes of the current body; none for one that is no longer current."""
        return self._body[1] if self._body and self._body[0].sha256 == cut.sha256 else b""

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.retry_s / 2)
            await self._inbox.put(e.Tick(time.monotonic()))
            try:
                if self._members.refresh():
                    await self._inbox.put(Enrolled())
            except ConfigError as error:
                self._tell("error", error=str(error))

    # -- the machine

    def _feed(self, event: object) -> None:
        self._observe(event)
        _, actions = self._half.step(self._state, event)
        # The state is already that after the whole step: one save covers all that stands behind it.
        saves = [action.soon for action in actions if isinstance(action, e.Save)]
        now = time.monotonic()
        if saves and self._unsaved is None:
            self._unsaved = now
        if self._unsaved is not None and (not all(saves) or now - self._unsaved >= SOON_S):
            self._save()
        for action in actions:
            self._observe(action)
            if not isinstance(action, e.Save):
                self._carry_out(action)

    def _save(self) -> None:
        self._unsaved = None
        self.store.save_machine(self.config.name, self._fleet.epoch, self._state.dump())

    def _carry_out(self, action: e.Action) -> None:
        name = self.config.name
        match action:
            case e.Publish() | e.SendChunks():
                self._link.say(action)
            case e.KeepChunk():
                self._keep(action)
            case e.Complete():
                self._spawn(self._take(action))
            case e.Discard():
                self._uploads.drop(action.dev, action.xfer)
            case e.RoundClosed():
                self._closed(action)
            case e.RoundFailed():
                self._failed(action.round, action.reason)
            case e.Fenced():
                raise StateError(
                    f"fleet {name!r}: a coordinator of epoch {action.epoch} took over (ours is {self._fleet.epoch}); "
                    "stop one of the two, or give them different fleet names"
                )
            case e.Departed():
                self._leaving.done(action.dev)
            case _:
                witness(action, name, self.store, self._tell)

    # -- uploads

    def _keep(self, action: e.KeepChunk) -> None:
        try:
            self._uploads.keep(action)
        except StateError as error:
            # The upload's whole sha256 will not fit, and what is missing is asked for again.
            self._tell("error", device=action.dev, error=str(error))

    async def _take(self, action: e.Complete) -> None:
        """A complete upload: check it, make it durable, and only then let the receipt go out."""
        wait, name = AGAIN_S[0], self.config.name
        with self._uploads.take(action) as part:
            while True:
                try:
                    answer = await asyncio.to_thread(receive, name, action, part, self._learning, self.store)
                except StateError as error:
                    self._tell("error", round=action.round, device=action.dev, error=str(error))
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, AGAIN_S[1])
                else:
                    break
        if isinstance(answer, e.Rejected):
            self._tell("rejected", round=action.round, device=action.dev, reason=answer.reason)
        await self._inbox.put(answer)

    # -- rounds

    def _advance(self) -> None:
        """Open the next round where nothing stands in the way."""
        current = None if self._state.current is None else self._state.rounds.get(self._state.current)
        busy = current is not None and current.phase in ("open", "closed")
        fleet = self._fleet
        if busy or fleet.status != "running" or time.monotonic() < self._not_before:
            return
        if fleet.step >= self.config.run.rounds:
            return
        roster = fleet.roster or self._gathered()
        online = {name for name, peer in self._state.peers.items() if peer.online}
        asked = select.ask(self.config, fleet.step + 1, roster, online, self._state.quarantined())
        if asked is None:
            return
        row = self.store.open_round(self.config.name, asked.step, asked.cohort, fleet.body)
        self._tell("round-opened", round=row.round, step=asked.step, cohort=len(asked.cohort), online=asked.online)
        spec = json.dumps({"step": asked.step}).encode()
        cohort, seconds = dict.fromkeys(asked.cohort, spec), self.config.deadline_s or None
        self._feed(e.OpenRound(time.monotonic(), row.round, cohort, seconds, asked.quorum))

    async def order(self, order: Order) -> None:
        """Put an operator's order in line; its ``answer`` is set once it is carried out, or refused."""
        await self._inbox.put(order)

    def _obey(self, order: Order) -> None:
        with order.answering():
            status, event = decide(order, self._fleet, self._state)
            if status is not None:
                self.store.set_status(self.config.name, status)
                self._refresh()
                self._not_before, self._failures = 0.0, 0
            if order.verb == "release":
                self.store.quarantine(self.config.name, order.device, None)
            self._tell(order.verb, device=order.device, reason=order.reason, status=self._fleet.status)
            if event is not None:
                self._feed(event)
            order.done(self._fleet.status)

    def _gathered(self) -> tuple[str, ...]:
        """The roster, fixed once all that are waited for have come."""
        roster = select.roster(self.config, self.store.devices(self.config.name))
        if roster:
            self.store.set_roster(self.config.name, roster)
            self._refresh()
            self._tell("roster", devices=list(roster))
        return roster

    def _closed(self, action: e.RoundClosed) -> None:
        row = next((r for r in self.store.rounds(self.config.name) if r.round == action.round), None)
        if row is None or row.closed is not None:
            # Committed before a crash that the machine does not remember.
            self._feed(e.Committed(time.monotonic(), action.round))
            return
        self._spawn(self._fold(action))

    async def _fold(self, action: e.RoundClosed) -> None:
        wait = AGAIN_S[0]
        while True:
            try:
                await asyncio.to_thread(self._commit, action)
            except StateError as error:
                now = self.store.fleet(self.config.name)
                if now is None or now.epoch != self._fleet.epoch:
                    raise
                self._tell("error", round=action.round, error=str(error))
                await asyncio.sleep(wait)
                wait = min(2 * wait, AGAIN_S[1])
            except TalariaError as error:
                self._failed(action.round, str(error))
                await self._inbox.put(e.Committed(time.monotonic(), action.round))
                return
            else:
                await self._inbox.put(Folded(action.round, len(action.counted), action.missing))
                return

    def _commit(self, action: e.RoundClosed) -> None:
        body, server = self._learning.fold(self._fleet, action.counted)
        self.store.commit_round(
            self.config.name,
            action.round,
            epoch=self._fleet.epoch,
            counted=[(entry.round, entry.dev) for entry in action.counted],
            body=body,
            server=server,
            last=self._fleet.step + 1 >= self.config.run.rounds,
        )

    def _folded(self, event: Folded) -> None:
        self._refresh()
        self._failures = 0
        self._tell(
            "round-closed",
            round=event.number,
            step=self._fleet.step,
            counted=event.counted,
            missing=list(event.missing),
            body=self._fleet.body,
        )
        self._feed(e.Committed(time.monotonic(), event.number))
        self._publish_body(multicast=True)
        self.blobs.gc(self.store.blobs_in_use(), older_s=3600)

    def _failed(self, number: int, reason: str) -> None:
        """Try again a while later, under a new number; each time in a row waits longer."""
        self.store.fail_round(self.config.name, number, reason)
        wait = min(AGAIN_S[1], AGAIN_S[0] * 2**self._failures)
        self._failures += 1
        self._not_before = time.monotonic() + wait
        self._tell("round-failed", round=number, reason=reason, again_in_s=wait)

    def _publish_body(self, multicast: bool) -> None:
        data = self.blobs.get(self._fleet.body)
        self._body = (describe(data, self._half.rules.chunk), data)
        self._feed(e.PublishBody(time.monotonic(), self._fleet.step, self._body[0], multicast))
        if self._fleet.step >= self.config.run.rounds and self._done_at is None:
            self._done_at = time.monotonic()
            self._tell("done", step=self._fleet.step, body=self._fleet.body)

    def _may_leave(self) -> bool:
        """After the last round, unless told to stay: once all members have their models, or after a while."""
        if self._done_at is None or self.config.stay:
            return False
        members = set(self._fleet.roster) - set(self._state.quarantined())
        here = {name for name, peer in self._state.peers.items() if peer.online}
        return self._leaving.over(time.monotonic() - self._done_at, members, here)

    def _refresh(self) -> None:
        fleet = self.store.fleet(self.config.name)
        if fleet is None:
            raise StateError(f"fleet {self.config.name!r} is gone from the store; restore it from a backup")
        self._fleet = fleet

    def _tell(self, event: str, **facts: Any) -> None:
        self._report({"at": time.time(), "fleet": self.config.name, "event": event, **facts})


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
