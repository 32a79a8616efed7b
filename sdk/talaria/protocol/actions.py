"""What comes out of the machines: carry it out in this order.

What stands behind a :class:`Save` may be sent only when the state is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from talaria.wire.chunks import Cut
from talaria.wire.messages import WantCompact

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

    fleet: str
    device: str
    xfer: str
    boot: int
    attempt: int
    cut: Cut = field(repr=False)
    indices: tuple[int, ...]
    kind: str
    """``"up"`` from a device, ``"dn"`` to one device, ``"m"`` to all."""


@dataclass(frozen=True)
class KeepChunk:
    """Write this verified chunk at its place in the file of transfer ``xfer`` (for a global model: its hex
    sha256[:16])."""

    device: str
    xfer: str
    cut: Cut = field(repr=False)
    index: int
    data: bytes | memoryview = field(repr=False)


@dataclass(frozen=True)
class Discard:
    """The partial file of this transfer is not needed any more."""

    device: str
    xfer: str


@dataclass(frozen=True)
class Save:
    """Make the state durable (``state.dump()``) before carrying out what follows.

    ``soon``: it may wait a second or so and be done once for many; losing it costs work done twice, nothing more.
    A driver may also step through several events, save once, and only then carry out all their actions.
    """

    soon: bool = False


@dataclass(frozen=True)
class FrameRefused:
    """Something from outside was refused: for the log and the metrics."""

    topic: str
    device: str
    reason: str


# ---- actions of the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class Expect:
    """Chunks of this upload come to an ingest worker: let it listen for them, and answer with
    :class:`~talaria.protocol.events.Listening`."""

    device: str
    xfer: str
    cut: Cut = field(repr=False)


@dataclass(frozen=True)
class Complete:
    """All chunks of an update are in its file: check the whole sha256, decode, store durably, then answer with
    :class:`Stored`, :class:`UpdateRejected` or :class:`Damaged`."""

    attempt: int
    device: str
    xfer: str
    base_version: int
    cut: Cut = field(repr=False)
    secure: bool = False
    """Whether its round is a secure one: such a round ends as it began, whatever the operator asks of the next."""


@dataclass(frozen=True)
class Counted:
    """One update that counts: made by ``device`` for ``attempt`` from global model version ``base_version``."""

    device: str
    attempt: int
    base_version: int
    sha256: bytes


@dataclass(frozen=True)
class RoundClosed:
    """The round is over: fold exactly these updates, commit, then answer with :class:`Committed`.

    Announced again after each start until committed, always with the same updates, in order of device."""

    attempt: int
    counted: tuple[Counted, ...]
    missing: tuple[str, ...]
    secure: bool = False


@dataclass(frozen=True)
class RoundFailed:
    """The deadline passed without quorum, or the round was called off; its updates count nowhere."""

    attempt: int
    stored: int
    reason: str
    opened: bool = False
    """Whether a secure one can never have enough devices: too many have helped to open a sum of it."""


@dataclass(frozen=True)
class DeviceUp:
    """A device was born or came back; ``profile`` is what its birth says."""

    device: str
    boot: int
    profile: bytes


@dataclass(frozen=True)
class DeviceDown:
    """A device's last will arrived, for its present boot."""

    device: str
    boot: int


@dataclass(frozen=True)
class Forgot:
    """A device spoke with boot ``boot``, though ``newest`` was heard: it lost or restored its memory, or two have its
    name. It is told to count on from there."""

    device: str
    boot: int
    newest: int


@dataclass(frozen=True)
class Progressed:
    """A device accepted, declined or reports trouble."""

    device: str
    attempt: int
    phase: str
    reason: str = ""


@dataclass(frozen=True)
class Doubled:
    """Two programs have this device's name, and put each other out at the broker again and again."""

    device: str


@dataclass(frozen=True)
class Departed:
    """A device has its last global model and its model, and leaves; ``for_good`` where its owner takes it out of the
    fleet. That is to be durable before what follows is said."""

    device: str
    for_good: bool = False


@dataclass(frozen=True)
class Quarantined:
    """A device is shut out from now on; the operator sees why."""

    device: str
    reason: str


@dataclass(frozen=True)
class Equivocation:
    """A device offered a second, different update for one round; the first stays."""

    device: str
    attempt: int
    first: bytes
    second: bytes


@dataclass(frozen=True)
class CompactAsked:
    """A device wants this of the global model: make it, and answer with
    :class:`~talaria.protocol.events.CompactMade`."""

    device: str
    want: WantCompact = field(repr=False)


