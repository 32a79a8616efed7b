"""Which run a fleet learns: it goes on for longer, another follows it, and a few devices try that one first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select, update

from talaria.errors import ConfigError, StateError
from talaria.federated.run import MOST_ROUNDS, Run
from talaria_coordinator.storage.audit import append
from talaria_coordinator.storage.database import Database
from talaria_coordinator.storage.records import Fleet, Life, fleet_of
from talaria_coordinator.storage.tables import FLEETS

GIVEN_KEPT = 64
"""So many runs, the newest and the first, may stand in fleet.toml still, though the fleet has gone on."""
BEFORE_KEPT = 8
"""So many runs before the present one are known whole, newest first."""


@dataclass(frozen=True)
class Runs:
    """See the module."""

    _database: Database

    def extend(self, fleet: str, rounds: int) -> int:
        """Let the fleet's run go on for ``rounds`` rounds more, from what it has learned; how many it has then. One
        that was done runs again; one that was paused or called off stays so. Logged."""
        with self._database.writing(fleet) as tx:
            row = tx.execute(select(FLEETS).where(FLEETS.c.fleet == fleet)).one()
            life, run = Life.of(row.life), Run.from_json(row.run, allow=None)
            longer = replace(run, rounds=run.rounds + rounds)
            given = _recent(tuple(dict.fromkeys((run.identity, *life.given))))
            if life.canary:  # they are the fleet's, also where the run that is tried is called off
                back = Run.from_json(life.canary["run"], allow=None)
                back = replace(back, rounds=min(MOST_ROUNDS, back.rounds + rounds))
                life = replace(life, canary={**life.canary, "run": back.to_json()})
            status = "running" if row.status == "done" else row.status
            values = {"run": longer.to_json(), "life": replace(life, given=given).to_json(), "status": status}
            tx.execute(update(FLEETS).where(FLEETS.c.fleet == fleet).values(**values))
            append(tx, "run-extended", {"by": rounds, "rounds": longer.rounds}, fleet=fleet)
            return longer.rounds

    def follow(
        self, fleet: Fleet, run: Run, model_digest: str, server: str, given: Sequence[str], facts: Mapping[str, Any],
        canary: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Let the fleet learn ``run`` from now on, which goes on from what it has learned as ``model_digest`` and
        ``server`` say; ``given`` are the identities that fleet.toml may give; with ``canary`` (:class:`Life`) it is
        tried first. Logged, with ``facts``."""
        with self._database.writing(fleet.name) as tx:
            mine = FLEETS.c.fleet == fleet.name
            now = fleet_of(tx.execute(select(FLEETS).where(mine)).one())
            # What it begins from takes seconds to work out: it may have been resumed meanwhile, and a round be open.
            if (now.run, now.round, now.tried, now.status) != (fleet.run, fleet.round, fleet.tried, fleet.status):
                raise StateError(f"fleet {fleet.name!r}: it has learned on meanwhile; try again")
            known = _recent(tuple(dict.fromkeys((*given, *now.life.given))))
            life = Life(
                given=known,
                began=now.round,
                tried=now.tried,
                model_digest=model_digest,
                server=server,
                before=(now.run, *now.life.before)[:BEFORE_KEPT],
                canary=canary or {},
            )
            values = {"run": run.to_json(), "model_digest": model_digest, "server": server, "status": "running"}
            tx.execute(update(FLEETS).where(mine).values(life=life.to_json(), **values))
            detail = {"rounds": run.rounds, "model_digest": model_digest, "identity": run.identity, **facts}
            detail |= {"round": now.round} | ({} if canary is None else {"tried_by": canary["members"]})
            append(tx, "run-followed", detail, fleet=fleet.name)

    def replace_canary(self, fleet: str, members: Sequence[str]) -> None:
        """Others try the present run than were drawn, where some of those have left; logged."""
        with self._database.writing(fleet) as tx:
            mine = FLEETS.c.fleet == fleet
            now = fleet_of(tx.execute(select(FLEETS).where(mine)).one())
            life = replace(now.life, canary={**now.life.canary, "members": sorted(members)})
            tx.execute(update(FLEETS).where(mine).values(life=life.to_json()))
            append(tx, "canary-members", {"members": sorted(members)}, fleet=fleet)

    def end_canary(self, fleet: str, back: Run | None, facts: Mapping[str, Any]) -> None:
        """The present run was tried: it goes on with all, or (``back``) the run before it does, from its own last
        model. Logged, with ``facts``."""
        with self._database.writing(fleet) as tx:
            mine = FLEETS.c.fleet == fleet
            now = fleet_of(tx.execute(select(FLEETS).where(mine)).one())
            tried, life = now.life.canary, replace(now.life, canary={})
            values: dict[str, Any] = {}
            if back is not None:
                old = {name: tried[name] for name in ("model_digest", "server")}
                life = replace(life, began=now.round, tried=now.tried, **old)
                stays = now.status if now.status in ("paused", "aborted") else "running"
                status = "done" if now.round >= back.rounds else stays
                values = {"run": back.to_json(), "status": status, **old}
            tx.execute(update(FLEETS).where(mine).values(life=life.to_json(), **values))
            kind = "canary-passed" if back is None else "canary-called-off"
            facts = {"members": tried["members"], "identity": tried["identity"], "round": now.round, **facts}
            model = now.model_digest if back is None else tried["model_digest"]
            append(tx, kind, {**facts, "model_digest": model}, fleet=fleet)


def require_same_run(fleet: Fleet, run: str) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where the stored fleet learns another run."""
    if fleet.run != run:
        difference = _difference(fleet.run, run)
        more = json.loads(run)["rounds"] - json.loads(fleet.run)["rounds"]
        mend = (
            "take the old values back; or begin it from the last model by `talaria coordinator next FLEET.TOML`, once "
            "this run is done or paused; or give the new run another name or state folder"
        )
        if difference.startswith("rounds:") and ";" not in difference and more > 0:
            mend = (
                f"take the old value back, and let it go on by `talaria coordinator extend FLEET.TOML --rounds {more}`"
            )
        raise ConfigError(
            f"fleet {fleet.name!r}: its stored run differs from this configuration ({difference}); {mend}"
        )


def _recent(given: tuple[str, ...]) -> tuple[str, ...]:
    """As many identities, newest first, as are kept; the first run's, which fleet.toml may name for ever, with them."""
    return given if len(given) <= GIVEN_KEPT else (*given[: GIVEN_KEPT - 1], given[-1])


def _difference(stored: str, given: str) -> str:
    old, new = _fields(json.loads(stored)), _fields(json.loads(given))
    odd = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
    return "; ".join(f"{k}: stored {json.dumps(old.get(k))}, given {json.dumps(new.get(k))}" for k in odd)


def _fields(run: dict[str, Any]) -> dict[str, Any]:
    """The fields of a run, those of its tables by dotted names."""
    tables = {key: value for key, value in run.items() if isinstance(value, dict)}
    plain = {key: value for key, value in run.items() if key not in tables}
    return plain | {f"{key}.{name}": value for key, table in tables.items() for name, value in table.items()}
