"""The status of a fleet, read from its store: for people, and as plain data."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from talaria.errors import ConfigError, StateError
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Run
from talaria.foreign import printed
from talaria.privacy.forms import FORMS
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet import cohort
from talaria_coordinator.fleet.chronicle import when
from talaria_coordinator.fleet.waiting import holding, waits
from talaria_coordinator.identity.expiry import Ending
from talaria_coordinator.identity.membership import Membership
from talaria_coordinator.server.open_state import is_held, open_store
from talaria_coordinator.storage.store import Store

SHOWN = 15
"""The last rounds that are told; the store, the API and the dashboard have all."""


def read_status(config: FleetConfig) -> dict[str, Any]:
    """The last rounds, all devices and the latest events of a fleet. StateError where it was never served.

    ``served`` says whether a process has its state folder now, None where that lies on another machine; where none
    has, a device is ``online`` where it was so at the end."""
    store = open_store(config, make=False)
    try:
        fleet = store.fleets.get(config.name)
        if fleet is None:
            raise StateError(f"status: the store holds no fleet {config.name!r}; it holds {_names(store)}")
        run = Run.from_json(fleet.run, allow=None)  # fleet.toml may have the next one already
        rounds, devices = store.attempts.of(config.name, last=SHOWN), store.devices.of(config.name)
        idle = fleet.status == "running" and fleet.round < run.rounds and not store.attempts.unclosed(config.name)
        here = {d.device for d in devices if d.online}
        rest = cohort.resting(fleet.roster, devices, config.away_days, time.time())
        awake = tuple(name for name in fleet.roster if name not in rest)
        draw = replace(config.draw, run=run, buffering=(config.buffering or Buffering()) if run.asynchronous else None)
        missing = waits(draw, fleet.round + 1, awake, devices, here) if idle else None
        return {
            "fleet": fleet.name,
            "status": fleet.status,
            "served": is_held(config.state),
            "round": fleet.round,
            "rounds": run.rounds,
            "epoch": fleet.epoch,
            "model_digest": fleet.model_digest,
            "roster": list(fleet.roster),
            "waiting": None if missing is None else missing.facts(),
            "waits_for": holding(store.fleets.machine(config.name)) if fleet.status != "done" else [],
            "resting": sorted(rest),
            "canary": fleet.life.canary.get("members", []),
            "privacy": None if fleet.spent is None else vars(fleet.spent),
            "workers": [vars(worker) for worker in fleet.workers],
            "history": [
                {
                    "attempt": r.attempt,
                    "round": r.round,
                    "cohort": len(r.cohort),
                    "counted": None if r.counted is None else len(r.counted),
                    **({"clients": store.updates.clients(config.name, r.attempt)} if config.gateways else {}),
                    "failure": r.failure,
                    "seconds": None if r.closed is None else round(r.closed - r.opened, 3),
                    "bytes_up": sum(u.size for u in store.updates.counted(config.name, r.counted or ())),
                    "bytes_down": r.down,
                    "bytes_dense": r.dense,
                    "means": dict(r.means),
                }
                for r in rounds
            ],
            "devices": [
                {
                    "device": d.device,
                    "online": d.online,
                    "boot": d.boot,
                    "seen": d.seen,
                    "quarantine": d.quarantine,
                    "retired": d.retired,
                    "left_by": d.left_by,
                }
                for d in devices
            ],
            "events": store.audit.events(config.name, 20),
            "certificates": _certificates(config),
        }
    finally:
        store.close()


def _certificates(config: FleetConfig) -> dict[str, Any] | None:
    """When the first of a fleet's certificates ends, and what to do about those that end soon; None without keys."""
    if config.identity is None:
        return None
    try:
        ending = Ending.of(config.identity, Membership.load(config.identity))
    except ConfigError as error:
        return {"first": None, "ends": None, "warnings": [str(error)]}
    first = ending.first
    known = {"first": None, "ends": None} if first is None else {"first": first.what, "ends": first.ends}
    return {**known, "warnings": ending.warnings(time.time())}


