"""Selection of a round's cohort, and when the round may open: pure functions of what the coordinator knows."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from talaria.federated import rounds
from talaria_coordinator.config.fleet import Draw
from talaria_coordinator.storage.records import Device


@dataclass(frozen=True)
class Asked:
    """A round to open: it needs ``quorum`` updates and closes with ``target``; ``online`` of its cohort are online. In
    an asynchronous run an update may be ``stale`` versions behind."""

    round: int
    cohort: tuple[str, ...]
    quorum: int
    online: int
    target: int
    stale: int = 0


def roster(named: Sequence[str], count: int, devices: Sequence[Device]) -> tuple[str, ...]:
    """The devices that cohorts are drawn from, sorted: the ``named``, else the first ``count`` to come; empty while
    some of them have not come."""
    here = [d for d in devices if d.able]
    if named:
        return tuple(sorted(named)) if set(named) <= {d.device for d in here} else ()
    first = sorted(here, key=lambda d: (d.joined, d.device))[:count]
    return tuple(sorted(d.device for d in first)) if len(first) == count else ()


def refilled(members: Sequence[str], devices: Sequence[Device], free: int = 0) -> tuple[str, ...]:
    """The roster after those who are shut out gave their places up to the next who came, as far as there are any, and
    others took ``free`` ones."""
    mine = set(members)
    out = sorted({d.device for d in devices if d.quarantine is not None} & mine)
    here = (d for d in devices if d.able)
    spare = sorted(here, key=lambda d: (d.joined, d.device))
    after = [d.device for d in spare if d.device not in mine]
    left = set(out[: len(after)])
    return tuple(sorted([m for m in members if m not in left] + after[: len(left) + free]))


def resting(
    members: Sequence[str],
    devices: Sequence[Device],
    away_days: float,
    now: float,
    since: float = 0.0,
    last: float = 0.0,
) -> frozenset[str]:
    """Members that have been away for more than ``away_days`` at unix time ``now``: no round is drawn among them until
    they come again. None where that is 0.

    Where a whole fleet was off for a season, the first to come is not the only one that is left: a coordinator that
    serves ``since`` leaves out who had been away for so long when the ``last`` of all was seen before it, and whoever
    does not come for so long after it."""
    if not away_days:
        return frozenset()
    absent = {d.device: max(last - d.seen, now - max(since, d.seen)) for d in devices if not d.online}
    return frozenset(name for name in members if absent.get(name, 0.0) > away_days * 86400)


def why_not(named: Sequence[str], members: Sequence[str], device: str, retired: bool = False) -> str:
    """What to tell a device that no round asks, with the mend; empty for one that is asked."""
    if device in members:
        return ""
    if retired:
        return (
            "this device has left the fleet for good; `talaria coordinator readmit` at its operator's takes it in again"
        )
    if named:
        return "this fleet names its members, and this device is not among them; add it to [fleet] members"
    return (
        f"all {len(members)} places of this fleet were taken by those who came first; its operator frees one by "
        "quarantine of a device that does not belong there, or adds one: more [fleet] devices"
    )


def ask(
    draw: Draw,
    round: int,
    members: Sequence[str],
    online: Collection[str],
    out: Collection[str],
    gone: Collection[str] = (),
) -> Asked | None:
    """The cohort of round ``round``, or None while fewer than a quorum of those needed are online; everybody in
    an asynchronous run, as soon as anybody is.

    The draw depends on run, round and roster alone, as in simulation; who is quarantined (``out``) is left out of it.
    Only where it hit so many who have left (``gone``) that it could not begin, is it made again among those who stay.
    """
    first = _ask(draw, round, members, online, out)
    if first is not None or draw.run.fraction == 1:
        return first
    here = [name for name in members if name not in gone]
    return _ask(draw, round, here, online, out) if 0 < len(here) < len(members) else None


def _ask(draw: Draw, round: int, members: Sequence[str], online: Collection[str], out: Collection[str]) -> Asked | None:
    asked = wanted(draw, round, members, online, out)
    return asked if asked.cohort and asked.online >= asked.quorum else None


def wanted(draw: Draw, round: int, members: Sequence[str], online: Collection[str], out: Collection[str]) -> Asked:
    """The round that would be opened were enough of its cohort here."""
    cohort = tuple(name for name in rounds.cohort(draw.run, round, members, draw.over) if name not in out)
    here = sum(name in online for name in cohort)
    if draw.buffering is not None:
        return Asked(round, cohort, 1, here, draw.buffering.buffer, draw.buffering.max_staleness)
    # A share of a fleet that has shrunk may be fewer than the rule folds, or than hide each other.
    enough = max(rounds.needed(draw.run, len(members)), draw.least, _private(draw, len(cohort)))
    target = min(len(cohort), enough) if draw.over else len(cohort)
    return Asked(round, cohort, quorum(draw, len(cohort), target), here, target)


def quorum(draw: Draw, asked: int, target: int) -> int:
    """How many updates a round that asks so many devices needs to close, where it closes at once with ``target``."""
    # Fewer than the rule can fold would be no quorum: the round could only fail.
    return max(min(target, max(1, math.ceil(draw.quorum * target), draw.least)), _private(draw, asked))


def _private(draw: Draw, asked: int) -> int:
    return 1 if draw.privacy is None else draw.privacy.needed(asked)
