"""What goes into the machines. What comes out is in :mod:`talaria.protocol.actions`.

Times are seconds on the driver's own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from talaria.wire.chunks import Cut
from talaria.wire.messages import WantCompact

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

    @property
    def size(self) -> int:
        """Bytes of topic and payload together."""
        return len(self.topic) + len(self.payload)


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
class Listening:
    """An ingest worker listens for the chunks of this upload, and has these already: the device may be asked for the
    others. Said again where another worker took its place."""

    now: float
    device: str
    xfer: str
    chunks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ChunksCame:
    """These chunks of an upload came to an ingest worker, which has verified and kept them; ``size`` bytes in all, with
    their topics."""

    now: float
    device: str
    xfer: str
    chunks: frozenset[int]
    size: int


@dataclass(frozen=True)
class PublishModel:
    """Make these bytes the current global model, and send them to all once where nearly all begin from it
    (``multicast``). Who is asked for work asks for what it lacks."""

    now: float
    version: int
    cut: Cut = field(repr=False)
    multicast: bool = True


@dataclass(frozen=True)
class OpenRound:
    """Begin ``attempt`` on the current global model with this cohort (device -> its opaque plan).

    It closes when ``target`` updates are stored (default: all of the cohort), when everyone has answered and
    at least ``quorum`` are stored, or at the deadline with at least ``quorum``. With fewer it fails.
    ``stale`` makes it a buffer of an asynchronous run, which closes at ``target`` alone and counts what was trained
    from a global model up to that many versions older; see :mod:`talaria.protocol.coordinator.async_rounds`.
    ``secure`` makes it a round of secure aggregation, in steps of so many seconds at most; ``seconds`` are then those
    until all have trained; see :mod:`talaria.protocol.coordinator.secure_rounds`. Attempts before ``since`` are of
    another run: a buffer takes nothing of them over.
    """

    now: float
    attempt: int
    cohort: Mapping[str, bytes]
    seconds: float | None = None
    quorum: int = 1
    target: int | None = None
    stale: int = 0
    secure: float = 0.0
    since: int = 0


@dataclass(frozen=True)
class Enlist:
    """Add devices to the open round."""

    now: float
    attempt: int
    cohort: Mapping[str, bytes]


@dataclass(frozen=True)
class Stored:
    """The store holds this update durably: the receipt may go out."""

    now: float
    attempt: int
    device: str
    sha256: bytes


@dataclass(frozen=True)
class WordKept:
    """A device's word of ``step`` of a secure round is durable."""

    now: float
    attempt: int
    device: str
    step: int


@dataclass(frozen=True)
class WordRefused:
    """A device's word does not fit. ``offence``: an honest device would not have said it."""

    now: float
    attempt: int
    device: str
    reason: str
    offence: bool = True


@dataclass(frozen=True)
class NextStep:
    """A secure round goes on with ``members``, of whom ``said`` have said their word of ``step`` already; ``words`` is
    what is told to the others. Step 5: the sum is open, and the round closes. Given again after a start."""

    now: float
    attempt: int
    step: int
    members: frozenset[str]
    said: frozenset[str] = frozenset()
    words: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class UpdateRejected:
    """The update did not pass: the device is quarantined."""

    now: float
    attempt: int
    device: str
    reason: str


@dataclass(frozen=True)
class Damaged:
    """The file of a complete upload fails its whole sha256 or could not be written; these chunks are intact."""

    now: float
    attempt: int
    device: str
    chunks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Committed:
    """The closed round's result is durable; the machine need not announce it again."""

    now: float
    attempt: int


@dataclass(frozen=True)
class AbortRound:
    """Call a round off that is not committed."""

    now: float
    attempt: int
    reason: str


@dataclass(frozen=True)
class Amend:
    """What the operator has changed holds for the open round too: it needs ``quorum`` updates and closes at once with
    ``target`` (None: as it did), and waits for ``seconds`` from now at most (None: as long as it would have). Who is
    ``gone`` from the fleet is waited for no more, for this ``reason``; an update of it that is here already counts."""

    now: float
    quorum: int | None = None
    target: int | None = None
    seconds: float | None = None
    gone: frozenset[str] = frozenset()
    reason: str = ""


