"""``engine="auto"``: which engine takes the steps of a run in less CPU time here, found by a few of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Literal

import numpy as np

from talaria.data.client import Client
from talaria.errors import ConfigError, ModelError
from talaria.federated import rounds, run_model
from talaria.federated.plan_compat import recipe_under
from talaria.federated.run import ENGINES, Engine, Member, Run
from talaria.planning.plan import Plan

AUTO: Literal["auto"] = "auto"
_STEPS = 10
"""Steps that each training takes while it is measured."""
_TURNS, _LONG = 3, 1.0
"""Turns that the engines take; one that took so many seconds is the last."""
logger = getLogger(__name__)


@dataclass(frozen=True)
class Pick:
    """The engine that a run trains with, and why; ``seconds`` of CPU that one client's short round took on each."""

    engine: Engine
    why: str
    seconds: Mapping[Engine, float] = field(default_factory=dict, repr=False)


def pick(run: Run, clients: Mapping[str, Client], plans: Mapping[str, Plan]) -> Pick:
    """The faster engine for the first of ``clients``, by name, under its plan: torch where programs cannot train it."""
    name = min(clients)
    client, most = clients[name], min(_STEPS, run.recipe.most_steps or _STEPS)
    short = replace(run, recipe=run.recipe.but(most_steps=most))
    batch = recipe_under(run.recipe, plans.get(name)).batch
    train = client.train.take(np.arange(min(len(client.train), _STEPS * batch)))
    members = {engine: Member(name, train, client.val, plans.get(name), engine) for engine in ENGINES}
    shared = run_model.first_shared(short)
    try:
        for member in members.values():  # what is made once is made here
            rounds.participate(short, member, shared, None, 1)
    except (ConfigError, ModelError) as why:
        return _told(Pick("torch", f"programs cannot train this run ({why})"))
    found: dict[Engine, list[float]] = {engine: [] for engine in ENGINES}
    for _ in range(_TURNS):
        for engine, member in members.items():
            begin = time.process_time()
            rounds.participate(short, member, shared, None, 1)
            found[engine].append(time.process_time() - begin)
        if sum(taken[-1] for taken in found.values()) > _LONG:
            break
    seconds = {engine: min(taken) for engine, taken in found.items()}
    best = min(ENGINES, key=seconds.__getitem__)
    other = next(engine for engine in ENGINES if engine != best)
    share = seconds[best] / max(seconds[other], 1e-9)
    return _told(Pick(best, f"a short round took {share:.2f} of the CPU time of {other}", seconds))


def _told(found: Pick) -> Pick:
    logger.info("engine: %s, for %s", found.engine, found.why)
    return found
