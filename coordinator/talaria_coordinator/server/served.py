""":class:`Served`: runs one fleet in its own event loop and thread, and restarts it after its store was silent, or
where its broker does not answer when it begins anew.

A store that takes long holds up its own fleet alone: the coordinator's other fleets, its web server and its links to
brokers have threads of their own. Where the server of its database or its blobs does not answer at all, the service
ends as if it were killed, and begins anew from what is in the store, as after any crash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from talaria import malloc
from talaria.errors import StateError, TransportError
from talaria_coordinator.broker import Broker
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet import blueprints
from talaria_coordinator.fleet.above import Above
from talaria_coordinator.fleet.hands import leaves_within
from talaria_coordinator.fleet.life import as_it_is
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Service
from talaria_coordinator.fleet.site import site
from talaria_coordinator.identity.eviction import Barring
from talaria_coordinator.server import ingest, kits
from talaria_coordinator.server.open_state import open_blobs, open_store, write_url
from talaria_coordinator.server.operator_server import Desk
from talaria_coordinator.storage.database import SilentError

AGAIN_S = (2.0, 60.0)
"""Seconds until a silent store or broker is asked again, at first and at most."""


class _AwayError(TransportError):
    """The broker does not answer a fleet that begins anew, as it would wait for it had it gone on."""


class Served:
    """A fleet with its broker and its operator's ``desk``."""

    def __init__(self, config: FleetConfig, desk: Desk, broker: Broker, above: Above | None = None) -> None:
        """``above`` is where the rounds and models of a site come from; None: they are made here."""
        self._above = above
        self._config, self._desk, self._broker = config, desk, broker
        self._loop = asyncio.get_running_loop()
        self._stopped, self._ready, self._begun, self._again = asyncio.Event(), False, False, False
        self._now: tuple[Service, asyncio.AbstractEventLoop] | None = None
        self._orders: list[Order] = []
        """What a service that began anew had not carried out yet."""

    def stop(self) -> None:
        """Leave in good order; call it in the event loop."""
        self._stopped.set()
        if self._now is not None:
            service, inside = self._now
            with suppress(RuntimeError):  # it has just ended
                inside.call_soon_threadsafe(service.stop)

    def give(self, order: Order) -> None:
        """Put an operator's order in the service's line; any thread may call it."""
        if self._now is None:
            order.answer.set_exception(StateError("the coordinator waits for its store; try again"))
        else:
            service, inside = self._now
            asyncio.run_coroutine_threadsafe(service.order(order), inside)

    async def live(self) -> None:
        """Serve until the end. A store or broker that is silent once the fleet was entered is told, and asked again."""
        try:
            await self._live()
        finally:
            self._refuse("the coordinator ended over this order; `talaria coordinator status` says what became of it")

    def _refuse(self, why: str) -> None:
        """Answer the orders that nobody will carry out."""
        for order in self._orders:
            order.answer.set_exception(StateError(why))
        self._orders = []

    async def _live(self) -> None:
        wait = AGAIN_S[0]
        while True:
            begun = time.monotonic()
            try:
                with ExitStack() as stack:  # left once no thread of the service is at work any more
                    await in_own_thread(lambda: self._serve(stack))
            except (SilentError, _AwayError) as error:
                if not self._begun or self._stopped.is_set():
                    raise
                if time.monotonic() - begun > AGAIN_S[1]:
                    wait = AGAIN_S[0]  # it worked for a good while
                self._refuse(str(error))
                self._tell({"event": "failed", "error": str(error), "again_in_s": wait})
                if await leaves_within(self._stopped, wait):
                    return  # that it does not answer was told; ending is what was asked for now
                wait = min(2 * wait, AGAIN_S[1])
            else:
                if not self._again or self._stopped.is_set():
                    return
                wait = AGAIN_S[0]

    async def _serve(self, stack: ExitStack) -> None:
        desk = self._desk
        store = stack.enter_context(open_store(self._config))
        config = as_it_is(self._config, store)
        await asyncio.to_thread(blueprints.prepare, config.run, config.state)
        await asyncio.to_thread(kits.given, config)
        service = Service(
            config,
            store,
            open_blobs(config),
            report=self._told,
            observe=desk.observe,
            sent=desk.sent,
            keep_out=Barring(config, self._broker),
            tend=self._broker.tend,
            kit=partial(kits.prepared, config),
            recruit=ingest.recruits(config, self._broker),
            **({} if self._above is None else site(self._above)),
        )
        for order in self._orders:
            await service.order(order)
        self._now = service, asyncio.get_running_loop()
        if self._stopped.is_set():
            service.stop()
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._tell_ready(), self._loop))
            await service.run(self._broker.url)
        except TransportError as error:
            if ended := service.ending(time.time()):
                raise TransportError(f"{'; '.join(ended)}. What happened: {error}") from None
            if self._begun and not service.begun:
                raise _AwayError(str(error)) from None
            raise
        finally:
            self._now, self._again, self._orders = None, service.again, service.unanswered
            self._begun = self._begun or service.begun

    async def _tell_ready(self) -> None:
        if self._ready:
            return
        self._ready = True
        write_url(self._config.state, "broker.url", self._broker.url)
        facts = {"broker": self._broker.url, "kind": self._broker.kind, "state": str(self._config.state)}
        self._tell({"event": "ready", **facts, **self._desk.open(self.give)})

    def _told(self, event: dict[str, Any]) -> None:
        """What the service tells, told on in the thread of :meth:`live`."""
        self._loop.call_soon_threadsafe(self._desk.report, event)
        if event["event"] == "round-closed":  # its updates are folded, or their round is over
            self._loop.call_soon_threadsafe(self._loop.run_in_executor, None, malloc.give_back)

    def _tell(self, facts: dict[str, Any]) -> None:
        self._desk.report({"at": time.time(), "fleet": self._config.name, **facts})


async def in_own_thread(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do ``work`` in an event loop and a thread of its own; where this is cancelled, so is that, and waited for."""
    inside: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    leaving = False

    async def begin() -> None:
        task = asyncio.current_task()
        assert task is not None
        inside.append((asyncio.get_running_loop(), task))
        if not leaving:
            await work()

    def live() -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(begin())

    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as thread:
        done = asyncio.get_running_loop().run_in_executor(thread, live)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            leaving = True
            for loop, task in inside:
                with suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(task.cancel)
            await asyncio.wait([done])
            raise
