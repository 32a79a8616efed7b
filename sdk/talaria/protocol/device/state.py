"""What a device's half remembers, as plain data that survives a crash."""

from __future__ import annotations

from dataclasses import dataclass, field

from talaria.errors import ConfigError
from talaria.protocol import state_codec
from talaria.protocol.device.kit import KitFetch
from talaria.protocol.transfer import Receiver, ReplayWindow, transfer_of
from talaria.protocol.words import Gathered
from talaria.wire import messages as m
from talaria.wire.chunks import CHUNK, Cut


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What a device takes in. Sizes in bytes, times in seconds."""

    max_model: int = 512 * 2**20
    credit: int = 8
    """Chunks asked for at a time."""
    retry: float = 2.0
    """After this long without an answer a message is said again (the coordinator's own figure if longer)."""
    strikes: int = 20
    """Wrong chunks of one global model until the coordinator is told."""
    hello: float = 60.0
    """An idle device repeats its birth after this long, in case the broker lost it."""

    def __post_init__(self) -> None:
        if not (
            self.max_model >= 1 and 1 <= self.credit <= 64 and self.retry > 0 and self.strikes >= 1 and self.hello > 0
        ):
            raise ConfigError(f"device limits {self} must be above 0, and credit at most 64")


@dataclass
class Job:
    """The round this device was asked to work on."""

    attempt: int
    version: int
    model_digest: bytes
    spec: bytes
    deadline: float | None
    epoch: int = 0
    """That of the coordinator which asked last. Within one, rounds only count upward."""
    phase: str = "fetching"
    """fetching, training, offering, done, refused."""
    base_version: int = 0
    cut: Cut | None = None
    said: float = -1e18
    outcome: str = ""
    reason: str = ""

    def spent(self) -> bool:
        """Whether it is over and there is no update left to offer again."""
        return self.phase == "done" and self.cut is None


@dataclass
class Saying:
    """This device's word in a secure round, until it is heard."""

    attempt: int
    step: int
    data: bytes
    said: float = -1e18


@dataclass
class DeviceState:
    """All that the device's half remembers; plain data that survives a crash by :meth:`dump`."""

    boot: int = 0
    clock: float = 0.0
    said: int = 0
    linked: bool = False
    greeted: float = 0.0
    """When the birth was last said."""
    online: bool = False
    """Whether the coordinator was last heard to be there."""
    epoch: int = 0
    guard: ReplayWindow = field(default_factory=ReplayWindow)
    chunk: int = CHUNK
    credit: int = 8
    retry: float = 0.0
    max_update: int = m.MAX_TRANSFER
    model_digest: bytes = b""
    """sha256 of the global model on flash, which is there wholly or as far as this device keeps it."""
    held: bytes = field(default=b"", metadata=state_codec.of_this_life())
    """sha256 of the file where that lies; empty where what changed of it is not asked for."""
    version: int = -1
    """Newest version that a manifest named, in ``epoch`` or before."""
    fetch: Receiver | None = None
    fetch_version: int = 0
    fetch_of: bytes = b""
    """The global model that ``fetch`` is a part of; empty where it is the model."""
    pace: float = field(default=0.0, compare=False, metadata=state_codec.of_this_life())
    """Seconds that a chunk of the last global model took at most."""
    keeps: bytes = field(default=b"", metadata=state_codec.of_this_life())
    """The mask of what the program needs of a global model, packed; empty for all."""
    compact_asks: int = field(default=0, metadata=state_codec.of_this_life())
    """How often it was asked for that part without an answer."""
    wanted: bool = field(default=False, metadata=state_codec.of_this_life())
    """Whether the program wants it though no round asks for it."""
    job: Job | None = None
    kit: KitFetch | None = field(default=None, metadata=state_codec.of_this_life())
    """The run's kit on its way, where this device needs one."""
    saying: Saying | None = field(default=None, metadata=state_codec.of_this_life())
    gathered: Gathered = field(default_factory=Gathered, metadata=state_codec.of_this_life())
    """The coordinator's word in a secure round, on its way in."""

    def dump(self) -> bytes:
        """This state as bytes."""
        return state_codec.dump(self)

    @classmethod
    def load(cls, data: bytes) -> DeviceState:
        """The state that :meth:`dump` wrote. Raises :class:`~talaria.errors.StateError` where damaged."""
        return state_codec.load(cls, data)

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self.job is not None and self.job.phase in ("fetching", "training", "offering")

    @property
    def fetched(self) -> bytes | None:
        """sha256 of the global model that is on its way, wholly or in part."""
        return None if self.fetch is None else self.fetch_of or self.fetch.cut.sha256

    def partial(self) -> tuple[str, Cut] | None:
        """The name and cut of the global model that is on its way, if any."""
        return None if self.fetch is None else (transfer_of(self.fetch.cut.sha256), self.fetch.cut)
