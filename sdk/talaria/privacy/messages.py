"""What the two halves say to each other: frozen dataclasses, bounded before anything is allocated, nothing unpickled.

In the order of a round: :class:`Advert` up, :class:`Cohort` down, :class:`Shares` up, :class:`Delivery` down,
:class:`Masked` up, :class:`Survivors` down, :class:`Agreed` up, :class:`Agreement` down, :class:`Opening` up. What a
device says is signed by its enrolled key, over the terms of the round; devices check each other's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import msgpack

from talaria.errors import TooLarge, WireError
from talaria.foreign import reading, shown
from talaria.privacy.keystream import DOMAIN
from talaria.privacy.shamir import SHARE_BYTES
from talaria.privacy.terms import MOST_DEVICES, MOST_TIERS
from talaria.wire.frames import unpack
from talaria.wire.signing import SIGNATURE_BYTES, Signer, verified

MOST_MASK = 64 * 1024
MOST_SEEDS = MOST_TIERS + 1
"""One for each tier, and one for what stands beside the values."""
MOST_BOX = MOST_SEEDS * SHARE_BYTES + 64
MOST_VALUES = 1 << 30
"""Bytes of a masked update at most."""
MOST_SIDE = 4 * (MOST_DEVICES + 32)


@dataclass(frozen=True)
class _Message:
    TYPE: ClassVar[str]

    def encode(self) -> bytes:
        """The message as msgpack."""
        packed: bytes = msgpack.packb([self.TYPE, *(_plain(getattr(self, f.name)) for f in fields(self))])
        return packed

    def digest(self) -> bytes:
        """sha256 of the encoded message."""
        return hashlib.sha256(DOMAIN + self.encode()).digest()

    @classmethod
    def _of(cls, values: list[Any]) -> Self:
        if len(values) != len(fields(cls)):
            raise WireError(f"secure: {cls.TYPE} has {len(values)} fields, need {len(fields(cls))}")
        return cls(*(_tuples(value) for value in values))


@dataclass(frozen=True)
class _Signed(_Message):
    """``terms`` is the digest of the round's terms; the signature is over all other fields."""

    device: str
    terms: bytes

    def signed(self, signer: Signer) -> Self:
        """With the device's signature."""
        return replace(self, signature=signer.sign(self.text()))  # type: ignore[call-arg]

    def signed_by(self, key: bytes) -> bool:
        """True where the holder of ``key`` signed it."""
        return verified(key, self.signature, self.text())  # type: ignore[attr-defined]

    def text(self) -> bytes:
        """What is signed."""
        return DOMAIN + self._content

    def digest(self) -> bytes:
        """sha256 of what is signed, and of the signature."""
        return hashlib.sha256(self.text() + self.signature).digest()  # type: ignore[attr-defined]

    @cached_property
    def _content(self) -> bytes:
        """A masked update is large, and looked at once for its signature and its digest."""
        bare = [_plain(getattr(self, f.name)) for f in fields(self) if f.name != "signature"]
        return hashlib.sha256(msgpack.packb([self.TYPE, *bare])).digest()

    def __post_init__(self) -> None:
        _name(self.device)
        _octets("terms", self.terms, 32)
        _octets("signature", self.signature, 0, SIGNATURE_BYTES)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Advert(_Signed):
    """A device takes part: its two public X25519 keys of this round, its badge, and its mask (bitmaps, empty for none).

    ``mask_key`` agrees on masks, ``share_key`` seals shares."""

    TYPE = "advert"
    mask_key: bytes
    share_key: bytes
    identity: bytes
    badge: bytes = field(repr=False)
    mask: bytes = field(repr=False)
    signature: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mask_key", "share_key", "identity"):
            _octets(name, getattr(self, name), 32)
        if self.mask_key == self.share_key:
            raise WireError(f"secure: {self.device!r} gives one key for two purposes")
        _octets("badge", self.badge, SIGNATURE_BYTES)
        _octets("mask", self.mask, most=MOST_MASK)

    @property
    def keys(self) -> tuple[tuple[str, bytes], ...]:
        """Those that no other device of the cohort may have, and what for: whom one signs for is known to all."""
        return ("agree", self.mask_key), ("agree", self.share_key), ("sign", self.identity)


@dataclass(frozen=True)
class Cohort(_Message):
    """All who take part, sorted by name, with what they said: sent to each of them."""

    TYPE = "cohort"
    adverts: tuple[bytes, ...] = field(repr=False)

    def __post_init__(self) -> None:
        _list("cohort", self.adverts, MOST_DEVICES)
        for one in self.adverts:
            _octets("cohort advert", one, most=MOST_MASK + 1024)

    @property
    def keys(self) -> list[tuple[str, bytes]]:
        """All keys of these devices, each as often as it comes."""
        adverts = [decode(data) for data in self.adverts]
        return [key for one in adverts if isinstance(one, Advert) for key in one.keys]


@dataclass(frozen=True)
class Shares(_Signed):
    """A device's secrets, shared: one sealed box for each neighbour, and commitments (sha256) to what its shares give.

    ``cohort`` is the digest of the :class:`Cohort` that it is made for."""

    TYPE = "shares"
    cohort: bytes
    commitments: tuple[bytes, ...] = field(repr=False)
    boxes: tuple[tuple[str, bytes], ...] = field(repr=False)
    signature: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _octets("cohort", self.cohort, 32)
        _list("commitments", self.commitments, MOST_SEEDS)
        for one in self.commitments:
            _octets("commitment", one, 32)
        _pairs("boxes", self.boxes, most=MOST_BOX)


