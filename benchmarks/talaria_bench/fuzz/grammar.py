"""What somebody says who has a broker and no key: frames by the grammar with anything in them, real ones changed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

import msgpack

from talaria.wire import messages
from talaria.wire.frames import MAGIC, MAX_FRAME, MAX_HEADER, VERSION, Header, encode_frame
from talaria.wire.signing import Signer
from talaria_bench.fuzz.target import NESTED
from talaria_bench.fuzz.wire import TYPES, every_message

Said = tuple[str, bytes, bool]
"""Topic, payload, and whether it is retained."""
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**53,
    2**64 - 1,
    1e308,
    float("nan"),
    "",
    "x" * 300,
    b"\xff" * 64,
    [],
    {},
    [[[]]],
    "\x00/+#",
)
LARGEST = MAX_FRAME + 1000


class Stranger:
    """Speaks in the name of all ``devices`` of ``fleet`` and of its coordinator; ``hears`` real messages to change."""

    def __init__(self, seed: int, fleet: str, devices: Sequence[str]) -> None:
        self._random, self._fleet, self._devices = Random(seed), fleet, tuple(devices)
        self._signer = Signer.of(bytes(31) + b"\x07")
        self._heard: list[tuple[str, bytes]] = []

    def hears(self, topic: str, payload: bytes) -> None:
        """Remember some of what was really said."""
        if len(self._heard) < 256:
            self._heard.append((topic, payload))
        else:
            self._heard[self._random.randrange(256)] = topic, payload

    def says(self) -> Said:
        """The next message."""
        draw = self._random
        ways = (self._changed, self._changed, self._replayed, self._spoken, self._odd, self._nested, self._noise)
        topic, payload = draw.choice(ways)()
        return topic, payload, draw.random() < 0.3

    def _topic(self) -> str:
        draw = self._random
        device, name = draw.choice((*self._devices, "stranger")), f"{draw.getrandbits(64):016x}"
        below = ("co/state", "co/model", f"m/{name[:8]}/0", *(f"d/{device}/{kind}" for kind in ("state", "evt", "cmd")))
        return f"fl/1/{self._fleet}/{draw.choice((*below, f'd/{device}/up/{name}', f'd/{device}/dn/{name}'))}"

    def _owner(self, topic: str) -> str:
        parts = topic.split("/")
        return parts[4] if parts[3] == "d" else ""

    def _changed(self) -> tuple[str, bytes]:
        """A real message with some bytes changed, cut off or put in; mostly with a checksum that fits again."""
        draw = self._random
        topic, payload = self._replayed()
        data = bytearray(payload or b"\0")
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data) + 1)
            data[at : at + draw.randint(0, 2)] = draw.choice((draw.randbytes(draw.randint(0, 3)), *NESTED[:4]))
        data = data[: draw.randint(0, len(data))] if draw.random() < 0.2 else data
        if draw.random() < 0.7 and len(data) > 4:
            data[-4:] = struct.pack("<I", zlib.crc32(bytes(data[:-4])))
        return topic, bytes(data)

    def _replayed(self) -> tuple[str, bytes]:
        """The very bytes that were said, on their topic or on another."""
        if not self._heard:
            return self._noise()
        topic, payload = self._random.choice(self._heard)
        return (topic if self._random.random() < 0.8 else self._topic()), payload

    def _spoken(self) -> tuple[str, bytes]:
        """A perfect message that no key of the fleet signed."""
        draw, topic = self._random, self._topic()
        message = draw.choice(every_message())
        boot, seq, number = (draw.choice((0, 1, 2, 99, 2**53)) for _ in range(3))
        header = Header(message.TYPE, self._fleet, self._owner(topic), boot, seq, number)
        return topic, encode_frame(header, messages.encode_message(message), draw.choice((None, self._signer)))

    def _odd(self) -> tuple[str, bytes]:
        """A frame whose header or message holds what it never should."""
        draw, topic = self._random, self._topic()
        head: dict[str, Any] = {
            "v": VERSION,
            "t": draw.choice(TYPES),
            "f": self._fleet,
            "d": self._owner(topic),
            "b": 1,
        }
        told: Any = {"attempt": 1, "reason": "odd"}
        for where in (head, told):
            if draw.random() < 0.6:
                where[draw.choice((*where, "x"))] = draw.choice(ODD)
        payload = msgpack.packb(told)
        return topic, _framed(msgpack.packb({"l": len(payload)} | head), payload)

    def _nested(self) -> tuple[str, bytes]:
        """Lists in lists, in the header, in a message, or in a profile."""
        draw, topic = self._random, self._topic()
        deep = draw.choice(NESTED)
        head = {"v": VERSION, "l": 0, "t": "device", "f": self._fleet, "d": self._owner(topic)}
        if draw.random() < 0.5:
            packed = msgpack.packb(head).replace(b"\xa1" + draw.choice(b"vltd").to_bytes(1, "big"), b"\xa1q", 1)
            return topic, _framed(bytes([packed[0] + 1]) + packed[1:] + b"\xa1v" + deep, b"")
        payload = msgpack.packb({"online": True, "key": b"", "process": b"", "profile": deep[:4000]})
        return topic, _framed(msgpack.packb(head | {"l": len(payload)}), draw.choice((payload, deep)))

    def _noise(self) -> tuple[str, bytes]:
        """Any bytes, few or very many."""
        draw = self._random
        size = draw.choice((0, 1, 10, 100, 1000, LARGEST if draw.random() < 0.1 else 5000))
        return self._topic(), draw.choice((b"", MAGIC)) + draw.randbytes(size)


def _framed(head: bytes, payload: bytes) -> bytes:
    """A frame with a right checksum around anything."""
    head = head[: MAX_HEADER + 64]
    whole = MAGIC + struct.pack("<H", len(head)) + head + payload
    return whole + struct.pack("<I", zlib.crc32(whole))