@dataclass(frozen=True)
class KitAsked:
    """A device asks for the run's kit, and whether there is one is not known: find out, and give the machine its
    :class:`~talaria.protocol.coordinator.kits.KitOffer`. Said again each time that one asks."""

    device: str


@dataclass(frozen=True)
class WordSaid:
    """A device's whole word of ``step`` of a secure round: check and keep it, then answer with
    :class:`~talaria.protocol.events.WordKept` or :class:`~talaria.protocol.events.WordRefused`."""

    attempt: int
    device: str
    step: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class StepOver:
    """All have said their word of ``step``, or those who are there have: go on, and give the machine
    :class:`~talaria.protocol.events.NextStep`, or call the round off."""

    attempt: int
    step: int


@dataclass(frozen=True)
class Fenced:
    """A coordinator with a newer epoch exists (or, not ``online``, was there meanwhile): stop at once."""

    epoch: int
    online: bool = True


# ---- actions of the device -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelComplete:
    """All chunks of this global model are in its file: check the whole sha256, make it durable, then answer with
    :class:`ModelStored` or :class:`ModelDamaged`."""

    version: int
    xfer: str
    cut: Cut = field(repr=False)
    of: bytes = b""
    """The global model that these bytes are a part of; empty where they are the model."""


@dataclass(frozen=True)
class KitBegun:
    """The kit is known by this cut: say by :class:`KitFound` which chunks lie on flash."""

    xfer: str
    cut: Cut = field(repr=False)


@dataclass(frozen=True)
class KitComplete:
    """All chunks of the kit are in its file: check the whole sha256, make it durable, then answer with
    :class:`KitStored`, or with :class:`KitFound` where it is damaged."""

    xfer: str
    cut: Cut = field(repr=False)


@dataclass(frozen=True)
class KitRefused:
    """The coordinator has no kit, or one that this device does not take."""

    reason: str


@dataclass(frozen=True)
class Train:
    """Begin ``attempt`` from the global model on flash. Said again after a reboot until there is an update. ``epoch``
    is that of the coordinator which asked."""

    attempt: int
    version: int
    model_digest: bytes
    spec: bytes
    seconds: float
    epoch: int = 0


@dataclass(frozen=True)
class WordCame:
    """The coordinator's whole word in the secure round ``attempt``, which this device's word of ``step`` answers."""

    attempt: int
    step: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Cancel:
    """Stop working on ``attempt``."""

    attempt: int
    reason: str


@dataclass(frozen=True)
class Receipted:
    """The coordinator answered the upload of ``attempt`` with this outcome (see ``messages.OUTCOMES``)."""

    attempt: int
    outcome: str
    reason: str


@dataclass(frozen=True)
class Told:
    """The coordinator says what is wrong with this device, in words for its owner."""

    reason: str


@dataclass(frozen=True)
class CutAnew:
    """The update of this attempt is cut into larger chunks than the coordinator takes now: cut its bytes anew and say
    that it is ready."""

    attempt: int
    base_version: int


@dataclass(frozen=True)
class Reconnect:
    """End this connection and begin another: its boot is not above those that the coordinator has heard."""

    reason: str


@dataclass(frozen=True)
class Released:
    """The coordinator has heard our goodbye, or keeps that we left for good."""


@dataclass(frozen=True)
class Noticed:
    """The coordinator says this to whoever looks after the device."""

    text: str


@dataclass(frozen=True)
class CoordinatorSeen:
    """The coordinator's birth or last will; ``spec`` is what it tells every device."""

    online: bool
    epoch: int
    spec: bytes


@dataclass(frozen=True)
class CoordinatorOutrun:
    """A coordinator said that it begins at an epoch below the one that this device ``follows``, so that it is heard no
    more."""

    follows: int


Action = (
    Publish
    | SendChunks
    | KeepChunk
    | Discard
    | Save
    | FrameRefused
    | CoordinatorOutrun
    | Expect
    | Complete
    | RoundClosed
    | RoundFailed
    | DeviceUp
    | DeviceDown
    | Forgot
    | Progressed
    | Doubled
    | Departed
    | Quarantined
    | Equivocation
    | CompactAsked
    | KitAsked
    | WordSaid
    | StepOver
    | Fenced
    | ModelComplete
    | KitBegun
    | KitComplete
    | KitRefused
    | Train
    | WordCame
    | Cancel
    | Receipted
    | Told
    | CutAnew
    | Reconnect
    | Released
    | Noticed
    | CoordinatorSeen
)
