"""zstd around bytes where it pays, and a reader that never grows beyond our own cap.

Of floating-point numbers only the highest byte repeats, which has the sign and most of the exponent: that of each word
is in the frame, and the others lie behind it as they are. So they are fewer bytes, in less time, than all in a frame.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from talaria.errors import TooLarge, WireError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAGIC = b"\x28\xb5\x2f\xfd"
MAX_WINDOW = 2**23
_PROBE = 64 * 1024
_GAIN = 0.05
_FULL = 0.9
_PLAIN: dict[int, int] = {zstd.CompressionParameter.compression_level: 1}
_HIGH = _PLAIN | {zstd.CompressionParameter.min_match: 7, zstd.CompressionParameter.hash_log: 6}
"""Exponents repeat one by one, hardly as words: the coder gets them sooner where few matches are looked for."""
_own = threading.local()


def squeeze(data: bytes, word: int = 1) -> bytes:
    """``data`` in one zstd frame, or as it is where a probe of 64 KiB from its middle gains less than 5 % of all.

    With a ``word`` of 2 or 4 bytes the frame has the last byte of each word; the first of each, the next of each, and
    what is no whole word follow. Data that begins as a frame does is always framed, so that it is not taken for one.
    """
    if data.startswith(MAGIC):
        return framed(data, 1)
    whole = len(data) // word * word
    places = np.ascontiguousarray(np.frombuffer(data, np.uint8, whole).reshape(-1, word).T)
    if word > 1 and np.count_nonzero(places[0]) < _FULL * places.shape[1]:
        return squeeze(data)  # many words are zero, or short: all their bytes repeat
    high = _paying(places[-1].data, word)
    return data if high is None else b"".join((high, places[:-1].data, data[whole:]))


def _paying(part: memoryview, word: int) -> bytes | None:
    """``part``, a byte of each ``word``, in one frame; None where that gains less than 5 % of the words."""
    start = max(0, (len(part) - _PROBE) // 2)
    probe = part[start : start + _PROBE]
    tried = framed(probe, word)
    if len(probe) - len(tried) < max(1, _GAIN * word * len(probe)):
        return None
    packed = tried if len(probe) == len(part) else framed(part, word)
    return packed if len(packed) < len(part) else None


def framed(data: bytes | memoryview, word: int = 1) -> bytes:
    """``data``, a byte of each ``word``, in one frame, by a compressor that each thread keeps: making one takes as
    long as 10 KiB."""
    if not hasattr(_own, "compressors"):
        _own.compressors = [zstd.ZstdCompressor(options=options) for options in (_PLAIN, _HIGH)]
    found: bytes = _own.compressors[word > 1].compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return found


def unsqueeze(data: bytes, cap: int) -> bytes:
    """What :func:`squeeze` was given, at most ``cap`` bytes.

    The frame must state its size; the size and the window are checked first, and no more than the size is ever made.
    Raises :class:`TooLarge` above ``cap``, :class:`WireError` for damage or anything after the frame but the other
    bytes of words.
    """
    if not data.startswith(MAGIC):
        if len(data) > cap:
            raise TooLarge(f"{len(data)} bytes are above the limit of {cap}")
        return data
    with _reading():
        size, end = _measured(memoryview(data), cap)
        others, rest = divmod(len(data) - end, size) if size else (0, len(data) - end)
        if others not in (0, 1, 3) or rest > others:
            raise WireError(f"{len(data) - end} bytes follow the zstd frame of {size}, or it is truncated")
        if size + len(data) - end > cap:
            raise TooLarge(f"zstd frame and what follows it are {size + len(data) - end} bytes, above {cap}")
        out = _opened(memoryview(data)[:end], size)
    if not others:
        return out
    words = np.empty((size, others + 1), np.uint8)
    for place in range(others):  # at a fifth of the time that a transposed copy takes
        words[:, place] = np.frombuffer(data, np.uint8, size, end + place * size)
    words[:, -1] = np.frombuffer(out, np.uint8)
    return b"".join((words.data, data[len(data) - rest :]))


def unframed(data: memoryview, size: int) -> tuple[bytes, memoryview]:
    """The ``size`` bytes in the frame that ``data`` begins with, and what follows it. Raises :class:`WireError` for
    anything else, before more is made."""
    if data[: len(MAGIC)] != MAGIC:
        raise WireError("a zstd frame is missing; damaged")
    with _reading():
        found, end = _measured(data, size)
        if found != size:
            raise WireError(f"zstd frame declares {found} bytes, not {size}; damaged")
        return _opened(data[:end], size), data[end:]


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except zstd.ZstdError as why:
        raise WireError(f"zstd frame is damaged or its window is above {MAX_WINDOW} bytes: {why}") from None


def _measured(data: memoryview, cap: int) -> tuple[int, int]:
    """Bytes in the frame that ``data`` begins with, and of it."""
    size = zstd.get_frame_info(data).decompressed_size
    if size is None:
        raise WireError("zstd frame does not state its size; compress it in one piece")
    if size > cap:
        raise TooLarge(f"zstd frame declares {size} bytes, above the limit of {cap}")
    if (window := _window(data, size)) > MAX_WINDOW:
        raise TooLarge(f"zstd frame declares a window of {window} bytes, above {MAX_WINDOW}")
    return size, zstd.get_frame_size(data)


def _opened(frame: memoryview, size: int) -> bytes:
    reader = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
    out: bytes = reader.decompress(frame, max_length=size + 1)
    if len(out) > size:
        raise TooLarge(f"zstd frame holds more than the {size} bytes that it declares")
    if len(out) != size or not reader.eof:
        raise WireError(f"zstd frame declares {size} bytes but holds {len(out)}")
    return out


def _window(data: memoryview, size: int) -> int:
    """How far back a frame of ``size`` bytes may refer (RFC 8878, section 3.1.1.1)."""
    if data[4] >> 5 & 1:
        return size
    whole = 1 << (10 + (data[5] >> 3))
    return whole + (data[5] & 7) * whole // 8
