"""What the two halves say to each other. Every message is valid from birth and checked again when decoded.

A message travels as the msgpack map of its fields in the payload of a frame whose header names its type.
Opaque ``spec`` and ``profile`` bytes belong to the programs: the protocol carries them and never looks in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import msgpack

from talaria.errors import TooLarge, WireError
from talaria.foreign import named, reading, shown
from talaria.wire.frames import LARGEST_INT, MAX_PAYLOAD, Frame, unpack

MAX_MESSAGE = 120 * 1024
"""Bytes of a message's payload: more than any has."""
MAX_CHUNKS = 3600
MAX_SPEC = 64 * 1024
MAX_PROFILE = 4 * 1024
MAX_MASK = 64 * 1024
MAX_TEXT = 300
MAX_TRANSFER = 2**32
MAX_WORD = 64 * 2**10
"""Bytes of a word of a secure round in one message; a longer word travels in parts."""
MAX_PARTS = 64

Outcome = Literal["stored", "late", "rejected", "equivocation"]
OUTCOMES = ("stored", "late", "rejected", "equivocation")

Check = Callable[[str, Any], None]


def _int(low: int = 0, high: int = LARGEST_INT) -> Any:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise WireError(f"{name}={shown(value)} must be a whole number in {low}..{high}")

    return field(metadata={"check": check})


def _seconds() -> Any:
    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float) or not 0 <= value <= 1e9:
            raise WireError(f"{name}={shown(value)} must be seconds in 0..1e9")

    return field(metadata={"check": check})


def _bytes(low: int, high: int, **how: Any) -> Any:
    def check(name: str, value: Any) -> None:
        if type(value) is not bytes:
            raise WireError(f"{name} must be bytes, got {type(value).__name__}")
        if len(value) > high:
            raise TooLarge(f"{name} has {len(value)} bytes, above {high}")
        if len(value) < low:
            raise WireError(f"{name} has {len(value)} bytes, below {low}")

    return field(metadata={"check": check}, **how)


def _text(high: int = MAX_TEXT, among: tuple[str, ...] = ()) -> Any:
    def check(name: str, value: Any) -> None:
        if type(value) is not str or len(value) > high:
            raise WireError(f"{name} must be text of at most {high} characters")
        if among and value not in among:
            raise WireError(f"{name}={value[:40]!r} is unknown; use one of {', '.join(among)}")

    return field(metadata={"check": check})


