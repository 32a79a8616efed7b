"""The store's frozen records, and how they are read from rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sqlalchemy import Row

from talaria.foreign import parsed

Status = Literal["stored", "counted", "rejected"]


@dataclass(frozen=True, kw_only=True)
class Life:
    """What became of a fleet's run. ``given`` are the identities of runs that fleet.toml may still give, with fewer
    rounds, in whose place the fleet learns what is stored. ``began`` is the round after which the present run was begun
    from another's model, after ``tried`` attempts, and ``model_digest`` and ``server`` what it began from; empty where
    it is the fleet's first.
    ``before`` are the runs that it follows, newest first."""

    given: tuple[str, ...] = ()
    began: int = 0
    tried: int = 0
    model_digest: str = ""
    server: str = ""
    before: tuple[str, ...] = ()
    canary: dict[str, Any] = field(default_factory=dict)
    """While the present run is tried: ``members`` who try it, ``gate``, the round with which their gates are asked,
    ``refused``, the share that may refuse, ``identity`` of the run, and what comes back where it is called off."""

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def of(text: str | None) -> Life:
        """What was stored; a new life for NULL."""
        values: dict[str, Any] = {} if text is None else json.loads(text)
        return Life(**values | {name: tuple(values.get(name, ())) for name in ("given", "before")})


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What differential privacy has cost until now: epsilon at ``delta`` of the device that was counted most, out of
    ``budget`` (None: no bound). ``rounds`` says in how many rounds each device was counted, with noise ``noise``; what
    a canary learned that was called off, and a run before this one, is among them."""

    epsilon: float
    delta: float
    budget: float | None
    noise: float
    secure: bool
    rounds: dict[str, int]
    version: int
    noise_by: str = "coordinator"
    clip: float | None = None
    """The length that differences are cut to now, where it moves."""

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def of(text: str | None) -> Spent | None:
        """What was stored; None for NULL."""
        return None if text is None else Spent(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Worker:
    """An ingest worker, by its ``number`` from 0. Times are unix seconds.

    ``pid`` is its process, None where none lives just now; ``since`` says when that was started, or ended.
    ``connected``: it reaches the broker. ``devices`` is how many it owns, of those that have come since the coordinator
    began, and ``updates`` how many it has checked and kept since it was started. ``word`` is its last word, said at
    ``heard``."""

    number: int
    pid: int | None
    since: float
    connected: bool
    devices: int
    updates: int
    heard: float
    word: str


def workers_of(text: str | None) -> tuple[Worker, ...]:
    """The ingest workers that are stored; none for NULL."""
    return () if text is None else tuple(Worker(**one) for one in json.loads(text))


@dataclass(frozen=True)
class Fleet:
    """A fleet after ``round`` committed rounds of learning, out of ``tried`` that were opened.

    ``model_digest`` and ``server`` are blob digests of the shared tensors and of the aggregator's state. ``roster`` is
    empty until the first round."""

    name: str
    run: str
    epoch: int
    round: int
    tried: int
    status: str
    model_digest: str
    server: str
    roster: tuple[str, ...]
    life: Life = field(default_factory=Life)
    spent: Spent | None = None
    workers: tuple[Worker, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """One try at round ``round``, under its own number ``attempt``. ``closed`` is None while it is open;
    ``failure`` says why nothing of it counts; ``model_digest`` and ``counted`` are set where it was committed."""

    attempt: int
    round: int
    cohort: tuple[str, ...]
    base_digest: str
    opened: float
    closed: float | None
    failure: str | None
    model_digest: str | None
    counted: tuple[tuple[int, str], ...] | None
    down: int | None = None
    """Bytes of global models that went to devices since the round before; of older records not known."""
    dense: int | None = None
    """Bytes of a whole model, and of a whole update, with every value as it is."""
    means: Mapping[str, float] = field(default_factory=dict)
    """By name, the mean of what devices told within a secure round's sum."""


LeftBy = Literal["operator", "owner"]
"""By whose hand a device left for good."""


@dataclass(frozen=True)
class Device:
    """What is known of a device; ``boot`` is its highest boot counter seen."""

    fleet: str
    device: str
    boot: int
    online: bool
    profile: dict[str, Any]
    joined: float
    seen: float
    quarantine: str | None
    retired: float | None = None
    """When it left for good; None where it did not."""
    left_by: str | None = None
    """By whose hand: ``operator`` or ``owner``."""

    @property
    def able(self) -> bool:
        """Whether it may take part: it neither left for good nor is shut out."""
        return self.quarantine is None and self.retired is None


@dataclass(frozen=True)
class Received:
    """One device's complete update of one round, made from version ``base_version`` of the global model; ``digest``
    names its blob."""

    attempt: int
    device: str
    digest: str
    size: int
    base_version: int
    status: Status
    reason: str | None


def fleet_of(row: Row[Any]) -> Fleet:
    roster = tuple(json.loads(row.roster)) if row.roster else ()
    return Fleet(
        row.fleet, row.run, row.epoch, row.round, row.tried, row.status, row.model_digest, row.server, roster,
        Life.of(row.life), Spent.of(row.privacy), workers_of(row.workers),
    )  # fmt: skip


def attempt_of(row: Row[Any]) -> Attempt:
    counted = (
        None if row.counted is None else tuple((int(made), str(device)) for made, device in json.loads(row.counted))
    )
    cohort = tuple(json.loads(row.cohort))
    return Attempt(
        row.attempt, row.round, cohort, row.base_digest, row.opened, row.closed, row.failure, row.model_digest, counted,
        row.down, row.dense, means_of(row),
    )  # fmt: skip


def means_of(row: Row[Any]) -> dict[str, float]:
    """What an attempt's row holds of means."""
    return dict(json.loads(row.means)) if row.means else {}


def device_of(row: Row[Any]) -> Device:
    return Device(
        row.fleet, row.device, row.boot, bool(row.online), json.loads(row.profile), row.joined, row.seen,
        row.quarantine, row.retired, row.left_by,
    )  # fmt: skip


def received_of(row: Row[Any]) -> Received:
    return Received(row.attempt, row.device, row.digest, row.size, row.base_version, row.status, row.reason)


def profile_of(data: bytes) -> dict[str, Any]:
    """What a device's birth says of it; empty where that is not a JSON object, or nests deep."""
    try:
        profile = parsed(data)
    except ValueError:
        return {}
    return profile if isinstance(profile, dict) else {}


def storable(text: str) -> str:
    """``text`` with what no database takes (NUL, half a surrogate pair) spelled out: a reason may quote strangers."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def why(reason: str) -> dict[str, str]:
    """A reason, where one was given, as the audit log has it."""
    return {"reason": storable(reason)} if reason else {}
