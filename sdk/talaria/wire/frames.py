"""The envelope of everything that travels: ``"FLF1" | u16 header | msgpack header | payload | crc32``.

A frame is whole in itself. MQTT 5 properties may repeat parts of it as hints; nothing reads them, so the
same bytes work over MQTT 3.1.1.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import msgpack

from talaria.errors import TooLarge, WireError
from talaria.foreign import DEPTH, named, reading, shallow, shown
from talaria.wire.crc import crc32_of_both
from talaria.wire.signing import SIGNATURE_BYTES, Signer, verified

MAGIC = b"FLF1"
VERSION = 3
MAX_HEADER = 1024
MAX_PAYLOAD = 1024 * 1024
"""Of a chunk; a message has less."""
OVERHEAD = len(MAGIC) + 2 + 4
MAX_FRAME = OVERHEAD + MAX_HEADER + MAX_PAYLOAD
LARGEST_INT = 2**53


@dataclass(frozen=True)
class Header:
    """Who says what, and when.

    ``device`` is the device spoken of (empty on the coordinator's own topics). ``boot`` counts a device's
    connections; on what a coordinator sends it is its epoch. ``seq`` counts frames within that boot. ``xfer``, ``idx``
    and ``off`` place a chunk. ``sig`` signs the other fields and the payload.
    """

    type: str
    fleet: str
    device: str = ""
    boot: int = 0
    seq: int = 0
    attempt: int = 0
    xfer: str = ""
    idx: int = 0
    off: int = 0
    sig: bytes = b""

    def __post_init__(self) -> None:
        for name, longest in (("type", 16), ("fleet", 36), ("device", 36), ("xfer", 32)):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > longest:
                raise WireError(f"frame: header {name}={shown(value)} must be text of at most {longest}")
        for name in ("boot", "seq", "attempt", "idx", "off"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= LARGEST_INT:
                raise WireError(f"frame: header {name}={shown(value)} must be a whole number in 0..2^53")
        if not isinstance(self.sig, bytes) or len(self.sig) not in (0, SIGNATURE_BYTES):
            raise WireError(f"frame: the signature must have {SIGNATURE_BYTES} bytes or none")


@dataclass(frozen=True)
class Frame:
    """A header and at most 1 MiB of payload: of what came a view, for most of it are chunks, which go to a file."""

    header: Header
    payload: bytes | memoryview


_KEYS = {
    "t": "type",
    "f": "fleet",
    "d": "device",
    "b": "boot",
    "s": "seq",
    "a": "attempt",
    "x": "xfer",
    "i": "idx",
    "o": "off",
    "k": "sig",
}


def encode_frame(
    header: Header, payload: bytes | memoryview, signer: Signer | None = None, crc: int | None = None
) -> bytes:
    """The bytes of one frame, signed where a ``signer`` is given; ``crc`` is the payload's crc32 where that is known.
    Raises :class:`TooLarge` beyond 1 MiB."""
    if len(payload) > MAX_PAYLOAD:
        raise TooLarge(f"frame: payload of {len(payload)} bytes is above {MAX_PAYLOAD}; send it in chunks")
    plain = _pack(header, len(payload), b"")
    head = plain if signer is None else _pack(header, len(payload), signer.sign(b"".join((plain, payload))))
    if len(head) > MAX_HEADER:
        raise TooLarge(f"frame: header of {len(head)} bytes is above {MAX_HEADER}; shorten the names")
    begin = MAGIC + struct.pack("<H", len(head)) + head
    first = zlib.crc32(begin)
    whole = zlib.crc32(payload, first) if crc is None else crc32_of_both(first, crc, len(payload))
    return b"".join((begin, payload, struct.pack("<I", whole)))


def decode_frame(data: bytes) -> Frame:
    """The frame that ``data`` holds, nothing before it and nothing after.

    Raises :class:`TooLarge` before reading a header or payload above its bound and :class:`WireError` for
    every other damage: wrong magic, truncation, trailing bytes, wrong checksum, unknown header fields.
    """
    with reading("frame"):
        return _decoded(data)


def _decoded(data: bytes) -> Frame:
    if len(data) > MAX_FRAME:
        raise TooLarge(f"frame: {len(data)} bytes are above {MAX_FRAME}; refused unread")
    if len(data) < OVERHEAD or data[:4] != MAGIC:
        raise WireError(f"frame: begins with {data[:4]!r}, not {MAGIC!r}; this is no Talaria frame")
    (size,) = struct.unpack_from("<H", data, 4)
    if size > MAX_HEADER:
        raise TooLarge(f"frame: declares a header of {size} bytes, above {MAX_HEADER}")
    if OVERHEAD + size > len(data):
        raise WireError(f"frame: truncated, {len(data)} bytes cannot hold a header of {size}")
    (crc,) = struct.unpack_from("<I", data, len(data) - 4)
    if crc != zlib.crc32(memoryview(data)[:-4]):
        raise WireError("frame: the checksum does not match; it was damaged on its way, send it again")
    fields = unpack(data[6 : 6 + size], "frame header")
    if not isinstance(fields, dict):
        raise WireError("frame: the header is not a map")
    version, length = fields.pop("v", None), fields.pop("l", None)
    if version != VERSION:
        raise WireError(f"frame: version {shown(version, 20)} is unknown; this side speaks {VERSION}")
    payload = memoryview(data)[6 + size : -4]
    if length != len(payload):
        raise WireError(f"frame: declares a payload of {shown(length, 20)} bytes but holds {len(payload)}")
    if set(fields) - set(_KEYS) or not {"t", "f"} <= set(fields):
        raise WireError(f"frame: header fields {named(fields)} are not those of version {VERSION}")
    return Frame(Header(**{_KEYS[k]: v for k, v in fields.items()}), payload)


def signed_by(frame: Frame, public: bytes) -> bool:
    """True where the holder of ``public`` signed this frame."""
    return verified(public, frame.header.sig, b"".join((_pack(frame.header, len(frame.payload), b""), frame.payload)))


def _pack(header: Header, length: int, sig: bytes) -> bytes:
    fields: dict[str, Any] = {"v": VERSION, "l": length}
    for short, name in _KEYS.items():
        value = sig if name == "sig" else getattr(header, name)
        if value or short in ("t", "f"):
            fields[short] = value
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack(data: bytes | memoryview, what: str, depth: int = DEPTH) -> Any:
    """One msgpack value with text keys, bounded by the length of ``data`` and at most ``depth`` deep;
    :class:`WireError` for all else."""
    bound = len(data)
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=bound,
            max_bin_len=bound,
            max_array_len=bound,
            max_map_len=bound // 2,
            max_ext_len=0,
        )
    except (msgpack.exceptions.UnpackException, ValueError, TypeError, RecursionError) as why:
        raise WireError(f"{what}: not valid msgpack ({type(why).__name__}: {str(why)[:80]})") from None
    if not shallow(value, depth):
        raise WireError(f"{what}: lists and maps nest deeper than {depth}")
    return value