def render(found: dict[str, Any], clear: bool = False) -> None:
    """Print ``found`` for people, on a cleared screen where asked for."""
    console = Console(emoji=False)

    def say(text: str) -> None:
        """A line, as it is: reasons may quote what a stranger sent."""
        console.print(_plain(text), highlight=False, soft_wrap=True)

    if clear:
        console.clear()
    say(
        f"fleet {found['fleet']}: {found['status']}, {found['round']} of {found['rounds']} rounds, "
        f"epoch {found['epoch']}, global model {found['model_digest'][:12]}"
    )
    if found["served"] is False:
        say("no coordinator serves it now; what is below is what the last one wrote")
    if found["waiting"] is not None:
        missing = ", ".join(found["waiting"]["missing"])
        say(f"waiting: {found['waiting']['reason']}" + (f"; missing: {missing}" if missing else ""))
    if found["waits_for"]:
        late = ", ".join(f"{d['device']} ({d['phase']}{'' if d['online'] else ', away'})" for d in found["waits_for"])
        say(f"the open round waits for: {late}")
    if found["canary"]:
        say(f"tried first by: {', '.join(found['canary'])}")
    if found["privacy"] is not None:
        say(_spent(found["privacy"]))
    if found["resting"]:
        say(f"away for long, and not drawn until they come: {', '.join(found['resting'])}")
    certificates = found["certificates"]
    if certificates is not None:
        if certificates["ends"] is not None:
            day = time.strftime("%Y-%m-%d", time.localtime(certificates["ends"]))
            say(f"certificates hold until {day} ({certificates['first']})")
        for warning in certificates["warnings"]:
            say(f"warning: {warning}")
    history = Table(title="rounds")
    for heading in ("attempt", "round", "asked", "counted", "seconds", "MB up", "MB down"):
        history.add_column(heading, justify="right")
    for row in found["history"]:
        history.add_row(
            str(row["attempt"]),
            str(row["round"]),
            str(row["cohort"]),
            _counted(row),
            "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
            _megabytes(row["bytes_up"], row["counted"], row["bytes_dense"]),
            _megabytes(row["bytes_down"], row["cohort"], row["bytes_dense"]),
        )
    console.print(history)
    # Reasons stand below the tables: in a column of 80 they would be one word a line.
    for reason, rows in groupby(found["history"], key=itemgetter("failure")):
        tries = [str(row["attempt"]) for row in rows]
        if reason:
            which = f"attempt {tries[0]}" if len(tries) == 1 else f"attempts {tries[0]} to {tries[-1]}"
            say(f"{which} failed: {reason}")
    told = next((row for row in reversed(found["history"]) if row["means"]), None)
    if told is not None:
        means = ", ".join(f"{name} {value:.4g}" for name, value in told["means"].items())
        say(f"means within the sum of round {told['round']}, over {told['counted']} devices: {means}")
    if found["workers"]:
        console.print(_workers(found["workers"]))
    devices = Table(title="devices")
    for heading in ("device", "online", "boot", "seen", "quarantine"):
        devices.add_column(heading)
    for row in found["devices"]:
        devices.add_row(
            row["device"],
            _here(row, found["served"]),
            str(row["boot"]),
            when(row["seen"]),
            "yes" if row["quarantine"] else "",
        )
    console.print(devices)
    for row in found["devices"]:
        if row["quarantine"]:
            say(f"{row['device']} is in quarantine: {row['quarantine']}")


def _workers(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="ingest workers")
    for heading in ("worker", "pid", "since", "broker", "devices", "updates", "last heard", "last word"):
        table.add_column(heading, justify="right" if heading in ("worker", "devices", "updates") else "left")
    for row in rows:
        here, link = row["pid"] is not None, "yes" if row["connected"] else "no"
        table.add_row(
            str(row["number"]), str(row["pid"]) if here else "gone", when(row["since"]), link if here else "-",
            str(row["devices"]), str(row["updates"]), when(row["heard"]), _plain(row["word"]),
        )  # fmt: skip
    return table


def _counted(row: dict[str, Any]) -> str:
    """How many updates counted; and, in brackets, of how many devices, where some came through gateways."""
    if row["counted"] is None:
        return "failed" if row["failure"] else "-"
    clients = row.get("clients", row["counted"])
    return str(row["counted"]) if clients == row["counted"] else f"{row['counted']} ({clients})"


def _megabytes(size: int | None, devices: int | None, dense: int | None) -> str:
    """MB, and their share of what as many devices would need for whole models as they are."""
    if size is None:
        return "-"
    return f"{size / 1e6:,.3f}" + (f" ({size / (devices * dense):.2f})" if devices and dense else "")


def _here(row: dict[str, Any], served: bool | None) -> str:
    if row["retired"]:
        return "left by its owner" if row["left_by"] == "owner" else "left"
    if served is False and row["online"]:
        return "was"
    return "yes" if row["online"] else "no"


def _spent(privacy: dict[str, Any]) -> str:
    budget = "" if privacy["budget"] is None else f" of {privacy['budget']:g}"
    return (
        f"privacy: epsilon {privacy['epsilon']:.4g}{budget} at delta {privacy['delta']:g}, of the device counted most "
        f"often ({max(privacy['rounds'].values(), default=0)} rounds); {FORMS[privacy['noise_by']]}"
        + ("" if privacy["clip"] is None else f"; differences are cut to {privacy['clip']:.4g} now")
    )


def _plain(text: str) -> str:
    """``text``, which may quote what a stranger sent: no markup, nothing that steers a terminal."""
    return escape(printed(text))


def _names(store: Store) -> str:
    return ", ".join(repr(f.name) for f in store.fleets.all()) or "none"
