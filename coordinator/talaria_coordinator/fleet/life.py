"""What becomes of a fleet after its first run: it goes on for more rounds, or another run begins from its model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from talaria import seeds
from talaria.errors import ConfigError
from talaria.federated import warm_start
from talaria.federated.run import MOST_ROUNDS, Run
from talaria.foreign import parsed, shown
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria_coordinator.config.fleet import Canary, FleetConfig
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.fleet.operator_commands import Order, decide, unknown
from talaria_coordinator.storage.blobs import Blobs
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store


def as_it_is(config: FleetConfig, store: Store) -> FleetConfig:
    """``config`` with the run that the fleet learns by now, where fleet.toml still gives one that it has gone on from.
    Any other difference is left to :func:`~talaria_coordinator.storage.runs.require_same_run`."""
    known = store.fleets.get(config.name)
    if known is None or config.run.identity not in known.life.given:
        return config
    run = Run.from_json(known.run, allow=None)
    longer = config.run.identity == run.identity and config.run.rounds > run.rounds
    return config if longer else replace(config, run=run)


def require_own(config: FleetConfig, verb: str) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where what is learned is not for this coordinator to say."""
    if config.site:
        raise ConfigError(f"{verb}: this is a site; how long it learns, and what, is for the fleet above to say")


def require_room(fleet: Fleet, rounds: int) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where a fleet cannot go on for ``rounds`` rounds more."""
    now = Run.from_json(fleet.run, allow=None).rounds
    if not 1 <= rounds <= MOST_ROUNDS - now:
        raise ConfigError(
            f"extend: rounds={rounds} must be in 1..{MOST_ROUNDS - now}: how many to learn beyond the {now} there are"
        )
    if fleet.status == "aborted":
        raise ConfigError(f"fleet {fleet.name!r} was called off; `resume` it, and then extend it")


Learn = Callable[..., Learning]


def learning_of(config: FleetConfig, run: Run, blobs: Blobs, learn: Learn = Learning) -> Learning:
    """What checks and folds the updates of ``run``, which is that of ``config`` or follows it. Raises
    :class:`~talaria.errors.ConfigError` where its rule cannot take partial sums, and the fleet has gateways."""
    rule = None if config.privacy is None else config.privacy.rule
    return learn(run, blobs, config.aggregator, config.max_update, config.buffering, rule, config.gateways)


def follow(
    order: Order, fleet: Fleet, config: FleetConfig, store: Store, blobs: Blobs, learn: Learn = Learning
) -> None:
    """Begin another run from the fleet's last model, as ``order`` says; it may take seconds.

    Raises :class:`~talaria.errors.ConfigError`, naming what cannot be carried over, or where a round is open."""
    require_own(config, "next")
    config = _with_trial(config, order.canary)
    if order.rounds < 0 or order.classes < 0:
        raise ConfigError(f"next: rounds={order.rounds} and classes={order.classes} must be 0 or more")
    if fleet.status == "aborted":
        raise ConfigError(
            f"fleet {fleet.name!r} was called off; `resume` it, then `pause` it or let it learn to its end"
        )
    if fleet.status not in ("done", "paused") or store.attempts.unclosed(fleet.name):
        raise ConfigError(
            f"fleet {fleet.name!r} is {fleet.status}, or its last round is not closed yet; `pause` it, and try again "
            "when the round is over"
        )
    tried = fleet.life.canary
    if tried:
        raise ConfigError(
            f"fleet {fleet.name!r}: its run is being tried by {', '.join(tried['members'])} until round "
            f"{tried['gate']}; `resume` it, and begin another when the gates have answered"
        )
    old = Run.from_json(fleet.run, allow=None)
    run = given = Run.from_json(order.run, allow=None) if order.run else replace(old, follows=())
    if order.classes:
        run = replace(run, spec=replace(run.spec, classes=order.classes))
    rounds_more = order.rounds or (given.rounds if order.run else 0)
    if not rounds_more:
        raise ConfigError(
            "next: rounds=0, and [run] in fleet.toml is the present run, or one before it; change it, or say how many "
            "rounds the present one is to learn anew: `next --rounds 20`"
        )
    if not 1 <= rounds_more <= MOST_ROUNDS - fleet.round:
        raise ConfigError(f"next: rounds={rounds_more} must be in 1..{MOST_ROUNDS - fleet.round}: how many it learns")
    run = replace(warm_start.following(old, run), rounds=fleet.round + rounds_more)
    canary = None if config.canary is None else _tried_by(config, config.canary, fleet, run)
    if config.kit is not None:
        raise ConfigError(
            f"next: [fleet] kit={config.kit} is of the run before; leave it out and start the coordinator again: it "
            "makes the new one when a device asks"
        )
    model, server, facts = learning_of(config, run, blobs, learn).after(old, fleet, config.state)
    store.runs.follow(fleet, run, model, server, (given.identity, old.identity), facts, canary)


def _with_trial(config: FleetConfig, said: str) -> FleetConfig:
    """``config`` with the ``[canary]`` that an order brings, if any: fleet.toml may have another since the start."""
    if not said:
        return config
    try:
        facts = parsed(said.encode())
        return replace(config, canary=None if facts is None else Canary(**facts))
    except (ValueError, TypeError):
        raise ConfigError(f"order: canary={shown(said)} is no trial; give orders by `talaria coordinator`") from None


def _tried_by(config: FleetConfig, canary: Canary, fleet: Fleet, run: Run) -> dict[str, Any]:
    """Who tries ``run`` first, and what comes back where it is called off."""
    count = math.ceil(canary.share * len(fleet.roster))
    if count < max(1, config.draw.least):
        raise ConfigError(
            f"canary: share={canary.share:g} of {len(fleet.roster)} members are {count}, and the rule folds no fewer "
            f"than {config.draw.least}; raise it"
        )
    gate = fleet.round + canary.rounds + 1
    if run.rounds < gate:
        raise ConfigError(
            f"next: rounds={run.rounds - fleet.round} must be at least {canary.rounds + 1}, those of its trial: "
            f"[canary] rounds={canary.rounds}, and one in which gates are asked"
        )
    drawn = seeds.order(len(fleet.roster), run.seed, "", gate, "canary")[:count]
    back = {"run": fleet.run, "model_digest": fleet.model_digest, "server": fleet.server}
    members = sorted(fleet.roster[i] for i in drawn)
    return {"members": members, "gate": gate, "refused": canary.refused, "identity": run.identity, **back}


def gates(fleet: Fleet, store: Store) -> dict[str, bool]:
    """What the gates of those who try a run have said of it, by device: whether they let it pass."""
    tried = fleet.life.canary
    if not tried:
        return {}
    members, run = set(tried["members"]), tried["identity"][:16]
    said = {d.device: d.profile.get("gate") for d in store.devices.naming(fleet.name, run) if d.device in members}
    mine = {name: gate for name, gate in said.items() if isinstance(gate, dict) and gate.get("run") == run}
    return {name: gate.get("deployed") is True for name, gate in mine.items()}


def judge(fleet: Fleet, store: Store, *, least: int = 1, by_order: bool = False) -> dict[str, Any] | None:
    """Once the gates of those who try a run were asked: let it go on with all, or call it off; what came of it, None
    while it is tried. It is called off before the gates' round is committed where so many have refused that the others
    cannot save it, or are fewer than the ``least`` that the rule folds (what learns so badly may never commit one), and
    at once ``by_order``."""
    tried = fleet.life.canary
    if not tried:
        return None
    said, members = gates(fleet, store), len(tried["members"])
    no = len(said) - sum(said.values())
    off = by_order or not said or no > tried["refused"] * len(said)
    lost = no > tried["refused"] * members or members - no < least
    early = fleet.round < tried["gate"] and not by_order
    still = store.attempts.unclosed(fleet.name)
    if early and (still or not lost):
        return None  # a round of the run that is open, as after a crash, ends first
    off = off or early
    for row in still if by_order else ():
        store.attempts.fail(fleet.name, row.attempt, "called off with the run")
    facts = {"asked": members, "answered": len(said), "refused": no}
    old = Run.from_json(tried["run"], allow=None)
    # The rounds that were learned meanwhile count on, though nothing of them stays.
    back = replace(old, rounds=min(MOST_ROUNDS, old.rounds + fleet.round - fleet.life.began)) if off else None
    store.runs.end_canary(fleet.name, back, facts)
    return {"called_off": off, **facts}


def retire(order: Order, fleet: Fleet, store: Store) -> None:
    """Let a device leave for good (``retire``), or take it in again (``readmit``).

    Raises :class:`~talaria.errors.ConfigError` where it is not known, or nobody would be left."""
    device = next((d for d in store.devices.of(fleet.name) if d.device == order.device), None)
    if device is None:
        raise unknown(order.device)
    if (device.retired is not None) == (order.verb == "retire"):
        state = "has left for good" if device.retired is not None else "has not left"
        raise ConfigError(f"device {order.device!r} {state}; there is nothing to {order.verb}")
    if order.verb == "retire" and fleet.roster == (order.device,):
        raise ConfigError(f"device {order.device!r} is the last member; `pause` the fleet instead")
    store.devices.retire(fleet.name, order.device, order.verb == "retire", order.reason)


def carry_out(
    order: Order, fleet: Fleet, config: FleetConfig, store: Store, blobs: Blobs, learn: Learn = Learning
) -> None:
    """What an order does to the record of a fleet that no coordinator serves now.

    Raises :class:`~talaria.errors.ConfigError` where it does not fit what is."""
    if order.verb == "next":
        follow(order, fleet, config, store, blobs, learn)
        return
    if order.verb in ("retire", "readmit"):
        retire(order, fleet, store)
        return
    if order.verb == "extend":
        require_own(config, "extend")
        require_room(fleet, order.rounds)
        store.runs.extend(fleet.name, order.rounds)
        return
    if order.verb in ("quarantine", "release"):
        raise ConfigError(
            f"{order.verb}: no coordinator serves fleet {fleet.name!r} now, and who is shut out is what it knows; "
            "`serve` the fleet, and say it again"
        )
    status, _ = decide(order, fleet, CoordinatorState())
    if status is not None:
        store.fleets.set_status(fleet.name, status, order.reason)
    if order.verb == "abort":
        judge(fleet, store, by_order=True)
