"""Several agents in one process: each with its own connection and store, all with one worker thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from talaria import stopping
from talaria.errors import ConfigError, TalariaError, said
from talaria.federated.run import Run
from talaria_edge.agent.agent import Agent, Report
from talaria_edge.agent.home_link import at_home
from talaria_edge.agent.training import Learner
from talaria_edge.agent.worker import learning_thread
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, require_learnable
from talaria_edge.identity.connection import Open, over_mqtt, require_safe
from talaria_edge.storage.state import DeviceStore
from talaria_edge.storage.tensor_files import DiskError

logger = logging.getLogger(__name__)

AGAIN_S = (5.0, 300.0)


async def run_agents(
    configs: Sequence[DeviceConfig], report: Report, *, open_transport: Open = over_mqtt, insecure: bool = False
) -> dict[str, dict[str, Any]]:
    """Run all agents to their end; what came of each, by device (``{"error": ...}`` where one failed, ``{"stopped":
    True}`` where it was told to end before).

    An agent that fails after it was connected (a full disk, or what nobody foresaw) is started again a while later; one
    that cannot begin is not, and no agent's end is that of another. SIGTERM, SIGINT and SIGHUP end all of them in good
    order. Raises :class:`~talaria.errors.ConfigError` where two share a name, a folder or a bundle, or where strangers
    could listen or speak and ``insecure`` does not allow it.
    """
    if not insecure:
        for config in configs:
            require_safe(config)
    names = [c.device for c in configs]
    folders = [str(c.state.resolve()) for c in configs]
    bundles = [str(c.bundle.resolve()) for c in configs if c.bundle is not None]
    for what, values in (("device", names), ("state folder", folders), ("bundle", bundles)):
        twice = sorted({v for v in values if values.count(v) > 1})
        if twice:
            raise ConfigError(f"{what} {', '.join(twice)} is given to more than one agent; give each its own")
    worker = learning_thread()
    tasks = [asyncio.create_task(keep_running(c, report, worker, open_transport)) for c in configs]
    stopping.when_asked(lambda: [task.cancel() for task in tasks])
    try:
        found = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        worker.shutdown(wait=False, cancel_futures=True)
    results: dict[str, dict[str, Any]] = {}
    for config, outcome in zip(configs, found, strict=True):
        if isinstance(outcome, asyncio.CancelledError):
            report({"at": time.time(), "device": config.device, "event": "stopped"})
            results[config.device] = {"device": config.device, "stopped": True}
        elif isinstance(outcome, Exception):
            results[config.device] = {"device": config.device, "error": said(outcome)}
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            results[config.device] = outcome
    return results


async def keep_running(
    config: DeviceConfig,
    report: Report,
    worker: ThreadPoolExecutor,
    open_transport: Open,
    learn: Callable[[DeviceConfig, DeviceStore, Run], Learner] = Learner,
) -> dict[str, Any]:
    """Run one agent to its end; one that fails after it was connected begins again, as :func:`run_agents` says."""
    report, open_transport = at_home(config, report, open_transport)
    wait, was_up, process = AGAIN_S[0], False, os.urandom(8)
    looked = await _look_at_data(config, report, worker)
    while True:
        agent = Agent(
            config,
            report=report,
            worker=worker,
            open_transport=open_transport,
            process=process,
            looked=looked,
            learn=learn,
        )
        looked = None  # the next one's samples may be others
        begun = time.monotonic()
        try:
            return await agent.run()
        except Exception as error:
            was_up = was_up or agent.was_up
            # What was not foreseen may be this hour's; what was, as a damaged state, is there again after a start.
            foreseen = isinstance(error, TalariaError) and not isinstance(error, DiskError)
            # Once its app's main thread has ended, no thread takes work any more: Python waits for this one alone.
            again = was_up and not foreseen and threading.main_thread().is_alive()
            if not isinstance(error, TalariaError):
                logger.error("%s: not foreseen", config.device, exc_info=error)
            if time.monotonic() - begun > AGAIN_S[1]:
                wait = AGAIN_S[0]  # it worked for a good while: another trouble, not the same
            facts = {"error": said(error)} | ({"again_in_s": wait} if again else {})
            report({"at": time.time(), "device": config.device, "event": "failed", **facts})
            if not again:
                raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, AGAIN_S[1])


async def _look_at_data(config: DeviceConfig, report: Report, worker: ThreadPoolExecutor) -> DeviceData | None:
    """The device's samples, read once, so that what is wrong with them is told now and not when a round is asked.

    Files that cannot be read raise. Too few samples are told and no more (None): there may be others when a round
    comes.
    """
    told = {"at": time.time(), "device": config.device}
    try:
        data = await asyncio.get_running_loop().run_in_executor(worker, config.source.load)
    except Exception as error:  # also what an app's own function raises
        report({**told, "event": "failed", "error": said(error)})
        raise
    try:
        require_learnable(data)
    except TalariaError as error:
        report({**told, "event": "data", "error": said(error), "mend": "rounds are declined until then"})
        return None
    return data
