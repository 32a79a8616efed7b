"""A device's own plan, made before its first round of a run: measured in the worker thread, kept on flash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from talaria.errors import TalariaError
from talaria.federated import own_plan
from talaria.federated.kit import open_kit
from talaria.federated.run import Run
from talaria.planning.plan import Plan
from talaria_edge.config import DeviceConfig
from talaria_edge.storage.state import PLAN, DeviceStore

logger = logging.getLogger(__name__)


async def planned(
    config: DeviceConfig, store: DeviceStore, run: Run, worker: ThreadPoolExecutor, tell: Callable[..., None]
) -> DeviceConfig | Exception:
    """``config`` with the plan that keeps its budget in this run, or why there is none."""
    budget = config.budget
    if budget is None:
        return config

    def work() -> Plan:
        return own_plan.kept(config.state / PLAN, run, open_kit(config.kit or store.kit_path), budget)

    tell("planning")
    try:
        made = await asyncio.get_running_loop().run_in_executor(worker, work)
    except Exception as error:
        if not isinstance(error, TalariaError):
            logger.error("%s: planning: not foreseen", config.device, exc_info=error)
        return error
    why = made.reasons.get("widths", "")
    tell("planned", widths=dict(made.widths), predicted=dict(made.predicted), reason=why)
    return replace(config, plan=made, budget=None)
