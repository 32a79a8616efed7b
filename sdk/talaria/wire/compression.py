"""zstd level 1 around bytes where it pays, and a reader that never grows beyond our own cap."""

from __future__ import annotations

import sys
import threading

from talaria.errors import TooLarge, WireError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAGIC = b"\x28\xb5\x2f\xfd"
MAX_WINDOW = 2**23
_LEVEL = 1
_PROBE = 64 * 1024
_GAIN = 0.95
_own = threading.local()


def squeeze(data: bytes) -> bytes:
    """``data`` in one zstd frame, or as it is where a probe of 64 KiB from its middle gains less than 5 %.

    Data that begins as a frame does is always framed, so that it is not taken for one.
    """
    if data.startswith(MAGIC):
        return _framed(data)
    start = max(0, (len(data) - _PROBE) // 2)
    probe = data[start : start + _PROBE]
    tried = _framed(probe)
    if not probe or len(tried) > _GAIN * len(probe):
        return data
    packed = tried if len(probe) == len(data) else _framed(data)
    return packed if len(packed) < len(data) else data


def _framed(data: bytes) -> bytes:
    """``data`` in one frame, by a compressor that each thread keeps: to make one takes as long as 10 KiB."""
    if not hasattr(_own, "compressor"):
        _own.compressor = zstd.ZstdCompressor(_LEVEL)
    found: bytes = _own.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
    return found


def unsqueeze(data: bytes, cap: int) -> bytes:
    """What :func:`squeeze` was given, at most ``cap`` bytes.

    The frame must state its size; the size and the window are checked first, and no more than the size is ever made.
    Raises :class:`TooLarge` above ``cap``, :class:`WireError` for damage or anything after the frame.
    """
    if not data.startswith(MAGIC):
        if len(data) > cap:
            raise TooLarge(f"{len(data)} bytes are above the limit of {cap}")
        return data
    try:
        size = zstd.get_frame_info(data).decompressed_size
        if size is None:
            raise WireError("zstd frame does not state its size; compress it in one piece")
        if size > cap:
            raise TooLarge(f"zstd frame declares {size} bytes, above the limit of {cap}")
        if (window := _window(data, size)) > MAX_WINDOW:
            raise TooLarge(f"zstd frame declares a window of {window} bytes, above {MAX_WINDOW}")
        if zstd.get_frame_size(data) != len(data):
            raise WireError("bytes follow the zstd frame, or it is truncated")
        reader = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
        out = reader.decompress(data, max_length=size + 1)
    except zstd.ZstdError as why:
        raise WireError(f"zstd frame is damaged or its window is above {MAX_WINDOW} bytes: {why}") from None
    if len(out) > size:
        raise TooLarge(f"zstd frame holds more than the {size} bytes that it declares")
    if len(out) != size or not reader.eof:
        raise WireError(f"zstd frame declares {size} bytes but holds {len(out)}")
    return out


def _window(data: bytes, size: int) -> int:
    """How far back a frame of ``size`` bytes may refer (RFC 8878, section 3.1.1.1)."""
    if data[4] >> 5 & 1:
        return size
    whole = 1 << (10 + (data[5] >> 3))
    return whole + (data[5] & 7) * whole // 8
