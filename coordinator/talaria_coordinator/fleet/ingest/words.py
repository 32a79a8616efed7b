"""What the coordinator and its ingest workers say to one another, over a socket that only the two have."""

from __future__ import annotations

from asyncio import StreamReader
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass, field
from typing import Any

import msgpack

from talaria.errors import StateError, WireError
from talaria.wire.chunks import Cut

LARGEST = 16 << 20
"""Bytes that wait to be read at most."""


# -- from the coordinator


@dataclass(frozen=True)
class Follow:
    """Listen for whatever this device uploads: it is yours."""

    device: str


@dataclass(frozen=True)
class Take:
    """Take the chunks of this upload, and say by :class:`Has` that you do."""

    device: str
    xfer: str
    size: int
    chunk: int
    sha256: bytes
    hashes: bytes = field(repr=False)

    @property
    def cut(self) -> Cut:
        """How it is cut."""
        return Cut(self.size, self.chunk, self.sha256, self.hashes)


@dataclass(frozen=True)
class Check:
    """This upload is complete: check it against its round and the global model that it began from, and keep it."""

    device: str
    xfer: str
    round: int
    base_digest: str


@dataclass(frozen=True)
class Send:
    """Send a device these chunks, which it asked for, of the blob with this sha256; ``epoch`` is the coordinator's."""

    device: str
    xfer: str
    epoch: int
    size: int
    chunk: int
    sha256: bytes
    indices: list[int]


@dataclass(frozen=True)
class Fold:
    """Fold these updates, each as device, attempt, version and sha256, into the global model of this digest, which
    ``round`` made, with this server state, in this order."""

    model: str
    server: str
    round: int
    counted: list[list[Any]] = field(repr=False)


@dataclass(frozen=True)
class Drop:
    """This upload, and what is here of it, is not needed any more."""

    device: str
    xfer: str


# -- from a worker


@dataclass(frozen=True)
class Linked:
    """The worker's link to the broker is up, or why it is not."""

    up: bool
    reason: str = ""


@dataclass(frozen=True)
class Has:
    """The chunks of an upload are taken from now on; these lie here intact already."""

    device: str
    xfer: str
    chunks: list[int]


@dataclass(frozen=True)
class Came:
    """These chunks came, are verified and kept; ``size`` bytes with their topics."""

    device: str
    xfer: str
    chunks: list[int]
    size: int


@dataclass(frozen=True)
class Odd:
    """What came that is no chunk wanted: what follows from it, the protocol decides."""

    topic: str
    payload: bytes = field(repr=False)
    retained: bool = False


@dataclass(frozen=True)
class Kept:
    """A complete update fits, and its bytes are durable; ``found`` is what it says of itself."""

    device: str
    xfer: str
    found: str = field(repr=False)


@dataclass(frozen=True)
class Unfit:
    """A complete update will never count."""

    device: str
    xfer: str
    reason: str


@dataclass(frozen=True)
class Torn:
    """A complete update does not have its sha256; these chunks are intact."""

    device: str
    xfer: str
    chunks: list[int]


@dataclass(frozen=True)
class Sum:
    """The blobs of the next global model and server state, in which all updates count; empty where that is not so, and
    the coordinator must see for itself."""

    model: str
    server: str


@dataclass(frozen=True)
class Sent:
    """So many bytes went out, with their topics."""

    size: int


@dataclass(frozen=True)
class Trouble:
    """This machine refuses, and it is tried again; or the broker does, where it is about no ``device``."""

    device: str
    error: str


@dataclass(frozen=True)
class Alive:
    """The worker goes on, and has nothing to say."""


Verdict = Kept | Unfit | Torn
Order = Follow | Take | Check | Send | Fold | Drop
Word = Order | Linked | Has | Came | Odd | Kept | Unfit | Torn | Sum | Sent | Trouble | Alive
_KINDS = (Follow, Take, Check, Send, Fold, Drop, Linked, Has, Came, Odd, Kept, Unfit, Torn, Sum, Sent, Trouble, Alive)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def packed(word: Word) -> bytes:
    """The bytes of one word."""
    data: bytes = msgpack.packb([_NUMBERS[type(word)], *astuple(word)], unicode_errors="surrogatepass")
    return data


def told(word: Word) -> str:
    """What a worker's word says, for people."""
    match word:
        case Linked():
            return "it reaches the broker" if word.up else f"it does not reach the broker: {word.reason}"
        case Has():
            return f"an upload of {word.device} is awaited"
        case Came():
            return f"chunks of {word.device} came"
        case Kept():
            return f"an update of {word.device} is kept"
        case Unfit():
            return f"an update of {word.device} does not fit: {word.reason}"
        case Torn():
            return f"an update of {word.device} came damaged"
        case Sum():
            return "a round is folded" if word.model else "a round is left to the coordinator"
        case Sent():
            return "chunks of the global model went out"
        case Trouble():
            return f"with {word.device}: {word.error}"
    return "a message is handed on"


async def words(reader: StreamReader) -> AsyncIterator[Word]:
    """What the other side says, until it is gone. Raises :class:`~talaria.errors.WireError` for what no version of it
    says."""
    unpacker = msgpack.Unpacker(max_buffer_size=LARGEST, unicode_errors="surrogatepass")
    while True:
        try:
            data = await reader.read(1 << 16)
        except ConnectionError:
            return
        if not data:
            return
        try:
            unpacker.feed(data)
            heard = [_KINDS[number](*fields) for number, *fields in unpacker]
        except (msgpack.UnpackException, ValueError, TypeError, IndexError) as error:
            raise WireError(f"ingest: the other side says what cannot be read ({error})") from None
        for word in heard:
            yield word


def require(word: Word, *kinds: type) -> None:
    """Raise :class:`~talaria.errors.StateError` for a word that this side does not hear."""
    if not isinstance(word, kinds):
        raise StateError(f"ingest: {type(word).__name__} is not for this side")
