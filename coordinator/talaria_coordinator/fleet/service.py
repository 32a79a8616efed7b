""":class:`Service`: the coordinator of one fleet. It joins the link, the protocol machine, the store and the learning,
and starts all tasks of the fleet; :mod:`talaria_coordinator.fleet.scheduler` conducts the rounds.

It may be killed at any point. What was promised is in the store before it is said, and a start reads all of it
again: the machine, the chunks on disk, the updates stored. The same updates then make the same global model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

from talaria import time
from talaria.errors import ConfigError, StateError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.kits import KitOffer
from talaria.protocol.coordinator.machine import Rules
from talaria.protocol.coordinator.state import credit_of
from talaria.protocol.driver import Driver
from talaria.protocol.line import Sent
from talaria.protocol.state_codec import Saver
from talaria.wire.chunks import ROOM, Cut, chunk_within, most_within
from talaria.wire.mqtt import LinkDown, LinkUp, NotTaken, Transport, Will
from talaria.wire.topics import Topic
from talaria.wire.validity import watch
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.allowlist import Members
from talaria_coordinator.fleet.connection import Open, over_mqtt
from talaria_coordinator.fleet.conversation import Conversation
from talaria_coordinator.fleet.deaf_link import QUIET_S, Hearing, deaf
from talaria_coordinator.fleet.drain import Leaving
from talaria_coordinator.fleet.hands import Hands, whenever
from talaria_coordinator.fleet.ingest.pool import Recruit
from talaria_coordinator.fleet.intake import Here, Intake, Relayed
from talaria_coordinator.fleet.life import as_it_is, carry_out, follow, judge, learning_of
from talaria_coordinator.fleet.link_health import Footing
from talaria_coordinator.fleet.notices import CaughtUp, Enrolled, Folded, FoldFailed, Stop
from talaria_coordinator.fleet.operator_commands import Order, decide
from talaria_coordinator.fleet.order_box import take
from talaria_coordinator.fleet.parcels import Parcels, no_kit
from talaria_coordinator.fleet.refusals import Refusals
from talaria_coordinator.fleet.scheduler import Conductor
from talaria_coordinator.fleet.secure import secure_of
from talaria_coordinator.fleet.tidying import Tidying
from talaria_coordinator.fleet.vacancy import look, older, replaced
from talaria_coordinator.fleet.witness import agree, sights, witness
from talaria_coordinator.identity.eviction import KeepOut, nowhere
from talaria_coordinator.storage.blobs import Blobs
from talaria_coordinator.storage.store import Store

Report = Callable[[dict[str, Any]], None]
INBOX = 1024
AT_ONCE = 32
"""Messages that are taken together where so many wait: one transaction makes what follows from all of them durable."""
PARTING_S = 2.0
SOON_S = 1.0
"""What may be saved soon is saved once for all that happens in this time: the machine of a large fleet is large."""


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
        keep_out: KeepOut = nowhere,
        tend: Callable[[bool], list[str]] = lambda failing: [],
        observe: Callable[[object], None] = lambda item: None,
        sent: Sent = lambda size: None,
        learn: Callable[..., Learning] = Learning,
        kit: Callable[[], bytes] = no_kit,
        recruit: Recruit | None = None,
        conduct: Callable[..., Conductor] = Conductor,
    ) -> None:
        """``report`` is told what happens; ``observe`` sees every event and action of the machine, and ``sent``
        how many bytes went out. None of them may wait. ``learn`` makes what checks and folds updates, and
        ``keep_out`` tells the broker who is shut out; ``tend`` looks after a broker that is ours, and says what befell
        it. ``kit`` gives the run's kit, and may take long; it is asked once, when a device needs it.
        ``recruit`` starts an ingest worker; None: there are none, and this process takes up all updates. ``conduct``
        makes what opens the rounds."""
        self.config, self.store, self.blobs = (config := as_it_is(config, store)), store, blobs
        self._report, self._open, self._observe = report, open_transport, observe
        self._learning, self._learn = learning_of(config, config.run, blobs, learn), learn
        self._secure = secure_of(config, self._learning.aggregator, store, blobs)
        spec = config.run.to_json().encode()
        rules = Rules(
            chunk=config.chunk, credit=credit_of(config.chunk), retry=config.retry_s, max_update=config.max_update,
            stall=max(30.0, config.retry_s), max_bytes=max(Rules.max_bytes, config.max_update),
        )  # fmt: skip
        self._members, self._bar = Members(config), keep_out
        self._out_changed = asyncio.Event()
        self._refusals = Refusals(self._tell)
        self._planted = 0
        self._hearing, self._up = Hearing(max(QUIET_S, rules.grace)), False
        self._tend, self._footing = tend, Footing(max(QUIET_S, rules.grace))
        self._half = replace(self._members.half(rules, spec), relayed=recruit is not None)
        self._driver = Driver(self._read, sent, inbox=INBOX, known=True)
        hands = Hands(self._feed, self._tell, self._driver.spawn, self._driver.inbox.put)
        self._intake: Intake = (
            Here(config, self._learning, store, self._secure, hands)
            if recruit is None
            else Relayed(config, self._learning, store, hands, recruit, sent)
        )
        self._parcels = Parcels(config.run, kit, hands, self._offer_kit, blobs.get)
        fold = self._intake.folded
        self._conductor = conduct(config, store, self._learning, hands, rules.grace, self._secure, fold)
        self._talk = Conversation(self._secure, hands)
        self.begun = False
        """Whether it has entered its fleet."""
        self.again = False
        """Whether it ended to begin anew: what the fleet learns has changed."""
        self._done_at: float | None = None
        self._leaving = Leaving(config.retry_s)
        self._stopped = False
        self._orders: list[Order] = []
        self._tidying = Tidying(store, blobs, self._tell, alone=recruit is None and config.store.blobs is None)
        self._unsaved: float | None = None

    async def run(self, url: str) -> None:
        """Serve over the broker at ``url``. Raises :class:`~talaria.errors.TransportError` where it does not answer,
        and :class:`~talaria.errors.StateError` where the disk refuses or another coordinator took the fleet."""
        known = self._conductor.inspect()
        above = await look(
            lambda will: self._open(url, self.config, will), self.config.name, self._members.signer, known
        )
        self._state, self._saver = self._conductor.begin(above), Saver()
        self.begun = True
        if reason := older(above, known):
            self._tell("record-older", reason=reason)
        try:
            await self._driver.run(self._live(url))
        finally:
            self._intake.close()

    def ending(self, now: float) -> list[str]:
        """The fleet's certificates that end soon, or have ended, with the mend."""
        return self._members.ending(now)

    def stop(self) -> None:
        """Leave in good order; call it in the event loop."""
        self._stopped = True
        if not self._driver.inbox.full():
            self._driver.inbox.put_nowait(Stop())

    # -- life

    async def _live(self, url: str) -> None:
        self._resume()
        transport = self._transport = self._open(url, self.config, lambda: Will(*self._half.will(self._state)))
        async with self._driver.linked(transport, transport.start(), self._linked):
            self._driver.beside(self._tick(transport))
            self._driver.beside(whenever(self._out_changed, lambda: self._keep_out(transport), self._tell))
            for work in self._intake.work():
                self._driver.beside(work)
            self._driver.beside(watch(self._members.ending, lambda text: self._tell("certificate", reason=text)))
            await self._serve()
            self._conductor.leave()
            self._save()
            await self._driver.say_goodbye(transport, *self._half.will(self._state))

    async def _serve(self) -> None:
        inbox = self._driver.inbox
        while not self._stopped and not self._may_leave():
            events = [await inbox.get()]
            while len(events) < AT_ONCE and not inbox.empty():
                events.append(inbox.get_nowait())
            for heard, some in groupby(events, lambda event: isinstance(event, e.Received | e.ChunksCame)):
                if heard:
                    self._feed(*some)
                    self._conductor.advance(self._state)
                    continue
                for event in some:
                    if isinstance(event, Stop):
                        return
                    self._take_note(event)
                    if self._stopped:  # what the fleet learns may be another run by now
                        return
                    self._conductor.advance(self._state)

    def _take_note(self, event: object) -> None:
        match event:
            case Folded():
                self._conductor.folded(event)
                if self._is_called_off():
                    return
                self._publish_model(multicast=self._conductor.over or self.config.run.asks_all)
                if self._tidying.due(time.monotonic()):
                    self._driver.spawn(self._tidying.work())
            case FoldFailed():
                self._conductor.spoiled(event)
                self._after_failure()
            case CaughtUp():
                self._conductor.caught_up()
                self._tell("caught-up", since=event.round, round=self._conductor.fleet.round)
                self._publish_model(multicast=self._conductor.over)
            case Enrolled():
                self._settle_members()
            case Order():
                self._obey(event)
            case _:
                self._feed(event)

    def _resume(self) -> None:
        """Tell the machine what is on disk, and settle where machine and store were parted by a crash."""
        chunks = self._intake.resume(self._state.transfers())
        stored, kept = self._conductor.stored(self._state), sum(map(len, chunks.values()))
        fleet, rounds = self._conductor.fleet, self.config.run.rounds
        agree(self._state, fleet.name, self.store)
        self._tell("started", epoch=fleet.epoch, round=fleet.round, rounds=rounds, chunks=kept)
        self._feed(e.Start(time.monotonic(), fleet.epoch, chunks, stored))
        if self._is_called_off():  # by gates that had answered before a crash
            return
        self._publish_model(multicast=False)
        self._settle_members()
        self._feed(self._conductor.amended(self._state))
        self._conductor.settle(self._state)
        self._after_failure()
        self._talk.resume(self._state)

    def _settle_members(self) -> None:
        """Shut out who was revoked, and let in who was enrolled anew."""
        for change in self._members.changes(time.monotonic(), self._state.quarantined()):
            if isinstance(change, e.Release):
                self.store.devices.quarantine(self.config.name, change.device, None)
            self._feed(change)
        self._out_changed.set()

    async def _keep_out(self, transport: Transport) -> str:
        """Have the broker keep away whoever is shut out, once the device was told why; what is left to the operator."""
        await self._driver.said(transport, PARTING_S)
        renewed, self._members.renewed = self._members.renewed, set()
        try:
            return await self._bar(set(self._state.quarantined()), renewed)
        except BaseException:
            self._members.renewed |= renewed
            raise

    def _linked(self, change: LinkUp | LinkDown | NotTaken) -> None:
        if isinstance(change, NotTaken):
            self._tell("error", error=change.reason)
            return
        self._up = isinstance(change, LinkUp)
        if isinstance(change, LinkUp):
            self._fit(self._transport.largest)
            self._hearing.heard(time.monotonic())
            self._footing.up()
            self._tell("connected", chunk=self._half.rules.chunk)
        else:
            self._footing.lost(time.monotonic())
            self._tell("disconnected", error=change.reason)

    def _fit(self, largest: int | None) -> None:
        """Send in chunks that the broker takes. Raises :class:`ConfigError` where that is not possible."""
        rules, most = self._half.rules, most_within(largest, self.config.chunk)
        need = max(self._parcels.size, 1)
        if need > most or (largest is not None and len(self._half.spec) + ROOM > largest):
            raise ConfigError(
                f"the broker takes at most {largest} bytes as one message, in which at most {most} can be sent; the "
                f"model has {need}, and the run's description {len(self._half.spec)}. Raise its bound (Mosquitto: "
                "max_packet_size), or learn a smaller model"
            )
        chunk = chunk_within(largest, self.config.chunk)
        fitting = replace(rules, chunk=chunk, max_update=min(self.config.max_update, most))
        if fitting != rules:
            self._half = replace(self._half, rules=fitting)
            self._publish_model(multicast=False)
        self._parcels.fit(chunk, most)

    def _read(self, cut: Cut) -> bytes:
        return self._parcels.read(cut)

    async def _tick(self, transport: Transport) -> None:
        before = 0
        while True:
            await asyncio.sleep(self.config.retry_s / 2)
            await self._driver.inbox.put(e.Tick(time.monotonic()))
            self._refusals.due(time.monotonic())
            if self._planted and self._planted == before:
                # All that was told is cleared; what a flood left may be more than the broker tells in one go.
                self._planted = 0
                await transport.recall()
            before = self._planted
            await self._listen_for_myself(transport)
            for news in await asyncio.to_thread(self._tend, self._footing.failing(time.monotonic())):
                self._tell("broker", reason=news)
            for order in await asyncio.to_thread(lambda: list(take(self.config.state))):
                await self.order(order)
            try:
                if self._members.refresh():
                    await self._driver.inbox.put(Enrolled())
            except ConfigError as error:
                self._tell("error", error=str(error))

    async def _listen_for_myself(self, transport: Transport) -> None:
        if not self._up:
            return
        match self._hearing.next(time.monotonic()):
            case "ask":  # empty, so that it means nothing to anybody
                self._driver.say(a.Publish(str(Topic(self.config.name, "evt", "echo")), b""))
            case "renew":
                self._hearing.heard(time.monotonic())
                transport.renew(deaf(f"fl/1/{self.config.name}/#"))

    # -- the machine

    def _feed(self, *events: object) -> None:
        actions: list[a.Action] = []
        for event in events:
            if isinstance(event, e.Received):
                self._hearing.heard(event.now)
            self._observe(event)
            actions += self._half.step(self._state, event)[1]
        # The state is already that after all these steps: one save covers all that stands behind it.
        saves = [action.soon for action in actions if isinstance(action, a.Save)]
        now = time.monotonic()
        if saves and self._unsaved is None:
            self._unsaved = now
        if self._unsaved is not None and (not all(saves) or now - self._unsaved >= SOON_S):
            self._save()
        self.store.devices.see(self.config.name, *sights(actions))  # who all come at once are one transaction
        for action in actions:
            if isinstance(action, a.SendChunks):
                self._send(action)
                continue
            self._observe(action)
            if not isinstance(action, a.Save):
                self._carry_out(action)

    def _save(self) -> None:
        self._unsaved = None
        self.store.fleets.save_machine(self.config.name, self._conductor.fleet.epoch, self._saver.dump(self._state))

    def _send(self, action: a.SendChunks) -> None:
        theirs = self._parcels.is_model(action.cut) and action.kind == "dn" and self._intake.sends(action)
        said = action if theirs else self._driver.say(action)
        if isinstance(said, a.SendChunks):
            self._observe(said)
            here = sum(peer.online for peer in self._state.peers.values()) if said.kind == "m" else 1
            self._conductor.down += here * self._parcels.model_bytes(said)

    def _carry_out(self, action: a.Action) -> None:
        name = self.config.name
        match action:
            case a.Publish():
                self._planted += not action.payload
                self._driver.say(action)
            case a.FrameRefused():
                self._refusals.heard(action, time.monotonic())
            case a.Quarantined():
                witness(action, self._conductor.fleet, self.store, self._tell)
                self._driver.say(a.Publish(str(Topic(name, "state", action.device)), b"", retain=True))
                self._out_changed.set()
            case a.KeepChunk():
                self._intake.keep(action)
            case a.Expect():
                self._intake.expect(action)
            case a.Complete():
                self._driver.spawn(self._take(action))
            case a.WordSaid():
                self._driver.spawn(self._talk.listen(action))
            case a.StepOver():
                self._driver.spawn(self._talk.go_on(action))
            case a.Discard():
                self._intake.drop(action.device, action.xfer)
            case a.RoundClosed():
                self._conductor.closed(action)
            case a.RoundFailed():
                self._conductor.failed(action.attempt, action.reason, action.opened)
                self._after_failure()
            case a.Fenced():
                raise StateError(replaced(name, self._conductor.fleet.epoch, action))
            case a.KitAsked():
                self._parcels.ask_for_kit(action.device)
            case a.CompactAsked():
                self._parcels.ask(action)
            case a.Departed():
                self._leaving.done(action.device)
                if action.for_good:
                    self._conductor.left(action.device)
            case _:
                witness(action, self._conductor.fleet, self.store, self._tell)
                if isinstance(action, a.DeviceUp):
                    self._intake.follow(action.device)
                    self._conductor.not_asked(action.device)

    # -- uploads

    async def _take(self, action: a.Complete) -> None:
        """A complete upload: check it, make it durable, and only then let the receipt go out."""
        answer = await self._intake.taken(action)
        if isinstance(answer, e.UpdateRejected):
            self._tell("rejected", attempt=action.attempt, device=action.device, reason=answer.reason)
        if answer is not None:
            await self._driver.inbox.put(answer)

    def _offer_kit(self, kit: KitOffer) -> None:
        self._half = replace(self._half, kit=kit)

    # -- orders and global models

    async def order(self, order: Order) -> None:
        """Put an operator's order in line; its ``answer`` is set once it is carried out, or refused."""
        self._orders = [*self.unanswered, order]
        await self._driver.inbox.put(order)

    @property
    def unanswered(self) -> list[Order]:
        """The orders that stand in line; where this has ended, for the one that follows it."""
        return [order for order in self._orders if not order.answer.done()]

    def _obey(self, order: Order) -> None:
        with order.answering():
            if order.verb in ("extend", "retire", "readmit"):
                carry_out(order, self._conductor.fleet, self.config, self.store, self.blobs)
                self._conductor.refresh()
                self._tell(order.verb, device=order.device, reason=order.reason, by=order.rounds)
                if order.verb == "retire":
                    self._feed(self._conductor.amended(self._state))
                # All that is known of a run is read again, as after a crash: nothing that was learned or sent is lost.
                self.again = self._stopped = order.verb == "extend"
                order.done(self._conductor.fleet.status)
                return
            if order.verb == "next":
                self._conductor.refresh()
                self._driver.spawn(self._follow(order))
                return
            status, event = decide(order, self._conductor.fleet, self._state)
            if status is not None:
                self.store.fleets.set_status(self.config.name, status, order.reason)
                self._conductor.refresh()
                self._conductor.at_once()
            if order.verb == "release":
                self.store.devices.quarantine(self.config.name, order.device, None)
                self._out_changed.set()
            self._tell(order.verb, device=order.device, reason=order.reason, status=self._conductor.fleet.status)
            if isinstance(event, e.AbortRound) and not self._conductor.call_off(event.attempt, event.reason):
                event = None  # it was committed in this moment, and counts
            if event is not None:
                self._feed(event)
            if order.verb == "abort":
                self._is_called_off(by_order=True)
            order.done(self._conductor.fleet.status)

    async def _follow(self, order: Order) -> None:
        """Begin another run from the last model, and then begin anew with it."""
        with order.answering():
            fleet = self._conductor.fleet
            await asyncio.to_thread(follow, order, fleet, self.config, self.store, self.blobs, self._learn)
            self.again = True
            self.stop()
            self._conductor.refresh()
            self._tell("next", round=fleet.round, rounds=order.rounds, reason=order.reason)
            order.done(self._conductor.fleet.status)

    def _is_called_off(self, *, by_order: bool = False) -> bool:
        """Whether the run that is tried is called off, by gates or by order; then all begins anew as it was before."""
        found = judge(self._conductor.fleet, self.store, least=self.config.draw.least, by_order=by_order)
        if found is None:
            return False
        self._conductor.refresh()
        self._tell("canary", **found)
        self.again = self._stopped = bool(found["called_off"])
        return self.again

    def _after_failure(self) -> None:
        """A run that is tried may be called off; a secure round that is passed over makes a version."""
        known = self._state.model
        if not self._is_called_off() and known is not None and known.version != self._conductor.fleet.round:
            self._publish_model(multicast=False)

    def _publish_model(self, multicast: bool) -> None:
        data = self.blobs.get(self._conductor.fleet.model_digest)
        multicast = multicast and self._parcels.to_all(data)
        cut = self._parcels.publish(data, self._half.rules.chunk)
        self._feed(e.PublishModel(time.monotonic(), self._conductor.fleet.round, cut, multicast))
        if self._conductor.over and self._done_at is None:
            self._done_at = time.monotonic()
            self._feed(e.Dismiss(self._done_at, "the run is over"))
            self._tell("done", round=self._conductor.fleet.round, model_digest=self._conductor.fleet.model_digest)

    def _may_leave(self) -> bool:
        """After the last round, unless told to stay: once all members have their models, or after a while."""
        if self._done_at is None or self.config.stay:
            return False
        members = set(self._conductor.fleet.roster) - set(self._state.quarantined())
        here = {name for name, peer in self._state.peers.items() if peer.online}
        return self._leaving.over(time.monotonic() - self._done_at, members, here)

    def _tell(self, event: str, **facts: Any) -> None:
        self._report({"at": time.time(), "fleet": self.config.name, "event": event, **facts})
