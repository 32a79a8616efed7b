"""The coordinator's memory of rounds, devices and uploads, as plain data, and the rule by which a round ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from talaria.errors import ConfigError
from talaria.protocol import state_codec, words
from talaria.protocol.actions import Counted
from talaria.protocol.transfer import Receiver, ReplayWindow
from talaria.protocol.words import Gathered
from talaria.wire.chunks import CHUNK, Cut
from talaria.wire.frames import MAX_PAYLOAD
from talaria.wire.messages import MAX_TRANSFER

LIVE = ("called", "working", "waiting", "receiving", "storing")
"""Phases of a member whose update may still come."""

HELD = "held"
"""Phase of a member of an asynchronous run whose update is stored, but counts only in the next buffer."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a coordinator allows. Sizes in bytes, times in seconds."""

    chunk: int = CHUNK
    credit: int = 8
    """Chunks in flight per transfer."""
    max_update: int = 64 * 2**20
    max_open: int = 64
    """Uploads at the same time; later offers wait their turn."""
    max_bytes: int = 512 * 2**20
    """Bytes of all open uploads together."""
    max_asked: int = 24 * 2**20
    """Of them, those asked for and not here yet: what a broker keeps for one that listens; it drops the rest."""
    retry: float = 2.0
    """After this long without an answer a message is said again."""
    stall: float = 30.0
    """After this long without a new chunk an upload gives up its place to one that waits."""
    strikes: int = 5
    """Offences until a device is quarantined."""
    flaps: int = 30
    """Births within a minute that are acted on; a device with more is taken for away until it says something."""
    burst: int = 5000
    """Messages that brought nothing new, until a device is quarantined for flooding the fleet."""
    pace: float = 50.0
    """How many of them a second are forgotten."""
    serve: int = 20
    """How many times its own size a global model is sent to one device before that is refused."""
    keep: int = 16
    """Finished rounds that are remembered, so that a late offer gets its receipt again."""
    keep_parts: int = 512
    """Devices' parts in them, beyond those in the last one: all that is remembered is looked at with each save."""
    max_peers: int = 100_000
    """Devices that are remembered."""

    @property
    def grace(self) -> float:
        """So long a device that left is still waited for: where the broker was started again, all come back."""
        return 5 * self.retry

    @property
    def silence(self) -> float:
        """So long a device may say nothing, once a round waits for the last ones only, until it is asked whether it is
        there; and again, until it is taken for gone."""
        return 30 * self.retry

    def __post_init__(self) -> None:
        for name, low, high in (
            ("chunk", 1, MAX_PAYLOAD),
            ("credit", 1, 64),
            ("max_update", 1, MAX_TRANSFER),
            ("max_open", 1, 100_000),
            ("max_bytes", self.max_update, 2**50),
            ("max_asked", 1, 2**50),
            ("strikes", 1, 1000),
            ("flaps", 1, 10_000),
            ("burst", 1, 2**31),
            ("serve", 1, 1000),
            ("keep", 1, 10_000),
            ("keep_parts", 0, 10_000_000),
            ("max_peers", 1, 10_000_000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"rules: {name}={getattr(self, name)} must be in {low}..{high}")
        if not self.pace > 0:
            raise ConfigError(f"rules: pace={self.pace} must be above 0")
        if not 0 < self.retry <= self.stall:
            raise ConfigError(f"rules: retry={self.retry} must be above 0 and at most stall={self.stall}")


def credit_of(chunk: int) -> int:
    """How many chunks of this size may be in flight per transfer, so that larger ones take no more memory: 2 to 8."""
    return max(2, min(Rules.credit, Rules.credit * CHUNK // chunk))


@dataclass(slots=True)
class Peer:
    """A device as the coordinator knows it."""

    boot: int = 0
    dead: int = 0
    """The newest boot whose last will came, or that is taken for gone."""
    left: float = -1e18
    """When that was."""
    online: bool = False
    profile: bytes = b""
    said: int = 0
    """Frames sent to it in this epoch."""
    guard: ReplayWindow = field(default_factory=ReplayWindow)
    births: list[tuple[float, bytes, bool]] = field(default_factory=list)
    """When it was born within the last minute, as which process, and whether that was acted on as a new boot."""
    comings: list[float] = field(default_factory=list, compare=False, metadata=state_codec.of_this_life())
    """When, within the last minute, it came, by a birth or by what it said."""
    doubled: float = -1e18
    """When it was last told that two programs have its name."""
    process: bytes = b""
    """The program that was born with its newest boot; empty while that is not known."""
    shared: int = 0
    """The newest boot that two programs with its name count as theirs."""
    reminded: float = -1e18
    """When it was last told which boots were heard of it."""
    strikes: int = 0
    idle: float = 0.0
    """Messages that brought nothing new, less those forgotten since."""
    heard: float = 0.0
    """When the last message came, or the coordinator's start."""
    told: float = -1e18
    """When it was last told that it is shut out."""
    served: int = 0
    """Bytes sent to it alone, of the current global model."""
    masks: int = field(default=0, metadata=state_codec.of_this_life())
    """How many parts of the current global model it had made."""
    out: str = ""
    """Why it is quarantined; empty where it is not."""
    key: bytes = b""
    """The public key that signed what was last heard of it."""

    def away(self, now: float, grace: float) -> bool:
        """Whether it left, by its last will, its own word or a silence that no question ended, and has not come back
        for ``grace`` seconds (nor since the coordinator's start); or never came. Who is merely not heard yet, after a
        start, is not away."""
        return self.dead >= self.boot and (not self.boot or now - self.left >= grace)


@dataclass(slots=True)
class Participant:
    """A device's part in one round."""

    spec: bytes
    phase: str = "called"
    asked: float = -1e18
    xfer: str = ""
    sha256: bytes = b""
    boot: int = 0
    """The boot in which the update with this sha256 was offered, 0 where that was before the coordinator's start."""
    base_version: int = 0
    reason: str = ""
    nonce: bytes = b""
    """Of its offer that was taken last."""
    sought: float | None = None
    """Since when it is asked whether it is still there, and has said nothing."""
    step: int = 0
    """Of a secure round, the step of which its word is missing."""
    gathered: Gathered | None = field(default=None, metadata=state_codec.of_this_life())
    """Its word on the way in."""
    told: bytes = field(default=b"", metadata=state_codec.of_this_life(), repr=False)
    """What it is told in this step, and again until it answers."""


@dataclass
class Attempt:
    """One try at a round, open or over."""

    number: int
    version: int
    model_digest: bytes
    deadline: float | None
    quorum: int
    target: int
    stale: int
    cohort: dict[str, Participant]
    phase: str = "open"
    """open, closed (announced), committed, failed, carried (the next round takes over what is stored)."""
    counted: list[tuple[str, int, int, bytes]] = field(default_factory=list)
    secure: float = 0.0
    """Of a secure round, the seconds that a step takes at most; 0: it is none."""
    step: int = 0
    """What is gathered; see :mod:`talaria.protocol.coordinator.secure_rounds`."""
    between: bool = False
    """Whether the program is working out the next step."""
    due: float | None = None
    """When this step is over; None in the first, which has the round's deadline."""

    def roll(self) -> tuple[Counted, ...]:
        """The updates that count, in order of device and attempt."""
        return tuple(Counted(*entry) for entry in sorted(self.counted))

    def declines(self) -> str:
        """Who declined, to stand after why the round failed: the first by name with its reason, and how many more."""
        said = sorted(device for device, member in self.cohort.items() if member.phase == "declined")
        more = f", and {len(said) - 1} more declined" if len(said) > 1 else ""
        return f"; {said[0]} declined ({self.cohort[said[0]].reason}){more}" if said else ""

    def opened(self) -> bool:
        """Whether so many declined a secure round as one that they opened that no try at it can succeed."""
        said = [m.reason.startswith(words.OPENED) for m in self.cohort.values() if m.phase == "declined"]
        return bool(self.secure) and sum(said) > len(self.cohort) - self.quorum

    def missing(self) -> tuple[str, ...]:
        """Members whose update did not come in time."""
        return tuple(sorted(d for d, m in self.cohort.items() if m.phase != "stored"))

    def idle(self) -> bool:
        """Whether it is over, and nothing of it is under way."""
        under_way = any(member.phase in LIVE or member.phase == HELD for member in self.cohort.values())
        return self.phase in ("committed", "failed", "carried") and not under_way

    def verdict(self, now: float, away: Callable[[str], bool]) -> Literal["open", "closed", "failed", "carried"]:
        """The phase that the round, open until now, is in at ``now``. Who is ``away`` is waited for only until there is
        a quorum, or somebody here who declined may help to one in another try: a watch in a drawer would make every
        round as long as its deadline."""
        if len(self.counted) >= self.target:
            return "closed"
        over = self.deadline is not None and now >= self.deadline
        if self.stale:
            return "carried" if over else "open"
        enough = len(self.counted) >= self.quorum
        if not over and any(m.phase in LIVE and not _gone(m, away(device)) for device, m in self.cohort.items()):
            return "open"  # as is found soon, which matters: this is asked with each message
        if not over and not enough and not self._helps(away) and any(m.phase in LIVE for m in self.cohort.values()):
            return "open"
        return "closed" if enough else "failed"

    def _helps(self, away: Callable[[str], bool]) -> bool:
        """Whether another try has somebody more: one that declined this one, and is here."""
        return any(m.phase == "declined" and not away(device) for device, m in self.cohort.items())


def _gone(member: Participant, away: bool) -> bool:
    """Whether nothing will come of this member's part soon; what is complete here needs its device no more."""
    return away and member.phase != "storing"


@dataclass
class Upload:
    """An update on its way in."""

    device: str
    attempt: int
    receiver: Receiver
    opened: float = 0.0
    listening: bool = field(default=True, compare=False, metadata=state_codec.of_this_life())
    """Whether somebody takes its chunks: until an ingest worker says so, nobody is asked for them."""


@dataclass
class GlobalModel:
    """The current global model."""

    version: int
    cut: Cut


@dataclass
class CoordinatorState:
    """All that the coordinator's half remembers; plain data that survives a crash by :meth:`dump`."""

    epoch: int = 0
    clock: float = 0.0
    kept: float = 0.0
    """The clock when this state was last to be saved."""
    announced: float = 0.0
    fenced: bool = False
    model: GlobalModel | None = None
    compacts: dict[bytes, Cut] = field(default_factory=dict, metadata=state_codec.of_this_life())
    """What devices keep of ``model``, or what changed of that, by the sha256 of what they asked with."""
    current: int | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    uploads: dict[tuple[str, str], Upload] = field(default_factory=dict)
    waiting: list[tuple[int, str]] = field(default_factory=list)
    offers: dict[tuple[int, str], Cut] = field(default_factory=dict)
    """Cuts of the offers that wait."""
    nonces: dict[bytes, tuple[int, str, bytes]] = field(default_factory=dict)
    """Nonce -> (attempt, device, sha256) of the attempts remembered."""

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that ``current`` names, while it is remembered."""
        return None if self.current is None else self.attempts.get(self.current)

    def dump(self) -> bytes:
        """This state as bytes."""
        return state_codec.dump(self)

    @classmethod
    def load(cls, data: bytes) -> CoordinatorState:
        """The state that :meth:`dump` wrote. Raises :class:`~talaria.errors.StateError` where damaged."""
        return state_codec.load(cls, data)

    def transfers(self) -> dict[tuple[str, str], Cut]:
        """The partial uploads whose files matter, by (device, transfer)."""
        return {key: upload.receiver.cut for key, upload in self.uploads.items()}

    def quarantined(self) -> dict[str, str]:
        """Shut-out devices and why."""
        return {device: peer.out for device, peer in self.peers.items() if peer.out}
