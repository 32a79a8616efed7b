"""``talaria coordinator pause | resume | abort | extend | next | ...``: orders to a fleet, served or not."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria_coordinator.cli.options import AsJson, Config, Device

if TYPE_CHECKING:
    from talaria_coordinator.config.fleet import FleetConfig
    from talaria_coordinator.fleet.operator_commands import Order

Reason = Annotated[str, typer.Option(help="Why; it stands in the log.")]


def pause(config: Config, reason: Reason = "", as_json: AsJson = False) -> None:
    """Open no further round, for a night or a season; the open one runs to its end. The model is served on."""
    _give(config, as_json, "pause", reason=reason)


def resume(config: Config, reason: Reason = "", as_json: AsJson = False) -> None:
    """Go on from the last committed model."""
    _give(config, as_json, "resume", reason=reason)


def abort(config: Config, reason: Reason = "", as_json: AsJson = False) -> None:
    """Call the open round off, and open no further one; `resume` goes on."""
    _give(config, as_json, "abort", reason=reason)


def extend(
    config: Config,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds more.")],
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Let a run go on that has ended, or will: so many rounds more, from what it has learned.

    Devices need not be told: those that stay go on at once, and others when they come again. What they keep for
    themselves stays theirs. fleet.toml may keep its old rounds; the store has the new ones.
    """
    _give(config, as_json, "extend", reason=reason, rounds=rounds)


def retire(config: Config, device: Device, reason: Reason = "", as_json: AsJson = False) -> None:
    """Let a device leave for good: no round asks it or waits for it any more. What it gave stays in the model. Its keys
    are another matter: `talaria fleet revoke`."""
    _give(config, as_json, "retire", device, reason)


def readmit(config: Config, device: Device, reason: Reason = "", as_json: AsJson = False) -> None:
    """Take a device that left in again, from the next round on."""
    _give(config, as_json, "readmit", device, reason)


def quarantine(config: Config, device: Device, reason: Reason = "", as_json: AsJson = False) -> None:
    """Shut a device out of a fleet that is served: nothing it says counts, until `release`. What it gave stays in the
    model."""
    _give(config, as_json, "quarantine", device, reason)


def release(config: Config, device: Device, reason: Reason = "", as_json: AsJson = False) -> None:
    """Let a device in again that is in quarantine, by whose order ever."""
    _give(config, as_json, "release", device, reason)


def next_run(
    config: Config,
    rounds: Annotated[int, typer.Option(min=0, help="How many it learns; 0: those of the new [run].")] = 0,
    classes: Annotated[int, typer.Option(min=0, help="How many classes the head has then; 0: as many.")] = 0,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Begin another run from the last model, under the same members: change [run] in FLEET.TOML, and call this; or
    leave it as it is, and say --rounds, and --classes where there are more now.

    The body is carried over, and the head as far as it goes; adapters may be new. What does not fit is refused by name.
    The last run must be done, or paused.
    """
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.fleet.life import as_it_is
    from talaria_coordinator.server.open_state import open_store

    given_ = load_config(config)
    with open_store(given_, make=False) as store:
        known = store.fleets.get(given_.name)
        new = known is not None and as_it_is(given_, store).run.to_json() != known.run
    run = given_.run.to_json() if new else ""
    canary = json.dumps(None if given_.canary is None else asdict(given_.canary))
    _give(config, as_json, "next", reason=reason, rounds=rounds, run=run, classes=classes, canary=canary)


def _give(path: Path, as_json: bool, *words: Any, **facts: Any) -> None:
    from talaria_coordinator.config.fleet import load_config
    from talaria_coordinator.fleet.operator_commands import Order

    config, order = load_config(path), Order(*words, **facts)
    status = given(config, order)
    if as_json:
        whom = {"device": order.device} if order.device else {}
        typer.echo(json.dumps({"fleet": config.name, "order": order.verb, **whom, "status": status}))
    else:
        what = f"{order.verb} {order.device}".rstrip()
        typer.echo(f"fleet {config.name}: {what}; the fleet is {status}.")


def given(config: "FleetConfig", order: "Order") -> str:
    """Hand the order to the coordinator that serves the fleet, or carry it out where none does; the status after it.

    Raises :class:`~talaria.errors.TalariaError` where it is refused, or nobody answers."""
    from talaria.errors import StateError
    from talaria_coordinator.fleet import life, order_box
    from talaria_coordinator.server.open_state import held, open_blobs, open_store

    with ExitStack() as alone:

        def ended() -> bool:
            """Whether no coordinator serves the fleet; from then on none begins to before this is done."""
            try:
                alone.enter_context(held(config.state))
            except StateError as error:
                if "in use" not in str(error):
                    raise
                return False
            return True

        if not ended() and (status := order_box.put(config.state, order, ended)) is not None:
            return status
        with open_store(config, make=False) as store:
            fleet = store.fleets.get(config.name)
            if fleet is None:
                raise StateError(f"fleet {config.name!r} was never served; there is nothing to {order.verb}")
            life.carry_out(order, fleet, config, store, open_blobs(config))
            after = store.fleets.get(config.name)
            return fleet.status if after is None else after.status
