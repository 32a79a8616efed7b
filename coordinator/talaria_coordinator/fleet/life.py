"""What becomes of a fleet after its first run: it goes on for more rounds than fleet.toml says."""

from __future__ import annotations

from dataclasses import replace

from talaria.errors import ConfigError
from talaria.federated.run import MOST_ROUNDS, Run
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.operator_commands import Order, decide
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store


def as_it_is(config: FleetConfig, store: Store) -> FleetConfig:
    """``config`` with the run that the fleet learns by now, where fleet.toml still gives one that it has gone on from.
    Any other difference is left to :func:`~talaria_coordinator.storage.store.require_same_run`."""
    known = store.fleet(config.name)
    if known is None or config.run.identity not in known.life.given:
        return config
    run = Run.from_json(known.run, allow=None)
    return config if config.run.rounds > run.rounds else replace(config, run=run)


def require_room(fleet: Fleet, rounds: int) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where a fleet cannot go on for ``rounds`` rounds more."""
    now = Run.from_json(fleet.run, allow=None).rounds
    if not 1 <= rounds <= MOST_ROUNDS - now:
        raise ConfigError(
            f"extend: rounds={rounds} must be in 1..{MOST_ROUNDS - now}: how many to learn beyond the {now} there are"
        )
    if fleet.status == "aborted":
        raise ConfigError(f"fleet {fleet.name!r} was called off; `resume` it, and then extend it")


def carry_out(order: Order, fleet: Fleet, store: Store) -> None:
    """What an order does to the record of a fleet that no coordinator serves now.

    Raises :class:`~talaria.errors.ConfigError` where it does not fit what is."""
    if order.verb == "extend":
        require_room(fleet, order.rounds)
        store.extend(fleet.name, order.rounds)
        return
    status, _ = decide(order, fleet, CoordinatorState())
    if status is not None:
        store.set_status(fleet.name, status)
