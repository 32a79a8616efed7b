"""What ``talaria gateway run`` starts: an agent, which is a member of the fleet above, and its site's coordinator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from talaria import stopping
from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.config.upstream import keep_run, kept_run
from talaria_coordinator.fleet.above import Above
from talaria_coordinator.fleet.service import Report
from talaria_coordinator.server.open_state import open_store
from talaria_coordinator.server.server import require_safe, serve_all
from talaria_edge.agent.agent import Agent
from talaria_edge.config import DeviceConfig
from talaria_edge.identity import connection
from talaria_edge.storage.state import DeviceStore
from talaria_gateway.config import GatewayConfig
from talaria_gateway.member import SiteMember

LOOK_S = 0.2
T = TypeVar("T")


async def run_gateway(config: GatewayConfig, report: Report, *, insecure: bool = False) -> None:
    """Forward the rounds of the fleet above to the site until both are done, or until SIGTERM, SIGINT or SIGHUP.

    It may be killed at any time: run again from the same folders, the round completes with the same bytes. Raises
    :class:`~talaria.errors.TalariaError` where it cannot begin or go on.
    """
    if not insecure:
        connection.require_safe(config.upstream)
    above, runs = Above(config.upstream.device), Runs(config)

    def member(own: DeviceConfig, store: DeviceStore, run: Run) -> SiteMember:
        runs.heard(run)
        return SiteMember(own, store, run, above=above, left_s=lambda: agent.left_s)

    # One that waits for a round which is not wanted any more must not hold up the next.
    worker = ThreadPoolExecutor(2, thread_name_prefix="above")
    agent = Agent(config.upstream, report=report, worker=worker, learn=member, process=os.urandom(8))
    try:
        async with asyncio.TaskGroup() as both:
            up = both.create_task(agent.run())
            site = both.create_task(_serve(config, runs, above, report, insecure))
            site.add_done_callback(lambda _: up.cancel())
    except BaseExceptionGroup as found:
        raise found.exceptions[0] from None
    finally:
        above.end()
        worker.shutdown(wait=False, cancel_futures=True)


class Runs:
    """The run of the fleet above: as it was when this site heard of it last, and as it is said now."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config, self._news = config, asyncio.Event()
        self.run = kept_run(config.state)
        if self.run is not None:
            self._news.set()

    def heard(self, run: Run) -> None:
        """The fleet above learns this. Raises :class:`~talaria.errors.ConfigError` where it is another run, or one that
        no site can learn."""
        if self.run is not None and self.run.identity != run.identity:
            raise ConfigError(
                "gateway: the fleet above learns another run than this site began with; give the site another folder "
                "for it, as [fleet] state: its devices carry over what is theirs"
            )
        if self.run != run:
            self._config.site(run)
            keep_run(self._config.state, run)
            self.run = run
            self._news.set()

    async def next(self) -> Run:
        """The run, once it is known; and again when it goes on for longer."""
        await self._news.wait()
        self._news.clear()
        assert self.run is not None
        return self.run


async def _serve(config: GatewayConfig, runs: Runs, above: Above, report: Report, insecure: bool) -> None:
    """Serve the site, from the first round that is asked for; anew when the run goes on for longer."""
    _end_by_signal()
    run: Run | None = await runs.next()
    while run is not None:
        site = config.site(run)
        if not insecure:
            require_safe(site)
        began = await asyncio.to_thread(_goes_on, site)
        while not began and above.wanted is None:
            await asyncio.sleep(LOOK_S)
        run = await _until(runs.next(), serve_all([site], report, insecure=insecure, above=above))
        _end_by_signal()


def _end_by_signal() -> None:
    """SIGTERM, SIGINT and SIGHUP end this task. While the site is served, they end that first, in good order."""
    task = asyncio.current_task()
    assert task is not None
    stopping.when_asked(task.cancel)


async def _until(news: Coroutine[Any, Any, T], work: Coroutine[Any, Any, None]) -> T | None:
    """The ``news``, where they come before ``work`` is done, which ends then; None where it is done."""
    coming, working = asyncio.create_task(news), asyncio.create_task(work)
    try:
        await asyncio.wait((coming, working), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return None
        return await coming
    finally:
        for task in (coming, working):
            task.cancel()
        await asyncio.wait((coming, working))


def _goes_on(site: FleetConfig) -> bool:
    """Whether the site has begun before; its record then knows how long the run is by now."""
    site.state.mkdir(parents=True, exist_ok=True)
    with open_store(site) as store:
        fleet = store.fleets.get(site.name)
        if fleet is None:
            return False
        before = Run.from_json(fleet.run, allow=None)
        if before.identity == site.run.identity and site.run.rounds > before.rounds:
            store.runs.extend(site.name, site.run.rounds - before.rounds)
        return True
