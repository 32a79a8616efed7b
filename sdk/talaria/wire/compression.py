"""zstd level 1 around bytes where it pays, and a reader that never grows beyond our own cap."""

from __future__ import annotations

import io

import zstandard

from talaria.errors import TooLarge, WireError

MAGIC = b"\x28\xb5\x2f\xfd"
MAX_WINDOW = 2**23
_PROBE = 64 * 1024
_GAIN = 0.95


def squeeze(data: bytes) -> bytes:
    """``data`` in one zstd frame, or as it is where a probe of 64 KiB from its middle gains less than 5 %.

    Data that begins as a frame does is always framed, so that it is not taken for one.
    """
    packer = zstandard.ZstdCompressor(level=1)
    if data.startswith(MAGIC):
        return packer.compress(data)
    start = max(0, (len(data) - _PROBE) // 2)
    probe = data[start : start + _PROBE]
    tried = packer.compress(probe)
    if not probe or len(tried) > _GAIN * len(probe):
        return data
    packed = tried if len(probe) == len(data) else packer.compress(data)
    return packed if len(packed) < len(data) else data


def unsqueeze(data: bytes, cap: int) -> bytes:
    """What :func:`squeeze` was given, at most ``cap`` bytes.

    The frame must state its size; the size and the window are checked first, and the output is counted while
    it grows, because the library's own ``max_output_size`` is ignored when a size is stated. Raises
    :class:`TooLarge` above ``cap``, :class:`WireError` for damage or anything after the frame.
    """
    if not data.startswith(MAGIC):
        if len(data) > cap:
            raise TooLarge(f"{len(data)} bytes are above the limit of {cap}")
        return data
    try:
        frame = zstandard.get_frame_parameters(data)
        size = frame.content_size
        if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise WireError("zstd frame does not state its size; compress it in one piece")
        if size > cap:
            raise TooLarge(f"zstd frame declares {size} bytes, above the limit of {cap}")
        if frame.window_size > MAX_WINDOW:
            raise TooLarge(f"zstd frame declares a window of {frame.window_size} bytes, above {MAX_WINDOW}")
        if _frame_end(data, frame.has_checksum) != len(data):
            raise WireError("bytes follow the zstd frame, or it is truncated")
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(io.BytesIO(data))
        out = bytearray()
        while piece := reader.read(min(2**18, size + 1 - len(out))):
            out += piece
            if len(out) > size:
                raise TooLarge(f"zstd frame holds more than the {size} bytes that it declares")
    except zstandard.ZstdError as why:
        raise WireError(f"zstd frame is damaged or its window is above {MAX_WINDOW} bytes: {why}") from None
    if len(out) != size:
        raise WireError(f"zstd frame declares {size} bytes but holds {len(out)}")
    return bytes(out)


def _frame_end(data: bytes, checksum: bool) -> int:
    """Where the frame's last block ends, by the block headers alone (RFC 8878, section 3.1.1.2)."""
    at, last = zstandard.frame_header_size(data), False
    while not last:
        if at + 3 > len(data):
            return -1
        word = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
        if kind == 3:
            return -1
        at += 3 + (1 if kind == 1 else size)
    return at + (4 if checksum else 0)
