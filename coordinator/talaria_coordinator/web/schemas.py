"""The records that the API answers with. Times are unix seconds, sizes bytes, shares in 0..1."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Spread:
    """Several devices' values in five numbers."""

    count: int
    low: float
    median: float
    mean: float
    high: float


@dataclass(frozen=True, kw_only=True)
class SpentView:
    """What differential privacy has cost the device that was counted most, in ``rounds`` rounds: ``epsilon`` at
    ``delta``, out of ``budget`` (null: no bound). ``form`` says who adds the noise, ``clip`` how long differences
    may be now (null where that does not move)."""

    epsilon: float
    delta: float
    budget: float | None
    noise: float
    rounds: int
    secure: bool
    form: str
    clip: float | None


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """An ingest worker as it was a second or two ago. ``pid`` is its process, null where none lives just now;
    ``since`` says when that was started, or ended. ``connected``: it reaches the broker. ``devices`` is how many it
    owns, of those that came since the coordinator began, ``updates`` how many it has checked and kept since it was
    started. ``word`` is what was last heard of it, at ``heard``."""

    number: int
    pid: int | None
    since: float
    connected: bool
    devices: int
    updates: int
    heard: float
    word: str


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """A fleet after ``round`` of ``rounds`` committed rounds of learning, out of ``tried`` that were opened.
    ``waits_for`` names the first of those who keep the open round waiting, with how far each is (``phase``) and whether
    it is ``online``; ``canary`` names those who try the present run before all others, while they do.
    ``privacy`` is null where no noise is added. ``trouble`` is what keeps its coordinator, in this process, from its
    work now: what the disk or the store refused since the last round was committed, and a broker that is not reached.
    ``workers`` are its ingest workers, none where the coordinator's own process takes all updates, or the fleet is not
    served."""

    name: str
    status: str
    round: int
    rounds: int
    tried: int
    epoch: int
    algorithm: str
    model: str
    model_digest: str
    created: float
    devices: int
    online: int
    quarantined: int
    roster: int
    waits_for: list[dict[str, Any]]
    canary: list[str]
    privacy: SpentView | None
    trouble: list[str]
    workers: list[WorkerView]


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt. ``bytes_up`` are the updates that came, ``bytes_dense`` the same had each sent every shared value.
    ``bytes_down`` are what of models was sent since the round before, or since the coordinator began: also what was
    lost, or late, and sent again, so that it may exceed ``bytes_down_dense``, a whole model as it is for each device
    that was asked; null while it is open, and of rounds before that was kept.
    ``accuracy`` is on each device's own validation data, where the algorithm tells (a score below 0 counts as 0);
    ``kept`` the share of channels
    that masks keep, ``overlap`` how far any two of them agree (mean Jaccard index). ``means`` are those of what devices
    told within a secure round's sum, where single devices' are not seen. ``clients`` are the devices behind what is
    ``stored``, a gateway's site counted in full. Once it is committed, all these are of the updates that count in it,
    which asynchronously may have been made for earlier attempts."""

    attempt: int
    round: int
    state: str
    cohort: int
    stored: int
    counted: int | None
    clients: int
    rejected: int
    opened: float
    closed: float | None
    failure: str | None
    bytes_up: int
    bytes_dense: int
    bytes_down: int | None
    bytes_down_dense: int | None
    accuracy: Spread | None
    kept: Spread | None
    overlap: float | None
    means: dict[str, float]
    model_digest: str | None


@dataclass(frozen=True, kw_only=True)
class UpdateView:
    """A device's update of one round; ``reason`` says why it was rejected."""

    attempt: int
    device: str
    status: str
    reason: str | None
    size: int
    digest: str
    dense: int | None
    kept: float | None
    accuracy: float | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class AttemptDetail:
    """A round and its updates, by device."""

    summary: AttemptView
    updates: list[UpdateView]


@dataclass(frozen=True)
class OverlapView:
    """``matrix[i][j]``: channels that devices i and j both keep over those that either keeps."""

    attempt: int
    devices: list[str]
    matrix: list[list[float]]


@dataclass(frozen=True)
class DriftView:
    """How far a device's samples have moved since its first day, as it told with its update of ``attempt``: by what
    share its ``labels`` differ, 0 to 1, and by how many of that day's spreads its ``features`` have moved; None what it
    did not tell."""

    attempt: int
    labels: float | None
    features: float | None


@dataclass(frozen=True)
class DeviceView:
    """A device as it was last seen; ``quarantine`` says why it is shut out, if it is, and ``retired`` when it left for
    good, if it did, ``left_by`` the operator's hand or its owner's. ``drift`` is what it told last, within the last 20
    attempts."""

    device: str
    online: bool
    boot: int
    joined: float
    seen: float
    quarantine: str | None
    retired: float | None = None
    left_by: Literal["operator", "owner"] | None = None
    drift: DriftView | None = None


@dataclass(frozen=True)
class EventView:
    """One entry of the audit log."""

    seq: int
    at: float
    kind: str
    attempt: int | None
    device: str | None
    detail: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of an order: the fleet's status after it."""

    fleet: str
    status: str
