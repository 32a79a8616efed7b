"""Moving large bytes one window at a time, the same way up and down.

The receiver asks for exactly the chunks it wants now, at most ``credit`` of them, and asks again when few of
them are left or none came for a while. The sender keeps no memory: it sends what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

from talaria.bitmaps import bits_of
from talaria.errors import WireError
from talaria.protocol import state_codec
from talaria.protocol.actions import SendChunks
from talaria.wire.chunks import Cut
from talaria.wire.frames import Frame, Header, encode_frame
from talaria.wire.messages import CHUNK, MAX_CHUNKS
from talaria.wire.topics import Topic

THIN = 16 * 1024
"""Bytes a second that a link has at least, until it is known how long a chunk takes."""
LONGEST_FIRST_S = 10.0
LONGEST_S = 60.0


def transfer_of(sha256: bytes) -> str:
    """The name of the transfer of these bytes: 16 hex digits, the same after a reboot."""
    return sha256.hex()[:16]


@dataclass
class Receiver:
    """What came of one transfer, and what was asked for. Plain data."""

    cut: Cut
    have: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    touched: float = 0.0
    """When a chunk last came or was asked for."""
    moved: float = 0.0
    """When a new chunk last came."""
    bad: int = 0
    slowest: float = field(default=0.0, compare=False, metadata=state_codec.of_this_life())
    """Seconds that a chunk has taken at most; 0 while that is not known. What an earlier transfer took may be given."""
    tries: int = field(default=0, compare=False, metadata=state_codec.of_this_life())
    """How often chunks were asked for again since one came."""
    since: float = field(default=0.0, compare=False, metadata=state_codec.of_this_life())
    """When the chunk that is on its way was asked for, or the one before it came."""

    @property
    def whole(self) -> bool:
        return len(self.have) == self.cut.count

    def take(self, frame: Frame, now: float) -> bool:
        """True where this chunk is new and right. Raises :class:`WireError` (and counts it) where it is wrong."""
        index, offset, data = frame.header.idx, frame.header.off, frame.payload
        try:
            place, _ = self.cut.place(index)
            if place != offset:
                raise WireError(f"chunk {index} says offset {offset}; its place is {place}")
            if not self.cut.fits(index, data):
                raise WireError(f"chunk {index} does not match its sha256 or length in the manifest")
        except WireError:
            self.bad += 1
            self.asked.discard(index)
            raise
        self.asked.discard(index)
        self.touched = now
        if index in self.have:
            return False
        self.slowest = max(now - max(self.since, self.moved), self.slowest if self.have else 0.0)
        self.tries = 0
        self.have.add(index)
        self.moved = now
        return True

    def patience(self, wait: float) -> float:
        """Seconds without a chunk after which it is asked for again: ``wait`` at least, and so long that one over a
        thin link comes in time. What is asked for twice comes twice, and holds up all behind it."""
        first = min(LONGEST_FIRST_S, min(self.cut.chunk, self.cut.size) / THIN)
        return max(wait, min(LONGEST_S, 2.0 ** min(self.tries, 32) * (2 * self.slowest or first)))

    def overdue(self, now: float, wait: float) -> bool:
        """Whether nothing has come for longer than the :meth:`patience`."""
        return now - self.touched >= self.patience(wait)

    def window(self, now: float, credit: int, again: bool = False) -> bytes:
        """The bitmap to ask for now, or ``b""``: a new half window when half of the last has come, or, with
        ``again``, all that is outstanding once more."""
        if again:
            self.asked.clear()
            self.tries += 1
        if self.whole or len(self.asked) > credit // 2:
            return b""
        room = credit - len(self.asked)
        ask: set[int] = set()
        for index in range(self.cut.count):
            if len(ask) == room:
                break
            if index not in self.have and index not in self.asked:
                ask.add(index)
        if not ask:
            return b""
        if not (self.asked or again):  # asked for once more, it may be the first one that comes
            self.since = now
        self.asked |= ask
        self.touched = now
        return bits_of(ask, self.cut.count)


class Known:
    """That bytes are known to be what was cut, since they lie in memory: none are hashed once more for each who asks,
    and the crc32 of a chunk is found once."""

    def __init__(self) -> None:
        self._sums: dict[tuple[bytes, int, int], int] = {}

    def crc(self, cut: Cut, index: int, data: bytes | memoryview) -> int:
        """The crc32 of chunk ``index``, which is ``data``."""
        key = cut.sha256, cut.chunk, index
        if key not in self._sums:
            if len(self._sums) == MAX_CHUNKS:
                self._sums.clear()  # of models of before, mostly
            self._sums[key] = crc32(data)
        return self._sums[key]


def chunk_frames(
    action: SendChunks, read: Callable[[int, int], bytes | memoryview], *, known: Known | None = None
) -> Iterator[tuple[str, bytes]]:
    """``(topic, payload)`` of each chunk that ``action`` names; ``read(offset, length)`` gives the bytes.

    A chunk that no longer matches the cut is a :class:`WireError`: the file behind it changed, unless it is ``known``.
    """
    for index in action.indices:
        offset, length = action.cut.place(index)
        data = read(offset, length)
        if len(data) != length or (known is None and not action.cut.fits(index, data)):
            raise WireError(f"chunk {index} of {action.xfer} changed since it was offered; encode it again")
        device = "" if action.kind == "m" else action.device
        header = Header(
            CHUNK,
            action.fleet,
            device,
            boot=action.boot,
            attempt=action.attempt,
            xfer=action.xfer,
            idx=index,
            off=offset,
        )
        if action.kind == "m":
            topic = Topic(action.fleet, "m", model8=action.xfer[:8], index=index)
        else:
            topic = Topic(action.fleet, "up" if action.kind == "up" else "dn", action.device, action.xfer)
        yield str(topic), encode_frame(header, data, crc=None if known is None else known.crc(action.cut, index, data))


@dataclass
class ReplayWindow:
    """Remembers which ``(boot, seq)`` were seen: nothing counts twice, nothing old counts at all.

    The newest 64 numbers are told apart one by one (as in RFC 4303, section 3.4.3); older ones are refused.
    """

    boot: int = 0
    high: int = 0
    mask: int = 0

    def fresh(self, boot: int, seq: int) -> bool:
        """True the first time, for the newest boot only."""
        if boot < self.boot or seq < 1:
            return False
        if boot > self.boot:
            self.boot, self.high, self.mask = boot, 0, 0
        ahead = seq - self.high
        if ahead > 0:
            self.mask = 1 if ahead >= 64 else (self.mask << ahead | 1) & (2**64 - 1)
            self.high = seq
            return True
        if -ahead >= 64 or self.mask >> -ahead & 1:
            return False
        self.mask |= 1 << -ahead
        return True