@dataclass(frozen=True)
class Dismiss:
    """No further round follows: whatever is still under way is late, for this reason."""

    now: float
    reason: str


@dataclass(frozen=True)
class Release:
    """Let a quarantined device back in."""

    now: float
    device: str


@dataclass(frozen=True)
class Tell:
    """Say something to a device, for whoever looks after it."""

    now: float
    device: str
    text: str


@dataclass(frozen=True)
class Revoke:
    """Shut a device out, for this reason."""

    now: float
    device: str
    reason: str


# ---- events for the device -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Boot:
    """The process began. ``model_digest`` is the sha256 of the global model on flash, if any; ``chunks`` the intact
    chunks of a partial one (of the global model that the saved state names); ``update`` the sha256 of the update on
    flash, empty where there is none (None: it is where the saved state says); ``held`` as in :class:`ModelStored`."""

    now: float
    model_digest: bytes = b""
    chunks: frozenset[int] = frozenset()
    update: bytes | None = None
    held: bytes = b""


@dataclass(frozen=True)
class Connecting:
    """A connection is about to be tried: counts the boot. Ask :meth:`DeviceMachine.will` for the last will after."""

    now: float


@dataclass(frozen=True)
class ModelStored:
    """The global model with this sha256 is durable on flash, or what is kept here ``of`` one. ``held`` is the sha256 of
    the file, where the next one may come as the changes to it."""

    now: float
    sha256: bytes
    of: bytes = b""
    held: bytes = b""


@dataclass(frozen=True)
class ChangesUnfit:
    """What came with this sha256 are changes, and they do not fit what is on flash."""

    now: float
    sha256: bytes


@dataclass(frozen=True)
class ModelDamaged:
    """The joined global model fails its sha256 or could not be written; these chunks are intact."""

    now: float
    sha256: bytes
    chunks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class NeedKit:
    """This device can learn the run from its kit alone, and has none."""

    now: float


@dataclass(frozen=True)
class KitFound:
    """These chunks of the kit with this sha256 lie intact on flash."""

    now: float
    sha256: bytes
    chunks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class KitStored:
    """The kit is durable on flash."""

    now: float


@dataclass(frozen=True)
class UpdateReady:
    """The update of ``attempt`` is durable on flash, together with the new private state."""

    now: float
    attempt: int
    base_version: int
    cut: Cut = field(repr=False)


@dataclass(frozen=True)
class DeclineRound:
    """This device will not take part in ``attempt`` (battery, no data), or could not finish it."""

    now: float
    attempt: int
    reason: str


@dataclass(frozen=True)
class CompactMade:
    """What ``devices`` ``want`` of the current global model is there to be downloaded, cut so; None where they are to
    take all of it."""

    now: float
    want: WantCompact = field(repr=False)
    cut: Cut | None
    devices: tuple[str, ...]


@dataclass(frozen=True)
class SayWord:
    """Say this device's word of ``step`` of the secure round ``attempt``, which is durable on flash; again until it is
    heard. Give it again after a reboot."""

    now: float
    attempt: int
    step: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class FetchModel:
    """The newest global model is wanted here, though no round asks this device for work: the run is over."""

    now: float


@dataclass(frozen=True)
class Keeps:
    """What the program needs of a global model from now on: the channels of ``mask``, packed; all where it is empty."""

    now: float
    mask: bytes = field(repr=False)


@dataclass(frozen=True)
class TooNarrow:
    """What is on flash of the global model is not enough after all, or damaged or gone: it is needed whole."""

    now: float


@dataclass(frozen=True)
class SayGoodbye:
    """All is done: tell the coordinator; or ``for_good``, that its owner takes this device out of the fleet. Give it
    again until :class:`Released` comes."""

    now: float
    for_good: bool = False