@dataclass(frozen=True)
class Delivery(_Message):
    """To one device: who shared secrets, sorted, and the boxes that they sealed for it."""

    TYPE = "delivery"
    members: tuple[str, ...]
    boxes: tuple[tuple[str, bytes], ...] = field(repr=False)

    def __post_init__(self) -> None:
        _names("members", self.members)
        _pairs("boxes", self.boxes, most=MOST_BOX)


@dataclass(frozen=True)
class Masked(_Signed):
    """A device's update under its masks (little-endian), and beside it weights and metrics under masks of their own.

    ``members`` is the digest of cohort and members that the masks are made for."""

    TYPE = "masked"
    members: bytes
    values: bytes = field(repr=False)
    side: bytes = field(repr=False)
    signature: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _octets("members", self.members, 32)
        _octets("values", self.values, most=MOST_VALUES)
        _octets("side", self.side, most=MOST_SIDE)


@dataclass(frozen=True)
class Survivors(_Message):
    """Whose updates came, sorted: sent to each of them, to be agreed on."""

    TYPE = "survivors"
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _names("survivors", self.names)


@dataclass(frozen=True)
class Agreed(_Signed):
    """A device's word that these are the survivors, and no others; it gives it once in a round."""

    TYPE = "agreed"
    members: bytes
    survivors: bytes
    signature: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _octets("members", self.members, 32)
        _octets("survivors", self.survivors, 32)


@dataclass(frozen=True)
class Agreement(_Message):
    """The words of those who agreed: sent to each of them."""

    TYPE = "agreement"
    signatures: tuple[tuple[str, bytes], ...] = field(repr=False)

    def __post_init__(self) -> None:
        _pairs("signatures", self.signatures, SIGNATURE_BYTES)


@dataclass(frozen=True)
class Opening(_Signed):
    """Shares that a device gives: of survivors those of the seeds of tiers that open, of the others that of their key.

    A survivor's shares are one after another, in the order of the seeds that open. Never both kinds for one device."""

    TYPE = "opening"
    members: bytes
    seeds: tuple[tuple[str, bytes], ...] = field(repr=False)
    keys: tuple[tuple[str, bytes], ...] = field(repr=False)
    signature: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _octets("members", self.members, 32)
        _pairs("seeds", self.seeds, most=MOST_SEEDS * SHARE_BYTES)
        _pairs("keys", self.keys, SHARE_BYTES)


Message = Advert | Cohort | Shares | Delivery | Masked | Survivors | Agreed | Agreement | Opening
ALL: tuple[type[Message], ...] = (
    Advert,
    Cohort,
    Shares,
    Delivery,
    Masked,
    Survivors,
    Agreed,
    Agreement,
    Opening,
)
LARGEST = MOST_VALUES + MOST_SIDE + 1024


def decode(data: bytes, most: int = LARGEST) -> Message:
    """The message that ``encode`` wrote. Raises :class:`TooLarge` above ``most`` bytes and :class:`WireError` for all
    that is no message."""
    if len(data) > most:
        raise TooLarge(f"secure: a message of {len(data)} bytes is above {most}")
    with reading("secure message"):
        found = unpack(data, "secure message")
        kind = next((k for k in ALL if isinstance(found, list) and found and found[0] == k.TYPE), None)
        if kind is None:
            raise WireError("secure: this is no message of a secure round")
        return kind._of(found[1:])


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _name(value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 36:
        raise WireError(f"secure: device={shown(value)} must be a name of at most 36 letters")


def _octets(name: str, value: object, *sizes: int, most: int | None = None) -> None:
    good = isinstance(value, bytes) and (not sizes or len(value) in sizes) and (most is None or len(value) <= most)
    if not good:
        rule = " or ".join(map(str, sizes)) if sizes else f"at most {most}"
        raise WireError(f"secure: {name} must be {rule} bytes, got {shown(value, 20)}")


def _list(name: str, value: object, most: int) -> None:
    if not isinstance(value, tuple) or len(value) > most:
        raise WireError(f"secure: {name} must be a list of at most {most}")


def _names(what: str, value: object) -> None:
    _list(what, value, MOST_DEVICES)
    for one in value:  # type: ignore[attr-defined]
        _name(one)
    if list(value) != sorted({*value}):  # type: ignore[call-overload,misc]
        raise WireError(f"secure: {what} must be sorted, each name once")


def _pairs(what: str, value: object, *sizes: int, most: int | None = None) -> None:
    _list(what, value, MOST_DEVICES)
    for one in value:  # type: ignore[attr-defined]
        if not isinstance(one, tuple) or len(one) != 2:
            raise WireError(f"secure: {what} must hold pairs of a name and bytes")
        _name(one[0])
        _octets(what, one[1], *sizes, most=most)
    names = [name for name, _ in value]  # type: ignore[attr-defined]
    if names != sorted({*names}):
        raise WireError(f"secure: {what} must be sorted, each name once")