def _flag() -> Any:
    def check(name: str, value: Any) -> None:
        if type(value) is not bool:
            raise WireError(f"{name}={shown(value)} must be true or false")

    return field(metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class Message:
    """The shape that all messages share: a type name, and fields that check themselves."""

    TYPE: ClassVar[str]

    def __post_init__(self) -> None:
        for name, spoken, check in _checks(type(self)):
            check(spoken, getattr(self, name))


_CHECKS: dict[type[Message], tuple[tuple[str, str, Check], ...]] = {}


def _checks(of: type[Message]) -> tuple[tuple[str, str, Check], ...]:
    """Name, full name and check of each field of a message's class: dataclasses go through all they know each time."""
    if of not in _CHECKS:
        _CHECKS[of] = tuple((f.name, f"{of.TYPE}.{f.name}", f.metadata["check"]) for f in fields(of))
    return _CHECKS[of]


@dataclass(frozen=True, kw_only=True)
class CoordinatorBirth(Message):
    """The coordinator's birth (``online``) or last will, retained. ``key`` is its public key or empty.

    ``spec`` is what every device must know of the run (the programs' business); the rest are its limits:
    largest chunk, chunks in flight per transfer, largest update in bytes, and the seconds after which an
    unanswered message is said again.
    """

    TYPE: ClassVar[str] = "co"
    online: bool = _flag()
    key: bytes = _bytes(0, 32)
    chunk: int = _int(1, MAX_PAYLOAD)
    credit: int = _int(1, 64)
    max_update: int = _int(1, MAX_TRANSFER)
    retry: float = _seconds()
    spec: bytes = _bytes(0, MAX_SPEC)


@dataclass(frozen=True, kw_only=True)
class DeviceBirth(Message):
    """A device's birth (``online``) or last will, retained; paired by ``boot`` in the frame's header. ``process`` tells
    two programs apart that have one name."""

    TYPE: ClassVar[str] = "device"
    online: bool = _flag()
    key: bytes = _bytes(0, 32)
    profile: bytes = _bytes(0, MAX_PROFILE)
    process: bytes = _bytes(0, 16, default=b"")


@dataclass(frozen=True, kw_only=True)
class Parcel(Message):
    """What global model and offer have in common: bytes, how they are cut, and the sha256 of each piece."""

    size: int = _int(1, MAX_TRANSFER)
    chunk: int = _int(1, MAX_PAYLOAD)
    sha256: bytes = _bytes(32, 32)
    hashes: bytes = _bytes(32, 32 * MAX_CHUNKS)
    nonce: bytes = _bytes(16, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.hashes) != 32 * self.count:
            raise WireError(
                f"{self.TYPE}.hashes has {len(self.hashes)} bytes but {self.size} bytes in chunks of {self.chunk} "
                f"need {32 * self.count}"
            )

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return -(-self.size // self.chunk)


@dataclass(frozen=True, kw_only=True)
class ModelManifest(Parcel):
    """The current global model, version by version. Retained; also sent to one device that lacks it."""

    TYPE: ClassVar[str] = "model"
    version: int = _int()


@dataclass(frozen=True, kw_only=True)
class CompactManifest(Parcel):
    """What a device keeps of the global model ``of``, as it asked for; the model itself where there is nothing smaller.
    Sent to that device alone."""

    TYPE: ClassVar[str] = "compact"
    of: bytes = _bytes(32, 32)


@dataclass(frozen=True, kw_only=True)
class KitManifest(Parcel):
    """The run's kit, which a device without torch asked for. Sent to that device alone."""

    TYPE: ClassVar[str] = "kit"


@dataclass(frozen=True, kw_only=True)
class NoKit(Message):
    """There is no kit of this run, and why."""

    TYPE: ClassVar[str] = "nokit"
    reason: str = _text()


@dataclass(frozen=True, kw_only=True)
class Offer(Parcel):
    """A device has its update of ``attempt`` ready, made from version ``base_version`` of the global model, whose
    sha256 is ``base_digest``."""

    TYPE: ClassVar[str] = "offer"
    attempt: int = _int()
    base_version: int = _int()
    base_digest: bytes = _bytes(32, 32)


@dataclass(frozen=True, kw_only=True)
class Work(Message):
    """The coordinator asks a device to take part in ``attempt``, from the global model with this version and sha256.

    ``seconds`` are left until the deadline (0: no deadline). ``spec`` is this device's plan, opaque here.
    """

    TYPE: ClassVar[str] = "work"
    attempt: int = _int()
    version: int = _int()
    model_digest: bytes = _bytes(32, 32)
    seconds: float = _seconds()
    spec: bytes = _bytes(0, MAX_SPEC)


@dataclass(frozen=True, kw_only=True)
class Accept(Message):
    """The device works on ``attempt``."""

    TYPE: ClassVar[str] = "accept"
    attempt: int = _int()


@dataclass(frozen=True, kw_only=True)
class Decline(Message):
    """The device will not, and why."""

    TYPE: ClassVar[str] = "decline"
    attempt: int = _int()
    reason: str = _text()


@dataclass(frozen=True, kw_only=True)
class Grant(Message):
    """Send exactly the chunks of ``bitmap`` now: at most ``credit`` of them. The first of a transfer."""

    TYPE: ClassVar[str] = "grant"
    attempt: int = _int()
    xfer: str = _text(32)
    bitmap: bytes = _bytes(1, MAX_CHUNKS // 8)
    credit: int = _int(1, 64)


@dataclass(frozen=True, kw_only=True)
class Need(Message):
    """As a grant, for the next window or for what was lost."""

    TYPE: ClassVar[str] = "need"
    attempt: int = _int()
    xfer: str = _text(32)
    bitmap: bytes = _bytes(1, MAX_CHUNKS // 8)
    credit: int = _int(1, 64)


@dataclass(frozen=True, kw_only=True)
class Receipt(Message):
    """The end of an upload. ``stored`` is sent only after the update is durable; say it as often as asked."""

    TYPE: ClassVar[str] = "receipt"
    attempt: int = _int()
    sha256: bytes = _bytes(32, 32)
    outcome: str = _text(16, OUTCOMES)
    reason: str = _text()


@dataclass(frozen=True, kw_only=True)
class Abort(Message):
    """The round is over or called off: stop working on it."""

    TYPE: ClassVar[str] = "abort"
    attempt: int = _int()
    reason: str = _text()


@dataclass(frozen=True, kw_only=True)
class Rebirth(Message):
    """Publish your birth again: the coordinator does not know this boot. A boot that is not above ``above`` is older
    than one that it has heard: the device counts on from there, and connects anew."""

    TYPE: ClassVar[str] = "rebirth"
    above: int = _int()


@dataclass(frozen=True, kw_only=True)
class Want(Message):
    """The device asks for exactly these chunks of a global model; an empty bitmap asks for the manifest."""

    TYPE: ClassVar[str] = "want"
    model_digest: bytes = _bytes(32, 32)
    bitmap: bytes = _bytes(0, MAX_CHUNKS // 8)


@dataclass(frozen=True, kw_only=True)
class WantCompact(Message):
    """The device asks for the manifest of what ``mask`` keeps of a global model: one bitmap per channel group, in order
    of name."""

    TYPE: ClassVar[str] = "wantcompact"
    model_digest: bytes = _bytes(32, 32)
    mask: bytes = _bytes(1, MAX_MASK)


@dataclass(frozen=True, kw_only=True)
class WantChanges(WantCompact):
    """The same (all of the model where ``mask`` is empty) as the changes since the global model ``base``: what the
    device has of that is the file with the sha256 ``held``."""

    TYPE: ClassVar[str] = "wantchanges"
    mask: bytes = _bytes(0, MAX_MASK)
    base: bytes = _bytes(32, 32)
    held: bytes = _bytes(32, 32)


@dataclass(frozen=True, kw_only=True)
class WantKit(Message):
    """The device asks for exactly these chunks of the kit with this sha256; with an empty bitmap, for its manifest."""

    TYPE: ClassVar[str] = "wantkit"
    sha256: bytes = _bytes(0, 32)
    bitmap: bytes = _bytes(0, MAX_CHUNKS // 8)


@dataclass(frozen=True, kw_only=True)
class Part(Message):
    """Part ``part`` of ``parts`` of what is said in a secure round, opaque here (:mod:`talaria.privacy.messages`)."""

    attempt: int = _int()
    step: int = _int(0, 4)
    part: int = _int(0, MAX_PARTS - 1)
    parts: int = _int(1, MAX_PARTS)
    data: bytes = _bytes(1, MAX_WORD)


@dataclass(frozen=True, kw_only=True)
class Word(Part):
    """A device's word of ``step`` in a secure round, or a part of it."""

    TYPE: ClassVar[str] = "word"


@dataclass(frozen=True, kw_only=True)
class Told(Part):
    """What a device is told in a secure round, or a part of it; its word of ``step`` is the answer."""

    TYPE: ClassVar[str] = "told"


@dataclass(frozen=True, kw_only=True)
class Heard(Message):
    """The coordinator keeps the device's word of ``step``: it need not be said again."""

    TYPE: ClassVar[str] = "heard"
    attempt: int = _int()
    step: int = _int(0, 4)


@dataclass(frozen=True, kw_only=True)
class Trouble(Message):
    """Something failed on the sender's side, in words."""

    TYPE: ClassVar[str] = "error"
    attempt: int = _int()
    reason: str = _text()


@dataclass(frozen=True, kw_only=True)
class Goodbye(Message):
    """The device has all it came for, from global model ``version``, and leaves; said again until there is an
    answer."""

    TYPE: ClassVar[str] = "goodbye"
    version: int = _int()


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    """The device leaves the fleet for good, by its owner's hand; said again until there is an answer."""

    TYPE: ClassVar[str] = "leave"


@dataclass(frozen=True, kw_only=True)
class Farewell(Message):
    """The coordinator has heard the goodbye, or keeps for good that the device left."""

    TYPE: ClassVar[str] = "farewell"


@dataclass(frozen=True, kw_only=True)
class Notice(Message):
    """The coordinator says something to whoever looks after the device: why no round asks it, or why it is shut out."""

    TYPE: ClassVar[str] = "notice"
    text: str = _text()


CHUNK = "chunk"
"""Header type of a frame whose payload is raw bytes of a transfer."""

_ALL: tuple[type[Message], ...] = (
    CoordinatorBirth,
    DeviceBirth,
    ModelManifest,
    CompactManifest,
    KitManifest,
    NoKit,
    Offer,
    Work,
    Accept,
    Decline,
    Grant,
    Need,
    Receipt,
    Abort,
    Rebirth,
    Want,
    WantCompact,
    WantChanges,
    WantKit,
    Word,
    Told,
    Heard,
    Trouble,
    Goodbye,
    Leave,
    Farewell,
    Notice,
)
BY_TYPE: dict[str, type[Message]] = {m.TYPE: m for m in _ALL}


def encode_message(message: Message) -> bytes:
    """The payload of the frame that carries ``message``."""
    # A reason may quote a file name, which need not be text: it loses a character, not the message.
    values = {name: getattr(message, name) for name, _, _ in _checks(type(message))}
    packed: bytes = msgpack.packb(values, unicode_errors="replace")
    return packed


def decode_message(frame: Frame) -> Message:
    """The message in ``frame``. Raises :class:`WireError` for an unknown type, a missing or unknown field or a
    value out of its bounds."""
    with reading(f"message {frame.header.type[:20]!r}"):
        return _decoded(frame)


def _decoded(frame: Frame) -> Message:
    cls = BY_TYPE.get(frame.header.type)
    if cls is None:
        raise WireError(f"message type {frame.header.type[:20]!r} is unknown; known are {', '.join(BY_TYPE)}")
    if len(frame.payload) > MAX_MESSAGE:
        raise TooLarge(f"message {cls.TYPE!r}: {len(frame.payload)} bytes are above {MAX_MESSAGE}; refused unread")
    values = unpack(frame.payload, f"message {cls.TYPE!r}")
    names = {name for name, _, _ in _checks(cls)}
    if not isinstance(values, dict) or set(values) != names:
        got = named(values) if isinstance(values, dict) else type(values).__name__
        raise WireError(f"message {cls.TYPE!r}: needs the fields {sorted(names)}, got {got}")
    return cls(**values)
