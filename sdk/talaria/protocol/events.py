"""What goes into the machines (events) and what comes out (actions).

Times are seconds on the driver's own monotonic clock. Actions are carried out in their order: what stands
behind a :class:`Save` may be sent only when the state is on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from talaria.wire.chunks import Cut

# ---- events for both halves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """The link is up and the filters are subscribed."""

    now: float


@dataclass(frozen=True)
class Received:
    """A message arrived. ``retained``: the broker says that it was stored, not just sent."""

    now: float
    topic: str
    payload: bytes = field(repr=False)
    retained: bool = False


@dataclass(frozen=True)
class Tick:
    """Time passed. Give one about every half ``retry``; missing ones only delay repairs."""

    now: float


# ---- events for the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The process began. ``epoch`` is above every earlier one.

    ``chunks`` are the intact chunks of partial uploads found on disk, by (device, transfer); ``stored`` the sha256 of
    updates that the store holds, by (round, device). Both correct what the saved state says.
    """

    now: float
    epoch: int
    chunks: Mapping[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    stored: Mapping[tuple[int, str], bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishBody:
    """Make these bytes the current body and send them to all, once."""

    now: float
    version: int
    cut: Cut = field(repr=False)
    multicast: bool = True


@dataclass(frozen=True)
class OpenRound:
    """Begin ``round`` on the current body with this cohort (device -> its opaque plan).

    It closes when ``target`` updates are stored (default: all of the cohort), when everyone has answered and
    at least ``quorum`` are stored, or at the deadline with at least ``quorum``. With fewer it fails.
    ``stale`` also counts updates of up to that many earlier rounds (asynchronous, FedBuff).
    """

    now: float
    round: int
    cohort: Mapping[str, bytes]
    seconds: float | None = None
    quorum: int = 1
    target: int | None = None
    stale: int = 0


@dataclass(frozen=True)
class Enlist:
    """Add devices to the open round."""

    now: float
    round: int
    cohort: Mapping[str, bytes]


@dataclass(frozen=True)
class Stored:
    """The store holds this update durably: the receipt may go out."""

    now: float
    round: int
    dev: str
    sha256: bytes


@dataclass(frozen=True)
class Rejected:
    """The update did not pass. ``resend`` asks for it once more with its whole mask; else the device is
    quarantined unless ``quarantine`` is False."""

    now: float
    round: int
    dev: str
    reason: str
    resend: bool = False
    quarantine: bool = True


@dataclass(frozen=True)
class Damaged:
    """The file of a complete upload fails its whole sha256 or could not be written; these chunks are intact."""

    now: float
    round: int
    dev: str
    chunks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Committed:
    """The closed round's result is durable; the machine need not announce it again."""

    now: float
    round: int


@dataclass(frozen=True)
class AbortRound:
    """Call a round off."""

    now: float
    round: int
    reason: str


@dataclass(frozen=True)
class Release:
    """Let a quarantined device back in."""

    now: float
    dev: str


@dataclass(frozen=True)
class Revoke:
    """Shut a device out, for this reason."""

    now: float
    dev: str
    reason: str


# ---- events for the device -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Boot:
    """The process began. ``body`` is the sha256 of the body on flash, if any; ``chunks`` the intact chunks of a
    partial one (of the body that the saved state names)."""

    now: float
    body: bytes = b""
    chunks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Connecting:
    """A connection is about to be tried: counts the boot. Ask :meth:`DeviceHalf.will` for the last will after."""

    now: float


@dataclass(frozen=True)
class BodyStored:
    """The body with this sha256 is durable on flash."""

    now: float
    sha256: bytes


@dataclass(frozen=True)
class BodyDamaged:
    """The joined body fails its sha256 or could not be written; these chunks are intact."""

    now: float
    sha256: bytes
    chunks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class UpdateReady:
    """The update of ``round`` is durable on flash, together with the new private state."""

    now: float
    round: int
    base: int
    cut: Cut = field(repr=False)


@dataclass(frozen=True)
class Refuse:
    """This device will not take part in ``round`` (battery, no data), or could not finish it."""

    now: float
    round: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Training got this far."""

    now: float
    round: int
    done: int
    total: int


# ---- actions of both halves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Publish:
    """Send these bytes, QoS 1."""

    topic: str
    payload: bytes = field(repr=False)
    retain: bool = False


@dataclass(frozen=True)
class SendChunks:
    """Read these chunks of the bytes with this sha256 and publish them; :func:`transfer.chunk_frames` does so."""

    fed: str
    dev: str
    xfer: str
    boot: int
    round: int
    cut: Cut = field(repr=False)
    indices: tuple[int, ...]
    kind: str
    """``"up"`` from a device, ``"dn"`` to one device, ``"m"`` to all."""


@dataclass(frozen=True)
class KeepChunk:
    """Write this verified chunk at its place in the file of transfer ``xfer`` (for a body: its hex sha256[:16])."""

    dev: str
    xfer: str
    cut: Cut = field(repr=False)
    index: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Discard:
    """The partial file of this transfer is not needed any more."""

    dev: str
    xfer: str


@dataclass(frozen=True)
class Save:
    """Make the state durable (``state.dump()``) before carrying out what follows."""


@dataclass(frozen=True)
class Refused:
    """Something from outside was refused: for the log and the metrics."""

    topic: str
    dev: str
    reason: str


# ---- actions of the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class Complete:
    """All chunks of an update are in its file: check the whole sha256, decode, store durably, then answer with
    :class:`Stored`, :class:`Rejected` or :class:`Damaged`."""

    round: int
    dev: str
    xfer: str
    base: int
    cut: Cut = field(repr=False)


@dataclass(frozen=True)
class Counted:
    """One update that counts: made by ``dev`` for ``round`` from body version ``base``."""

    dev: str
    round: int
    base: int
    sha256: bytes


@dataclass(frozen=True)
class RoundClosed:
    """The round is over: fold exactly these updates, commit, then answer with :class:`Committed`.

    Announced again after each start until committed, always with the same updates, in order of device."""

    round: int
    counted: tuple[Counted, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class RoundFailed:
    """The deadline passed without quorum, or the round was called off; its updates count nowhere."""

    round: int
    stored: int
    reason: str


@dataclass(frozen=True)
class DeviceUp:
    """A device was born or came back; ``profile`` is what its birth says."""

    dev: str
    boot: int
    profile: bytes


@dataclass(frozen=True)
class DeviceDown:
    """A device's last will arrived, for its present boot."""

    dev: str
    boot: int


@dataclass(frozen=True)
class Progressed:
    """A device accepted, declined, reports progress or trouble."""

    dev: str
    round: int
    phase: str
    done: int = 0
    total: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Quarantined:
    """A device is shut out from now on; the operator sees why."""

    dev: str
    reason: str


@dataclass(frozen=True)
class Equivocation:
    """A device offered a second, different update for one round; the first stays."""

    dev: str
    round: int
    first: bytes
    second: bytes


@dataclass(frozen=True)
class Fenced:
    """A coordinator with a newer epoch exists: stop at once."""

    epoch: int


# ---- actions of the device -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BodyComplete:
    """All chunks of this body are in its file: check the whole sha256, make it durable, then answer with
    :class:`BodyStored` or :class:`BodyDamaged`."""

    version: int
    xfer: str
    cut: Cut = field(repr=False)


@dataclass(frozen=True)
class Train:
    """Begin ``round`` from the body on flash. Said again after a reboot until there is an update."""

    round: int
    version: int
    body: bytes
    spec: bytes
    seconds: float


@dataclass(frozen=True)
class Cancel:
    """Stop working on ``round``."""

    round: int
    reason: str


@dataclass(frozen=True)
class Receipted:
    """The coordinator answered the upload of ``round`` with this outcome (see ``messages.OUTCOMES``)."""

    round: int
    outcome: str
    reason: str


@dataclass(frozen=True)
class Resend:
    """Encode the update of ``round`` again with its whole mask and give a new :class:`UpdateReady`."""

    round: int
    reason: str


@dataclass(frozen=True)
class CoordinatorSeen:
    """The coordinator's birth or last will; ``spec`` is what it tells every device."""

    online: bool
    epoch: int
    spec: bytes


Action = (
    Publish
    | SendChunks
    | KeepChunk
    | Discard
    | Save
    | Refused
    | Complete
    | RoundClosed
    | RoundFailed
    | DeviceUp
    | DeviceDown
    | Progressed
    | Quarantined
    | Equivocation
    | Fenced
    | BodyComplete
    | Train
    | Cancel
    | Receipted
    | Resend
    | CoordinatorSeen
)
