"""What ``talaria gateway run`` starts: an agent, which is a member of the fleet above, and its site's coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria_coordinator.config.fleet import FleetConfig
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


async def run_gateway(config: GatewayConfig, report: Report, *, insecure: bool = False) -> None:
    """Forward the rounds of the fleet above to the site until both are done, or until SIGTERM or SIGINT.

    It may be killed at any time: run again from the same folders, the round completes with the same bytes. Raises
    :class:`~talaria.errors.TalariaError` where it cannot begin or go on.
    """
    if not insecure:
        connection.require_safe(config.upstream)
    above, loop = Above(config.upstream.device), asyncio.get_running_loop()
    known: asyncio.Future[Run] = loop.create_future()

    def member(own: DeviceConfig, store: DeviceStore, run: Run) -> SiteMember:
        if not known.done():
            known.set_result(run)
        elif known.result() != run:
            raise ConfigError(
                "gateway: the fleet above learns by another run now, or for more rounds; start this gateway again. "
                "Where it is another run, give it and its devices new state folders first"
            )
        return SiteMember(own, store, run, above=above)

    # One that waits for a round which is not wanted any more must not hold up the next.
    worker = ThreadPoolExecutor(2, thread_name_prefix="above")
    agent = Agent(config.upstream, report=report, worker=worker, learn=member, process=os.urandom(8))
    try:
        async with asyncio.TaskGroup() as both:
            up = both.create_task(agent.run())
            site = both.create_task(_serve(config, known, above, up, report, insecure))
            for name in (signal.SIGTERM, signal.SIGINT):  # once the site is served, it ends in good order instead
                with suppress(RuntimeError, ValueError):  # only the main thread can listen to signals
                    loop.add_signal_handler(name, lambda: [task.cancel() for task in (up, site)])
    except BaseExceptionGroup as found:
        raise found.exceptions[0] from None
    finally:
        above.end()
        worker.shutdown(wait=False, cancel_futures=True)


async def _serve(
    config: GatewayConfig, known: asyncio.Future[Run], above: Above, up: asyncio.Task[object], report: Report,
    insecure: bool,
) -> None:  # fmt: skip
    """Serve the site once its run is known, and a first global model is there; ``up`` ends with it."""
    run = await known
    site = config.site(run)
    if not insecure:
        require_safe(site)
    began = await asyncio.to_thread(_goes_on, site)
    while not began and above.wanted is None:
        await asyncio.sleep(LOOK_S)
    await serve_all([site], report, insecure=insecure, above=above)
    up.cancel()


def _goes_on(site: FleetConfig) -> bool:
    """Whether the site has begun before; its record then knows how long the run is by now."""
    site.state.mkdir(parents=True, exist_ok=True)
    with open_store(site) as store:
        fleet = store.fleet(site.name)
        if fleet is None:
            return False
        before = Run.from_json(fleet.run, allow=None)
        if before.identity == site.run.identity and site.run.rounds > before.rounds:
            store.extend(site.name, site.run.rounds - before.rounds)
        return True
